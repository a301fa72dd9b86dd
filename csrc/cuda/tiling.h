// What a chip's plan.c says of its forward kernels. csrc/cuda/plan.c makes the rest of a plan of it, the same for all.
#ifndef FA4_CUDA_TILING_H
#define FA4_CUDA_TILING_H

#include "../plan.h"
#include "args.h"

#ifdef __cplusplus
extern "C" {
#endif

// One kernel, and how it cuts a call.
typedef struct {
    const char *kernel[2];     // its name for f16, for bf16
    const char *kernel_103[2]; // that of its code for compute capability 10.3; NULL without
    int dim, dim_v;            // head dims are zero filled to these
    int ctas;                  // of a cluster, which work as one
    int rows;                  // of a tile: the queries, times pack, that they take at once
    int box_q, box_k, box_v;   // rows that one tensor copy moves; box_q of O too
    int pack_log2;             // of how many query heads share the rows of a tile
    int rank_q;                // of the maps of Q and O: 4, or 5 with a dimension for those heads
    int threads;
    uint32_t shared_bytes;
} fa4_fwd_tiling;

typedef struct {
    const char *name;      // as "the Hopper kernels"
    int64_t section_bytes; // of K and V that stay in its L2 cache
    // The tiling that runs these params; 0 without one for their head dims. Among tilings that give other bits it
    // chooses by nothing that differs between rows of one call's result and another's: batch, heads, number of queries.
    int (*tiling_of)(const fa4_fwd_params *p, fa4_fwd_tiling *tiling);
    // Sets what its kernels read of scale_log2, prescale, has_prescale and negative.
    void (*set_scale)(fa4_fwd_args *args, double scale_log2);
} fa4_fwd_kernels;

extern const fa4_fwd_kernels fa4_sm90_fwd, fa4_sm100_fwd;

// Of Blackwell, the tiling for CTAs alone (1) or in pairs (2), which give the same bits; 0 without one.
int fa4_sm100_fwd_tiling(const fa4_fwd_params *p, int ctas, fa4_fwd_tiling *tiling);

// The plan of params that the chip can run, by this tiling.
void fa4_fwd_plan_of(const fa4_fwd_params *p, const fa4_chip *chip, const fa4_fwd_tiling *t, fa4_plan *plan);

#ifdef __cplusplus
}
#endif

#endif
