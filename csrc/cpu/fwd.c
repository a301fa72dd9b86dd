// The forward. A tile is some rows (queries of the heads that share a k and v) against all keys that they see:
//
//     for each block of keys:   pack k, transposed, and v
//         for each few rows:    s = q kᵀ     mask     m = max     p = exp(s - m)     l += p     o += p v
//
// All of it stays in the caches; o, m and l are kept per row and rescaled when the maximum grows (online softmax). A
// row's result is the same whatever rows are computed with it: blocks start at multiples of BLOCK_KV, and what a row
// does not see adds zeros.
#include "kernels.h"
#include "mask.h"
#include "pairs.h"

#include <stdatomic.h>
#include <stdlib.h>

#ifdef FA4_CPU_F64
#    define FWD FA4_CPU_SYMBOL(fa4_cpu_fwd_f64)
#else
#    define FWD FA4_CPU_SYMBOL(fa4_cpu_fwd)
#endif

fa4_cpu_fwd_fn FWD;

enum {
    BLOCK_KV = 128,
    BLOCK_KV_PAIRS = 256,
    BLOCK_KV_MAX = 256,
    BLOCK_DIM = 64,        // products summed in one chain: shorter ones, added up, round less
    BLOCK_ROWS = 24,       // rows whose scores are in cache at a time,
    BLOCK_ROWS_PAIRS = 32, // or with operands of pairs, whose products want whole groups of 16
    BLOCK_ROWS_MAX = 32,
    TILE_BYTES = 256 * 1024, // of q and o of a tile: part of a core's second-level cache
    SERIAL_WORK = 1 << 18,   // multiply-adds below which threads cost more than they give
    TILES_PER_THREAD = 4,
    DIM_MAX = 256,
    // From here on the rounding of a scaled fp32 score can be 1 and more. m is such a score: what is subtracted from it
    // must be rounded alike, or e^(their difference) is 0 or inf where it should be 1.
    SCORE_ROUNDED = 1 << 24,
};

typedef struct {
    const fa4_fwd_params *p;
    int64_t group; // heads of q that share one of k and v
    int64_t rows;  // of one head of k and v: row r is query r / group of the group's head r % group
    int64_t tile_rows;
    int64_t tiles_per_head;
    int64_t tiles;
    int64_t lo, hi; // the band, within the lengths
    real q_factor;  // q is multiplied by this: 1; -1 or 0 so that scale is positive
    real scale;     // > 0
    int pairs;      // operands of the products are pairs of bf16 (pairs.h), not reals
    int64_t block_rows, block_kv;
    int64_t dim_depth;           // of q kᵀ, in elements of the packed operands
    int64_t q_row, s_row, o_row; // strides of the scratch
    size_t scratch_size;
    atomic_llong next_tile;
    atomic_int failed;
} fwd_context;

// Where a tile works. m is scaled and natural; l is summed in VEC_LEN parts a row, by key modulo VEC_LEN.
typedef struct {
    real *q, *k, *v, *s, *o, *m, *l, *rescale;
    real *hidden; // bytes [BLOCK_ROWS_MAX, BLOCK_KV_MAX]
} fwd_scratch;

static int64_t round_up(int64_t n, int64_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

// Keys as the depth of p v, in elements of the packed operands.
static int64_t key_depth(const fwd_context *c, int64_t keys)
{
    return c->pairs ? round_up(keys, PAIRS_UNIT) / 2 : keys;
}

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

// Cuts memory into the scratch's parts; with NULL, only says how much they take.
static size_t fwd_scratch_cut(const fwd_context *c, fwd_scratch *w, real *memory)
{
    const fa4_fwd_params *p = c->p;
    int64_t rows = round_up(c->tile_rows, BLOCK_ROWS_MAX), keys = min_i64(c->block_kv, p->len_kv);
    const struct {
        real **part;
        int64_t size;
    } parts[] = {
        {&w->q, rows * c->q_row},
        {&w->k, tile_packed_size(c->dim_depth, keys)},
        {&w->v, tile_packed_size(key_depth(c, keys), p->dim_v)},
        {&w->s, BLOCK_ROWS_MAX * c->s_row},
        {&w->o, rows * c->o_row},
        {&w->m, rows},
        {&w->l, rows * VEC_LEN},
        {&w->rescale, BLOCK_ROWS_MAX},
        {&w->hidden, BLOCK_ROWS_MAX * BLOCK_KV_MAX / (int64_t)sizeof(real)},
    };
    int64_t size = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (memory) *parts[i].part = memory + size;
        size += round_up(parts[i].size, 64 / sizeof(real));
    }
    return (size_t)size * sizeof(real);
}

