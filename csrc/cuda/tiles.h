// The order in which persistent CTAs take tiles of queries. Plain arithmetic on the CTA's index and a small table:
// nothing in memory counts, so a launch has nothing to reset and a graph can replay it. Host and device.
//
// A unit is one K/V head of one batch with the query heads that share it. Units are taken in sections whose K and V fit
// in the L2 cache together; inside a section the tiles go by the number of keys they see, all heads of one block of
// queries side by side. The last section runs from most to fewest keys, so that what is left over at the end is short,
// and the sections before it alternate: there is no jump in length between them. CTAs are dealt this list in rounds,
// always from the first CTA on, or forth and back in turns, and the last one to four rounds, of which the last need not
// be whole, by need: the longest tile of a round to the CTA that has the least to do, and so on. Of these ways it is
// the one that ends first.
//
// Why no clusterlaunchcontrol (a CTA that is done cancels one that has not begun, and takes its tile): it is greedy, as
// if CTAs were launched one by one in this order. Simulated (tests/test_tiles.py), greedy ends within 0.5 % of this
// order on the mean, within 3 % on either side, because the tiles' lengths are known beforehand. It would pay where
// they are not: lengths of their own for each batch, or other work on the chip at the same time. It costs an
// asynchronous request and an answer through shared memory a tile, which every warp has to wait for, and Hopper has
// none.
#ifndef FA4_CUDA_TILES_H
#define FA4_CUDA_TILES_H

#include <stdint.h>

#ifdef __CUDACC__
#    define FA4_HOST_DEVICE static __host__ __device__ __forceinline__
#else
#    define FA4_HOST_DEVICE static inline
#endif

enum { FA4_CTAS_MAX = 256, FA4_BY_NEED_MAX = 4 };

// A number to divide by. A division between two tiles would take each of a CTA's warps a hundred cycles and more.
typedef struct {
    uint32_t multiplier; // 0: 1
    uint32_t shift;
} fa4_divisor;

typedef struct {
    int32_t count;        // tiles in all
    int32_t blocks;       // tiles of one head
    int32_t units;        // batch * heads_kv
    int32_t heads_kv;     //
    int32_t group;        // query heads of a unit
    int32_t section;      // units of a section
    int32_t longest_last; // 1: later blocks of a head see more keys
    int32_t turns;        // 1: every other round is dealt backwards
    int32_t by_need;      // the first round that is dealt by need; 0x7fffffff: none
    // What fa4_tiles_prepare makes of these.
    int32_t sections;
    fa4_divisor per_section;                     // tiles of a section
    fa4_divisor per_rank;                        // of one rank in it
    fa4_divisor per_last_rank;                   // in the last section
    fa4_divisor per_unit;                        // group
    fa4_divisor per_batch;                       // heads_kv
    uint8_t need[FA4_BY_NEED_MAX][FA4_CTAS_MAX]; // which tile of such a round each CTA takes
} fa4_tiles;

typedef struct {
    int32_t block, head, head_kv, batch;
} fa4_tile;

// The tile that CTA cta of ctas takes in this round; count or more when there is none.
FA4_HOST_DEVICE int32_t fa4_tile_index(const fa4_tiles *t, int32_t round, int32_t cta, int32_t ctas)
{
    if (round >= t->by_need) return round * ctas + t->need[round - t->by_need][cta];
    return round * ctas + (round & t->turns ? ctas - 1 - cta : cta);
}

// n / d for n in [0, 2^31) (Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994).
FA4_HOST_DEVICE int32_t fa4_quotient(int32_t n, fa4_divisor d)
{
    const uint32_t high = (uint32_t)((uint64_t)(uint32_t)n * d.multiplier >> 32);
    return d.multiplier ? (int32_t)(high >> d.shift) : n;
}

FA4_HOST_DEVICE fa4_tile fa4_tile_at(const fa4_tiles *t, int32_t index)
{
    const int32_t section = fa4_quotient(index, t->per_section);
    const int32_t first_unit = section * t->section, in_section = index - first_unit * t->group * t->blocks;
    const int32_t last = section == t->sections - 1;
    const int32_t heads = (last ? t->units - first_unit : t->section) * t->group; // side by side
    const int32_t rank = fa4_quotient(in_section, last ? t->per_last_rank : t->per_rank);
    const int32_t beside = in_section - rank * heads, unit_beside = fa4_quotient(beside, t->per_unit);
    const int32_t unit = first_unit + unit_beside;
    fa4_tile tile;
    tile.block = (t->longest_last ^ (t->sections - 1 - section)) & 1 ? t->blocks - 1 - rank : rank;
    tile.batch = fa4_quotient(unit, t->per_batch);
    tile.head_kv = unit - tile.batch * t->heads_kv;
    tile.head = tile.head_kv * t->group + beside - unit_beside * t->group;
    return tile;
}

// What a block of queries costs.
typedef int64_t fa4_tile_cost(const void *context, int32_t block);

#ifdef __cplusplus
extern "C" {
#endif
// Of tiles with at least one, whose members are set from count to longest_last: what fa4_tile_at divides by. Host.
void fa4_tiles_prepare(fa4_tiles *t);
// Fills turns, by_need and need of prepared tiles, for at most FA4_CTAS_MAX CTAs. Host.
void fa4_tiles_deal(fa4_tiles *t, int32_t ctas, fa4_tile_cost *cost, const void *context);
#ifdef __cplusplus
}
#endif

#endif
