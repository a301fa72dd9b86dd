// The gradient.
//
//     p  = exp(scale q kᵀ + mask - lse)      dv = pᵀ dout
//     ds = p (dout vᵀ - delta)               dk = scale dsᵀ q      dq = scale ds k
//     delta = sum_d dout o - dlse
//
// A tile is ROWS queries by KEYS keys, a panel KEYS keys, a kv block a few panels. The work of one kv head is: prepare
// the row blocks (ROWS queries) of all its query heads; for each kv block, for each row block that sees it, the tiles
// of its panels; write dq. A kv block's part of dq is summed on its own and then added to dq, in the order of the kv
// blocks, so that it may be computed anywhere: with fewer kv heads than threads the kv blocks are spread instead
// ("waves"), and the bits stay the same. dk and dv of a kv block are one thread's.
#include "kernels.h"
#include "mask.h"
#include "pairs.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#ifdef FA4_CPU_F64
#    define BWD FA4_CPU_SYMBOL(fa4_cpu_bwd_f64)
#    define BWD_WORKSPACE FA4_CPU_SYMBOL(fa4_cpu_bwd_f64_workspace)
#else
#    define BWD FA4_CPU_SYMBOL(fa4_cpu_bwd)
#    define BWD_WORKSPACE FA4_CPU_SYMBOL(fa4_cpu_bwd_workspace)
#endif

fa4_cpu_bwd_fn BWD;
fa4_cpu_bwd_workspace_fn BWD_WORKSPACE;

enum {
    ROWS = 64,
    KEYS = PANEL, // so that p and ds, as products make them, are packed for the next
    ALIGNMENT = 64,
    SERIAL_WORK = 1 << 18, // multiply-adds of one product below which threads cost more than they give
};

// A call, and how it is cut. A unit is a kv head of one batch with its query heads.
typedef struct {
    const fa4_bwd_params *p;
    int64_t group, units;          // query heads of a unit; how many units
    int64_t row_blocks, kv_blocks; // of one head
    int64_t panels;                // of a kv block
    int64_t lo, hi;                // the band, cut to what the lengths can tell apart
    int pairs;                     // operands of the products are pairs of bf16, not reals
    ptrdiff_t dim_pad, dim_v_pad;  // whole vectors
    ptrdiff_t q_row, dout_row;     // row lengths of packed q and dout
    struct {
        size_t q, q_t, dout, dout_t, dq; // of a row block
        size_t k_t, k, v_t, dk_t, dv_t;  // of a panel
        size_t tile, rows;               // of a thread
    } size;                              // in reals
    size_t row_block_bytes;
    atomic_bool out_of_memory;

    // Waves only: the row blocks of all units, and the parts of dq that the kv blocks of a wave make.
    char *blocks;
    real *parts;
    int64_t wave, wave_first; // kv blocks of a wave, and the first of this one
} problem;

// ROWS queries of one head, packed.
typedef struct {
    real *q, *dout;     // [ROWS, q_row], [ROWS, dout_row]
    real *q_t, *dout_t; // pairs only: [dim, ROWS / 2], [dim_v, ROWS / 2], 0 for what is not finite
    real *dq;           // [ROWS, dim_pad], before the scale
    real *lse, *delta;  // [ROWS]
    struct row_state {
        int rows;       // that exist
        int blind;      // how many of them see no key
        int not_finite; // q or dout holds a NaN or an infinity
    } *state;
} row_block;

// KEYS keys of one kv head, packed, and their gradient.
typedef struct {
    real *k_t, *v_t;   // tile.h's B: [dim, KEYS], [dim_v, KEYS]
    real *k;           // tile.h's B: [KEYS, dim], 0 for what is not finite
    real *dk_t, *dv_t; // [dim, KEYS], [dim_v, KEYS]
    int keys;          // that exist
    int not_finite;    // k holds a NaN or an infinity
} panel;

// What a thread needs for itself.
typedef struct {
    void *memory;
    panel *panels;
    real *s, *dp;   // [ROWS, KEYS]; of reals, p and ds take their place
    real *p, *ds;   // pairs only: [ROWS / 2, KEYS], pairs of rows
    real *ds_rows;  // pairs only: [ROWS, KEYS / 2], pairs of keys
    real *bias;     // [ROWS, KEYS], what the mask adds to the scores: -inf hides
    real *dq;       // [ROWS, dim_pad], the kv block's part
    real *q, *dout; // a row block's, 0 for what is not finite
    real *rows;     // [KEYS, max(dim_pad, dim_v_pad)]
} scratch;

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static ptrdiff_t round_up(ptrdiff_t n, ptrdiff_t unit)
{
    return (n + unit - 1) / unit * unit;
}

// The rows of one head.
static tile_source source_of(const void *base, fa4_dtype dtype, const int64_t stride[4], int64_t b, int64_t h)
{
    const char *head = (const char *)base + (b * stride[0] + h * stride[1]) * (int64_t)element_size(dtype);
    return (tile_source){head, dtype, stride[2], stride[3]};
}

// ---- Memory: one allocation, handed out in aligned pieces

