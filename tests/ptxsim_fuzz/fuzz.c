// Feeds PTX-like garbage to the parser. With clang, a libFuzzer target:
//     clang -g -O1 -fsanitize=fuzzer,address,undefined -pthread -Itests/ptxsim tests/ptxsim/*.c
//     tests/ptxsim_fuzz/fuzz.c
// Without, the program mutates the files it is given for some seconds (test_ptxsim_fuzz.py runs it so):
//     fuzz SECONDS SEED FILE...
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ptxsim.h"

static void parse(const char *text)
{
    char error[256];
    ptxsim_module *m = ptxsim_parse(text, error, sizeof error);
    if (m)
        for (int k = 0; k < ptxsim_kernel_count(m); k++) {
            size_t size, alignment;
            for (int i = 0; i < ptxsim_param_count(m, k); i++) ptxsim_param(m, k, i, &size, &alignment);
        }
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
    time_t end = time(NULL) + atoi(argv[1]);
    state = strtoull(argv[2], NULL, 10);
    long runs = 0;
    while (time(NULL) < end) {
        size_t size, room;
        char *text = read_file(argv[3 + next((uint64_t)argc - 3)], &size);
        room = size + 4096;
        text = realloc(text, room + 1);
        if (!text) return 2;
        for (uint64_t i = next(12); i-- > 0;) size = mutate(text, size, room);
        LLVMFuzzerTestOneInput((const uint8_t *)text, size);
        free(text);
        runs++;
    }
    printf("%ld texts\n", runs);
    return 0;
}
#endif
