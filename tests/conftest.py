"""What the tests share: inputs from a hash, an fp64 reference, and the one accuracy bound."""

import math
import os

# Inductor's disk caches do not know that a kernel was overridden, nor that a fake changed.
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flash_attn4
from flash_attn4 import _C, interface

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True)
def nothing_announced_yet():
    """What goes to PyTorch is said once for each reason in a process: each test may expect to be told. Nor is a call
    known from another test, which may have been told of another chip."""
    interface._announced.clear()
    interface._fine.clear()


def cuda_missing():
    """Why our kernels cannot run on a GPU here; None when they can."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return flash_attn4.explain(*(torch.empty(1, 1, 1, 64, dtype=torch.float16, device="cuda"),) * 3).reason


@pytest.fixture(params=[name for name, _ in _C.isas()])
def isa(request):
    """Each instruction set of the CPU kernels that this machine can run, in use."""
    reason = dict(_C.isas())[request.param]
    if reason:
        pytest.skip(f"{request.param}: {reason}")
    _C.force_isa(request.param)
    yield request.param
    _C.force_isa(None)


def hashed(*shape, seed=0, dtype=torch.float32, device="cpu", spread=2.0):
    """Numbers in [-spread, spread) from splitmix64, the same bits as C makes them: element i of the tensor, in
    row-major order, is (z >> 40) * 2**-23 - 1 times spread, z the (seed * 2**32 + i + 1)-th output of the generator
    that starts at 0. Rounded to dtype at the end."""
    n = math.prod(shape)
    with np.errstate(over="ignore"):
        z = (np.uint64(seed) * np.uint64(1 << 32) + np.arange(1, n + 1, dtype=np.uint64)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    unit = (z >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0
    return torch.from_numpy(unit * spread).reshape(shape).to(dtype).to(device)


# Whether torch says through the stable ABI why a call of it failed.
SAYS_WHY = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def hashed_qkv(
    len_q, len_kv, *, batch=2, heads=2, heads_kv=None, dim=64, dim_v=None, dtype=torch.float32, device="cpu", seed=0,
    requires_grad=False,
):  # fmt: skip
    """q, k, v as [batch, heads, len, dim]."""
    heads_kv = heads if heads_kv is None else heads_kv
    dim_v = dim if dim_v is None else dim_v
    shapes = ((heads, len_q, dim), (heads_kv, len_kv, dim), (heads_kv, len_kv, dim_v))
    return tuple(
        hashed(batch, *shape, seed=3 * seed + i, dtype=dtype, device=device).requires_grad_(requires_grad)
        for i, shape in enumerate(shapes)
    )


def band(len_q, len_kv, lo=None, hi=None, device="cpu"):
    """Bool [len_q, len_kv]: query i sees key j when lo <= j - i <= hi; None is an open side."""
    distance = torch.arange(len_kv, device=device) - torch.arange(len_q, device=device).unsqueeze(1)
    seen = torch.ones(len_q, len_kv, dtype=torch.bool, device=device)
    if lo is not None:
        seen &= distance >= lo
    if hi is not None:
        seen &= distance <= hi
    return seen


def full_mask(q, k, attn_mask=None, len_kv=None, lo=None, hi=None):
    """All that hides keys as one bool mask that broadcasts to [batch, heads, len_q, len_kv], and what is added."""
    seen = band(q.shape[2], k.shape[2], lo, hi, q.device)
    if len_kv is not None:
        seen = seen & (torch.arange(k.shape[2], device=q.device) < len_kv[:, None, None, None])
    if attn_mask is None:
        return seen, None
    if attn_mask.dtype == torch.bool:
        return seen & attn_mask, None
    return seen, attn_mask


class Reference:
    """Attention and its gradient by the formula, in float64: out, lse, and with dout dq, dk, dv. magnitude has, for
    each, the largest of the same sums taken with absolute values."""

    def __init__(self, q, k, v, *, attn_mask=None, len_kv=None, lo=None, hi=None, scale=None, dout=None, dlse=None):
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        seen, added = full_mask(q, k, attn_mask, len_kv, lo, hi)
        q, k, v = (x.detach().double() for x in (q, k, v))
        heads_kv = k.shape[1]
        group = q.shape[1] // heads_kv if heads_kv else 1
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * scale
        if added is not None:
            scores = scores + added.double()
        scores = scores.masked_fill(~seen, -math.inf)
        self.lse = torch.logsumexp(scores, -1) if k.shape[2] else scores.new_full(scores.shape[:3], -math.inf)
        p = torch.exp(scores - self.lse.masked_fill(self.lse == -math.inf, 0).unsqueeze(-1))
        self.out = p @ v
        absolute = {"out": p @ v.abs(), "lse": q.abs() @ k.abs().transpose(2, 3) * abs(scale)}
        if dout is not None:
            dout = dout.double()
            dlse = torch.zeros_like(self.lse) if dlse is None else dlse.double()
            dp = dout @ v.transpose(2, 3)
            shift = (dout * self.out).sum(-1) - dlse
            ds = p * (dp - shift.unsqueeze(-1)) * scale
            ds_abs = p * (dout.abs() @ v.abs().transpose(2, 3) + shift.abs().unsqueeze(-1)) * abs(scale)

            def grouped(x):
                return x.unflatten(1, (heads_kv, group)).sum(2)

            self.dq, absolute["dq"] = ds @ k, ds_abs @ k.abs()
            self.dk, absolute["dk"] = (grouped(s.transpose(2, 3) @ x) for s, x in ((ds, q), (ds_abs, q.abs())))
            pt = p.transpose(2, 3)
            self.dv, absolute["dv"] = grouped(pt @ dout), grouped(pt @ dout.abs())
        self.magnitude = {name: float(x.max()) if x.numel() else 0.0 for name, x in absolute.items()}


def math_path(q, k, v, *, attn_mask=None, len_kv=None, lo=None, hi=None, scale=None, dout=None, dlse=None):
    """PyTorch's math path in the dtype of q: {"out": ..., "lse": ..., "dq": ...}."""
    seen, added = full_mask(q, k, attn_mask, len_kv, lo, hi)
    mask = seen if added is None else added.to(q.dtype).masked_fill(~seen, -math.inf)
    q, k, v = (x.detach().requires_grad_(dout is not None) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out = sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1) if k.shape[1] else k
    scores = q @ keys.transpose(2, 3) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    lse = torch.logsumexp(scores if q.dtype == torch.float64 else scores.float(), -1)
    results = {"out": out.detach(), "lse": lse.detach()}
    if dout is not None:
        outputs, grads = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
        results |= zip(("dq", "dk", "dv"), torch.autograd.grad(outputs, (q, k, v), grads), strict=True)
    return results


