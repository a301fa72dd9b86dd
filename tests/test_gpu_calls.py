"""What reaches the GPU kernels, and how, on a CPU: the package is told that tensors on the CPU are on a Hopper or a
Blackwell GPU, and its operator is the simulator."""

import functools
import math
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import Reference, assert_within_bound, band, hashed, max_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn4
from flash_attn4 import explain, flash_attn_func, masks, ops, scaled_dot_product_attention, set_fallback

pytest.importorskip("pybind11", reason="the simulator needs pybind11: pip install -e '.[test]'")
import ptxsim
from ptxsim import plan

PTX = Path(__file__).parents[1] / "build" / "ptx"
HALF = torch.bfloat16


@functools.cache
def module(kernel):
    path = PTX / f"{kernel}.ptx"
    if not path.exists():
        pytest.skip(f"{path} does not exist: the build found no nvcc")
    return ptxsim.Module(path.read_text())


class Chip:
    """Stands for _C_cuda and the operator. calls has the arguments of each call, kernels what they ran."""

    def __init__(self, arch):
        self.arch, self.calls, self.kernels, self.runs = arch, [], [], True

    def params(self, dtype, dim, dim_v, scale, lo=None, hi=None, sizes=None, strides=None, addresses=None):
        batch, heads_q, heads_kv, len_q, len_kv = sizes or (1, 1, 1, 1, 1)
        strides = strides or (dim, dim, dim, 1) * 2 + (dim_v, dim_v, dim_v, 1) * 2
        return {
            **dict(zip("qkv", addresses or (0, 0, 0), strict=True)),
            **{f"stride_{name}": strides[4 * i : 4 * i + 4] for i, name in enumerate("qkvo")},
            **{"o": 0, "lse": 0, "stride_lse": (heads_q * len_q, len_q, 1), "len_kv_of": 0, "lo": lo, "hi": hi},
            **{"batch": batch, "heads_q": heads_q, "heads_kv": heads_kv, "len_q": len_q, "len_kv": len_kv},
            **{"dim": dim, "dim_v": dim_v, "scale": scale},
            "dtype": plan.DTYPES.index(getattr(torch, dtype)),
        }

    def unsupported(self, backward, arch, dtype, dim, dim_v, mask, scale, *layout):
        assert not backward, "PyTorch's kernels are asked about gradients"
        params = self.params(dtype, dim, dim_v, scale, None, None, *layout)
        return plan.unsupported({**params, "mask_type": 1 if mask else 0}, arch)

    def kernel(self, arch, dtype, dim, dim_v, lo, hi, *layout):
        return plan.fwd_plan(self.params(dtype, dim, dim_v, 1.0, lo, hi, *layout), arch)["kernel"]

    def fwd(self, q, k, v, attn_mask=None, len_kv=None, lo=None, hi=None, scale=None):
        assert attn_mask is None
        self.calls.append({"q": q, "k": k, "v": v, "len_kv": len_kv, "lo": lo, "hi": hi, "scale": scale})
        how = {"lo": lo, "hi": hi, "scale": scale, "len_kv_of": len_kv}
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), torch.empty(q.shape[:3])
        if not self.runs:
            return out, lse
        kernel = plan.fwd_plan(plan.params(q, k, v, out, lse, **how), self.arch)["kernel"]
        self.kernels.append(kernel)
        out, lse, report = plan.forward(module(kernel), q, k, v, arch=self.arch, **how)
        assert report is None or report.finished
        shape = out.shape
        return out.new_empty_strided(shape, ops.dense_like(shape, q.stride())).copy_(out), lse


@pytest.fixture(params=[90, 100])
def chip(request, monkeypatch):
    chip = Chip(request.param)
    monkeypatch.setattr(ops, "_C_cuda", chip)
    monkeypatch.setattr(ops, "arch_of", lambda device: chip.arch)
    monkeypatch.setattr(ops, "fwd", chip.fwd)
    monkeypatch.setattr(ops, "_fwd", chip.fwd)
    with set_fallback("error"):
        yield chip


