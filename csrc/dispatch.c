// The C API: which backend runs a call, and why not.
#include "cpu/kernels.h"
#include "error.h"
#include "fa4.h"
#ifdef FA4_CUDA
#    include "cuda/backend.h"
#endif

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM_MAX = 256, TEXT_MAX = 512 };

static _Thread_local char error_text[TEXT_MAX], reason_text[TEXT_MAX];

fa4_status fa4_fail(fa4_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return status;
}

const char *fa4_reason(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason_text, sizeof reason_text, format, arguments);
    va_end(arguments);
    return reason_text;
}

const char *fa4_last_error(void)
{
    return error_text;
}

// ---- CPU instruction sets

// Declarations and table entry of an instruction set, by the host that it is of.
#define FA4_DECLARE_any(isa)                                 \
    fa4_cpu_fwd_fn fa4_cpu_fwd_##isa, fa4_cpu_fwd_f64_##isa; \
    fa4_cpu_bwd_fn fa4_cpu_bwd_##isa, fa4_cpu_bwd_f64_##isa; \
    fa4_cpu_bwd_workspace_fn fa4_cpu_bwd_workspace_##isa, fa4_cpu_bwd_f64_workspace_##isa;
#define FA4_KERNELS_any(isa)                                  \
    {                                                         \
        .fwd = fa4_cpu_fwd_##isa,                             \
        .fwd_f64 = fa4_cpu_fwd_f64_##isa,                     \
        .bwd = fa4_cpu_bwd_##isa,                             \
        .bwd_f64 = fa4_cpu_bwd_f64_##isa,                     \
        .bwd_workspace = fa4_cpu_bwd_workspace_##isa,         \
        .bwd_f64_workspace = fa4_cpu_bwd_f64_workspace_##isa, \
    }
#ifdef __x86_64__
#    define FA4_DECLARE_x86_64(isa) FA4_DECLARE_any(isa)
#    define FA4_KERNELS_x86_64(isa) FA4_KERNELS_any(isa)
#else
#    define FA4_DECLARE_x86_64(isa)
#    define FA4_KERNELS_x86_64(isa) {.fwd = NULL}
#endif

#define FA4_CPU_ISA(isa, host, flags) FA4_DECLARE_##host(isa)
#include "variants.def"

typedef struct {
    const char *name;
    fa4_cpu_kernels kernels; // NULL where the instruction set is another architecture's
} cpu_isa;

static const cpu_isa cpu_isas[] = {
#define FA4_CPU_ISA(isa, host, flags) {#isa, FA4_KERNELS_##host(isa)},
#include "variants.def"
};

enum { CPU_ISAS = sizeof cpu_isas / sizeof *cpu_isas };

// Index of the instruction set in use, -1 before the first question. Threads that ask at the same time find the same.
static atomic_int cpu_isa_chosen = -1;

static int cpu_isa_index(const char *name)
{
    for (int i = 0; i < CPU_ISAS; i++)
        if (!strcmp(cpu_isas[i].name, name)) return i;
    return -1;
}

// Fails with the names that there are, as "choose one of avx2, generic".
static fa4_status fail_isa(const char *asked, const char *name, const char *why)
{
    char names[TEXT_MAX] = "";
    for (int i = 0; i < CPU_ISAS; i++) {
        if (fa4_cpu_isa_missing(cpu_isas[i].name)) continue;
        if (*names) strcat(names, ", ");
        strcat(names, cpu_isas[i].name);
    }
    return fa4_fail(FA4_INVALID, "%s '%s': %s; this machine runs %s", asked, name, why, names);
}

static fa4_status cpu_isa_choose(const char *asked, const char *name)
{
    int index = 0;
    if (name) {
        index = cpu_isa_index(name);
        const char *why = index < 0 ? "there is no such instruction set" : fa4_cpu_isa_missing(name);
        if (why) return fail_isa(asked, name, why);
    } else {
        while (fa4_cpu_isa_missing(cpu_isas[index].name)) index++; // ends: generic runs anywhere
    }
    atomic_store_explicit(&cpu_isa_chosen, index, memory_order_relaxed);
    return FA4_OK;
}

