// The order in which persistent CTAs take tiles of queries. Plain arithmetic on the CTA's index: nothing in memory
// counts, so a launch has nothing to reset and a graph can replay it. Host and device.
//
// A unit is one K/V head of one batch with the query heads that share it. Units are taken in sections whose K and V fit
// in the L2 cache together; inside a section the tiles go by the number of keys they see, all heads of one block of
// queries side by side. The last section runs from most to fewest keys, so that what is left over at the end is short,
// and the sections before it alternate: there is no jump in length between them. CTAs take the list forth and back in
// turns, which gives each the same sum when lengths fall evenly.
#ifndef FA4_CUDA_TILES_H
#define FA4_CUDA_TILES_H

#include <stdint.h>

#ifdef __CUDACC__
#    define FA4_HOST_DEVICE static __host__ __device__ __forceinline__
#else
#    define FA4_HOST_DEVICE static inline
#endif

typedef struct {
    int32_t count;        // tiles in all
    int32_t blocks;       // tiles of one head
    int32_t units;        // batch * heads_kv
    int32_t heads_kv;     //
    int32_t group;        // query heads of a unit
    int32_t section;      // units of a section
    int32_t longest_last; // 1: later blocks of a head see more keys
} fa4_tiles;

typedef struct {
    int32_t block, head, head_kv, batch;
} fa4_tile;

// The tile that CTA cta of ctas takes in this round; count or more when there is none.
FA4_HOST_DEVICE int32_t fa4_tile_index(int32_t round, int32_t cta, int32_t ctas)
{
    return round * ctas + (round & 1 ? ctas - 1 - cta : cta);
}

FA4_HOST_DEVICE fa4_tile fa4_tile_at(const fa4_tiles *t, int32_t index)
{
    const int32_t per_section = t->section * t->group * t->blocks;
    const int32_t section = index / per_section, in_section = index - section * per_section;
    const int32_t first_unit = section * t->section;
    const int32_t units = t->units - first_unit < t->section ? t->units - first_unit : t->section;
    const int32_t heads = units * t->group; // side by side
    const int32_t rank = in_section / heads, beside = in_section - rank * heads;
    const int32_t sections_after = (t->units - 1) / t->section - section;
    const int32_t unit = first_unit + beside / t->group;
    fa4_tile tile;
    tile.block = (t->longest_last ^ sections_after) & 1 ? t->blocks - 1 - rank : rank;
    tile.batch = unit / t->heads_kv;
    tile.head_kv = unit - tile.batch * t->heads_kv;
    tile.head = tile.head_kv * t->group + beside % t->group;
    return tile;
}

#endif