def qkv(len_q=70, len_kv=90, *, batch=2, heads=2, heads_kv=None, dim=64, dim_v=None):
    shapes = (heads, len_q, dim), (heads_kv or heads, len_kv, dim), (heads_kv or heads, len_kv, dim_v or dim)
    return [hashed(batch, *shape, seed=i, dtype=HALF) for i, shape in enumerate(shapes)]


# ---- copies


def scattered_rows(x, gap):
    """x with gap elements after each row."""
    return torch.nn.functional.pad(x, (0, gap))[..., : x.shape[3]]


def moved(x):
    """x, starting two bytes after a multiple of 16."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


LAYOUTS = {
    "rows of 65": (lambda x: scattered_rows(x, 1), "row stride 65"),
    "columns first": (lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), "head dim has stride"),
    "off by two bytes": (moved, "16 bytes"),
    "one row for all": (lambda x: x[:, :, :1].expand_as(x), "row stride 0"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", range(3))
def test_what_tensor_copies_cannot_take_is_copied(chip, layout, which):
    tensors = qkv()
    change, why = LAYOUTS[layout]
    tensors[which] = change(tensors[which])
    name = "qkv"[which]
    (note,) = explain(*tensors, is_causal=True).notes
    assert note.startswith(f"{name} is copied first: ")
    assert why in note
    assert not chip.calls
    out = scaled_dot_product_attention(*tensors, is_causal=True)
    assert_within_bound({"out": out}, *tensors, hi=0)
    (call,) = chip.calls
    assert [call[n] is x for n, x in zip("qkv", tensors, strict=True)] == [n != name for n in "qkv"]
    assert torch.equal(call[name], tensors[which])


@pytest.mark.parametrize("gaps", ["q", "k"])
def test_q_and_k_are_filled_up_together(chip, gaps):
    """Where one of them could stay: rows of 60 in 64 are what tensor copies take."""
    q, k, v = tensors = qkv(dim=60, dim_v=64)
    q, k = (scattered_rows(x, 4) if name == gaps else x for name, x in (("q", q), ("k", k)))
    assert_within_bound({"out": scaled_dot_product_attention(q, k, v)}, *tensors)


@pytest.mark.parametrize("dim, dim_v", [(60, 60), (1, 3), (64, 20), (33, 64), (127, 128)])
def test_head_dims_are_filled_up(chip, dim, dim_v):
    tensors = qkv(dim=dim, dim_v=dim_v)
    notes = explain(*tensors).notes
    assert any("head dim" in note or "row stride" in note for note in notes)
    out = scaled_dot_product_attention(*tensors)
    assert out.shape == (2, 2, 70, dim_v)
    assert out.is_contiguous()
    assert_within_bound({"out": out}, *tensors)
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors)
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert out.is_contiguous()
    assert_within_bound({"out": out.transpose(1, 2)}, *tensors, hi=20)
    assert max_error(lse, Reference(*tensors, hi=20).lse) < 1e-3


def test_what_can_be_taken_is_not_copied(chip):
    chip.runs = False
    q, k, v = qkv()
    for tensors in (
        (q, k, v),
        [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)],
        (q, k[:, :1].expand_as(k), v[:1].expand_as(v)),  # repeated heads and batches
        [scattered_rows(x[..., :60], 4) for x in (q, k)] + [v],  # rows of 60 in places of 64
        (q[:1, :1, :1], k[:1, :1], v[:1, :1]),
        [x[:, :, :, :].as_strided(x[:1, :1, :1].shape, (5, 3, 1, 1)) for x in (q, k, v)],  # sizes of 1 have no strides
    ):
        assert explain(*tensors).notes == ()
        scaled_dot_product_attention(*tensors)
        assert all(chip.calls[-1][name] is x for name, x in zip("qkv", tensors, strict=True))


def test_a_call_is_like_one_before_only_with_its_alignment_and_scale(chip):
    chip.runs = False
    q, k, v = qkv()
    scaled_dot_product_attention(q, k, v)
    scaled_dot_product_attention(moved(q), k, v)
    assert chip.calls[-1]["q"].data_ptr() % 16 == 0
    with pytest.raises(NotImplementedError, match="scale"):
        scaled_dot_product_attention(q, k, v, scale=math.nan)


def test_a_copy_keeps_the_order_of_dimensions_and_what_repeats(chip):
    chip.runs = False
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(dim=60))
    scaled_dot_product_attention(q, k[:, :1].expand_as(k), v)
    call = chip.calls[-1]
    assert call["q"].transpose(1, 2).is_contiguous()
    assert call["k"].stride(1) == 0
    assert call["scale"] == 1 / math.sqrt(60)
    assert call["q"].shape[3] == call["k"].shape[3] == call["v"].shape[3] == 64
    assert (call["q"][..., 60:] == 0).all()


def test_a_refusal_that_no_copy_helps_is_that_of_the_kernels(chip):
    with pytest.raises(NotImplementedError, match="between 1 and 256: 257"):
        flash_attn_func(*(x.transpose(1, 2) for x in qkv(dim=257)))
    if chip.arch == 100:
        with pytest.raises(NotImplementedError, match="no tiling for head dims 250 and 250"):
            flash_attn_func(*(x.transpose(1, 2) for x in qkv(dim=250)))
    with pytest.raises(NotImplementedError, match="float16 and bfloat16 only"):
        scaled_dot_product_attention(*(x.float() for x in qkv(dim=60)))


strides = st.sampled_from([0, 1, 2, 4, 8, 60, 64, 72, 4096, 4100, (1 << 39) - 8, 1 << 39])


@settings(max_examples=500, deadline=None)
@given(
    size=st.tuples(*[st.sampled_from([1, 2, 5])] * 3, st.sampled_from([1, 60, 64])),
    stride=st.tuples(strides, strides, strides, st.sampled_from([0, 1, 2, 64])),
)
def test_the_rule_for_copies_is_that_of_the_plan(size, stride):
    """Of k, beside a q that is in order."""
    view = torch.empty(0, dtype=HALF, device="meta").as_strided(size, stride)
    batch, heads, len_kv, dim = size
    strides = (64 * heads, 64, 64, 1, *stride, *(64 * len_kv * heads, 64 * len_kv, 64, 1), 64 * heads, 64, 64, 1)
    sizes = (batch, heads, heads, 1, len_kv)
    reason = Chip(90).unsupported(False, 90, "bfloat16", dim, 64, "", 1.0, sizes, strides)
    assert (reason is None) == (ops._why_copied(view) is None)


@pytest.fixture
def as_if(monkeypatch):
    """The package thinks of a GPU, and its operator is the CPU's, which takes everything."""
    chip = Chip(90)
    monkeypatch.setattr(ops, "_C_cuda", chip)
    monkeypatch.setattr(ops, "arch_of", lambda device: chip.arch)
    with set_fallback("error"):
        yield


