// Included before csrc/dispatch.c: plans need neither the CPU's kernels nor the CUDA launch that it points to, so these
// may be missing.
#define PTXSIM_PRAGMA(text) _Pragma(#text)
#define PTXSIM_WEAK(name) PTXSIM_PRAGMA(weak name)
#define FA4_CPU_ISA(isa, host, flags)        \
    PTXSIM_WEAK(fa4_cpu_fwd_##isa)           \
    PTXSIM_WEAK(fa4_cpu_fwd_f64_##isa)       \
    PTXSIM_WEAK(fa4_cpu_bwd_##isa)           \
    PTXSIM_WEAK(fa4_cpu_bwd_f64_##isa)       \
    PTXSIM_WEAK(fa4_cpu_bwd_workspace_##isa) \
    PTXSIM_WEAK(fa4_cpu_bwd_f64_workspace_##isa)
#include "variants.def"
PTXSIM_WEAK(fa4_cuda_fwd)