static size_t piece(size_t reals)
{
    return (reals * sizeof(real) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static real *take(char **memory, size_t reals)
{
    real *p = (real *)*memory;
    *memory += piece(reals);
    return p;
}

static row_block row_block_at(const problem *w, char *blocks, int64_t index)
{
    char *memory = blocks + (size_t)index * w->row_block_bytes;
    row_block r;
    r.q = take(&memory, w->size.q);
    r.dout = take(&memory, w->size.dout);
    r.q_t = take(&memory, w->size.q_t);
    r.dout_t = take(&memory, w->size.dout_t);
    r.dq = take(&memory, w->size.dq);
    r.lse = take(&memory, ROWS);
    r.delta = take(&memory, ROWS);
    r.state = (struct row_state *)memory;
    return r;
}

static void set_sizes(problem *w)
{
    const fa4_fwd_params *f = &w->p->fwd;
    w->dim_pad = round_up(f->dim, VEC_LEN);
    w->dim_v_pad = round_up(f->dim_v, VEC_LEN);
    w->size.dq = ROWS * w->dim_pad;
    w->size.dk_t = w->dim_pad * KEYS;
    w->size.dv_t = w->dim_v_pad * KEYS;
    w->size.tile = ROWS * KEYS;
    w->size.rows = KEYS * max64(w->dim_pad, w->dim_v_pad);
    if (w->pairs) {
        w->q_row = round_up(f->dim, PAIRS_UNIT) / 2;
        w->dout_row = round_up(f->dim_v, PAIRS_UNIT) / 2;
        w->size.q_t = w->dim_pad * ROWS / 2;
        w->size.dout_t = w->dim_v_pad * ROWS / 2;
        w->size.k = tile_packed_size(KEYS / 2, f->dim);
    } else {
        w->q_row = w->dim_pad;
        w->dout_row = w->dim_v_pad;
        w->size.k = tile_packed_size(KEYS, f->dim);
    }
    w->size.q = ROWS * w->q_row;
    w->size.dout = ROWS * w->dout_row;
    w->size.k_t = w->q_row * KEYS;
    w->size.v_t = w->dout_row * KEYS;
    w->row_block_bytes = piece(w->size.q) + piece(w->size.dout) + piece(w->size.q_t) + piece(w->size.dout_t) +
                         piece(w->size.dq) + 2 * piece(ROWS) + ALIGNMENT;
}

static int scratch_new(problem *w, scratch *t)
{
    size_t per_panel =
        piece(w->size.k_t) + piece(w->size.v_t) + piece(w->size.k) + piece(w->size.dk_t) + piece(w->size.dv_t);
    size_t bytes = w->panels * (per_panel + piece(sizeof(panel) / sizeof(real) + 1)) + 6 * piece(w->size.tile) +
                   piece(w->size.dq) + piece(w->size.q) + piece(w->size.dout) + piece(w->size.rows);
    char *memory = t->memory = aligned_alloc(ALIGNMENT, bytes);
    if (!memory) {
        atomic_store(&w->out_of_memory, 1);
        return 0;
    }
    t->panels = (panel *)memory;
    memory += w->panels * piece(sizeof(panel) / sizeof(real) + 1);
    for (int n = 0; n < w->panels; n++)
        t->panels[n] = (panel){
            .k_t = take(&memory, w->size.k_t),
            .v_t = take(&memory, w->size.v_t),
            .k = take(&memory, w->size.k),
            .dk_t = take(&memory, w->size.dk_t),
            .dv_t = take(&memory, w->size.dv_t),
        };
    t->s = take(&memory, w->size.tile);
    t->dp = take(&memory, w->size.tile);
    t->bias = take(&memory, w->size.tile);
    t->p = take(&memory, w->size.tile);
    t->ds = take(&memory, w->size.tile);
    t->ds_rows = take(&memory, w->size.tile);
    t->dq = take(&memory, w->size.dq);
    t->q = take(&memory, w->size.q);
    t->dout = take(&memory, w->size.dout);
    t->rows = take(&memory, w->size.rows);
    return 1;
}

// ---- Packing

static int all_finite(const real *x, ptrdiff_t n)
{
    real zeros = 0;
    for (ptrdiff_t i = 0; i < n; i++) zeros += x[i] * 0;
    return zeros == 0;
}

// x with 0 for what is not finite.
static void keep_finite(real *to, const real *x, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) to[i] = x[i] - x[i] == 0 ? x[i] : 0;
}

// to[columns, rows] = from[rows, columns], both whole vectors.
static void transpose(real *to, ptrdiff_t to_row, const real *from, ptrdiff_t from_row, ptrdiff_t rows,
                      ptrdiff_t columns)
{
    for (ptrdiff_t i = 0; i < rows; i += VEC_LEN)
        for (ptrdiff_t j = 0; j < columns; j += VEC_LEN) {
            vec block[VEC_LEN];
            for (int n = 0; n < VEC_LEN; n++) block[n] = vec_load(from + (i + n) * from_row + j);
            vec_transpose(block);
            for (int n = 0; n < VEC_LEN; n++) vec_store(to + (j + n) * to_row + i, block[n]);
        }
}

static real dot(const real *a, const real *b, ptrdiff_t n)
{
    vec sum = {0};
    for (ptrdiff_t d = 0; d < n; d += VEC_LEN) sum = vec_fma(vec_load(a + d), vec_load(b + d), sum);
    return vec_reduce_add(sum);
}

// A row as reals; zeros past n.
static void load_row(real *to, ptrdiff_t whole, const tile_source *s, int64_t row, ptrdiff_t n)
{
    tile_load_row(to, s, row, n);
    for (ptrdiff_t d = n; d < whole; d++) to[d] = 0;
}

static void store_row(const tile_source *s, int64_t row, const real *from, ptrdiff_t n)
{
    tile_store_row((void *)tile_source_at(s, row), s->dtype, s->stride_col, from, n);
}

#ifdef VEC_BF16
// A row of bf16 as it is; zeros past n.
static void copy_row(uint16_t *to, ptrdiff_t whole, const tile_source *s, int64_t row, ptrdiff_t n)
{
    const uint16_t *from = tile_source_at(s, row);
    if (s->stride_col == 1) {
        memcpy(to, from, n * sizeof *to);
    } else {
        for (ptrdiff_t d = 0; d < n; d++) to[d] = from[d * s->stride_col];
    }
    memset(to + n, 0, (whole - n) * sizeof *to);
}

static int all_finite_bf16(const uint16_t *x, ptrdiff_t n)
{
    int found = 0;
    for (ptrdiff_t i = 0; i < n; i++) found |= (x[i] & 0x7f80) == 0x7f80;
    return !found;
}

static void keep_finite_bf16(uint16_t *to, const uint16_t *x, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++) to[i] = (x[i] & 0x7f80) == 0x7f80 ? 0 : x[i];
}