def plain(q, k, v):
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def test_copies_have_gradients(as_if):
    tensors = [x.requires_grad_() for x in qkv(40, 40, dim=60, dim_v=33)]
    dout = hashed(2, 2, 40, 33, seed=9, dtype=HALF)
    out = plain(*tensors)
    grads = torch.autograd.grad(out, tensors, dout)
    results = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    assert_within_bound(results, *(x.detach() for x in tensors), hi=0, dout=dout)


@pytest.mark.parametrize("dynamic", [False, True])
def test_copies_are_compiled(as_if, dynamic):
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tensors in (qkv(40, 40, dim=60), qkv(50, 50, dim=60), [scattered_rows(x, 3) for x in qkv(40, 40)]):
        assert torch.equal(compiled(*tensors), plain(*tensors))


def test_copies_under_vmap(as_if):
    tensors = [x.unflatten(0, (2, 2)) for x in qkv(20, 20, batch=4, dim=36)]
    out = torch.vmap(plain)(*tensors)
    assert torch.equal(out.flatten(0, 1), plain(*(x.flatten(0, 1) for x in tensors)))


def call(batch=1, heads_q=1, heads_kv=1, len_q=8, len_kv=8, dim=64, dim_v=64, **more):
    """fa4_fwd_params of a call whose tensors are in order."""
    strides = (heads_q * len_q, len_q, 1), (heads_kv * len_kv, len_kv, 1)
    return {
        **dict.fromkeys(("q", "k", "v", "o", "lse", "len_kv_of"), 0),
        **{"stride_q": (*(dim * s for s in strides[0]), 1), "stride_k": (*(dim * s for s in strides[1]), 1)},
        **{"stride_v": (*(dim_v * s for s in strides[1]), 1), "stride_o": (*(dim_v * s for s in strides[0]), 1)},
        **{"stride_lse": strides[0], "batch": batch, "heads_q": heads_q, "heads_kv": heads_kv},
        **{"len_q": len_q, "len_kv": len_kv, "dim": dim, "dim_v": dim_v, "lo": None, "hi": None, "scale": 1.0},
        **{"dtype": plan.DTYPES.index(HALF), **more},
    }


