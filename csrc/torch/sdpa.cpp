// Our kernels in the place of PyTorch's two CPU flash attention kernels. Autograd, autocast, functorch, export and the
// meta kernels stay torch's own, so results must have exactly the strides that those expect.
#include "cpu.h"

#include <mutex>
#include <utility>

namespace fa4_torch
{
namespace
{
using torch::stable::detail::StableLibrary;
using torch::stable::detail::to;

struct Attention {
    Inputs inputs;
    double dropout_p;
    bool is_causal;
};

void describe_sdpa(Attention &call, const Machine &machine, fa4_fwd_params *params)
{
    if (call.dropout_p != 0) fail("flash_attn4: dropout_p is %g, and the CPU has no dropout", call.dropout_p);
    if (call.is_causal) call.inputs.hi = 0;
    describe(call.inputs, machine, params);
    if (params->dim != params->dim_v)
        fail("flash_attn4: q and v have head dims %lld and %lld, and here they must be equal", (long long)params->dim,
             (long long)params->dim_v);
}

// A contiguous [batch, len, heads, dim], seen as [batch, heads, len, dim].
Tensor empty_transposed(const Machine &machine, const int64_t size[4], int64_t stride[4], int32_t dtype)
{
    auto some = [](int64_t n) { return n > 1 ? n : 1; };
    stride[3] = 1;
    stride[1] = some(size[3]);
    stride[2] = stride[1] * some(size[1]);
    stride[0] = stride[2] * some(size[2]);
    return empty(machine, 4, size, stride, dtype);
}

// What the kernels refuse (a head dim over 256, say) goes to the operators that ops.py implements with matrix products.
void call_math(const char *op, StableIValue *stack)
{
    count(CALLS_SDPA_MATH);
    check(torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION), "run ", op);
}

// query key value dropout_p is_causal attn_mask scale -> output logsumexp
void sdpa_fwd(StableIValue *stack, uint64_t, uint64_t)
{
    Attention call = {{take(stack[0]),
                       take(stack[1]),
                       take(stack[2]),
                       take_optional(stack[5]),
                       Tensor(),
                       {},
                       {},
                       take_optional_number<double>(stack[6])},
                      to<double>(stack[3]),
                      to<bool>(stack[4])};
    Inputs &inputs = call.inputs;
    Cpu cpu;
    fa4_fwd_params params = {};
    describe_sdpa(call, cpu.machine, &params);
    if (fa4_fwd_unsupported(&params, FA4_ARCH_CPU)) {
        StableIValue math[6] = {give(std::move(inputs.q)),    give(std::move(inputs.k)),
                                give(std::move(inputs.v)),    give_optional(std::move(inputs.attn_mask)),
                                StableIValue(call.is_causal), give(inputs.scale)};
        call_math("fa4::_sdpa_math", math);
        stack[0] = math[0];
        stack[1] = math[1];
        return;
    }

    int32_t dtype = torch_dtype(params.dtype);
    Tensor out = empty_like(inputs.q, params, cpu.machine, params.stride_o);
    const int64_t size[3] = {params.batch, params.heads_q, params.len_q};
    params.stride_lse[1] = 1; // a contiguous [batch, len, heads], transposed
    params.stride_lse[2] = params.heads_q > 1 ? params.heads_q : 1;
    params.stride_lse[0] = params.stride_lse[2] * (params.len_q > 1 ? params.len_q : 1);
    Tensor lse =
        empty(cpu.machine, 3, size, params.stride_lse, params.dtype == FA4_F64 ? dtype : aoti_torch_dtype_float32());
    params.o = data_of(out);
    params.lse = data_of(lse);
    if (fa4_fwd(&params, FA4_ARCH_CPU, cpu.machine.stream) != FA4_OK) fail("flash_attn4: %s", fa4_last_error());
    cpu.finish();
    count(CALLS_SDPA_FWD);

    stack[0] = give(std::move(out));
    stack[1] = give(std::move(lse));
}

// grad_out query key value out logsumexp dropout_p is_causal attn_mask scale -> grad_query grad_key grad_value
void sdpa_bwd(StableIValue *stack, uint64_t, uint64_t)
{
    Tensor dout = take(stack[0]);
    Attention call = {{take(stack[1]),
                       take(stack[2]),
                       take(stack[3]),
                       take_optional(stack[8]),
                       Tensor(),
                       {},
                       {},
                       take_optional_number<double>(stack[9])},
                      to<double>(stack[6]),
                      to<bool>(stack[7])};
    Inputs &inputs = call.inputs;
    Tensor out = take(stack[4]), lse = take(stack[5]);
    if (!dout.defined()) { // no gradient arrives: none leaves
        for (int i = 0; i < 3; i++) stack[i] = give_undefined();
        return;
    }
    Cpu cpu;
    fa4_bwd_params params = {};
    fa4_fwd_params *fwd = &params.fwd;
    describe_sdpa(call, cpu.machine, fwd);
    describe_results(out, lse, dout, Tensor(), cpu.machine, &params);
    if (fa4_bwd_unsupported(&params, FA4_ARCH_CPU)) {
        StableIValue math[9] = {give(std::move(dout)),
                                give(std::move(inputs.q)),
                                give(std::move(inputs.k)),
                                give(std::move(inputs.v)),
                                give(std::move(out)),
                                give(std::move(lse)),
                                give_optional(std::move(inputs.attn_mask)),
                                StableIValue(call.is_causal),
                                give(inputs.scale)};
        call_math("fa4::_sdpa_math_backward", math);
        for (int i = 0; i < 3; i++) stack[i] = math[i];
        return;
    }

    int32_t dtype = torch_dtype(fwd->dtype);
    const int64_t size_q[4] = {fwd->batch, fwd->heads_q, fwd->len_q, fwd->dim};
    const int64_t size_k[4] = {fwd->batch, fwd->heads_kv, fwd->len_kv, fwd->dim};
    const int64_t size_v[4] = {fwd->batch, fwd->heads_kv, fwd->len_kv, fwd->dim_v};
    Tensor dq = empty_transposed(cpu.machine, size_q, params.stride_dq, dtype);
    Tensor dk = empty_transposed(cpu.machine, size_k, params.stride_dk, dtype);
    Tensor dv = empty_transposed(cpu.machine, size_v, params.stride_dv, dtype);
    params.dq = data_of(dq);
    params.dk = data_of(dk);
    params.dv = data_of(dv);
    if (run_bwd(&params, cpu.machine) != FA4_OK) fail("flash_attn4: %s", fa4_last_error());
    cpu.finish();
    count(CALLS_SDPA_BWD);

    stack[0] = give(std::move(dq));
    stack[1] = give(std::move(dk));
    stack[2] = give(std::move(dv));
}

std::mutex overriding_lock;
StableLibrary *overriding;
} // namespace

// The dispatcher gives torch's kernels back when the library that overrode them goes.
void override_sdpa(bool on)
{
    std::lock_guard<std::mutex> guard(overriding_lock);
    if (on && !overriding) {
        overriding = new StableLibrary(StableLibrary::Kind::IMPL, "aten", "CPU", __FILE__, __LINE__);
        overriding->impl("_scaled_dot_product_flash_attention_for_cpu", &sdpa_fwd);
        overriding->impl("_scaled_dot_product_flash_attention_for_cpu_backward", &sdpa_bwd);
    } else if (!on) {
        delete overriding;
        overriding = nullptr;
    }
}

bool sdpa_overridden()
{
    std::lock_guard<std::mutex> guard(overriding_lock);
    return overriding != nullptr;
}

} // namespace fa4_torch
