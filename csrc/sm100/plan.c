// The Blackwell forward's host side: which tiling runs a call, its tensor maps and arguments, as a plan.
#include "../cuda/backend.h"
#include "../cuda/maps.h"
#include "../error.h"
#include "args.h"

#include <float.h>
#include <string.h>

typedef struct {
    fa4_sm100_shape shape;
    const char *kernel[2]; // f16, bf16
} tiling;

static const tiling tilings[] = {
#define FA4_SM100_SHAPE(name, ...) {{__VA_ARGS__}, {"fa4_sm100_fwd_f16_" #name, "fa4_sm100_fwd_bf16_" #name}},
#include "shapes.def"
};

enum {
    TILINGS = sizeof tilings / sizeof *tilings,
    LENGTH_MAX = 1 << 30,     // i + hi must not overflow
    SECTION_BYTES = 50 << 20, // of K and V that stay in L2
};

// The first tiling that holds the head dims; NULL without one. Looks at nothing that differs between rows of one call's
// result and another's: batch, heads, number of queries.
static const tiling *tiling_of(const fa4_fwd_params *p)
{
    for (int i = 0; i < TILINGS; i++) {
        const fa4_sm100_shape *s = &tilings[i].shape;
        if (p->dim <= s->dim && p->dim_v <= s->dim_v) return &tilings[i];
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

// log2 of how many query heads share the rows of a tile: all of a group where its number divides the tile, so that a
// few queries of many heads fill it. A q or o that repeats along the heads has no stride to pack by.
static int pack_log2_of(const fa4_fwd_params *p)
{
    const int64_t group = p->heads_kv ? p->heads_q / p->heads_kv : 1;
    if (group <= 1 || FA4_SM100_BLOCK_Q % group != 0 || p->stride_q[1] == 0) return 0;
    int log2 = 0;
    while (1 << log2 < group) log2++;
    return log2;
}

const char *fa4_sm100_fwd_unsupported(const fa4_fwd_params *p)
{
    if (p->dtype != FA4_F16 && p->dtype != FA4_BF16) return "the Blackwell kernels take float16 and bfloat16 only";
    if (p->mask_type != FA4_MASK_NONE)
        return "the Blackwell kernels take no mask tensor: say what they may see as causal, a window or key lengths";
    if (!tiling_of(p))
        return fa4_reason("the Blackwell kernels have no tiling for head dims %lld and %lld", (long long)p->dim,
                          (long long)p->dim_v);
    if (p->len_q > LENGTH_MAX >> pack_log2_of(p) || p->len_kv > LENGTH_MAX)
        return fa4_reason("the Blackwell kernels take at most %d queries and keys", LENGTH_MAX);
    if (p->batch * p->heads_q > LENGTH_MAX || p->batch * p->heads_q * ((p->len_q + 255) / 256) > INT32_MAX)
        return "the Blackwell kernels take at most 2^31 tiles of 256 queries";
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

// A map of [batch, heads, len, dim] as [batch, units, len, pack, dim], boxes of 128 rows.
static fa4_tensor_map packed(fa4_tensor_map m, int pack)
{
    const uint64_t head = m.stride[1];
    m.rank = 5;
    m.size[4] = m.size[3];
    m.size[3] = m.size[2] / (uint64_t)pack;
    m.size[2] = m.size[1];
    m.size[1] = (uint64_t)pack;
    m.stride[3] = m.stride[2];
    m.stride[2] = head * (uint64_t)pack;
    m.stride[1] = m.stride[0];
    m.stride[0] = head;
    m.box[1] = (uint32_t)pack;
    m.box[2] = FA4_SM100_BLOCK_Q / (uint32_t)pack;
    m.box[3] = m.box[4] = m.element_stride[4] = 1;
    return m;
}

static fa4_tiles tiles_of(const fa4_fwd_params *p, int pack_log2)
{
    const int64_t block = FA4_SM100_TILES * FA4_SM100_BLOCK_Q;
    const int64_t blocks = ((p->len_q << pack_log2) + block - 1) / block, units = p->batch * p->heads_kv;
    const int64_t unit_bytes = 2 * (p->len_kv < 1 ? 1 : p->len_kv) * (p->dim + p->dim_v);
    return (fa4_tiles){
        .count = (int32_t)(p->batch * (p->heads_q >> pack_log2) * blocks),
        .blocks = (int32_t)blocks,
        .units = (int32_t)units,
        .heads_kv = (int32_t)p->heads_kv,
        .group = (int32_t)(p->heads_q / p->heads_kv >> pack_log2),
        .section = (int32_t)clamp(SECTION_BYTES / unit_bytes, 1, units),
        .longest_last = p->lo == FA4_UNBOUNDED_LO,
    };
}

void fa4_sm100_fwd_plan(const fa4_fwd_params *p, const fa4_chip *chip, fa4_plan *plan)
{
    const double log2e = 1.44269504088896340736;
    const tiling *t = tiling_of(p);
    const fa4_sm100_shape *shape = &t->shape;
    const sizes size = sizes_of(p);
    memset(plan, 0, sizeof *plan);
    plan->kernel = t->kernel[p->dtype == FA4_BF16];
    if (p->batch == 0 || p->heads_q == 0 || p->len_q == 0) return;

    const int pack_log2 = pack_log2_of(p);
    const float scale_log2 = (float)((p->scale < 0 ? -p->scale : p->scale) * log2e);
    fa4_sm100_fwd_args args = {
        .lse = p->lse,
        .stride_lse = {p->stride_lse[0], p->stride_lse[1], p->stride_lse[2]},
        .len_kv_of = p->len_kv_of,
        .tiles = tiles_of(p, pack_log2),
        .len_q = (int32_t)p->len_q,
        .len_kv = (int32_t)p->len_kv,
        .pack_log2 = pack_log2,
        .lo = (int32_t)clamp(p->lo, -p->len_q, p->len_kv),
        .hi = (int32_t)clamp(p->hi, -p->len_q, p->len_kv),
        .scale_log2 = scale_log2 < FLT_MIN ? FLT_MIN : scale_log2,
        .negative = p->scale < 0,
    };
    const int64_t *strides[] = {p->stride_q, p->stride_k, p->stride_v};
    for (int i = 0; i < 3; i++) {
        args.step_batch[i] = strides[i][0] != 0;
        args.step_head[i] = strides[i][1] != 0;
    }
    _Static_assert(sizeof args <= FA4_PLAN_ARGS, "the plan must hold the arguments");
    memcpy(plan->args, &args, sizeof args);
    plan->args_size = sizeof args;

    const int columns = FA4_SM100_COLUMNS(shape->dim), columns_v = FA4_SM100_COLUMNS(shape->dim_v);
    plan->map_count = 4;
    plan->map[0] = packed(fa4_map_of(p->q, p->dtype, size.q, p->stride_q, FA4_SM100_BLOCK_Q, columns), 1 << pack_log2);
    // Without a key there is nothing to load, but the driver wants maps of something.
    const int keys = p->len_kv > 0;
    plan->map[1] = keys ? fa4_map_of(p->k, p->dtype, size.k, p->stride_k, FA4_SM100_BLOCK_KV, columns) : plan->map[0];
    plan->map[2] = keys ? fa4_map_of(p->v, p->dtype, size.v, p->stride_v, FA4_SM100_BLOCK_KV, columns_v) : plan->map[0];
    plan->map[3] =
        packed(fa4_map_of(p->o, p->dtype, size.o, p->stride_o, FA4_SM100_BLOCK_Q, columns_v), 1 << pack_log2);

    plan->grid[0] = (uint32_t)(args.tiles.count < chip->multiprocessors ? args.tiles.count : chip->multiprocessors);
    plan->grid[1] = plan->grid[2] = 1;
    plan->block[0] = 512;
    plan->block[1] = plan->block[2] = 1;
    plan->cluster[0] = plan->cluster[1] = plan->cluster[2] = 1;
    plan->shared_bytes = FA4_SM100_SHARED_BYTES(*shape);
}
