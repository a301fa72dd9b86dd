// What Python asks: "can you?" before a call, and how often the kernels ran. Compiled into both modules, each with its
// own backends.
#ifndef FA4_TORCH_QUESTIONS_H
#define FA4_TORCH_QUESTIONS_H

#include "../fa4.h"

#include <Python.h>

namespace fa4_torch
{

// The dtype of that name; one past the last where there is none.
fa4_dtype dtype_named(const char *name);

// Fills in a call whose dims are there. sizes are batch, heads_q, heads_kv, len_q, len_kv (None: 1 each); strides those
// of q, k, v, out (None: contiguous); addresses those of q, k, v (None: aligned). False with a Python error.
bool read_call(fa4_fwd_params *p, PyObject *sizes, PyObject *strides, PyObject *addresses);

// unsupported(backward, arch, dtype, dim, dim_v, mask dtype or "", scale, sizes=None, strides=None, addresses=None):
// None, or why these cannot run.
PyObject *unsupported(PyObject *module, PyObject *args);

extern const char unsupported_doc[];

// calls(): {entry: how often it ran in this process}.
PyObject *calls_made(PyObject *module, PyObject *);

extern const char calls_doc[];

} // namespace fa4_torch

#endif