// A row of a tile, in the tensors.
typedef struct {
    int64_t h, i;
} fwd_row;

static fwd_row row_of(const fwd_context *c, int64_t h_kv, int64_t r)
{
    return (fwd_row){h_kv * c->group + r % c->group, r / c->group};
}

// Keys [first, last) that some query of [i_first, i_last] sees, by band and length.
typedef struct {
    int64_t first, last;
} key_range;

static key_range keys_seen(const fwd_context *c, int64_t i_first, int64_t i_last, int64_t keys)
{
    return (key_range){max_i64(0, i_first + c->lo), min_i64(keys, i_last + c->hi + 1)};
}

// ---- Operands

// n elements of a row of bf16, followed by zeros up to `whole`: where they are, or copied to buffer.
static const uint16_t *bf16_row(uint16_t *buffer, const tile_source *s, int64_t row, int64_t n, int64_t whole)
{
    const uint16_t *src = tile_source_at(s, row);
    if (s->stride_col == 1 && n == whole) return src;
    for (int64_t i = 0; i < n; i++) buffer[i] = src[i * s->stride_col];
    memset(buffer + n, 0, (size_t)(whole - n) * sizeof *buffer);
    return buffer;
}

static void load_q(const fwd_context *c, const fwd_scratch *w, int64_t b, int64_t h_kv, int64_t r0, int64_t rows)
{
    const fa4_fwd_params *p = c->p;
    for (int64_t r = 0; r < rows; r++) {
        fwd_row row = row_of(c, h_kv, r0 + r);
        const tile_source source = {p->q, p->dtype, 1, p->stride_q[3]};
        int64_t offset = b * p->stride_q[0] + row.h * p->stride_q[1] + row.i * p->stride_q[2];
        real *q = w->q + r * c->q_row;
        if (c->pairs) {
            uint16_t *pairs = (uint16_t *)q;
            const uint16_t *there = bf16_row(pairs, &source, offset, p->dim, c->dim_depth * 2);
            if (there != pairs) memcpy(pairs, there, (size_t)p->dim * sizeof *pairs);
            if (c->q_factor != 1)
                for (int64_t d = 0; d < p->dim; d++)
                    pairs[d] = bf16_of_float(float_of_bf16(pairs[d]) * (float)c->q_factor);
        } else {
            tile_load_row(q, &source, offset, p->dim);
            if (c->q_factor != 1)
                for (int64_t d = 0; d < p->dim; d++) q[d] *= c->q_factor;
        }
    }
}

#ifdef VEC_BF16

// tile_pack_columns for pairs along the dim.
static void pack_columns_pairs(const fwd_context *c, real *b, const tile_source *s, int64_t cols)
{
    uint16_t buffer[VEC_LEN][DIM_MAX];
    int64_t depth = c->dim_depth;
    for (int64_t n = 0; n < round_up(cols, PAIRS_UNIT); n += VEC_LEN) {
        const uint16_t *rows[VEC_LEN];
        for (int64_t i = 0; i < VEC_LEN; i++) {
            int64_t there = n + i < cols ? c->p->dim : 0;
            rows[i] = bf16_row(buffer[i], s, there ? n + i : 0, there, depth * 2);
        }
        real *dst = b + n / PANEL * PANEL * depth + n % PANEL;
        for (int64_t k = 0; k < depth; k += VEC_LEN) {
            vec r[VEC_LEN];
            for (int i = 0; i < VEC_LEN; i++) memcpy(&r[i], rows[i] + 2 * k, sizeof r[i]);
            vec_transpose(r);
            for (int64_t i = 0; i < VEC_LEN; i++) vec_store(dst + (k + i) * PANEL, r[i]);
        }
    }
}