def test_query_heads_that_fill_a_tile_together_divide_the_longest_length():
    long = {"len_q": 1 << 28, "stride_q": (64, 64, 64, 1), "stride_o": (64, 64, 64, 1)}
    assert plan.unsupported(call(heads_q=4, **long), 100) is None
    assert "at most 1073741824 queries, divided by" in plan.unsupported(call(heads_q=8, **long), 100)
    assert plan.unsupported(call(heads_q=8, **long), 90) is None


@pytest.mark.parametrize("arch", [90, 100, 103])
@pytest.mark.parametrize(
    "what, why",
    [
        ({"len_q": 1 << 31}, "at most 1073741824 queries"),
        ({"len_kv": (1 << 30) + 1}, "at most 1073741824 keys"),
        ({"batch": 1 << 40, "stride_q": (0, 0, 64, 1), "stride_k": (0, 0, 64, 1)}, "tiles"),
        ({"batch": 1 << 40, "heads_q": 1 << 40, "heads_kv": 1, "stride_q": (0, 0, 64, 1)}, "tiles"),
        ({"len_q": 1 << 30, "batch": 4096, "stride_q": (0, 64, 64, 1), "stride_o": (64, 64, 64, 1)}, "tiles"),
        ({"batch": 2, "stride_k": (1 << 40, 64, 64, 1)}, "batch stride of k"),
        ({"heads_q": 2, "heads_kv": 2, "stride_v": (64, -64, 64, 1)}, "head stride of v"),
        ({"stride_o": (64, 64, 0, 1)}, "row stride of o"),
        ({"heads_q": 2, "heads_kv": 2, "stride_o": (64, 0, 64, 1)}, "o must not repeat"),
        ({"batch": 2, "stride_o": (0, 64, 64, 1)}, "o must not repeat"),
        ({"stride_q": (64, 64, 68, 1)}, "row stride of q"),
        ({"stride_k": (64, 64, 64, 2)}, "head dim of k must be contiguous"),
        ({"v": 8}, "v must start at a multiple of 16 bytes"),
        ({"o": 2}, "o must start at a multiple of 16 bytes"),
    ],
)
def test_limits_of_tensor_copies_are_said(arch, what, why):
    assert why in plan.unsupported(call(**what), arch)
    with pytest.raises(ValueError, match=why):
        plan.fwd_plan(call(**what), arch)


