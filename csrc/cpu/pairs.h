// Products of pairs of bf16, each pair in the place of a real: tile.h's products, but depths and strides count pairs.
// On AMX they run on its tiles, else on the dot products of AVX-512 BF16.
#ifndef FA4_CPU_PAIRS_H
#define FA4_CPU_PAIRS_H

#include "tile.h"

// Elements of which depths must be whole multiples: the bf16 in a row of an AMX tile.
enum { PAIRS_UNIT = 32 };

#ifdef VEC_BF16

#    if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#        define PAIRS_AMX
#    endif

// Rounded to bf16: the lanes of a, then those of b.
static inline vec pairs_round(vec a, vec b)
{
    return (vec)_mm512_cvtne2ps_pbh(b, a);
}

// The first half of x's bf16 numbers in turn with the second half's.
static inline vec pairs_interleave(vec x)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (vec)_mm512_permutexvar_epi16(order, (__m512i)x);
}

#    ifdef PAIRS_AMX

// The compiler's tile intrinsics do not say that they read memory: stores before this are done before those after it.
#        define PAIRS_MEMORY_IS_READ() __asm__ volatile("" ::: "memory")

// Intel SDM volume 1, "Programming with Intel AMX": palette 1, eight tiles of 16 rows of 64 bytes. A thread's own
// state.
static inline void pairs_begin(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;
    PAIRS_MEMORY_IS_READ();
    _tile_loadconfig(&config);
}

// Back to the initial state, which costs nothing when the system switches threads.
static inline void pairs_end(void)
{
    _tile_release();
}

// Tiles 0-3: C, 2 by 2; 4, 5: A; 6, 7: B.
TILE_INLINE void pairs_block(const tile_product *t, int rows, int cols)
{
    const int64_t a_row = t->a_row * 4, b_row = PANEL * 4, c_row = t->c_row * 4;
    const real *a = t->a, *b = t->b;
    real *c = t->c;
    PAIRS_MEMORY_IS_READ();
    if (t->mode == TILE_ADD) {
        _tile_loadd(0, c, c_row);
        if (cols > 1) _tile_loadd(1, c + 16, c_row);
        if (rows > 1) _tile_loadd(2, c + 16 * t->c_row, c_row);
        if (rows > 1 && cols > 1) _tile_loadd(3, c + 16 * t->c_row + 16, c_row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < t->depth; k += 16) {
        _tile_loadd(4, a + k, a_row);
        _tile_loadd(6, b + k * PANEL, b_row);
        _tile_dpbf16ps(0, 4, 6);
        if (cols > 1) {
            _tile_loadd(7, b + k * PANEL + 16, b_row);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (rows > 1) {
            _tile_loadd(5, a + k + 16 * t->a_row, a_row);
            _tile_dpbf16ps(2, 5, 6);
            if (cols > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_row);
    if (cols > 1) _tile_stored(1, c + 16, c_row);
    if (rows > 1) _tile_stored(2, c + 16 * t->c_row, c_row);
    if (rows > 1 && cols > 1) _tile_stored(3, c + 16 * t->c_row + 16, c_row);
}

// As tile_multiply_bf16, but of A and C whole groups of 16 rows are read and written, of C whole vectors, and depth is
// a multiple of 16. A's columns lie side by side.
static __attribute__((noinline, unused)) void pairs_multiply(tile_product t, int64_t rows, int64_t cols)
{
    const real *a = t.a, *b = t.b;
    real *c = t.c;
    for (int64_t n = 0; n < cols; n += 32)
        for (int64_t i = 0; i < rows; i += 32) {
            t.a = a + i * t.a_row;
            t.b = b + n / PANEL * PANEL * (t.b_depth ? t.b_depth : t.depth) + n % PANEL;
            t.c = c + i * t.c_row + n;
            if (rows - i > 16 && cols - n > 16) {
                pairs_block(&t, 2, 2);
            } else if (rows - i > 16) {
                pairs_block(&t, 2, 1);
            } else if (cols - n > 16) {
                pairs_block(&t, 1, 2);
            } else {
                pairs_block(&t, 1, 1);
            }
        }
}

#    else

static inline void pairs_begin(void) {}

static inline void pairs_end(void) {}

static inline void pairs_multiply(tile_product t, int64_t rows, int64_t cols)
{
    tile_multiply_bf16(t, rows, cols);
}

#    endif
#endif
#endif
