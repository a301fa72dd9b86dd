// What dispatch.c and the CPU kernels agree on. Each kernel file is compiled once per instruction set of variants.def.
#ifndef FA4_CPU_KERNELS_H
#define FA4_CPU_KERNELS_H

#include "../fa4.h"

// fa4_cpu_fwd becomes fa4_cpu_fwd_avx2 in the file compiled with -DFA4_CPU_ISA_NAME=avx2.
#define FA4_CPU_PASTE_(symbol, isa) symbol##_##isa
#define FA4_CPU_PASTE(symbol, isa) FA4_CPU_PASTE_(symbol, isa)
#define FA4_CPU_SYMBOL(symbol) FA4_CPU_PASTE(symbol, FA4_CPU_ISA_NAME)

// Params have passed fa4_*_unsupported() and nothing in them is empty but, perhaps, the keys. A status other than
// FA4_OK is FA4_NO_MEMORY. executor is NULL or another way to threads than the calling one.
typedef fa4_status fa4_cpu_fwd_fn(const fa4_fwd_params *p, const fa4_executor *executor);
typedef fa4_status fa4_cpu_bwd_fn(const fa4_bwd_params *p, const fa4_executor *executor);
typedef size_t fa4_cpu_bwd_workspace_fn(const fa4_bwd_params *p);

// The kernels of one instruction set; the _f64 ones take FA4_F64, the others the rest.
typedef struct {
    fa4_cpu_fwd_fn *fwd, *fwd_f64;
    fa4_cpu_bwd_fn *bwd, *bwd_f64;
    fa4_cpu_bwd_workspace_fn *bwd_workspace, *bwd_f64_workspace;
} fa4_cpu_kernels;

// NULL when this machine (processor and operating system) can run the instruction set, else why not. cpuid.c.
const char *fa4_cpu_isa_missing(const char *name);

#endif