// to[columns, rows / 2] = pairs of neighbouring rows of from[rows, columns], both whole vectors.
static void transpose_pairs(real *to, const uint16_t *from, ptrdiff_t from_row, ptrdiff_t rows, ptrdiff_t columns)
{
    for (ptrdiff_t i = 0; i < rows / 2; i += VEC_LEN)
        for (ptrdiff_t j = 0; j < columns; j += VEC_LEN) {
            vec block[VEC_LEN];
            for (int n = 0; n < VEC_LEN; n++) {
                const uint16_t *low = from + 2 * (i + n) * from_row + j;
                block[n] = vec_pairs(low, low + from_row);
            }
            vec_transpose(block);
            for (int n = 0; n < VEC_LEN; n++) vec_store(to + (j + n) * (rows / 2) + i, block[n]);
        }
}

// ROWS rows of bf16 and their transpose in pairs, from row i0 on; blind rows and those past `rows` are 0.
static int pack_rows_in_pairs(real *to, real *to_t, ptrdiff_t row, const tile_source *s, int64_t i0, int rows,
                              const real *lse, ptrdiff_t n, ptrdiff_t n_pad, real *finite)
{
    uint16_t *x = (uint16_t *)to;
    for (int i = 0; i < ROWS; i++) {
        if (i < rows && lse[i] != -INFINITY) {
            copy_row(x + i * 2 * row, 2 * row, s, i0 + i, n);
        } else {
            memset(x + i * 2 * row, 0, row * sizeof *to);
        }
    }
    const int ok = all_finite_bf16(x, ROWS * 2 * row);
    if (!ok) {
        keep_finite_bf16((uint16_t *)finite, x, ROWS * 2 * row);
        x = (uint16_t *)finite;
    }
    transpose_pairs(to_t, x, 2 * row, ROWS, n_pad);
    return ok;
}
#endif

// ROWS rows as reals, from row i0 on; blind rows are 0.
static int pack_rows(real *to, ptrdiff_t row, const tile_source *s, int64_t i0, int rows, const real *lse, ptrdiff_t n)
{
    for (int i = 0; i < rows; i++) {
        if (lse[i] != -INFINITY) {
            load_row(to + i * row, row, s, i0 + i, n);
        } else {
            memset(to + i * row, 0, row * sizeof *to);
        }
    }
    return all_finite(to, rows * row);
}

// One row block: everything of it that does not depend on the keys.
static void prepare(const problem *w, row_block *r, int64_t b, int64_t h, int64_t i0, scratch *t)
{
    const fa4_bwd_params *p = w->p;
    const fa4_fwd_params *f = &p->fwd;
    const fa4_dtype lse_dtype = sizeof(real) == 8 ? FA4_F64 : FA4_F32;
    const tile_source q = source_of(f->q, f->dtype, f->stride_q, b, h);
    const tile_source o = source_of(f->o, f->dtype, f->stride_o, b, h);
    const tile_source dout = source_of(p->dout, f->dtype, p->stride_dout, b, h);
    const int rows = (int)min64(ROWS, f->len_q - i0);
    *r->state = (struct row_state){.rows = rows};
    for (int i = 0; i < rows; i++) {
        const int64_t at = b * f->stride_lse[0] + h * f->stride_lse[1] + (i0 + i) * f->stride_lse[2];
        r->lse[i] = (real)element_load(f->lse, lse_dtype, at);
        r->state->blind += r->lse[i] == -INFINITY;
    }
    int finite;
#ifdef VEC_BF16
    if (w->pairs) {
        finite = pack_rows_in_pairs(r->q, r->q_t, w->q_row, &q, i0, rows, r->lse, f->dim, w->dim_pad, t->q);
        finite &= pack_rows_in_pairs(r->dout, r->dout_t, w->dout_row, &dout, i0, rows, r->lse, f->dim_v, w->dim_v_pad,
                                     t->dout);
    } else
#endif
    {
        finite = pack_rows(r->q, w->q_row, &q, i0, rows, r->lse, f->dim);
        finite &= pack_rows(r->dout, w->dout_row, &dout, i0, rows, r->lse, f->dim_v);
    }
    r->state->not_finite = !finite;
    for (int i = 0; i < rows; i++) {
        r->delta[i] = 0;
        if (r->lse[i] == -INFINITY) continue;
        const real *dout_row = r->dout + i * w->dout_row;
        load_row(t->rows, w->dim_v_pad, &o, i0 + i, f->dim_v);
        if (w->pairs) {
            load_row(t->rows + w->dim_v_pad, w->dim_v_pad, &dout, i0 + i, f->dim_v);
            dout_row = t->rows + w->dim_v_pad;
        }
        r->delta[i] = dot(t->rows, dout_row, w->dim_v_pad);
        if (p->dlse) {
            const int64_t at = b * p->stride_dlse[0] + h * p->stride_dlse[1] + (i0 + i) * p->stride_dlse[2];
            r->delta[i] -= (real)element_load(p->dlse, lse_dtype, at);
        }
    }
    memset(r->dq, 0, w->size.dq * sizeof *r->dq);
}

