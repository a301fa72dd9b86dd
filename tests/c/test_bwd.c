// What the gradient on the CPU promises beyond its formula, which test_cpu.c checks: the same bits however the work is
// spread and whatever lies beside it, and NaNs and infinities that show exactly where some query sees them.
#include "check.h"

#include <math.h>
#include <string.h>

// ---- Contiguous tensors of one dtype

typedef struct {
    fa4_dtype dtype;
    int64_t shape[4];
    void *data;
} tensor;

enum { Q, K, V, DOUT, O, DQ, DK, DV, LSE, TENSORS };

typedef struct {
    tensor t[TENSORS];
    fa4_bwd_params p;
} attention;

static int64_t count(const tensor *t)
{
    return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3];
}

static size_t bytes(const tensor *t)
{
    return (size_t)count(t) * (t->dtype == FA4_BF16 ? 2 : 4);
}

static float get(const tensor *t, int64_t n)
{
    if (t->dtype == FA4_F32) return ((const float *)t->data)[n];
    const uint32_t bits = (uint32_t)((const uint16_t *)t->data)[n] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void put(tensor *t, int64_t n, float x) // bf16 by cutting off: inputs only
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (t->dtype == FA4_F32) {
        ((float *)t->data)[n] = x;
    } else {
        ((uint16_t *)t->data)[n] = (uint16_t)(bits >> 16);
    }
}

static void fill(tensor *t, uint64_t seed)
{
    for (int64_t n = 0; n < count(t); n++) {
        uint64_t z = (seed << 32) + (uint64_t)n * 0x9e3779b97f4a7c15; // splitmix64
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        put(t, n, (float)((z ^ z >> 31) >> 40) * 0x1p-23f - 1);
    }
}

typedef struct {
    int64_t batch, heads_q, heads_kv, len_q, len_kv, dim, dim_v;
} sizes;

static attention attention_new(fa4_dtype dtype, sizes n)
{
    attention a;
    memset(&a, 0, sizeof a);
    const int64_t shapes[TENSORS][4] = {
        [Q] = {n.batch, n.heads_q, n.len_q, n.dim},     [K] = {n.batch, n.heads_kv, n.len_kv, n.dim},
        [V] = {n.batch, n.heads_kv, n.len_kv, n.dim_v}, [DOUT] = {n.batch, n.heads_q, n.len_q, n.dim_v},
        [O] = {n.batch, n.heads_q, n.len_q, n.dim_v},   [DQ] = {n.batch, n.heads_q, n.len_q, n.dim},
        [DK] = {n.batch, n.heads_kv, n.len_kv, n.dim},  [DV] = {n.batch, n.heads_kv, n.len_kv, n.dim_v},
        [LSE] = {n.batch, n.heads_q, n.len_q, 1},
    };
    fa4_fwd_params *f = &a.p.fwd;
    int64_t *strides[TENSORS] = {f->stride_q,   f->stride_k,   f->stride_v, a.p.stride_dout, f->stride_o, a.p.stride_dq,
                                 a.p.stride_dk, a.p.stride_dv, NULL};
    for (int i = 0; i < TENSORS; i++) {
        tensor *t = &a.t[i];
        t->dtype = i == LSE ? FA4_F32 : dtype;
        memcpy(t->shape, shapes[i], sizeof t->shape);
        t->data = allocate(bytes(t));
        fill(t, (uint64_t)i);
        const int64_t stride[4] = {t->shape[1] * t->shape[2] * t->shape[3], t->shape[2] * t->shape[3], t->shape[3], 1};
        memcpy(i == LSE ? f->stride_lse : strides[i], stride, sizeof *stride * (i == LSE ? 3 : 4));
    }
    f->q = a.t[Q].data, f->k = a.t[K].data, f->v = a.t[V].data, f->o = a.t[O].data, f->lse = a.t[LSE].data;
    a.p.dout = a.t[DOUT].data, a.p.dq = a.t[DQ].data, a.p.dk = a.t[DK].data, a.p.dv = a.t[DV].data;
    f->batch = n.batch, f->heads_q = n.heads_q, f->heads_kv = n.heads_kv, f->len_q = n.len_q, f->len_kv = n.len_kv;
    f->dim = n.dim, f->dim_v = n.dim_v, f->dtype = dtype, f->scale = 0.3;
    f->lo = FA4_UNBOUNDED_LO, f->hi = FA4_UNBOUNDED_HI;
    return a;
}

