// The plans of GPU forwards, on random calls, absurd ones among them: whatever is not refused has maps that the driver
// takes and an order in which every tile comes exactly once.
#include "../../csrc/cuda/args.h"
#include "../../csrc/plan.h"
#include "check.h"

#include <string.h>

static uint64_t state;

static uint64_t random_below(uint64_t n) // splitmix64
{
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z ^ z >> 31) % n;
}

#define ONE_OF(...) \
    (((const int64_t[]){__VA_ARGS__})[random_below(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))])

static void make_dense(int64_t stride[4], int64_t heads, int64_t len, int64_t dim)
{
    const int64_t by_head = ONE_OF(0, 1), gap = dim % 8 ? 8 - dim % 8 : 8 * ONE_OF(0, 0, 1);
    stride[3] = 1;
    stride[2] = (dim + gap) * (by_head ? heads : 1);
    stride[1] = (dim + gap) * (by_head ? 1 : len);
    stride[0] = (dim + gap) * heads * len;
}

static fa4_fwd_params random_call(int absurd)
{
    fa4_fwd_params p = {0};
    p.batch = ONE_OF(0, 1, 2, 3, 7);
    p.heads_kv = ONE_OF(1, 2, 3, 8);
    p.heads_q = p.heads_kv * ONE_OF(1, 1, 2, 3, 4, 8, 128);
    p.len_q = (int64_t)random_below((uint64_t)ONE_OF(2, 300, 3000));
    p.len_kv = (int64_t)random_below((uint64_t)ONE_OF(2, 300, 20000));
    p.dim = 1 + (int64_t)random_below(256);
    p.dim_v = ONE_OF(p.dim, 1 + (int64_t)random_below(128));
    p.lo = ONE_OF(FA4_UNBOUNDED_LO, FA4_UNBOUNDED_LO, -100, 0, 50);
    p.hi = ONE_OF(FA4_UNBOUNDED_HI, 0, p.len_kv - p.len_q, 70, -30);
    p.scale = (double)ONE_OF(-2, 0, 1, 5);
    p.dtype = ONE_OF(FA4_F16, FA4_BF16) == FA4_F16 ? FA4_F16 : FA4_BF16;
    make_dense(p.stride_q, p.heads_q, p.len_q, p.dim);
    make_dense(p.stride_k, p.heads_kv, p.len_kv, p.dim);
    make_dense(p.stride_v, p.heads_kv, p.len_kv, p.dim_v);
    make_dense(p.stride_o, p.heads_q, p.len_q, p.dim_v);
    if (random_below(4) == 0) p.stride_k[0] = p.stride_k[1] = 0;
    int64_t *const sizes[] = {&p.batch, &p.heads_q, &p.heads_kv, &p.len_q, &p.len_kv, &p.dim, &p.dim_v, &p.lo, &p.hi};
    int64_t *const strides[] = {p.stride_q, p.stride_k, p.stride_v, p.stride_o};
    for (; absurd > 0; absurd--) {
        const int64_t value = ONE_OF(0, 1, -1, 3, 1 << 30, INT64_C(1) << 31, INT64_C(1) << 40, INT64_MAX, INT64_MIN);
        if (random_below(2))
            *sizes[random_below(sizeof sizes / sizeof *sizes)] = value;
        else
            strides[random_below(4)][random_below(4)] = value;
    }
    return p;
}

static void check_maps(const fa4_plan *plan)
{
    for (int i = 0; i < plan->map_count; i++) {
        const fa4_tensor_map *m = &plan->map[i];
        CHECK(m->rank >= 4 && m->rank <= 5 && m->address % 16 == 0, "map %d", i);
        for (int d = 0; d < m->rank; d++) {
            CHECK(m->size[d] >= 1 && m->size[d] <= UINT64_C(1) << 32, "size %d of map %d", d, i);
            CHECK(m->box[d] >= 1 && m->box[d] <= 256 && m->element_stride[d] == 1, "box %d of map %d", d, i);
            if (d > 0)
                CHECK(m->stride[d - 1] % 16 == 0 && m->stride[d - 1] > 0 && m->stride[d - 1] < UINT64_C(1) << 40,
                      "stride %d of map %d", d - 1, i);
        }
    }
}

