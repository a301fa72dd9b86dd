"""The operators fa4::fwd and fa4::bwd as torch sees them: fakes, gradients, vmap, autocast. The only Python that
spells fa4::; what they compute is in csrc, and csrc/torch/cpu.cpp has their schemas.

    torch.ops.fa4.fwd(q, k, v, attn_mask=None, len_kv=None, lo=None, hi=None, scale=None) -> (out, lse)
    torch.ops.fa4.bwd(dout, dlse, q, k, v, out, lse, attn_mask, len_kv, lo, hi, scale) -> (dq, dk, dv)

q is [batch, heads_q, len_q, dim], k [batch, heads_kv, len_kv, dim], v [batch, heads_kv, len_kv, dim_v], any strides.
Query i sees key j when lo <= j - i <= hi (None: open), j < len_kv[batch] (int32), and attn_mask (bool, or numbers added
to the scaled scores; broadcast to [batch, heads_q, len_q, len_kv]) allows it. scale None is 1 / sqrt(dim). out has
strides in the order of q's, lse is the natural log of the sum of exponentials, [batch, heads_q, len_q].
"""

import importlib.util
import math
import operator

import torch

from . import _C, gradient

# A wheel built for CPU-only torch has no _C_cuda; one that is there and broken must say so.
_C_cuda = None
if torch.version.cuda and importlib.util.find_spec("flash_attn4._C_cuda"):
    from . import _C_cuda

fwd = torch.ops.fa4.fwd
bwd = torch.ops.fa4.bwd
_fwd, _bwd = fwd.default, bwd.default

CPU = 0  # FA4_ARCH_CPU


def run(q, k, v, attn_mask=None, len_kv=None, lo=None, hi=None, scale=None):
    """fa4::fwd. Where nothing wants a gradient it passes by autograd's rule, whose Python takes most of the time."""
    wants_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if wants_grad or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return fwd(q, k, v, attn_mask, len_kv, lo, hi, scale)
    with torch._C._AutoDispatchBelowAutograd():
        return _fwd(q, k, v, attn_mask, len_kv, lo, hi, scale)


# ---- what can run


_archs = {}  # of the CUDA devices that have been asked for: torch takes microseconds to say


def arch_of(device):
    """What the C API calls this device: CPU, or 10 * major + minor of a GPU's compute capability; None: neither."""
    if device.type in ("cpu", "meta"):
        return CPU
    if device.type != "cuda":
        return None
    if torch.compiler.is_compiling() or device.index is None:
        return _arch(device)
    if device not in _archs:
        _archs[device] = _arch(device) if torch.cuda.device_count() else None  # without a GPU: a fake tensor's
    return _archs[device]


def _arch(device):
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def unsupported(q, k, v, attn_mask=None, scale=None, backward=False, len_kv=None):
    """None when fa4::fwd (with backward: its gradient too) can run this call, else why not, as a sentence.

    Whether shapes fit together is another question. While compiling for a GPU, sizes and strides are not looked at."""
    arch = arch_of(q.device)
    if arch is None:
        is_fake = q.device.type == "cuda"
        return "torch finds no CUDA device" if is_fake else f"there are no kernels for the device {q.device.type}"
    mask = "" if attn_mask is None else _name(attn_mask.dtype)
    layout = () if arch == CPU or torch.compiler.is_compiling() else _layout(q, k, v)
    dim, dim_v = operator.index(q.shape[-1]), operator.index(v.shape[-1])  # plain numbers while compiling, too
    ours = backward and arch == CPU
    reason = ask(ours, arch, _name(q.dtype), dim, dim_v, mask, 1.0 if scale is None else scale, *layout)
    return gradient.unsupported(len_kv) if backward and not ours and reason is None else reason


