"""enable_sdpa(): PyTorch's own scaled_dot_product_attention on our kernels, anywhere in the process."""

import threading
import warnings

import torch

from . import _C, ops

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
# Those of csrc/torch/cuda_sdpa.cpp. What it does not run it gives to fa4::_before<name>: the kernel that was there, of
# whose results only the tensors.
_REPLACED_CUDA = {
    "_scaled_dot_product_flash_attention": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, bool "
        "return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor "
        "cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"
    ),
    "_scaled_dot_product_cudnn_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., bool "
        "is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, "
        "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, "
        "Tensor debug_attn_mask)"
    ),
}

_lock = threading.Lock()
_handles = {}  # those that hold the override in place, oldest first, and their fused_encoder
_fastpath = True  # what torch.backends.mha had before the first of them
_told = False  # whether torch has had its say about an override
_before = None  # the library of fa4::_before..., while our kernels are in place on CUDA


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
    """Layout [batch, heads, len, dim]: put torch.nn.functional.scaled_dot_product_attention on our kernels.

    On the CPU every call in the process that PyTorch would give to its flash kernel reaches ours, and on CUDA every
    call for its flash or its cuDNN kernel, from now on and in all threads: names imported earlier,
    torch.nn.MultiheadAttention and the Transformer layers, transformers models, functions compiled earlier, vmap and
    torch.func, forward and backward. What PyTorch gives to its other kernels stays there: dropout, a mask that requires
    grad, sdpa_kernel(SDPBackend.MATH), on the CPU v with another head dim than q, on CUDA float32.

    On CUDA the forward is ours and the gradient PyTorch's own, flash or cuDNN, which takes our results. What our
    kernels refuse there (a mask, strides that tensor copies cannot take, a GPU without kernels) runs on the kernel that
    was there before.

    fused_encoder: leave PyTorch's fused inference path of nn.TransformerEncoder and nn.MultiheadAttention on
        (torch.backends.mha). It has its own attention; off, these layers reach our kernels in eval mode too.

    torch.nn.attention.activate_flash_attention_impl("flash_attn4") does the same.

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
            _override()
            _fastpath = torch.backends.mha.get_fastpath_enabled()
        handle = Handle(_disable)
        _handles[handle] = fused_encoder
        _set_fastpath()
    return handle


# torch.nn.attention.activate_flash_attention_impl("flash_attn4") is enable_sdpa(), and restore_flash_attention_impl(),
# which not every torch has, removes its handle.
if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl("flash_attn4", register_fn=enable_sdpa)


def _disable(handle):
    with _lock:
        if handle not in _handles:
            return
        del _handles[handle]
        if not _handles:
            _restore()
        _set_fastpath()


def _override():
    """All of it, or nothing where something fails."""
    global _before
    try:
        if ops._C_cuda is not None:
            _before = torch.library.Library("fa4", "FRAGMENT")
            for name, schema in _REPLACED_CUDA.items():
                _before.define(f"_before{name}{schema.split('->')[0]}-> ({', '.join(['Tensor'] * 7)})")
                _before.impl(f"_before{name}", _kernel_now(name), "CUDA")
            ops._C_cuda.override_sdpa(True)
        _C.override_sdpa(True)
    except BaseException:
        _restore()
        raise


def _restore():
    global _before
    _C.override_sdpa(False)
    if ops._C_cuda is not None:
        ops._C_cuda.override_sdpa(False)
    if _before is not None:
        _before._destroy()
        _before = None


def _kernel_now(name):
    kernel = torch.library.get_kernel(f"aten::{name}", "CUDA")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)

    def run(*args, **kwargs):
        results = kernel.call_boxed(keys, *args, **kwargs)
        return (*results[:4], *results[6:])

    return run


def _set_fastpath():
    latest = next(reversed(_handles.values()), True)
    torch.backends.mha.set_fastpath_enabled(_fastpath and latest)


def _check_schemas():
    replaced = _REPLACED if ops._C_cuda is None else _REPLACED | _REPLACED_CUDA
    for name, expected in replaced.items():
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
