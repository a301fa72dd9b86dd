// The gradient, one row at a time.
#include "element.h"
#include "kernels.h"

#include <math.h>
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

size_t BWD_WORKSPACE(const fa4_bwd_params *p)
{
    const fa4_fwd_params *f = &p->fwd;
    return sizeof(double) * (size_t)(f->dim + f->len_kv * (f->dim + f->dim_v));
}

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

static void bwd_row(const fa4_bwd_params *p, int64_t b, int64_t h, int64_t i, double *dq, double *dk, double *dv)
{
    const fa4_fwd_params *f = &p->fwd;
    int64_t h_kv = h / (f->heads_q / f->heads_kv), keys = f->len_kv_of ? f->len_kv_of[b] : f->len_kv;
    int64_t q0 = b * f->stride_q[0] + h * f->stride_q[1] + i * f->stride_q[2];
    int64_t k0 = b * f->stride_k[0] + h_kv * f->stride_k[1], v0 = b * f->stride_v[0] + h_kv * f->stride_v[1];
    int64_t o0 = b * f->stride_o[0] + h * f->stride_o[1] + i * f->stride_o[2];
    int64_t do0 = b * p->stride_dout[0] + h * p->stride_dout[1] + i * p->stride_dout[2];
    int64_t dq0 = b * p->stride_dq[0] + h * p->stride_dq[1] + i * p->stride_dq[2];
    fa4_dtype lse_dtype = f->dtype == FA4_F64 ? FA4_F64 : FA4_F32;
    double lse = element_load(f->lse, lse_dtype, b * f->stride_lse[0] + h * f->stride_lse[1] + i * f->stride_lse[2]);
    double delta = 0;
    for (int64_t d = 0; d < f->dim_v; d++)
        delta += element_load(f->o, f->dtype, o0 + d * f->stride_o[3]) *
                 element_load(p->dout, f->dtype, do0 + d * p->stride_dout[3]);
    if (p->dlse)
        delta -=
            element_load(p->dlse, lse_dtype, b * p->stride_dlse[0] + h * p->stride_dlse[1] + i * p->stride_dlse[2]);
    memset(dq, 0, (size_t)f->dim * sizeof *dq);
    for (int64_t j = 0; j < keys; j++) {
        int64_t mask0 = b * f->stride_mask[0] + h * f->stride_mask[1] + i * f->stride_mask[2];
        double mask = f->mask_type == FA4_MASK_NONE ? 0 : mask_at(f, mask0 + j * f->stride_mask[3]);
        if (j - i < f->lo || j - i > f->hi || mask == -INFINITY) continue;
        double dot = 0, dp = 0;
        for (int64_t d = 0; d < f->dim; d++)
            dot += element_load(f->q, f->dtype, q0 + d * f->stride_q[3]) *
                   element_load(f->k, f->dtype, k0 + j * f->stride_k[2] + d * f->stride_k[3]);
        double prob = exp(dot * f->scale + mask - lse);
        for (int64_t d = 0; d < f->dim_v; d++) {
            double dout = element_load(p->dout, f->dtype, do0 + d * p->stride_dout[3]);
            dp += dout * element_load(f->v, f->dtype, v0 + j * f->stride_v[2] + d * f->stride_v[3]);
            dv[j * f->dim_v + d] += prob * dout;
        }
        double ds = prob * (dp - delta) * f->scale;
        for (int64_t d = 0; d < f->dim; d++) {
            dq[d] += ds * element_load(f->k, f->dtype, k0 + j * f->stride_k[2] + d * f->stride_k[3]);
            dk[j * f->dim + d] += ds * element_load(f->q, f->dtype, q0 + d * f->stride_q[3]);
        }
    }
    for (int64_t d = 0; d < f->dim; d++) element_store(p->dq, f->dtype, dq0 + d * p->stride_dq[3], dq[d]);
}

fa4_status BWD(const fa4_bwd_params *p, const fa4_executor *executor)
{
    (void)executor;
    const fa4_fwd_params *f = &p->fwd;
    int64_t group = f->heads_q / f->heads_kv;
    double *dq = p->workspace, *dk = dq + f->dim, *dv = dk + f->len_kv * f->dim;
    for (int64_t b = 0; b < f->batch; b++)
        for (int64_t h_kv = 0; h_kv < f->heads_kv; h_kv++) {
            memset(dk, 0, sizeof(double) * (size_t)(f->len_kv * (f->dim + f->dim_v)));
            for (int64_t h = h_kv * group; h < (h_kv + 1) * group; h++)
                for (int64_t i = 0; i < f->len_q; i++) bwd_row(p, b, h, i, dq, dk, dv);
            for (int64_t j = 0; j < f->len_kv; j++) {
                int64_t dk0 = b * p->stride_dk[0] + h_kv * p->stride_dk[1] + j * p->stride_dk[2];
                int64_t dv0 = b * p->stride_dv[0] + h_kv * p->stride_dv[1] + j * p->stride_dv[2];
                for (int64_t d = 0; d < f->dim; d++)
                    element_store(p->dk, f->dtype, dk0 + d * p->stride_dk[3], dk[j * f->dim + d]);
                for (int64_t d = 0; d < f->dim_v; d++)
                    element_store(p->dv, f->dtype, dv0 + d * p->stride_dv[3], dv[j * f->dim_v + d]);
            }
        }
    return FA4_OK;
}