def max_error(ours, exact):
    """Largest absolute difference; infinite when one is NaN, or infinite and the other is not equal to it."""
    ours, exact = ours.detach().double(), exact.detach().double()
    if ours.shape != exact.shape:
        raise AssertionError(f"shape {tuple(ours.shape)}, expected {tuple(exact.shape)}")
    difference = torch.where(ours == exact, 0.0, (ours - exact).abs())
    return float(difference.nan_to_num(math.inf, math.inf).max()) if difference.numel() else 0.0


def rounding_floor(exact, magnitude=None, dtype=torch.float32):
    """What rounding alone may do: 2 eps max|exact| + c eps magnitude, the sums taken with absolute values."""
    eps = torch.finfo(dtype).eps
    finite = exact[exact.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    c = 8 if dtype in (torch.float32, torch.float64) else 0.5
    return 2 * eps * largest + c * eps * (largest if magnitude is None else magnitude)


def assert_within_bound(ours, q, k, v, **call):
    """ours is {"out": ..., "lse": ..., "dq": ...}, any of them, from a call with these arguments (as Reference takes
    them). Each is as near to the fp64 reference as twice PyTorch's math path plus the rounding floor.

    Two things are known of the method, and allowed beside that: gradients are made from the rounded lse, so they carry
    its last place; and a float64 reference has the rounding of its own scores."""
    exact = Reference(q, k, v, **call)
    lse_eps = torch.finfo(torch.float64 if q.dtype == torch.float64 else torch.float32).eps
    seen_lse = exact.lse[exact.lse.isfinite()].abs()
    lse_place = lse_eps * float(seen_lse.max()) if seen_lse.numel() else 0.0
    score_place = torch.finfo(torch.float64).eps * exact.magnitude["lse"] if q.dtype == torch.float64 else 0.0
    theirs = math_path(q, k, v, **call) if k.shape[2] and k.shape[1] else {}
    for name, result in ours.items():
        reference = getattr(exact, name)
        expected = q.dtype if name != "lse" or q.dtype == torch.float64 else torch.float32
        assert result.dtype == expected, f"{name} is {result.dtype}, expected {expected}"
        their_error, finite = 0.0, reference.isfinite()
        if name in theirs and theirs[name][finite].isfinite().all():  # where it is not, the floor alone
            their_error = max_error(theirs[name][finite], reference[finite])
        floor_dtype = result.dtype if name == "lse" else q.dtype
        allowed = 2 * their_error + rounding_floor(reference, exact.magnitude[name], floor_dtype)
        if name != "lse":
            allowed += (score_place + (0.0 if name == "out" else lse_place)) * exact.magnitude[name]
        error = max_error(result, reference)
        assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e} (math path: {their_error:.3e})"


def run(q, k, v, *, dout=None, dlse=None, **call):
    """The operator, and its gradient when there is a dout: {"out": ..., "lse": ..., "dq": ...}."""
    if dout is None:
        return dict(zip(("out", "lse"), torch.ops.fa4.fwd(q, k, v, **call), strict=True))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = torch.ops.fa4.fwd(q, k, v, **call)
    outputs, grads = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), grads)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def calls_during(function):
    """What function returned, and how often each entry of our kernels ran in it: {"fwd": ..., "sdpa_fwd": ...}."""
    before = flash_attn4.call_counts()
    result = function()
    return result, {name: count - before[name] for name, count in flash_attn4.call_counts().items()}
