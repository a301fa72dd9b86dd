// Included before csrc/dispatch.c: plans need neither the CPU's kernels nor the CUDA launch that it points to, so these
// may be missing.
#define FA4_PRAGMA(text) _Pragma(#text)
#define FA4_WEAK(name) FA4_PRAGMA(weak name)
#define FA4_CPU_ISA(isa, host, flags)     \
    FA4_WEAK(fa4_cpu_fwd_##isa)           \
    FA4_WEAK(fa4_cpu_fwd_f64_##isa)       \
    FA4_WEAK(fa4_cpu_bwd_##isa)           \
    FA4_WEAK(fa4_cpu_bwd_f64_##isa)       \
    FA4_WEAK(fa4_cpu_bwd_workspace_##isa) \
    FA4_WEAK(fa4_cpu_bwd_f64_workspace_##isa)
#include "../variants.def"
FA4_WEAK(fa4_cuda_fwd)
