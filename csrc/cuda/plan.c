// The host side of every CUDA forward: params to the launch that runs them. No CUDA header: the simulator calls this
// too.
#include "../error.h"
#include "backend.h"
#include "maps.h"
#include "tiling.h"

#include <float.h>
#include <string.h>

#pragma weak fa4_cuda_has_kernel

enum {
    LENGTH_MAX = 1 << 30,  // i + hi + 1 must not overflow
    SECTION_MAX = 1 << 10, // units: more than any chip has to do at a time
};

// Of a chip that has kernels.
static const fa4_fwd_kernels *kernels_of(int arch)
{
    return arch == 90 ? &fa4_sm90_fwd : &fa4_sm100_fwd;
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

static int64_t clamp(int64_t x, int64_t least, int64_t most)
{
    return x < least ? least : x > most ? most : x;
}

static int64_t divide_up(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

// Tiles of the rows that share a K/V head in one batch, and are packed together.
static int64_t blocks_of(const fa4_fwd_params *p, const fa4_fwd_tiling *t)
{
    return divide_up(p->len_q << t->pack_log2, t->rows);
}

// Another that the same launch runs may be there for one that the build left out.
typedef struct {
    const char *name, *otherwise; // otherwise: or NULL
} kernel_names;

static kernel_names kernel_names_of(const fa4_fwd_params *p, const fa4_fwd_tiling *t, int arch)
{
    const int type = p->dtype == FA4_BF16;
    const char *own = arch == 103 ? t->kernel_103[type] : NULL;
    return own ? (kernel_names){own, t->kernel[type]} : (kernel_names){t->kernel[type], NULL};
}

static int has_kernel(kernel_names names)
{
    if (!fa4_cuda_has_kernel || fa4_cuda_has_kernel(names.name)) return 1;
    return names.otherwise && fa4_cuda_has_kernel(names.otherwise);
}

const char *fa4_cuda_fwd_unsupported(const fa4_fwd_params *p, int arch)
{
    const fa4_fwd_kernels *kernels = kernels_of(arch);
    fa4_fwd_tiling t;
    if (p->dtype != FA4_F16 && p->dtype != FA4_BF16)
        return fa4_reason("the %s kernels take float16 and bfloat16 only", kernels->name);
    if (p->mask_type != FA4_MASK_NONE)
        return fa4_reason(
            "the %s kernels take no mask tensor: say what they may see as causal, a window or key lengths",
            kernels->name);
    if (!kernels->tiling_of(p, &t))
        return fa4_reason("the %s kernels have no tiling for head dims %lld and %lld", kernels->name, (long long)p->dim,
                          (long long)p->dim_v);
    const kernel_names names = kernel_names_of(p, &t, arch);
    if (!has_kernel(names)) return fa4_reason("this build left out the kernel %s", names.name);
    if (p->len_q > LENGTH_MAX >> t.pack_log2 || p->len_kv > LENGTH_MAX)
        return fa4_reason("the %s kernels take at most %d queries, divided by the query heads that share a head of k "
                          "and v where these fill a tile together, and at most %d keys",
                          kernels->name, LENGTH_MAX, LENGTH_MAX);
    if (p->batch == 0 || p->heads_q == 0 || p->len_q == 0) return NULL; // nothing to copy
    if (p->batch > LENGTH_MAX / p->heads_q || p->batch * p->heads_q > (INT32_MAX - FA4_CTAS_MAX) / blocks_of(p, &t))
        return fa4_reason("the %s kernels take at most 2^31 tiles of %d queries", kernels->name, t.rows);
    const sizes size = sizes_of(p);
    for (int d = 0; d < 2; d++)
        if (size.o[d] > 1 && p->stride_o[d] == 0) return fa4_reason("o must not repeat: it has a stride of 0");
    const char *reason = fa4_map_unsupported("q", p->q, size.q, p->stride_q);
    if (!reason) reason = fa4_map_unsupported("k", p->k, size.k, p->stride_k);
    if (!reason) reason = fa4_map_unsupported("v", p->v, size.v, p->stride_v);
    if (!reason) reason = fa4_map_unsupported("o", p->o, size.o, p->stride_o);
    return reason;
}

// What decides how many keys a tile sees.
typedef struct {
    int64_t len_q, len_kv, lo, hi; // the band clamped
    int64_t rows, pack_log2, block_kv;
} tile_keys;

// Blocks of keys that a block of queries sees, and one for what a tile costs beside them. A tile that the end of the
// queries cuts short is half as cheap as it is small.
static int64_t cost_of(const void *context, int32_t block)
{
    const tile_keys *k = context;
    const int64_t first = block * k->rows >> k->pack_log2;
    const int64_t end = clamp((block + 1) * k->rows >> k->pack_log2, 0, k->len_q);
    const int64_t key_begin = clamp(first + k->lo, 0, k->len_kv), key_end = clamp(end + k->hi, 0, k->len_kv);
    const int64_t blocks = key_begin >= key_end ? 0 : divide_up(key_end, k->block_kv) - key_begin / k->block_kv;
    return (1 + blocks) * (k->rows + ((end - first) << k->pack_log2));
}

// fa4_tiles_deal takes 5 to 70 us, and the layers of a model ask for the same, or for one of two: a thread keeps its
// last answers.
static void deal(fa4_tiles *tiles, int32_t ctas, const tile_keys *keys)
{
    enum { KEPT = 4 };
    static _Thread_local struct {
        fa4_tiles tiles;
        tile_keys keys;
        int32_t ctas;
    } kept[KEPT];
    static _Thread_local unsigned oldest;
    for (int i = 0; i < KEPT; i++) {
        if (kept[i].ctas != ctas || memcmp(&kept[i].tiles, tiles, offsetof(fa4_tiles, turns))) continue;
        if (memcmp(&kept[i].keys, keys, sizeof *keys)) continue;
        *tiles = kept[i].tiles;
        return;
    }
    fa4_tiles_deal(tiles, ctas, cost_of, keys);
    kept[oldest].tiles = *tiles;
    kept[oldest].keys = *keys;
    kept[oldest].ctas = ctas;
    oldest = (oldest + 1) % KEPT;
}

static fa4_tiles tiles_of(const fa4_fwd_params *p, const fa4_fwd_tiling *t, int64_t section_bytes, int ctas)
{
    const int64_t blocks = blocks_of(p, t), units = p->batch * p->heads_kv;
    const int64_t group = p->heads_q / p->heads_kv >> t->pack_log2;
    const int64_t unit_bytes = 2 * clamp(p->len_kv, 1, LENGTH_MAX) * (p->dim + p->dim_v);
    const int full = p->lo == FA4_UNBOUNDED_LO && p->hi >= p->len_kv - 1;
    const int alike = full && (p->len_q << t->pack_log2) % t->rows == 0;
    const tile_keys keys = {
        .len_q = p->len_q,
        .len_kv = p->len_kv,
        .lo = clamp(p->lo, -p->len_q, p->len_kv),
        .hi = clamp(p->hi, -p->len_q, p->len_kv - 1),
        .rows = t->rows,
        .pack_log2 = t->pack_log2,
        .block_kv = t->box_v,
    };
    // Sections of about one round of CTAs would meet the turning points of the order in every round: they go one and a
    // half times round at least. All are the same where that makes them at most half as large again, or a third
    // smaller.
    const int64_t most = units < SECTION_MAX ? units : SECTION_MAX;
    const int64_t fits = clamp(section_bytes / unit_bytes, 1, most);
    const int64_t rounds = clamp(divide_up(3 * ctas / 2, group * blocks), 1, most);
    const int64_t least = fits > rounds ? fits : rounds;
    int64_t section = least;
    while (units % section != 0 && 2 * (section + 1) <= 3 * least) section++;
    if (units % section != 0) section = least;
    while (units % section != 0 && 3 * (section - 1) >= 2 * least) section--;
    if (units % section != 0) section = least;
    fa4_tiles tiles = {
        .count = (int32_t)(units * group * blocks),
        .blocks = (int32_t)blocks,
        .units = (int32_t)units,
        .heads_kv = (int32_t)p->heads_kv,
        .group = (int32_t)group,
        // With tiles of one length the order within a unit is as good as any, and one unit after another is kindest to
        // L2.
        .section = alike ? 1 : (int32_t)section,
        .longest_last = cost_of(&keys, (int32_t)blocks - 1) >= cost_of(&keys, 0),
        .by_need = INT32_MAX,
    };
    fa4_tiles_prepare(&tiles);
    const int64_t cost_max = (1 + divide_up(p->len_kv, t->box_v)) * 2 * t->rows;
    const int countable = cost_max <= INT64_MAX / 2 / (tiles.count + ctas); // the cost of all rounds, and more
    // The grid has no CTA without a tile.
    if (!alike && countable) deal(&tiles, (int32_t)clamp(tiles.count, 1, ctas), &keys);
    return tiles;
}

static fa4_fwd_args args_of(const fa4_fwd_params *p, const fa4_fwd_kernels *kernels, const fa4_fwd_tiling *t, int ctas)
{
    const double log2e = 1.44269504088896340736;
    fa4_fwd_args args = {
        .lse = p->lse,
        .stride_lse = {p->stride_lse[0], p->stride_lse[1], p->stride_lse[2]},
        .len_kv_of = p->len_kv_of,
        .tiles = tiles_of(p, t, kernels->section_bytes, ctas),
        .len_q = (int32_t)p->len_q,
        .len_kv = (int32_t)p->len_kv,
        .lo = (int32_t)clamp(p->lo, -p->len_q, p->len_kv),
        .hi = (int32_t)clamp(p->hi, -p->len_q, p->len_kv - 1),
        .pack_log2 = t->pack_log2,
    };
    const double scale_log2 = p->scale * log2e; // of a scale that a float holds, but beyond float itself
    kernels->set_scale(&args, scale_log2 > FLT_MAX ? FLT_MAX : scale_log2 < -FLT_MAX ? -FLT_MAX : scale_log2);
    const int64_t *strides[] = {p->stride_q, p->stride_k, p->stride_v};
    for (int i = 0; i < 3; i++) {
        args.step_batch[i] = strides[i][0] != 0;
        args.step_head[i] = strides[i][1] != 0;
    }
    return args;
}

// A map of [batch, heads, len, dim] as [batch, units, len, pack, dim]; its boxes keep their rows.
static fa4_tensor_map packed(fa4_tensor_map m, int pack_log2)
{
    const uint64_t head = m.stride[1];
    m.rank = 5;
    m.size[4] = m.size[3];
    m.size[3] = m.size[2] >> pack_log2;
    m.size[2] = m.size[1];
    m.size[1] = UINT64_C(1) << pack_log2;
    m.stride[3] = m.stride[2];
    m.stride[2] = head << pack_log2;
    m.stride[1] = m.stride[0];
    m.stride[0] = head;
    m.box[2] = m.box[1] >> pack_log2;
    m.box[1] = 1u << pack_log2;
    m.box[3] = m.box[4] = m.element_stride[4] = 1;
    return m;
}

static void set_maps(const fa4_fwd_params *p, const fa4_fwd_tiling *t, fa4_tensor_map map[4])
{
    const sizes size = sizes_of(p);
    const int columns = FA4_COLUMNS(t->dim), columns_v = FA4_COLUMNS(t->dim_v);
    map[0] = fa4_map_of(p->q, p->dtype, size.q, p->stride_q, t->box_q, columns);
    map[3] = fa4_map_of(p->o, p->dtype, size.o, p->stride_o, t->box_q, columns_v);
    if (t->rank_q == 5) {
        map[0] = packed(map[0], t->pack_log2);
        map[3] = packed(map[3], t->pack_log2);
    }
    // Without a key there is nothing to load, but the driver wants maps of something.
    const int keys = p->len_kv > 0;
    map[1] = keys ? fa4_map_of(p->k, p->dtype, size.k, p->stride_k, t->box_k, columns) : map[0];
    map[2] = keys ? fa4_map_of(p->v, p->dtype, size.v, p->stride_v, t->box_v, columns_v) : map[0];
}

fa4_status fa4_fwd_plan(const fa4_fwd_params *p, const fa4_chip *chip, fa4_plan *plan)
{
    const char *reason = fa4_fwd_unsupported(p, chip->arch);
    if (reason) return fa4_fail(FA4_UNSUPPORTED, "%s", reason);
    if (chip->arch == FA4_ARCH_CPU) return fa4_fail(FA4_UNSUPPORTED, "the CPU runs calls without a plan");
    fa4_fwd_tiling t;
    kernels_of(chip->arch)->tiling_of(p, &t);
    fa4_fwd_plan_of(p, chip, &t, plan);
    return FA4_OK;
}

void fa4_fwd_plan_of(const fa4_fwd_params *p, const fa4_chip *chip, const fa4_fwd_tiling *t, fa4_plan *plan)
{
    memset(plan, 0, sizeof *plan);
    const kernel_names names = kernel_names_of(p, t, chip->arch);
    plan->kernel = names.name;
    plan->kernel_else = names.otherwise;
    if (p->batch == 0 || p->heads_q == 0 || p->len_q == 0) return;

    const int clusters = (int)clamp(chip->multiprocessors / t->ctas, 1, FA4_CTAS_MAX);
    const fa4_fwd_args args = args_of(p, kernels_of(chip->arch), t, clusters);
    _Static_assert(sizeof args <= FA4_PLAN_ARGS, "the plan must hold the arguments");
    memcpy(plan->args, &args, sizeof args);
    plan->args_size = sizeof args;
    plan->map_count = 4;
    set_maps(p, t, plan->map);
    plan->grid[0] = (uint32_t)(t->ctas * clamp(args.tiles.count, 1, clusters));
    plan->block[0] = (uint32_t)t->threads;
    plan->cluster[0] = (uint32_t)t->ctas;
    plan->grid[1] = plan->grid[2] = plan->block[1] = plan->block[2] = plan->cluster[1] = plan->cluster[2] = 1;
    plan->shared_bytes = t->shared_bytes;
}
