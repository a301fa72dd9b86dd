// The Hopper forward's host side: which tiling runs a call, its tensor maps and arguments, as a plan.
#include "../cuda/backend.h"
#include "../cuda/maps.h"
#include "../error.h"
#include "args.h"

#include <math.h>
#include <string.h>

typedef struct {
    fa4_sm90_shape shape;
    const char *kernel[2]; // f16, bf16
} tiling;

static const tiling tilings[] = {
#define FA4_SM90_SHAPE(name, ...) {{__VA_ARGS__}, {"fa4_sm90_fwd_f16_" #name, "fa4_sm90_fwd_bf16_" #name}},
#include "shapes.def"
};

enum {
    TILINGS = sizeof tilings / sizeof *tilings,
    LENGTH_MAX = 1 << 30,     // i + hi must not overflow
    SECTION_BYTES = 16 << 20, // of K and V that stay in L2 (50 MB, of which a chip's halves may each hold a copy)
};

// The first tiling that holds the head dims; NULL without one. Looks at nothing that differs between rows of one call's
// result and another's: batch, heads, number of queries.
static const tiling *tiling_of(const fa4_fwd_params *p)
{
    // Without an upper bound that any query's last key meets, and without a lower one.
    const int full = p->lo == FA4_UNBOUNDED_LO && p->hi >= p->len_kv - 1;
    for (int i = 0; i < TILINGS; i++) {
        const fa4_sm90_shape *s = &tilings[i].shape;
        if (p->dim <= s->dim && p->dim_v <= s->dim_v && p->len_kv >= (full ? s->full_from : s->band_from))
            return &tilings[i];
    }
    return NULL;
}

typedef struct {
    int64_t q[4], k[4], v[4], o[4];
} sizes;

static sizes sizes_of(const fa4_fwd_params *p)
{
    return (sizes){
        .q = {p->batch, p->heads_q, p->len_q, p->dim},
        .k = {p->batch, p->heads_kv, p->len_kv, p->dim},
        .v = {p->batch, p->heads_kv, p->len_kv, p->dim_v},
        .o = {p->batch, p->heads_q, p->len_q, p->dim_v},
    };
}

const char *fa4_sm90_fwd_unsupported(const fa4_fwd_params *p)
{
    if (p->dtype != FA4_F16 && p->dtype != FA4_BF16) return "the Hopper kernels take float16 and bfloat16 only";
    if (p->mask_type != FA4_MASK_NONE)
        return "the Hopper kernels take no mask tensor: say what they may see as causal, a window or key lengths";
    if (!tiling_of(p))
        return fa4_reason("the Hopper kernels have no tiling for head dims %lld and %lld", (long long)p->dim,
                          (long long)p->dim_v);
    if (p->len_q > LENGTH_MAX || p->len_kv > LENGTH_MAX)
        return fa4_reason("the Hopper kernels take at most %d queries and keys", LENGTH_MAX);
    if (p->batch * p->heads_q > LENGTH_MAX || p->batch * p->heads_q * ((p->len_q + 127) / 128) > INT32_MAX)
        return "the Hopper kernels take at most 2^31 tiles of 128 queries";
    if (p->batch == 0 || p->heads_q == 0 || p->len_q == 0) return NULL; // nothing to copy
    const sizes size = sizes_of(p);
    const char *reason = fa4_map_unsupported("q", p->q, size.q, p->stride_q);
    if (!reason) reason = fa4_map_unsupported("k", p->k, size.k, p->stride_k);
    if (!reason) reason = fa4_map_unsupported("v", p->v, size.v, p->stride_v);
    if (!reason) reason = fa4_map_unsupported("o", p->o, size.o, p->stride_o);
    return reason;
}

static int64_t clamp(int64_t x, int64_t least, int64_t most)
{
    return x < least ? least : x > most ? most : x;
}

static int64_t at_least_one(int64_t x)
{
    return x < 1 ? 1 : x;
}

