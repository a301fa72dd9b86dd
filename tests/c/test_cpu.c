// The C API on the CPU against a naive reference in double: every instruction set that the machine has, hashed inputs,
// odd strides, NaN around every tensor, memory that ends where the tensor ends (so that the address sanitizer sees a
// read past it), the same bits for any number of threads and any neighbours.
//
//     test_cpu [cases]        random cases for each instruction set, 400 unless told
#include "check.h"

#include <float.h>
#include <math.h>
#include <string.h>

// ---- Hashed numbers

static uint64_t hash_state;

static uint64_t hash_next(void) // splitmix64
{
    uint64_t z = hash_state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

static int64_t hash_below(int64_t n)
{
    return (int64_t)(hash_next() % (uint64_t)n);
}

static double hash_uniform(void) // [0, 1)
{
    return (double)(hash_next() >> 11) * 0x1p-53;
}

static double hash_value(void) // about normal
{
    return (hash_uniform() + hash_uniform() + hash_uniform() + hash_uniform() - 2) * 1.7;
}

// ---- Elements, by definition rather than by the kernels' bit tricks

static size_t size_of(fa4_dtype dtype)
{
    return dtype == FA4_F64 ? 8 : dtype == FA4_F32 ? 4 : 2;
}

static double small_float(unsigned bits, int exponent_bits, int mantissa_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1, exponent = (int)(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    double mantissa = bits & ((1u << mantissa_bits) - 1), sign = bits >> 15 ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1) return mantissa > 0 ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

static double get(const void *base, fa4_dtype dtype, int64_t offset)
{
    switch (dtype) {
    case FA4_F16: return small_float(((const uint16_t *)base)[offset], 5, 10);
    case FA4_BF16: return small_float(((const uint16_t *)base)[offset], 8, 7);
    case FA4_F32: return ((const float *)base)[offset];
    default: return ((const double *)base)[offset];
    }
}

// The nearest that the dtype has, ties away; inputs only.
static void put(void *base, fa4_dtype dtype, int64_t offset, double x)
{
    if (dtype == FA4_F32) {
        ((float *)base)[offset] = (float)x;
    } else if (dtype == FA4_F64) {
        ((double *)base)[offset] = x;
    } else {
        int exponent_bits = dtype == FA4_F16 ? 5 : 8, mantissa_bits = 15 - exponent_bits;
        unsigned low = 0, high = ((1u << exponent_bits) - 1) << mantissa_bits; // inf
        double magnitude = fabs(x);
        if (isnan(x)) {
            low = high + 1;
        } else if (isinf(x)) {
            low = high;
        } else { // bisect: the encodings of positive numbers are in order
            while (high - low > 1) {
                unsigned middle = (low + high) / 2;
                *(small_float(middle, exponent_bits, mantissa_bits) <= magnitude ? &low : &high) = middle;
            }
            double below = small_float(low, exponent_bits, mantissa_bits);
            double above = small_float(low + 1, exponent_bits, mantissa_bits);
            if (magnitude - below >= above - magnitude) low++;
        }
        ((uint16_t *)base)[offset] = (uint16_t)(low | (x < 0 ? 0x8000u : 0));
    }
}

// ---- Tensors in poisoned memory

typedef struct {
    void *memory, *base;
    size_t size;
    fa4_dtype dtype;
    int64_t shape[4], stride[4];
} tensor;

enum { LAYOUTS = 6 };

// layout 0: contiguous; 1: [b, l, h, d]; 2: reversed order, so the last stride is not 1; 3: gaps everywhere; 4: last
// dimension backwards; 5: repeated along one dimension (inputs only).
static tensor tensor_make(fa4_dtype dtype, int64_t b, int64_t h, int64_t l, int64_t d, int layout)
{
    static const int order_of[LAYOUTS][4] = {{0, 1, 2, 3}, {0, 2, 1, 3}, {3, 2, 1, 0},
                                             {0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}};
    tensor t = {.dtype = dtype, .shape = {b, h, l, d}};
    int64_t step = layout == 3 ? 3 : 1, count = 1, first = 0;
    int repeated = layout == 5 ? (int)hash_below(4) : -1;
    for (int i = 3; i >= 0; i--) {
        int dim = order_of[layout][i];
        t.stride[dim] = dim == repeated ? 0 : step;
        if (dim != repeated) step *= t.shape[dim] + (layout == 3);
    }
    if (layout == 4) {
        first = (t.shape[3] - 1) * t.stride[3];
        t.stride[3] = -t.stride[3];
    }
    for (int i = 0; i < 4; i++) count = t.shape[i] == 0 ? 0 : count + (t.shape[i] - 1) * llabs(t.stride[i]);
    if (b * h * l * d == 0) count = first = 0;
    int64_t lead = hash_below(4); // any alignment
    t.size = (size_t)(count + lead) * size_of(dtype);
    t.memory = allocate(t.size);
    for (int64_t i = 0; i < count + lead; i++) put(t.memory, dtype, i, NAN);
    t.base = (char *)t.memory + (size_t)(lead + first) * size_of(dtype);
    return t;
}

static int64_t tensor_offset(const tensor *t, int64_t b, int64_t h, int64_t l, int64_t d)
{
    return b * t->stride[0] + h * t->stride[1] + l * t->stride[2] + d * t->stride[3];
}

static int64_t tensor_count(const tensor *t)
{
    return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3];
}

// The offset of element n in the order of the shape.
static int64_t tensor_nth(const tensor *t, int64_t n)
{
    int64_t offset = 0;
    for (int i = 3; i >= 0; n /= t->shape[i--]) offset += n % t->shape[i] * t->stride[i];
    return offset;
}

static void tensor_fill(tensor *t)
{
    for (int64_t n = 0; n < tensor_count(t); n++) put(t->base, t->dtype, tensor_nth(t, n), hash_value());
}

// ---- A case

typedef struct {
    fa4_bwd_params params; // .fwd is the forward's
    tensor q, k, v, o, lse, mask, dout, dlse, dq, dk, dv;
    int32_t *lens;
} test_case;

static void copy_strides(int64_t *to, const tensor *t)
{
    memcpy(to, t->stride, sizeof t->stride);
}

static int64_t some_length(int64_t most)
{
    static const int64_t breaking[] = {1, 2, 15, 16, 17, 23, 24, 25, 63, 64, 65, 127, 128, 129, 131};
    int64_t n = hash_below(3) ? 1 + hash_below(most) : breaking[hash_below(sizeof breaking / sizeof *breaking)];
    return n < most ? n : most;
}

static test_case case_make(fa4_dtype dtype, fa4_mask_type mask_type)
{
    test_case c;
    memset(&c, 0, sizeof c);
    fa4_fwd_params *p = &c.params.fwd;
    p->batch = 1 + hash_below(2), p->heads_kv = 1 + hash_below(2), p->heads_q = p->heads_kv * (1 + hash_below(3));
    p->len_q = some_length(140), p->len_kv = hash_below(20) ? some_length(270) : 0;
    p->dim = some_length(256), p->dim_v = hash_below(2) ? p->dim : some_length(256);
    if (hash_below(3)) p->dim = p->dim_v = 1 + hash_below(40);
    p->dtype = dtype, p->mask_type = mask_type;
    p->scale = hash_below(8) ? 1 / sqrt((double)p->dim) : hash_below(2) ? 0 : -0.1;
    p->lo = FA4_UNBOUNDED_LO, p->hi = FA4_UNBOUNDED_HI;
    switch (hash_below(5)) {
    case 0: p->hi = 0; break;
    case 1: p->hi = p->len_kv - p->len_q; break;
    case 2: p->lo = hash_below(p->len_q + p->len_kv) - p->len_q, p->hi = p->lo + hash_below(100) - 5; break;
    }
    if (hash_below(4) == 0) {
        c.lens = allocate(sizeof(int32_t) * (size_t)p->batch);
        for (int64_t b = 0; b < p->batch; b++) c.lens[b] = (int32_t)hash_below(p->len_kv + 1);
        p->len_kv_of = c.lens;
    }

    fa4_dtype lse_dtype = dtype == FA4_F64 ? FA4_F64 : FA4_F32;
    c.q = tensor_make(dtype, p->batch, p->heads_q, p->len_q, p->dim, (int)hash_below(LAYOUTS));
    c.k = tensor_make(dtype, p->batch, p->heads_kv, p->len_kv, p->dim, (int)hash_below(LAYOUTS));
    c.v = tensor_make(dtype, p->batch, p->heads_kv, p->len_kv, p->dim_v, (int)hash_below(LAYOUTS));
    c.o = tensor_make(dtype, p->batch, p->heads_q, p->len_q, p->dim_v, (int)hash_below(LAYOUTS - 1));
    c.lse = tensor_make(lse_dtype, p->batch, p->heads_q, p->len_q, 1, (int)hash_below(LAYOUTS - 1));
    c.dout = tensor_make(dtype, p->batch, p->heads_q, p->len_q, p->dim_v, (int)hash_below(LAYOUTS));
    c.dlse = tensor_make(lse_dtype, p->batch, p->heads_q, p->len_q, 1, (int)hash_below(LAYOUTS));
    c.dq = tensor_make(dtype, p->batch, p->heads_q, p->len_q, p->dim, (int)hash_below(LAYOUTS - 1));
    c.dk = tensor_make(dtype, p->batch, p->heads_kv, p->len_kv, p->dim, (int)hash_below(LAYOUTS - 1));
    c.dv = tensor_make(dtype, p->batch, p->heads_kv, p->len_kv, p->dim_v, (int)hash_below(LAYOUTS - 1));
    tensor_fill(&c.q), tensor_fill(&c.k), tensor_fill(&c.v), tensor_fill(&c.dout), tensor_fill(&c.dlse);

    int mask_layout = (int)hash_below(LAYOUTS);
    if (mask_type == FA4_MASK_BOOL) { // bytes, through halves of 16-bit elements that are written one by one
        c.mask = tensor_make(FA4_F16, p->batch, p->heads_q, p->len_q, p->len_kv, mask_layout);
        for (int64_t n = 0; n < tensor_count(&c.mask); n++)
            ((uint8_t *)c.mask.base)[2 * tensor_nth(&c.mask, n)] = hash_below(3) ? (uint8_t)(1 + hash_below(255)) : 0;
        for (int i = 0; i < 4; i++) p->stride_mask[i] = 2 * c.mask.stride[i];
        if (mask_layout == 0) { // contiguous bytes, too
            for (int64_t n = 0; n < tensor_count(&c.mask); n++)
                ((uint8_t *)c.mask.base)[n] = hash_below(3) ? (uint8_t)(1 + hash_below(255)) : 0;
            copy_strides(p->stride_mask, &c.mask);
        }
    } else if (mask_type != FA4_MASK_NONE) {
        c.mask =
            tensor_make((fa4_dtype)(mask_type - FA4_MASK_F16), p->batch, p->heads_q, p->len_q, p->len_kv, mask_layout);
        for (int64_t n = 0; n < tensor_count(&c.mask); n++)
            put(c.mask.base, c.mask.dtype, tensor_nth(&c.mask, n), hash_below(3) ? hash_value() : -INFINITY);
        copy_strides(p->stride_mask, &c.mask);
    }

    p->q = c.q.base, p->k = c.k.base, p->v = c.v.base, p->o = c.o.base, p->lse = c.lse.base, p->mask = c.mask.base;
    copy_strides(p->stride_q, &c.q), copy_strides(p->stride_k, &c.k), copy_strides(p->stride_v, &c.v);
    copy_strides(p->stride_o, &c.o);
    memcpy(p->stride_lse, c.lse.stride, sizeof p->stride_lse);
    c.params.dout = c.dout.base, c.params.dlse = c.dlse.base;
    c.params.dq = c.dq.base, c.params.dk = c.dk.base, c.params.dv = c.dv.base;
    copy_strides(c.params.stride_dout, &c.dout), copy_strides(c.params.stride_dq, &c.dq);
    copy_strides(c.params.stride_dk, &c.dk), copy_strides(c.params.stride_dv, &c.dv);
    memcpy(c.params.stride_dlse, c.dlse.stride, sizeof c.params.stride_dlse);
    return c;
}

static void case_free(test_case *c)
{
    tensor *all[] = {&c->q, &c->k, &c->v, &c->o, &c->lse, &c->mask, &c->dout, &c->dlse, &c->dq, &c->dk, &c->dv};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]->memory);
    free(c->lens);
}

