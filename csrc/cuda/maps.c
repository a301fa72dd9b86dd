#include "maps.h"
#include "../error.h"

enum { BATCH, HEAD, ROW, COLUMN, ELEMENT_BYTES = 2, UNIT = 16 };

// Whether the stride along dimension d decides where elements are.
static int matters(const int64_t size[4], const int64_t stride[4], int d)
{
    return size[d] > 1 && (stride[d] != 0 || d >= ROW);
}

const char *fa4_map_unsupported(const char *name, const void *address, const int64_t size[4], const int64_t stride[4])
{
    static const char *const dimensions[] = {"batch", "head", "row", "column"};
    if ((uintptr_t)address % UNIT)
        return fa4_reason("%s must start at a multiple of %d bytes for tensor copies", name, UNIT);
    if (matters(size, stride, COLUMN) && stride[COLUMN] != 1)
        return fa4_reason("the head dim of %s must be contiguous for tensor copies: its stride is %lld", name,
                          (long long)stride[COLUMN]);
    for (int d = BATCH; d <= ROW; d++) {
        if (!matters(size, stride, d)) continue;
        const int64_t most = ((INT64_C(1) << 40) - UNIT) / ELEMENT_BYTES;
        if (stride[d] <= 0 || stride[d] > most || stride[d] % (UNIT / ELEMENT_BYTES))
            return fa4_reason("the %s stride of %s must be a positive multiple of %d elements, below 2^40 bytes, for "
                              "tensor copies: %lld",
                              dimensions[d], name, UNIT / ELEMENT_BYTES, (long long)stride[d]);
    }
    return NULL;
}

fa4_tensor_map fa4_map_of(const void *address, fa4_dtype type, const int64_t size[4], const int64_t stride[4], int rows,
                          int columns)
{
    fa4_tensor_map map = {
        .address = (uintptr_t)address,
        .type = type,
        .rank = 4,
        .size = {(uint64_t)size[COLUMN], 1, 1, 1},
        .stride = {UNIT, UNIT, UNIT}, // of a dimension of size 1: any that the driver takes
        .box = {(uint32_t)columns, (uint32_t)rows, 1, 1},
        .element_stride = {1, 1, 1, 1},
        .swizzle = columns * ELEMENT_BYTES,
        .l2_promotion = 256,
    };
    for (int d = BATCH; d <= ROW; d++) {
        const int outer = COLUMN - d; // dimension of the map
        if (!matters(size, stride, d)) continue;
        map.size[outer] = (uint64_t)size[d];
        map.stride[outer - 1] = (uint64_t)stride[d] * ELEMENT_BYTES;
    }
    return map;
}
