// What csrc/sm100/plan.c and csrc/sm100/fwd.cu agree on: the tilings, and the kernel's arguments beside its tensor
// maps. Plain data, the same for host and device.
#ifndef FA4_SM100_ARGS_H
#define FA4_SM100_ARGS_H

#include "../cuda/tiles.h"

typedef struct {
    int dim, dim_v, tight, stages, emulated, registers_softmax, registers_correction; // as shapes.def says
} fa4_sm100_shape;

enum { FA4_SM100_BLOCK_Q = 128, FA4_SM100_BLOCK_KV = 128, FA4_SM100_TILES = 2 };

// Elements of a row of one slab of shared memory: 128 bytes of swizzled columns, or 64 where dim is no multiple of
// that.
#define FA4_SM100_COLUMNS(dim) ((dim) % 64 == 0 ? 64 : 32)
// Bytes of Q and O of both tiles, of the ring of K and V, and of both and what warps tell each other, in whole KiB.
#define FA4_SM100_QUERY_BYTES(s) (FA4_SM100_TILES * FA4_SM100_BLOCK_Q * ((s).dim + ((s).tight ? 0 : (s).dim_v)) * 2)
#define FA4_SM100_RING_BYTES(s)                       \
    (FA4_SM100_BLOCK_KV * 2 *                         \
     ((s).tight             ? 2 * (s).dim + (s).dim_v \
      : (s).dim > (s).dim_v ? (s).stages * (s).dim    \
                            : (s).stages * (s).dim_v))
#define FA4_SM100_SHARED_BYTES(s)                                                                        \
    ((FA4_SM100_QUERY_BYTES(s) + FA4_SM100_RING_BYTES(s) + 2 * FA4_SM100_TILES * FA4_SM100_BLOCK_Q * 4 + \
      (s).stages * 2 * 8 + 9 * FA4_SM100_TILES * 8 + 2 * 8 + 1023) /                                     \
     1024 * 1024)

typedef struct {
    float *lse; // [batch, heads_q, len_q]
    int64_t stride_lse[3];
    const int32_t *len_kv_of; // [batch], or NULL
    fa4_tiles tiles;
    int32_t len_q, len_kv;
    // The rows of a tile are queries times the pack = 1 << pack_log2 query heads that share a K/V head: row r is query
    // r >> pack_log2 of head r & (pack - 1). A "head" of the tiles is then all of those.
    int32_t pack_log2;
    int32_t lo, hi; // query i sees key j when lo <= j - i <= hi; clamped, so that i + lo and i + hi do not overflow
    // A weight is 2^(scale_log2 (s - max s)) with scale_log2 > 0, and s = q kᵀ, or -q kᵀ when the scale is negative. A
    // scale of 0 is the smallest normal number: -inf times it still hides a key.
    float scale_log2;
    int32_t negative;
    // What a coordinate of q, k, v is multiplied by: 0 where the tensor repeats along it.
    int32_t step_batch[3], step_head[3];
} fa4_sm100_fwd_args;

#endif