static void check_tiles(const fa4_plan *plan)
{
    fa4_fwd_args args;
    CHECK(plan->args_size == sizeof args, "arguments of %zu bytes", plan->args_size);
    memcpy(&args, plan->args, sizeof args);
    const fa4_tiles *t = &args.tiles;
    const int32_t ctas = (int32_t)(plan->grid[0] / plan->cluster[0]);
    CHECK(ctas >= 1 && ctas <= t->count && ctas <= FA4_CTAS_MAX, "%d CTAs for %d tiles", ctas, t->count);
    CHECK((int64_t)args.len_q + args.hi <= INT32_MAX, "past the last query's last key: %d + %d", args.len_q, args.hi);
    if (t->count > 1 << 20) return;
    unsigned char *seen = allocate((size_t)t->count);
    memset(seen, 0, (size_t)t->count);
    for (int32_t round = 0; round * ctas < t->count; round++)
        for (int32_t cta = 0; cta < ctas; cta++) {
            const int32_t index = fa4_tile_index(t, round, cta, ctas);
            if (index >= t->count) continue;
            const fa4_tile tile = fa4_tile_at(t, index);
            const int32_t head = tile.batch * t->heads_kv * t->group + tile.head;
            CHECK(tile.head_kv == tile.head / t->group, "head %d reads K of %d", tile.head, tile.head_kv);
            CHECK(tile.block >= 0 && tile.block < t->blocks, "block %d of %d", tile.block, t->blocks);
            const int64_t at = (int64_t)head * t->blocks + tile.block;
            CHECK(at >= 0 && at < t->count && !seen[at], "tile %d", index);
            if (at >= 0 && at < t->count) seen[at] = 1;
        }
    for (int32_t i = 0; i < t->count; i++) CHECK(seen[i], "tile %d of %d is nobody's", i, t->count);
    free(seen);
}

// A call that is as long as there may be any.
static void check_a_longest(int arch, int64_t heads_q, int64_t len_q, int64_t hi)
{
    fa4_fwd_params p = {.batch = 1, .heads_q = heads_q, .heads_kv = 1, .len_q = len_q, .len_kv = 1 << 30};
    p.dim = p.dim_v = 8;
    p.lo = FA4_UNBOUNDED_LO;
    p.hi = hi;
    int64_t *const strides[] = {p.stride_q, p.stride_k, p.stride_v, p.stride_o};
    for (int i = 0; i < 4; i++) strides[i][0] = strides[i][1] = strides[i][2] = 8, strides[i][3] = 1;
    const fa4_chip chip = {.arch = arch, .multiprocessors = 132};
    fa4_plan plan;
    const fa4_status status = fa4_fwd_plan(&p, &chip, &plan);
    CHECK(status == FA4_OK, "the longest call on %d: %s", arch, fa4_last_error());
    if (status == FA4_OK) check_tiles(&plan);
    CHECK(fa4_fwd(&p, arch, NULL) == FA4_INVALID && strstr(fa4_last_error(), "k is NULL"), "NULL on %d", arch);
}

static void check_the_longest(void)
{
    for (int arch = 90; arch <= 100; arch += 10) {
        const int64_t tile = arch == 90 ? 192 : 256, heads = 1 << 20;
        check_a_longest(arch, 1, 1 << 30, FA4_UNBOUNDED_HI);
        // Almost 2^31 tiles, of which each sees all keys but a few.
        check_a_longest(arch, heads - 1, (1 << 11) * tile, (1 << 30) - 2);
        check_a_longest(arch, heads - 1, (1 << 11) * tile, -1);
    }
}

static void check_the_cpu(void)
{
    const fa4_fwd_params p = random_call(0);
    const fa4_chip chip = {.arch = FA4_ARCH_CPU, .multiprocessors = 1};
    fa4_plan plan;
    CHECK(fa4_fwd_plan(&p, &chip, &plan) == FA4_UNSUPPORTED, "the CPU has a plan: %s", plan.kernel);
}

int main(int argc, char **argv)
{
    const int cases = argc > 1 ? atoi(argv[1]) : 1000;
    check_the_longest();
    check_the_cpu();
    int planned = 0, refused = 0;
    for (int i = 0; i < cases && failures < 10; i++) {
        state = (uint64_t)i << 32;
        const fa4_fwd_params p = random_call(i % 2 ? (int)random_below(4) : 0);
        const fa4_chip chip = {.arch = (int)ONE_OF(90, 100, 103), .multiprocessors = (int)ONE_OF(1, 2, 132, 148, 400)};
        const char *reason = fa4_fwd_unsupported(&p, chip.arch);
        fa4_plan plan;
        const fa4_status status = fa4_fwd_plan(&p, &chip, &plan);
        CHECK((status == FA4_OK) == !reason, "case %d: %s", i, reason ? reason : fa4_last_error());
        CHECK(i % 2 || !reason || p.dim > 128 || p.dim_v > 128, "case %d is refused: %s", i, reason);
        if (status != FA4_OK) {
            refused++;
            continue;
        }
        planned++;
        if (plan.grid[0] == 0) continue;
        check_maps(&plan);
        check_tiles(&plan);
        if (failures) fprintf(stderr, "in case %d or before\n", i);
    }
    printf("%d calls planned, %d refused, %d failures\n", planned, refused, failures);
    return failures > 0;
}
