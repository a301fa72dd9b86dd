// From a plan to a running kernel. Holds no device memory, waits for nothing, links no libcuda.
#include "../error.h"
#include "backend.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <string.h>

#ifndef FA4_KERNELS
#    define FA4_KERNELS "../variants.def"
#endif

// Every kernel of variants.def; NULL those of an architecture that the build left out.
#define FA4_CUDA_KERNEL(name, arch, file, flags) __attribute__((weak)) extern void name(void);
#include FA4_KERNELS

static const struct {
    const char *name;
    void (*function)(void);
} kernels[] = {
#define FA4_CUDA_KERNEL(name, arch, file, flags) {#name, name},
#include FA4_KERNELS
};

enum { KERNELS = sizeof kernels / sizeof *kernels, DEVICES = 64 };

static fa4_status failed(const char *what, cudaError_t error)
{
    return fa4_fail(FA4_DEVICE_ERROR, "%s: %s", what, cudaGetErrorString(error));
}

static int number_of(const char *name)
{
    for (int i = 0; name && i < KERNELS; i++)
        if (kernels[i].function && strcmp(kernels[i].name, name) == 0) return i;
    return -1;
}

int fa4_cuda_has_kernel(const char *name)
{
    return number_of(name) >= 0;
}

// The kernel's handle, allowed its shared memory on the current device: asked for once, by whoever comes first, and by
// threads that come at the same time each once.
static fa4_status prepare(const fa4_plan *plan, const void **function)
{
    static atomic_bool ready[KERNELS][DEVICES];
    int i = number_of(plan->kernel), device;
    if (i < 0) i = number_of(plan->kernel_else);
    if (i < 0) return fa4_fail(FA4_UNSUPPORTED, "this build left out the kernel %s", plan->kernel);
    *function = (const void *)(uintptr_t)kernels[i].function;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return failed("cudaGetDevice", error);
    if (device < DEVICES && atomic_load_explicit(&ready[i][device], memory_order_acquire)) return FA4_OK;
    error = cudaFuncSetAttribute(*function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)plan->shared_bytes);
    if (error != cudaSuccess) return failed(kernels[i].name, error);
    if (device < DEVICES) atomic_store_explicit(&ready[i][device], 1, memory_order_release);
    return FA4_OK;
}

typedef CUresult encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                           const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                           CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's cuTensorMapEncodeTiled, from the libcuda that the runtime has loaded.
static fa4_status driver_encode(encode_fn **encode)
{
    static _Atomic(void *) found;
    void *entry = atomic_load_explicit(&found, memory_order_acquire);
    if (!entry) {
        enum cudaDriverEntryPointQueryResult result;
        cudaError_t error =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
        if (error != cudaSuccess) return failed("cuTensorMapEncodeTiled", error);
        if (result != cudaDriverEntryPointSuccess || !entry)
            return fa4_fail(FA4_DEVICE_ERROR, "the CUDA driver has no cuTensorMapEncodeTiled: it is older than 12.0");
        atomic_store_explicit(&found, entry, memory_order_release);
    }
    *encode = (encode_fn *)(uintptr_t)entry;
    return FA4_OK;
}

static CUtensorMapSwizzle swizzle_of(int bytes)
{
    return bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
           : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
           : bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                         : CU_TENSOR_MAP_SWIZZLE_NONE;
}

static CUtensorMapL2promotion promotion_of(int bytes)
{
    return bytes == 256   ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
           : bytes == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
           : bytes == 64  ? CU_TENSOR_MAP_L2_PROMOTION_L2_64B
                          : CU_TENSOR_MAP_L2_PROMOTION_NONE;
}

static CUtensorMapDataType type_of(fa4_dtype type)
{
    return type == FA4_F16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
           : type == FA4_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
           : type == FA4_F32  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
}

// The driver wants a current context, which a thread has after a call of the runtime that needs one. A thread that
// comes with memory from elsewhere may not have made any: choosing its device again does it.
static int make_context_current(void)
{
    int device;
    return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess;
}