static void case_describe(const test_case *c, const char *isa, uint64_t seed)
{
    const fa4_fwd_params *p = &c->params.fwd;
    fprintf(stderr,
            "    %s, seed %llu: dtype %d, mask %d, [%lld, %lld/%lld, %lld x %lld, %lld, %lld], band %lld..%lld, scale "
            "%g%s\n",
            isa, (unsigned long long)seed, (int)p->dtype, (int)p->mask_type, (long long)p->batch, (long long)p->heads_q,
            (long long)p->heads_kv, (long long)p->len_q, (long long)p->len_kv, (long long)p->dim, (long long)p->dim_v,
            (long long)p->lo, (long long)p->hi, p->scale, p->len_kv_of ? ", len_kv_of" : "");
}

// ---- The reference, by the formulas

typedef struct {
    double *o, *lse, *dq, *dk, *dv;           // contiguous
    double *o_abs, *dq_abs, *dk_abs, *dv_abs; // the same sums of absolute values: the scale of rounding
    double score_max;
} reference;

static double mask_of(const test_case *c, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const fa4_fwd_params *p = &c->params.fwd;
    int64_t offset = b * p->stride_mask[0] + h * p->stride_mask[1] + i * p->stride_mask[2] + j * p->stride_mask[3];
    if (p->mask_type == FA4_MASK_NONE) return 0;
    if (p->mask_type == FA4_MASK_BOOL) return ((const uint8_t *)p->mask)[offset] ? 0 : -INFINITY;
    return get(p->mask, c->mask.dtype, offset);
}