def unsupported_with_copies(q, k, v, attn_mask=None, scale=None, backward=False, len_kv=None):
    """What unsupported says when fwd_by_copies makes the copies that the call needs, and which: why_copied."""
    reason = unsupported(q, k, v, attn_mask, scale, backward, len_kv)
    arch, compiling = arch_of(q.device), torch.compiler.is_compiling()
    copies = why_copied(q, k, v) if arch and (reason or compiling) else {}
    if not copies:
        return reason, {}
    mask = "" if attn_mask is None else _name(attn_mask.dtype)
    if compiling:
        dim, dim_v = (_filled_up(operator.index(x.shape[-1])) for x in (q, v))
        layout = ()
    else:
        q, k, v = _shadows(copies, q, k, v)
        dim, dim_v, layout = q.shape[3], v.shape[3], _layout(q, k, v)
    still = ask(False, arch, _name(q.dtype), dim, dim_v, mask, 1.0 if scale is None else scale, *layout)
    still = still or (gradient.unsupported(len_kv) if backward else None)
    return (still and (reason or still)), copies


def kernel_of(copies, q, k, v, lo=None, hi=None):
    """The name of the GPU kernel that runs fwd_by_copies of these, which can run; the row of the README's table."""
    arch = arch_of(q.device)
    if copies:
        q, k, v = _shadows(copies, q, k, v)
    return _C_cuda.kernel(arch, _name(q.dtype), q.shape[3], v.shape[3], lo, hi, *_layout(q, k, v))


def _shadows(copies, q, k, v):
    """Tensors without memory that are like q, k and v after the copies."""
    shadows = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (q, k, v))
    return _with_copies(copies, *shadows)


def _layout(q, k, v):
    """Sizes, strides and addresses of a call as ask takes them."""
    out_stride = dense_like((*q.shape[:3], v.shape[3]), q.stride())
    sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    return sizes, (*q.stride(), *k.stride(), *v.stride(), *out_stride), tuple(map(_address, (q, k, v)))


def _address(tensor):
    """Where a tensor starts; 0 of one without memory: a fake, or one of vmap."""
    try:
        return tensor.data_ptr() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else 0
    except RuntimeError:
        return 0


def ask(backward, arch, dtype, dim, dim_v, mask="", scale=1.0, *sizes_strides_addresses):
    """fa4_fwd_unsupported or fa4_bwd_unsupported for calls of this kind: None, or the reason."""
    module = _C if arch == CPU or _C_cuda is None else _C_cuda
    return module.unsupported(backward, arch, dtype, dim, dim_v, mask, scale, *sizes_strides_addresses)


# What torch.compiler.assume_constant_result sets, without its import of torch._dynamo, which takes longer than ours.
ask._dynamo_marked_constant = True


def _name(dtype):
    return str(dtype).removeprefix("torch.")


# ---- what GPU kernels take by a copy: tensor copies (TMA) move units of 16 bytes


_UNIT = 8  # 16-bit elements


