#include "questions.h"

#include "call.h"

#include <cstring>

namespace fa4_torch
{

const char unsupported_doc[] = "(backward, arch, dtype, dim, dim_v, mask dtype or '', scale, sizes=None, strides=None, "
                               "addresses=None): None, or why not.";

static int64_t *const END = nullptr;

// The numbers of a tuple to where they belong; false with a Python error when they are others or too few.
static bool read_numbers(PyObject *tuple, int64_t *const *to)
{
    Py_ssize_t count = 0;
    while (to[count] != END) count++;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count) {
        PyErr_Format(PyExc_TypeError, "expected a tuple of %zd numbers", count);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) *to[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    return !PyErr_Occurred();
}

fa4_dtype dtype_named(const char *name)
{
    static const char *const names[] = {"float16", "bfloat16", "float32", "float64"}; // as fa4_dtype
    int d = 0;
    while (d < 4 && strcmp(name, names[d])) d++;
    return (fa4_dtype)d;
}

bool read_call(fa4_fwd_params *p, PyObject *sizes, PyObject *strides, PyObject *addresses)
{
    p->batch = p->heads_q = p->heads_kv = p->len_q = p->len_kv = 1;
    p->lo = FA4_UNBOUNDED_LO;
    p->hi = FA4_UNBOUNDED_HI;
    for (int i = 0; i < 4; i++) {
        p->stride_q[i] = p->stride_k[i] = i < 3 ? p->dim : 1;
        p->stride_v[i] = p->stride_o[i] = i < 3 ? p->dim_v : 1;
    }
    int64_t *const size_of[] = {&p->batch, &p->heads_q, &p->heads_kv, &p->len_q, &p->len_kv, END};
    int64_t *stride_of[17] = {};
    for (int i = 0; i < 16; i++) {
        int64_t *const of[] = {p->stride_q, p->stride_k, p->stride_v, p->stride_o};
        stride_of[i] = of[i / 4] + i % 4;
    }
    if (sizes != Py_None && !read_numbers(sizes, size_of)) return false;
    if (strides != Py_None && !read_numbers(strides, stride_of)) return false;
    int64_t q = 0, k = 0, v = 0;
    int64_t *const address_of[] = {&q, &k, &v, END};
    if (addresses != Py_None && !read_numbers(addresses, address_of)) return false;
    p->q = reinterpret_cast<const void *>(q);
    p->k = reinterpret_cast<const void *>(k);
    p->v = reinterpret_cast<const void *>(v);
    return true;
}

PyObject *unsupported(PyObject *, PyObject *args)
{
    static const char *const masks[] = {"", "bool", "float16", "bfloat16", "float32", "float64"};
    int backward, arch;
    const char *dtype, *mask;
    long long dim, dim_v;
    double scale;
    PyObject *sizes = Py_None, *strides = Py_None, *addresses = Py_None;
    if (!PyArg_ParseTuple(args, "pisLLsd|OOO", &backward, &arch, &dtype, &dim, &dim_v, &mask, &scale, &sizes, &strides,
                          &addresses))
        return nullptr;
    int m = 0;
    while (m < 6 && strcmp(mask, masks[m])) m++;
    if (m == 6) return PyUnicode_FromFormat("there are no kernels for a mask of %s", mask);

    fa4_bwd_params params = {};
    fa4_fwd_params *p = &params.fwd;
    p->dim = dim;
    p->dim_v = dim_v;
    p->scale = scale;
    p->dtype = dtype_named(dtype);
    p->mask_type = (fa4_mask_type)m;
    if (p->dtype > FA4_F64) return PyUnicode_FromFormat("there are no kernels for %s", dtype);
    if (!read_call(p, sizes, strides, addresses)) return nullptr;
    const char *reason = backward ? fa4_bwd_unsupported(&params, arch) : fa4_fwd_unsupported(p, arch);
    if (!reason) Py_RETURN_NONE;
    return PyUnicode_FromString(reason);
}

const char calls_doc[] = "{entry: how often it ran in this process}.";

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

} // namespace fa4_torch