@pytest.mark.parametrize("arch", [90, 100, 103])
def test_strides_are_normalised_before_they_are_judged(arch):
    for what in (
        {"stride_q": (5, -3, 64, 1)},  # sizes of 1 have no strides
        {"len_q": 1, "stride_q": (5, -3, 7, 1), "stride_o": (1, 1, 1, 1)},
        {"batch": 3, "heads_q": 4, "heads_kv": 4, "stride_k": (0, 0, 64, 1)},  # repeated
        {"batch": 0, "stride_q": (5, 5, 5, 5), "q": 2},  # nothing to copy
    ):
        assert plan.unsupported(call(**what), arch) is None
        for m in plan.fwd_plan(call(**what), arch)["maps"]:
            assert all(0 < step < 1 << 40 and step % 16 == 0 for step in m["stride"])
            assert all(0 < n <= 1 << 32 for n in m["size"])
            assert all(0 < n <= 256 for n in m["box"])
    far = call(heads_q=8, heads_kv=1, stride_q=(1 << 38, 1 << 38, 64, 1))  # packing these would go beyond 2^40
    assert all(step < 1 << 40 for m in plan.fwd_plan(far, arch)["maps"] for step in m["stride"])


# ---- masks


LENGTHS = torch.tensor([3, 9, 6, 0])


def padding(len_kv=9, lengths=LENGTHS):
    return (torch.arange(len_kv) < lengths[:, None])[:, None, None]


def mask_of(len_q, len_kv, lo=None, hi=None, lengths=LENGTHS):
    return (padding(len_kv, lengths) & band(len_q, len_kv, lo, hi)).expand(len(lengths), 1, len_q, len_kv).contiguous()


@pytest.mark.parametrize("lo, hi", [(None, None), (None, 0), (None, 4), (-2, 0), (-3, 2), (1, None), (None, -2)])
@pytest.mark.parametrize("len_q, len_kv", [(5, 9), (9, 9), (9, 5), (2, 9)])
def test_padding_causal_and_windows_are_read_from_a_mask(len_q, len_kv, lo, hi):
    lengths = LENGTHS.clamp(max=len_kv)
    mask = mask_of(len_q, len_kv, lo, hi, lengths)
    keys = masks.keys_of(mask, 4, len_q)
    if isinstance(keys, str):  # too few rows show the band
        assert (hi, len_q) == (-2, 2), keys
        return
    assert keys.len_kv.dtype == torch.int32
    assert torch.equal(mask_of(len_q, len_kv, keys.lo, keys.hi, keys.len_kv), mask)
    whole = mask_of(len_q, len_kv, lo, hi, torch.full((4,), len_kv))
    keys = masks.keys_of(whole, 4, len_q)
    assert keys.len_kv is None or hi == -2 or lo == 1  # no length is needed where all keys are there


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    len_q=st.integers(1, 6),
    lo=st.none() | st.integers(-6, 7),
    hi=st.none() | st.integers(-6, 7),
    flips=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 6)), max_size=2),
)
def test_what_is_read_is_the_mask(lengths, len_q, lo, hi, flips):
    mask = mask_of(len_q, 7, lo, hi, torch.tensor(lengths))
    for b, i, j in flips:
        mask[b % len(lengths), 0, i % len_q, j] ^= True
    keys = masks.keys_of(mask, len(lengths), len_q)
    if not isinstance(keys, str):
        found = torch.full((len(lengths),), 7) if keys.len_kv is None else keys.len_kv
        assert torch.equal(mask_of(len_q, 7, keys.lo, keys.hi, found), mask)
    else:  # unless a row sees no key of some, which can hide the band
        assert flips or not mask.any(-1)[torch.tensor(lengths) > 0].all(), keys


def test_one_row_of_a_mask_is_no_band():
    row = torch.zeros(2, 1, 1, 9, dtype=torch.bool)
    row[..., 3:7] = True
    assert "padding on the left" in masks.keys_of(row, 2, 5)
    assert masks.keys_of(row, 2, 1).lo == 3  # of one query it is
    assert masks.keys_of(padding(), 4, 5).len_kv.tolist() == [3, 9, 6, 0]
    assert masks.keys_of(padding()[2:3, 0, 0], 4, 5).len_kv.tolist() == [6] * 4
    assert masks.keys_of(padding()[1:2, 0, 0], 4, 5) == masks.Keys(None, None, None)


