// Where a call on CUDA runs, and the override of PyTorch's own attention there.
#ifndef FA4_TORCH_CUDA_H
#define FA4_TORCH_CUDA_H

#include "call.h"

namespace fa4_torch
{

// The device of a call's first tensor, current for as long as this lives.
class Cuda
{
  public:
    Cuda(const char *name, const Tensor &first);
    Machine machine = {};

  private:
    struct Guard {
        Guard() = default;
        Guard(const Guard &) = delete;
        Guard &operator=(const Guard &) = delete;
        ~Guard();
        DeviceGuardHandle handle = nullptr;
    } guard;
};

// Puts our forward in the place of PyTorch's flash and cuDNN attention kernels on CUDA, or takes it away again.
void override_cuda_sdpa(bool on);
bool cuda_sdpa_overridden();

} // namespace fa4_torch

#endif
