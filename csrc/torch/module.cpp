// The Python module flash_attn4._C. Importing it registers the operators; its functions answer questions about the
// build and the machine, and never see a tensor.
#include <Python.h>

#include "cpu.h"
#include "questions.h"

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
    {"calls", calls_made, METH_NOARGS, calls_doc},
    {"unsupported", unsupported, METH_VARARGS, unsupported_doc},
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
