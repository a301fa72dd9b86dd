// The C API of flash_attn4: what the binding, every backend and the tests agree on. C11, no torch, no CUDA header.
//
//     o   = softmax(scale * q kᵀ + mask) v         over the keys that a query sees
//     lse = log sum exp(scale * q kᵀ + mask)       natural logarithm
//
// Query i sees key j when lo <= j - i <= hi, j < len_kv (of its batch) and the mask allows it. A row that sees
// no key has o = 0, lse = -inf and gradient 0.
#ifndef FA4_H
#define FA4_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { FA4_F16, FA4_BF16, FA4_F32, FA4_F64 } fa4_dtype;

// What a mask holds: nothing, bytes that are 0 (hidden) or not (visible), or numbers added to the scaled scores.
typedef enum { FA4_MASK_NONE, FA4_MASK_BOOL, FA4_MASK_F16, FA4_MASK_BF16, FA4_MASK_F32, FA4_MASK_F64 } fa4_mask_type;

typedef enum { FA4_OK, FA4_UNSUPPORTED, FA4_INVALID, FA4_NO_MEMORY, FA4_DEVICE_ERROR } fa4_status;

// Machine that runs a call: the CPU, or a CUDA compute capability as 10 * major + minor (90, 100, 103).
#define FA4_ARCH_CPU 0

// An open side of the band. Every other value is a plain bound, -1 too.
#define FA4_UNBOUNDED_LO INT64_MIN
#define FA4_UNBOUNDED_HI INT64_MAX

// Strides are in elements, in the order of the shape beside the pointer, any sign and order; a stride of 0
// repeats (inputs only). Pointers are to device memory on a GPU.
typedef struct {
    const void *q;    // [batch, heads_q,  len_q,  dim]
    const void *k;    // [batch, heads_kv, len_kv, dim]
    const void *v;    // [batch, heads_kv, len_kv, dim_v]
    const void *mask; // [batch, heads_q,  len_q,  len_kv] of mask_type, broadcast by stride 0; NULL without one
    void *o;          // [batch, heads_q,  len_q,  dim_v]
    void *lse;        // [batch, heads_q,  len_q], float; double when dtype is FA4_F64
    int64_t stride_q[4], stride_k[4], stride_v[4], stride_mask[4], stride_o[4], stride_lse[3];
    int64_t batch, heads_q, heads_kv, len_q, len_kv, dim, dim_v; // heads_q is a multiple of heads_kv
    int64_t lo, hi;                                              // the band
    double scale;
    fa4_dtype dtype; // of q, k, v, o
    fa4_mask_type mask_type;
    const int32_t *len_kv_of; // [batch] keys that exist in each batch, each in [0, len_kv]; NULL: len_kv

    // Reserved: no backend runs these yet, fa4_fwd_unsupported refuses each by name unless it is 0.
    const int32_t *len_q_of;    // [batch] queries that exist in each batch
    const int32_t *start_q_of;  // [batch + 1] first query of each batch in a packed q
    const int32_t *start_kv_of; // [batch + 1] first key of each batch in packed k and v
    const int32_t *page_table;  // [batch, pages] page of k and v
    int64_t stride_page_table;  // elements between two batches of page_table
    int64_t page_size;          // keys a page holds
    const float *sink;          // [heads_q] logit of a key without a value
    const float *alibi_slopes;  // [heads_q]
    double softcap;             // softcap * tanh(score / softcap)
    double dropout_p;           // probability in [0, 1)
    uint64_t dropout_seed, dropout_offset;
    int64_t kv_splits; // splits of the keys; 0 and 1: none
} fa4_fwd_params;

// The gradient. fwd holds the forward's inputs and its results o and lse.
typedef struct {
    fa4_fwd_params fwd;
    const void *dout;   // [batch, heads_q, len_q, dim_v]
    const void *dlse;   // [batch, heads_q, len_q], as lse; NULL: 0
    void *dq, *dk, *dv; // as q, k, v, of dtype; written whole, never added to
    int64_t stride_dout[4], stride_dlse[3], stride_dq[4], stride_dk[4], stride_dv[4];
    void *workspace; // fa4_bwd_workspace bytes, aligned to 64; contents do not matter
} fa4_bwd_params;

// How a CPU call reaches other threads: calls run(context, begin, end) on ranges that cover [0, tiles) once, at
// the same time or one after another, and returns when all have returned.
typedef struct fa4_executor fa4_executor;
struct fa4_executor {
    void (*parallel_for)(const fa4_executor *self, int64_t tiles,
                         void (*run)(void *context, int64_t begin, int64_t end), void *context);
    int threads; // how many there may be: a hint for how fine to cut the work, never for what the bits are
};

// NULL when fa4_fwd (fa4_bwd) can run these on that arch, else the reason, as a sentence a user can act on. Looks at
// everything but what pointers point to. The text lives until the thread's next call.
const char *fa4_fwd_unsupported(const fa4_fwd_params *p, int arch);
const char *fa4_bwd_unsupported(const fa4_bwd_params *p, int arch);

// stream: on a GPU the cudaStream_t; on the CPU a const fa4_executor *, or NULL for the calling thread alone.
fa4_status fa4_fwd(const fa4_fwd_params *p, int arch, void *stream);
fa4_status fa4_bwd(const fa4_bwd_params *p, int arch, void *stream);
size_t fa4_bwd_workspace(const fa4_bwd_params *p, int arch);

// Why the thread's last call that returned another status than FA4_OK failed.
const char *fa4_last_error(void);

// The CPU kernels' instruction sets, best first ("amx_bf16", "avx512_bf16", "avx512", "avx2", "generic"): name and
// NULL, or why this machine cannot run it. Index past the last: name is NULL. The environment variable
// FA4_CPU_ISA forces one.
typedef struct {
    const char *name;
    const char *unavailable;
} fa4_cpu_isa;
fa4_cpu_isa fa4_cpu_isa_at(int index);
// The one in use; NULL, with fa4_last_error, when FA4_CPU_ISA names one that this machine cannot run.
const char *fa4_cpu_isa_in_use(void);
// Forces one from now on (a name of the list), or the choice again by NULL. For tests and benchmarks.
fa4_status fa4_cpu_isa_force(const char *name);

#ifdef __cplusplus
}
#endif
#endif
