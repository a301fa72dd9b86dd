#include "call.h"

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <utility>

// Of torch's stable C shims from 2.13 on, which the version that is promised here does not declare.
extern "C" __attribute__((weak)) const char *torch_exception_get_what_without_backtrace();

namespace fa4_torch
{

Calls calls[CALLS] = {{"fwd", {0}},      {"bwd", {0}},       {"sdpa_fwd", {0}},
                      {"sdpa_bwd", {0}}, {"sdpa_math", {0}}, {"sdpa_before", {0}}};

void fail(const char *format, ...)
{
    char text[1024];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    throw std::runtime_error(text);
}

void check(AOTITorchError error, const char *what, const char *which)
{
    if (error == AOTI_TORCH_SUCCESS) return;
    if (torch_exception_get_what_without_backtrace)
        fail("flash_attn4: torch could not %s%s: %s", what, which, torch_exception_get_what_without_backtrace());
    fail("flash_attn4: torch could not %s%s", what, which);
}

static void check_allocated(AOTITorchError error)
{
    check(error, torch_exception_get_what_without_backtrace
                     ? "allocate a tensor"
                     : "allocate a tensor, most likely because it is out of memory.");
}

bool Tensor::defined() const
{
    bool is = false;
    if (handle) check(aoti_torch_is_defined(handle, &is), "look at a tensor");
    return is;
}

Tensor take(StableIValue argument)
{
    return Tensor(torch::stable::detail::to<AtenTensorHandle>(argument));
}

Tensor take_optional(StableIValue argument)
{
    return Tensor(torch::stable::detail::to<std::optional<AtenTensorHandle>>(argument).value_or(nullptr));
}

StableIValue give_undefined()
{
    AtenTensorHandle undefined = nullptr;
    check(aoti_torch_new_uninitialized_tensor(&undefined), "make an undefined tensor");
    return give(Tensor(undefined));
}

StableIValue give_optional(Tensor &&tensor)
{
    bool defined = tensor.defined();
    return give(defined ? std::optional<AtenTensorHandle>(tensor.release()) : std::nullopt);
}

View view(const char *name, const Tensor &tensor, int64_t rank)
{
    if (!tensor.defined()) fail("flash_attn4: %s is undefined, and it must be a tensor", name);
    AtenTensorHandle handle = tensor.get();
    View is = {};
    is.name = name;
    int32_t layout;
    check(aoti_torch_get_layout(handle, &layout), "read a layout");
    if (layout != aoti_torch_layout_strided()) fail("flash_attn4: %s is not a dense (strided) tensor", name);
    check(aoti_torch_get_dim(handle, &is.rank), "read a rank");
    if (rank >= 0 && is.rank != rank)
        fail("flash_attn4: %s has %lld dimensions, and it must have %lld", name, (long long)is.rank, (long long)rank);
    int64_t *size, *stride;
    check(aoti_torch_get_sizes(handle, &size), "read sizes");
    check(aoti_torch_get_strides(handle, &stride), "read strides");
    is.size = size;
    is.stride = stride;
    check(aoti_torch_get_dtype(handle, &is.dtype), "read a dtype");
    check(aoti_torch_get_device_type(handle, &is.device_type), "read a device");
    check(aoti_torch_get_device_index(handle, &is.device_index), "read a device");
    check(aoti_torch_get_data_ptr(handle, &is.data), "read a data pointer");
    return is;
}

static const char *dtype_name(int32_t dtype)
{
    if (dtype == aoti_torch_dtype_float16()) return "float16";
    if (dtype == aoti_torch_dtype_bfloat16()) return "bfloat16";
    if (dtype == aoti_torch_dtype_float32()) return "float32";
    if (dtype == aoti_torch_dtype_float64()) return "float64";
    if (dtype == aoti_torch_dtype_bool()) return "bool";
    if (dtype == aoti_torch_dtype_int32()) return "int32";
    if (dtype == aoti_torch_dtype_int64()) return "int64";
    return "of another dtype";
}

int32_t torch_dtype(fa4_dtype dtype)
{
    switch (dtype) {
    case FA4_F16: return aoti_torch_dtype_float16();
    case FA4_BF16: return aoti_torch_dtype_bfloat16();
    case FA4_F32: return aoti_torch_dtype_float32();
    case FA4_F64: return aoti_torch_dtype_float64();
    }
    fail("flash_attn4: unknown dtype %d", (int)dtype);
}

static fa4_dtype dtype_of(const View &q)
{
    for (fa4_dtype dtype : {FA4_F32, FA4_BF16, FA4_F16, FA4_F64})
        if (q.dtype == torch_dtype(dtype)) return dtype;
    fail("flash_attn4: %s is %s, and it must be float16, bfloat16, float32 or float64", q.name, dtype_name(q.dtype));
}

static fa4_mask_type mask_type_of(const View &mask)
{
    if (mask.dtype == aoti_torch_dtype_bool()) return FA4_MASK_BOOL;
    if (mask.dtype == aoti_torch_dtype_float16()) return FA4_MASK_F16;
    if (mask.dtype == aoti_torch_dtype_bfloat16()) return FA4_MASK_BF16;
    if (mask.dtype == aoti_torch_dtype_float32()) return FA4_MASK_F32;
    if (mask.dtype == aoti_torch_dtype_float64()) return FA4_MASK_F64;
    fail("flash_attn4: attn_mask is %s, and it must be bool or a floating point dtype", dtype_name(mask.dtype));
}

static void check_device(const View &is, const Machine &machine)
{
    // A CPU has no index.
    if (is.device_type != machine.device_type ||
        (machine.arch != FA4_ARCH_CPU && is.device_index != machine.device_index))
        fail("flash_attn4: %s is on another device than q: all tensors must be on one", is.name);
}

static std::string shape_text(const int64_t *size, int64_t rank)
{
    std::string text = "[";
    for (int64_t d = 0; d < rank; d++) text += (d ? ", " : "") + std::to_string(size[d]);
    return text + "]";
}

// expected: what the shape must be; dimensions: their names.
static void check_shape(const View &is, const int64_t *expected, const char *dimensions)
{
    for (int64_t d = 0; d < is.rank; d++)
        if (is.size[d] != expected[d])
            fail("flash_attn4: %s has shape %s, and with these q, k and v it must be %s %s", is.name,
                 shape_text(is.size, is.rank).c_str(), shape_text(expected, is.rank).c_str(), dimensions);
}

static void check_dtype(const View &is, int32_t expected, const char *of)
{
    if (is.dtype != expected)
        fail("flash_attn4: %s is %s, and it must be %s%s", is.name, dtype_name(is.dtype), dtype_name(expected), of);
}

static void copy4(int64_t *to, const int64_t *from)
{
    for (int d = 0; d < 4; d++) to[d] = from[d];
}

// The mask, its dimensions aligned to the right as in broadcasting.
static void describe_mask(const Tensor &attn_mask, const Machine &machine, fa4_fwd_params *params)
{
    View mask = view("attn_mask", attn_mask, -1);
    check_device(mask, machine);
    params->mask_type = mask_type_of(mask);
    const int64_t shape[4] = {params->batch, params->heads_q, params->len_q, params->len_kv};
    bool fits = mask.rank <= 4;
    for (int64_t d = 0; fits && d < mask.rank; d++) {
        int64_t at = 4 - mask.rank + d;
        fits = mask.size[d] == 1 || mask.size[d] == shape[at];
        params->stride_mask[at] = mask.size[d] == 1 ? 0 : mask.stride[d];
    }
    if (!fits)
        fail("flash_attn4: attn_mask has shape %s, which does not broadcast to %s [batch, heads, len_q, len_kv]",
             shape_text(mask.size, mask.rank).c_str(), shape_text(shape, 4).c_str());
    params->mask = mask.data;
}

static void describe_len_kv(const Tensor &len_kv, const Machine &machine, fa4_fwd_params *params)
{
    View len = view("len_kv", len_kv, 1);
    check_device(len, machine);
    check_dtype(len, aoti_torch_dtype_int32(), "");
    check_shape(len, &params->batch, "[batch]");
    if (len.size[0] > 1 && len.stride[0] != 1) fail("flash_attn4: len_kv must be contiguous");
    params->len_kv_of = static_cast<const int32_t *>(len.data);
    if (machine.arch != FA4_ARCH_CPU) return; // its values are on the device
    for (int64_t b = 0; b < params->batch; b++)
        if (params->len_kv_of[b] < 0 || params->len_kv_of[b] > params->len_kv)
            fail("flash_attn4: len_kv[%lld] is %d, and it must be in [0, %lld], the length of k", (long long)b,
                 params->len_kv_of[b], (long long)params->len_kv);
}

void describe(const Inputs &inputs, const Machine &machine, fa4_fwd_params *params)
{
    View q = view("q", inputs.q, 4), k = view("k", inputs.k, 4), v = view("v", inputs.v, 4);
    for (const View *is : {&q, &k, &v}) check_device(*is, machine);
    params->dtype = dtype_of(q);
    check_dtype(k, q.dtype, ", as q");
    check_dtype(v, q.dtype, ", as q");

    params->batch = q.size[0];
    params->heads_q = q.size[1];
    params->len_q = q.size[2];
    params->dim = q.size[3];
    params->heads_kv = k.size[1];
    params->len_kv = k.size[2];
    params->dim_v = v.size[3];
    const int64_t shape_k[4] = {params->batch, params->heads_kv, params->len_kv, params->dim};
    const int64_t shape_v[4] = {params->batch, params->heads_kv, params->len_kv, params->dim_v};
    check_shape(k, shape_k, "[batch, heads, len_kv, dim]");
    check_shape(v, shape_v, "[batch, heads, len_kv, dim]");

    params->q = q.data;
    params->k = k.data;
    params->v = v.data;
    copy4(params->stride_q, q.stride);
    copy4(params->stride_k, k.stride);
    copy4(params->stride_v, v.stride);
    params->lo = inputs.lo.value_or(FA4_UNBOUNDED_LO);
    params->hi = inputs.hi.value_or(FA4_UNBOUNDED_HI);
    params->scale = inputs.scale.value_or(1 / __builtin_sqrt((double)params->dim));
    if (inputs.attn_mask.defined()) describe_mask(inputs.attn_mask, machine, params);
    if (inputs.len_kv.defined()) describe_len_kv(inputs.len_kv, machine, params);
}

void describe_results(const Tensor &out, const Tensor &lse, const Tensor &dout, const Tensor &dlse,
                      const Machine &machine, fa4_bwd_params *params)
{
    fa4_fwd_params *fwd = &params->fwd;
    const int64_t shape[4] = {fwd->batch, fwd->heads_q, fwd->len_q, fwd->dim_v};
    int32_t dtype = torch_dtype(fwd->dtype);
    int32_t lse_dtype = fwd->dtype == FA4_F64 ? dtype : aoti_torch_dtype_float32();

    View o = view("out", out, 4), l = view("lse", lse, 3), g = view("dout", dout, 4);
    for (const View *is : {&o, &g}) {
        check_device(*is, machine);
        check_dtype(*is, dtype, ", as q");
        check_shape(*is, shape, "[batch, heads, len_q, dim]");
    }
    check_device(l, machine);
    check_dtype(l, lse_dtype, "");
    check_shape(l, shape, "[batch, heads, len_q]");
    fwd->o = o.data;
    fwd->lse = l.data;
    params->dout = g.data;
    copy4(fwd->stride_o, o.stride);
    copy4(params->stride_dout, g.stride);
    for (int d = 0; d < 3; d++) fwd->stride_lse[d] = l.stride[d];

    if (!dlse.defined()) return;
    View dl = view("dlse", dlse, 3);
    check_device(dl, machine);
    check_dtype(dl, lse_dtype, "");
    check_shape(dl, shape, "[batch, heads, len_q]");
    params->dlse = dl.data;
    for (int d = 0; d < 3; d++) params->stride_dlse[d] = dl.stride[d];
}

void dense_like(const int64_t size[4], const int64_t stride[4], int64_t dense[4])
{
    int order[4] = {0, 1, 2, 3}; // outermost first
    bool expanded = false;
    for (int d = 0; d < 4; d++) expanded |= size[d] > 1 && stride[d] == 0;
    for (int d = 1; d < 4 && !expanded; d++)
        for (int at = d; at > 0 && stride[order[at - 1]] < stride[order[at]]; at--) {
            int inner = order[at - 1];
            order[at - 1] = order[at];
            order[at] = inner;
        }
    int64_t step = 1;
    for (int at = 3; at >= 0; at--) {
        dense[order[at]] = step;
        step *= size[order[at]] > 1 ? size[order[at]] : 1;
    }
}

Tensor empty(const Machine &machine, int64_t rank, const int64_t *size, const int64_t *stride, int32_t dtype)
{
    AtenTensorHandle handle = nullptr;
    check_allocated(
        aoti_torch_empty_strided(rank, size, stride, dtype, machine.device_type, machine.device_index, &handle));
    return Tensor(handle);
}

Tensor empty_like(const Tensor &q, const fa4_fwd_params &params, const Machine &machine, int64_t stride[4])
{
    const int64_t size[4] = {params.batch, params.heads_q, params.len_q, params.dim};
    dense_like(size, params.stride_q, stride);
    bool dense = true;
    for (int d = 0; d < 4; d++) dense &= size[d] == 1 || stride[d] == params.stride_q[d];
    if (dense) {
        copy4(stride, params.stride_q);
        return empty(machine, 4, size, stride, torch_dtype(params.dtype));
    }
    AtenTensorHandle again = nullptr;
    check(aoti_torch_new_tensor_handle(q.get(), &again), "refer to a tensor");
    StableIValue stack[6] = {give(Tensor(again)), 0, 0, 0, 0, 0};
    check_allocated(torch_call_dispatcher("aten::empty_like", "", stack, TORCH_ABI_VERSION));
    Tensor out = take(stack[0]);
    copy4(stride, view("out", out, 4).stride);
    return out;
}

void *data_of(const Tensor &tensor)
{
    void *data = nullptr;
    check(aoti_torch_get_data_ptr(tensor.get(), &data), "read a data pointer");
    return data;
}

static void expect(fa4_status status, const char *op)
{
    if (status != FA4_OK) fail("%s: %s", op, fa4_last_error());
}

static Tensor empty_dense(const Machine &machine, const int64_t size[4], const int64_t like_stride[4],
                          int64_t stride[4], int32_t dtype)
{
    dense_like(size, like_stride, stride);
    return empty(machine, 4, size, stride, dtype);
}

Inputs take_inputs(StableIValue *stack)
{
    return {take(stack[0]),
            take(stack[1]),
            take(stack[2]),
            take_optional(stack[3]),
            take_optional(stack[4]),
            take_optional_number<int64_t>(stack[5]),
            take_optional_number<int64_t>(stack[6]),
            take_optional_number<double>(stack[7])};
}

void fwd(StableIValue *stack, const Inputs &inputs, const Machine &machine)
{
    fa4_fwd_params params = {};
    describe(inputs, machine, &params);

    int32_t dtype = torch_dtype(params.dtype);
    const int64_t size[4] = {params.batch, params.heads_q, params.len_q, params.dim_v};
    Tensor out = empty_dense(machine, size, params.stride_q, params.stride_o, dtype);
    params.stride_lse[2] = 1;
    params.stride_lse[1] = params.len_q > 1 ? params.len_q : 1;
    params.stride_lse[0] = params.stride_lse[1] * (params.heads_q > 1 ? params.heads_q : 1);
    Tensor lse =
        empty(machine, 3, size, params.stride_lse, params.dtype == FA4_F64 ? dtype : aoti_torch_dtype_float32());
    params.o = data_of(out);
    params.lse = data_of(lse);
    expect(fa4_fwd(&params, machine.arch, machine.stream), "fa4::fwd");

    stack[0] = give(std::move(out));
    stack[1] = give(std::move(lse));
}

fa4_status run_bwd(fa4_bwd_params *params, const Machine &machine)
{
    const int64_t bytes[1] = {(int64_t)fa4_bwd_workspace(params, machine.arch)}, one[1] = {1};
    Tensor workspace = empty(machine, 1, bytes, one, aoti_torch_dtype_uint8());
    params->workspace = data_of(workspace);
    return fa4_bwd(params, machine.arch, machine.stream);
}

void bwd(StableIValue *stack, const Machine &machine)
{
    Tensor dout = take(stack[0]), dlse = take_optional(stack[1]);
    Tensor q = take(stack[2]), k = take(stack[3]), v = take(stack[4]), out = take(stack[5]), lse = take(stack[6]);
    Inputs inputs = {std::move(q),
                     std::move(k),
                     std::move(v),
                     take_optional(stack[7]),
                     take_optional(stack[8]),
                     take_optional_number<int64_t>(stack[9]),
                     take_optional_number<int64_t>(stack[10]),
                     take_optional_number<double>(stack[11])};
    fa4_bwd_params params = {};
    fa4_fwd_params *fwd = &params.fwd;
    describe(inputs, machine, fwd);
    describe_results(out, lse, dout, dlse, machine, &params);

    int32_t dtype = torch_dtype(fwd->dtype);
    const int64_t size_q[4] = {fwd->batch, fwd->heads_q, fwd->len_q, fwd->dim};
    const int64_t size_k[4] = {fwd->batch, fwd->heads_kv, fwd->len_kv, fwd->dim};
    const int64_t size_v[4] = {fwd->batch, fwd->heads_kv, fwd->len_kv, fwd->dim_v};
    Tensor dq = empty_dense(machine, size_q, fwd->stride_q, params.stride_dq, dtype);
    Tensor dk = empty_dense(machine, size_k, fwd->stride_k, params.stride_dk, dtype);
    Tensor dv = empty_dense(machine, size_v, fwd->stride_v, params.stride_dv, dtype);
    params.dq = data_of(dq);
    params.dk = data_of(dk);
    params.dv = data_of(dv);
    expect(run_bwd(&params, machine), "fa4::bwd");

    stack[0] = give(std::move(dq));
    stack[1] = give(std::move(dk));
    stack[2] = give(std::move(dv));
}

} // namespace fa4_torch
