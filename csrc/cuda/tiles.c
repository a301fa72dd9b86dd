#include "tiles.h"

#include <string.h>

// Beyond so many changes of length in the list nobody notices a tile more or less, and looking at all takes longer.
enum { RUNS_MAX = 4096 };

typedef struct {
    int64_t load[FA4_CTAS_MAX]; // beyond what all CTAs have alike
    uint8_t last[FA4_CTAS_MAX]; // as in fa4_tiles
    int64_t most;               // load of the CTA that ends last
} deal;

// Tiles [begin, end) of the list, all of this cost, to the CTAs that the rounds before the last give them to. Sums of
// d->load are the loads: it holds differences between neighbours.
static void add_run(deal *d, int32_t begin, int32_t end, int64_t cost, int32_t ctas, int turns)
{
    while (begin < end) {
        const int32_t round = begin / ctas, from = begin - round * ctas;
        const int32_t to = end - round * ctas < ctas ? end - round * ctas : ctas;
        if (from == 0 && to == ctas) { // whole rounds are everyone's
            begin += (end - begin) / ctas * ctas;
            continue;
        }
        const int back = round & turns;
        d->load[back ? ctas - to : from] += cost;
        if ((back ? ctas - from : to) < ctas) d->load[back ? ctas - from : to] -= cost;
        begin = round * ctas + to;
    }
}

static void deal_last_round(deal *d, const fa4_tiles *t, int32_t ctas, fa4_tile_cost *cost, const void *context)
{
    uint8_t by_load[FA4_CTAS_MAX] = {0}; // CTAs, the one with the least first
    for (int32_t c = 0; c < ctas; c++) {
        if (c > 0) d->load[c] += d->load[c - 1];
        int32_t at = c;
        for (; at > 0 && d->load[by_load[at - 1]] > d->load[c]; at--) by_load[at] = by_load[at - 1];
        by_load[at] = (uint8_t)c;
    }
    const int32_t first = t->last_round * ctas;
    d->most = d->load[by_load[ctas - 1]];
    for (int32_t i = 0; i < ctas; i++) {
        d->last[by_load[i]] = (uint8_t)i;
        if (first + i >= t->count) continue;
        const int64_t load = d->load[by_load[i]] + cost(context, fa4_tile_at(t, first + i).block);
        if (load > d->most) d->most = load;
    }
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
    t->last_round = (t->count - 1) / ctas;
    deal straight = {.most = 0}, turning = {.most = 0};
    if (t->blocks <= RUNS_MAX / t->sections) {
        const int32_t first = t->last_round * ctas;
        for (int32_t begin = 0, end; begin < first; begin = end) {
            const int32_t unit = begin / (t->group * t->blocks) / t->section * t->section;
            const int32_t units = t->units - unit < t->section ? t->units - unit : t->section;
            end = begin + units * t->group < first ? begin + units * t->group : first;
            const int64_t one = cost(context, fa4_tile_at(t, begin).block);
            add_run(&straight, begin, end, one, ctas, 0);
            add_run(&turning, begin, end, one, ctas, 1);
        }
    }
    deal_last_round(&straight, t, ctas, cost, context);
    deal_last_round(&turning, t, ctas, cost, context);
    t->turns = turning.most <= straight.most;
    memcpy(t->last, t->turns ? turning.last : straight.last, sizeof t->last);
}
