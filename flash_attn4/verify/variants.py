"""Calls that reach every kernel of the forward, and their answers in float64."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import build

RUNS = 3  # of each call: the same bits


@dataclasses.dataclass(frozen=True)
class Call:
    name: str
    dtype: torch.dtype
    dim: int
    dim_v: int
    len_q: int
    len_kv: int
    batch: int = 1
    heads: int = 2
    heads_kv: int = 2
    lo: int | None = None
    hi: int | None = None
    scale: float | None = None
    lengths: tuple[int, ...] | None = None
    alone: int = 0  # the first so many queries in a call of their own must have the same bits

    def empty(self, device="cpu"):
        """q, k, v, and the lengths or None."""
        shapes = (self.heads, self.len_q, self.dim), (self.heads_kv, self.len_kv, self.dim)
        shapes += ((self.heads_kv, self.len_kv, self.dim_v),)
        lengths = None if self.lengths is None else torch.tensor(self.lengths, dtype=torch.int32, device=device)
        return *(torch.empty(self.batch, *shape, dtype=self.dtype, device=device) for shape in shapes), lengths

    def tensors(self):
        """The same with numbers in [-2, 2). Past a batch's length k is NaN and v infinite: neither may show."""
        generator = torch.Generator().manual_seed(self.len_q + self.len_kv)
        q, k, v, lengths = self.empty()
        for x in (q, k, v):
            x.copy_(4 * torch.rand(x.shape, generator=generator) - 2)
        for b, n in enumerate(self.lengths or ()):
            k[b, :, n:], v[b, :, n:] = math.nan, math.inf
        return q, k, v, lengths

    @property
    def how(self):
        return {"scale": self.dim**-0.5 if self.scale is None else self.scale, "lo": self.lo, "hi": self.hi}


def head_dims(root: Path, capability: int) -> list[tuple[int, int]]:
    """Of the kernels that the chip's forward has, as their names say: ..._d128, ..._d192_v128."""
    found = (re.search(r"_d(\d+)(?:_v(\d+))?", name) for name in build.kernels(root, capability))
    return sorted({(int(m[1]), int(m[2] or m[1])) for m in found})


def calls(root: Path, capability: int) -> list[Call]:
    """Of each head dim and dtype: what the masks, lengths and scales ask of a kernel; short and long."""
    found = []
    for dim, dim_v in head_dims(root, capability):
        for dtype, label in ((torch.bfloat16, "bf16"), (torch.float16, "f16")):

            def add(name, len_q, len_kv, dim=dim, dim_v=dim_v, dtype=dtype, label=label, **more):
                found.append(Call(f"{label}_{dim}_{dim_v}_{name}", dtype, dim, dim_v, len_q, len_kv, **more))

            add("one_block", 128, 128)
            add("full", 200, 300)
            add("causal", 260, 520, hi=260, heads=4, heads_kv=1, batch=2)
            add("window", 300, 300, lo=-130, hi=20)
            add("lengths", 150, 400, batch=4, lengths=(0, 129, 257, 400))
            add("negative_scale", 150, 300, scale=-0.2)
            add("one_query", 1, 1000, heads=8, heads_kv=2)
            add("long", 300, 8200, hi=7900)
            add("many_queries", 1000, 900, alone=200)  # in pairs of CTAs, where there are such kernels; alone not
            add("many_tiles", 1300, 1300, batch=2, heads=16, heads_kv=4, hi=0)
    return found


def exact(call: Call, q, k, v, lengths):
    """o and lse by the formula in float64, and the largest sum of absolute products."""
    group = call.heads // call.heads_kv
    k, v = (x.double().nan_to_num(0, 0, 0).repeat_interleave(group, 1) for x in (k, v))
    seen = visible(call, lengths)
    scores = (q.double() @ k.transpose(2, 3) * call.how["scale"]).masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1))
    return p @ v, lse, float((p @ v.abs()).max())


def visible(call: Call, lengths):
    distance = torch.arange(call.len_kv) - torch.arange(call.len_q)[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if call.lo is not None:
        seen &= distance >= call.lo
    if call.hi is not None:
        seen &= distance <= call.hi
    return seen if lengths is None else seen & (torch.arange(call.len_kv) < lengths[:, None, None, None])


def pytorch_error(call: Call, q, k, v, lengths, o):
    """Of PyTorch's math path in the call's dtype, where it is finite."""
    k, v = (x.nan_to_num(0, 0, 0) for x in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(
            q, k, v, visible(call, lengths), scale=call.how["scale"], enable_gqa=call.heads != call.heads_kv
        )
    difference = (theirs.double() - o).abs()
    return float(difference[difference.isfinite()].max())


def kernel_of(device, call: Call) -> str:
    """The kernel that the chip's plan picks."""
    return device.kernel_of(*call.empty("meta"), **call.how)


def check(device, call: Call) -> dict:
    """Runs the call: its errors, what is allowed, and under "wrong" None or a sentence."""
    q, k, v, lengths = call.tensors()
    runs = [device.attention(q, k, v, lengths, **call.how) for _ in range(RUNS)]
    o, lse = runs[0]
    right, right_lse, magnitude = exact(call, q, k, v, lengths)
    eps = torch.finfo(call.dtype).eps
    # Twice PyTorch's own error and what rounding alone may do; of the log-sum-exp also what a cubic does to sums.
    allowed = (
        2 * pytorch_error(call, q, k, v, lengths, right) + 2 * eps * float(right.abs().max()) + eps / 2 * magnitude
    )
    seen = right_lse.isfinite()
    allowed_lse = 9e-5 + 4e-6 * float(right_lse[seen].abs().max()) if seen.any() else 0.0
    error = float((o.double() - right).abs().max())
    lse_error = float((lse.double() - right_lse)[seen].abs().max()) if seen.any() else 0.0
    found = {
        "error": error if math.isfinite(error) else None,
        "allowed": allowed,
        "lse_error": lse_error if math.isfinite(lse_error) else None,
        "lse_allowed": allowed_lse,
        "wrong": None,
    }
    if not o.isfinite().all():
        bad = (~o.isfinite()).nonzero()
        place = bad[0].tolist()
        found["wrong"] = f"{len(bad)} elements of the output are not finite, the first at [b, h, i, d] = {place}"
    elif not error <= allowed:
        at = (o.double() - right).abs().argmax()
        place = [int(i) for i in torch.unravel_index(at, o.shape)]
        found["wrong"] = f"the output is wrong, most at [b, h, i, d] = {place}"
    elif not torch.equal(lse.double()[~seen], right_lse[~seen]):
        found["wrong"] = "the log-sum-exp of a row without keys is not -inf"
    elif not lse_error <= allowed_lse:
        found["wrong"] = "the log-sum-exp is wrong"
    elif not all(torch.equal(o, other[0]) and torch.equal(lse, other[1]) for other in runs[1:]):
        found["wrong"] = "runs of the same call differ in their bits"
    elif call.alone:
        few = device.attention(q[:, :, : call.alone], k, v, lengths, **call.how)
        if not all(torch.equal(x[:, :, : call.alone], y) for x, y in zip(runs[0], few, strict=True)):
            found["wrong"] = f"the first {call.alone} queries have other bits in a call of their own"
    return found