static void attention_free(attention *a)
{
    for (int i = 0; i < TENSORS; i++) free(a->t[i].data);
}

static void gradient(attention *a, int threads)
{
    const fa4_executor executor = {parallel_for, threads};
    const size_t size = fa4_bwd_workspace(&a->p, FA4_ARCH_CPU);
    char *memory = allocate(size + 64);
    a->p.workspace = memory + (64 - (uintptr_t)memory % 64) % 64;
    for (int i = DQ; i <= DV; i++) memset(a->t[i].data, 0xff, bytes(&a->t[i]));
    CHECK(fa4_bwd(&a->p, FA4_ARCH_CPU, threads ? (void *)&executor : NULL) == FA4_OK, "%s", fa4_last_error());
    free(memory);
}

static void forward_and_gradient(attention *a, int threads)
{
    CHECK(fa4_fwd(&a->p.fwd, FA4_ARCH_CPU, NULL) == FA4_OK, "%s", fa4_last_error());
    gradient(a, threads);
}

// Copies of dq, dk and dv.
typedef struct {
    tensor d[3];
} gradients;

static gradients keep(const attention *a)
{
    gradients g;
    for (int i = 0; i < 3; i++) {
        g.d[i] = a->t[DQ + i];
        g.d[i].data = allocate(bytes(&g.d[i]));
        memcpy(g.d[i].data, a->t[DQ + i].data, bytes(&g.d[i]));
    }
    return g;
}

static void gradients_free(gradients *g)
{
    for (int i = 0; i < 3; i++) free(g->d[i].data);
}

static const char *const gradient_names[] = {"dq", "dk", "dv"};

// ---- The same bits

// Lengths that make several blocks of keys, and more threads than heads.
static void test_threads(const char *isa, fa4_dtype dtype)
{
    static const sizes cases[] = {{1, 1, 1, 333, 1100, 24, 40},
                                  {1, 3, 1, 130, 600, 64, 64},
                                  {2, 2, 2, 70, 290, 130, 16},
                                  {3, 2, 1, 65, 65, 16, 16}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int causal = 0; causal < 2; causal++) {
            attention a = attention_new(dtype, cases[c]);
            if (causal) a.p.fwd.hi = cases[c].len_kv - cases[c].len_q;
            forward_and_gradient(&a, 0);
            gradients one = keep(&a);
            for (int threads = 1; threads <= 7; threads++) {
                gradient(&a, threads);
                for (int i = 0; i < 3; i++)
                    CHECK(!memcmp(a.t[DQ + i].data, one.d[i].data, bytes(&one.d[i])),
                          "%s, dtype %d, case %zu: %s has other bits with %d threads", isa, (int)dtype, c,
                          gradient_names[i], threads);
            }
            gradients_free(&one);
            attention_free(&a);
        }
}

// The last batch and kv head alone.
static void test_alone(const char *isa, fa4_dtype dtype)
{
    const sizes all = {2, 4, 2, 150, 200, 48, 32};
    attention a = attention_new(dtype, all);
    forward_and_gradient(&a, 2);
    gradients whole = keep(&a);
    attention b = a;
    fa4_fwd_params *f = &b.p.fwd;
    const int64_t size = dtype == FA4_BF16 ? 2 : 4, q = 6 * 150, kv = 3 * 200; // rows before
    f->q = (char *)a.t[Q].data + q * 48 * size, f->o = (char *)a.t[O].data + q * 32 * size;
    f->k = (char *)a.t[K].data + kv * 48 * size, f->v = (char *)a.t[V].data + kv * 32 * size;
    f->lse = (float *)a.t[LSE].data + q;
    b.p.dout = (char *)a.t[DOUT].data + q * 32 * size, b.p.dq = (char *)a.t[DQ].data + q * 48 * size;
    b.p.dk = (char *)a.t[DK].data + kv * 48 * size, b.p.dv = (char *)a.t[DV].data + kv * 32 * size;
    f->batch = 1, f->heads_q = 2, f->heads_kv = 1;
    gradient(&b, 3);
    const int64_t first[] = {q * 48 * size, kv * 48 * size, kv * 32 * size};
    for (int i = 0; i < 3; i++)
        CHECK(!memcmp((char *)a.t[DQ + i].data + first[i], (char *)whole.d[i].data + first[i],
                      bytes(&whole.d[i]) - (size_t)first[i]),
              "%s, dtype %d: %s of a head alone has other bits than among others", isa, (int)dtype, gradient_names[i]);
    gradients_free(&whole);
    attention_free(&a);
}