// tile_pack_rows for pairs of rows.
static void pack_rows_pairs(const fwd_context *c, real *b, const tile_source *s, int64_t rows)
{
    uint16_t buffer[2][DIM_MAX];
    int64_t dim = c->p->dim_v, whole = round_up(dim, VEC_LEN), depth = key_depth(c, rows);
    for (int64_t k = 0; k < depth; k++) {
        const uint16_t *pair[2];
        for (int64_t i = 0; i < 2; i++) {
            int64_t there = 2 * k + i < rows ? dim : 0;
            pair[i] = bf16_row(buffer[i], s, there ? 2 * k + i : 0, there, whole);
        }
        for (int64_t n = 0; n < whole; n += VEC_LEN)
            vec_store(b + n / PANEL * PANEL * depth + n % PANEL + k * PANEL, vec_pairs(pair[0] + n, pair[1] + n));
    }
}

// Whether any of n packed pairs holds an inf or a NaN: an exponent of ones, which one more carries into the sign.
static int pairs_finite(const real *x, int64_t n)
{
    vecu carry = {0};
    for (int64_t i = 0; i < n; i += VEC_LEN) carry |= ((vecu)vec_load(x + i) & 0x7f807f80) + 0x00800080;
    vec_bits any = 0;
    for (int i = 0; i < VEC_LEN; i++) any |= carry[i];
    return !(any & 0x80008000);
}

#endif

// Whether none of n packed values is inf or NaN. n is a whole number of vectors.
static int reals_finite(const real *x, int64_t n)
{
    vec zeros = {0};
    for (int64_t i = 0; i < n; i += VEC_LEN) zeros = vec_fma(vec_load(x + i), (vec){0}, zeros);
    return vec_reduce_add(zeros) == 0;
}

static void pack_k(const fwd_context *c, const fwd_scratch *w, const tile_source *k, int64_t keys)
{
#ifdef VEC_BF16
    if (c->pairs) {
        pack_columns_pairs(c, w->k, k, keys);
        return;
    }
#endif
    tile_pack_columns(w->k, k, c->p->dim, keys);
}

// What is not finite is packed as 0, so that a key's weight of 0 hides it; returns whether there was nothing such.
static int pack_v(const fwd_context *c, const fwd_scratch *w, const tile_source *v, int64_t keys)
{
    int64_t size = tile_packed_size(key_depth(c, keys), c->p->dim_v);
#ifdef VEC_BF16
    if (c->pairs) {
        pack_rows_pairs(c, w->v, v, keys);
        if (pairs_finite(w->v, size)) return 1;
        for (uint16_t *x = (uint16_t *)w->v; x < (uint16_t *)(w->v + size); x++)
            if (!isfinite(float_of_bf16(*x))) *x = 0;
        return 0;
    }
#endif
    tile_pack_rows(w->v, v, keys, c->p->dim_v);
    if (reals_finite(w->v, size)) return 1;
    for (int64_t i = 0; i < size; i++)
        if (!isfinite(w->v[i])) w->v[i] = 0;
    return 0;
}

static void multiply(const fwd_context *c, tile_product t, int64_t rows, int64_t cols)
{
#ifdef VEC_BF16
    if (c->pairs) {
        pairs_multiply(t, rows, cols);
        return;
    }
#endif
    (void)c;
    tile_multiply(t, rows, cols);
}

// ---- Scores

// Scores of one row against n keys from j on: what is hidden becomes -inf. An additive mask makes them final (scaled).
static void mask_row(const fwd_context *c, real *s, int64_t b, fwd_row row, int64_t j, int64_t n, int64_t keys)
{
    const fa4_fwd_params *p = c->p;
    key_range seen = keys_seen(c, row.i, row.i, keys);
    int64_t first = seen.first - j, last = seen.last - j;
    int64_t offset = b * p->stride_mask[0] + row.h * p->stride_mask[1] + row.i * p->stride_mask[2];
    int64_t there = min_i64(n, keys - j); // the mask has these; n is whole vectors
    if (p->mask_type == FA4_MASK_BOOL) {
        uint8_t keep[BLOCK_KV_MAX] = {0};
        const uint8_t *mask = (const uint8_t *)p->mask + offset + j * p->stride_mask[3];
        if (p->stride_mask[3] == 1) {
            memcpy(keep, mask, (size_t)there);
        } else {
            for (int64_t x = 0; x < there; x++) keep[x] = mask[x * p->stride_mask[3]];
        }
        for (int64_t x = 0; x < n; x += VEC_LEN) vec_store(s + x, vec_keep_bytes(vec_load(s + x), keep + x, -INFINITY));
    } else if (p->mask_type != FA4_MASK_NONE) {
        real added[BLOCK_KV_MAX] = {0};
        mask_load(added, p, offset + j * p->stride_mask[3], there);
        const vec hidden = vec_set1(-INFINITY);
        for (int64_t x = 0; x < n; x += VEC_LEN) {
            vec a = vec_load(added + x); // -inf hides whatever the score is, NaN too
            vec sum = vec_fma(vec_load(s + x), vec_set1(c->scale), a);
            vec_store(s + x, vec_select((veci)(a == hidden), hidden, sum));
        }
    }
    for (int64_t x = 0; x < min_i64(first, n); x += VEC_LEN)
        vec_store(s + x, vec_keep(vec_load(s + x), first - x, VEC_LEN, -INFINITY));
    for (int64_t x = max_i64(last, 0) / VEC_LEN * VEC_LEN; x < n; x += VEC_LEN)
        vec_store(s + x, vec_keep(vec_load(s + x), 0, last - x, -INFINITY));
}

