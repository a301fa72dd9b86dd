// What csrc/sm100/plan.c and csrc/sm100/fwd.cu agree on: the tilings, and the kernel's arguments beside its tensor
// maps. Plain data, the same for host and device.
#ifndef FA4_SM100_ARGS_H
#define FA4_SM100_ARGS_H

#include "../cuda/args.h"

typedef struct {
    int dim, dim_v, ctas, o_places, stages, emulated, registers_softmax, registers_correction; // as shapes.def says
} fa4_sm100_shape;

// Stages of the ring; -D may set them, in plan.c and fwd.cu alike, to tune a chip.
#ifdef FA4_STAGES
#    define FA4_SM100_STAGES(s) FA4_STAGES
#else
#    define FA4_SM100_STAGES(s) ((s).stages)
#endif

enum { FA4_SM100_BLOCK_Q = 128, FA4_SM100_BLOCK_KV = 128, FA4_SM100_TILES = 2 };

// Bytes of Q and O, of the ring of K and V, and of both and what warps tell each other, in whole KiB. Of a CTA.
#define FA4_SM100_QUERY_BYTES(s) (FA4_SM100_BLOCK_Q * (FA4_SM100_TILES * (s).dim + (s).o_places * (s).dim_v) * 2)
#define FA4_SM100_RING_BYTES(s)                             \
    (FA4_SM100_BLOCK_KV / (s).ctas * 2 *                    \
     ((s).o_places == 0     ? 2 * (s).dim + (s).dim_v       \
      : (s).dim > (s).dim_v ? FA4_SM100_STAGES(s) * (s).dim \
                            : FA4_SM100_STAGES(s) * (s).dim_v))
#define FA4_SM100_SHARED_BYTES(s)                                                                        \
    ((FA4_SM100_QUERY_BYTES(s) + FA4_SM100_RING_BYTES(s) + 2 * FA4_SM100_TILES * FA4_SM100_BLOCK_Q * 4 + \
      FA4_SM100_STAGES(s) * 2 * 8 + 9 * FA4_SM100_TILES * 8 + 2 * 8 + 1023) /                            \
     1024 * 1024)

#endif
