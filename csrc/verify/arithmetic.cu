// Probes of the arithmetic that the kernels lean on: one instruction, many operands, every bit of the results.
#include "probe.h"

struct arithmetic_args {
    const uint32_t *in;       // [count][6]
    uint32_t *out;            // [count][2]
    int32_t count, operation; // as probes.py numbers them
};

#if !defined __CUDA_ARCH__ || __CUDA_ARCH__ >= 1000
FA4_DEVICE void on_pairs(int operation, uint32_t *d, const uint32_t *x)
{
    pair y = 0;
    const pair a = (pair)x[1] << 32 | x[0], b = (pair)x[3] << 32 | x[2], c = (pair)x[5] << 32 | x[4];
    if (operation == 8) y = fma_rn_ftz_f32x2(a, b, c);
    if (operation == 9) y = add_rn_ftz_f32x2(a, b);
    if (operation == 10) y = add_rm_ftz_f32x2(a, b);
    if (operation == 11) y = mul_rn_ftz_f32x2(a, b);
    d[0] = (uint32_t)y;
    d[1] = (uint32_t)(y >> 32);
    if (operation == 12) {
        d[0] = __float_as_uint(max3_nan(__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2])));
        d[1] = 0;
    }
}
#endif

FA4_PROBE(128) fa4_probe_arithmetic(const __grid_constant__ arithmetic_args args)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < args.count; i += gridDim.x * blockDim.x) {
        const uint32_t *x = args.in + 6 * i;
        const float a = __uint_as_float(x[0]), b = __uint_as_float(x[1]);
        uint32_t d[2] = {0, 0};
        switch (args.operation) {
        case 0: d[0] = __float_as_uint(ex2_approx_ftz(a)); break;
        case 1: d[0] = __float_as_uint(lg2_approx_ftz(a)); break;
        case 2: d[0] = __float_as_uint(rcp_approx_ftz(a)); break;
        case 3: d[0] = __float_as_uint(max_nan(a, b)); break;
        case 4: d[0] = __float_as_uint(min_number(a, b)); break;
        case 5: d[0] = cvt_rn_bf16x2(a, b); break;
        case 6: d[0] = cvt_rn_f16x2(a, b); break;
#if !defined __CUDA_ARCH__ || __CUDA_ARCH__ >= 1000
        default: on_pairs(args.operation, d, x);
#endif
        }
        args.out[2 * i] = d[0];
        args.out[2 * i + 1] = d[1];
    }
}