// ---- NaN and inf

enum { LEN = 200, DIM = 24, WINDOW = 30 };

typedef struct {
    int first, last;
} range;

// Rows [first, last] of g may differ from those before, and hold no finite number when `all`; the others may not.
static void check_rows(const char *what, const attention *a, const gradients *before, int which, range changed, int all)
{
    const tensor *now = &a->t[DQ + which], *then = &before->d[which];
    for (int i = 0; i < LEN; i++)
        for (int d = 0; d < DIM; d++) {
            const int64_t n = i * DIM + d;
            const float x = get(now, n), y = get(then, n);
            if (i >= changed.first && i <= changed.last) {
                CHECK(!all || isnan(x), "%s: %s[%d][%d] is %g, not NaN", what, gradient_names[which], i, d, (double)x);
            } else {
                CHECK(!memcmp(&x, &y, sizeof x), "%s: %s[%d][%d] is %g, not %g", what, gradient_names[which], i, d,
                      (double)x, (double)y);
            }
        }
}

// Query i sees keys i - WINDOW to i. A row of one input is made NaN or infinite.
static void test_not_finite(const char *isa, fa4_dtype dtype)
{
    static const char *const names[] = {"q", "k", "v", "dout"};
    const sizes n = {1, 1, 1, LEN, LEN, DIM, DIM};
    const float bad[] = {NAN, INFINITY, -INFINITY};
    attention a = attention_new(dtype, n);
    a.p.fwd.lo = -WINDOW, a.p.fwd.hi = 0;
    forward_and_gradient(&a, 0);
    gradients before = keep(&a);
    for (int input = Q; input <= DOUT; input++)
        for (int at = 5; at < LEN; at += 47)
            for (int b = 0; b < 3; b++) {
                tensor *x = &a.t[input];
                for (int d = 0; d < DIM; d++) put(x, at * DIM + d, bad[b]);
                forward_and_gradient(&a, 2);
                const int of_rows = input == Q || input == DOUT;
                const range rows = {at, of_rows ? at : at + WINDOW}, keys = {at - WINDOW, of_rows ? at : at + WINDOW};
                const range none = {LEN, LEN};
                char what[100];
                snprintf(what, sizeof what, "%s, dtype %d, %s[%d] = %g", isa, (int)dtype, names[input], at,
                         (double)bad[b]);
                check_rows(what, &a, &before, 0, rows, b == 0);
                check_rows(what, &a, &before, 1, keys, b == 0);
                check_rows(what, &a, &before, 2, input == V ? none : keys, b == 0); // dv = pᵀ dout has no v
                fill(x, (uint64_t)input);
            }
    gradients_free(&before);
    attention_free(&a);
}

// One NaN or infinity in dout spoils its column of dv, and no other.
static void test_one_number(const char *isa, fa4_dtype dtype)
{
    const sizes n = {1, 1, 1, LEN, LEN, DIM, DIM};
    attention a = attention_new(dtype, n);
    a.p.fwd.hi = 0;
    forward_and_gradient(&a, 0);
    gradients before = keep(&a);
    put(&a.t[DOUT], 100 * DIM + 7, INFINITY);
    gradient(&a, 0);
    for (int j = 0; j < LEN; j++)
        for (int d = 0; d < DIM; d++) {
            const float x = get(&a.t[DV], j * DIM + d), y = get(&before.d[2], j * DIM + d);
            CHECK(j <= 100 && d == 7 ? x == INFINITY : !memcmp(&x, &y, sizeof x), "%s, dtype %d: dv[%d][%d] = %g", isa,
                  (int)dtype, j, d, (double)x);
        }
    gradients_free(&before);
    attention_free(&a);
}

