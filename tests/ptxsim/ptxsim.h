// ptxsim: runs PTX for sm_90a and the sm_100 family on a CPU. Public C API; the Python module and fa4_plan's runner use
// it.
#ifndef PTXSIM_H
#define PTXSIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct module ptxsim_module;

// Parses PTX text. On failure returns NULL and leaves the reason ("line 12: unknown instruction: foo.bar") in error.
ptxsim_module *ptxsim_parse(const char *text, char *error, size_t error_size);
void ptxsim_module_free(ptxsim_module *m);

int ptxsim_kernel_count(const ptxsim_module *m);
const char *ptxsim_kernel_name(const ptxsim_module *m, int kernel);
int ptxsim_param_count(const ptxsim_module *m, int kernel);
void ptxsim_param(const ptxsim_module *m, int kernel, int param, size_t *size, size_t *alignment);
size_t ptxsim_static_shared(const ptxsim_module *m, int kernel);
int ptxsim_register_count(const ptxsim_module *m, int kernel);
// Instructions that are not known, one a line, without failing the parse: for the command line.
char *ptxsim_unknown(const char *text);

// Global memory, one for all modules. Host memory is used in place; it is guarded by poison on both sides. poisoned:
// contents count as never written. Address 0 on failure. unregister forgets it.
uint64_t ptxsim_register(void *data, size_t bytes, bool poisoned);
void ptxsim_unregister(uint64_t address);
// Bytes still poisoned in [address, address + bytes).
size_t ptxsim_poisoned(uint64_t address, size_t bytes);
// The host pointer behind a device address range, or NULL.
void *ptxsim_host(uint64_t address, size_t bytes);

// 128 bytes of a tensor map, as cuTensorMapEncodeTiled would take its arguments; NULL or why it refuses.
typedef enum {
    PTXSIM_U8,
    PTXSIM_U16,
    PTXSIM_U32,
    PTXSIM_S32,
    PTXSIM_U64,
    PTXSIM_S64,
    PTXSIM_F16,
    PTXSIM_F32,
    PTXSIM_F64,
    PTXSIM_BF16,
    PTXSIM_F32_FTZ,
    PTXSIM_TF32,
    PTXSIM_TF32_FTZ
} ptxsim_map_type;
const char *ptxsim_tensor_map(unsigned char map[128], ptxsim_map_type type, int rank, uint64_t address,
                              const uint64_t *dims, const uint64_t *strides, const uint32_t *box,
                              const uint32_t *element_strides, int swizzle, bool fill_nan);

typedef enum { PTXSIM_EARLY, PTXSIM_LATE, PTXSIM_RANDOM } ptxsim_schedule;
typedef struct {
    const ptxsim_module *module;
    const char *kernel;
    unsigned grid[3], block[3], cluster[3];
    size_t dynamic_shared;
    const void *params; // the parameter block, laid out by size and alignment
    size_t params_size;
} ptxsim_launch;
typedef struct {
    ptxsim_schedule schedule;
    uint64_t seed;
    bool practice;         // model="practice"
    bool strict_mma_order; // without assumption A1
    bool dependent;        // programmatic dependent launch between consecutive grids
    int threads;           // 0: all cores
    uint64_t max_steps;    // warp-instructions of one grid before it counts as a livelock; 0: the default
} ptxsim_options;

typedef struct ptxsim_report ptxsim_report;
ptxsim_report *ptxsim_run(const ptxsim_launch *grids, int count, const ptxsim_options *options); // one stream, in order
void ptxsim_report_free(ptxsim_report *r);
bool ptxsim_finished(const ptxsim_report *r);
int ptxsim_finding_count(const ptxsim_report *r);
typedef struct {
    const char *kind, *sentence, *where,
        *other; // where: "fwd.cu:120 (PTX 533), CTA 0, warp 3, lane 5"; other: "" or the second place
    int ptx_line, warp, lane, cta;
} ptxsim_finding;
ptxsim_finding ptxsim_finding_at(const ptxsim_report *r, int index);
uint64_t ptxsim_practice_count(const ptxsim_report *r, const char *name); // "P1" .. "P5", "A1"
int ptxsim_class_count(void);
const char *ptxsim_class_name(int klass);
uint64_t ptxsim_executed(const ptxsim_report *r, int klass);                   // lane-instructions of all warps
int ptxsim_report_warps(const ptxsim_report *r);                               // warps of a CTA
uint64_t ptxsim_executed_by_warp(const ptxsim_report *r, int warp, int klass); // summed over CTAs
const char *ptxsim_report_text(const ptxsim_report *r);                        // the whole report, to print

#ifdef __cplusplus
}
#endif
#endif