static real row_max(const real *s, int64_t n)
{
    vec max = vec_load(s);
    for (int64_t x = VEC_LEN; x < n; x += VEC_LEN) max = vec_max(max, vec_load(s + x));
    return vec_reduce_max(max);
}

// s becomes p = exp(scale s - m), as the product with v takes it; returns the VEC_LEN parts of their sum.
static vec row_exp(const fwd_context *c, real *s, int64_t n, real scale, real m)
{
    vec sum = {0};
#ifdef VEC_BF16
    if (c->pairs) {
        for (int64_t x = 0; x < n; x += 2 * VEC_LEN) {
            vec low = vec_exp(vec_fma(vec_load(s + x), vec_set1(scale), vec_set1(-m)));
            vec high = vec_exp(vec_fma(vec_load(s + x + VEC_LEN), vec_set1(scale), vec_set1(-m)));
            vec_store(s + x / 2, pairs_round(low, high));
            sum = sum + low + high;
        }
        return sum;
    }
#endif
    (void)c;
    for (int64_t x = 0; x < n; x += VEC_LEN) {
        vec e = vec_exp(vec_fma(vec_load(s + x), vec_set1(scale), vec_set1(-m)));
        vec_store(s + x, e);
        sum = sum + e;
    }
    return sum;
}

// ---- A tile

// Keys of a block, packed, and the tile that they are for.
typedef struct {
    int64_t b, h_kv, r0; // the tile's first row is r0 of the head
    int64_t all_keys;    // that exist in the batch
    int64_t first;       // key
    int64_t keys;        // packed
    int v_finite;
    tile_source v; // as it is in the tensor, from the first key on
} fwd_block;

// What v holds that is not finite, and was packed as 0, reaches the rows that see it: inf and NaN whatever the weight.
static void add_not_finite(const fwd_context *c, const fwd_scratch *w, const fwd_block *block, real *o, int64_t rows)
{
    const uint8_t *hidden = (const uint8_t *)w->hidden;
    real v[DIM_MAX];
    for (int64_t j = 0; j < block->keys; j++) {
        tile_load_row(v, &block->v, j, c->p->dim_v);
        for (int64_t d = 0; d < c->p->dim_v; d++) {
            if (isfinite(v[d])) continue;
            for (int64_t x = 0; x < rows; x++)
                if (!hidden[x * BLOCK_KV_MAX + j]) o[x * c->o_row + d] += v[d];
        }
    }
}

// A few rows of the tile against one block.
typedef struct {
    int64_t r, rows;         // rows [r, r + rows) of the tile
    int64_t i_first, i_last; // the queries that they are
    int64_t seen_keys, n;    // keys of the block up to the last that one of them sees; as whole units of the scores
} fwd_group;

// s = q kᵀ
static void fwd_scores(const fwd_context *c, const fwd_scratch *w, const fwd_group *g)
{
    // Pairs sum in hardware, in an order of its own: one chain.
    int64_t chain = c->pairs ? c->dim_depth : BLOCK_DIM;
    for (int64_t d = 0; d < c->dim_depth; d += chain)
        multiply(c,
                 (tile_product){.a = w->q + g->r * c->q_row + d,
                                .a_row = c->q_row,
                                .a_col = 1,
                                .b = w->k + d * PANEL,
                                .b_depth = c->dim_depth,
                                .c = w->s,
                                .c_row = c->s_row,
                                .depth = min_i64(chain, c->dim_depth - d),
                                .mode = d ? TILE_ADD : TILE_SET},
                 g->rows, g->n);
}

