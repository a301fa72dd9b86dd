// The Blackwell forward's host side: which tiling runs a call. csrc/cuda/plan.c makes a plan of it.
#include "../cuda/tiling.h"
#include "args.h"

#include <float.h>

static const struct {
    fa4_sm100_shape shape;
    const char *kernel[2], *kernel_103[2]; // f16, bf16
} tilings[] = {
#define FA4_SM100_SHAPE(name, ...)                              \
    {{__VA_ARGS__},                                             \
     {"fa4_sm100_fwd_f16_" #name, "fa4_sm100_fwd_bf16_" #name}, \
     {"fa4_sm103_fwd_f16_" #name, "fa4_sm103_fwd_bf16_" #name}},
#include "shapes.def"
};

// log2 of how many query heads share the rows of a tile: all of a group where its number divides the tile, so that a
// few queries of many heads fill it. A q or o that repeats along the heads has no stride to pack by.
static int pack_log2_of(const fa4_fwd_params *p)
{
    const int64_t group = p->heads_kv ? p->heads_q / p->heads_kv : 1;
    const int64_t stride = p->stride_q[1] > p->stride_o[1] ? p->stride_q[1] : p->stride_o[1];
    if (group <= 1 || FA4_SM100_BLOCK_Q % group != 0 || p->stride_q[1] == 0) return 0;
    if (stride >= (INT64_C(1) << 39) / group) return 0; // that between groups must be below 2^40 bytes
    int log2 = 0;
    while (1 << log2 < group) log2++;
    return log2;
}

// The first tiling of that form that holds the head dims.
int fa4_sm100_fwd_tiling(const fa4_fwd_params *p, int ctas, fa4_fwd_tiling *tiling)
{
    for (size_t i = 0; i < sizeof tilings / sizeof *tilings; i++) {
        const fa4_sm100_shape *s = &tilings[i].shape;
        if (ctas != s->ctas || p->dim > s->dim || p->dim_v > s->dim_v) continue;
        *tiling = (fa4_fwd_tiling){
            .kernel = {tilings[i].kernel[0], tilings[i].kernel[1]},
            .kernel_103 = {tilings[i].kernel_103[0], tilings[i].kernel_103[1]},
            .dim = s->dim,
            .dim_v = s->dim_v,
            .ctas = ctas,
            .rows = ctas * FA4_SM100_TILES * FA4_SM100_BLOCK_Q,
            .box_q = FA4_SM100_BLOCK_Q,
            .box_k = FA4_SM100_BLOCK_KV / ctas,
            .box_v = FA4_SM100_BLOCK_KV,
            .pack_log2 = pack_log2_of(p),
            .rank_q = 5,
            .threads = 512,
            .shared_bytes = FA4_SM100_SHARED_BYTES(*s),
        };
        return 1;
    }
    return 0;
}

// Pairs are the faster form where every query sees every key, so that both CTAs have as much to do, and queries fill at
// least three quarters of their tiles. This may look at the number of queries: a row takes the same steps in either
// form and gets the same bits.
static int tiling_of(const fa4_fwd_params *p, fa4_fwd_tiling *tiling)
{
    fa4_fwd_tiling pair;
    if (!fa4_sm100_fwd_tiling(p, 1, tiling)) return 0;
    if (p->lo > 1 - p->len_q || p->hi < p->len_kv - 1) return 1;
    if (!fa4_sm100_fwd_tiling(p, 2, &pair) || pair.dim != tiling->dim || pair.dim_v != tiling->dim_v) return 1;
    const int64_t len_q = p->len_q < INT32_MAX ? p->len_q : INT32_MAX; // more is refused
    const int64_t rows = len_q << pair.pack_log2, tiled = (rows + pair.rows - 1) / pair.rows * pair.rows;
    if (4 * rows >= 3 * tiled) *tiling = pair;
    return 1;
}

static void set_scale(fa4_fwd_args *args, double scale_log2)
{
    const float size = (float)(scale_log2 < 0 ? -scale_log2 : scale_log2);
    args->scale_log2 = size < FLT_MIN ? FLT_MIN : size;
    args->negative = scale_log2 < 0;
}

const fa4_fwd_kernels fa4_sm100_fwd = {
    .name = "Blackwell",
    .section_bytes = 50 << 20,
    .tiling_of = tiling_of,
    .set_scale = set_scale,
};
