// fa4_plan: one kernel launch as plain data. csrc/cuda/launch.c gives it to the driver, tests/ptxsim to the simulator:
// the host code that users run is the host code that tests run. No CUDA header.
#ifndef FA4_PLAN_H
#define FA4_PLAN_H

#include "fa4.h"

#ifdef __cplusplus
extern "C" {
#endif

// What cuTensorMapEncodeTiled takes. Dimension 0 is innermost; stride[i] is the distance in bytes along
// dimension i + 1.
typedef struct {
    uint64_t address; // of device memory
    fa4_dtype type;
    int rank; // 1..5
    uint64_t size[5];
    uint64_t stride[4];
    uint32_t box[5];
    uint32_t element_stride[5];
    int swizzle;      // bytes: 0, 32, 64 or 128
    int l2_promotion; // bytes: 0, 64, 128 or 256
} fa4_tensor_map;

enum { FA4_PLAN_MAPS = 6, FA4_PLAN_ARGS = 1536 };

// Kernel parameters: the maps first, each a 128-byte __grid_constant__ CUtensorMap in its own parameter, then one
// struct by value.
typedef struct {
    const char *kernel;      // the entry's name, as in the PTX
    const char *kernel_else; // that of another that the same launch runs, where the build left that out; or NULL
    uint32_t grid[3], block[3], cluster[3];
    uint32_t shared_bytes; // dynamic
    int map_count;
    fa4_tensor_map map[FA4_PLAN_MAPS];
    size_t args_size;
    unsigned char args[FA4_PLAN_ARGS];
} fa4_plan;

// The chip that a plan is for.
typedef struct {
    int arch; // 90, 100, 103
    int multiprocessors;
} fa4_chip;

// Fills *plan with the launch that runs p on that chip. FA4_UNSUPPORTED with fa4_last_error() where
// fa4_fwd_unsupported has a reason. A plan with grid[0] == 0 has nothing to launch.
fa4_status fa4_fwd_plan(const fa4_fwd_params *p, const fa4_chip *chip, fa4_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