static fa4_tiles tiles_of(const fa4_fwd_params *p, const fa4_sm90_shape *shape, const fa4_chip *chip)
{
    const int64_t block = (int64_t)shape->warpgroups * FA4_SM90_ROWS;
    const int64_t blocks = (p->len_q + block - 1) / block, units = p->batch * p->heads_kv;
    const int64_t unit_bytes = 2 * at_least_one(p->len_kv) * (p->dim + p->dim_v);
    const int full = p->lo == FA4_UNBOUNDED_LO && p->hi >= p->len_kv - 1;
    // Sections of about one round of CTAs would meet the turning points of the order in every round, and a last one
    // that is smaller would end elsewhere than the others: all are the same, and go one and a half times round at
    // least.
    const int64_t unit_tiles = p->heads_q / p->heads_kv * blocks;
    const int64_t fits = clamp(SECTION_BYTES / unit_bytes, 1, units);
    const int64_t rounds = clamp((3 * chip->multiprocessors / 2 + unit_tiles - 1) / unit_tiles, 1, units);
    int64_t sections = units / (fits > rounds ? fits : rounds);
    while (units % sections != 0) sections--;
    return (fa4_tiles){
        .count = (int32_t)(p->batch * p->heads_q * blocks),
        .blocks = (int32_t)blocks,
        .units = (int32_t)units,
        .heads_kv = (int32_t)p->heads_kv,
        .group = (int32_t)(p->heads_q / p->heads_kv),
        // With tiles of one length the order within a unit is as good as any, and one unit after another is kindest to
        // L2.
        .section = full ? 1 : (int32_t)(units / sections),
        .longest_last = p->lo == FA4_UNBOUNDED_LO,
    };
}

static void set_scale(fa4_sm90_fwd_args *args, double scale)
{
    const double log2e = 1.44269504088896340736;
    const double scale_log2 = scale * log2e;
    // Scores times the scale, rounded, less their maximum times the scale, rounded: exact enough while the products
    // stay small. Signs other than +, 0 and what is near overflow or underflow go through the prescale.
    args->has_prescale = !(scale_log2 >= 1e-12 && scale_log2 <= 1e3);
    args->prescale = args->has_prescale ? (float)scale_log2 : 1;
    args->scale_log2 = args->has_prescale ? 1 : (float)scale_log2;
}

void fa4_sm90_fwd_plan(const fa4_fwd_params *p, const fa4_chip *chip, fa4_plan *plan)
{
    const tiling *t = tiling_of(p);
    const fa4_sm90_shape *shape = &t->shape;
    const sizes size = sizes_of(p);
    memset(plan, 0, sizeof *plan);
    plan->kernel = t->kernel[p->dtype == FA4_BF16];
    if (p->batch == 0 || p->heads_q == 0 || p->len_q == 0) return;

    fa4_sm90_fwd_args args = {
        .lse = p->lse,
        .stride_lse = {p->stride_lse[0], p->stride_lse[1], p->stride_lse[2]},
        .len_kv_of = p->len_kv_of,
        .tiles = tiles_of(p, shape, chip),
        .len_q = (int32_t)p->len_q,
        .len_kv = (int32_t)p->len_kv,
        .lo = (int32_t)clamp(p->lo, -p->len_q, p->len_kv),
        .hi = (int32_t)clamp(p->hi, -p->len_q, p->len_kv),
    };
    set_scale(&args, p->scale);
    const int64_t *strides[] = {p->stride_q, p->stride_k, p->stride_v};
    for (int i = 0; i < 3; i++) {
        args.step_batch[i] = strides[i][0] != 0;
        args.step_head[i] = strides[i][1] != 0;
    }
    _Static_assert(sizeof args <= FA4_PLAN_ARGS, "the plan must hold the arguments");
    memcpy(plan->args, &args, sizeof args);
    plan->args_size = sizeof args;

    const int columns = FA4_SM90_COLUMNS(shape->dim), columns_v = FA4_SM90_COLUMNS(shape->dim_v);
    plan->map_count = 4;
    plan->map[0] = fa4_map_of(p->q, p->dtype, size.q, p->stride_q, FA4_SM90_ROWS, columns);
    // Without a key there is nothing to load, but the driver wants maps of something.
    const int keys = p->len_kv > 0;
    plan->map[1] = keys ? fa4_map_of(p->k, p->dtype, size.k, p->stride_k, shape->block_kv, columns) : plan->map[0];
    plan->map[2] = keys ? fa4_map_of(p->v, p->dtype, size.v, p->stride_v, shape->block_kv, columns_v) : plan->map[0];
    plan->map[3] = fa4_map_of(p->o, p->dtype, size.o, p->stride_o, FA4_SM90_ROWS, columns_v);

    plan->grid[0] = (uint32_t)(args.tiles.count < chip->multiprocessors ? args.tiles.count : chip->multiprocessors);
    plan->grid[1] = plan->grid[2] = 1;
    plan->block[0] = (uint32_t)(128 * (shape->warpgroups + 1));
    plan->block[1] = plan->block[2] = 1;
    plan->cluster[0] = plan->cluster[1] = plan->cluster[2] = 1;
    plan->shared_bytes = FA4_SM90_SHARED_BYTES(*shape);
}
