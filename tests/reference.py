"""The formula in float64, hashed inputs, and the one rule of accuracy that all tests use."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def hashed(*shapes, dtype=torch.float32, device="cpu", seed=0):
    """A tensor for each shape, about normal (a sum of four uniforms), from the splitmix64 hash of each element's index:
    the same bits on every machine and in tests/c."""
    tensors = []
    for i, shape in enumerate(shapes):
        n = 1
        for size in shape:
            n *= size
        x = torch.arange(n, dtype=torch.int64) + ((seed * 64 + i + 1) << 40)
        # splitmix64 in wrapping int64; logical shifts by masking.
        x = x * -7046029254386353131
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
        x = x ^ ((x >> 31) & 0x1FFFFFFFF)
        parts = [((x >> s) & 0xFFFF).double() for s in (0, 16, 32, 48)]
        normal = (sum(parts) / 65536 - 2) * (12 / 4) ** 0.5
        tensors.append(normal.reshape(shape).to(dtype).to(device))
    return tensors


def visible(len_q, len_kv, *, mask=None, lo=None, hi=None, device="cpu"):
    """Which keys each query sees by the band and a boolean mask: [..., len_q, len_kv]."""
    distance = torch.arange(len_kv, device=device)[None, :] - torch.arange(len_q, device=device)[:, None]
    seen = torch.ones(len_q, len_kv, dtype=torch.bool, device=device)
    if lo is not None:
        seen = seen & (distance >= lo)
    if hi is not None:
        seen = seen & (distance <= hi)
    return seen & mask if mask is not None and mask.dtype == torch.bool else seen


def attention(q, k, v, *, mask=None, lo=None, hi=None, scale=None, len_kv=None):
    """softmax(scale q kT + mask) v and its log-sum-exp by the formula, in float64: (out, lse). Differentiable.

    q, k, v [batch, heads, len, dim]; rows without a visible key give 0 and -inf, and no gradient.
    """
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.double()
    seen = visible(q.shape[2], k.shape[2], mask=mask, lo=lo, hi=hi, device=q.device)
    if len_kv is not None:
        seen = seen & (torch.arange(k.shape[2], device=q.device) < len_kv[:, None, None, None])
    scores = scores.masked_fill(~seen, float("-inf"))
    empty = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0), -1).masked_fill(empty.squeeze(-1), float("-inf"))
    return weights @ v, lse


def max_error(ours, exact) -> float:
    """The largest absolute difference; 0 for empty tensors, inf when one is finite where the other is not."""
    if ours.numel() == 0:
        return 0.0
    difference = (ours.double() - exact.double()).abs()
    same = (ours.double() == exact.double()) | (ours.isnan() & exact.isnan())
    difference = difference.masked_fill(same, 0.0)
    return float(torch.nan_to_num(difference, nan=float("inf")).max())


def floor_of(exact, dtype) -> float:
    """Two roundings of the largest value of the reference."""
    return 2 * torch.finfo(dtype).eps * float(exact.abs().max()) if exact.numel() else 0.0


def rounding_floor(q, k, v, exact, **how) -> float:
    """2 eps max|exact| + c eps max(sum of weight * |v|): what rounding alone may do to the sums of a row."""
    eps = torch.finfo(q.dtype).eps
    c = 8.0 if q.dtype in (torch.float32, torch.float64) else 0.5
    sums, _ = attention(q, k, v.abs(), **how)
    return floor_of(exact, q.dtype) + c * eps * (float(sums.max()) if sums.numel() else 0.0)


def math_path(q, k, v, *, mask=None, lo=None, hi=None, scale=None, len_kv=None):
    """PyTorch's own math path in the dtype of the inputs: the yardstick."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = visible(q.shape[2], k.shape[2], mask=mask, lo=lo, hi=hi, device=q.device)
    if len_kv is not None:
        seen = seen & (torch.arange(k.shape[2], device=q.device) < len_kv[:, None, None, None])
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, float("-inf"))
    if mask is not None and mask.dtype != torch.bool:
        bias = bias + mask.to(q.dtype)
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def accurate(out, q, k, v, **how):
    """Assert that out is the attention of q, k, v, and return it.

    The rule: the error against float64 is at most twice that of PyTorch's math path in the same dtype, plus the
    rounding floor; where that path is not finite and the reference is, the floor alone.
    """
    with torch.no_grad():
        exact, _ = attention(q, k, v, **how)
        theirs = max_error(math_path(q, k, v, **how), exact)
        floor = rounding_floor(q, k, v, exact, **how)
        allowed = floor + (2 * theirs if theirs < float("inf") else 0.0)
        error = max_error(out, exact)
    assert out.shape == exact.shape, f"shape {tuple(out.shape)}, expected {tuple(exact.shape)}"
    assert error <= allowed, (
        f"error {error:.3g}, allowed {allowed:.3g} (PyTorch's math path {theirs:.3g}, floor {floor:.3g})"
    )
    return out


