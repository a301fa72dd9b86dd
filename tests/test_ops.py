"""torch.ops.fa4: schemas, fakes, gradients, transforms, threads, and every kind of bad input."""

import itertools
import math
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch
from conftest import DTYPES, assert_within_bound, calls_during, hashed, hashed_qkv, max_error, run
from torch.library import opcheck
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flash_attn4 import _C, ops

fwd, bwd = torch.ops.fa4.fwd.default, torch.ops.fa4.bwd.default


# ---- what a saved graph relies on


def test_schemas_are_what_was_released():
    assert str(fwd._schema) == (
        "fa4::fwd(Tensor q, Tensor k, Tensor v, Tensor? attn_mask=None, Tensor? len_kv=None, SymInt? lo=None, "
        "SymInt? hi=None, float? scale=None) -> (Tensor out, Tensor lse)"
    )
    assert str(bwd._schema) == (
        "fa4::bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor? attn_mask=None, Tensor? len_kv=None, SymInt? lo=None, SymInt? hi=None, float? scale=None) "
        "-> (Tensor dq, Tensor dk, Tensor dv)"
    )


CALLS = {
    "full": {},
    "causal": {"hi": 0},
    "window": {"lo": -3, "hi": 5},
    "no_key_visible": {"lo": 1000},
    "bool_mask": {"attn_mask": hashed(2, 1, 17, 23, seed=5) > 0},
    "additive_mask": {"attn_mask": hashed(17, 23, seed=6)},
    "additive_mask_by_key": {"attn_mask": hashed(4, 1, 23, seed=6)},
    "len_kv": {"len_kv": torch.tensor([0, 11], dtype=torch.int32)},
    "scale_negative": {"scale": -0.7},
    "scale_0": {"scale": 0.0},
    "all": {
        "attn_mask": hashed(17, 23, seed=6) > -1,
        "len_kv": torch.tensor([23, 11], dtype=torch.int32),
        "lo": -9,
        "hi": 4,
        "scale": 0.3,
    },
}


