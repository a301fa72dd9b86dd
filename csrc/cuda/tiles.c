#include "tiles.h"

#include <string.h>

// Beyond so many changes of length in the list nobody notices a tile more or less, and looking at all takes longer.
enum { RUNS_MAX = 4096 };

// What each CTA has to do.
typedef int64_t loads[FA4_CTAS_MAX];

// Adds tiles [begin, end) of the list, all of this cost, to differences between neighbouring CTAs. Whole rounds are
// everyone's, and left out; gives their cost.
static int64_t add_run(loads load, int32_t begin, int32_t end, int64_t cost, int32_t ctas, int turns)
{
    int64_t everyones = 0;
    while (begin < end) {
        const int32_t round = begin / ctas, from = begin - round * ctas;
        const int32_t to = end - round * ctas < ctas ? end - round * ctas : ctas;
        if (from == 0 && to == ctas) {
            everyones += (end - begin) / ctas * cost;
            begin += (end - begin) / ctas * ctas;
            continue;
        }
        const int back = round & turns;
        load[back ? ctas - to : from] += cost;
        if ((back ? ctas - from : to) < ctas) load[back ? ctas - from : to] -= cost;
        begin = round * ctas + to;
    }
    return everyones;
}

// order: 0 to n - 1 by key, the smallest first.
static void sort(uint8_t *order, const int64_t *key, int32_t n)
{
    static const int32_t gaps[] = {57, 23, 10, 4, 1};
    for (int32_t i = 0; i < n; i++) order[i] = (uint8_t)i;
    for (size_t g = 0; g < sizeof gaps / sizeof *gaps; g++)
        for (int32_t i = gaps[g]; i < n; i++) {
            const uint8_t one = order[i];
            int32_t at = i;
            for (; at >= gaps[g] && key[order[at - gaps[g]]] > key[one]; at -= gaps[g]) order[at] = order[at - gaps[g]];
            order[at] = one;
        }
}

// A round of n tiles, of which -minus_cost is what each costs.
static void deal_by_need(loads load, uint8_t *tile_of, const int64_t *minus_cost, int32_t n, int32_t ctas)
{
    uint8_t by_load[FA4_CTAS_MAX], by_cost[FA4_CTAS_MAX];
    sort(by_load, load, ctas);
    sort(by_cost, minus_cost, n);
    for (int32_t i = 0; i < ctas; i++) {
        tile_of[by_load[i]] = i < n ? by_cost[i] : (uint8_t)i;
        if (i < n) load[by_load[i]] -= minus_cost[by_cost[i]];
    }
}

static int64_t most(const loads load, int32_t ctas)
{
    int64_t found = load[0];
    for (int32_t c = 1; c < ctas; c++) found = load[c] > found ? load[c] : found;
    return found;
}

static fa4_divisor divisor(int32_t d)
{
    uint32_t log2 = 0; // rounded up
    while ((int64_t)1 << log2 < d) log2++;
    if (log2 == 0) return (fa4_divisor){0, 0};
    return (fa4_divisor){(uint32_t)((((uint64_t)1 << (31 + log2)) + (uint32_t)d - 1) / (uint32_t)d), log2 - 1};
}

void fa4_tiles_prepare(fa4_tiles *t)
{
    t->sections = (t->units - 1) / t->section + 1;
    t->per_section = divisor(t->section * t->group * t->blocks);
    t->per_rank = divisor(t->section * t->group);
    t->per_last_rank = divisor((t->units - (t->sections - 1) * t->section) * t->group);
    t->per_unit = divisor(t->group);
    t->per_batch = divisor(t->heads_kv);
}

void fa4_tiles_deal(fa4_tiles *t, int32_t ctas, fa4_tile_cost *cost, const void *context)
{
    const int32_t rounds = (t->count - 1) / ctas + 1;
    const int32_t ends = rounds < FA4_BY_NEED_MAX ? rounds : FA4_BY_NEED_MAX; // rounds that may be dealt by need
    const int32_t tail = (rounds - ends) * ctas;                              // their first tile
    loads before[FA4_BY_NEED_MAX][2] = {{{0}}}; // each of them, where those before are dealt straight or in turns
    int64_t minus_cost[FA4_BY_NEED_MAX * FA4_CTAS_MAX] = {0}, everyones = 0, sum = 0;
    int32_t end = t->blocks <= RUNS_MAX / t->sections ? 0 : tail;
    for (int32_t begin = end; begin < t->count; begin = end) {
        const int32_t unit = begin / (t->group * t->blocks) / t->section * t->section;
        const int32_t units = t->units - unit < t->section ? t->units - unit : t->section;
        const int32_t heads = units * t->group, left = heads - (begin - unit * t->group * t->blocks) % heads;
        const int64_t one = cost(context, fa4_tile_at(t, begin).block);
        end = left < t->count - begin ? begin + left : t->count;
        sum += (end - begin) * one;
        const int32_t head = end < tail ? end : tail;
        everyones += add_run(before[0][0], begin, head, one, ctas, 0);
        add_run(before[0][1], begin, head, one, ctas, 1);
        for (int32_t i = begin > tail ? begin : tail; i < end; i++) minus_cost[i - tail] = -one;
    }
    for (int turns = 0; turns < 2; turns++) {
        for (int32_t c = 1; c < ctas; c++) before[0][turns][c] += before[0][turns][c - 1];
        for (int32_t r = 1; r < ends; r++)
            for (int32_t c = 0; c < ctas; c++) {
                const int back = (rounds - ends + r - 1) & turns;
                before[r][turns][c] = before[r - 1][turns][c] - minus_cost[(r - 1) * ctas + (back ? ctas - 1 - c : c)];
            }
    }
    int64_t least = INT64_MAX;
    for (int32_t from = ends - 1; from >= 0; from--)
        for (int turns = 1; turns >= 0; turns--) {
            if (least != INT64_MAX && (least + everyones) * ctas <= sum + sum / 256)
                return; // close to what nothing beats
            uint8_t need[FA4_BY_NEED_MAX][FA4_CTAS_MAX] = {{0}};
            loads own;
            memcpy(own, before[from][turns], sizeof own);
            for (int32_t r = from; r < ends; r++) {
                const int32_t first = tail + r * ctas, n = t->count - first < ctas ? t->count - first : ctas;
                deal_by_need(own, need[r - from], minus_cost + r * ctas, n, ctas);
            }
            const int64_t last_end = most(own, ctas);
            if (last_end >= least) continue;
            least = last_end;
            t->turns = turns;
            t->by_need = rounds - ends + from;
            memcpy(t->need, need, sizeof need);
        }
}
