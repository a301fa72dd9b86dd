// What a CUDA backend offers beside its kernels, and what launches them.
#ifndef FA4_CUDA_BACKEND_H
#define FA4_CUDA_BACKEND_H

#include "../plan.h"

#ifdef __cplusplus
extern "C" {
#endif

// Of well-formed params, as dispatch.c has checked them: NULL, or why the backend cannot run them.
const char *fa4_sm90_fwd_unsupported(const fa4_fwd_params *p);
const char *fa4_sm100_fwd_unsupported(const fa4_fwd_params *p);
// The launch of params that it can run.
void fa4_sm90_fwd_plan(const fa4_fwd_params *p, const fa4_chip *chip, fa4_plan *plan);
void fa4_sm100_fwd_plan(const fa4_fwd_params *p, const fa4_chip *chip, fa4_plan *plan);

// Plans and launches on the current device.
fa4_status fa4_cuda_fwd(const fa4_fwd_params *p, void *stream);
fa4_status fa4_cuda_launch(const fa4_plan *plan, void *stream);

#ifdef __cplusplus
}
#endif
#endif