#ifdef VEC_BF16
// `keys` rows of bf16 from row j0 on as KEYS rows in t->rows, with zeros after them, and their transpose: pairs of
// neighbouring columns.
static uint16_t *pack_keys_in_pairs(real *to_t, ptrdiff_t row, const tile_source *s, int64_t j0, int keys, ptrdiff_t n,
                                    scratch *t)
{
    uint16_t *x = (uint16_t *)t->rows;
    for (int j = 0; j < keys; j++) copy_row(x + j * 2 * row, 2 * row, s, j0 + j, n);
    memset(x + keys * 2 * row, 0, (KEYS - keys) * row * sizeof(real));
    transpose(to_t, KEYS, t->rows, row, KEYS, row);
    return x;
}

static void pack_panel_in_pairs(const problem *w, panel *n, const tile_source *k, const tile_source *v, int64_t j0,
                                scratch *t)
{
    const fa4_fwd_params *f = &w->p->fwd;
    pack_keys_in_pairs(n->v_t, w->dout_row, v, j0, n->keys, f->dim_v, t);
    uint16_t *x = pack_keys_in_pairs(n->k_t, w->q_row, k, j0, n->keys, f->dim, t);
    n->not_finite = !all_finite_bf16(x, n->keys * 2 * w->q_row);
    if (n->not_finite) keep_finite_bf16(x, x, n->keys * 2 * w->q_row);
    for (int j = 0; j < KEYS / 2; j++)
        for (ptrdiff_t d = 0; d < w->dim_pad; d += VEC_LEN) {
            const uint16_t *low = x + 2 * j * 2 * w->q_row + d;
            real *to = n->k + d / PANEL * PANEL * (KEYS / 2) + j * PANEL + d % PANEL;
            vec_store(to, vec_pairs(low, low + 2 * w->q_row));
        }
}
#endif

static void pack_panel(const problem *w, panel *n, int64_t b, int64_t h_kv, int64_t j0, int keys, scratch *t)
{
    const fa4_fwd_params *f = &w->p->fwd;
    tile_source k = source_of(f->k, f->dtype, f->stride_k, b, h_kv);
    tile_source v = source_of(f->v, f->dtype, f->stride_v, b, h_kv);
    (void)t; // pairs only
    n->keys = keys;
    memset(n->dk_t, 0, w->size.dk_t * sizeof(real));
    memset(n->dv_t, 0, w->size.dv_t * sizeof(real));
#ifdef VEC_BF16
    if (w->pairs) {
        pack_panel_in_pairs(w, n, &k, &v, j0, t);
        return;
    }
#endif
    k.base = tile_source_at(&k, j0);
    v.base = tile_source_at(&v, j0);
    tile_pack_columns(n->k_t, &k, f->dim, keys);
    tile_pack_columns(n->v_t, &v, f->dim_v, keys);
    tile_pack_rows(n->k, &k, keys, f->dim);
    n->not_finite = !all_finite(n->k, tile_packed_size(keys, f->dim));
    if (n->not_finite) keep_finite(n->k, n->k, tile_packed_size(keys, f->dim));
}

// ---- One tile

// Of a tile's pairs of query and key.
typedef enum { SEEN_NONE, SEEN_SOME, SEEN_ALL } seen;

// How much of a tile the band leaves.
static seen seen_of_band(const problem *w, int64_t i0, int rows, int64_t j0, int keys)
{
    const int64_t least = j0 - (i0 + rows - 1), most = j0 + keys - 1 - i0; // of j - i
    if (most < w->lo || least > w->hi) return SEEN_NONE;
    return least >= w->lo && most <= w->hi ? SEEN_ALL : SEEN_SOME;
}

// What the mask adds to the scores of keys [first, last) of row i; -inf hides.
static void load_bias(real *bias, const fa4_fwd_params *f, int64_t b, int64_t h, int64_t i, int64_t j0, int first,
                      int last)
{
    const int64_t stride = f->stride_mask[3];
    const int64_t at = b * f->stride_mask[0] + h * f->stride_mask[1] + i * f->stride_mask[2] + (j0 + first) * stride;
    int j = first;
    if (f->mask_type == FA4_MASK_NONE) {
        for (; j < last; j++) bias[j] = 0;
    } else if (f->mask_type == FA4_MASK_BOOL) {
        const uint8_t *m = (const uint8_t *)f->mask + at - first * stride;
        if (stride == 1)
            for (; j + VEC_LEN <= last; j += VEC_LEN) vec_store(bias + j, vec_keep_bytes((vec){0}, m + j, -INFINITY));
        for (; j < last; j++) bias[j] = m[j * stride] ? 0 : -(real)INFINITY;
    } else {
        mask_load(bias + first, f, at, last - first);
    }
}

// Fills t->bias; keys that do not exist are hidden.
static seen fill_bias(const problem *w, const row_block *r, int64_t b, int64_t h, int64_t i0, int64_t j0, int keys,
                      scratch *t)
{
    const fa4_fwd_params *f = &w->p->fwd;
    int hidden = 0, first = 0, last = 0, hidden_above = 0;
    for (int i = 0; i < r->state->rows; i++) {
        real *bias = t->bias + i * KEYS;
        const int first_above = first, last_above = last;
        first = (int)max64(min64(i0 + i + w->lo - j0, keys), 0);
        last = (int)max64(min64(i0 + i + w->hi + 1 - j0, keys), first);
        if (r->lse[i] == -INFINITY) last = first;
        if (i > 0 && first == first_above && last == last_above &&
            (f->mask_type == FA4_MASK_NONE || f->stride_mask[2] == 0)) {
            memcpy(bias, bias - KEYS, KEYS * sizeof *bias);
        } else {
            load_bias(bias, f, b, h, i0 + i, j0, first, last);
            for (int j = 0; j < first; j++) bias[j] = -INFINITY;
            for (int j = last; j < KEYS; j++) bias[j] = -INFINITY;
            hidden_above = 0;
            for (int j = 0; j < KEYS; j++) hidden_above += bias[j] == -INFINITY;
        }
        hidden += hidden_above;
    }
    return hidden == r->state->rows * KEYS ? SEEN_NONE : SEEN_SOME;
}