// Mask, maximum, s becomes p, l.
static void fwd_softmax(const fwd_context *c, const fwd_scratch *w, const fwd_block *block, const fwd_group *g)
{
    const fa4_fwd_params *p = c->p;
    int64_t n = g->n, rows = g->rows;
    real scale = p->mask_type > FA4_MASK_BOOL ? 1 : c->scale; // an additive mask is added to scaled scores
    if (p->mask_type != FA4_MASK_NONE || g->i_last + c->lo > block->first ||
        g->i_first + c->hi + 1 < block->first + n || block->all_keys < block->first + n)
        for (int64_t x = 0; x < rows; x++)
            mask_row(c, w->s + x * c->s_row, block->b, row_of(c, block->h_kv, block->r0 + g->r + x), block->first, n,
                     block->all_keys);
    real m_block[BLOCK_ROWS_MAX], row_scale[BLOCK_ROWS_MAX];
    for (int64_t x = 0; x < rows; x++) {
        m_block[x] = row_max(w->s + x * c->s_row, n) * scale;
        row_scale[x] = scale;
        if (fabs((double)m_block[x]) >= SCORE_ROUNDED && isfinite(m_block[x])) {
            for (int64_t j = 0; j < n; j += VEC_LEN)
                vec_store(w->s + x * c->s_row + j, vec_load(w->s + x * c->s_row + j) * vec_set1(scale));
            row_scale[x] = 1;
        }
    }
    if (!block->v_finite)
        for (int64_t x = 0; x < rows; x++)
            for (int64_t j = 0; j < block->keys; j++)
                ((uint8_t *)w->hidden)[x * BLOCK_KV_MAX + j] = j >= n || w->s[x * c->s_row + j] == -INFINITY;

    real m_used[BLOCK_ROWS_MAX];
    for (int64_t x = 0; x < rows; x += VEC_LEN) {
        // A row that has seen nothing yet: -inf - -inf would be NaN.
        vec m = vec_load_n(w->m + g->r + x, rows - x), m_new = vec_max(m, vec_load_n(m_block + x, rows - x));
        vec used = vec_select((veci)(m_new == vec_set1(-INFINITY)), (vec){0}, m_new);
        vec_store_n(m_used + x, rows - x, used);
        vec_store(w->rescale + x, vec_exp(m - used));
        vec_store_n(w->m + g->r + x, rows - x, m_new);
    }
    for (int64_t x = 0; x < rows; x++) {
        real *l = w->l + (g->r + x) * VEC_LEN;
        vec sum = row_exp(c, w->s + x * c->s_row, n, row_scale[x], m_used[x]);
        vec_store(l, vec_fma(vec_load(l), vec_set1(w->rescale[x]), sum));
    }
}

// o = rescale o + p v
static void fwd_values(const fwd_context *c, const fwd_scratch *w, const fwd_block *block, const fwd_group *g)
{
    real *o = w->o + g->r * c->o_row;
    if (c->pairs) { // whose products do not rescale
        for (int64_t x = 0; x < g->rows; x++)
            for (int64_t d = 0; d < c->o_row && w->rescale[x] != 1; d += VEC_LEN)
                vec_store(o + x * c->o_row + d, vec_load(o + x * c->o_row + d) * vec_set1(w->rescale[x]));
    }
    multiply(c,
             (tile_product){.a = w->s,
                            .a_row = c->s_row,
                            .a_col = 1,
                            .b = w->v,
                            .b_depth = key_depth(c, block->keys),
                            .c = o,
                            .c_row = c->o_row,
                            .rescale = c->pairs ? NULL : w->rescale,
                            .depth = key_depth(c, g->seen_keys),
                            .mode = TILE_ADD},
             g->rows, c->p->dim_v);
    if (!block->v_finite) add_not_finite(c, w, block, o, g->rows);
}

