// What a CUDA backend offers beside its kernels, and what launches them.
#ifndef FA4_CUDA_BACKEND_H
#define FA4_CUDA_BACKEND_H

#include "../plan.h"

#ifdef __cplusplus
extern "C" {
#endif

// Of well-formed params, as dispatch.c has checked them, and a chip that has kernels: NULL, or why they cannot run
// them.
const char *fa4_cuda_fwd_unsupported(const fa4_fwd_params *p, int arch);

// Whether the build has a kernel of that name. launch.c knows; where it is not linked, plan.c counts every kernel as
// there.
int fa4_cuda_has_kernel(const char *name);

// Plans and launches on the current device.
fa4_status fa4_cuda_fwd(const fa4_fwd_params *p, void *stream);
fa4_status fa4_cuda_launch(const fa4_plan *plan, void *stream);

#ifdef __cplusplus
}
#endif
#endif