typedef struct {
    vec p, ds;
} weights;

// From one row's scores and dp. bias: NULL, or what is added to the scores; -inf makes both weights 0 whatever the
// operands hold.
TILE_INLINE weights weights_of(const real *s, const real *dp, const real *bias, vec scale, vec lse, vec delta)
{
    weights x;
    if (!bias) { // rounded before lse goes off: lse has the rounding of a scaled score, and a large one must cancel
        x.p = vec_exp(vec_fma(vec_load(s), scale, (vec){0}) - lse);
        x.ds = x.p * (vec_load(dp) - delta);
    } else {
        const vec add = vec_load(bias);
        const veci hidden = (veci)(add == vec_set1(-INFINITY));
        x.p = vec_exp(vec_fma(vec_load(s), scale, add) - lse);
        x.ds = x.p * (vec_load(dp) - delta);
        x.p = vec_select(hidden, (vec){0}, x.p);
        x.ds = vec_select(hidden, (vec){0}, x.ds);
    }
    return x;
}

// p and ds in the place of s and dp.
TILE_INLINE void weigh(const row_block *r, scratch *t, const real *bias, int keys, vec scale)
{
    for (int i = 0; i < r->state->rows; i++) {
        const vec lse = vec_set1(r->lse[i]), delta = vec_set1(r->delta[i]);
        for (int j = i * KEYS; j < i * KEYS + keys; j += VEC_LEN) {
            const weights x = weights_of(t->s + j, t->dp + j, bias ? bias + j : NULL, scale, lse, delta);
            vec_store(t->s + j, x.p);
            vec_store(t->dp + j, x.ds);
        }
    }
}

#ifdef VEC_BF16
// p, ds and ds_rows, two rows at a time; rows that do not exist are 0 up to whole PAIRS_UNITs.
TILE_INLINE void weigh_in_pairs(const row_block *r, scratch *t, const real *bias, int keys, vec scale)
{
    const int rows = r->state->rows;
    for (int i = 0; i < rows; i += 2) {
        const int second = i + 1 < rows;
        const vec lse[2] = {vec_set1(r->lse[i]), vec_set1(second ? r->lse[i + 1] : 0)};
        const vec delta[2] = {vec_set1(r->delta[i]), vec_set1(second ? r->delta[i + 1] : 0)};
        for (int j = 0; j < keys; j += 2 * VEC_LEN) {
            weights x[2][2];
            for (int a = 0; a < 2; a++)
                for (int c = 0; c < 2; c++) {
                    const int at = (i + a) * KEYS + j + c * VEC_LEN;
                    x[a][c] = a && !second
                                  ? (weights){{0}, {0}}
                                  : weights_of(t->s + at, t->dp + at, bias ? bias + at : NULL, scale, lse[a], delta[a]);
                }
            for (int c = 0; c < 2; c++) {
                const int at = i / 2 * KEYS + j + c * VEC_LEN;
                vec_store(t->p + at, pairs_interleave(pairs_round(x[0][c].p, x[1][c].p)));
                vec_store(t->ds + at, pairs_interleave(pairs_round(x[0][c].ds, x[1][c].ds)));
            }
            for (int a = 0; a < 2; a++)
                vec_store(t->ds_rows + ((i + a) * KEYS + j) / 2, pairs_round(x[a][0].ds, x[a][1].ds));
        }
    }
    const ptrdiff_t done = (rows + 1) / 2 * KEYS, all = round_up(rows, PAIRS_UNIT) / 2 * KEYS;
    memset(t->p + done, 0, (all - done) * sizeof(real));
    memset(t->ds + done, 0, (all - done) * sizeof(real));
}
#endif

// The weight of row i and key j, as the products took it: of reals, or pairs of rows.
static real weight_at(const problem *w, const real *weight, int i, int j)
{
    if (!w->pairs) return weight[i * KEYS + j];
    return (real)element_load(weight, FA4_BF16, (i / 2 * KEYS + j) * 2 + i % 2);
}

// A row's NaNs and infinities, 0 for the rest. Returns whether there are any.
static int load_not_finite(real *to, ptrdiff_t whole, const tile_source *s, int64_t row, ptrdiff_t n)
{
    int found = 0;
    load_row(to, whole, s, row, n);
    for (ptrdiff_t d = 0; d < n; d++) {
        const int finite = to[d] - to[d] == 0;
        to[d] = finite ? 0 : to[d];
        found |= !finite;
    }
    return found;
}

// Adds to grad_t[n, KEYS], where x is not 0, its product with row i's weights of the keys that are seen.
static void add_row_not_finite(const problem *w, real *grad_t, const real *x, ptrdiff_t n, const real *weight,
                               const real *bias, int i, int keys)
{
    real row_weight[KEYS];
    for (int j = 0; j < keys; j++) row_weight[j] = weight_at(w, weight, i, j);
    for (ptrdiff_t d = 0; d < n; d++) {
        if (x[d] == 0) continue;
        for (int j = 0; j < keys; j++) {
            const real product = row_weight[j] * x[d];
            grad_t[d * KEYS + j] += bias && bias[i * KEYS + j] == -INFINITY ? 0 : product;
        }
    }
}