// The instruction set in use; NULL, with the error kept, when FA4_CPU_ISA names one that cannot run.
static const cpu_isa *cpu_isa_now(void)
{
    int index = atomic_load_explicit(&cpu_isa_chosen, memory_order_relaxed);
    if (index < 0) {
        const char *name = getenv("FA4_CPU_ISA");
        if (cpu_isa_choose("FA4_CPU_ISA", name && *name ? name : NULL) != FA4_OK) return NULL;
        index = atomic_load_explicit(&cpu_isa_chosen, memory_order_relaxed);
    }
    return &cpu_isas[index];
}

fa4_cpu_isa fa4_cpu_isa_at(int index)
{
    if (index < 0 || index >= CPU_ISAS) return (fa4_cpu_isa){NULL, NULL};
    return (fa4_cpu_isa){cpu_isas[index].name, fa4_cpu_isa_missing(cpu_isas[index].name)};
}

const char *fa4_cpu_isa_in_use(void)
{
    const cpu_isa *isa = cpu_isa_now();
    return isa ? isa->name : NULL;
}

fa4_status fa4_cpu_isa_force(const char *name)
{
    if (name) return cpu_isa_choose("CPU instruction set", name);
    atomic_store_explicit(&cpu_isa_chosen, -1, memory_order_relaxed);
    return cpu_isa_now() ? FA4_OK : FA4_INVALID;
}

// ---- "Can you?"

static const char *reserved_in_use(const fa4_fwd_params *p)
{
    const struct {
        int used;
        const char *name;
    } fields[] = {
        {p->len_q_of != NULL, "len_q_of (lengths of q per batch)"},
        {p->start_q_of != NULL, "start_q_of (packed variable lengths)"},
        {p->start_kv_of != NULL, "start_kv_of (packed variable lengths)"},
        {p->page_table != NULL, "page_table (paged keys and values)"},
        {p->stride_page_table != 0, "stride_page_table (paged keys and values)"},
        {p->page_size != 0, "page_size (paged keys and values)"},
        {p->sink != NULL, "sink (attention sinks)"},
        {p->alibi_slopes != NULL, "alibi_slopes (ALiBi)"},
        {p->softcap != 0, "softcap"},
        {p->dropout_p != 0, "dropout_p (dropout)"},
        {p->dropout_seed != 0, "dropout_seed (dropout)"},
        {p->dropout_offset != 0, "dropout_offset (dropout)"},
        {p->kv_splits != 0 && p->kv_splits != 1, "kv_splits (split keys)"},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].used) return fields[i].name;
    return NULL;
}

// What no backend takes.
static const char *malformed(const fa4_fwd_params *p)
{
    const struct {
        int64_t value;
        const char *name;
    } sizes[] = {{p->batch, "batch"},
                 {p->heads_q, "heads_q"},
                 {p->heads_kv, "heads_kv"},
                 {p->len_q, "len_q"},
                 {p->len_kv, "len_kv"}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].value < 0) return fa4_reason("%s is negative: %lld", sizes[i].name, (long long)sizes[i].value);
    if (p->heads_kv == 0 ? p->heads_q != 0 : p->heads_q % p->heads_kv != 0)
        return fa4_reason("heads_q must be a multiple of heads_kv: %lld and %lld", (long long)p->heads_q,
                          (long long)p->heads_kv);
    if (p->dim < 1 || p->dim > DIM_MAX)
        return fa4_reason("the head dim of q and k must be between 1 and %d: %lld", DIM_MAX, (long long)p->dim);
    if (p->dim_v < 1 || p->dim_v > DIM_MAX)
        return fa4_reason("the head dim of v must be between 1 and %d: %lld", DIM_MAX, (long long)p->dim_v);
    if ((unsigned)p->dtype > FA4_F64) return fa4_reason("unknown dtype: %d", (int)p->dtype);
    if ((unsigned)p->mask_type > FA4_MASK_F64) return fa4_reason("unknown mask_type: %d", (int)p->mask_type);
    if (!isfinite(p->scale)) return fa4_reason("scale must be finite: %g", p->scale);
    if (p->dtype != FA4_F64 && fabs(p->scale) > FLT_MAX)
        return fa4_reason("scale %g is beyond float32, in which scores are computed", p->scale);
    const char *reserved = reserved_in_use(p);
    if (reserved) return fa4_reason("%s is not implemented", reserved);
    return NULL;
}