static double *zeros(int64_t n)
{
    double *x = allocate((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = 0;
    return x;
}

// The tensor's values in the order of its shape.
static double *dense(const tensor *t)
{
    double *x = allocate((size_t)tensor_count(t) * sizeof *x);
    for (int64_t n = 0; n < tensor_count(t); n++) x[n] = get(t->base, t->dtype, tensor_nth(t, n));
    return x;
}

static reference reference_make(const test_case *c)
{
    const fa4_fwd_params *p = &c->params.fwd;
    const int64_t dim = p->dim, dim_v = p->dim_v;
    int64_t rows = p->batch * p->heads_q * p->len_q, cols = p->batch * p->heads_kv * p->len_kv;
    reference r = {.o = zeros(rows * dim_v),
                   .lse = zeros(rows),
                   .dq = zeros(rows * dim),
                   .dk = zeros(cols * dim),
                   .dv = zeros(cols * dim_v),
                   .o_abs = zeros(rows * dim_v),
                   .dq_abs = zeros(rows * dim),
                   .dk_abs = zeros(cols * dim),
                   .dv_abs = zeros(cols * dim_v)};
    double *all_q = dense(&c->q), *all_k = dense(&c->k), *all_v = dense(&c->v), *all_dout = dense(&c->dout);
    double *dlse = dense(&c->dlse), *s = zeros(p->len_kv);
    for (int64_t row = 0; row < rows; row++) {
        int64_t i = row % p->len_q, h = row / p->len_q % p->heads_q, b = row / p->len_q / p->heads_q;
        int64_t h_kv = h / (p->heads_q / p->heads_kv), keys = p->len_kv_of ? p->len_kv_of[b] : p->len_kv;
        int64_t col = (b * p->heads_kv + h_kv) * p->len_kv;
        const double *q = all_q + row * dim, *dout = all_dout + row * dim_v;
        double *o = r.o + row * dim_v, *o_abs = r.o_abs + row * dim_v, m = -INFINITY, l = 0;
        for (int64_t j = 0; j < keys; j++) {
            const double *k = all_k + (col + j) * dim;
            double mask = mask_of(c, b, h, i, j), dot = 0;
            s[j] = -INFINITY;
            if (mask == -INFINITY || j - i < p->lo || j - i > p->hi) continue;
            for (int64_t d = 0; d < dim; d++) dot += q[d] * k[d];
            s[j] = dot * p->scale + mask;
            m = fmax(m, s[j]);
            r.score_max = fmax(r.score_max, fabs(dot * p->scale) + fabs(mask));
        }
        for (int64_t j = 0; j < keys; j++) l += s[j] = m == -INFINITY ? 0 : exp(s[j] - m);
        r.lse[row] = m + log(l);
        if (l == 0) continue;
        for (int64_t j = 0; j < keys; j++)
            for (int64_t d = 0; d < dim_v; d++) {
                double x = s[j] / l * all_v[(col + j) * dim_v + d];
                o[d] += x, o_abs[d] += fabs(x);
            }
        double delta = -dlse[row], delta_abs = fabs(delta);
        for (int64_t d = 0; d < dim_v; d++) delta += o[d] * dout[d], delta_abs += o_abs[d] * fabs(dout[d]);
        for (int64_t j = 0; j < keys; j++) {
            const double *k = all_k + (col + j) * dim, *v = all_v + (col + j) * dim_v;
            double *dk = r.dk + (col + j) * dim, *dk_abs = r.dk_abs + (col + j) * dim;
            double *dv = r.dv + (col + j) * dim_v, *dv_abs = r.dv_abs + (col + j) * dim_v, dp = 0, dp_abs = 0;
            for (int64_t d = 0; d < dim_v; d++) {
                dp += dout[d] * v[d], dp_abs += fabs(dout[d] * v[d]);
                dv[d] += s[j] / l * dout[d], dv_abs[d] += s[j] / l * fabs(dout[d]);
            }
            double ds = s[j] / l * (dp - delta) * p->scale, ds_abs = s[j] / l * (dp_abs + delta_abs) * fabs(p->scale);
            for (int64_t d = 0; d < dim; d++) {
                r.dq[row * dim + d] += ds * k[d], r.dq_abs[row * dim + d] += ds_abs * fabs(k[d]);
                dk[d] += ds * q[d], dk_abs[d] += ds_abs * fabs(q[d]);
            }
        }
    }
    free(all_q), free(all_k), free(all_v), free(all_dout), free(dlse), free(s);
    return r;
}

static void reference_free(reference *r)
{
    double *all[] = {r->o, r->lse, r->dq, r->dk, r->dv, r->o_abs, r->dq_abs, r->dk_abs, r->dv_abs};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

// ---- Comparing

static double storage_epsilon(fa4_dtype dtype) // half a unit in the last place, relative
{
    return dtype == FA4_F16 ? 0x1p-11 : dtype == FA4_BF16 ? 0x1p-8 : dtype == FA4_F32 ? 0x1p-24 : 0x1p-53;
}

// Each element within what storing it rounds, and what arithmetic on it does. Returns whether it is so.
static int close_to(const char *name, const tensor *t, const double *expected, const double *absolute,
                    double arithmetic)
{
    double storage = storage_epsilon(t->dtype), smallest = t->dtype == FA4_F16 ? 0x1p-25 : 0;
    for (int64_t n = 0; n < tensor_count(t); n++) {
        double x = get(t->base, t->dtype, tensor_nth(t, n));
        double bound = storage * 1.01 * fabs(expected[n]) + arithmetic * absolute[n] + smallest + DBL_MIN;
        if (!(fabs(x - expected[n]) <= bound)) {
            CHECK(0, "%s[%lld] is %.9g, not %.9g within %.3g", name, (long long)n, x, expected[n], bound);
            return 0;
        }
    }
    return 1;
}

static int lse_close(const test_case *c, const reference *r, double arithmetic)
{
    for (int64_t n = 0; n < tensor_count(&c->lse); n++) {
        double x = get(c->lse.base, c->lse.dtype, tensor_nth(&c->lse, n)), expected = r->lse[n];
        if (expected == -INFINITY ? x == -INFINITY : fabs(x - expected) <= arithmetic * (1 + fabs(expected))) continue;
        CHECK(0, "lse[%lld] is %.9g, not %.9g", (long long)n, x, expected);
        return 0;
    }
    return 1;
}

// A copy of everything a tensor's memory holds, gaps too.
static void *snapshot(const tensor *t)
{
    void *copy = allocate(t->size);
    memcpy(copy, t->memory, t->size);
    return copy;
}

static int unchanged(const char *name, const tensor *t, void *copy)
{
    int same = !memcmp(copy, t->memory, t->size);
    CHECK(same, "%s has other bits with another number of threads", name);
    free(copy);
    return same;
}

// Elements of memory outside the view must still be NaN after the kernel wrote the view.
static int poison_kept(const char *name, const tensor *t)
{
    int64_t total = (int64_t)(t->size / size_of(t->dtype)), outside = 0;
    for (int64_t n = 0; n < total; n++) outside += isnan(get(t->memory, t->dtype, n)) != 0;
    int64_t expected = total - tensor_count(t);
    CHECK(outside == expected, "%s: %lld elements outside the view kept their NaN, not %lld", name, (long long)outside,
          (long long)expected);
    return outside == expected;
}

static fa4_status run_bwd(test_case *c, const fa4_executor *executor)
{
    size_t size = fa4_bwd_workspace(&c->params, FA4_ARCH_CPU);
    char *memory = allocate(size + 64);
    c->params.workspace = memory + (64 - (uintptr_t)memory % 64) % 64;
    memset(c->params.workspace, 0xff, size); // its contents do not matter
    fa4_status status = fa4_bwd(&c->params, FA4_ARCH_CPU, (void *)executor);
    free(memory);
    return status;
}

// The last batch and kv head alone gives the bits that it has among the others.
static int alone_the_same(test_case *c)
{
    fa4_fwd_params p = c->params.fwd;
    int64_t b = p.batch - 1, group = p.heads_q / p.heads_kv, h = p.heads_q - group, bytes = (int64_t)size_of(p.dtype);
    tensor o = tensor_make(p.dtype, 1, group, p.len_q, p.dim_v, 0),
           lse = tensor_make(c->lse.dtype, 1, group, p.len_q, 1, 0);
    p.q = (const char *)p.q + bytes * (b * p.stride_q[0] + h * p.stride_q[1]);
    p.k = (const char *)p.k + bytes * (b * p.stride_k[0] + (p.heads_kv - 1) * p.stride_k[1]);
    p.v = (const char *)p.v + bytes * (b * p.stride_v[0] + (p.heads_kv - 1) * p.stride_v[1]);
    if (p.mask) {
        int64_t mask_bytes = p.mask_type == FA4_MASK_BOOL ? 1 : (int64_t)size_of(c->mask.dtype);
        p.mask = (const char *)p.mask + mask_bytes * (b * p.stride_mask[0] + h * p.stride_mask[1]);
    }
    if (p.len_kv_of) p.len_kv_of += b;
    p.o = o.base, p.lse = lse.base;
    memcpy(p.stride_o, o.stride, sizeof p.stride_o);
    memcpy(p.stride_lse, lse.stride, sizeof p.stride_lse);
    p.batch = p.heads_kv = 1, p.heads_q = group;
    int same = fa4_fwd(&p, FA4_ARCH_CPU, NULL) == FA4_OK;
    for (int64_t n = 0; n < tensor_count(&o); n++) {
        int64_t d = n % p.dim_v, i = n / p.dim_v % p.len_q, head = n / p.dim_v / p.len_q;
        int64_t whole = tensor_offset(&c->o, b, h + head, i, d);
        same &= !memcmp((char *)o.base + n * bytes, (char *)c->o.base + whole * bytes, (size_t)bytes);
    }
    CHECK(same, "a head alone has other bits than among others");
    free(o.memory), free(lse.memory);
    return same;
}

static void case_run(const char *isa, uint64_t seed, fa4_dtype dtype, fa4_mask_type mask_type)
{
    hash_state = seed;
    test_case c = case_make(dtype, mask_type);
    const fa4_fwd_params *p = &c.params.fwd;
    reference r = reference_make(&c);
    int ok = 1;

    // fp32 sums, or fp64; with bf16 dot products p and ds are rounded to bf16 before their products.
    double rounding = dtype == FA4_F64 ? 0x1p-53 : 0x1p-24, lse_bound = rounding * (32 + 16 * r.score_max);
    double arithmetic = lse_bound + (dtype == FA4_BF16 && strstr(isa, "bf16") ? 0x1p-8 : 0);
    fa4_status status = fa4_fwd(&c.params.fwd, FA4_ARCH_CPU, NULL);
    CHECK(status == FA4_OK, "fa4_fwd: %s", fa4_last_error());
    ok &= status == FA4_OK && close_to("o", &c.o, r.o, r.o_abs, arithmetic) && lse_close(&c, &r, lse_bound);
    ok = ok && poison_kept("o", &c.o) && alone_the_same(&c);
    for (int threads = 1; ok && threads <= 3; threads++) {
        const fa4_executor executor = {parallel_for, threads};
        void *o = snapshot(&c.o), *lse = snapshot(&c.lse);
        ok &= fa4_fwd(p, FA4_ARCH_CPU, (void *)&executor) == FA4_OK;
        ok &= unchanged("o", &c.o, o) & unchanged("lse", &c.lse, lse);
    }

    if (ok) {
        status = run_bwd(&c, NULL);
        CHECK(status == FA4_OK, "fa4_bwd: %s", fa4_last_error());
        // The gradient starts from o and lse as they were stored.
        double stored = 4 * arithmetic + 4 * storage_epsilon(dtype) * (dtype == FA4_F64 || dtype == FA4_F32 ? 4 : 1);
        ok &= status == FA4_OK && close_to("dq", &c.dq, r.dq, r.dq_abs, stored);
        ok = ok && close_to("dk", &c.dk, r.dk, r.dk_abs, stored) && close_to("dv", &c.dv, r.dv, r.dv_abs, stored);
        ok = ok && poison_kept("dq", &c.dq) && poison_kept("dk", &c.dk) && poison_kept("dv", &c.dv);
    }
    for (int threads = 1; ok && threads <= 3; threads++) {
        const fa4_executor executor = {parallel_for, threads};
        void *dq = snapshot(&c.dq), *dk = snapshot(&c.dk), *dv = snapshot(&c.dv);
        ok &= run_bwd(&c, &executor) == FA4_OK;
        ok &= unchanged("dq", &c.dq, dq) & unchanged("dk", &c.dk, dk) & unchanged("dv", &c.dv, dv);
    }
    if (!ok) case_describe(&c, isa, seed);
    reference_free(&r);
    case_free(&c);
}

// ---- What one input at a time decides

// [1, 1, len, dim] of float, contiguous.
static fa4_fwd_params plain(int64_t len, int64_t dim, float *q, float *k, float *v, float *o, float *lse)
{
    fa4_fwd_params p;
    memset(&p, 0, sizeof p);
    p.q = q, p.k = k, p.v = v, p.o = o, p.lse = lse;
    int64_t stride[4] = {len * dim, len * dim, dim, 1};
    memcpy(p.stride_q, stride, sizeof stride), memcpy(p.stride_k, stride, sizeof stride);
    memcpy(p.stride_v, stride, sizeof stride), memcpy(p.stride_o, stride, sizeof stride);
    p.stride_lse[0] = p.stride_lse[1] = len, p.stride_lse[2] = 1;
    p.batch = p.heads_q = p.heads_kv = 1, p.len_q = p.len_kv = len, p.dim = p.dim_v = dim;
    p.lo = FA4_UNBOUNDED_LO, p.hi = FA4_UNBOUNDED_HI;
    p.scale = 0.25, p.dtype = FA4_F32;
    return p;
}

enum { LEN = 200, DIM = 20 };

// A NaN or inf in a key or a value shows in the rows that see it, and in no other, not even in a visited block.
static void test_not_finite(const char *isa)
{
    static float q[LEN * DIM], k[LEN * DIM], v[LEN * DIM], o[LEN * DIM], before[LEN * DIM], lse[LEN];
    const float bad[] = {NAN, INFINITY, -INFINITY};
    fa4_fwd_params p = plain(LEN, DIM, q, k, v, o, lse);
    p.hi = 0;
    for (int at = 0; at < LEN; at += 33)
        for (int which = 0; which < 3; which++) {
            hash_state = 7;
            for (int i = 0; i < LEN * DIM; i++)
                q[i] = (float)hash_value(), k[i] = (float)hash_value(), v[i] = (float)hash_value();
            CHECK(fa4_fwd(&p, FA4_ARCH_CPU, NULL) == FA4_OK, "%s: %s", isa, fa4_last_error());
            memcpy(before, o, sizeof o);
            v[at * DIM + 3] = bad[which];
            fa4_fwd(&p, FA4_ARCH_CPU, NULL);
            for (int i = 0; i < LEN; i++)
                for (int d = 0; d < DIM; d++) {
                    float x = o[i * DIM + d];
                    CHECK(i >= at && d == 3 ? !isfinite(x) : !memcmp(&x, &before[i * DIM + d], sizeof x),
                          "%s: v[%d] = %g, o[%d][%d] = %g", isa, at, (double)bad[which], i, d, (double)x);
                }
            v[at * DIM + 3] = 0;
            for (int d = 0; d < DIM; d++) k[at * DIM + d] = bad[which];
            fa4_fwd(&p, FA4_ARCH_CPU, NULL);
            for (int i = 0; i < LEN; i++) {
                int same = i >= at || !memcmp(o + i * DIM, before + i * DIM, sizeof(float) * DIM);
                CHECK(same, "%s: k[%d] = %g shows in row %d", isa, at, (double)bad[which], i);
                if (i >= at && which == 0)
                    CHECK(isnan(o[i * DIM]) && isnan(lse[i]), "%s: NaN key %d, row %d", isa, at, i);
            }
        }
}

// A row that sees nothing is 0 and -inf. Scores far apart neither overflow nor lose the only key that counts.
static void test_extremes(const char *isa)
{
    static float q[LEN * DIM], k[LEN * DIM], v[LEN * DIM], o[LEN * DIM], lse[LEN];
    fa4_fwd_params p = plain(LEN, DIM, q, k, v, o, lse);
    for (int i = 0; i < LEN * DIM; i++) q[i] = 1, k[i] = 0, v[i] = (float)(i / DIM);
    for (int d = 0; d < DIM; d++) k[150 * DIM + d] = 1000;
    p.hi = -1;
    CHECK(fa4_fwd(&p, FA4_ARCH_CPU, NULL) == FA4_OK, "%s: %s", isa, fa4_last_error());
    CHECK(o[0] == 0 && lse[0] == -INFINITY, "%s: a row without keys is %g, %g", isa, (double)o[0], (double)lse[0]);
    CHECK(fabsf(o[150 * DIM] - 74.5f) < 1e-4f, "%s: the mean of 0..149 is %g", isa, (double)o[150 * DIM]);
    CHECK(o[199 * DIM] == 150 && lse[199] == 5000, "%s: one key takes all: %g, %g", isa, (double)o[199 * DIM],
          (double)lse[199]);
    p.hi = FA4_UNBOUNDED_HI, p.len_kv = 0;
    CHECK(fa4_fwd(&p, FA4_ARCH_CPU, NULL) == FA4_OK && o[7] == 0 && lse[7] == -INFINITY, "%s: no keys at all", isa);
}

// ---- Threads

typedef struct {
    fa4_executor base;
    int64_t *most; // tiles of one parallel_for
} counting_executor;

static void count_tiles(const fa4_executor *self, int64_t tiles, void (*run)(void *, int64_t, int64_t), void *context)
{
    int64_t *most = ((const counting_executor *)self)->most;
    if (tiles > *most) *most = tiles;
    run(context, 0, tiles);
}

// One head of one batch is cut into work for every thread; a call that is over at once is not.
static void test_one_head_on_all_threads(const char *isa)
{
    enum { LONG = 2048, THREADS = 4 };
    static float x[LONG * DIM], o[LONG * DIM], d[3][LONG * DIM], lse[LONG];
    for (int i = 0; i < LONG * DIM; i++) x[i] = (float)hash_value();
    for (int64_t len = 1; len <= LONG; len *= LONG) {
        int64_t most = 0;
        const counting_executor executor = {{count_tiles, THREADS}, &most};
        fa4_bwd_params p = {.fwd = plain(len, DIM, x, x, x, o, lse), .dout = x, .dq = d[0], .dk = d[1], .dv = d[2]};
        int64_t *strides[] = {p.stride_dout, p.stride_dq, p.stride_dk, p.stride_dv};
        for (int i = 0; i < 4; i++) memcpy(strides[i], p.fwd.stride_q, sizeof p.fwd.stride_q);
        CHECK(fa4_fwd(&p.fwd, FA4_ARCH_CPU, (void *)&executor) == FA4_OK, "%s: %s", isa, fa4_last_error());
        CHECK(len == 1 ? most == 0 : most >= THREADS, "%s: fa4_fwd has %lld tiles", isa, (long long)most);
        most = 0;
        CHECK(fa4_bwd(&p, FA4_ARCH_CPU, (void *)&executor) == FA4_OK, "%s: %s", isa, fa4_last_error());
        CHECK(len == 1 ? most == 0 : most >= THREADS, "%s: fa4_bwd has %lld tiles", isa, (long long)most);
    }
}

// ---- Dispatch

static int says(const char *reason, const char *word)
{
    return reason && strstr(reason, word);
}

static void test_refusals(void)
{
    static float x[LEN * DIM], lse[LEN];
    const fa4_fwd_params good = plain(LEN, DIM, x, x, x, x, lse);
    CHECK(!fa4_fwd_unsupported(&good, FA4_ARCH_CPU), "%s", fa4_fwd_unsupported(&good, FA4_ARCH_CPU));
    int32_t number = 0;
    float slope = 0;
#define REFUSES(field, value, word)                                                                               \
    do {                                                                                                          \
        fa4_bwd_params bad;                                                                                       \
        memset(&bad, 0, sizeof bad);                                                                              \
        bad.fwd = good;                                                                                           \
        bad.fwd.field = value;                                                                                    \
        CHECK(says(fa4_fwd_unsupported(&bad.fwd, FA4_ARCH_CPU), word), "%s = %s is not refused", #field, #value); \
        CHECK(says(fa4_bwd_unsupported(&bad, FA4_ARCH_CPU), word), "%s = %s is not refused", #field, #value);     \
        CHECK(fa4_fwd(&bad.fwd, FA4_ARCH_CPU, NULL) == FA4_UNSUPPORTED && says(fa4_last_error(), word), #field);  \
    } while (0)
    REFUSES(len_q_of, &number, "len_q_of");
    REFUSES(start_q_of, &number, "start_q_of");
    REFUSES(start_kv_of, &number, "start_kv_of");
    REFUSES(page_table, &number, "page_table");
    REFUSES(stride_page_table, 1, "stride_page_table");
    REFUSES(page_size, 16, "page_size");
    REFUSES(sink, &slope, "sink");
    REFUSES(alibi_slopes, &slope, "alibi_slopes");
    REFUSES(softcap, 30, "softcap");
    REFUSES(dropout_p, 0.1, "dropout");
    REFUSES(dropout_seed, 1, "dropout");
    REFUSES(dropout_offset, 1, "dropout");
    REFUSES(kv_splits, 2, "kv_splits");
    REFUSES(dim, 257, "257");
    REFUSES(dim, 0, "dim");
    REFUSES(dim_v, 300, "300");
    REFUSES(len_q, -1, "len_q");
    REFUSES(heads_kv, 2, "heads_kv");
    REFUSES(scale, NAN, "scale");
    REFUSES(scale, -INFINITY, "scale");
    REFUSES(scale, 1e300, "scale");
    REFUSES(dtype, (fa4_dtype)9, "dtype");
    REFUSES(mask_type, (fa4_mask_type)9, "mask_type");
#undef REFUSES
    CHECK(says(fa4_fwd_unsupported(&good, 100), "10.0"), "an arch without kernels is not refused");

    fa4_fwd_params bad = good;
    bad.k = NULL;
    CHECK(fa4_fwd(&bad, FA4_ARCH_CPU, NULL) == FA4_INVALID && says(fa4_last_error(), "k"), "k = NULL");
    bad = good, bad.mask_type = FA4_MASK_BOOL;
    CHECK(fa4_fwd(&bad, FA4_ARCH_CPU, NULL) == FA4_INVALID && says(fa4_last_error(), "mask"), "mask = NULL");
    bad = good, bad.len_kv_of = &number, number = LEN + 1;
    CHECK(fa4_fwd(&bad, FA4_ARCH_CPU, NULL) == FA4_INVALID && says(fa4_last_error(), "len_kv_of"), "len_kv_of");
    bad = good, bad.q = bad.o = bad.lse = NULL, bad.len_q = 0;
    CHECK(fa4_fwd(&bad, FA4_ARCH_CPU, NULL) == FA4_OK, "no queries: %s", fa4_last_error());
    fa4_bwd_params gradient = {.fwd = bad, .dk = x, .dv = x};
    gradient.fwd.v = NULL;
    CHECK(fa4_bwd(&gradient, FA4_ARCH_CPU, NULL) == FA4_INVALID && says(fa4_last_error(), "v"), "v = NULL, no queries");
}

static void test_isa_choice(void)
{
    const char *best = NULL;
    int count = 0;
    for (; fa4_cpu_isa_at(count).name; count++)
        if (!fa4_cpu_isa_at(count).unavailable && !best) best = fa4_cpu_isa_at(count).name;
    CHECK(count > 0 && !strcmp(fa4_cpu_isa_at(count - 1).name, "generic"), "generic is not the last");
    CHECK(fa4_cpu_isa_at(-1).name == NULL, "an index below 0");
    CHECK(fa4_cpu_isa_force("mmx") == FA4_INVALID && says(fa4_last_error(), "mmx"), "an unknown set is not refused");
    CHECK(fa4_cpu_isa_force("generic") == FA4_OK && !strcmp(fa4_cpu_isa_in_use(), "generic"), "generic is not forced");

    setenv("FA4_CPU_ISA", "mmx", 1);
    CHECK(fa4_cpu_isa_force(NULL) == FA4_INVALID && !fa4_cpu_isa_in_use() && says(fa4_last_error(), "FA4_CPU_ISA"),
          "FA4_CPU_ISA=mmx is not refused");
    static float x[LEN * DIM], lse[LEN];
    const fa4_fwd_params p = plain(LEN, DIM, x, x, x, x, lse);
    CHECK(says(fa4_fwd_unsupported(&p, FA4_ARCH_CPU), "FA4_CPU_ISA"), "a call with FA4_CPU_ISA=mmx is not refused");
    setenv("FA4_CPU_ISA", "generic", 1);
    CHECK(fa4_cpu_isa_force(NULL) == FA4_OK && !strcmp(fa4_cpu_isa_in_use(), "generic"), "FA4_CPU_ISA=generic");
    unsetenv("FA4_CPU_ISA");
    CHECK(fa4_cpu_isa_force(NULL) == FA4_OK && !strcmp(fa4_cpu_isa_in_use(), best), "%s is not chosen", best);
}

int main(int argc, char **argv)
{
    int cases = argc > 1 ? atoi(argv[1]) : 400;
    test_isa_choice();
    test_refusals();
    for (int n = 0; fa4_cpu_isa_at(n).name; n++) {
        fa4_cpu_isa isa = fa4_cpu_isa_at(n);
        if (isa.unavailable) {
            printf("%s: skipped, %s\n", isa.name, isa.unavailable);
            continue;
        }
        fa4_cpu_isa_force(isa.name);
        int before = failures;
        test_not_finite(isa.name);
        test_extremes(isa.name);
        test_one_head_on_all_threads(isa.name);
        for (int i = 0; i < cases; i++) // every dtype with every mask, over and over
            case_run(isa.name, (uint64_t)i, (fa4_dtype)(i % 4), (fa4_mask_type)(i / 4 % 6));
        printf("%s: %d cases, %d failures\n", isa.name, cases, failures - before);
    }
    return failures ? 1 : 0;
}
