// Feeds PTX-like garbage to the parser, and runs what it takes for some steps. With clang, a libFuzzer target:
//     clang -g -O1 -fsanitize=fuzzer,address,undefined -pthread -Itests/ptxsim tests/ptxsim/*.c
//     tests/ptxsim_fuzz/fuzz.c
// Without, the program mutates the files it is given, the same ones for the same seed (test_ptxsim_fuzz.py runs it so):
//     fuzz TEXTS SEED FILE...
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ptxsim.h"

enum { DATA_BYTES = 65536, PARAM_BYTES = 1024, STEPS = 3000 };
static unsigned char memory[DATA_BYTES];

// Every parameter of 8 bytes is a pointer to the same memory, of 128 bytes a tensor map of it; others are 0.
static void run(const ptxsim_module *m, int kernel)
{
    uint64_t address = ptxsim_register(memory, sizeof memory, false);
    _Alignas(128) unsigned char params[PARAM_BYTES] = {0};
    size_t at = 0;
    for (int i = 0; i < ptxsim_param_count(m, kernel); i++) {
        size_t size, alignment;
        ptxsim_param(m, kernel, i, &size, &alignment);
        at = (at + alignment - 1) / alignment * alignment;
        if (size > sizeof params || at > sizeof params - size) goto done;
        if (size == 8) memcpy(params + at, &address, 8);
        if (size == 128)
            ptxsim_tensor_map(params + at, PTXSIM_U32, 2, address, (uint64_t[]){128, 64}, (uint64_t[]){512},
                              (uint32_t[]){32, 4}, (uint32_t[]){1, 1}, 128, false);
        at += size;
    }
    ptxsim_launch launch = {.module = m,
                            .kernel = ptxsim_kernel_name(m, kernel),
                            .grid = {2, 1, 1},
                            .block = {128, 1, 1},
                            .cluster = {2, 1, 1},
                            .dynamic_shared = DATA_BYTES,
                            .params = params,
                            .params_size = at};
    for (int schedule = PTXSIM_EARLY; schedule <= PTXSIM_RANDOM; schedule++) {
        ptxsim_options options = {.schedule = (ptxsim_schedule)schedule, .seed = 1, .threads = 1, .max_steps = STEPS};
        ptxsim_report_free(ptxsim_run(&launch, 1, &options));
    }
done:
    ptxsim_unregister(address);
}

static void parse(const char *text)
{
    char error[256];
    ptxsim_module *m = ptxsim_parse(text, error, sizeof error);
    if (m)
        for (int k = 0; k < ptxsim_kernel_count(m); k++) run(m, k);
    ptxsim_module_free(m);
    free(ptxsim_unknown(text));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    if (!text) return 0;
    memcpy(text, data, size);
    text[size] = 0;
    parse(text);
    free(text);
    return 0;
}

#ifndef __clang__
static uint64_t state;
static uint64_t next(uint64_t below)
{
    state += 0x9E3779B97F4A7C15;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return (z ^ (z >> 31)) % below;
}

static char *read_file(const char *path, size_t *size)
{
    FILE *f = fopen(path, "rb");
    if (!f) {
        perror(path);
        exit(2);
    }
    fseek(f, 0, SEEK_END);
    long end = ftell(f);
    *size = end > 0 ? (size_t)end : 0;
    rewind(f);
    char *text = malloc(*size + 1);
    if (!text || fread(text, 1, *size, f) != *size) exit(2);
    fclose(f);
    return text;
}

// A line of the text taken out, or put in again elsewhere: what parses is still likely to.
static size_t shuffle_lines(char *text, size_t size, size_t room)
{
    size_t start = next(size);
    while (start > 0 && text[start - 1] != '\n') start--;
    size_t end = start;
    while (end < size && text[end] != '\n') end++;
    if (end < size) end++;
    size_t length = end - start;
    if (next(2) || size + length > room || length > 1000) {
        memmove(text + start, text + end, size - end);
        return size - length;
    }
    char line[1000];
    memcpy(line, text + start, length);
    size_t at = next(size);
    while (at > 0 && text[at - 1] != '\n') at--;
    memmove(text + at + length, text + at, size - at);
    memcpy(text + at, line, length);
    return size + length;
}

// Another digit in place of one.
static size_t change_digit(char *text, size_t size)
{
    for (int tries = 0; tries < 100; tries++) {
        size_t at = next(size);
        if (text[at] < '0' || text[at] > '9') continue;
        text[at] = (char)('0' + next(10));
        break;
    }
    return size;
}

// One change: a byte, a run of bytes deleted, moved or repeated, a piece of another place put in, or the end cut off.
static size_t mutate(char *text, size_t size, size_t room)
{
    static const char *const words[] = {"{",
                                        "}",
                                        "[",
                                        "]",
                                        ";",
                                        ",",
                                        ".",
                                        "@",
                                        "%",
                                        "0x",
                                        "0f",
                                        "<4294967295>",
                                        "-1",
                                        "//",
                                        "(",
                                        ".b",
                                        "/*",
                                        ":",
                                        "|",
                                        "!",
                                        "\"",
                                        "+",
                                        "99999999999999999999",
                                        ".reg .b32 %r<70000>;",
                                        ".shared .b8 x[9223372036854775807];"};
    if (size == 0) return 0;
    size_t at = next(size), length = 1 + next(next(4) ? 12 : 400);
    if (at + length > size) length = size - at;
    switch (next(6)) {
    case 0: text[at] = (char)next(256); break;
    case 1: memmove(text + at, text + at + length, size - at - length); return size - length;
    case 2: return at;
    case 3: {
        const char *word = words[next(sizeof words / sizeof *words)];
        size_t n = strlen(word);
        if (size + n > room) break;
        memmove(text + at + n, text + at, size - at);
        memcpy(text + at, word, n);
        return size + n;
    }
    case 4: memmove(text + next(size - length + 1), text + at, length); break;
    default:
        if (size + length > room) break;
        memmove(text + at + length, text + at, size - at);
        return size + length;
    }
    return size;
}

int main(int argc, char **argv)
{
    if (argc < 4) return 2;
    long texts = atol(argv[1]);
    state = strtoull(argv[2], NULL, 10);
    for (long i = 0; i < texts; i++) {
        size_t size, room;
        char *text = read_file(argv[3 + next((uint64_t)argc - 3)], &size);
        room = size + 4096;
        text = realloc(text, room + 1);
        if (!text) return 2;
        bool gently = next(4) > 0;
        for (uint64_t changes = next(gently ? 4 : 12); changes > 0 && size > 0; changes--)
            size = !gently   ? mutate(text, size, room)
                   : next(2) ? shuffle_lines(text, size, room)
                             : change_digit(text, size);
        LLVMFuzzerTestOneInput((const uint8_t *)text, size);
        free(text);
    }
    return 0;
}
#endif
