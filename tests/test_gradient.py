"""The gradient on CUDA comes from PyTorch's kernels: what is cut, padded and turned for them, with a formula in the
place of the flash kernel. test_cuda.py has the same with the kernels themselves."""

import itertools
import math
import re

import pytest
import torch
from conftest import Reference, band, hashed, hashed_qkv, max_error

from flash_attn4 import gradient, ops

DIM_STEP = 8


@pytest.fixture(autouse=True)
def a_formula_is_the_flash_kernel(monkeypatch):
    monkeypatch.setattr(gradient, "_cudnn_can", lambda *_: False)
    monkeypatch.setattr(gradient, "_flash", flash)


def flash(dout, q, k, v, out, lse, left, right, scale):
    """The gradient as PyTorch's flash kernel computes it, of [batch, heads, len, dim]: from out and lse as they are
    given, in a window aligned at the bottom right, for one head dim, a multiple of 8 up to 256."""
    assert q.shape[3] == k.shape[3] == v.shape[3] == out.shape[3] == dout.shape[3] <= 256
    assert q.shape[3] % DIM_STEP == 0
    assert lse.is_contiguous()
    assert scale > 0
    assert all(side is None or side >= 0 for side in (left, right))
    shift = k.shape[2] - q.shape[2]
    seen = band(
        q.shape[2], k.shape[2], None if left is None else shift - left, None if right is None else shift + right
    )
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    p = torch.exp(q @ keys.transpose(2, 3) * scale - lse.unsqueeze(-1)).masked_fill(~seen, 0)
    ds = p * (dout @ values.transpose(2, 3) - (dout * out).sum(-1, keepdim=True)) * scale
    dk, dv = (x.transpose(2, 3) @ y for x, y in ((ds, q), (p, dout)))
    return [ds @ keys, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))]


def gradients(q, k, v, dout, dlse, **call):
    exact = Reference(q, k, v, **call)
    results = gradient.backward(
        dout, dlse, q, k, v, exact.out, exact.lse, call.get("lo"), call.get("hi"), call.get("scale")
    )
    return results, Reference(q, k, v, dout=dout, dlse=dlse, **call)


CALLS = {
    "full": {},
    "causal": {"hi": 0},
    "bottom_right": {"hi": 6},
    "window": {"lo": -3, "hi": 5},
    "window_ahead": {"lo": 4, "hi": 9},
    "window_behind": {"lo": -9, "hi": -4},
    "lower_bound": {"lo": 2},
    "no_key_visible": {"lo": 1000},
    "empty_band": {"lo": 3, "hi": 2},
    "scale_negative": {"scale": -0.7, "hi": 3},
    "scale_0": {"scale": 0.0, "hi": 3},
}


@pytest.mark.parametrize("dims", [(24, 24), (24, 40), (40, 24), (12, 5)])
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_what_the_flash_kernel_is_given(name, with_dlse, dims):
    for len_q, len_kv in ((17, 23), (23, 17)):
        shape = {"heads": 4, "heads_kv": 2, "dim": dims[0], "dim_v": dims[1]}
        q, k, v = hashed_qkv(len_q, len_kv, dtype=torch.float64, **shape)
        dout = hashed(2, 4, len_q, dims[1], seed=9, dtype=torch.float64)
        dlse = hashed(2, 4, len_q, seed=10, dtype=torch.float64) if with_dlse else None
        results, exact = gradients(q, k, v, dout, dlse, **CALLS[name])
        for result, grad, like in zip(results, (exact.dq, exact.dk, exact.dv), (q, k, v), strict=True):
            assert result.shape == like.shape
            assert max_error(result, grad) < 1e-12


def test_every_band_becomes_a_window():
    sides = [None, *range(-6, 7)]
    for len_q, len_kv, lo, hi in itertools.product(range(5), range(5), sides, sides):
        rows, keys, left, right = gradient._window(len_q, len_kv, lo, hi)
        seen = band(len_q, len_kv, lo, hi)
        if not seen.any():
            assert len(rows) * len(keys) == 0
            continue
        assert rows == range(*_ends(seen.any(1)))
        assert keys == range(*_ends(seen.any(0)))
        shift = len(keys) - len(rows)
        lo, hi = None if left is None else shift - left, None if right is None else shift + right
        assert torch.equal(band(len(rows), len(keys), lo, hi), seen[rows.start : rows.stop, keys.start : keys.stop])


def _ends(kept):
    places = kept.nonzero()
    return int(places[0]), int(places[-1]) + 1


def test_empty_sizes():
    for empty in ("batch", "heads", "len_q", "len_kv"):
        size = {"batch": 2, "heads": 2, "len_q": 3, "len_kv": 4} | {empty: 0}
        q = torch.ones(size["batch"], size["heads"], size["len_q"], 8)
        k = torch.ones(size["batch"], size["heads"], size["len_kv"], 8)
        lse = torch.full(q.shape[:3], -math.inf)
        for grad, like in zip(gradient.backward(q, None, q, k, k, q, lse, None, None, None), (q, k, k), strict=True):
            assert grad.shape == like.shape
            assert (grad == 0).all()