def _filled_up(dim):
    return -(-dim // _UNIT) * _UNIT


def why_copied(q, k, v):
    """{"q": why the GPU kernels take a copy of it, ...}, without those that they take as they are.

    The same rule as in csrc/cuda/maps.c, and a test compares them. The result has v's head dim, and no gaps."""
    if arch_of(q.device) == CPU:
        return {}
    reasons = {name: _why_copied(tensor) for name, tensor in (("q", q), ("k", k), ("v", v))}
    if reasons["v"] is None and v.shape[3] % _UNIT:
        reasons["v"] = f"its head dim {v.shape[3]} is no multiple of {_UNIT}"
    return {name: why for name, why in reasons.items() if why}


def _why_copied(tensor):
    size, stride = tensor.shape, tensor.stride()
    if size[3] > 1 and stride[3] != 1:
        return f"its head dim has stride {stride[3]}, not 1"
    for d, name in ((2, "row"), (1, "head"), (0, "batch")):
        repeats = stride[d] == 0 and name != "row"
        if size[d] > 1 and not repeats and (stride[d] == 0 or stride[d] % _UNIT or stride[d] >= (1 << 39)):
            return f"its {name} stride {stride[d]} is no positive multiple of {_UNIT} below 2^39"
    if not torch.compiler.is_compiling() and _address(tensor) % (2 * _UNIT):
        return f"it does not start at a multiple of {2 * _UNIT} bytes"
    return None


def copied(tensor):
    """A copy that tensor copies take: dimensions in the same order, but for the head dim, which is the innermost and is
    filled up with zeros to a multiple of 8. A batch or head that repeats does so in the copy."""
    stride = tensor.stride()
    once = tensor
    for d in (0, 1):
        if stride[d] == 0:
            once = once.narrow(d, 0, min(1, once.shape[d]))
    order = [*_outermost_first(stride[:3]), 3]
    more = _filled_up(tensor.shape[3]) - tensor.shape[3]
    once = once.permute(order)
    if more:
        dense = torch.nn.functional.pad(once, (0, more))
    else:
        dense = once.clone(memory_format=torch.contiguous_format)
    back = [order.index(d) for d in range(4)]
    return dense.permute(back).expand(*tensor.shape[:3], dense.shape[3])


def _with_copies(names, q, k, v):
    if q.shape[3] % _UNIT and ("q" in names or "k" in names):
        names = {*names, "q", "k"}  # both are filled up
    return tuple(copied(x) if name in names else x for name, x in zip("qkv", (q, k, v), strict=True))


def fwd_by_copies(names, q, k, v, attn_mask=None, len_kv=None, lo=None, hi=None, scale=None):
    """fa4::fwd with copies of those of q, k, v that names has."""
    dim, dim_v = q.shape[3], v.shape[3]
    q, k, v = _with_copies(names, q, k, v)
    scale = 1 / math.sqrt(dim) if scale is None else scale
    out, lse = run(q, k, v, attn_mask, len_kv, lo, hi, scale)
    return out if out.shape[3] == dim_v else out[..., :dim_v].clone(), lse


# ---- fakes


def _outermost_first(stride):
    """Dimensions by stride, the largest first. By hand: torch.compile sorts by no stride that it does not know."""
    order = list(range(len(stride)))
    for d in range(1, len(stride)):
        while d > 0 and stride[order[d - 1]] < stride[order[d]]:
            order[d - 1], order[d] = order[d], order[d - 1]
            d -= 1
    return order


def dense_like(size, stride):
    """Strides of a new tensor without gaps whose dimensions are in the order of these strides; contiguous when one of
    them is 0 (expanded). csrc/torch/call.cpp has the same rule."""
    expanded = any(n > 1 and step == 0 for n, step in zip(size, stride, strict=True))
    order = list(range(4)) if expanded else _outermost_first(stride)
    dense, step = [0] * 4, 1
    for d in reversed(order):
        dense[d] = step
        step = step * size[d] if size[d] > 1 else step
    return dense


def _empty_dense(like, *size):
    return like.new_empty_strided(size, dense_like(size, like.stride()))


def _check_inputs(q, k, v, **others):
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        torch._check(tensor.dim() == 4, lambda n=name, t=tensor: f"flash_attn4: {n} has {t.dim()} dimensions, not 4")
        torch._check(tensor.dtype == q.dtype, lambda n=name, t=tensor: f"flash_attn4: {n} is {t.dtype}, q is {q.dtype}")
    for name, tensor in (("k", k), ("v", v), *others.items()):
        if tensor is not None:
            message = f"flash_attn4: {name} is on {tensor.device}, q on {q.device}"
            torch._check(tensor.device == q.device, lambda message=message: message)
    torch._check(k.shape[0] == q.shape[0], lambda: "flash_attn4: k and q differ in batch")
    torch._check(k.shape[3] == q.shape[3], lambda: "flash_attn4: k and q differ in head dim")
    for d, what in enumerate(("batch", "heads", "len_kv")):
        torch._check(v.shape[d] == k.shape[d], lambda what=what: f"flash_attn4: v and k differ in {what}")


@torch.library.register_fake("fa4::fwd")
def _(q, k, v, attn_mask=None, len_kv=None, lo=None, hi=None, scale=None):
    _check_inputs(q, k, v, attn_mask=attn_mask, len_kv=len_kv)
    batch, heads, len_q, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _empty_dense(q, batch, heads, len_q, v.shape[3]), q.new_empty((batch, heads, len_q), dtype=lse_dtype)


@torch.library.register_fake("fa4::bwd")
def _(dout, dlse, q, k, v, out, lse, attn_mask=None, len_kv=None, lo=None, hi=None, scale=None):
    _check_inputs(q, k, v, attn_mask=attn_mask, len_kv=len_kv, dout=dout, dlse=dlse, out=out, lse=lse)
    return _empty_dense(q, *q.shape), _empty_dense(k, *k.shape), _empty_dense(v, *v.shape)


@torch.library.impl("fa4::bwd", "CUDA")
def _(dout, dlse, q, k, v, out, lse, attn_mask=None, len_kv=None, lo=None, hi=None, scale=None):
    if attn_mask is not None:
        raise NotImplementedError("flash_attn4: on CUDA there is no gradient with attn_mask")
    _check_gradient(q, k, v, None, len_kv, scale)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise RuntimeError(f"flash_attn4: {name} has {tensor.dim()} dimensions, and it must have 4")
    (batch, heads, length, dim), (heads_kv, length_kv), dim_v = q.shape, k.shape[1:3], v.shape[3]
    _check_like("k", k, q, (batch, heads_kv, length_kv, dim), q.dtype)
    _check_like("v", v, q, (batch, heads_kv, length_kv, dim_v), q.dtype)
    _check_like("dout", dout, q, (batch, heads, length, dim_v), q.dtype)
    _check_like("out", out, q, (batch, heads, length, dim_v), q.dtype)
    _check_like("lse", lse, q, (batch, heads, length), torch.float32)
    if dlse is not None:
        _check_like("dlse", dlse, q, (batch, heads, length), torch.float32)
    if heads % heads_kv if heads_kv else heads:
        raise RuntimeError(
            f"flash_attn4: the heads of q must be a multiple of those of k and v: {heads} and {heads_kv}"
        )
    if scale is not None and not abs(scale) <= torch.finfo(torch.float32).max:
        raise RuntimeError(f"flash_attn4: scale must be finite, in float32 too: {scale}")
    gradient.calls += 1
    grads = gradient.backward(dout, dlse, q, k, v, out, lse, lo, hi, scale)
    return tuple(_as_dense(grad, like) for grad, like in zip(grads, (q, k, v), strict=True))


def _check_like(name, tensor, q, shape, dtype):
    if tensor.shape != torch.Size(shape):
        raise RuntimeError(f"flash_attn4: {name} has shape {list(tensor.shape)}, and it must be {list(shape)}")
    if tensor.dtype != dtype:
        raise RuntimeError(f"flash_attn4: {name} is {_name(tensor.dtype)}, and it must be {_name(dtype)}")
    if tensor.device != q.device:
        raise RuntimeError(f"flash_attn4: {name} is on {tensor.device}, q on {q.device}")


def _as_dense(grad, like):
    """grad with the strides that the fake promises."""
    stride = dense_like(like.shape, like.stride())
    if all(n == 1 or a == b for n, a, b in zip(grad.shape, grad.stride(), stride, strict=True)):
        return grad
    return grad.new_empty_strided(grad.shape, stride).copy_(grad)


# ---- gradients


def _check_gradient(q, k, v, attn_mask, len_kv, scale):
    """Raises when a call that the forward ran has no gradient."""
    if q.is_cuda:
        reason = gradient.unsupported(len_kv)
    else:
        reason = unsupported(q, k, v, attn_mask, scale, backward=True)
    if reason:
        raise NotImplementedError(f"flash_attn4: no gradient: {reason}")


def _setup_context(ctx, inputs, output):
    q, k, v, attn_mask, len_kv, ctx.lo, ctx.hi, ctx.scale = inputs
    if ctx.needs_input_grad[3]:
        raise NotImplementedError("flash_attn4: attn_mask requires grad, and there is no gradient for a mask")
    _check_gradient(q, k, v, attn_mask, len_kv, ctx.scale)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, attn_mask, len_kv, *output)


