"""The functions that users call: what they meant, checked, and given to the operator or to PyTorch."""

import dataclasses
import functools
import math
import os
import warnings

import torch
import torch.nn.functional as F

from . import _C, gradient, masks, ops
from .sdpa import Handle

# ---- falling back to PyTorch

_MODES = ("warn", "silent", "error")
_mode = os.environ.get("FA4_FALLBACK") or "warn"
if _mode not in _MODES:
    raise ValueError(f"FA4_FALLBACK is {_mode!r}, and it must be one of {', '.join(_MODES)}")
_announced = set()


def set_fallback(mode):
    """What scaled_dot_product_attention does with a call that our kernels cannot run.

    mode: "warn" (the default): PyTorch runs it, and a warning says why, once for each reason; "silent": PyTorch runs
        it; "error": NotImplementedError says why. The environment variable FA4_FALLBACK sets it for a process.

    Returns a handle: handle.remove(), or `with set_fallback(...):`, sets what was there before.
    Raises ValueError for another mode.
    """
    global _mode
    if mode not in _MODES:
        raise ValueError(f"mode is {mode!r}, and it must be one of {', '.join(map(repr, _MODES))}")
    before, _mode = _mode, mode
    return Handle(lambda _: _restore(before))


def _restore(mode):
    global _mode
    _mode = mode


def _announce(reason):
    if _mode == "error":
        raise NotImplementedError(f"flash_attn4 cannot run this, and fallback is forbidden: {reason}")
    if _mode == "warn" and not torch.compiler.is_compiling() and reason not in _announced:
        _announced.add(reason)
        warnings.warn(f"flash_attn4: PyTorch runs this call: {reason}", RuntimeWarning, stacklevel=3)


# ---- checks that both functions make


def _describe(names, values):
    return ", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))


def _check_are_tensors(q, k, v, names):
    for name, tensor in zip(names, (q, k, v), strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, and it is {type(tensor).__name__}")


def _check_agree(q, k, v, names):
    if not q.device == k.device == v.device:
        found = _describe(names, (q.device, k.device, v.device))
        raise ValueError(f"{', '.join(names)} must be on one device: {found}")
    if not q.dtype == k.dtype == v.dtype:
        found = _describe(names, (q.dtype, k.dtype, v.dtype))
        raise ValueError(f"{', '.join(names)} must have one dtype: {found}")


def _is_finite(name, scale):
    try:
        return scale is None or math.isfinite(scale)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} must be a number, and it is {scale!r:.100}") from None


def _autocast(q, *tensors):
    """Tensors as torch.autocast would give them to SDPA."""
    dtype = ops.autocast_dtype(q.device.type)
    return (q, *tensors) if dtype is None else tuple(ops.cast(tensor, dtype) for tensor in (q, *tensors))


def _derives_otherwise():
    """Whether torch.func.grad, jvp, forward mode or the like is active. They do not see an operator's autograd rule: to
    forward mode, say, its result is a constant. vmap sees it."""
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    if torch.compiler.is_compiling():
        return True
    stack = torch._C._functorch.get_interpreter_stack()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in stack)


# ---- calls like one before: looking at all there is takes longer than the rest of a small call

_fine = set()  # the looks of calls that the operator runs as they are
_FINE_MOST = 4096


def _looks(function, q, k, v, scale):
    """All that the checks of a function look at in a call without a mask, but for causal, to be found in _fine; None of
    a call to look at closely."""
    if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is torch.Tensor:
        return None
    if type(scale) not in (float, int, type(None)) or _derives_otherwise():
        return None
    try:
        shapes = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()
        alignment = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
    except RuntimeError:  # nested or sparse, or without memory of its own
        return None
    if ops.autocast_dtype(q.device.type) is not None:
        return None
    kinds = q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    wants_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return function, shapes, alignment, kinds, wants_grad, scale


def _remember(looks):
    if len(_fine) >= _FINE_MOST:
        _fine.clear()
    _fine.add(looks)


