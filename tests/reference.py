"""Short forms of what conftest.py has, for tests that make many small calls, and tensors in poisoned storage."""

from __future__ import annotations

import conftest
import torch
from conftest import Reference, assert_within_bound, max_error

__all__ = ["accurate", "accurate_gradients", "attention", "exact_gradients", "hashed", "max_error", "scattered"]


def hashed(*shapes, dtype=torch.float32, seed=0):
    """A tensor for each shape."""
    return [conftest.hashed(*shape, seed=8 * seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def attention(q, k, v, *, mask=None, **how):
    """out and lse by the formula, in float64."""
    exact = Reference(q, k, v, attn_mask=mask, **how)
    return exact.out, exact.lse


def exact_gradients(q, k, v, dout=None, dlse=None, *, mask=None, **how):
    """dq, dk, dv by the formula, in float64; dout is 1 everywhere by default."""
    if dout is None:
        dout = torch.ones(*q.shape[:3], v.shape[3])
    exact = Reference(q, k, v, attn_mask=mask, dout=dout, dlse=dlse, **how)
    return exact.dq, exact.dk, exact.dv


def accurate(out, q, k, v, *, mask=None, **how):
    """Assert that out is the attention of q, k, v within the bound, and return it."""
    assert_within_bound({"out": out}, q, k, v, attn_mask=mask, **how)
    return out


def accurate_gradients(ours, q, k, v, dout, dlse=None, *, mask=None, **how):
    """Assert that ours are dq, dk, dv within the bound."""
    named = dict(zip(("dq", "dk", "dv"), ours, strict=True))
    assert_within_bound(named, q, k, v, attn_mask=mask, dout=dout, dlse=dlse, **how)


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
