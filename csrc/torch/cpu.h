// What the CPU side of the binding gives to the module: the override of PyTorch's own attention.
#ifndef FA4_TORCH_CPU_H
#define FA4_TORCH_CPU_H

#include "call.h"

namespace fa4_torch
{

// torch's threads as an fa4_executor, and the CPU that uses them.
class Cpu
{
  public:
    Cpu();
    Cpu(const Cpu &) = delete;
    Cpu &operator=(const Cpu &) = delete;
    const Machine machine;
    // Throws if torch could not run a part of the work.
    void finish() const;

  private:
    struct Executor {
        fa4_executor base;
        bool *failed;
    };
    Executor executor;
    bool failed = false;
    static void parallel_for(const fa4_executor *self, int64_t tiles, void (*run)(void *, int64_t, int64_t),
                             void *context);
};

// Puts our kernels in the place of PyTorch's two CPU flash attention kernels, or takes them away again.
void override_sdpa(bool on);
bool sdpa_overridden();

} // namespace fa4_torch

#endif