static fa4_status encode_map(encode_fn *encode, int number, const fa4_tensor_map *map, CUtensorMap *encoded)
{
    CUresult result;
    int tries = 0;
    do
        result = encode(encoded, type_of(map->type), (cuuint32_t)map->rank, (void *)(uintptr_t)map->address, map->size,
                        map->stride, map->box, map->element_stride, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        swizzle_of(map->swizzle), promotion_of(map->l2_promotion), CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    while (result == CUDA_ERROR_INVALID_CONTEXT && tries++ == 0 && make_context_current());
    if (result == CUDA_SUCCESS) return FA4_OK;
    return fa4_fail(FA4_DEVICE_ERROR,
                    "cuTensorMapEncodeTiled refused (%d) map %d of a plan, of rank %d, sizes %llu, %llu, %llu, %llu, "
                    "%llu, and strides of %llu, %llu, %llu, %llu bytes",
                    (int)result, number, map->rank, (unsigned long long)map->size[0], (unsigned long long)map->size[1],
                    (unsigned long long)map->size[2], (unsigned long long)map->size[3],
                    (unsigned long long)map->size[4], (unsigned long long)map->stride[0],
                    (unsigned long long)map->stride[1], (unsigned long long)map->stride[2],
                    (unsigned long long)map->stride[3]);
}

fa4_status fa4_cuda_launch(const fa4_plan *plan, void *stream)
{
    if (plan->grid[0] == 0) return FA4_OK;
    const void *function = NULL;
    encode_fn *encode = NULL;
    fa4_status status = prepare(plan, &function);
    if (status == FA4_OK) status = driver_encode(&encode);
    if (status != FA4_OK) return status;

    CUtensorMap maps[FA4_PLAN_MAPS];
    void *arguments[FA4_PLAN_MAPS + 1];
    for (int i = 0; i < plan->map_count; i++) {
        status = encode_map(encode, i, &plan->map[i], &maps[i]);
        if (status != FA4_OK) return status;
        arguments[i] = &maps[i];
    }
    arguments[plan->map_count] = (void *)plan->args;

    cudaLaunchAttribute cluster = {
        .id = cudaLaunchAttributeClusterDimension,
        .val.clusterDim = {plan->cluster[0], plan->cluster[1], plan->cluster[2]},
    };
    const cudaLaunchConfig_t config = {
        .gridDim = {plan->grid[0], plan->grid[1], plan->grid[2]},
        .blockDim = {plan->block[0], plan->block[1], plan->block[2]},
        .dynamicSmemBytes = plan->shared_bytes,
        .stream = stream,
        .attrs = &cluster,
        .numAttrs = plan->cluster[0] * plan->cluster[1] * plan->cluster[2] > 1,
    };
    cudaError_t error = cudaLaunchKernelExC(&config, function, arguments);
    return error == cudaSuccess ? FA4_OK : failed(plan->kernel, error);
}

// The current device as plans see it, asked for once for each.
static fa4_status current_chip(fa4_chip *chip)
{
    static _Atomic(int64_t) known[DEVICES]; // arch << 32 | multiprocessors
    int device, major, minor, multiprocessors;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return failed("cudaGetDevice", error);
    int64_t packed = device < DEVICES ? atomic_load_explicit(&known[device], memory_order_relaxed) : 0;
    if (!packed) {
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
        if (error == cudaSuccess)
            error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
        if (error != cudaSuccess) return failed("cudaDeviceGetAttribute", error);
        packed = (int64_t)(10 * major + minor) << 32 | multiprocessors;
        if (device < DEVICES) atomic_store_explicit(&known[device], packed, memory_order_relaxed);
    }
    *chip = (fa4_chip){.arch = (int)(packed >> 32), .multiprocessors = (int)(packed & 0x7fffffff)};
    return FA4_OK;
}

fa4_status fa4_cuda_fwd(const fa4_fwd_params *p, void *stream)
{
    fa4_chip chip;
    fa4_plan plan;
    fa4_status status = current_chip(&chip);
    if (status == FA4_OK) status = fa4_fwd_plan(p, &chip, &plan);
    return status == FA4_OK ? fa4_cuda_launch(&plan, stream) : status;
}