#ifdef FA4_CUDA
enum { CUDA_BUILT = 1 };
#else
enum { CUDA_BUILT = 0 };
#endif

// GPUs by compute capability. The Blackwell kernels are compiled for the family of 10.0, which 10.3 belongs to, and
// once more for 10.3.
static const struct {
    int arch, has_kernels;
    const char *name;
} chips[] = {
    {50, 0, "Maxwell"},
    {52, 0, "Maxwell"},
    {53, 0, "Maxwell: Jetson Nano"},
    {60, 0, "Pascal: P100"},
    {61, 0, "Pascal: P40, GeForce 10"},
    {62, 0, "Pascal: Jetson TX2"},
    {70, 0, "Volta: V100"},
    {72, 0, "Volta: Jetson Xavier"},
    {75, 0, "Turing: T4, GeForce RTX 20"},
    {80, 0, "Ampere: A100, A30"},
    {86, 0, "Ampere: A10, A40, GeForce RTX 30"},
    {87, 0, "Ampere: Jetson Orin"},
    {89, 0, "Ada: L4, L40, GeForce RTX 40"},
    {90, 1, "Hopper: H100, H200"},
    {100, 1, "Blackwell: B200, GB200"},
    {101, 0, "Blackwell: Jetson Thor"}, // as CUDA 12 calls 11.0
    {103, 1, "Blackwell: B300, GB300"},
    {110, 0, "Blackwell: Jetson Thor"},
    {120, 0, "Blackwell without tensor memory: GeForce RTX 50, RTX PRO"},
    {121, 0, "Blackwell without tensor memory: GB10"},
};

// NULL where this build has kernels for a GPU, or why not.
static const char *chip_unsupported(int arch)
{
    if (arch < 0) return fa4_reason("arch is %d: it must be 0 (the CPU) or a compute capability", arch);
    const char *name = "a chip that this version does not know";
    int has_kernels = 0;
    for (size_t i = 0; i < sizeof chips / sizeof *chips; i++)
        if (chips[i].arch == arch) name = chips[i].name, has_kernels = chips[i].has_kernels;
    if (!has_kernels)
        return fa4_reason("there are no kernels for compute capability %d.%d (%s), only for 9.0 (H100, H200), 10.0 "
                          "(B200, GB200) and 10.3 (B300, GB300)",
                          arch / 10, arch % 10, name);
    if (CUDA_BUILT) return NULL;
    return fa4_reason("this build has no CUDA kernels for compute capability %d.%d (%s)", arch / 10, arch % 10, name);
}

// Of well-formed params: NULL, or why that arch cannot run them.
static const char *arch_unsupported(const fa4_fwd_params *p, int arch)
{
    if (arch == FA4_ARCH_CPU) return cpu_isa_now() ? NULL : fa4_reason("%s", error_text);
    const char *reason = chip_unsupported(arch);
#ifdef FA4_CUDA
    if (!reason) reason = fa4_cuda_fwd_unsupported(p, arch);
#else
    (void)p;
#endif
    return reason;
}

const char *fa4_fwd_unsupported(const fa4_fwd_params *p, int arch)
{
    const char *reason = malformed(p);
    return reason ? reason : arch_unsupported(p, arch);
}

const char *fa4_bwd_unsupported(const fa4_bwd_params *p, int arch)
{
    const char *reason = fa4_fwd_unsupported(&p->fwd, arch);
    if (reason || arch == FA4_ARCH_CPU) return reason;
    return "gradients are not implemented on CUDA";
}

// ---- Running