@pytest.mark.parametrize(
    "mask, why",
    [
        (padding().flip(-1), "padding on the left"),
        (padding().flip(-1) & band(9, 9, hi=0), "padding on the left"),
        (torch.arange(9) % 2 == 0, "neither a band nor padding"),
        (padding().logical_not() | (torch.arange(9) == 0), "neither a band nor padding"),
        (padding().expand(4, 2, 9, 9).contiguous(), "from head to head"),
        (torch.zeros(4, 1, 9, 9), "added to the scores"),
    ],
)
def test_other_masks_are_said_to_be_others(chip, mask, why):
    tensors = qkv(9, 9, batch=4)
    found = explain(*tensors, mask)
    assert found.backend == "pytorch"
    assert why in found.reason
    with pytest.raises(NotImplementedError, match=why):
        scaled_dot_product_attention(*tensors, mask)


@pytest.mark.parametrize("hi", [None, 0])
def test_padded_batches_stay_on_the_kernels(chip, hi):
    tensors = qkv(90, 90, batch=4, heads=4, heads_kv=2)
    lengths = torch.tensor([90, 1, 64, 33])
    mask = mask_of(90, 90, None, hi, lengths)
    out = scaled_dot_product_attention(*tensors, mask, enable_gqa=True)
    (call,) = chip.calls
    assert call["len_kv"].tolist() == lengths.tolist()
    assert call["hi"] == hi
    assert_within_bound({"out": out}, *tensors, attn_mask=mask)
    (note,) = explain(*tensors, mask).notes
    assert note == "attn_mask is read as lengths of keys" + (", key - query <= 0" if hi == 0 else "")


def test_a_mask_without_numbers_is_not_looked_at():
    with FakeTensorMode():
        mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
        assert "FakeTensor" in masks.keys_of(mask, 2, 9)


def test_a_mask_is_looked_at_once(chip, monkeypatch):
    chip.runs = False
    looked = []
    find = masks._find
    monkeypatch.setattr(masks, "_find", lambda *args: looked.append(args) or find(*args))
    tensors = qkv(9, 9, batch=4)
    mask = mask_of(9, 9, hi=0, lengths=LENGTHS.clone())
    for _ in range(3):
        scaled_dot_product_attention(*tensors, mask)
    assert len(looked) == 1
    mask[0] = False  # as a cache of a fixed size changes it
    scaled_dot_product_attention(*tensors, mask)
    assert len(looked) == 2
    assert chip.calls[-1]["len_kv"].tolist() == [0, 9, 6, 0]
    mask.data = mask_of(9, 9, hi=None, lengths=LENGTHS.clone())
    scaled_dot_product_attention(*tensors, mask)
    assert len(looked) == 3
    assert chip.calls[-1]["hi"] is None
    with torch.inference_mode():
        uncounted = mask.clone()
        for _ in range(2):
            scaled_dot_product_attention(*tensors, uncounted)
    assert len(looked) == 5
    looked.clear()  # it holds the mask
    known = len(masks._known)
    del mask
    assert len(masks._known) == known - 1


def test_lengths_of_keys_outlive_the_mask_on_every_stream_that_reads_them(monkeypatch):
    used = []

    class Lengths:
        is_cuda, device = True, "cuda"
        record_stream = staticmethod(used.append)

    monkeypatch.setattr(masks, "_find", lambda *_: masks.Keys(Lengths(), None, None))
    mask = padding()
    for stream in ("the one that they were made on", "second", "third"):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        masks.keys_of(mask, 4, 5)
    assert used == ["second", "third"]