def _backward(ctx, dout, dlse):
    q, k, v, attn_mask, len_kv, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 8
    if dout is None:
        dout = torch.zeros_like(out)
    grads = _bwd(dout, dlse, q, k, v, out, lse, attn_mask, len_kv, ctx.lo, ctx.hi, ctx.scale)
    return (*grads, None, None, None, None, None)


torch.library.register_autograd("fa4::fwd", _backward, setup_context=_setup_context)


def _no_second_gradient(ctx, *grads):
    raise NotImplementedError("flash_attn4: the gradient of fa4::bwd (a second derivative) is not implemented")


torch.library.register_autograd("fa4::bwd", _no_second_gradient)


# ---- vmap: the mapped dimension becomes part of the batch


def _fold(tensor, dim, mapped):
    """[mapped * batch, ...] of a tensor that has the mapped dimension at dim, or nowhere (None)."""
    if tensor is None:
        return None
    tensor = tensor.expand(mapped, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return tensor.flatten(0, 1)


def _fold_mask(mask, dim, mapped, q, q_dim):
    if mask is None:
        return None
    mask = mask.expand(mapped, *mask.shape) if dim is None else mask.movedim(dim, 0)
    mask = mask.reshape(mapped, *[1] * (5 - mask.dim()), *mask.shape[1:])
    batch = q.shape[:q_dim] + q.shape[q_dim + 1 :] if q_dim is not None else q.shape
    return mask.expand(mapped, batch[0], *mask.shape[2:]).flatten(0, 1)


def _unfold(mapped, *tensors):
    return tuple(tensor.unflatten(0, (mapped, -1 if tensor.shape[0] else 0)) for tensor in tensors)


@torch.library.register_vmap("fa4::fwd")
def _(info, in_dims, q, k, v, attn_mask=None, len_kv=None, lo=None, hi=None, scale=None):
    n = info.batch_size
    dims = dict(zip(("q", "k", "v", "mask", "len"), (*in_dims, None, None), strict=False))
    mask = _fold_mask(attn_mask, dims["mask"], n, q, dims["q"])
    q, k, v = _fold(q, dims["q"], n), _fold(k, dims["k"], n), _fold(v, dims["v"], n)
    results = _fwd(q, k, v, mask, _fold(len_kv, dims["len"], n), lo, hi, scale)
    return _unfold(n, *results), (0, 0)


@torch.library.register_vmap("fa4::bwd")
def _(info, in_dims, dout, dlse, q, k, v, out, lse, attn_mask=None, len_kv=None, lo=None, hi=None, scale=None):
    n = info.batch_size
    names = ("dout", "dlse", "q", "k", "v", "out", "lse", "mask", "len")
    dims = dict(zip(names, (*in_dims, None, None), strict=False))
    mask = _fold_mask(attn_mask, dims["mask"], n, q, dims["q"])
    values = (dout, dlse, q, k, v, out, lse)
    folded = [_fold(value, dims[name], n) for name, value in zip(names, values, strict=False)]
    grads = _bwd(*folded, mask, _fold(len_kv, dims["len"], n), lo, hi, scale)
    return _unfold(n, *grads), (0, 0, 0)


# ---- autocast: as SDPA, to the dtype that the user chose


def autocast_dtype(device_type):
    """The dtype that autocast wants on this device now, or None."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast(tensor, dtype):
    """As autocast casts an argument: floating point, and not float64."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


_fragment = torch.library.Library("fa4", "FRAGMENT")


def _register_autocast(device_type, key):
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def with_autocast(q, k, v, attn_mask=None, *more):
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return _fwd(cast(q, dtype), cast(k, dtype), cast(v, dtype), cast(attn_mask, dtype), *more)

    _fragment.impl("fwd", with_autocast, key)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")


# ---- what the override of SDPA (csrc/torch/sdpa.cpp) calls for what the kernels refuse: plain matrix products, some
# rows of scores at a time. Strides are those of PyTorch's own CPU flash kernel.

_ROWS = 128


def _grouped(tensor, heads_kv):
    """[batch, heads_kv, heads in a group, ...] in the dtype to compute in."""
    tensor = tensor.double() if tensor.dtype == torch.float64 else tensor.float()
    return tensor.unflatten(1, (heads_kv, -1))


def _row_blocks(q, k, attn_mask, is_causal, scale):
    """For some rows at a time: their slice, and their scores [batch, heads_kv, heads in a group, rows, len_kv]."""
    heads_kv, len_q, len_kv = k.shape[1], q.shape[2], k.shape[2]
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    q, k = _grouped(q, heads_kv), _grouped(k, heads_kv)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(q.shape[0], heads_kv * q.shape[2], len_q, len_kv).unflatten(1, (heads_kv, -1))
    for begin in range(0, len_q, _ROWS):
        rows = slice(begin, min(begin + _ROWS, len_q))
        scores = q[..., rows, :] @ k.transpose(-2, -1) * scale
        if attn_mask is not None:
            mask = attn_mask[..., rows, :]
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if is_causal:
            i = torch.arange(rows.start, rows.stop).unsqueeze(1)
            scores = scores.masked_fill(torch.arange(len_kv) > i, -math.inf)
        yield rows, scores


def _weights(scores, lse):
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1))