def inputs_and_grads(dtype=torch.float32, **shape):
    q, k, v = hashed_qkv(17, 23, heads=4, heads_kv=2, dim=24, dim_v=40, dtype=dtype, **shape)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return q, k, v, hashed(2, 4, 17, 40, seed=9, dtype=dtype), hashed(2, 4, 17, seed=10, dtype=lse_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_as_near_as_the_math_path(isa, name, dtype):
    q, k, v, dout, dlse = inputs_and_grads(dtype)
    for gradient in ({"dout": dout}, {"dout": dout, "dlse": dlse}):
        call = {**CALLS[name], **gradient}
        assert_within_bound(run(q, k, v, **call), q, k, v, **call)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    q, k, v, dout, dlse = inputs_and_grads()
    opcheck(fwd, (q, k, v), CALLS[name])
    opcheck(fwd, tuple(x.requires_grad_() for x in (q, k, v)), CALLS[name])
    out, lse = fwd(*(x.detach() for x in (q, k, v)), **CALLS[name])
    opcheck(bwd, (dout, dlse, q.detach(), k.detach(), v.detach(), out, lse), CALLS[name])


def test_opcheck_of_the_transposed_layout():
    q, k, v = (hashed(2, n, 3, 16, seed=n).transpose(1, 2).requires_grad_() for n in (9, 11, 11))
    opcheck(fwd, (q, k, v))


# ---- fakes


ORDERS = list(itertools.permutations(range(4)))


def in_order(order, *shape, seed=0):
    """A tensor of this shape whose memory has its dimensions in that order."""
    memory = hashed(*(shape[d] for d in order), seed=seed)
    return memory.permute(*(order.index(d) for d in range(4)))


LAYOUTS = {str(order): (order, (2, 20, 5, 8)) for order in ORDERS} | {
    "many batches": ((0, 2, 1, 3), (65537, 1, 1, 2)),
    "one head": ((0, 2, 1, 3), (2, 1, 5, 8)),
    "all ones": ((3, 1, 0, 2), (1, 1, 1, 1)),
    "empty": ((0, 2, 1, 3), (2, 3, 0, 8)),
    "one query": ((2, 0, 1, 3), (2, 3, 1, 8)),
}


def metadata(tensors):
    return [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_uc_099_uc_101_fakes_have_the_strides_of_the_kernels(layout):
    order, shape = LAYOUTS[layout]
    q = in_order(order, *shape)
    k, v = in_order(order[::-1], *shape[:2], 7, shape[3], seed=1), hashed(*shape[:2], 7, 12, seed=2)
    real = fwd(q, k, v)
    assert metadata(real) == metadata(fwd(*(x.to("meta") if x.is_contiguous() else meta(x) for x in (q, k, v))))
    dout = torch.ones_like(real[0])
    grads = bwd(dout, None, q, k, v, *real)
    assert metadata(grads) == metadata(bwd(*(x if x is None else meta(x) for x in (dout, None, q, k, v, *real))))
    size_order = sorted(range(4), key=lambda d: -q.stride(d)) if min(shape) > 1 else None
    if size_order:
        assert size_order == sorted(range(4), key=lambda d: -real[0].stride(d)), "out is not in the order of q"


def meta(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def test_fakes_of_expanded_and_sliced_inputs():
    q = hashed(1, 1, 5, 16).expand(2, 3, 5, 16)
    packed = hashed(2, 5, 3, 3, 16)
    for x in (q, packed[:, :, 0].transpose(1, 2), hashed(2, 3, 5, 32)[..., ::2], hashed(2, 3, 10, 16)[:, :, ::2]):
        assert metadata(fwd(x, x, x)) == metadata(fwd(meta(x), meta(x), meta(x)))


def test_fakes_refuse_what_does_not_fit():
    q, k, v = (meta(x) for x in hashed_qkv(5, 7))
    for bad, message in (
        ((q[0], k, v), "q has 3 dimensions"),
        ((q, k[:1], v), "batch"),
        ((q, k[..., :8], v), "head dim"),
        ((q, k, v[:, :, :3]), "len_kv"),
        ((q, k.half(), v), "k is torch.float16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            fwd(*bad)


# ---- gradients


@pytest.mark.parametrize("name", CALLS)
def test_gradcheck_also_through_lse(name):
    q, k, v = (
        hashed(*shape, seed=i, dtype=torch.float64, spread=1.0).requires_grad_()
        for i, shape in enumerate(((2, 2, 4, 3), (2, 1, 5, 3), (2, 1, 5, 2)))
    )
    call = dict(CALLS[name])
    if "attn_mask" in call:
        mask = call["attn_mask"][..., :4, :5]
        mask = mask[:, :1] if mask.dim() == 4 else mask[:2] if mask.dim() == 3 else mask
        call["attn_mask"] = mask if mask.dtype == torch.bool else mask.double()
    if "len_kv" in call:
        call["len_kv"] = call["len_kv"].clamp(max=5)

    def function(q, k, v):
        out, lse = fwd(q, k, v, **call)
        return out, lse.masked_fill(lse == -math.inf, 0)

    assert torch.autograd.gradcheck(function, (q, k, v))


def test_gradient_of_lse_alone():
    q, k, v = hashed_qkv(9, 11, dtype=torch.float64, requires_grad=True)
    ours = torch.autograd.grad(fwd(q, k, v)[1].sum(), (q, k, v), allow_unused=True)
    theirs = torch.autograd.grad(torch.logsumexp(q @ k.transpose(2, 3) / 8, -1).sum(), (q, k))
    assert max_error(ours[0], theirs[0]) < 1e-13
    assert max_error(ours[1], theirs[1]) < 1e-13
    assert ours[2].abs().max() == 0


def test_a_mask_that_requires_grad_is_refused_by_name():
    q, k, v = hashed_qkv(5, 7, requires_grad=True)
    with pytest.raises(NotImplementedError, match="attn_mask requires grad"):
        fwd(q, k, v, torch.zeros(5, 7, requires_grad=True))


def test_a_gradient_that_is_not_there_is_refused_in_the_forward(monkeypatch):
    monkeypatch.setattr(ops, "unsupported", lambda *_, backward=False, **__: "not here" if backward else None)
    q, k, v = hashed_qkv(5, 7, requires_grad=True)
    with pytest.raises(NotImplementedError, match="no gradient: not here"):
        fwd(q, k, v)
    with torch.no_grad():
        fwd(q, k, v)


def test_second_derivative_raises():
    q, k, v = hashed_qkv(5, 7, requires_grad=True)
    (dq,) = torch.autograd.grad(fwd(q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        dq.sum().backward()


def test_forward_mode_raises():
    q, k, v = hashed_qkv(5, 7, requires_grad=True)
    with torch.autograd.forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        fwd(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), k, v)


def test_func_grad_raises_and_is_never_silently_zero():
    q, k, v = hashed_qkv(5, 7)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda q: fwd(q, k, v)[0].sum())(q)


def test_only_what_requires_grad_gets_a_gradient():
    q, k, v = hashed_qkv(5, 7)
    k.requires_grad_()
    out, lse = fwd(q, k, v)
    out.sum().backward()
    assert q.grad is None
    assert k.grad is not None
    assert out.requires_grad
    assert lse.requires_grad
    with torch.no_grad():
        assert not fwd(q, k, v)[0].requires_grad
    with torch.inference_mode():
        assert fwd(q, k, v)[0].is_inference()


# ---- vmap, autocast, checkpoint, compile


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 2, 2), (1, 0, 3)])
@pytest.mark.parametrize("name", ["full", "additive_mask", "bool_mask", "len_kv"])
def test_vmap_equals_a_loop(in_dims, name):
    def stacked(dim, *shape, seed):
        return hashed(*shape, seed=seed) if dim is None else hashed(3, *shape, seed=seed).movedim(0, dim)

    q = stacked(in_dims[0], 2, 4, 17, 8, seed=1)
    k = stacked(in_dims[1], 2, 2, 23, 8, seed=2)
    v = stacked(in_dims[2], 2, 2, 23, 8, seed=3)
    function = lambda q, k, v: fwd(q, k, v, **CALLS[name])  # noqa: E731
    out, lse = torch.vmap(function, in_dims)(q, k, v)
    for i in range(3):
        one = [x if d is None else x.select(d, i) for x, d in zip((q, k, v), in_dims, strict=True)]
        expected = function(*one)
        assert torch.equal(out[i], expected[0])
        assert torch.equal(lse[i], expected[1])


def test_vmap_over_masks_and_lengths():
    q, k, v = hashed_qkv(17, 23)
    masks = hashed(3, 17, 23, seed=7) > 0
    lengths = torch.tensor([[1, 2], [3, 4], [23, 0]], dtype=torch.int32)
    out, _ = torch.vmap(lambda m, n: fwd(q, k, v, m, n))(masks, lengths)
    for i in range(3):
        assert torch.equal(out[i], fwd(q, k, v, masks[i], lengths[i])[0])


def test_vmap_of_the_gradient():
    q, k, v, dout, dlse = inputs_and_grads()
    out, lse = fwd(q, k, v)
    douts = torch.stack([dout, 2 * dout])
    grads = torch.vmap(lambda g: bwd(g, dlse, q, k, v, out, lse))(douts)
    for i in range(2):
        expected = bwd(douts[i], dlse, q, k, v, out, lse)
        assert all(torch.equal(a[i], b) for a, b in zip(grads, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_to_the_dtype_that_was_chosen(dtype):
    q, k, v = hashed_qkv(5, 7, requires_grad=True)
    with torch.autocast("cpu", dtype):
        out, lse = fwd(q, k, v, hashed(5, 7, seed=3))
        assert fwd(*(x.double() for x in (q, k, v)))[0].dtype == torch.float64
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert torch.equal(out, fwd(*(x.to(dtype) for x in (q, k, v)), hashed(5, 7, seed=3).to(dtype))[0])
    out.sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE])
def test_checkpoint_policies_name_the_operator(policy):
    seen = []

    def choose(_, op, *args, **kwargs):
        if op == fwd:
            seen.append(op)
            return policy
        return CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = hashed_qkv(9, 11, requires_grad=True)
    expected = torch.autograd.grad(fwd(q, k, v)[0].square().sum(), (q, k, v))

    def gradient():
        out, _ = checkpoint(
            fwd, q, k, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(choose)
        )
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    grads, calls = calls_during(gradient)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert seen
    assert calls["fwd"] == (1 if policy == CheckpointPolicy.MUST_SAVE else 2)


def test_compile_is_one_graph_and_agrees():
    def function(q, k, v, hi):
        out, lse = torch.ops.fa4.fwd(q * 2, k, v, None, None, None, hi)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 9, 13):
        q, k, v = hashed_qkv(length, length + 2, requires_grad=True)
        ours = torch.autograd.grad(compiled(q, k, v, length), (q, k, v))
        expected = torch.autograd.grad(function(q, k, v, length), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.slow
def test_inductor_forward_and_backward():
    def function(q, k, v):
        q, k, v = (x.relu().unflatten(2, (4, 16)).transpose(1, 2) for x in (q, k, v))
        out, _ = torch.ops.fa4.fwd(q, k, v, hi=0)
        return out.transpose(1, 2).flatten(2)

    q, k, v = (hashed(2, 10, 64, seed=i).requires_grad_() for i in range(3))
    out = torch.compile(function, fullgraph=True)(q, k, v)
    expected = function(q, k, v)
    assert max_error(out, expected) < 1e-6
    ours = torch.autograd.grad(out.square().sum(), (q, k, v))
    theirs = torch.autograd.grad(expected.square().sum(), (q, k, v))
    assert all(max_error(a, b) < 1e-5 for a, b in zip(ours, theirs, strict=True))


def test_export_keeps_the_operator_and_runs_with_other_sizes():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.ops.fa4.fwd(q, k, v, hi=0)[0]

    length = torch.export.Dim("length", min=2, max=100)
    shapes = {name: {2: length} for name in "qkv"}
    program = torch.export.export(Model(), hashed_qkv(9, 9), dynamic_shapes=shapes).run_decompositions()
    assert "fa4.fwd" in str(program.graph)
    q, k, v = hashed_qkv(31, 31)
    assert torch.equal(program.module()(q, k, v), fwd(q, k, v, hi=0)[0])


# ---- bad input: an error that names the argument


def bad_calls():
    q, k, v = hashed_qkv(5, 7, heads=4, heads_kv=2, dim=16)
    yield "q_rank", (q[0], k, v), {}, "q has 3 dimensions"
    yield "k_rank", (q, k[0, 0], v), {}, "k has 2 dimensions"
    yield "v_rank", (q, k, v.unsqueeze(0)), {}, "v has 5 dimensions"
    yield "q_int", (q.int(), k, v), {}, "q is int32"
    yield "q_complex", (q.to(torch.complex64), k, v), {}, "q is of another dtype"
    yield "k_dtype", (q, k.half(), v), {}, "k is float16, and it must be float32"
    yield "v_dtype", (q, k, v.double()), {}, "v is float64, and it must be float32"
    yield "k_batch", (q, k[:1], v), {}, "k has shape"
    yield "k_dim", (q, k[..., :8], v), {}, "k has shape"
    yield "v_heads", (q, k, v[:, :1]), {}, "v has shape"
    yield "v_len", (q, k, v[:, :, :3]), {}, "v has shape"
    yield "ratio", (q[:, :3], k, v), {}, "multiple of heads_kv: 3 and 2"
    yield "no_kv_heads", (q, k[:, :0], v[:, :0]), {}, "multiple of heads_kv: 4 and 0"
    yield "dim_0", (q[..., :0], k[..., :0], v), {}, "head dim of q and k must be between 1 and 256: 0"
    yield "dim_v_0", (q, k, v[..., :0]), {}, "head dim of v must be between 1 and 256: 0"
    yield "dim_257", (*(hashed(1, 1, 3, 257) for _ in range(3)),), {}, "between 1 and 256: 257"
    yield "mask_shape", (q, k, v), {"attn_mask": torch.zeros(5, 6)}, r"attn_mask has shape \[5, 6\]"
    yield "mask_rank", (q, k, v), {"attn_mask": torch.zeros(1, 1, 1, 5, 7)}, "attn_mask has shape"
    yield "mask_heads", (q, k, v), {"attn_mask": torch.zeros(2, 2, 5, 7)}, "attn_mask has shape"
    yield "mask_int", (q, k, v), {"attn_mask": torch.zeros(5, 7).int()}, "attn_mask is int32"
    yield "mask_device", (q, k, v), {"attn_mask": torch.zeros(5, 7, device="meta")}, "attn_mask is on meta, q on cpu"
    yield "k_device", (q, k.to("meta"), v), {}, "k is on meta, q on cpu"
    yield "len_shape", (q, k, v), {"len_kv": torch.zeros(3, dtype=torch.int32)}, r"len_kv has shape \[3\]"
    yield "len_rank", (q, k, v), {"len_kv": torch.zeros(2, 1, dtype=torch.int32)}, "len_kv has 2 dimensions"
    yield "len_dtype", (q, k, v), {"len_kv": torch.zeros(2)}, "len_kv is float32"
    yield "len_negative", (q, k, v), {"len_kv": torch.tensor([1, -1], dtype=torch.int32)}, r"len_kv\[1\] is -1"
    yield "len_large", (q, k, v), {"len_kv": torch.tensor([8, 1], dtype=torch.int32)}, r"len_kv\[0\] is 8"
    yield "len_stride", (q, k, v), {"len_kv": torch.zeros(4, dtype=torch.int32)[::2]}, "len_kv must be contiguous"
    yield "scale_nan", (q, k, v), {"scale": math.nan}, "scale must be finite"
    yield "scale_inf", (q, k, v), {"scale": math.inf}, "scale must be finite"
    yield "sparse", (q, k.to_sparse(), v), {}, "SparseCPU|sparse|strided"


@pytest.mark.parametrize("name, args, kwargs, message", bad_calls(), ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input_names_the_argument(name, args, kwargs, message):
    for grad_mode in (torch.enable_grad, torch.inference_mode):
        with grad_mode(), pytest.raises((RuntimeError, NotImplementedError), match=message):
            torch.ops.fa4.fwd(*args, **kwargs)


@pytest.mark.parametrize(
    "argument, value, message",
    [
        (0, torch.zeros(2, 4, 17, 3), r"dout has shape"),
        (0, torch.zeros(2, 4, 17, 40).half(), "dout is float16"),
        (1, torch.zeros(2, 4, 16), r"dlse has shape"),
        (1, torch.zeros(2, 4, 17).double(), "dlse is float64"),
        (5, torch.zeros(2, 2, 17, 40), r"out has shape"),
        (5, torch.zeros(17), "out has 1 dimensions"),
        (6, torch.zeros(2, 4, 17, 1), "lse has 4 dimensions"),
        (6, torch.zeros(2, 4, 17).half(), "lse is float16"),
        (3, torch.zeros(2, 2, 23, 8), "k has shape"),
        (0, torch.zeros(2, 4, 17, 40, device="meta"), "dout is on meta, q on cpu"),
    ],
)
def test_bad_gradient_input_names_the_argument(argument, value, message):
    q, k, v, dout, dlse = inputs_and_grads()
    args = [dout, dlse, q, k, v, *fwd(q, k, v)]
    args[argument] = value
    with pytest.raises(RuntimeError, match=message):
        bwd(*args)


def test_wrong_argument_types_are_errors():
    q, k, v = hashed_qkv(5, 7)
    for args in ((q, k), (q, k, None), (q, k, v, None, None, 1.5), (q, k, v, "mask")):
        with pytest.raises((RuntimeError, TypeError)):
            torch.ops.fa4.fwd(*args)


@pytest.mark.parametrize("bound", [2**63 - 1, -(2**63), 2**62, -(2**62)])
def test_the_largest_bounds_do_not_overflow(bound):
    q, k, v = hashed_qkv(5, 7)
    seen = torch.ones(5, 7, dtype=torch.bool)
    for call, mask in (({"lo": bound}, seen & (bound <= 0)), ({"hi": bound}, seen & (bound >= 0))):
        assert max_error(fwd(q, k, v, **call)[0], fwd(q, k, v, mask)[0]) < 1e-6


@pytest.mark.parametrize("empty", ["batch", "heads", "len_q", "len_kv"])
def test_sizes_of_0(empty):
    size = {"batch": 2, "heads": 2, "len_q": 3, "len_kv": 4} | {empty: 0}
    q = torch.ones(size["batch"], size["heads"], size["len_q"], 8, requires_grad=True)
    k, v = (torch.ones(size["batch"], size["heads"], size["len_kv"], 8, requires_grad=True) for _ in range(2))
    out, lse = fwd(q, k, v)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    grads = torch.autograd.grad(out.sum() + lse.masked_fill(lse == -math.inf, 0).sum(), (q, k, v))
    assert all(g.shape == x.shape and (g == 0).all() for g, x in zip(grads, (q, k, v), strict=True))


# ---- threads and processes


def test_threads_follow_torch_and_bits_do_not_change():
    q, k, v = hashed_qkv(200, 300, heads=3)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(q, k, v, dout=hashed(*q.shape, seed=4), hi=50))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def test_many_python_threads_at_once():
    q, k, v, dout, _ = inputs_and_grads()
    expected = run(q, k, v, dout=dout)
    wrong = []

    def work():
        for _ in range(20):
            results = run(q, k, v, dout=dout)
            if not all(torch.equal(results[name], expected[name]) for name in expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _child(queue):
    q, k, v = hashed_qkv(64, 64)
    queue.put(float(fwd(q, k, v)[0].sum()))


def test_a_forked_child_works_as_with_torch_operators():
    """With one thread, which torch's own operators need after a fork as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        q, k, v = hashed_qkv(64, 64)
        expected = float(fwd(q, k, v)[0].sum())
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_child, args=(queue,))
        child.start()
        assert queue.get(timeout=60) == expected
        child.join(60)
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(before)


def test_import_is_quick_quiet_and_starts_nothing():
    program = """
import os, time
import torch
threads = len(os.listdir("/proc/self/task"))
started = time.process_time()
import flash_attn4
took = time.process_time() - started
assert len(os.listdir("/proc/self/task")) == threads, "import started threads"
assert not torch.cuda.is_initialized(), "import initialised CUDA"
import sys
assert "torch._dynamo" not in sys.modules and "transformers" not in sys.modules
print(took)
"""
    times = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        times.append(float(done.stdout))
    assert min(times) < 0.05


def test_the_environment_variable_forces_an_instruction_set():
    program = "import flash_attn4; print(flash_attn4.cpu_isa())"

    def with_isa(name):
        environment = os.environ | {"FA4_CPU_ISA": name}
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)

    assert with_isa("generic").stdout.strip() == "generic"
    refused = with_isa("avx1024")
    assert refused.returncode != 0
    assert "avx1024" in refused.stderr


def test_forcing_an_instruction_set_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="mmx"):
        _C.force_isa("mmx")
    assert _C.isa_in_use() in dict(_C.isas())


def test_reasons_come_from_the_c_api():
    q, k, v = hashed_qkv(5, 7)
    assert ops.unsupported(q, k, v) is None
    assert ops.unsupported(q, k, v, backward=True) is None
    sizes, strides = (2, 2, 2, 5, 7), (*q.stride(), *k.stride(), *v.stride(), *q.stride())
    assert ops.ask(True, ops.CPU, "float32", 64, 64, "", 1.0, sizes, strides) is None
    assert "multiple" in ops.ask(False, ops.CPU, "float32", 64, 64, "", 1.0, (2, 3, 2, 5, 7))
    for bad in ((1, 2), (1, 2, 3, 4, "5"), [1, 2, 3, 4, 5]):
        with pytest.raises(TypeError):
            ops.ask(False, ops.CPU, "float32", 64, 64, "", 1.0, bad)
    assert "256" in ops.ask(False, ops.CPU, "float32", 257, 64)
    assert "float8" in ops.ask(False, ops.CPU, "float8_e4m3fn", 64, 64)
    assert "no kernels for a mask of int32" in ops.ask(False, ops.CPU, "float32", 64, 64, "int32")
    assert "finite" in ops.ask(False, ops.CPU, "float32", 64, 64, "", math.inf)
    assert "arch is -1" in _C.unsupported(False, -1, "float16", 64, 64, "", 1.0)
    assert "8.0 (Ampere: A100" in _C.unsupported(False, 80, "float16", 64, 64, "", 1.0)