# ---- SDPA


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """Layout [..., heads, len, dim]: torch.nn.functional.scaled_dot_product_attention on our kernels.

    out = softmax(scale * query keyᵀ + attn_mask) value, with PyTorch's signature, meaning and gradients.

    query: [..., len_q, dim], of float16, bfloat16, float32 or float64, with any strides.
    key: [..., len_kv, dim]; value: [..., len_kv, dim_v]; the dtype and device of query. Leading dimensions broadcast.
    attn_mask: broadcasts to [..., len_q, len_kv]; bool (True: takes part in attention), or numbers of query's dtype or
        float32 that are added to the scaled scores.
    dropout_p: probability of dropping a weight, applied whenever it is not 0, training or not. PyTorch runs it.
    is_causal: query i sees keys 0..i, aligned at the top left whatever the lengths; not together with attn_mask.
    scale: a finite number; None: 1 / sqrt(dim).
    enable_gqa: dimension -3 is heads, and that of key and value may divide query's.

    Returns [..., len_q, dim_v], strides in the order of query's. A query that sees no key gives 0.

    On a GPU: a boolean mask that is no more than padding on the right, causal or a window, of all heads, runs on our
    kernels; the host looks at it, and waits for the GPU, once for each mask tensor and each change of it that torch
    counts: not one through mask.data, DLPack, torch.distributed or the replay of a CUDA graph: give a new tensor
    then. Tensors whose strides or head dim are no multiples of 16 bytes are copied first. explain() says both.

    What our kernels cannot run (dropout_p > 0, a mask that requires grad, a head dim over 256, a device without
    kernels, nested tensors) goes to PyTorch's function, with a warning once for each reason: see set_fallback.
    Under torch.autocast, query, key, value and a mask of numbers are cast as PyTorch casts them.

    Raises ValueError when dtypes, devices or shapes do not fit, TypeError for what is no tensor, and what PyTorch's
    function raises for what it refuses.

    Method: FlashAttention-4, arXiv 2603.05451.
    """
    looks = None
    if attn_mask is None and dropout_p == 0:
        looks = _looks("gqa" if enable_gqa else "sdpa", query, key, value, scale)
    if looks in _fine:
        return ops.run(query, key, value, None, None, None, 0 if is_causal else None, scale)[0]
    _check_are_tensors(query, key, value, ("query", "key", "value"))
    call = functools.partial(
        F.scaled_dot_product_attention,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    if _derives_otherwise():
        return call(query, key, value, attn_mask)
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    _check_agree(query, key, value, ("query", "key", "value"))
    how = _how(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(how, str):
        _announce(how)
        return call(query, key, value, attn_mask)
    shapes, kernel = how
    leading = shapes[4]
    if looks and leading is None and not kernel.copies:
        _remember(looks)
    out, _ = kernel.run(*shapes[:3])
    return out if leading is None else out.reshape(*leading, out.shape[-2], out.shape[-1])


def _how(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    """What _sdpa_shapes and _kernel find for a call of SDPA; or why PyTorch must run it, as a sentence.

    enable_gqa None: as the heads ask."""
    reason = _sdpa_reason(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if reason:
        return reason
    if enable_gqa is None:
        enable_gqa = min(query.dim(), key.dim(), value.dim()) >= 3 and query.shape[-3] != key.shape[-3]
    shapes = _sdpa_shapes(query, key, value, attn_mask, enable_gqa)
    if isinstance(shapes, str):
        return shapes
    kernel = _kernel(*shapes[:4], is_causal, scale)
    return kernel if isinstance(kernel, str) else (shapes, kernel)


def _sdpa_reason(query, key, value, attn_mask, dropout_p, is_causal, scale):
    """Why only PyTorch can answer (or refuse) this call, before its shapes are looked at; or None."""
    if query.is_nested or key.is_nested or value.is_nested:
        return "a tensor is nested"
    if dropout_p != 0:
        return "dropout_p is not 0"
    if attn_mask is not None:
        if is_causal:
            return "attn_mask and is_causal are both given"
        if not isinstance(attn_mask, torch.Tensor):
            return "attn_mask is no tensor"
        if type(attn_mask).__module__ == "torch.nn.attention.bias":
            return f"attn_mask is a {type(attn_mask).__name__}"
        if attn_mask.requires_grad and torch.is_grad_enabled():
            return "attn_mask requires grad"
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            return f"attn_mask is {attn_mask.dtype} with a query of {query.dtype}"
        if attn_mask.device != query.device:
            raise ValueError(f"attn_mask must be on query's device {query.device}, and it is on {attn_mask.device}")
    if not _is_finite("scale", scale):
        return f"scale is {scale}"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.layout != torch.strided:
            return f"{name} is {tensor.layout}"
        if tensor.dim() < 2:
            return f"{name} has {tensor.dim()} dimensions"
        if tensor.shape[-1] == 0:
            return f"{name} has head dim 0"
    return None


_ALL, _CAUSAL = masks.Keys(None, None, None), masks.Keys(None, None, 0)


@dataclasses.dataclass
class _Kernel:
    """How a call reaches the operator."""

    mask: torch.Tensor | None
    keys: masks.Keys  #: the band, and lengths of keys
    scale: float | None
    copies: dict  #: {"q": why the kernels take a copy of it, ...}
    mask_read: bool = False  #: whether keys are what was found of a mask

    def notes(self):
        """What explain() says of it."""
        found = [f"{name} is copied first: {why}" for name, why in self.copies.items()]
        if self.mask_read:
            words = ["lengths of keys"] if self.keys.len_kv is not None else []
            words += [f"key - query >= {self.keys.lo}"] if self.keys.lo is not None else []
            words += [f"key - query <= {self.keys.hi}"] if self.keys.hi is not None else []
            found.append(f"attn_mask is read as {', '.join(words) or 'nothing hidden'}")
        return tuple(found)

    def name(self, q, k, v):
        """The GPU kernel that runs it."""
        return ops.kernel_of(self.copies, q, k, v, self.keys.lo, self.keys.hi)

    def run(self, q, k, v):
        rest = (self.mask, self.keys.len_kv, self.keys.lo, self.keys.hi, self.scale)
        return ops.fwd_by_copies(self.copies, q, k, v, *rest) if self.copies else ops.run(q, k, v, *rest)


def _kernel(q, k, v, mask, is_causal, scale):
    """How the operator runs this call of SDPA, or why it cannot."""
    keys = _CAUSAL if is_causal else _ALL
    read = mask is not None and ops.arch_of(q.device)
    if read:
        keys = masks.keys_of(mask, q.shape[0], q.shape[2])
        if isinstance(keys, str):
            return keys
        mask = None
    reason, copies = _kernel_reason(q, k, v, mask, scale, keys.len_kv)
    return reason or _Kernel(mask, keys, scale, copies, bool(read))


def _kernel_reason(q, k, v, mask, scale, len_kv=None):
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return ops.unsupported_with_copies(q, k, v, mask, scale, wants_grad, len_kv)


def _sdpa_shapes(query, key, value, attn_mask, enable_gqa):
    """query, key, value and attn_mask as the operator takes them, and the leading dimensions of the result (None: it is
    already right); or why PyTorch must run this."""
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"head dims of query and key differ: {query.shape[-1]} and {key.shape[-1]}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"lengths of key and value differ: {key.shape[-2]} and {value.shape[-2]}")
    if enable_gqa:
        if min(query.dim(), key.dim(), value.dim()) < 3:
            return "enable_gqa needs a dimension of heads"
        if key.shape[-3] != value.shape[-3]:
            return "key and value differ in heads"
        if key.shape[-3] == 0 or query.shape[-3] % key.shape[-3]:
            heads = f"{query.shape[-3]} and {key.shape[-3]}"
            raise ValueError(f"query's heads must be a whole multiple of key's and value's: {heads}")
    if query.dim() == key.dim() == value.dim() == 4 and (
        query.shape[:2] == key.shape[:2] == value.shape[:2]
        or (enable_gqa and query.shape[0] == key.shape[0] == value.shape[0])
    ):
        if attn_mask is not None:
            _check_mask(attn_mask, (*query.shape[:-1], key.shape[-2]))
            if attn_mask.dim() > 4:
                return f"attn_mask has {attn_mask.dim()} dimensions"
        return query, key, value, attn_mask, None

    # Any rank: leading dimensions broadcast, all but the last of them become the batch.
    kept = 3 if enable_gqa else 2
    try:
        leading = torch.broadcast_shapes(query.shape[:-kept], key.shape[:-kept], value.shape[:-kept])
    except RuntimeError:
        shapes = _describe(("query", "key", "value"), (tuple(x.shape) for x in (query, key, value)))
        raise ValueError(f"leading dimensions do not broadcast: {shapes}") from None
    batch, heads = (leading, (query.shape[-3],)) if enable_gqa else (leading[:-1], leading[-1:])

    def as_4d(tensor):
        heads_of = tensor.shape[-3:-2] if enable_gqa else heads
        whole = tensor.expand(*batch, *heads_of, *tensor.shape[-2:])
        return whole.reshape(math.prod(batch), *(heads_of or (1,)), *tensor.shape[-2:])

    result = (*batch, *heads)
    if attn_mask is not None:
        expected = (*result, query.shape[-2], key.shape[-2])
        _check_mask(attn_mask, expected)
        attn_mask = attn_mask.expand(expected).reshape(math.prod(batch), *(heads or (1,)), *expected[-2:])
    return as_4d(query), as_4d(key), as_4d(value), attn_mask, result


def _check_mask(mask, expected):
    rank = len(expected)
    if mask.dim() > rank or any(
        n != 1 and n != m for n, m in zip(reversed(mask.shape), reversed(expected), strict=False)
    ):
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)}, "
            f"which does not broadcast to {tuple(expected)} [..., len_q, len_kv]"
        )


# ---- the flash packages' function


def flash_attn_func(
    q,
    k,
    v,
    *,
    causal=False,
    window_size=(None, None),
    softmax_scale=None,
    return_lse=False,
    dropout_p=0.0,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=True,
):
    """Layout [batch, len, heads, dim]: attention with the flash-attention packages' words.

    out = softmax(softmax_scale * q kᵀ) v over the keys that a query sees, with gradients for q, k, v.

    q: [batch, len_q, heads_q, dim], of float16, bfloat16, float32 or float64, with any strides; dim from 1 to 256.
    k: [batch, len_kv, heads_kv, dim]; v: [batch, len_kv, heads_kv, dim_v]; heads_kv divides heads_q.
    causal: the last query sees all keys, each earlier one a key less: aligned at the bottom right, unlike SDPA's
        is_causal. Query i sees key j when j <= i + len_kv - len_q.
    window_size: (left, right): a query also sees only keys at most left before and right behind its own place,
        i + len_kv - len_q. None or -1 leaves a side open; None alone both. causal makes right 0.
    softmax_scale: a finite number; None: 1 / sqrt(dim).
    return_lse: return (out, lse).
    deterministic: accepted; on the CPU the gradient always is, and on CUDA, where PyTorch's kernels compute it, under
        torch.use_deterministic_algorithms(True).
    dropout_p, softcap, alibi_slopes: not implemented; the values given here are the only ones.

    Returns out [batch, len_q, heads_q, dim_v], strides in the order of q's, and with return_lse also lse, the natural
    log of the sum of exponentials, [batch, heads_q, len_q] in float32 (float64 for float64). A query that sees no key
    gives 0 and -inf. Under torch.autocast, q, k and v are cast as for SDPA.

    Raises ValueError when a shape, dtype, device or number does not fit, TypeError for what is no tensor, and
    NotImplementedError for what no kernel here can do; each says what came and what is allowed.

    Method: FlashAttention-4, arXiv 2603.05451.
    """
    for name, value, neutral in (
        ("dropout_p", dropout_p, 0),
        ("softcap", softcap, 0),
        ("alibi_slopes", alibi_slopes, None),
    ):
        if value is not None and value is not neutral and value != neutral:
            raise NotImplementedError(f"{name} is not implemented: it must be {neutral}")
    looks, copies = _looks("flash", q, k, v, softmax_scale), {}
    fine = looks in _fine
    if not fine:
        _check_are_tensors(q, k, v, ("q", "k", "v"))
        q, k, v = _autocast(q, k, v)
        _check_agree(q, k, v, ("q", "k", "v"))
        _check_flash_shapes(q, k, v)
        if not _is_finite("softmax_scale", softmax_scale):
            raise ValueError(f"softmax_scale must be finite, and it is {softmax_scale}")
    lo, hi = _flash_band(causal, window_size, q.shape[1], k.shape[1])
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if not fine:
        reason, copies = _kernel_reason(q, k, v, None, softmax_scale)
        if reason:
            raise NotImplementedError(reason)
        if looks and not copies:
            _remember(looks)
    if _derives_otherwise():
        out, lse = _by_formula(q, k, v, lo, hi, softmax_scale)
    else:
        out, lse = _Kernel(None, masks.Keys(None, lo, hi), softmax_scale, copies).run(q, k, v)
    out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _check_flash_shapes(q, k, v):
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.is_nested or tensor.layout != torch.strided:
            raise NotImplementedError(f"{name} must be a dense tensor, and it is nested or {tensor.layout}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be [batch, len, heads, dim], and it has {tensor.dim()} dimensions")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"batch of q, k and v differ: {q.shape[0]}, {k.shape[0]} and {v.shape[0]}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"lengths of k and v differ: {k.shape[1]} and {v.shape[1]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"heads of k and v differ: {k.shape[2]} and {v.shape[2]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"head dims of q and k differ: {q.shape[3]} and {k.shape[3]}")
    if (k.shape[2] == 0 and q.shape[2] != 0) or (k.shape[2] != 0 and q.shape[2] % k.shape[2] != 0):
        raise ValueError(f"q's heads must be a whole multiple of k's and v's: {q.shape[2]} and {k.shape[2]}")


def _flash_band(causal, window_size, len_q, len_kv):
    """lo and hi of the band; None is an open side."""
    sides = (None, None) if window_size is None else window_size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise ValueError(f"window_size must be None or (left, right), and it is {window_size!r}")
    for name, side in zip(("left", "right"), sides, strict=True):
        if side is not None and (not isinstance(side, (int, torch.SymInt)) or side < -1):
            raise ValueError(f"window_size: {name} must be None, -1 or a whole number from 0 on, and it is {side!r}")
    # lo and hi are int64, and no tensor is as long as that.
    left, right = (None if side in (None, -1) or (type(side) is int and side >> 62) else side for side in sides)
    if causal:
        right = 0
    offset = len_kv - len_q
    return None if left is None else offset - left, None if right is None else offset + right


def _by_formula(q, k, v, lo, hi, scale):
    """out and lse by PyTorch's own operators, which every transform of torch.func knows."""
    distance = torch.arange(k.shape[2], device=q.device) - torch.arange(q.shape[2], device=q.device).unsqueeze(1)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if lo is not None:
        seen = seen & (distance >= lo)
    if hi is not None:
        seen = seen & (distance <= hi)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = q.to(compute) @ k.to(compute).transpose(2, 3) * scale
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    sees = seen.any(-1, keepdim=True)  # a row that sees no key: weights 0, where softmax has NaN
    p = torch.softmax(scores.masked_fill(~sees, 0), -1).masked_fill(~seen, 0)
    return (p @ v.to(compute)).to(q.dtype), lse


# ---- what would run


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What explain() found. str() and print() give it as sentences."""

    backend: str  #: one of backends(); "pytorch" when our kernels cannot run the call
    isa: str | None  #: the CPU's instruction set that would run it
    kernel: str | None  #: the GPU kernel that would run it, by its name in csrc/variants.def
    reason: str | None  #: why our kernels cannot run it
    not_faster: dict  #: {faster backend or instruction set: why it is not used}
    notes: tuple = ()  #: what is done first: copies that the kernels need, and what a mask was found to be

    def __str__(self):
        if self.reason:
            lines = [f"PyTorch would run this: {self.reason}."]
        else:
            lines = [f"flash_attn4 would run this on {self.backend} with {self.isa or self.kernel}."]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join([*lines, *(f"  not {name}: {why}" for name, why in self.not_faster.items())])


def explain(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=None):
    """Layout [..., heads, len, dim]: which backend and kernel would run this call of SDPA, and why no faster one.

    Takes what scaled_dot_product_attention takes (enable_gqa None: as the heads of key ask), runs nothing, and returns
    an Explanation to print. Raises what scaled_dot_product_attention raises for arguments that do not fit. Call it
    outside of compiled functions: torch.compile cannot trace it.
    """
    _check_are_tensors(query, key, value, ("query", "key", "value"))
    if _derives_otherwise():
        return Explanation("pytorch", None, None, "torch.func or forward mode differentiates it", {})
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    _check_agree(query, key, value, ("query", "key", "value"))
    how = _how(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(how, str):
        return Explanation("pytorch", None, None, how, {})
    shapes, kernel = how
    arch = ops.arch_of(query.device)
    if arch:
        kernels = next(kernels for kernels, chips in _CHIPS.items() if arch in chips)
        return Explanation(f"sm_{kernels}", None, kernel.name(*shapes[:3]), None, {}, kernel.notes())
    used = _C.isa_in_use()
    not_faster = {name: why for name, why in backends().items() if name != "cpu"}
    for name, why in _C.isas():
        if name == used:
            break
        not_faster[name] = why or "another instruction set was asked for"
    if not any(name.startswith("sm_") and why is None for name, why in not_faster.items()):
        return Explanation("cpu", used, None, None, not_faster)
    return Explanation("cpu", used, None, None, {n: w or "the tensors are on the CPU" for n, w in not_faster.items()})


# ---- what is there

_CHIPS = {90: (90,), 100: (100, 103)}  # kernels, and the compute capabilities that run them


def backends():
    """{"cpu": None or why it cannot run, "sm_90": ..., "sm_100": ...}: each machine that has kernels, and why it is not
    there; then the GPUs here that have none, and why. "sm_100" are compute capabilities 10.0 and 10.3."""
    found = {"cpu": ops.ask(False, ops.CPU, "float32", 64, 64)}
    gpus = range(torch.cuda.device_count())
    here = {10 * major + minor for major, minor in map(torch.cuda.get_device_capability, gpus)}
    for arch, chips in _CHIPS.items():
        reason = ops.ask(False, arch, "float16", 64, 64)
        if torch.version.cuda is None:
            reason = "the installed torch is one without CUDA"
        elif reason is None and not here.intersection(chips):
            reason = "there is no such GPU here" if gpus else "torch finds no CUDA device"
        found[f"sm_{arch}"] = reason
    for arch in sorted(here.difference(*_CHIPS.values())):
        found[f"sm_{arch}"] = ops.ask(False, arch, "float16", 64, 64)
    return found


def cpu_isa():
    """Name of the CPU instruction set in use, one of those that cpu_isas() has."""
    return _C.isa_in_use()


def cpu_isas():
    """{name: None, or why this machine cannot run it}, best first."""
    return dict(_C.isas())


def call_counts():
    """{entry: how often it ran in this process}: "fwd" and "bwd" are the operators, "sdpa_fwd" and "sdpa_bwd" are
    PyTorch's own calls that enable_sdpa() put on our kernels, "sdpa_math" (on the CPU) and "sdpa_before" (on CUDA)
    those that they could not run."""
    counts = _C.calls()
    on_cuda = ops._C_cuda.calls() | {"bwd": gradient.calls} if ops._C_cuda else {}
    return {name: count + on_cuda.get(name, 0) for name, count in counts.items()}