// Keys that the mask hides from all, and rows that see nothing, hold NaN: the same bits as if they held zeros, and
// gradients of 0.
static void test_hidden(const char *isa, fa4_dtype dtype)
{
    static uint8_t mask[LEN * LEN];
    const sizes n = {1, 1, 1, LEN, LEN, DIM, DIM};
    attention a = attention_new(dtype, n);
    for (int i = 0; i < LEN; i++)
        for (int j = 0; j < LEN; j++) mask[i * LEN + j] = i % 7 != 3 && j % 5 != 1 && j < 190;
    a.p.fwd.mask = mask, a.p.fwd.mask_type = FA4_MASK_BOOL;
    a.p.fwd.stride_mask[2] = LEN, a.p.fwd.stride_mask[3] = 1;
    gradients before = {0};
    for (int poisoned = 0; poisoned < 2; poisoned++) {
        const float x = poisoned ? NAN : 0;
        for (int i = 0; i < LEN * DIM; i++) {
            const int row = i / DIM;
            if (row % 7 == 3) put(&a.t[Q], i, x), put(&a.t[DOUT], i, x);
            if (row % 5 == 1 || row >= 190) put(&a.t[K], i, x), put(&a.t[V], i, x);
        }
        forward_and_gradient(&a, 0);
        if (!poisoned) before = keep(&a);
    }
    for (int i = 0; i < 3; i++) {
        const tensor *t = &a.t[DQ + i];
        CHECK(!memcmp(t->data, before.d[i].data, bytes(t)), "%s, dtype %d: hidden NaNs change %s", isa, (int)dtype,
              gradient_names[i]);
        for (int64_t m = 0; m < count(t); m++) {
            const int row = (int)(m / DIM), hidden = i ? row % 5 == 1 || row >= 190 : row % 7 == 3;
            CHECK(!hidden || get(t, m) == 0, "%s, dtype %d: %s[%d] is %g", isa, (int)dtype, gradient_names[i], row,
                  (double)get(t, m));
        }
    }
    gradients_free(&before);
    attention_free(&a);
}

// ---- Nothing to do

static void test_empty(const char *isa)
{
    const sizes cases[] = {{2, 2, 1, 9, 0, 8, 8}, {2, 2, 1, 0, 9, 8, 8}, {2, 0, 2, 9, 9, 8, 8}, {0, 2, 2, 9, 9, 8, 8}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        attention a = attention_new(FA4_F32, cases[c]);
        for (int threads = 0; threads < 4; threads += 3) {
            gradient(&a, threads);
            for (int i = DQ; i <= DV; i++)
                for (int64_t n = 0; n < count(&a.t[i]); n++)
                    CHECK(get(&a.t[i], n) == 0, "%s, empty case %zu: %s[%d] is %g", isa, c, gradient_names[i - DQ],
                          (int)n, (double)get(&a.t[i], n));
        }
        attention_free(&a);
    }
}

int main(void)
{
    const fa4_dtype dtypes[] = {FA4_F32, FA4_BF16};
    for (int n = 0; fa4_cpu_isa_at(n).name; n++) {
        const fa4_cpu_isa isa = fa4_cpu_isa_at(n);
        if (isa.unavailable) {
            printf("%s: skipped, %s\n", isa.name, isa.unavailable);
            continue;
        }
        CHECK(fa4_cpu_isa_force(isa.name) == FA4_OK, "%s", fa4_last_error());
        const int before = failures;
        for (int d = 0; d < 2; d++) {
            test_threads(isa.name, dtypes[d]);
            test_alone(isa.name, dtypes[d]);
            test_not_finite(isa.name, dtypes[d]);
            test_one_number(isa.name, dtypes[d]);
            test_hidden(isa.name, dtypes[d]);
        }
        test_empty(isa.name);
        printf("%s: the gradient's bits and NaNs, %d failures\n", isa.name, failures - before);
    }
    return failures > 0;
}