// Adds what the products left out, where q, k or dout is not finite: that number with the weights of keys seen.
static void add_not_finite(const problem *w, const row_block *r, panel *n, scratch *t, const real *bias, int64_t b,
                           int64_t h, int64_t i0, int64_t j0)
{
    const fa4_fwd_params *f = &w->p->fwd;
    const tile_source q = source_of(f->q, f->dtype, f->stride_q, b, h);
    const tile_source k = source_of(f->k, f->dtype, f->stride_k, b, h / w->group);
    const tile_source dout = source_of(w->p->dout, f->dtype, w->p->stride_dout, b, h);
    const real *p = w->pairs ? t->p : t->s, *ds = w->pairs ? t->ds : t->dp;
    for (int i = 0; r->state->not_finite && i < r->state->rows; i++) {
        if (r->lse[i] == -INFINITY) continue;
        if (load_not_finite(t->rows, w->dim_pad, &q, i0 + i, f->dim))
            add_row_not_finite(w, n->dk_t, t->rows, f->dim, ds, bias, i, n->keys);
        if (load_not_finite(t->rows, w->dim_v_pad, &dout, i0 + i, f->dim_v))
            add_row_not_finite(w, n->dv_t, t->rows, f->dim_v, p, bias, i, n->keys);
    }
    for (int j = 0; n->not_finite && j < n->keys; j++) {
        if (!load_not_finite(t->rows, w->dim_pad, &k, j0 + j, f->dim)) continue;
        for (int i = 0; i < r->state->rows; i++) {
            if (bias && bias[i * KEYS + j] == -INFINITY) continue;
            const real weight = weight_at(w, ds, i, j);
            for (ptrdiff_t d = 0; d < f->dim; d++) t->dq[i * w->dim_pad + d] += weight * t->rows[d];
        }
    }
}

static tile_product product_of(const real *a, int64_t a_row, int64_t a_col, const real *b, real *c, int64_t c_row,
                               int64_t depth, tile_mode mode)
{
    return (tile_product){
        .a = a, .a_row = a_row, .a_col = a_col, .b = b, .c = c, .c_row = c_row, .depth = depth, .mode = mode};
}

// dk_t and dv_t of the panel and t->dq grow by the tile's part.
static void tile(const problem *w, const row_block *r, panel *n, scratch *t, const real *bias)
{
    const fa4_fwd_params *f = &w->p->fwd;
    const int rows = r->state->rows;
    const vec scale = vec_set1((real)f->scale);
#ifdef VEC_BF16
    if (w->pairs) {
        const int pairs = (int)round_up(rows, PAIRS_UNIT) / 2;
        pairs_multiply(product_of(r->q, w->q_row, 1, n->k_t, t->s, KEYS, w->q_row, TILE_SET), rows, KEYS);
        pairs_multiply(product_of(r->dout, w->dout_row, 1, n->v_t, t->dp, KEYS, w->dout_row, TILE_SET), rows, KEYS);
        if (bias) {
            weigh_in_pairs(r, t, bias, KEYS, scale);
        } else {
            weigh_in_pairs(r, t, NULL, KEYS, scale);
        }
        pairs_multiply(product_of(r->dout_t, ROWS / 2, 1, t->p, n->dv_t, KEYS, pairs, TILE_ADD), f->dim_v, KEYS);
        pairs_multiply(product_of(r->q_t, ROWS / 2, 1, t->ds, n->dk_t, KEYS, pairs, TILE_ADD), f->dim, KEYS);
        pairs_multiply(product_of(t->ds_rows, KEYS / 2, 1, n->k, t->dq, w->dim_pad, KEYS / 2, TILE_ADD), rows, f->dim);
        return;
    }
#endif
    const int keys = n->keys;
    const real *q = r->q, *dout = r->dout;
    tile_multiply(product_of(q, w->q_row, 1, n->k_t, t->s, KEYS, f->dim, TILE_SET), rows, keys);
    tile_multiply(product_of(dout, w->dout_row, 1, n->v_t, t->dp, KEYS, f->dim_v, TILE_SET), rows, keys);
    if (bias) {
        weigh(r, t, bias, keys, scale);
    } else {
        weigh(r, t, NULL, keys, scale);
    }
    if (r->state->not_finite) {
        keep_finite(t->q, q, rows * w->q_row);
        keep_finite(t->dout, dout, rows * w->dout_row);
        q = t->q, dout = t->dout;
    }
    tile_multiply(product_of(dout, 1, w->dout_row, t->s, n->dv_t, KEYS, rows, TILE_ADD), f->dim_v, keys);
    tile_multiply(product_of(q, 1, w->q_row, t->dp, n->dk_t, KEYS, rows, TILE_ADD), f->dim, keys);
    tile_multiply(product_of(t->dp, KEYS, 1, n->k, t->dq, w->dim_pad, keys, TILE_ADD), rows, f->dim);
}

// ---- One kv block

// The row blocks [*first, *last) that may see kv block c.
static void row_blocks_of(const problem *w, int64_t c, int64_t *first, int64_t *last)
{
    const fa4_fwd_params *f = &w->p->fwd;
    const int64_t j0 = c * w->panels * KEYS, j1 = min64(j0 + w->panels * KEYS, f->len_kv) - 1;
    const int64_t i0 = max64(j0 - w->hi, 0), i1 = min64(j1 - w->lo, f->len_q - 1);
    *first = min64(i0 / ROWS, w->row_blocks);
    *last = i1 < i0 ? *first : i1 / ROWS + 1;
}

static void write_panel(const problem *w, const panel *n, int64_t b, int64_t h_kv, int64_t j0, scratch *t)
{
    const fa4_bwd_params *p = w->p;
    const fa4_fwd_params *f = &p->fwd;
    const tile_source dk = source_of(p->dk, f->dtype, p->stride_dk, b, h_kv);
    const tile_source dv = source_of(p->dv, f->dtype, p->stride_dv, b, h_kv);
    for (size_t i = 0; i < w->size.dk_t; i++) n->dk_t[i] *= (real)f->scale;
    transpose(t->rows, w->dim_pad, n->dk_t, KEYS, w->dim_pad, KEYS);
    for (int j = 0; j < n->keys; j++) store_row(&dk, j0 + j, t->rows + j * w->dim_pad, f->dim);
    transpose(t->rows, w->dim_v_pad, n->dv_t, KEYS, w->dim_v_pad, KEYS);
    for (int j = 0; j < n->keys; j++) store_row(&dv, j0 + j, t->rows + j * w->dim_v_pad, f->dim_v);
}

