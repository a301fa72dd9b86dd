// Additive masks, as the forward and the gradient read them.
#ifndef FA4_CPU_MASK_H
#define FA4_CPU_MASK_H

#include "tile.h"

#include <float.h>

// n numbers that p's mask adds to scaled scores, from that offset on. A finite number of an fp64 mask beyond fp32 stays
// finite, or it would hide a key that it only weighs down. added has room for whole vectors.
static inline void mask_load(real *added, const fa4_fwd_params *p, int64_t offset, int64_t n)
{
    static const fa4_dtype dtype_of[] = {
        [FA4_MASK_F16] = FA4_F16, [FA4_MASK_BF16] = FA4_BF16, [FA4_MASK_F32] = FA4_F32, [FA4_MASK_F64] = FA4_F64};
    const tile_source source = {p->mask, dtype_of[p->mask_type], 1, p->stride_mask[3]};
    tile_load_row(added, &source, offset, n);
    if (p->mask_type != FA4_MASK_F64 || sizeof(real) == sizeof(double)) return;
    const double *mask = (const double *)p->mask + offset;
    for (int64_t x = 0; x < n; x++)
        if (isinf(added[x]) && isfinite(mask[x * source.stride_col])) added[x] = added[x] < 0 ? -FLT_MAX : FLT_MAX;
}

#endif
