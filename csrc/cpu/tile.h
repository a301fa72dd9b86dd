// Products of small matrices, and the packing that they want. Shared by the forward and the gradient.
//
//     C[rows][cols] (+)= A[rows][depth] B[depth][cols]
//
// A is read one element at a time: any two strides. B is packed in panels of PANEL columns: element (k, n) of a panel
// lies at k * PANEL + n, panels of `depth * PANEL` follow each other, columns past the last are zeros or anything
// finite. C is row major. Each element of C is one chain of multiply-adds in the order of k, whatever rows and columns
// are computed with it: its bits depend on nothing else.
#ifndef FA4_CPU_TILE_H
#define FA4_CPU_TILE_H

#include "vec.h"

// Rows and vectors of C that stay in registers: with B's vectors and one element of A they fill the register file.
enum {
    TILE_ROWS = VEC_REGISTERS == 32 ? 6
    : VEC_BYTES == 32               ? 6
                                    : 4,
    TILE_VECS = VEC_REGISTERS == 32 ? 4 : 2,
    PANEL = TILE_VECS * VEC_LEN,
};

// What becomes of the C that is there.
typedef enum { TILE_SET, TILE_ADD } tile_mode;

typedef struct {
    const real *a;
    int64_t a_row, a_col; // strides of A
    const real *b;        // packed
    int64_t b_depth;      // rows that it was packed with, at least depth; 0: depth
    real *c;
    int64_t c_row;       // stride of C; a row has room for whole vectors
    const real *rescale; // TILE_ADD: C is first multiplied by rescale[row], unless NULL
    int64_t depth;
    tile_mode mode;
} tile_product;

// How one element of A and a vector of B go into C: by multiply-add, or each as a pair of bf16 (VEC_BF16).
typedef enum { TILE_FMA, TILE_DOT_BF16 } tile_step;

#define TILE_INLINE static inline __attribute__((always_inline))

TILE_INLINE vec tile_accumulate(tile_step step, vec c, vec a, vec b)
{
#ifdef VEC_BF16
    if (step == TILE_DOT_BF16) return vec_dot_bf16(c, a, b);
#endif
    (void)step;
    return vec_fma(a, b, c);
}

