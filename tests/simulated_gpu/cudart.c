// As much of the CUDA runtime as csrc/cuda/launch.c and csrc/verify/verify.c call, with Python for a device:
// __init__.py answers through callbacks, and runs kernels in the simulator.
#include "../../csrc/plan.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

// What stands for a kernel's host function is its name.
#define FA4_CUDA_KERNEL(name, arch, file, flags) EXPORT const char name[] = #name;
#include "../../csrc/verify/kernels.def"

// A tensor map's 128 bytes hold the number of one of these.
typedef struct {
    uint64_t address, size[5], stride[4];
    uint32_t type, rank, box[5], element_stride[5], swizzle;
} recorded_map;

enum { MAPS = 64 };
EXPORT recorded_map fa4_recorded_maps[MAPS];
static unsigned map_count;

typedef struct {
    int capability, multiprocessors;
    void *(*allocate)(size_t bytes);
    void (*release)(void *memory);
    void (*copy)(void *to, const void *from, size_t bytes);
    int (*launch)(const char *kernel, const uint32_t shape[10], void **arguments); // an error's number, or 0
} callbacks;

static callbacks device;
static int sticky;                    // the error that a kernel ended in
static _Thread_local int has_context; // until then the driver refuses a thread

EXPORT void fa4_set_device(const callbacks *given)
{
    device = *given;
    sticky = has_context = 0;
}

cudaError_t cudaGetDevice(int *number)
{
    *number = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int number)
{
    has_context = 1;
    return number == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int number)
{
    (void)number;
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "ptxsim");
    properties->major = device.capability / 10;
    properties->minor = device.capability % 10;
    properties->multiProcessorCount = device.multiprocessors;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int number)
{
    (void)number;
    *value = attribute == cudaDevAttrComputeCapabilityMajor   ? device.capability / 10
             : attribute == cudaDevAttrComputeCapabilityMinor ? device.capability % 10
                                                              : device.multiprocessors;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int number)
{
    snprintf(text, (size_t)length, "none");
    (void)number;
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaSuccess ? "no error" : "the simulator found something";
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaSuccess ? "cudaSuccess" : "cudaErrorLaunchFailure";
}

cudaError_t cudaMalloc(void **memory, size_t bytes)
{
    *memory = device.allocate(bytes);
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags)
{
    (void)flags;
    *memory = malloc(bytes);
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *memory)
{
    device.release(memory);
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    (void)kind;
    if (!sticky) device.copy(to, from, bytes);
    return (cudaError_t)sticky;
}

cudaError_t cudaDeviceSynchronize(void)
{
    return (cudaError_t)sticky;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    (void)function;
    return attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value <= 227 * 1024 ? cudaSuccess
                                                                                           : cudaErrorInvalidValue;
}

static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                       const cuuint64_t *size, const cuuint64_t *stride, const cuuint32_t *box,
                       const cuuint32_t *element_stride, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
    if (interleave || fill || rank > 5 || promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B)
        return CUDA_ERROR_INVALID_VALUE;
    const unsigned number = map_count++ % MAPS;
    recorded_map *m = &fa4_recorded_maps[number];
    *m = (recorded_map){.address = (uintptr_t)address, .type = type, .rank = rank, .swizzle = swizzle};
    for (unsigned i = 0; i < rank; i++) {
        m->size[i] = size[i];
        m->box[i] = box[i];
        m->element_stride[i] = element_stride[i];
        if (i + 1 < rank) m->stride[i] = stride[i];
    }
    memset(map, 0, sizeof *map);
    memcpy(map, &number, sizeof number);
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **entry, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result)
{
    (void)version;
    (void)flags;
    *entry = strcmp(symbol, "cuTensorMapEncodeTiled") ? NULL : (void *)(uintptr_t)encode;
    *result = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments)
{
    const dim3 grid = config->gridDim, block = config->blockDim;
    uint32_t shape[] = {grid.x, grid.y, grid.z, block.x, block.y, block.z, 1, 1, 1, (uint32_t)config->dynamicSmemBytes};
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
            shape[6] = config->attrs[i].val.clusterDim.x;
            shape[7] = config->attrs[i].val.clusterDim.y;
            shape[8] = config->attrs[i].val.clusterDim.z;
        }
    if (!sticky) sticky = device.launch(function, shape, arguments);
    return cudaSuccess;
}
