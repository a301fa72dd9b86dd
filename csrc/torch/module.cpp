// The Python module flash_attn4._C. Importing it registers the operators; its functions answer questions about the
// build and the machine, and never see a tensor.
#include <Python.h>

#include "cpu.h"

#include <cstring>
#include <exception>

namespace
{
using namespace fa4_torch;

// [(name, None or why this machine cannot run it), ...], best first.
PyObject *isas(PyObject *, PyObject *)
{
    PyObject *list = PyList_New(0);
    for (int i = 0; list; i++) {
        fa4_cpu_isa isa = fa4_cpu_isa_at(i);
        if (!isa.name) break;
        PyObject *pair = Py_BuildValue("(sz)", isa.name, isa.unavailable);
        if (!pair || PyList_Append(list, pair)) Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

PyObject *isa_in_use(PyObject *, PyObject *)
{
    const char *name = fa4_cpu_isa_in_use();
    if (!name) return PyErr_Format(PyExc_RuntimeError, "%s", fa4_last_error());
    return PyUnicode_FromString(name);
}

PyObject *force_isa(PyObject *, PyObject *args)
{
    const char *name;
    if (!PyArg_ParseTuple(args, "z", &name)) return nullptr;
    if (fa4_cpu_isa_force(name) != FA4_OK) return PyErr_Format(PyExc_ValueError, "%s", fa4_last_error());
    Py_RETURN_NONE;
}

PyObject *calls_made(PyObject *, PyObject *)
{
    PyObject *dict = PyDict_New();
    for (int i = 0; dict && i < CALLS; i++) {
        PyObject *value = PyLong_FromLongLong(calls[i].count.load(std::memory_order_relaxed));
        if (!value || PyDict_SetItemString(dict, calls[i].name, value)) Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

// unsupported(backward, arch, dtype, dim, dim_v, mask, scale): None, or why these cannot run.
PyObject *unsupported(PyObject *, PyObject *args)
{
    static const char *const dtypes[] = {"float16", "bfloat16", "float32", "float64"}; // as fa4_dtype
    static const char *const masks[] = {"", "bool", "float16", "bfloat16", "float32", "float64"};
    int backward, arch;
    const char *dtype, *mask;
    long long dim, dim_v;
    double scale;
    if (!PyArg_ParseTuple(args, "pisLLsd", &backward, &arch, &dtype, &dim, &dim_v, &mask, &scale)) return nullptr;
    int d = 0, m = 0;
    while (d < 4 && strcmp(dtype, dtypes[d])) d++;
    while (m < 6 && strcmp(mask, masks[m])) m++;
    if (d == 4) return PyUnicode_FromFormat("there are no kernels for %s", dtype);
    if (m == 6) return PyUnicode_FromFormat("there are no kernels for a mask of %s", mask);
    fa4_bwd_params params = {};
    params.fwd.batch = params.fwd.heads_q = params.fwd.heads_kv = params.fwd.len_q = params.fwd.len_kv = 1;
    params.fwd.dim = dim;
    params.fwd.dim_v = dim_v;
    params.fwd.lo = FA4_UNBOUNDED_LO;
    params.fwd.hi = FA4_UNBOUNDED_HI;
    params.fwd.scale = scale;
    params.fwd.dtype = (fa4_dtype)d;
    params.fwd.mask_type = (fa4_mask_type)m;
    const char *reason = backward ? fa4_bwd_unsupported(&params, arch) : fa4_fwd_unsupported(&params.fwd, arch);
    if (!reason) Py_RETURN_NONE;
    return PyUnicode_FromString(reason);
}

PyObject *override_sdpa_now(PyObject *, PyObject *on)
{
    int yes = PyObject_IsTrue(on);
    if (yes < 0) return nullptr;
    try {
        override_sdpa(yes);
        return PyBool_FromLong(sdpa_overridden());
    } catch (const std::exception &error) {
        return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
    }
}

PyMethodDef methods[] = {
    {"isas", isas, METH_NOARGS, "[(name, None or why this machine cannot run it), ...], best first."},
    {"isa_in_use", isa_in_use, METH_NOARGS, "Name of the CPU instruction set in use."},
    {"force_isa", force_isa, METH_VARARGS, "Use this CPU instruction set from now on; None: choose again."},
    {"calls", calls_made, METH_NOARGS, "{entry: how often it ran in this process}."},
    {"unsupported", unsupported, METH_VARARGS,
     "(backward, arch, dtype, dim, dim_v, mask dtype or '', scale): None, or why not."},
    {"override_sdpa", override_sdpa_now, METH_O, "Put our kernels under PyTorch's CPU attention, or take them away."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "_C",
                      "Operators and CPU kernels of flash_attn4.",
                      0,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};
} // namespace

PyMODINIT_FUNC PyInit__C()
{
    return PyModule_Create(&module);
}
