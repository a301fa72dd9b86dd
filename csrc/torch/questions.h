// What Python asks: "can you?" before a call, and how often the kernels ran. Compiled into both modules, each with its
// own backends.
#ifndef FA4_TORCH_QUESTIONS_H
#define FA4_TORCH_QUESTIONS_H

#include <Python.h>

namespace fa4_torch
{

// unsupported(backward, arch, dtype, dim, dim_v, mask dtype or "", scale, sizes=None, strides=None, addresses=None):
// None, or why these cannot run. sizes are batch, heads_q, heads_kv, len_q, len_kv (else 1 each); strides those of q,
// k, v, out (else contiguous); addresses those of q, k, v (else aligned).
PyObject *unsupported(PyObject *module, PyObject *args);

extern const char unsupported_doc[];

// calls(): {entry: how often it ran in this process}.
PyObject *calls_made(PyObject *module, PyObject *);

extern const char calls_doc[];

} // namespace fa4_torch

#endif