// The tile's rows against one block, a few at a time.
static void fwd_block_rows(const fwd_context *c, const fwd_scratch *w, const fwd_block *block, int64_t rows)
{
    for (int64_t r = 0; r < rows; r += c->block_rows) {
        fwd_group g = {.r = r, .rows = min_i64(c->block_rows, rows - r)};
        g.i_first = row_of(c, block->h_kv, block->r0 + r).i;
        g.i_last = row_of(c, block->h_kv, block->r0 + r + g.rows - 1).i;
        key_range seen = keys_seen(c, g.i_first, g.i_last, block->all_keys);
        g.seen_keys = min_i64(seen.last - block->first, block->keys);
        if (g.seen_keys <= 0 || seen.first >= block->first + block->keys || seen.first >= seen.last) continue;
        g.n = round_up(g.seen_keys, c->pairs ? PAIRS_UNIT : VEC_LEN);
        fwd_scores(c, w, &g);
        fwd_softmax(c, w, block, &g);
        fwd_values(c, w, block, &g);
    }
}

// Natural logarithm of a finite x > 0, no denormal: 2^e (1 + t) with 1 + t between sqrt(1/2) and sqrt(2), then the
// series of log((1 + u) / (1 - u)).
static double log_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t e = (int64_t)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffff) | (uint64_t)1023 << 52;
    double y, sum = 0;
    memcpy(&y, &bits, sizeof y);
    if (y > 1.41421356237309505) y /= 2, e++;
    double u = (y - 1) / (y + 1), u2 = u * u;
    for (int k = 23; k >= 1; k -= 2) sum = sum * u2 + 1.0 / k;
    return (double)e * 0.693147180559945309 + 2 * u * sum;
}

static void store_rows(const fwd_context *c, const fwd_scratch *w, int64_t b, int64_t h_kv, int64_t r0, int64_t rows)
{
    const fa4_fwd_params *p = c->p;
    for (int64_t r = 0; r < rows; r++) {
        fwd_row row = row_of(c, h_kv, r0 + r);
        real *o = w->o + r * c->o_row, l = vec_reduce_add(vec_load(w->l + r * VEC_LEN));
        vec inverse = vec_set1(l == 0 ? 0 : 1 / l);
        for (int64_t d = 0; d < p->dim_v; d += VEC_LEN) vec_store(o + d, vec_load(o + d) * inverse);
        int64_t offset = b * p->stride_o[0] + row.h * p->stride_o[1] + row.i * p->stride_o[2];
        tile_store_row((char *)p->o + offset * (int64_t)element_size(p->dtype), p->dtype, p->stride_o[3], o, p->dim_v);
        real *lse = (real *)p->lse + b * p->stride_lse[0] + row.h * p->stride_lse[1] + row.i * p->stride_lse[2];
        *lse = l == 0 ? -INFINITY : l >= 0 ? (real)(w->m[r] + log_of(l)) : l; // NaN stays NaN
    }
}

static void fwd_tile(const fwd_context *c, const fwd_scratch *w, int64_t tile)
{
    const fa4_fwd_params *p = c->p;
    // The last rows of a head first: with a causal band they see the most keys.
    int64_t head = tile / c->tiles_per_head, r0 = (c->tiles_per_head - 1 - tile % c->tiles_per_head) * c->tile_rows;
    int64_t b = head / p->heads_kv, h_kv = head % p->heads_kv, rows = min_i64(c->tile_rows, c->rows - r0);
    int64_t keys = p->len_kv_of ? p->len_kv_of[b] : p->len_kv;
    key_range seen = keys_seen(c, row_of(c, h_kv, r0).i, row_of(c, h_kv, r0 + rows - 1).i, keys);

    load_q(c, w, b, h_kv, r0, rows);
    memset(w->o, 0, (size_t)(rows * c->o_row) * sizeof(real));
    memset(w->l, 0, (size_t)(rows * VEC_LEN) * sizeof(real));
    for (int64_t r = 0; r < rows; r++) w->m[r] = -INFINITY;

    const int64_t element = (int64_t)element_size(p->dtype);
    for (int64_t j = seen.first / c->block_kv * c->block_kv; j < seen.last; j += c->block_kv) {
        int64_t k_offset = b * p->stride_k[0] + h_kv * p->stride_k[1] + j * p->stride_k[2];
        int64_t v_offset = b * p->stride_v[0] + h_kv * p->stride_v[1] + j * p->stride_v[2];
        tile_source k = {(const char *)p->k + k_offset * element, p->dtype, p->stride_k[2], p->stride_k[3]};
        tile_source v = {(const char *)p->v + v_offset * element, p->dtype, p->stride_v[2], p->stride_v[3]};
        fwd_block block = {.b = b,
                           .h_kv = h_kv,
                           .r0 = r0,
                           .all_keys = keys,
                           .first = j,
                           .keys = min_i64(c->block_kv, seen.last - j),
                           .v = v};
        pack_k(c, w, &k, block.keys);
        block.v_finite = pack_v(c, w, &v, block.keys);
        fwd_block_rows(c, w, &block, rows);
    }
    store_rows(c, w, b, h_kv, r0, rows);
}