// Gradient 0 for keys that do not exist in this batch.
static void write_zeros(const problem *w, int64_t b, int64_t h_kv, int64_t j0, int64_t j1, scratch *t)
{
    const fa4_bwd_params *p = w->p;
    const fa4_fwd_params *f = &p->fwd;
    const tile_source dk = source_of(p->dk, f->dtype, p->stride_dk, b, h_kv);
    const tile_source dv = source_of(p->dv, f->dtype, p->stride_dv, b, h_kv);
    memset(t->rows, 0, max64(w->dim_pad, w->dim_v_pad) * sizeof(real));
    for (int64_t j = j0; j < j1; j++) {
        store_row(&dk, j, t->rows, f->dim);
        store_row(&dv, j, t->rows, f->dim_v);
    }
}

// The tiles of one row block and the panels of one kv block; their part of dq goes to t->dq.
static void row_block_tiles(const problem *w, const row_block *r, int64_t b, int64_t h, int64_t i0, int64_t j0,
                            int panels, scratch *t)
{
    const int masked = w->p->fwd.mask_type != FA4_MASK_NONE || r->state->blind;
    memset(t->dq, 0, w->size.dq * sizeof(real));
    if (r->state->blind == r->state->rows) return;
    for (int n = 0; n < panels; n++, j0 += KEYS) {
        panel *at = &t->panels[n];
        seen seen = seen_of_band(w, i0, r->state->rows, j0, at->keys);
        // Pairs of keys and of rows meet in one multiply-add: what does not exist needs a weight of 0.
        if (seen == SEEN_ALL && (masked || (w->pairs && at->keys < KEYS))) seen = SEEN_SOME;
        if (seen == SEEN_SOME) seen = fill_bias(w, r, b, h, i0, j0, at->keys, t);
        if (seen == SEEN_NONE) continue;
        const real *bias = seen == SEEN_ALL ? NULL : t->bias;
        tile(w, r, at, t, bias);
        if (r->state->not_finite || at->not_finite) add_not_finite(w, r, at, t, bias, b, h, i0, j0);
    }
}

// All tiles of kv block c of a unit. blocks: the unit's row blocks. The part of dq goes to `part`, as the dq of the
// row blocks one after another, or is added to them where that is NULL.
static void kv_block(const problem *w, int64_t unit, int64_t c, char *blocks, real *part, scratch *t)
{
    const fa4_fwd_params *f = &w->p->fwd;
    const int64_t b = unit / f->heads_kv, h_kv = unit % f->heads_kv;
    const int64_t j0 = c * w->panels * KEYS, j1 = min64(j0 + w->panels * KEYS, f->len_kv);
    const int64_t j_seen = max64(min64(j1, f->len_kv_of ? f->len_kv_of[b] : f->len_kv), j0);
    const int panels = (int)((j_seen - j0 + KEYS - 1) / KEYS);
    for (int n = 0; n < panels; n++) {
        const int64_t at = j0 + n * KEYS;
        pack_panel(w, &t->panels[n], b, h_kv, at, (int)min64(KEYS, j_seen - at), t);
    }
    int64_t first, last;
    row_blocks_of(w, c, &first, &last);
#ifdef VEC_BF16
    if (w->pairs) pairs_begin();
#endif
    for (int64_t g = 0; g < w->group; g++)
        for (int64_t i = first; i < last; i++) {
            const row_block r = row_block_at(w, blocks, g * w->row_blocks + i);
            row_block_tiles(w, &r, b, h_kv * w->group + g, i * ROWS, j0, panels, t);
            const size_t dq_size = r.state->rows * w->dim_pad;
            if (part) {
                memcpy(part + (g * w->row_blocks + i) * w->size.dq, t->dq, dq_size * sizeof(real));
            } else {
                for (size_t d = 0; d < dq_size; d++) r.dq[d] += t->dq[d];
            }
        }
#ifdef VEC_BF16
    if (w->pairs) pairs_end();
#endif
    for (int n = 0; n < panels; n++) write_panel(w, &t->panels[n], b, h_kv, j0 + n * KEYS, t);
    write_zeros(w, b, h_kv, j_seen, j1, t);
}

static void write_dq(const problem *w, const row_block *r, int64_t b, int64_t h, int64_t i0)
{
    const fa4_bwd_params *p = w->p;
    const fa4_fwd_params *f = &p->fwd;
    const tile_source to = source_of(p->dq, f->dtype, p->stride_dq, b, h);
    for (int i = 0; i < r->state->rows; i++) {
        real *dq = r->dq + i * w->dim_pad;
        for (ptrdiff_t d = 0; d < f->dim; d++) dq[d] = r->lse[i] == -INFINITY ? 0 : dq[d] * (real)f->scale;
        store_row(&to, i0 + i, dq, f->dim);
    }
}

// ---- Whole units

static void run_units(void *context, int64_t begin, int64_t end)
{
    problem *w = context;
    const fa4_fwd_params *f = &w->p->fwd;
    const int64_t count = w->group * w->row_blocks;
    scratch t = {0};
    if (!scratch_new(w, &t)) return;
    char *blocks = aligned_alloc(ALIGNMENT, w->row_block_bytes * (size_t)max64(count, 1));
    if (!blocks) atomic_store(&w->out_of_memory, 1);
    for (int64_t unit = begin; blocks && unit < end; unit++) {
        const int64_t b = unit / f->heads_kv, h = unit % f->heads_kv * w->group;
        for (int64_t i = 0; i < count; i++) {
            row_block r = row_block_at(w, blocks, i);
            prepare(w, &r, b, h + i / w->row_blocks, i % w->row_blocks * ROWS, &t);
        }
        for (int64_t c = 0; c < w->kv_blocks; c++) kv_block(w, unit, c, blocks, NULL, &t);
        for (int64_t i = 0; i < count; i++) {
            row_block r = row_block_at(w, blocks, i);
            write_dq(w, &r, b, h + i / w->row_blocks, i % w->row_blocks * ROWS);
        }
    }
    free(blocks);
    free(t.memory);
}

