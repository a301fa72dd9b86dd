// From a boxed operator call to fa4_fwd_params and back. Sees torch's stable C shims and nothing else of torch, and
// no machine: cpu.cpp says where a call runs.
#ifndef FA4_TORCH_CALL_H
#define FA4_TORCH_CALL_H

#include "../fa4.h"

#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cstdint>
#include <optional>

namespace fa4_torch
{

// Throws std::runtime_error, which torch turns into Python's RuntimeError. printf's format. The stable ABI has no way
// to throw torch's own kinds, so that what is out of memory is a RuntimeError too.
[[noreturn, gnu::format(printf, 1, 2)]] void fail(const char *format, ...);
// The same where a call of torch's failed: "torch could not <what><which>", and why, if torch is new enough (2.13) to
// say it.
void check(AOTITorchError error, const char *what, const char *which = "");

// How often each entry of this module ran in this process; sdpa_before: calls of PyTorch's own attention that were
// given back to its kernels.
struct Calls {
    const char *name;
    std::atomic<int64_t> count;
};
enum { CALLS_FWD, CALLS_BWD, CALLS_SDPA_FWD, CALLS_SDPA_BWD, CALLS_SDPA_MATH, CALLS_SDPA_BEFORE, CALLS };
extern Calls calls[CALLS];
inline void count(int entry)
{
    calls[entry].count.fetch_add(1, std::memory_order_relaxed);
}

// Owns a reference to a tensor, or nothing.
class Tensor
{
  public:
    Tensor() = default;
    explicit Tensor(AtenTensorHandle owned) : handle(owned) {}
    Tensor(Tensor &&other) noexcept : handle(other.release()) {}
    Tensor(const Tensor &) = delete;
    Tensor &operator=(Tensor &&) = delete;
    ~Tensor()
    {
        if (handle) aoti_torch_delete_tensor_object(handle);
    }

    AtenTensorHandle get() const
    {
        return handle;
    }
    AtenTensorHandle release()
    {
        AtenTensorHandle given = handle;
        handle = nullptr;
        return given;
    }
    // False for an absent argument and for an undefined tensor, which autograd passes for an absent one.
    bool defined() const;

  private:
    AtenTensorHandle handle = nullptr;
};

// Take an argument off the stack, which owned it.
Tensor take(StableIValue argument);
Tensor take_optional(StableIValue argument);
template <typename T> std::optional<T> take_optional_number(StableIValue argument)
{
    return torch::stable::detail::to<std::optional<T>>(argument);
}

// Give one to the stack or to the dispatcher, which owns it then.
inline StableIValue give(Tensor &&tensor)
{
    return torch::stable::detail::from(tensor.release());
}
template <typename T> StableIValue give(const std::optional<T> &value)
{
    return torch::stable::detail::from(value);
}
StableIValue give_optional(Tensor &&tensor);

// What an argument is. Borrows from its tensor.
struct View {
    const char *name;
    int64_t rank;
    const int64_t *size, *stride;
    int32_t dtype, device_type, device_index;
    void *data;
};

// Refuses what has no strides, and another rank than this one (-1: any).
View view(const char *name, const Tensor &tensor, int64_t rank);

// Where a call runs.
struct Machine {
    int32_t device_type;
    int32_t device_index;
    int arch;
    void *stream;
};

struct Inputs {
    Tensor q, k, v, attn_mask, len_kv;
    std::optional<int64_t> lo, hi;
    std::optional<double> scale;
};

// Fills everything of *params that the inputs decide (not o, lse), or throws naming the argument.
// Shapes, dtypes and devices are sound after it; what a backend cannot do is for the backend to say.
void describe(const Inputs &inputs, const Machine &machine, fa4_fwd_params *params);

// New tensors. dense_like: no gaps, dimensions in the order of those strides, contiguous when one is 0 (expanded).
// csrc and ops.py have the rule twice, and a test compares them.
void dense_like(const int64_t size[4], const int64_t stride[4], int64_t dense[4]);
Tensor empty(const Machine &machine, int64_t rank, const int64_t *size, const int64_t *stride, int32_t dtype);
// torch's empty_like(q) and its strides: those of a q without gaps.
Tensor empty_like(const Tensor &q, const fa4_fwd_params &params, const Machine &machine, int64_t stride[4]);
// An undefined tensor, which autograd takes for an absent one.
StableIValue give_undefined();
void *data_of(const Tensor &tensor);
int32_t torch_dtype(fa4_dtype dtype);

// Binds dout and dlse (which may be absent) and the forward's results to *params, whose fwd is described.
void describe_results(const Tensor &out, const Tensor &lse, const Tensor &dout, const Tensor &dlse,
                      const Machine &machine, fa4_bwd_params *params);

// The arguments of fa4::fwd, off the stack.
Inputs take_inputs(StableIValue *stack);

// The boxed operators: stack in, stack out. fwd's arguments have been taken.
void fwd(StableIValue *stack, const Inputs &inputs, const Machine &machine);
void bwd(StableIValue *stack, const Machine &machine);

// Runs params->fwd's gradient with a workspace of its own.
fa4_status run_bwd(fa4_bwd_params *params, const Machine &machine);

} // namespace fa4_torch

#endif