def gradients(function, q, k, v, dout, dlse=None):
    """dq, dk, dv of function(q, k, v) -> (out, lse) for these gradients of its results."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = function(*leaves)
    results, grads = [out], [dout.to(out.dtype)]
    if dlse is not None:
        results, grads = [out, lse], [grads[0], dlse.to(lse.dtype)]
    return torch.autograd.grad(results, leaves, grads)


def gradient_floor(q, k, v, exact, dout, dlse=None, *, scale=None, **how):
    """As rounding_floor, for each of dq, dk, dv: the sums of the formula of the gradient with absolute values."""
    eps = torch.finfo(q.dtype).eps
    c = 8.0 if q.dtype in (torch.float32, torch.float64) else 0.5
    with torch.no_grad():
        group = q.shape[1] // k.shape[1]
        factor = abs(q.shape[-1] ** -0.5 if scale is None else scale)
        aq, ak, av, adout = (x.double().abs() for x in (q, k, v, dout))
        identity = torch.eye(k.shape[2], dtype=torch.float64, device=q.device).expand(*k.shape[:2], -1, -1)
        weights, _ = attention(q, k, identity, scale=scale, **how)
        wide_k, wide_v = ak.repeat_interleave(group, 1), av.repeat_interleave(group, 1)
        absolute = weights @ wide_v
        delta = (adout * absolute).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta + dlse.double().abs()[..., None]
        ds = weights * (adout @ wide_v.transpose(-1, -2) + delta) * factor

        def over_group(x):
            return x.unflatten(1, (k.shape[1], group)).sum(2)

        sums = [ds @ wide_k, over_group(ds.transpose(-1, -2) @ aq), over_group(weights.transpose(-1, -2) @ adout)]
    return [
        floor_of(e, q.dtype) + c * eps * (float(a.max()) if a.numel() else 0.0)
        for e, a in zip(exact, sums, strict=True)
    ]


def accurate_gradients(ours, q, k, v, dout, dlse=None, **how):
    """Assert that ours = (dq, dk, dv) are the gradients, by the rule of accurate()."""
    exact = gradients(lambda *x: attention(*x, **how), *(x.double() for x in (q, k, v)), dout.double(), dlse)

    def yardstick(*x):
        out = math_path(*x, **how)
        return out, attention(*x, **how)[1]

    theirs = gradients(yardstick, q, k, v, dout, dlse)
    floors = gradient_floor(q, k, v, exact, dout, dlse, **how)
    for name, a, e, t, floor, like in zip("qkv", ours, exact, theirs, floors, (q, k, v), strict=True):
        assert a.shape == like.shape
        assert a.dtype == like.dtype
        other = max_error(t, e)
        allowed = floor + (2 * other if other < float("inf") else 0.0)
        error = max_error(a, e)
        assert error <= allowed, (
            f"d{name}: error {error:.3g}, allowed {allowed:.3g} (PyTorch {other:.3g}, floor {floor:.3g})"
        )


def scattered(x, *, order=None, offset=0, gap=0, last=1, fill=float("nan")):
    """The values of x in a storage that is full of `fill` wherever x is not.

    order: the dimensions from the outermost to the innermost in memory; offset: elements before the first; gap:
    elements between rows; last: the innermost stride.
    """
    order = list(range(x.dim())) if order is None else list(order)
    strides, step = [0] * x.dim(), last
    for place, d in enumerate(reversed(order)):
        strides[d] = step
        step = step * max(x.shape[d], 1) + (gap if place == 0 else 0)
    storage = torch.full((offset + step + 64,), fill, dtype=x.dtype, device=x.device)
    view = storage.as_strided(x.shape, strides, offset)
    view.copy_(x)
    return view