// rows, vecs and step are constants wherever this is called, so that c is all registers.
TILE_INLINE void tile_block(const tile_product *t, tile_step step, int rows, int vecs)
{
    vec c[TILE_ROWS][TILE_VECS];
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < vecs; n++) c[i][n] = (vec){0};
    const real *a = t->a, *b = t->b;
    for (int64_t k = 0; k < t->depth; k++, a += t->a_col, b += PANEL) {
        vec b_k[TILE_VECS];
        for (int n = 0; n < vecs; n++) b_k[n] = vec_load(b + n * VEC_LEN);
        for (int i = 0; i < rows; i++) {
            vec a_ik = vec_broadcast(a + i * t->a_row);
            for (int n = 0; n < vecs; n++) c[i][n] = tile_accumulate(step, c[i][n], a_ik, b_k[n]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < vecs; n++) {
            real *there = t->c + i * t->c_row + n * VEC_LEN;
            if (t->mode == TILE_ADD && !t->rescale) c[i][n] = vec_load(there) + c[i][n];
            if (t->mode == TILE_ADD && t->rescale) c[i][n] = vec_fma(vec_load(there), vec_set1(t->rescale[i]), c[i][n]);
            vec_store(there, c[i][n]);
        }
}

TILE_INLINE void tile_rows(const tile_product *t, tile_step step, int rows, int vecs)
{
    switch (vecs) {
    case 1: tile_block(t, step, rows, 1); break;
    case 2: tile_block(t, step, rows, 2); break;
#if defined(VEC_AVX512) || defined(__aarch64__)
    case 3: tile_block(t, step, rows, 3); break;
    case 4: tile_block(t, step, rows, 4); break;
#endif
    }
}

TILE_INLINE void tile_columns(const tile_product *t, tile_step step, int rows, int vecs)
{
    switch (rows) {
    case 1: tile_rows(t, step, 1, vecs); break;
    case 2: tile_rows(t, step, 2, vecs); break;
    case 3: tile_rows(t, step, 3, vecs); break;
    case 4: tile_rows(t, step, 4, vecs); break;
#if defined(VEC_AVX512) || defined(VEC_AVX2) || defined(__aarch64__)
    case 5: tile_rows(t, step, 5, vecs); break;
    case 6: tile_rows(t, step, 6, vecs); break;
#endif
    }
}

TILE_INLINE void tile_run(tile_product t, tile_step step, int64_t rows, int64_t cols)
{
    const real *a = t.a, *rescale = t.rescale;
    real *c = t.c;
    for (int64_t n = 0; n < cols; n += PANEL, t.b += (t.b_depth ? t.b_depth : t.depth) * PANEL, c += PANEL) {
        int vecs = cols - n >= PANEL ? TILE_VECS : (int)((cols - n + VEC_LEN - 1) / VEC_LEN);
        for (int64_t i = 0; i < rows; i += TILE_ROWS) {
            t.a = a + i * t.a_row, t.c = c + i * t.c_row, t.rescale = rescale ? rescale + i : NULL;
            tile_columns(&t, step, rows - i >= TILE_ROWS ? TILE_ROWS : (int)(rows - i), vecs);
        }
    }
}

// Not inlined: one copy of the machine code in each kernel file.
static __attribute__((noinline, unused)) void tile_multiply(tile_product t, int64_t rows, int64_t cols)
{
    tile_run(t, TILE_FMA, rows, cols);
}

#ifdef VEC_BF16
// A and B hold pairs of bf16 along the depth, which counts the pairs.
static __attribute__((noinline, unused)) void tile_multiply_bf16(tile_product t, int64_t rows, int64_t cols)
{
    tile_run(t, TILE_DOT_BF16, rows, cols);
}
#endif

// ---- Packing

// Size of a packed B, in elements.
static inline int64_t tile_packed_size(int64_t depth, int64_t cols)
{
    return depth * ((cols + PANEL - 1) / PANEL * PANEL);
}

// Rows of a tensor: row j starts at base + j * stride_row elements, its elements are stride_col apart.
typedef struct {
    const void *base;
    fa4_dtype dtype;
    int64_t stride_row, stride_col;
} tile_source;

static inline const void *tile_source_at(const tile_source *s, int64_t row)
{
    return (const char *)s->base + row * s->stride_row * (int64_t)element_size(s->dtype);
}

// n elements of a row as reals. dst has room for whole vectors; what is past n there is undefined.
static inline void tile_load_row(real *dst, const tile_source *s, int64_t row, int64_t n)
{
    const void *src = tile_source_at(s, row);
    int64_t i = 0;
    if (s->stride_col == 1) {
        if (element_size(s->dtype) == sizeof(real)) {
            memcpy(dst, src, (size_t)n * sizeof *dst);
            i = n;
        }
#ifndef FA4_CPU_F64
        if (s->dtype == FA4_BF16)
            for (; i + VEC_LEN <= n; i += VEC_LEN) vec_store(dst + i, vec_load_bf16((const uint16_t *)src + i));
        if (s->dtype == FA4_F16)
            for (; i + VEC_LEN <= n; i += VEC_LEN) vec_store(dst + i, vec_load_f16((const uint16_t *)src + i));
#endif
    }
    for (; i < n; i++) dst[i] = (real)element_load(src, s->dtype, i * s->stride_col);
}

// The other way: n reals, rounded, to elements `stride` apart from dst.
static inline void tile_store_row(void *dst, fa4_dtype dtype, int64_t stride, const real *row, int64_t n)
{
    int64_t i = 0;
    if (stride == 1) {
        if (element_size(dtype) == sizeof(real)) {
            memcpy(dst, row, (size_t)n * sizeof *row);
            i = n;
        }
#ifndef FA4_CPU_F64
        if (dtype == FA4_BF16)
            for (; i + VEC_LEN <= n; i += VEC_LEN) vec_store_bf16((uint16_t *)dst + i, vec_load(row + i));
        if (dtype == FA4_F16)
            for (; i + VEC_LEN <= n; i += VEC_LEN) vec_store_f16((uint16_t *)dst + i, vec_load(row + i));
#endif
    }
    for (; i < n; i++) element_store(dst, dtype, i * stride, row[i]);
}

// n elements of a row as reals, and zeros up to `whole`: where they are if that can be, or in the buffer.
static inline const real *tile_row(real *buffer, const tile_source *s, int64_t row, int64_t n, int64_t whole)
{
    if (s->stride_col == 1 && element_size(s->dtype) == sizeof(real) && n == whole) return tile_source_at(s, row);
    tile_load_row(buffer, s, row, n);
    for (int64_t i = n; i < whole; i++) buffer[i] = 0;
    return buffer;
}

enum { TILE_ROW_MAX = 256 + VEC_LEN };

// B = rows of the source: depth rows, cols elements of each. Columns up to a whole panel are zeros.
static __attribute__((unused)) void tile_pack_rows(real *b, const tile_source *s, int64_t depth, int64_t cols)
{
    real buffer[TILE_ROW_MAX];
    int64_t whole = (cols + VEC_LEN - 1) / VEC_LEN * VEC_LEN, panels = (cols + PANEL - 1) / PANEL * PANEL;
    for (int64_t k = 0; k < depth; k++) {
        const real *row = tile_row(buffer, s, k, cols, whole);
        for (int64_t n = 0; n < panels; n += VEC_LEN)
            vec_store(b + n / PANEL * PANEL * depth + k * PANEL + n % PANEL, n < whole ? vec_load(row + n) : (vec){0});
    }
}

// B = the source's rows as columns: cols rows, depth elements of each. Columns up to a whole panel are zeros.
static __attribute__((unused)) void tile_pack_columns(real *b, const tile_source *s, int64_t depth, int64_t cols)
{
    real buffer[VEC_LEN][TILE_ROW_MAX];
    int64_t whole = (depth + VEC_LEN - 1) / VEC_LEN * VEC_LEN, panels = (cols + PANEL - 1) / PANEL * PANEL;
    for (int64_t n = 0; n < panels; n += VEC_LEN) {
        real *dst = b + n / PANEL * PANEL * depth + n % PANEL;
        if (n >= cols) {
            for (int64_t k = 0; k < depth; k++) vec_store(dst + k * PANEL, (vec){0});
            continue;
        }
        const real *rows[VEC_LEN];
        for (int64_t i = 0; i < VEC_LEN; i++) {
            int64_t there = n + i < cols ? depth : 0;
            rows[i] = tile_row(buffer[i], s, there ? n + i : 0, there, whole);
        }
        for (int64_t k = 0; k < depth; k += VEC_LEN) {
            vec r[VEC_LEN];
            for (int i = 0; i < VEC_LEN; i++) r[i] = vec_load(rows[i] + k);
            vec_transpose(r);
            for (int64_t i = 0; i < VEC_LEN && k + i < depth; i++) vec_store(dst + (k + i) * PANEL, r[i]);
        }
    }
}

#endif
