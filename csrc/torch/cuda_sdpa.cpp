// Our forward in the place of PyTorch's flash and cuDNN attention kernels on CUDA, between which SDPA chooses as
// before. Autograd, autocast, functorch, export and the meta kernels stay torch's own, and so does the gradient: either
// backward kernel takes our out and lse for those of the forward that it knows. What we do not run goes to the kernel
// that was there before, by operators of sdpa.py.
#include "cuda.h"

#include <mutex>
#include <stdexcept>
#include <utility>

namespace fa4_torch
{
namespace
{
using torch::stable::detail::from;
using torch::stable::detail::StableLibrary;
using torch::stable::detail::to;

enum { RESULTS = 9 }; // of either operator: as many as its arguments, or more

enum Kernel { FLASH, CUDNN };

struct Attention {
    Kernel kernel;
    Inputs inputs; // attn_mask: cuDNN's bias
    double dropout_p;
    bool is_causal, return_debug_mask;
};

struct Results {
    Tensor out, lse;
    int64_t len_q, len_kv;
    int32_t dtype;
    Machine machine;
};

// A new tensor with nothing in it, of [n] elements or, without dimensions, of one.
Tensor blank(const Machine &machine, int64_t rank, int64_t n, int32_t dtype)
{
    const int64_t size[1] = {n}, stride[1] = {1};
    return empty(machine, rank, size, stride, dtype);
}

// The strides that the meta kernels promise.
Tensor empty_out(const Tensor &q, const Machine &machine, fa4_fwd_params *params)
{
    if (params->dim == params->dim_v) return empty_like(q, *params, machine, params->stride_o);
    const int64_t size[4] = {params->batch, params->heads_q, params->len_q, params->dim_v};
    dense_like(size, params->stride_q, params->stride_o);
    return empty(machine, 4, size, params->stride_o, torch_dtype(params->dtype));
}

// Without a value: what the kernel that was there before has to run.
std::optional<Results> run(Attention &call)
{
    if (call.dropout_p != 0 || call.return_debug_mask || call.inputs.attn_mask.defined()) return {};
    Cuda cuda("query", call.inputs.q);
    fa4_fwd_params params = {};
    if (call.is_causal) call.inputs.hi = 0;
    try {
        describe(call.inputs, cuda.machine, &params);
    } catch (const std::runtime_error &) {
        return {}; // PyTorch's kernel has its own words for what does not fit together
    }
    // The flash kernel's causal mask is aligned at the bottom right; SDPA calls it with equal lengths only.
    if (call.kernel == FLASH && call.is_causal && params.len_q != params.len_kv) return {};
    int32_t dtype = torch_dtype(params.dtype);
    Tensor out = empty_out(call.inputs.q, cuda.machine, &params);
    auto some = [](int64_t n) { return n > 1 ? n : 1; };
    const int64_t size_lse[4] = {params.batch, params.heads_q, params.len_q, 1}; // cuDNN's has the last dimension
    const int64_t stride_lse[4] = {some(params.heads_q) * some(params.len_q), some(params.len_q), 1, 1};
    Tensor lse = empty(cuda.machine, call.kernel == CUDNN ? 4 : 3, size_lse, stride_lse, aoti_torch_dtype_float32());
    for (int d = 0; d < 3; d++) params.stride_lse[d] = stride_lse[d];
    params.o = data_of(out);
    params.lse = data_of(lse);
    fa4_status status = fa4_fwd(&params, cuda.machine.arch, cuda.machine.stream);
    if (status == FA4_UNSUPPORTED) return {};
    if (status != FA4_OK) fail("flash_attn4: %s", fa4_last_error());
    count(CALLS_SDPA_FWD);
    return Results{std::move(out), std::move(lse), params.len_q, params.len_kv, dtype, cuda.machine};
}

// len of [batch, heads, len, dim].
int64_t length_of(const Tensor &tensor)
{
    View is = view("q, k or v", tensor, 4);
    return is.size[2];
}

// The stack has room for RESULTS. The operator returns tensors alone: torch_call_dispatcher of torch 2.14 takes others
// that stand among them for tensors.
void call_before(const char *op, StableIValue *stack, int64_t len_q, int64_t len_kv)
{
    count(CALLS_SDPA_BEFORE);
    check(torch_call_dispatcher(op, "", stack, TORCH_ABI_VERSION), "run ", op);
    for (int i = RESULTS - 1; i > 5; i--) stack[i] = stack[i - 2];
    stack[4] = from(len_q);
    stack[5] = from(len_kv);
}

// output logsumexp cum_seq_q cum_seq_k max_q max_k, as both operators begin their results.
void give_results(StableIValue *stack, Results &results)
{
    stack[0] = give(std::move(results.out));
    stack[1] = give(std::move(results.lse));
    stack[2] = give_undefined();
    stack[3] = give_undefined();
    stack[4] = from(results.len_q);
    stack[5] = from(results.len_kv);
}

// query key value dropout_p is_causal return_debug_mask scale
// -> output logsumexp cum_seq_q cum_seq_k max_q max_k rng_state unused debug_attn_mask
void flash_fwd(StableIValue *stack, uint64_t, uint64_t)
{
    Attention call = {FLASH,
                      {take(stack[0]),
                       take(stack[1]),
                       take(stack[2]),
                       Tensor(),
                       Tensor(),
                       {},
                       {},
                       take_optional_number<double>(stack[6])},
                      to<double>(stack[3]),
                      to<bool>(stack[4]),
                      to<bool>(stack[5])};
    Inputs &inputs = call.inputs;
    std::optional<Results> results = run(call);
    if (!results) {
        const int64_t len_q = length_of(inputs.q), len_kv = length_of(inputs.k);
        StableIValue before[RESULTS] = {
            give(std::move(inputs.q)), give(std::move(inputs.k)),    give(std::move(inputs.v)), from(call.dropout_p),
            from(call.is_causal),      from(call.return_debug_mask), give(inputs.scale)};
        call_before("fa4::_before_scaled_dot_product_flash_attention", before, len_q, len_kv);
        for (int i = 0; i < RESULTS; i++) stack[i] = before[i];
        return;
    }
    give_results(stack, *results);
    stack[6] = give(blank(results->machine, 1, 2, aoti_torch_dtype_uint64()));
    stack[7] = give(blank(results->machine, 0, 1, aoti_torch_dtype_uint64()));
    stack[8] = give(blank(results->machine, 1, 0, results->dtype));
}

// query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale
// -> output logsumexp cum_seq_q cum_seq_k max_q max_k philox_seed philox_offset debug_attn_mask
void cudnn_fwd(StableIValue *stack, uint64_t, uint64_t)
{
    const StableIValue compute_log_sumexp = stack[4];
    Attention call = {CUDNN,
                      {take(stack[0]),
                       take(stack[1]),
                       take(stack[2]),
                       take_optional(stack[3]),
                       Tensor(),
                       {},
                       {},
                       take_optional_number<double>(stack[8])},
                      to<double>(stack[5]),
                      to<bool>(stack[6]),
                      to<bool>(stack[7])};
    Inputs &inputs = call.inputs;
    std::optional<Results> results = run(call);
    if (!results) {
        const int64_t len_q = length_of(inputs.q), len_kv = length_of(inputs.k);
        StableIValue before[RESULTS] = {give(std::move(inputs.q)), give(std::move(inputs.k)),
                                        give(std::move(inputs.v)), give_optional(std::move(inputs.attn_mask)),
                                        compute_log_sumexp,        from(call.dropout_p),
                                        from(call.is_causal),      from(call.return_debug_mask),
                                        give(inputs.scale)};
        call_before("fa4::_before_scaled_dot_product_cudnn_attention", before, len_q, len_kv);
        for (int i = 0; i < RESULTS; i++) stack[i] = before[i];
        return;
    }
    give_results(stack, *results);
    stack[6] = give(blank(results->machine, 0, 1, aoti_torch_dtype_int64()));
    stack[7] = give(blank(results->machine, 0, 1, aoti_torch_dtype_int64()));
    stack[8] = give_undefined();
}

std::mutex overriding_lock;
StableLibrary *overriding;
} // namespace

// The dispatcher gives torch's kernels back when the library that overrode them goes.
void override_cuda_sdpa(bool on)
{
    std::lock_guard<std::mutex> guard(overriding_lock);
    if (on && !overriding) {
        overriding = new StableLibrary(StableLibrary::Kind::IMPL, "aten", "CUDA", __FILE__, __LINE__);
        overriding->impl("_scaled_dot_product_flash_attention", &flash_fwd);
        overriding->impl("_scaled_dot_product_cudnn_attention", &cudnn_fwd);
    } else if (!on) {
        delete overriding;
        overriding = nullptr;
    }
}

bool cuda_sdpa_overridden()
{
    std::lock_guard<std::mutex> guard(overriding_lock);
    return overriding != nullptr;
}

} // namespace fa4_torch
