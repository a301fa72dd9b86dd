// What a forward kernel gets beside its tensor maps. Plain data, the same for host and device and for every chip.
#ifndef FA4_CUDA_ARGS_H
#define FA4_CUDA_ARGS_H

#include "tiles.h"

// Elements of a row of one slab of shared memory: 128 bytes of swizzled columns, or 64 where dim is no multiple of
// that.
#define FA4_COLUMNS(dim) ((dim) % 64 == 0 ? 64 : 32)

typedef struct {
    float *lse; // [batch, heads_q, len_q]
    int64_t stride_lse[3];
    const int32_t *len_kv_of; // [batch], or NULL
    fa4_tiles tiles;
    int32_t len_q, len_kv;
    int32_t lo, hi; // query i sees key j when lo <= j - i <= hi; clamped, so that i + lo and i + hi + 1 do not overflow
    // A weight is 2^(scale_log2 (s - max s)) with scale_log2 > 0.
    // On Hopper s is q kᵀ; where the scale is not a plain positive number, q kᵀ times prescale, and scale_log2 is 1.
    // On Blackwell s is q kᵀ, or -q kᵀ when the scale is negative, and a scale of 0 is the smallest normal number: -inf
    // times it still hides a key.
    float scale_log2, prescale;
    int32_t has_prescale;
    // What a coordinate of q, k, v is multiplied by: 0 where the tensor repeats along it.
    int32_t step_batch[3], step_head[3];
    // Blackwell: the rows of a tile are queries times the pack = 1 << pack_log2 query heads that share a K/V head: row
    // r is query r >> pack_log2 of head r & (pack - 1). A "head" of the tiles is then all of those.
    int32_t pack_log2;
    int32_t negative; // the scale
} fa4_fwd_args;

#endif