@torch.library.impl("fa4::_sdpa_math", "CPU")
def _(q, k, v, attn_mask, is_causal, scale):
    batch, heads, len_q, _ = q.shape
    values = _grouped(v, k.shape[1])
    out = torch.empty_like(q)
    lse = values.new_empty(batch, len_q, heads).transpose(1, 2)
    for rows, scores in _row_blocks(q, k, attn_mask, is_causal, scale):
        some = torch.logsumexp(scores, -1)
        lse[:, :, rows] = some.flatten(1, 2)
        out[:, :, rows] = (_weights(scores, some) @ values).flatten(1, 2)
    return out, lse


@torch.library.impl("fa4::_sdpa_math_backward", "CPU")
def _(dout, q, k, v, out, lse, attn_mask, is_causal, scale):
    heads_kv = k.shape[1]
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    queries, keys, values = _grouped(q, heads_kv), _grouped(k, heads_kv), _grouped(v, heads_kv)
    douts, logs = _grouped(dout, heads_kv), _grouped(lse, heads_kv)
    delta = (douts * _grouped(out, heads_kv)).sum(-1, keepdim=True)
    dq = torch.empty_like(queries)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    for rows, scores in _row_blocks(q, k, attn_mask, is_causal, scale):
        p = _weights(scores, logs[..., rows])
        ds = p * (douts[..., rows, :] @ values.transpose(-2, -1) - delta[..., rows, :]) * factor
        dq[..., rows, :] = ds @ keys
        dk += (ds.transpose(-2, -1) @ queries[..., rows, :]).sum(2, keepdim=True)
        dv += (p.transpose(-2, -1) @ douts[..., rows, :]).sum(2, keepdim=True)
    return tuple(
        grad.flatten(1, 2).transpose(1, 2).to(q.dtype, memory_format=torch.contiguous_format, copy=True).transpose(1, 2)
        for grad in (dq, dk, dv)
    )