// What only a call can be asked.
static fa4_status check_pointers(const fa4_fwd_params *p)
{
    if (p->len_kv > 0 && (!p->k || !p->v)) return fa4_fail(FA4_INVALID, "%s is NULL", !p->k ? "k" : "v");
    if (p->heads_q == 0 || p->len_q == 0) return FA4_OK; // nothing else is looked at
    if (!p->q || !p->o || !p->lse) return fa4_fail(FA4_INVALID, "%s is NULL", !p->q ? "q" : !p->o ? "o" : "lse");
    if (p->len_kv > 0 && p->mask_type != FA4_MASK_NONE && !p->mask) return fa4_fail(FA4_INVALID, "mask is NULL");
    return FA4_OK;
}

// And what the CPU can read through pointers.
static fa4_status check_inputs(const fa4_fwd_params *p)
{
    fa4_status status = check_pointers(p);
    if (status != FA4_OK || p->heads_q == 0 || p->len_q == 0) return status;
    for (int64_t b = 0; p->len_kv_of && b < p->batch; b++)
        if (p->len_kv_of[b] < 0 || p->len_kv_of[b] > p->len_kv)
            return fa4_fail(FA4_INVALID, "len_kv_of[%lld] must be between 0 and len_kv = %lld: %ld", (long long)b,
                            (long long)p->len_kv, (long)p->len_kv_of[b]);
    return FA4_OK;
}

static fa4_status report(fa4_status status)
{
    return status == FA4_OK ? FA4_OK : fa4_fail(status, "not enough memory for a CPU kernel's scratch");
}

fa4_status fa4_fwd(const fa4_fwd_params *p, int arch, void *stream)
{
    const char *reason = fa4_fwd_unsupported(p, arch);
    if (reason) return fa4_fail(FA4_UNSUPPORTED, "%s", reason);
    if (p->batch == 0 || p->heads_q == 0 || p->len_q == 0) return FA4_OK;
    fa4_status status = arch == FA4_ARCH_CPU ? check_inputs(p) : check_pointers(p);
    if (status != FA4_OK) return status;
#ifdef FA4_CUDA
    if (arch != FA4_ARCH_CPU) return fa4_cuda_fwd(p, stream);
#endif
    const fa4_cpu_kernels *kernels = &cpu_isa_now()->kernels;
    return report((p->dtype == FA4_F64 ? kernels->fwd_f64 : kernels->fwd)(p, stream));
}

size_t fa4_bwd_workspace(const fa4_bwd_params *p, int arch)
{
    if (fa4_bwd_unsupported(p, arch)) return 0;
    const fa4_cpu_kernels *kernels = &cpu_isa_now()->kernels;
    return (p->fwd.dtype == FA4_F64 ? kernels->bwd_f64_workspace : kernels->bwd_workspace)(p);
}

fa4_status fa4_bwd(const fa4_bwd_params *p, int arch, void *stream)
{
    const fa4_fwd_params *f = &p->fwd;
    const char *reason = fa4_bwd_unsupported(p, arch);
    if (reason) return fa4_fail(FA4_UNSUPPORTED, "%s", reason);
    if (f->batch == 0 || f->heads_kv == 0 || (f->len_q == 0 && f->len_kv == 0)) return FA4_OK;
    fa4_status status = check_inputs(f);
    if (status != FA4_OK) return status;
    if (f->heads_q > 0 && f->len_q > 0 && (!p->dout || !p->dq))
        return fa4_fail(FA4_INVALID, "%s is NULL", !p->dout ? "dout" : "dq");
    if (f->len_kv > 0 && (!p->dk || !p->dv)) return fa4_fail(FA4_INVALID, "%s is NULL", !p->dk ? "dk" : "dv");
    if (!p->workspace && fa4_bwd_workspace(p, arch) > 0) return fa4_fail(FA4_INVALID, "workspace is NULL");
    const fa4_cpu_kernels *kernels = &cpu_isa_now()->kernels;
    return report((f->dtype == FA4_F64 ? kernels->bwd_f64 : kernels->bwd)(p, stream));
}
