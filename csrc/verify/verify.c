// The entries of the library that `python -m flash_attn4 verify` makes of the host code, the kernels with bounded waits
// and the probes: plain numbers for structs, so that Python need not know how those are laid out.
#include "../cuda/backend.h"
#include "../error.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#define FA4_API __attribute__((visibility("default")))

FA4_API const char *fa4_verify_error(void);
FA4_API int fa4_verify_describe(char *text, size_t size);
FA4_API void *fa4_verify_device_memory(size_t bytes);
FA4_API void *fa4_verify_host_memory(size_t bytes);
FA4_API int fa4_verify_free(void *device_memory);
FA4_API int fa4_verify_copy(void *to, const void *from, size_t bytes);
FA4_API int fa4_verify_wait(void);
FA4_API int fa4_verify_launch(const char *kernel, const uint32_t shape[10], int maps, const int64_t *map,
                              const void *args, size_t args_size);
FA4_API const char *fa4_verify_forward(const int64_t *call, double scale, int arch, int multiprocessors, int launch);

// 0, or 1 with the reason kept.
static int failed(const char *what, cudaError_t error)
{
    if (error == cudaSuccess) return 0;
    fa4_fail(FA4_DEVICE_ERROR, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
    return 1;
}

const char *fa4_verify_error(void)
{
    return fa4_last_error();
}

// "name\ncompute capability, 10 major + minor\nmultiprocessors\nversion of the driver's CUDA\nof the runtime\nPCI bus"
int fa4_verify_describe(char *text, size_t size)
{
    struct cudaDeviceProp properties;
    int device = 0, driver = 0, runtime = 0;
    char bus[32] = "";
    if (failed("cudaGetDevice", cudaGetDevice(&device)) ||
        failed("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, device)) ||
        failed("cudaDriverGetVersion", cudaDriverGetVersion(&driver)) ||
        failed("cudaRuntimeGetVersion", cudaRuntimeGetVersion(&runtime)) ||
        failed("cudaDeviceGetPCIBusId", cudaDeviceGetPCIBusId(bus, sizeof bus, device)))
        return 1;
    snprintf(text, size, "%s\n%d\n%d\n%d\n%d\n%s", properties.name, 10 * properties.major + properties.minor,
             properties.multiProcessorCount, driver, runtime, bus);
    return 0;
}

void *fa4_verify_device_memory(size_t bytes)
{
    void *p = NULL;
    return failed("cudaMalloc", cudaMalloc(&p, bytes)) ? NULL : p;
}

// Memory of the host that the device reaches by the same address.
void *fa4_verify_host_memory(size_t bytes)
{
    void *p = NULL;
    if (failed("cudaHostAlloc", cudaHostAlloc(&p, bytes, cudaHostAllocMapped))) return NULL;
    memset(p, 0, bytes);
    return p;
}

int fa4_verify_free(void *device_memory)
{
    return failed("cudaFree", cudaFree(device_memory));
}

int fa4_verify_copy(void *to, const void *from, size_t bytes)
{
    return failed("cudaMemcpy", cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
}

int fa4_verify_wait(void)
{
    return failed("the kernel", cudaDeviceSynchronize());
}

// A tensor map's numbers: address, type, rank, size[5], stride[4], box[5], swizzle.
enum { MAP_NUMBERS = 18 };

static fa4_tensor_map map_of(const int64_t *numbers)
{
    fa4_tensor_map map = {
        .address = (uint64_t)numbers[0],
        .type = (fa4_dtype)numbers[1],
        .rank = (int)numbers[2],
        .swizzle = (int)numbers[17],
        .element_stride = {1, 1, 1, 1, 1},
    };
    for (int i = 0; i < 5; i++) {
        map.size[i] = (uint64_t)numbers[3 + i];
        if (i < 4) map.stride[i] = (uint64_t)numbers[8 + i];
        map.box[i] = (uint32_t)numbers[12 + i];
    }
    return map;
}

// shape: grid, block, cluster, bytes of dynamic shared memory.
int fa4_verify_launch(const char *kernel, const uint32_t shape[10], int maps, const int64_t *map, const void *args,
                      size_t args_size)
{
    fa4_plan plan = {.kernel = kernel, .shared_bytes = shape[9], .map_count = maps, .args_size = args_size};
    if (maps > FA4_PLAN_MAPS || args_size > FA4_PLAN_ARGS) {
        fa4_fail(FA4_INVALID, "%s has more parameters than a plan holds", kernel);
        return 1;
    }
    for (int i = 0; i < 3; i++) {
        plan.grid[i] = shape[i];
        plan.block[i] = shape[3 + i];
        plan.cluster[i] = shape[6 + i];
    }
    for (int i = 0; i < maps; i++) plan.map[i] = map_of(map + i * MAP_NUMBERS);
    memcpy(plan.args, args, args_size);
    return fa4_cuda_launch(&plan, NULL) != FA4_OK;
}

// call: addresses of q, k, v, o, lse, len_kv_of; strides of q, k, v, o (4 each) and lse (3); batch, heads_q, heads_kv,
// len_q, len_kv, dim, dim_v; lo, hi; dtype. Returns the name of the kernel that it takes, and with launch runs it; NULL
// where it cannot.
const char *fa4_verify_forward(const int64_t *call, double scale, int arch, int multiprocessors, int launch)
{
    const int64_t *strides = call + 6, *sizes = strides + 19, *rest = sizes + 7;
    fa4_fwd_params p = {
        .q = (const void *)(uintptr_t)call[0],
        .k = (const void *)(uintptr_t)call[1],
        .v = (const void *)(uintptr_t)call[2],
        .o = (void *)(uintptr_t)call[3],
        .lse = (void *)(uintptr_t)call[4],
        .len_kv_of = (const int32_t *)(uintptr_t)call[5],
        .batch = sizes[0],
        .heads_q = sizes[1],
        .heads_kv = sizes[2],
        .len_q = sizes[3],
        .len_kv = sizes[4],
        .dim = sizes[5],
        .dim_v = sizes[6],
        .lo = rest[0],
        .hi = rest[1],
        .dtype = (fa4_dtype)rest[2],
        .scale = scale,
    };
    memcpy(p.stride_q, strides, sizeof p.stride_q);
    memcpy(p.stride_k, strides + 4, sizeof p.stride_k);
    memcpy(p.stride_v, strides + 8, sizeof p.stride_v);
    memcpy(p.stride_o, strides + 12, sizeof p.stride_o);
    memcpy(p.stride_lse, strides + 16, sizeof p.stride_lse);
    const fa4_chip chip = {.arch = arch, .multiprocessors = multiprocessors};
    fa4_plan plan;
    if (fa4_fwd_plan(&p, &chip, &plan) != FA4_OK) return NULL;
    return !launch || fa4_cuda_launch(&plan, NULL) == FA4_OK ? plan.kernel : NULL;
}