// ---- Waves. Tiles are row blocks of all heads, or kv blocks.

static void run_prepare(void *context, int64_t begin, int64_t end)
{
    problem *w = context;
    scratch t;
    if (!scratch_new(w, &t)) return;
    for (int64_t i = begin; i < end; i++) {
        row_block r = row_block_at(w, w->blocks, i);
        const int64_t head = i / w->row_blocks, heads_q = w->p->fwd.heads_q;
        prepare(w, &r, head / heads_q, head % heads_q, i % w->row_blocks * ROWS, &t);
    }
    free(t.memory);
}

static void run_wave(void *context, int64_t begin, int64_t end)
{
    problem *w = context;
    const int64_t count = w->group * w->row_blocks;
    scratch t;
    if (!scratch_new(w, &t)) return;
    for (int64_t i = begin; i < end; i++) {
        const int64_t unit = i / w->wave, c = w->wave_first + i % w->wave;
        char *blocks = w->blocks + (size_t)(unit * count) * w->row_block_bytes;
        if (c < w->kv_blocks) kv_block(w, unit, c, blocks, w->parts + i * count * w->size.dq, &t);
    }
    free(t.memory);
}

static void run_add_parts(void *context, int64_t begin, int64_t end)
{
    problem *w = context;
    const int64_t count = w->group * w->row_blocks;
    for (int64_t i = begin; i < end; i++) {
        row_block r = row_block_at(w, w->blocks, i);
        const int64_t unit = i / count, at = i % count;
        for (int64_t n = 0; n < w->wave && w->wave_first + n < w->kv_blocks; n++) {
            int64_t first, last;
            row_blocks_of(w, w->wave_first + n, &first, &last);
            if (at % w->row_blocks < first || at % w->row_blocks >= last) continue;
            const real *part = w->parts + ((unit * w->wave + n) * count + at) * w->size.dq;
            for (ptrdiff_t d = 0; d < r.state->rows * w->dim_pad; d++) r.dq[d] += part[d];
        }
    }
}

static void run_write_dq(void *context, int64_t begin, int64_t end)
{
    problem *w = context;
    for (int64_t i = begin; i < end; i++) {
        row_block r = row_block_at(w, w->blocks, i);
        const int64_t head = i / w->row_blocks, heads_q = w->p->fwd.heads_q;
        write_dq(w, &r, head / heads_q, head % heads_q, i % w->row_blocks * ROWS);
    }
}

static void run_in_waves(problem *w, const fa4_executor *executor)
{
    const int64_t blocks = w->units * w->group * w->row_blocks;
    w->blocks = aligned_alloc(ALIGNMENT, (size_t)blocks * w->row_block_bytes);
    w->parts = aligned_alloc(ALIGNMENT, (size_t)(w->wave * blocks) * piece(w->size.dq));
    if (!w->blocks || !w->parts) atomic_store(&w->out_of_memory, 1);
    if (!w->out_of_memory) executor->parallel_for(executor, blocks, run_prepare, w);
    for (w->wave_first = 0; w->wave_first < w->kv_blocks && !w->out_of_memory; w->wave_first += w->wave) {
        executor->parallel_for(executor, w->units * w->wave, run_wave, w);
        executor->parallel_for(executor, blocks, run_add_parts, w);
    }
    if (!w->out_of_memory) executor->parallel_for(executor, blocks, run_write_dq, w);
    free(w->blocks);
    free(w->parts);
}

// What scratch there is depends on the threads, which are not known here: BWD takes it itself.
size_t BWD_WORKSPACE(const fa4_bwd_params *p)
{
    (void)p;
    return 0;
}

fa4_status BWD(const fa4_bwd_params *p, const fa4_executor *executor)
{
    const fa4_fwd_params *f = &p->fwd;
    const int64_t dim_most = max64(f->dim, f->dim_v);
    problem w = {.p = p, .units = f->batch * f->heads_kv, .group = f->heads_q / f->heads_kv};
#ifdef VEC_BF16
    w.pairs = f->dtype == FA4_BF16;
#endif
    set_sizes(&w);
    // Five matrices of a kv block stay in the second cache while the row blocks pass: 320 KiB of fp32.
    w.panels = max64((dim_most <= 64 ? 256 : dim_most <= 128 ? 128 : 64) / KEYS, 1);
    w.panels = max64(min64(w.panels, (f->len_kv + KEYS - 1) / KEYS), 1);
    w.row_blocks = (f->len_q + ROWS - 1) / ROWS;
    w.kv_blocks = (f->len_kv + w.panels * KEYS - 1) / (w.panels * KEYS);
    w.lo = min64(max64(f->lo, -f->len_q), f->len_kv);
    w.hi = min64(max64(f->hi, -f->len_q), f->len_kv);
    const double work = (double)(f->batch * f->heads_q) * (double)f->len_q * (double)f->len_kv * (double)dim_most;
    if (!executor || work < SERIAL_WORK) {
        run_units(&w, 0, w.units);
    } else if (w.units >= executor->threads || w.kv_blocks < 2 || w.group * w.row_blocks == 0) {
        executor->parallel_for(executor, w.units, run_units, &w);
    } else {
        w.wave = min64((executor->threads + w.units - 1) / w.units, w.kv_blocks);
        run_in_waves(&w, executor);
    }
    return w.out_of_memory ? FA4_NO_MEMORY : FA4_OK;
}
