// The Python module flash_attn4._C_cuda: fa4::fwd and fa4::bwd on the current stream of q's CUDA device. Built where
// torch has CUDA.
#include <Python.h>

#include "call.h"
#include "unsupported.h"

#include <cuda_runtime_api.h>

// Of torch's stable C shims, but declared only for who builds torch.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void **ret_stream);

namespace fa4_torch
{
namespace
{

void check(bool ok, const char *what)
{
    if (!ok) fail("flash_attn4: CUDA could not %s", what);
}

// 10 * major + minor of a device's compute capability, asked for once.
int arch_of(int32_t device)
{
    enum { DEVICES = 64 };
    static std::atomic<int> known[DEVICES];
    int arch = device < DEVICES ? known[device].load(std::memory_order_relaxed) : 0;
    if (arch) return arch;
    int major, minor;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
              cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess,
          "say what the device can do");
    arch = 10 * major + minor;
    if (device < DEVICES) known[device].store(arch, std::memory_order_relaxed);
    return arch;
}

// The device of a call's first tensor, current for as long as this lives.
class Cuda
{
  public:
    explicit Cuda(AtenTensorHandle first)
    {
        bool defined = false;
        int32_t device;
        void *stream;
        if (first) aoti_torch_is_defined(first, &defined);
        if (!defined) fail("flash_attn4: the first argument is undefined, and it must be a tensor");
        check(aoti_torch_get_device_index(first, &device) == AOTI_TORCH_SUCCESS, "name a tensor's device");
        check(aoti_torch_create_device_guard(device, &guard) == AOTI_TORCH_SUCCESS, "choose a tensor's device");
        check(aoti_torch_get_current_cuda_stream(device, &stream) == AOTI_TORCH_SUCCESS, "name the current stream");
        machine = {aoti_torch_device_type_cuda(), device, arch_of(device), stream};
    }
    ~Cuda()
    {
        if (guard) aoti_torch_delete_device_guard(guard);
    }
    Cuda(const Cuda &) = delete;
    Cuda &operator=(const Cuda &) = delete;
    Machine machine = {};

  private:
    DeviceGuardHandle guard = nullptr;
};

AtenTensorHandle first(const StableIValue *stack)
{
    return torch::stable::detail::to<AtenTensorHandle>(stack[0]);
}

void cuda_fwd(StableIValue *stack, uint64_t, uint64_t)
{
    Cuda cuda(first(stack));
    fwd(stack, cuda.machine);
}

void cuda_bwd(StableIValue *stack, uint64_t, uint64_t)
{
    Cuda cuda(first(stack));
    bwd(stack, cuda.machine);
}

PyMethodDef methods[] = {{"unsupported", unsupported, METH_VARARGS, unsupported_doc}, {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_C_cuda", "CUDA kernels of flash_attn4.", 0, methods, nullptr, nullptr, nullptr, nullptr};

} // namespace
} // namespace fa4_torch

STABLE_TORCH_LIBRARY_IMPL(fa4, CUDA, m)
{
    m.impl("fwd", &fa4_torch::cuda_fwd);
    m.impl("bwd", &fa4_torch::cuda_bwd);
}

PyMODINIT_FUNC PyInit__C_cuda()
{
    return PyModule_Create(&fa4_torch::module);
}
