// The Python module flash_attn4._C_cuda: fa4::fwd on the current stream of q's CUDA device. Built where torch has CUDA.
#include <Python.h>

#include "../cuda/backend.h"
#include "cuda.h"
#include "questions.h"

#include <cuda_runtime_api.h>

#include <exception>

// Of torch's stable C shims, but declared only for who builds torch.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void **ret_stream);

namespace fa4_torch
{
namespace
{

// 10 * major + minor of a device's compute capability, asked for once.
int arch_of(int32_t device)
{
    enum { DEVICES = 64 };
    static std::atomic<int> known[DEVICES];
    int arch = device < DEVICES ? known[device].load(std::memory_order_relaxed) : 0;
    if (arch) return arch;
    int major, minor;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error != cudaSuccess) fail("flash_attn4: cudaDeviceGetAttribute: %s", cudaGetErrorString(error));
    arch = 10 * major + minor;
    if (device < DEVICES) known[device].store(arch, std::memory_order_relaxed);
    return arch;
}

void cuda_fwd(StableIValue *stack, uint64_t, uint64_t)
{
    const Inputs inputs = take_inputs(stack);
    Cuda cuda("q", inputs.q);
    fwd(stack, inputs, cuda.machine);
    count(CALLS_FWD);
}

// The name of the kernel that the plan gives a call on a chip, which need not be here.
PyObject *kernel(PyObject *, PyObject *args)
{
    int arch;
    const char *dtype;
    long long dim, dim_v;
    PyObject *lo, *hi, *sizes, *strides, *addresses;
    fa4_fwd_params p = {};
    if (!PyArg_ParseTuple(args, "isLLOOOOO", &arch, &dtype, &dim, &dim_v, &lo, &hi, &sizes, &strides, &addresses))
        return nullptr;
    p.scale = 1;
    p.dim = dim;
    p.dim_v = dim_v;
    p.dtype = dtype_named(dtype);
    if (!read_call(&p, sizes, strides, addresses)) return nullptr;
    if (lo != Py_None) p.lo = PyLong_AsLongLong(lo);
    if (hi != Py_None) p.hi = PyLong_AsLongLong(hi);
    if (PyErr_Occurred()) return nullptr;
    const fa4_chip chip = {arch, 1};
    fa4_plan plan;
    if (fa4_fwd_plan(&p, &chip, &plan) != FA4_OK) return PyErr_Format(PyExc_ValueError, "%s", fa4_last_error());
    return PyUnicode_FromString(fa4_cuda_has_kernel(plan.kernel) || !plan.kernel_else ? plan.kernel : plan.kernel_else);
}

PyObject *override_sdpa_now(PyObject *, PyObject *on)
{
    int yes = PyObject_IsTrue(on);
    if (yes < 0) return nullptr;
    try {
        override_cuda_sdpa(yes);
        return PyBool_FromLong(cuda_sdpa_overridden());
    } catch (const std::exception &error) {
        return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
    }
}

PyMethodDef methods[] = {
    {"calls", calls_made, METH_NOARGS, calls_doc},
    {"unsupported", unsupported, METH_VARARGS, unsupported_doc},
    {"kernel", kernel, METH_VARARGS,
     "(arch, dtype, dim, dim_v, lo, hi, sizes, strides, addresses): name of the kernel that runs it."},
    {"override_sdpa", override_sdpa_now, METH_O, "Put our forward under PyTorch's CUDA attention, or take it away."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_C_cuda", "CUDA kernels of flash_attn4.", 0, methods, nullptr, nullptr, nullptr, nullptr};

} // namespace

Cuda::Cuda(const char *name, const Tensor &first)
{
    if (!first.defined()) fail("flash_attn4: %s is undefined, and it must be a tensor", name);
    int32_t type, device;
    void *stream;
    check(aoti_torch_get_device_type(first.get(), &type), "read a device");
    check(aoti_torch_get_device_index(first.get(), &device), "read a device");
    if (type != aoti_torch_device_type_cuda())
        fail("flash_attn4: %s is on no GPU, but another argument is: all tensors must be on one device", name);
    check(aoti_torch_create_device_guard(device, &guard.handle), "choose a tensor's device");
    check(aoti_torch_get_current_cuda_stream(device, &stream), "name the current stream");
    machine = {type, device, arch_of(device), stream};
}

Cuda::Guard::~Guard()
{
    if (handle) aoti_torch_delete_device_guard(handle);
}

} // namespace fa4_torch

STABLE_TORCH_LIBRARY_IMPL(fa4, CUDA, m)
{
    m.impl("fwd", &fa4_torch::cuda_fwd);
}

PyMODINIT_FUNC PyInit__C_cuda()
{
    return PyModule_Create(&fa4_torch::module);
}
