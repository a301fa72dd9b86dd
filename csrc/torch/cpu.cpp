// The operators fa4::fwd and fa4::bwd: their schemas, and what they do on the CPU.
#include "cpu.h"

namespace fa4_torch
{

namespace
{
struct Work {
    void (*run)(void *context, int64_t begin, int64_t end);
    void *context;
};

void run_part(int64_t begin, int64_t end, void *work)
{
    const Work *part = static_cast<const Work *>(work);
    part->run(part->context, begin, end);
}

int thread_count()
{
    uint32_t threads = 1;
    return torch_get_num_threads(&threads) == AOTI_TORCH_SUCCESS && threads ? (int)threads : 1;
}
} // namespace

// Called from C, which no exception may cross: torch's own are statuses here, and run is C.
void Cpu::parallel_for(const fa4_executor *self, int64_t tiles, void (*run)(void *, int64_t, int64_t), void *context)
{
    if (tiles <= 1 || self->threads == 1) {
        if (tiles > 0) run(context, 0, tiles);
        return;
    }
    Work work = {run, context};
    if (torch_parallel_for(0, tiles, 1, run_part, &work) != AOTI_TORCH_SUCCESS)
        *reinterpret_cast<const Executor *>(self)->failed = true;
}

Cpu::Cpu()
    : machine{aoti_torch_device_type_cpu(), 0, FA4_ARCH_CPU, &executor},
      executor{{parallel_for, thread_count()}, &failed}
{
}

void Cpu::finish() const
{
    if (failed) fail("flash_attn4: torch could not run its threads");
}

static void cpu_fwd(StableIValue *stack, uint64_t, uint64_t)
{
    const Inputs inputs = take_inputs(stack);
    Cpu cpu;
    fwd(stack, inputs, cpu.machine);
    cpu.finish();
    count(CALLS_FWD);
}

static void cpu_bwd(StableIValue *stack, uint64_t, uint64_t)
{
    Cpu cpu;
    bwd(stack, cpu.machine);
    cpu.finish();
    count(CALLS_BWD);
}

} // namespace fa4_torch

// Changes come as new operators or trailing arguments with a default: a saved graph names these strings.
STABLE_TORCH_LIBRARY(fa4, m)
{
    m.def("fwd(Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None, Tensor? len_kv=None, SymInt? lo=None, "
          "SymInt? hi=None, float? scale=None) -> (Tensor out, Tensor lse)");
    m.def("bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
          "Tensor? attn_mask=None, Tensor? len_kv=None, SymInt? lo=None, SymInt? hi=None, float? scale=None) "
          "-> (Tensor dq, Tensor dk, Tensor dv)");
    // What the override of SDPA calls for inputs that the kernels refuse; ops.py implements them.
    m.def("_sdpa_math(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, bool is_causal, float? scale) "
          "-> (Tensor out, Tensor lse)");
    m.def("_sdpa_math_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
          "Tensor? attn_mask, bool is_causal, float? scale) -> (Tensor dq, Tensor dk, Tensor dv)");
}

STABLE_TORCH_LIBRARY_IMPL(fa4, CPU, m)
{
    m.impl("fwd", &fa4_torch::cpu_fwd);
    m.impl("bwd", &fa4_torch::cpu_bwd);
}
