// Tensor maps of q, k, v and o, and what they ask of the tensors' strides: the same on every chip with tensor copies.
#ifndef FA4_CUDA_MAPS_H
#define FA4_CUDA_MAPS_H

#include "../plan.h"

// NULL, or why tensor copies cannot read or write a [batch, heads, len, dim] tensor of 16-bit elements.
const char *fa4_map_unsupported(const char *name, const void *address, const int64_t size[4], const int64_t stride[4]);

// The map of such a tensor, innermost dimension first, for boxes of rows x columns. A batch or head that the tensor
// repeats (stride 0) has size 1: its coordinate must be 0.
fa4_tensor_map fa4_map_of(const void *address, fa4_dtype type, const int64_t size[4], const int64_t stride[4], int rows,
                          int columns);

#endif
