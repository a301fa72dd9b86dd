// The Hopper forward's host side: which tiling runs a call. csrc/cuda/plan.c makes a plan of it.
#include "../cuda/tiling.h"
#include "args.h"

static const struct {
    fa4_sm90_shape shape;
    const char *kernel[2]; // f16, bf16
} tilings[] = {
#define FA4_SM90_SHAPE(name, ...) {{__VA_ARGS__}, {"fa4_sm90_fwd_f16_" #name, "fa4_sm90_fwd_bf16_" #name}},
#include "shapes.def"
};

// The first tiling that holds the head dims and is meant for so many keys.
static int tiling_of(const fa4_fwd_params *p, fa4_fwd_tiling *tiling)
{
    // Without an upper bound that any query's last key meets, and without a lower one.
    const int full = p->lo == FA4_UNBOUNDED_LO && p->hi >= p->len_kv - 1;
    for (size_t i = 0; i < sizeof tilings / sizeof *tilings; i++) {
        const fa4_sm90_shape *s = &tilings[i].shape;
        if (p->dim > s->dim || p->dim_v > s->dim_v || p->len_kv < (full ? s->full_from : s->band_from)) continue;
        *tiling = (fa4_fwd_tiling){
            .kernel = {tilings[i].kernel[0], tilings[i].kernel[1]},
            .dim = s->dim,
            .dim_v = s->dim_v,
            .ctas = 1,
            .rows = s->warpgroups * FA4_SM90_ROWS,
            .box_q = FA4_SM90_ROWS,
            .box_k = s->block_kv,
            .box_v = s->block_kv,
            .rank_q = 4,
            .threads = 128 * (s->warpgroups + 1),
            .shared_bytes = FA4_SM90_SHARED_BYTES(*s),
        };
        return 1;
    }
    return 0;
}

static void set_scale(fa4_fwd_args *args, double scale_log2)
{
    // Scores times the scale, rounded, less their maximum times the scale, rounded: exact enough while the products
    // stay small. Signs other than +, 0 and what is near overflow or underflow go through the prescale.
    args->has_prescale = !(scale_log2 >= 1e-12 && scale_log2 <= 1e3);
    args->prescale = args->has_prescale ? (float)scale_log2 : 1;
    args->scale_log2 = args->has_prescale ? 1 : (float)scale_log2;
}

const fa4_fwd_kernels fa4_sm90_fwd = {
    .name = "Hopper",
    .section_bytes = 16 << 20, // of an H200's L2, of which a chip's halves may each hold a copy
    .tiling_of = tiling_of,
    .set_scale = set_scale,
};
