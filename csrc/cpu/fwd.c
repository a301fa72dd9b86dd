// The forward, one row at a time.
#include "element.h"
#include "kernels.h"

#include <math.h>
#include <stdlib.h>

#ifdef FA4_CPU_F64
#    define FWD FA4_CPU_SYMBOL(fa4_cpu_fwd_f64)
#else
#    define FWD FA4_CPU_SYMBOL(fa4_cpu_fwd)
#endif

fa4_cpu_fwd_fn FWD;

typedef struct {
    const fa4_fwd_params *p;
    int failed;
} fwd_context;

// The number that the mask adds to a score: -inf hides the key.
static double mask_at(const fa4_fwd_params *p, int64_t offset)
{
    switch (p->mask_type) {
    case FA4_MASK_NONE: return 0;
    case FA4_MASK_BOOL: return ((const uint8_t *)p->mask)[offset] ? 0 : -INFINITY;
    case FA4_MASK_F16: return element_load(p->mask, FA4_F16, offset);
    case FA4_MASK_BF16: return element_load(p->mask, FA4_BF16, offset);
    case FA4_MASK_F32: return element_load(p->mask, FA4_F32, offset);
    default: return element_load(p->mask, FA4_F64, offset);
    }
}

static void fwd_row(const fa4_fwd_params *p, int64_t b, int64_t h, int64_t i, double *s)
{
    int64_t h_kv = h / (p->heads_q / p->heads_kv), keys = p->len_kv_of ? p->len_kv_of[b] : p->len_kv;
    int64_t q0 = b * p->stride_q[0] + h * p->stride_q[1] + i * p->stride_q[2];
    int64_t k0 = b * p->stride_k[0] + h_kv * p->stride_k[1], v0 = b * p->stride_v[0] + h_kv * p->stride_v[1];
    int64_t o0 = b * p->stride_o[0] + h * p->stride_o[1] + i * p->stride_o[2];
    int64_t mask0 = b * p->stride_mask[0] + h * p->stride_mask[1] + i * p->stride_mask[2];
    double m = -INFINITY, l = 0;
    for (int64_t j = 0; j < keys; j++) {
        double mask = p->mask_type == FA4_MASK_NONE ? 0 : mask_at(p, mask0 + j * p->stride_mask[3]);
        s[j] = -INFINITY;
        if (j - i < p->lo || j - i > p->hi || mask == -INFINITY) continue;
        double dot = 0;
        for (int64_t d = 0; d < p->dim; d++)
            dot += element_load(p->q, p->dtype, q0 + d * p->stride_q[3]) *
                   element_load(p->k, p->dtype, k0 + j * p->stride_k[2] + d * p->stride_k[3]);
        s[j] = dot * p->scale + mask;
        if (!(s[j] <= m)) m = s[j];
    }
    for (int64_t j = 0; j < keys; j++) l += s[j] == -INFINITY ? 0 : exp(s[j] - m);
    for (int64_t d = 0; d < p->dim_v; d++) {
        double o = 0;
        for (int64_t j = 0; j < keys; j++)
            if (s[j] != -INFINITY)
                o += exp(s[j] - m) * element_load(p->v, p->dtype, v0 + j * p->stride_v[2] + d * p->stride_v[3]);
        element_store(p->o, p->dtype, o0 + d * p->stride_o[3], l == 0 ? 0 : o / l);
    }
    element_store(p->lse, sizeof(real) == 8 ? FA4_F64 : FA4_F32,
                  b * p->stride_lse[0] + h * p->stride_lse[1] + i * p->stride_lse[2], l == 0 ? -INFINITY : m + log(l));
}

static void fwd_rows(void *context, int64_t begin, int64_t end)
{
    fwd_context *c = context;
    const fa4_fwd_params *p = c->p;
    double *s = malloc((size_t)(p->len_kv + 1) * sizeof *s);
    for (int64_t r = begin; s && r < end; r++)
        fwd_row(p, r / p->len_q / p->heads_q, r / p->len_q % p->heads_q, r % p->len_q, s);
    if (!s) c->failed = 1;
    free(s);
}

fa4_status FWD(const fa4_fwd_params *p, const fa4_executor *executor)
{
    fwd_context c = {p, 0};
    int64_t rows = p->batch * p->heads_q * p->len_q;
    if (executor) {
        executor->parallel_for(executor, rows, fwd_rows, &c);
    } else {
        fwd_rows(&c, 0, rows);
    }
    return c.failed ? FA4_NO_MEMORY : FA4_OK;
}
