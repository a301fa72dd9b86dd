"""enable_sdpa(): PyTorch's own scaled_dot_product_attention on our CPU kernels, anywhere in the process."""

import threading
import warnings

import torch

from . import _C

# The operators that csrc/torch/sdpa.cpp replaces, and the schemas that it was written for.
_REPLACED = {
    "_scaled_dot_product_flash_attention_for_cpu": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, "
        "float? scale=None) -> (Tensor output, Tensor logsumexp)"
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, bool "
        "is_causal, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
}

_lock = threading.Lock()
_handles = {}  # those that hold the override in place, oldest first, and their fused_encoder
_fastpath = True  # what torch.backends.mha had before the first of them
_told = False  # whether torch has had its say about an override


class Handle:
    """Undoes what returned it: by remove(), or at the end of a with block. Removing twice does nothing."""

    def __init__(self, undo):
        self._undo = undo

    def remove(self):
        """Undo it."""
        undo, self._undo = self._undo, None
        if undo:
            undo(self)

    def __enter__(self):
        if self._undo is None:
            raise RuntimeError("this handle was removed: nothing would be on in the block")
        return self

    def __exit__(self, *_):
        self.remove()


def enable_sdpa(*, fused_encoder=False):
    """Layout [batch, heads, len, dim]: put torch.nn.functional.scaled_dot_product_attention on our CPU kernels.

    Every call in the process that PyTorch would give to its flash kernel on the CPU reaches ours, from now on and in
    all threads: names imported earlier, torch.nn.MultiheadAttention and the Transformer layers, transformers models,
    functions compiled earlier, vmap and torch.func, forward and backward. What PyTorch gives to its math path stays
    there: dropout, a mask that requires grad, v with another head dim than q, sdpa_kernel(SDPBackend.MATH). GPUs are
    not affected.

    fused_encoder: leave PyTorch's fused inference path of nn.TransformerEncoder and nn.MultiheadAttention on
        (torch.backends.mha). It has its own attention; off, these layers reach our kernels in eval mode too.

    Returns a handle: handle.remove(), or `with enable_sdpa():`, undoes it. Calls nest; the kernels are PyTorch's again
    when the last handle is removed; until then fused_encoder is that of the latest one. PyTorch's dispatcher exchanges
    kernels without a lock: call this, and remove the handle, while no other thread is inside attention.

    Raises NotImplementedError when this torch's operators are not those that we replace.
    """
    global _fastpath
    with _lock:
        if not _handles:
            _check_schemas()
            _hear_torch_out()
            _C.override_sdpa(True)
            _fastpath = torch.backends.mha.get_fastpath_enabled()
        handle = Handle(_disable)
        _handles[handle] = fused_encoder
        _set_fastpath()
    return handle


def _disable(handle):
    with _lock:
        if handle not in _handles:
            return
        del _handles[handle]
        if not _handles:
            _C.override_sdpa(False)
        _set_fastpath()


def _set_fastpath():
    latest = next(reversed(_handles.values()), True)
    torch.backends.mha.set_fastpath_enabled(_fastpath and latest)


def _check_schemas():
    for name, expected in _REPLACED.items():
        operator = getattr(torch.ops.aten, name, None)
        found = operator and str(operator.default._schema)
        if found != f"aten::{name}{expected}":
            raise NotImplementedError(f"torch {torch.__version__} has another operator than we replace: {found}")


def _hear_torch_out():
    """torch tells of the first override in a process, from C++ past Python's warning filters when it comes from C++:
    give it one from Python, of an operator that nobody calls, where it can be silenced."""
    global _told
    if _told:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own, other = (torch.library.Library("fa4", "FRAGMENT") for _ in range(2))
        own.define("_overridden() -> ()")
        for library in (own, other):
            library.impl("_overridden", lambda: None, "CPU", allow_override=True)
        other._destroy()
        own._destroy()
    _told = True
