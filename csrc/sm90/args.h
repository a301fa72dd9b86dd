// What csrc/sm90/plan.c and csrc/sm90/fwd.cu agree on: the tilings, and the kernel's arguments beside its tensor maps.
// Plain data, the same for host and device.
#ifndef FA4_SM90_ARGS_H
#define FA4_SM90_ARGS_H

#include "../cuda/tiles.h"

typedef struct {
    int full_from, band_from, dim, dim_v, block_kv, warpgroups, stages, stages_q, turns,
        by_growth; // as shapes.def says
} fa4_sm90_shape;

enum { FA4_SM90_ROWS = 64 }; // queries of a warpgroup

// Elements of a row of one slab of shared memory: 128 bytes of swizzled columns, or 64 where dim is no multiple of
// that.
#define FA4_SM90_COLUMNS(dim) ((dim) % 64 == 0 ? 64 : 32)

// Shared memory: Q, K and V, then the barriers, in whole KiB.
#define FA4_SM90_SHARED_BYTES(s)                                                    \
    (((s).stages_q * (s).warpgroups * (FA4_SM90_ROWS * (s).dim * 2 + 3 * 8) +       \
      (s).stages * ((s).block_kv * ((s).dim + (s).dim_v) * 2 + 4 * 8) + 8 + 1023) / \
     1024 * 1024)

typedef struct {
    float *lse; // [batch, heads_q, len_q]
    int64_t stride_lse[3];
    const int32_t *len_kv_of; // [batch], or NULL
    fa4_tiles tiles;
    int32_t len_q, len_kv;
    int32_t lo, hi; // query i sees key j when lo <= j - i <= hi; clamped, so that i + lo and i + hi do not overflow
    // A weight is 2^(scale_log2 (s - max s)) with scale_log2 > 0 and s = q kᵀ. Where the scale is not a plain positive
    // number, s is multiplied by it first (prescale), and scale_log2 is 1.
    float scale_log2, prescale;
    int32_t has_prescale;
    // What a coordinate of q, k, v is multiplied by: 0 where the tensor repeats along it.
    int32_t step_batch[3], step_head[3];
} fa4_sm90_fwd_args;

#endif
