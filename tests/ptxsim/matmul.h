// Tensor products: matrix descriptors, element formats, and the product itself, for wgmma.c and tcgen05.c.
#ifndef PTXSIM_MATMUL_H
#define PTXSIM_MATMUL_H

#include "sim.h"

// The 64-bit matrix descriptor of wgmma and tcgen05 (PTX ISA, "Matrix descriptor", "Shared memory descriptor").
typedef struct {
    uint32_t start, lbo, sbo; // bytes
    uint32_t base_offset;     // as encoded
    int swizzle;              // 0, 32, 64, 128; SWIZZLE_128_ATOM_32: 128 bytes in atoms of 32
} matrix_descriptor;
enum { SWIZZLE_128_ATOM_32 = 129 };
const char *matrix_descriptor_parse(uint64_t bits, bool tcgen05, matrix_descriptor *d); // NULL or what is illegal

// One operand in shared memory: rows (M or N, "mn") by depth (K). Depth is 32 bytes in an MMA; tcgen05.cp also copies
// 16. Element (r, k) of 16-byte chunks: K-major has depth / 16 chunks a row, MN-major 16 / element_bytes rows a chunk.
typedef struct {
    matrix_descriptor descriptor;
    bool mn_major;
    int element_bytes; // of shared memory: sub-byte formats of kind::f8f6f4 lie 16 to a chunk, as if of 1 byte
    int rows, depth_bytes;
} matrix_layout;

// The same operand's rows first to first + rows - 1 (multiples of 16) alone.
matrix_layout matrix_rows(const matrix_layout *l, int first, int rows);

// Element formats are named by `type`: T_BF16, T_F16, T_TF32, T_E4M3, T_E5M2, and for kind::f8f6f4 T_E2M3X2, T_E3M2X2,
// T_E2M1X2 (one element).
float format_to_float(type t, uint32_t bits);              // T_TF32: the low 13 bits are ignored
uint32_t float_to_format(type t, float x, bool satfinite); // round to nearest even
int format_depth(type t);                                  // K of one MMA: 16, 8 or 32
int format_bytes(type t);                                  // element_bytes

// Reads an operand as floats. by_depth: values[k * stride + r], else values[r * stride + k]. row_poison[r]: some
// element of the row is undefined; *any: some row is. false: a finding.
typedef struct {
    float *values;
    int stride;
    bool by_depth, negate;
    uint8_t *row_poison;
    bool any;
} matrix_values;
bool matrix_gather(agent *a, cta *c, const matrix_layout *l, type t, matrix_values *to);
// The same for operands that are read again and again (the four warps of a warpgroup each read B): every time with all
// checks, but converted only when bytes have changed. Sets values and row_poison; by_depth and stride are always the
// same for one cache and layout.
typedef struct matrix_cache matrix_cache;
matrix_cache *matrix_cache_new(void);
void matrix_cache_free(matrix_cache *k);
bool matrix_gather_kept(agent *a, cta *c, const matrix_layout *l, type t, matrix_cache *k, matrix_values *to);
// The bytes themselves, [row][depth_bytes] (K-major only), for tcgen05.cp. poison: a byte a byte.
bool matrix_copy(agent *a, cta *c, const matrix_layout *l, unsigned char *to, uint8_t *poison);
// One row of packed register or TMEM words (16-bit formats two a word, 8-bit four, tf32 one) to floats; true when
// poisoned. Sub-byte formats sit in 8-bit containers there.
bool format_unpack(type t, const uint32_t *words, const uint8_t *poison, int count, bool negate, float *to);

// d[i][j] += sum of a[i][k] * b[k][j]: k ascending, each product (exact in f32 for every format) added to d with one
// rounding to nearest even. What silicon does inside an MMA is not documented; on integers small enough both are exact.
// A NaN comes out as 0x7fffffff. m a multiple of 4, n of 8.
void matrix_multiply_add(int m, int n, int k, const float *a, int a_stride, const float *b, int b_stride, float *d,
                         int d_stride);
void matrix_scale(int m, int n, float *d, int d_stride, float factor);

#endif