// What one thread does: tiles, one after another, until none is left. Which thread takes which does not matter.
static void fwd_worker(void *context, int64_t begin, int64_t end)
{
    (void)begin, (void)end;
    fwd_context *c = context;
    void *memory = malloc(c->scratch_size + 64);
    if (!memory) {
        atomic_store(&c->failed, 1);
        return;
    }
    fwd_scratch w;
    fwd_scratch_cut(c, &w, (real *)(((uintptr_t)memory + 63) / 64 * 64));
#ifdef VEC_BF16
    if (c->pairs) pairs_begin();
#endif
    for (;;) {
        int64_t tile = atomic_fetch_add(&c->next_tile, 1);
        if (tile >= c->tiles) break;
        fwd_tile(c, &w, tile);
    }
#ifdef VEC_BF16
    if (c->pairs) pairs_end();
#endif
    free(memory);
}

fa4_status FWD(const fa4_fwd_params *p, const fa4_executor *executor)
{
    fwd_context c = {.p = p, .group = p->heads_q / p->heads_kv};
    c.rows = p->len_q * c.group;
    c.lo = min_i64(max_i64(p->lo, -p->len_q), p->len_kv);
    c.hi = min_i64(max_i64(p->hi, -p->len_q), p->len_kv);
    c.scale = (real)fabs(p->scale);
    c.q_factor = c.scale == 0 ? 0 : p->scale < 0 ? -1 : 1;
    if (c.scale == 0) c.scale = 1;
#ifdef VEC_BF16
    c.pairs = p->dtype == FA4_BF16;
#endif
    c.block_kv = c.pairs ? BLOCK_KV_PAIRS : BLOCK_KV;
    c.block_rows = c.pairs ? BLOCK_ROWS_PAIRS : BLOCK_ROWS;
    c.dim_depth = c.pairs ? round_up(p->dim, PAIRS_UNIT) / 2 : p->dim;
    c.q_row = round_up(c.dim_depth, VEC_LEN);
    c.o_row = round_up(p->dim_v, VEC_LEN);
    // One vector more than the scores: rows a power of two apart would meet in the same cache sets.
    c.s_row = round_up(min_i64(c.block_kv, max_i64(p->len_kv, 1)), c.pairs ? PAIRS_UNIT : VEC_LEN) + VEC_LEN;

    int64_t heads = p->batch * p->heads_kv, threads = executor ? executor->threads : 1;
    if ((double)(c.rows * heads) * (double)p->len_kv * (double)(p->dim + p->dim_v) < SERIAL_WORK) threads = 1;
    int64_t cached_rows = TILE_BYTES / (int64_t)sizeof(real) / (c.q_row + c.o_row);
    int64_t even_rows = threads > 1 ? c.rows * heads / (threads * TILES_PER_THREAD) + 1 : c.rows;
    c.tile_rows = round_up(min_i64(min_i64(cached_rows, even_rows), c.rows), c.block_rows);
    c.tile_rows = min_i64(c.tile_rows, c.rows);
    c.tiles_per_head = (c.rows + c.tile_rows - 1) / c.tile_rows;
    c.tiles = heads * c.tiles_per_head;
    fwd_scratch none;
    c.scratch_size = fwd_scratch_cut(&c, &none, NULL);

    if (threads > 1 && c.tiles > 1) {
        executor->parallel_for(executor, min_i64(threads, c.tiles), fwd_worker, &c);
    } else {
        fwd_worker(&c, 0, 1);
    }
    return atomic_load(&c.failed) && atomic_load(&c.next_tile) < c.tiles ? FA4_NO_MEMORY : FA4_OK;
}