def test_masks_come_and_go_in_many_threads(monkeypatch):
    ignored, wrong = [], []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    known = len(masks._known)
    shared = padding()
    expected = {n: masks.keys_of(padding(9, torch.tensor([n])), 1, 5).len_kv.tolist() for n in range(9)}

    def work(seed):
        for i in range(100):
            n = (seed + i) % 9
            mask = padding(9, torch.tensor([n]))
            for _ in range(2):
                if masks.keys_of(mask, 1, 5).len_kv.tolist() != expected[n]:
                    wrong.append(n)
            masks.keys_of(shared, 4, 1 + i % 3)  # each asks for another and puts it in the place of what was known

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not ignored
    assert not wrong
    assert len(masks._known) == known + 1


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_transformers_model(chip, side):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    chip.runs = False
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=128, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    tokens = torch.randint(2, 99, (2, 13), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(tokens)
    padding[1, slice(9, None) if side == "right" else slice(4)] = 0
    with flash_attn4.enable_transformers(), torch.no_grad(), set_fallback("silent"):
        model = transformers.LlamaForCausalLM(config).eval().to(HALF)
        model.set_attn_implementation("fa4")
        model(tokens, attention_mask=padding)
    if side == "left":
        assert not chip.calls  # PyTorch ran them
        return
    assert len(chip.calls) == 3
    assert all(call["hi"] == 0 and call["len_kv"].tolist() == [13, 9] for call in chip.calls)
    assert chip.calls[0]["len_kv"] is chip.calls[2]["len_kv"]


@pytest.mark.parametrize("capability, backend", [(90, "sm_90"), (100, "sm_100"), (103, "sm_100")])
def test_the_backend_is_one_of_backends(monkeypatch, capability, backend):
    monkeypatch.setattr(ops, "_C_cuda", Chip(capability))
    monkeypatch.setattr(ops, "arch_of", lambda device: capability)
    assert explain(*qkv()).backend == backend
    assert backend in flash_attn4.backends()


@pytest.mark.parametrize(
    "sizes, band",
    [
        ({"len_q": 400, "len_kv": 130, "dim": 128}, {}),
        ({"len_q": 512, "len_kv": 512, "dim": 128, "batch": 1, "heads": 1}, {"is_causal": True}),
        ({"len_q": 512, "len_kv": 512, "dim": 128, "batch": 1, "heads": 1}, {"attn_mask": band(512, 512, -300, None)}),
        ({"len_q": 5, "len_kv": 2100, "dim": 128, "batch": 1}, {}),
        ({"len_q": 9, "len_kv": 90, "dim": 60, "dim_v": 33}, {}),
        ({"len_q": 9, "len_kv": 70, "dim": 192, "dim_v": 120}, {}),
    ],
)
def test_explain_names_the_kernel_that_runs(chip, sizes, band):
    tensors = qkv(**sizes)
    found = explain(*tensors, **band)
    assert not chip.kernels
    scaled_dot_product_attention(*tensors, **band)
    assert chip.kernels == [found.kernel]
    assert str(found).startswith(f"flash_attn4 would run this on sm_{chip.arch} with {found.kernel}.")


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_scales_leave_zero_scores_zero(chip, sign):
    q, k, v = qkv(9, 20)
    out = scaled_dot_product_attention(torch.zeros_like(q), k, v, scale=sign * 3.4e38)
    torch.testing.assert_close(out.float(), v.float().mean(2, keepdim=True).expand_as(out), atol=4e-3, rtol=4e-3)


# ---- on a GPU itself


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    reason = explain(*(torch.empty(1, 1, 1, 64, dtype=HALF, device="cuda"),) * 3).reason
    if reason:
        pytest.skip(reason)
    with set_fallback("error"):
        yield "cuda"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_on_a_gpu(gpu, layout):
    tensors = [LAYOUTS[layout][0](x.to(gpu)) for x in qkv(300, 300)]
    assert len(explain(*tensors).notes) == 3
    out = scaled_dot_product_attention(*tensors, is_causal=True)
    assert_within_bound({"out": out}, *tensors, hi=0)
    filled_up = [x.to(gpu) for x in qkv(300, 300, dim=60, dim_v=33)]
    assert_within_bound({"out": scaled_dot_product_attention(*filled_up)}, *filled_up)


def test_a_known_mask_does_not_make_the_host_wait(gpu):
    tensors = [x.to(gpu) for x in qkv(300, 300, batch=4)]
    lengths = torch.tensor([300, 1, 128, 77])
    mask = mask_of(300, 300, hi=0, lengths=lengths).to(gpu)
    first = scaled_dot_product_attention(*tensors, mask)
    assert_within_bound({"out": first}, *tensors, attn_mask=mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = scaled_dot_product_attention(*tensors, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, first)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NotImplementedError, match="while a CUDA graph is captured"), torch.cuda.graph(graph):
        scaled_dot_product_attention(*tensors, mask)


# ---- README


def kernels():
    text = (Path(__file__).parents[1] / "README.md").read_text().split("<!-- kernels -->")[1].split("\n\n")[0]
    for line in text.strip().splitlines()[2:]:
        chip, dims, when, kernel, sizes = (cell.strip(" `") for cell in line.strip("|").split("|"))
        dims, sizes = ([int(n) for n in pair.split(", ")] for pair in (dims, sizes))
        yield 90 if chip == "Hopper" else 100, dims, when, "fa4_{}_fwd_bf16_{}".format(*kernel.split()), sizes


@pytest.mark.parametrize("arch, dims, when, kernel, sizes", kernels())
def test_the_table_of_kernels(arch, dims, when, kernel, sizes):
    rows, block_kv = sizes

    def plan_of(len_q=512, len_kv=1000, **how):
        return plan.fwd_plan(call(len_q=len_q, len_kv=len_kv, dim=dims[0], dim_v=dims[1], **how), arch)

    if "or 8192 keys" in when:
        calls = [{"len_kv": 2048}, {"len_kv": 8192, "hi": 0}, {"len_kv": 2048, "hi": 2047}]
        others = [{"len_kv": 2047}, {"len_kv": 8191, "hi": 0}, {"len_kv": 2048, "hi": 2046}]
    elif "three quarters" in when:
        calls = [{"len_q": 512}, {"len_q": 384}, {"len_q": 900}]
        others = [{"hi": 0}, {"lo": -9}, {"len_q": 383}]
    else:
        calls, others = [{"hi": 0}, {"lo": -100, "hi": 0}], []
    for how in calls:
        assert plan_of(**how)["kernel"] == kernel
    for how in others:
        assert plan_of(**how)["kernel"] == kernel.removesuffix("_long").removesuffix("_pair")
    found = plan_of(**calls[0])
    pair = found["cluster"][0]
    assert found["maps"][1]["box"][1] * pair == block_kv
    assert rows == (64 * (found["block"][0] // 128 - 1) if arch == 90 else 256 * pair)


def test_every_kernel_is_in_the_table():
    variants = (Path(__file__).parents[1] / "csrc" / "variants.def").read_text()
    built = re.findall(r"^FA4_CUDA_KERNEL\((fa4_sm(?:90|100)_fwd_bf16_\w+),", variants, re.MULTILINE)
    assert sorted(built) == sorted(kernel for _, _, _, kernel, _ in kernels())


def test_the_column_of_support_on_gpus():
    for arch, fits in ((90, [(1, 1), (256, 256), (8, 256)]), (100, [(1, 1), (192, 128), (128, 8)])):
        for dim, dim_v in fits:
            assert Chip(arch).unsupported(False, arch, "float16", dim, dim_v, "", 1.0) is None
        for dtype, mask in (("float32", ""), ("float64", ""), ("float16", "float16")):
            assert Chip(arch).unsupported(False, arch, dtype, 64, 64, mask, 1.0)
    for dim, dim_v in ((193, 128), (128, 136), (192, 136)):
        assert "no tiling" in Chip(100).unsupported(False, 100, "float16", dim, dim_v, "", 1.0)
    for what in (
        {"heads_q": 7, "heads_kv": 7},
        {"heads_q": 12, "heads_kv": 4},
        {"len_q": 1},
        {"len_kv": 0},
        {"len_q": 0},
    ):
        for scale in (0.0, -1.0, 1e-20, 1e4):
            assert plan.unsupported(call(**what, scale=scale), 90) is plan.unsupported(call(**what), 100) is None
