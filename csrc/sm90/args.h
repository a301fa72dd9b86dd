// What csrc/sm90/plan.c and csrc/sm90/fwd.cu agree on: the tilings, and the kernel's arguments beside its tensor maps.
// Plain data, the same for host and device.
#ifndef FA4_SM90_ARGS_H
#define FA4_SM90_ARGS_H

#include "../cuda/args.h"

typedef struct {
    int full_from, band_from, dim, dim_v, block_kv, warpgroups, stages, stages_q, turns,
        by_growth; // as shapes.def says
} fa4_sm90_shape;

enum { FA4_SM90_ROWS = 64 }; // queries of a warpgroup

// Shared memory: Q, K and V, what the tile warp tells, then the barriers, in whole KiB.
#define FA4_SM90_SHARED_BYTES(s)                                                             \
    (((s).stages_q * (s).warpgroups * (FA4_SM90_ROWS * (s).dim * 2 + 3 * 8) +                \
      (s).stages * ((s).block_kv * ((s).dim + (s).dim_v) * 2 + 4 * 8) + 4 * 48 + 8 + 1023) / \
     1024 * 1024)

#endif
