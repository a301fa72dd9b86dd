// Runs kernels k(data, out) under every schedule, for the sanitizers: run THREADS [FILE GRID BLOCK CLUSTER]...
// Prints how many findings each file's runs had.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ptxsim.h"

enum { WORDS = 16384, SHARED = 65536 };
static uint32_t data[WORDS], out[WORDS];

static char *read_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f) {
        perror(path);
        exit(2);
    }
    fseek(f, 0, SEEK_END);
    long size = ftell(f);
    rewind(f);
    char *text = calloc(1, (size_t)size + 1);
    if (!text || fread(text, 1, (size_t)size, f) != (size_t)size) exit(2);
    fclose(f);
    return text;
}

static int run(const char *path, unsigned grid, unsigned block, unsigned cluster, ptxsim_options options)
{
    char *text = read_file(path), error[512];
    ptxsim_module *m = ptxsim_parse(text, error, sizeof error);
    if (!m) {
        fprintf(stderr, "%s: %s\n", path, error);
        exit(2);
    }
    for (uint32_t i = 0; i < WORDS; i++) data[i] = i;
    uint64_t params[2] = {ptxsim_register(data, sizeof data, false), ptxsim_register(out, sizeof out, true)};
    ptxsim_launch launch = {.module = m,
                            .kernel = "k",
                            .grid = {grid, 1, 1},
                            .block = {block, 1, 1},
                            .cluster = {cluster, 1, 1},
                            .dynamic_shared = SHARED,
                            .params = params,
                            .params_size = sizeof params};
    ptxsim_report *report = ptxsim_run(&launch, 1, &options);
    int findings = report ? ptxsim_finding_count(report) : -1;
    ptxsim_report_free(report);
    for (int i = 0; i < 2; i++) ptxsim_unregister(params[i]);
    ptxsim_module_free(m);
    free(text);
    return findings;
}

int main(int argc, char **argv)
{
    if (argc < 6 || (argc - 2) % 4) return 2;
    for (int i = 2; i < argc; i += 4) {
        int findings = 0;
        for (int schedule = PTXSIM_EARLY; schedule <= PTXSIM_RANDOM; schedule++)
            for (int practice = 0; practice < 2; practice++)
                findings +=
                    run(argv[i], (unsigned)atoi(argv[i + 1]), (unsigned)atoi(argv[i + 2]), (unsigned)atoi(argv[i + 3]),
                        (ptxsim_options){.schedule = (ptxsim_schedule)schedule,
                                         .seed = 3,
                                         .practice = practice,
                                         .threads = atoi(argv[1])});
        printf("%d\n", findings);
    }
    return 0;
}
