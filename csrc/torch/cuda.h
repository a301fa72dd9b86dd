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
    explicit Cuda(AtenTensorHandle first);
    ~Cuda();
    Cuda(const Cuda &) = delete;
    Cuda &operator=(const Cuda &) = delete;
    Machine machine = {};

  private:
    DeviceGuardHandle guard = nullptr;
};

// Puts our forward in the place of PyTorch's flash and cuDNN attention kernels on CUDA, or takes it away again.
void override_cuda_sdpa(bool on);
bool cuda_sdpa_overridden();

} // namespace fa4_torch

#endif
