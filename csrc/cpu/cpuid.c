#define _GNU_SOURCE // syscall
// What the machine can run. Compiled without any instruction set flag: it runs before anything is known.
#include "kernels.h"

#include <string.h>

#if defined(__x86_64__)

#    include <cpuid.h>
#    ifdef __linux__
#        include <sys/syscall.h>
#        include <unistd.h>
#    endif

typedef struct {
    const char *name;
    unsigned leaf, subleaf;
    enum { EAX, EBX, ECX, EDX } reg;
    unsigned bit;
    const char *missing;
} feature;

// Intel SDM volume 2, "CPUID". An instruction set needs every feature on its own line and those of the sets named
// after.
static const feature features[] = {
    {"avx2", 1, 0, ECX, 12, "the processor has no FMA"},
    {"avx2", 1, 0, ECX, 29, "the processor has no F16C"},
    {"avx2", 7, 0, EBX, 5, "the processor has no AVX2"},
    {"avx512", 7, 0, EBX, 16, "the processor has no AVX-512 F"},
    {"avx512", 7, 0, EBX, 17, "the processor has no AVX-512 DQ"},
    {"avx512", 7, 0, EBX, 30, "the processor has no AVX-512 BW"},
    {"avx512", 7, 0, EBX, 31, "the processor has no AVX-512 VL"},
    {"avx512_bf16", 7, 1, EAX, 5, "the processor has no AVX-512 BF16"},
    {"amx_bf16", 7, 0, EDX, 22, "the processor has no AMX BF16"},
    {"amx_bf16", 7, 0, EDX, 24, "the processor has no AMX tiles"},
};

static int has(const feature *f)
{
    unsigned r[4] = {0, 0, 0, 0};
    if (f->subleaf > 0) { // the highest subleaf that exists is in EAX of subleaf 0
        if (!__get_cpuid_count(f->leaf, 0, &r[EAX], &r[EBX], &r[ECX], &r[EDX]) || r[EAX] < f->subleaf) return 0;
    }
    if (!__get_cpuid_count(f->leaf, f->subleaf, &r[EAX], &r[EBX], &r[ECX], &r[EDX])) return 0;
    return r[f->reg] >> f->bit & 1;
}

// The register state that the operating system saves (XCR0), 0 where it does not say.
static unsigned saved_state(void)
{
    const feature osxsave = {"", 1, 0, ECX, 27, ""};
    if (!has(&osxsave)) return 0;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

// Linux keeps the tiles' 8 KiB only for processes that have asked (Documentation/arch/x86/xstate.rst); asking again is
// free, and children inherit the answer.
static int may_use_amx(void)
{
#    ifdef __linux__
    enum { REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#    else
    return 0;
#    endif
}

static const char *missing_of(const char *name)
{
    for (size_t i = 0; i < sizeof features / sizeof *features; i++)
        if (!strcmp(features[i].name, name) && !has(&features[i])) return features[i].missing;
    return NULL;
}

const char *fa4_cpu_isa_missing(const char *name)
{
    enum {
        SSE = 1 << 1,
        YMM = 1 << 2,
        OPMASK = 1 << 5,
        ZMM_LOW = 1 << 6,
        ZMM_HIGH = 1 << 7,
        TILE_CONFIG = 1 << 17,
        TILE_DATA = 1 << 18
    };
    const unsigned ymm = SSE | YMM, zmm = ymm | OPMASK | ZMM_LOW | ZMM_HIGH, amx = TILE_CONFIG | TILE_DATA;

    if (!strcmp(name, "generic")) return NULL;
    const char *missing = missing_of("avx2");
    if (!missing && (saved_state() & ymm) != ymm) missing = "the operating system does not save the AVX registers";
    if (missing || !strcmp(name, "avx2")) return missing;
    missing = missing_of("avx512");
    if (!missing && (saved_state() & zmm) != zmm) missing = "the operating system does not save the AVX-512 registers";
    if (missing || !strcmp(name, "avx512")) return missing;
    missing = missing_of("avx512_bf16");
    if (missing || !strcmp(name, "avx512_bf16")) return missing;
    missing = missing_of("amx_bf16");
    if (!missing && (saved_state() & amx) != amx) missing = "the operating system does not save the AMX tiles";
    if (!missing && !may_use_amx()) missing = "the operating system does not let this process use AMX";
    return missing;
}

#else

const char *fa4_cpu_isa_missing(const char *name)
{
    return strcmp(name, "generic") ? "it is an instruction set of another architecture" : NULL;
}

#endif