def test_the_gradient_of_lse_with_the_widest_v_is_refused_by_name():
    q, k, v = hashed_qkv(5, 7, dim=64, dim_v=256)
    with pytest.raises(NotImplementedError, match="gradient of lse with a head dim of v over 254: 256"):
        gradient.backward(q, torch.ones(2, 2, 5), q, k, v, v[:, :, :5], torch.ones(2, 2, 5), None, None, None)


def test_lengths_per_batch_are_refused_by_name():
    assert gradient.unsupported(None) is None
    assert "len_kv" in gradient.unsupported(torch.ones(2, dtype=torch.int32))


# ---- the operator on CUDA, called with tensors of the CPU

CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


def bwd_on_cuda(*args, **call):
    return torch.library.get_kernel("fa4::bwd", "CUDA").call_boxed(CUDA, *args, **call)


def half_precision_call(order=(0, 1, 2, 3)):
    """dout, dlse, q, k, v, out and lse, whose dimensions are in that order in memory."""

    def laid_out(x):
        return x.permute(order).contiguous().permute([order.index(d) for d in range(4)])

    q, k, v = map(laid_out, hashed_qkv(17, 23, heads=4, heads_kv=2, dim=24, dim_v=40, dtype=torch.bfloat16))
    out, lse = torch.ops.fa4.fwd(q, k, v, hi=4)
    return [laid_out(hashed(*out.shape, seed=9, dtype=torch.bfloat16)), None, q, k, v, out, lse]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_the_operator_gives_what_its_fake_promises(order, monkeypatch):
    def rounded(dout, q, k, v, out, lse, *rest):
        return [x.bfloat16() for x in flash(*(x.float() for x in (dout, q, k, v, out)), lse, *rest)]

    monkeypatch.setattr(gradient, "_flash", rounded)
    call = half_precision_call(order)
    before = gradient.calls
    grads = bwd_on_cuda(*call, hi=4)
    assert gradient.calls == before + 1
    fakes = torch.ops.fa4.bwd(*(x if x is None else x.to("meta") for x in call), hi=4)
    exact = Reference(*call[2:5], dout=call[0], hi=4)
    for grad, fake, right in zip(grads, fakes, (exact.dq, exact.dk, exact.dv), strict=True):
        assert (grad.shape, grad.stride(), grad.dtype) == (fake.shape, fake.stride(), fake.dtype)
        assert max_error(grad, right) <= 0.02 * float(right.abs().max())


@pytest.mark.parametrize(
    "argument, value, message",
    [
        (0, torch.zeros(2, 4, 17, 3), r"dout has shape \[2, 4, 17, 3\], and it must be \[2, 4, 17, 40\]"),
        (0, torch.zeros(2, 4, 17, 40), "dout is float32, and it must be bfloat16"),
        (1, torch.zeros(2, 4, 16), "dlse has shape"),
        (2, torch.zeros(17, 24), "q has 2 dimensions, and it must have 4"),
        (3, torch.zeros(2, 2, 23, 8), "k has shape"),
        (4, torch.zeros(2, 2, 22, 40), "v has shape"),
        (5, torch.zeros(2, 2, 17, 40), "out has shape"),
        (6, torch.zeros(2, 4, 17, 1), "lse has shape"),
        (6, torch.zeros(2, 4, 17).half(), "lse is float16"),
        (0, torch.zeros(2, 4, 17, 40, dtype=torch.bfloat16, device="meta"), "dout is on meta, q on cpu"),
    ],
)
def test_bad_input_of_the_operator_names_the_argument(argument, value, message):
    args = half_precision_call()
    args[argument] = value
    with pytest.raises(RuntimeError, match=message):
        bwd_on_cuda(*args)


@pytest.mark.parametrize("heads_kv", [3, 8, 0])
def test_heads_that_do_not_fit_are_refused(heads_kv):
    args = half_precision_call()
    args[3], args[4] = (x[:, :1].expand(-1, heads_kv, -1, -1) for x in args[3:5])
    with pytest.raises(RuntimeError, match=f"multiple of those of k and v: 4 and {heads_kv}$"):
        bwd_on_cuda(*args)


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan, 1e39])
def test_a_scale_that_is_not_finite_is_refused(scale, monkeypatch):
    monkeypatch.setattr(ops, "_check_gradient", lambda *_: None)  # which asks the CPU's kernels, as these tensors are
    with pytest.raises(RuntimeError, match=f"scale must be finite.*: {re.escape(str(scale))}$"):
        bwd_on_cuda(*half_precision_call(), scale=scale)


def test_a_mask_has_no_gradient_on_cuda():
    with pytest.raises(NotImplementedError, match="attn_mask"):
        bwd_on_cuda(*half_precision_call(), attn_mask=torch.ones(17, 23) > 0)
