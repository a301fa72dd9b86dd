"""scaled_dot_product_attention, flash_attn_func, explain: what they mean, refuse and hand to PyTorch."""

import itertools
import math
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import DTYPES, SAYS_WHY, Reference, band, calls_during, hashed, hashed_qkv, max_error
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import flash_attn4
from flash_attn4 import explain, flash_attn_func, interface, ops, scaled_dot_product_attention, set_fallback


@pytest.fixture(autouse=True)
def _no_fallback():
    """A test that wants PyTorch's says so."""
    with set_fallback("error"):
        yield


def flash(q, k, v, **words):
    """flash_attn_func in SDPA's layout."""
    result = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **words)
    return (result[0].transpose(1, 2), result[1]) if words.get("return_lse") else result.transpose(1, 2)


# ---- scaled_dot_product_attention


SDPA_CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool_mask": {"attn_mask": hashed(9, 14, seed=3) > -1},
    "additive_mask": {"attn_mask": hashed(2, 1, 9, 14, seed=3)},
    "gqa": {"enable_gqa": True},
    "gqa_causal": {"enable_gqa": True, "is_causal": True},
}


@pytest.mark.parametrize("name", SDPA_CALLS)
def test_it_is_sdpa(name):
    call = SDPA_CALLS[name]
    q, k, v = hashed_qkv(9, 14, heads=4, heads_kv=2 if "gqa" in name else 4, dim=24, dim_v=16, requires_grad=True)
    dout = hashed(2, 4, 9, 16, seed=7)
    results = []
    for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = function(q, k, v, **call)
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for ours, theirs in zip(*results, strict=True):
        assert max_error(ours, theirs) < 1e-5


def test_positional_arguments_are_in_sdpas_order():
    q, k, v = hashed_qkv(9, 9, heads=4, heads_kv=2)
    ours = scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.5, enable_gqa=True)
    assert max_error(ours, F.scaled_dot_product_attention(q, k, v, None, 0.0, True, scale=0.5, enable_gqa=True)) < 1e-5


@pytest.mark.parametrize(
    "shape_q, shape_kv, mask",
    [
        ((9, 8), (14, 8), None),
        ((3, 9, 8), (3, 14, 8), (9, 14)),
        ((3, 9, 8), (3, 14, 8), (3, 1, 14)),
        ((2, 3, 9, 8), (2, 3, 14, 8), (1, 14)),
        ((2, 3, 9, 8), (3, 14, 8), (3, 9, 14)),
        ((2, 3, 9, 8), (2, 1, 14, 8), None),
        ((1, 3, 9, 8), (2, 1, 14, 8), (2, 3, 9, 14)),
        ((9, 8), (2, 3, 14, 8), None),
        ((2, 1, 2, 3, 9, 8), (2, 2, 2, 3, 14, 8), (2, 1, 1, 3, 9, 14)),
        ((0, 3, 9, 8), (0, 3, 14, 8), None),
    ],
)
def test_leading_dimensions_broadcast(shape_q, shape_kv, mask):
    q, k, v = hashed(*shape_q), hashed(*shape_kv, seed=1), hashed(*shape_kv, seed=2)
    mask = None if mask is None else hashed(*mask, seed=3)
    ours = scaled_dot_product_attention(q, k, v, mask)
    theirs = F.scaled_dot_product_attention(q, k, v, mask)
    assert ours.shape == theirs.shape
    assert max_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("shape_q, shape_kv", [((4, 9, 8), (2, 14, 8)), ((2, 3, 4, 9, 8), (2, 3, 2, 14, 8))])
def test_gqa_of_any_rank(shape_q, shape_kv):
    q, k, v = hashed(*shape_q), hashed(*shape_kv, seed=1), hashed(*shape_kv, seed=2)
    ours = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    theirs = F.scaled_dot_product_attention(q, *(x.repeat_interleave(2, -3) for x in (k, v)))
    assert ours.shape == theirs.shape
    assert max_error(ours, theirs) < 1e-5


def test_the_result_is_in_the_order_of_the_query():
    q, k, v = (hashed(2, 9, 3, 8, seed=i).transpose(1, 2) for i in range(3))
    assert scaled_dot_product_attention(q, k, v).transpose(1, 2).is_contiguous()
    assert scaled_dot_product_attention(*(x.contiguous() for x in (q, k, v))).is_contiguous()


def test_no_copies_are_made_of_transposed_inputs():
    q, k, v = (hashed(2, 9, 3, 8, seed=i).transpose(1, 2) for i in range(3))
    with torch.profiler.profile() as profile:
        scaled_dot_product_attention(q, k, v, is_causal=True)
    names = {event.key for event in profile.key_averages()}
    assert "fa4::fwd" in names
    assert not names & {"aten::copy_", "aten::clone", "aten::contiguous"}


def handed_over():
    q, k, v = hashed_qkv(9, 14, dim=16)
    yield "dropout", (q, k, v), {"dropout_p": 0.5}, "dropout_p"
    yield "dropout_negative", (q, k, v), {"dropout_p": -0.5}, "dropout_p"
    yield "mask_grad", (q, k, v), {"attn_mask": torch.zeros(9, 14, requires_grad=True)}, "attn_mask requires grad"
    yield "dim_257", tuple(hashed(1, 1, 3, 257) for _ in range(3)), {}, "256"
    yield "dim_0", (q[..., :0], k[..., :0], v), {}, "head dim 0"
    yield "mask_half", (q, k, v), {"attn_mask": torch.zeros(9, 14, dtype=torch.float64)}, "attn_mask is torch.float64"
    yield "heads_differ", (q, k, v.repeat(1, 2, 1, 1)[:, :1]), {"enable_gqa": True}, "differ in heads"


@pytest.mark.parametrize("name, tensors, call, reason", handed_over(), ids=lambda x: x if isinstance(x, str) else "")
def test_what_we_cannot_run_goes_to_pytorch_announced_once(name, tensors, call, reason):
    with pytest.raises(NotImplementedError, match=reason):
        scaled_dot_product_attention(*tensors, **call)
    assert reason in (explain(*tensors, **call).reason or "")

    interface._announced.clear()
    results = []
    for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        torch.manual_seed(0)
        try:
            with set_fallback("warn"), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                results.append(function(*tensors, **call))
                function(*tensors, **call)
        except RuntimeError as error:
            results.append(str(error))
        if function is scaled_dot_product_attention:
            assert len(caught) == 1
            assert reason in str(caught[0].message)
            assert caught[0].filename == __file__
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        assert torch.equal(results[0], results[1]) or results[0].isnan().any()
    with set_fallback("silent"), warnings.catch_warnings():
        warnings.simplefilter("error")
        if not isinstance(results[0], str):
            scaled_dot_product_attention(*tensors, **call)


@pytest.mark.parametrize("rank", [3, 4])
def test_a_mask_and_is_causal_together_are_as_in_pytorch(rank):
    q, k, v = (x if rank == 4 else x[0] for x in hashed_qkv(9, 9))
    mask = hashed(9, 9, seed=3) > -1

    def outcome(function):
        try:
            return function(q, k, v, mask, is_causal=True)
        except RuntimeError as error:
            return str(error)

    with set_fallback("silent"):
        ours, theirs = outcome(scaled_dot_product_attention), outcome(F.scaled_dot_product_attention)
    assert type(ours) is type(theirs)
    assert ours == theirs if isinstance(ours, str) else torch.equal(ours, theirs)


def test_causal_bias_and_nested_tensors_go_to_pytorch():
    q, k, v = hashed_qkv(5, 9)
    bias = causal_lower_right(5, 9)
    with set_fallback("silent"):
        ours = scaled_dot_product_attention(q, k, v, bias)
        assert max_error(ours, F.scaled_dot_product_attention(q, k, v, band(5, 9, hi=4))) < 1e-5
        nested = torch.nested.nested_tensor([torch.ones(2, n, 8).transpose(0, 1) for n in (3, 5)], layout=torch.jagged)
        nested = nested.transpose(1, 2)
        ours, theirs = (
            f(nested, nested, nested) for f in (scaled_dot_product_attention, F.scaled_dot_product_attention)
        )
    assert max_error(ours.values(), theirs.values()) == 0
    strided = torch.nested.nested_tensor([torch.ones(2, n, 8) for n in (3, 5)], layout=torch.strided)
    for q in (nested, strided):
        assert "nested" in explain(q, q, q).reason


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_the_reason():
    found = flash_attn4.backends()
    assert "without CUDA" in found["sm_90"]
    assert found["sm_90"] == found["sm_100"]


def test_fallback_modes():
    with pytest.raises(ValueError, match="'loud'"):
        set_fallback("loud")
    handle = set_fallback("silent")
    assert interface._mode == "silent"
    handle.remove()
    assert interface._mode == "error"
    with set_fallback("warn"):
        handle.remove()
        assert interface._mode == "warn", "removing twice must do nothing"
    program = (
        "import flash_attn4, torch; x = torch.ones(1, 1, 2, 300); flash_attn4.scaled_dot_product_attention(x, x, x)"
    )
    for mode, returncode, words in (("error", 1, "256"), ("silent", 0, ""), ("loud", 1, "FA4_FALLBACK")):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"FA4_FALLBACK": mode}
        )
        assert done.returncode == returncode, done.stderr
        assert words in done.stderr


def bad_sdpa():
    q, k, v = hashed_qkv(9, 14, heads=4, dim=16)
    yield (
        "dtypes",
        (q, k.half(), v.bfloat16()),
        {},
        ValueError,
        "query torch.float32, key torch.float16, value torch.bf",
    )
    yield "devices", (q, k.to("meta"), v), {}, ValueError, "query cpu, key meta, value cpu"
    yield "dims", (q, k[..., :8], v), {}, ValueError, "head dims of query and key differ: 16 and 8"
    yield "lengths", (q, k, v[:, :, :3]), {}, ValueError, "lengths of key and value differ: 14 and 3"
    yield "batch", (q, k.repeat(2, 1, 1, 1)[:3], v), {}, ValueError, "leading dimensions do not broadcast"
    yield "heads", (q, k[:, :2], v[:, :2]), {}, ValueError, "leading dimensions do not broadcast"
    yield "ratio", (q[:, :3], k[:, :2], v[:, :2]), {"enable_gqa": True}, ValueError, "3 and 2"
    yield "mask", (q, k, v), {"attn_mask": torch.zeros(9, 13)}, ValueError, r"attn_mask has shape \(9, 13\)"
    yield "mask_rank", (q, k, v), {"attn_mask": torch.zeros(1, 1, 1, 9, 14)}, ValueError, "attn_mask has shape"
    yield "mask_device", (q, k, v), {"attn_mask": torch.zeros(9, 14, device="meta")}, ValueError, "attn_mask must be on"
    yield "not_tensor", (q, [1], v), {}, TypeError, "key must be a tensor"


@pytest.mark.parametrize("name, args, kwargs, kind, message", bad_sdpa(), ids=lambda x: x if isinstance(x, str) else "")
def test_bad_arguments_are_named(name, args, kwargs, kind, message):
    for function in (scaled_dot_product_attention, explain):
        if name == "ratio" or function is scaled_dot_product_attention:
            with pytest.raises(kind, match=message):
                function(*args, **kwargs)


# ---- flash_attn_func


def test_causal_is_aligned_bottom_right():
    for len_q, len_kv in ((2, 5), (5, 2), (7, 7), (1, 9), (9, 1)):
        q, k, v = hashed_qkv(len_q, len_kv)
        out, lse = flash(q, k, v, causal=True, return_lse=True)
        exact = Reference(q, k, v, attn_mask=torch.ones(len_q, len_kv).tril(len_kv - len_q).bool())
        assert max_error(out, exact.out) < 1e-5
        assert max_error(lse, exact.lse) < 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(2, 3), (0, 0), (None, 2), (3, None), (-1, 1), (4, -1), (100, 100), (1, 0)])
def test_windows_are_about_the_diagonal_that_ends_bottom_right(window, causal):
    q, k, v = hashed_qkv(7, 10)
    left, right = (None if side in (None, -1) else side for side in window)
    right = 0 if causal else right
    mask = band(7, 10, None if left is None else 3 - left, None if right is None else 3 + right)
    assert max_error(flash(q, k, v, window_size=window, causal=causal), Reference(q, k, v, attn_mask=mask).out) < 1e-5


def test_uc_023_every_way_to_say_unbounded():
    q, k, v = hashed_qkv(7, 10)
    full, causal = flash(q, k, v), flash(q, k, v, causal=True)
    for open_ in (None, (-1, -1), (None, None), (-1, None), (None, -1), (2**62, 2**63 - 1), (2**64, 2**64)):
        assert torch.equal(flash(q, k, v, window_size=open_), full)
        assert torch.equal(flash(q, k, v, window_size=open_, causal=True), causal)
    for open_left in ((-1, 0), (None, 0)):
        assert torch.equal(flash(q, k, v, window_size=open_left), causal)
        assert torch.equal(flash(q, k, v, window_size=open_left, causal=True), causal)
    for bad in ((-2, 0), (0, -5), (1.5, 0), ("a", 0), (1,), (1, 2, 3)):
        with pytest.raises(ValueError, match="window_size"):
            flash(q, k, v, window_size=bad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flash_results(dtype):
    q, k, v = hashed_qkv(9, 14, heads=6, heads_kv=2, dim=16, dim_v=8, dtype=dtype, requires_grad=True)
    out, lse = flash(q, k, v, softmax_scale=0.2, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 6, 9, 8), (2, 6, 9))
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert max_error(lse, Reference(q, k, v, scale=0.2).lse) < 1e-5
    dq, dk, dv = torch.autograd.grad(out.float().sum() + lse.float().sum(), (q, k, v))
    assert all(g.shape == x.shape for g, x in zip((dq, dk, dv), (q, k, v), strict=True))


def bad_flash():
    q, k, v = (x.transpose(1, 2) for x in hashed_qkv(9, 14, heads=4, heads_kv=2, dim=16))
    yield "rank", (q[0], k, v), {}, ValueError, r"q must be \[batch, len, heads, dim\], and it has 3"
    yield "batch", (q, k[:1], v), {}, ValueError, "batch of q, k and v differ: 2, 1 and 2"
    yield "lengths", (q, k, v[:, :3]), {}, ValueError, "lengths of k and v differ: 14 and 3"
    yield "heads", (q, k, v[:, :, :1]), {}, ValueError, "heads of k and v differ: 2 and 1"
    yield "ratio", (q[:, :, :3], k, v), {}, ValueError, "3 and 2"
    yield "dims", (q, k[..., :8], v), {}, ValueError, "head dims of q and k differ: 16 and 8"
    yield "dtypes", (q.half(), k, v.double()), {}, ValueError, "q torch.float16, k torch.float32, v torch.float64"
    yield "devices", (q, k, v.to("meta")), {}, ValueError, "q cpu, k cpu, v meta"
    yield "int", (q.int(), k.int(), v.int()), {}, NotImplementedError, "int32"
    yield "dim_257", tuple(torch.ones(1, 2, 1, 257) for _ in range(3)), {}, NotImplementedError, "256: 257"
    yield "scale", (q, k, v), {"softmax_scale": math.nan}, ValueError, "softmax_scale must be finite, and it is nan"
    yield "dropout", (q, k, v), {"dropout_p": 0.1}, NotImplementedError, "dropout_p"
    yield "softcap", (q, k, v), {"softcap": 30.0}, NotImplementedError, "softcap"
    yield "alibi", (q, k, v), {"alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi_slopes"
    yield "list", ([1], k, v), {}, TypeError, "q must be a tensor, and it is list"
    yield "none", (q, k, None), {}, TypeError, "v must be a tensor, and it is NoneType"


@pytest.mark.parametrize(
    "name, args, kwargs, kind, message", bad_flash(), ids=lambda x: x if isinstance(x, str) else ""
)
def test_flash_refuses_with_a_sentence(name, args, kwargs, kind, message):
    with pytest.raises(kind, match=message):
        flash_attn_func(*args, **kwargs)


# ---- both: autocast, torch.func, compile


@pytest.mark.parametrize("function", [scaled_dot_product_attention, flash])
def test_autocast_casts_as_sdpa_does_and_mixed_dtypes_fail_without_it(function):
    q, k, v = hashed_qkv(9, 9)
    with torch.autocast("cpu", torch.bfloat16):
        out = function(q, k, v.bfloat16())
        expected = F.scaled_dot_product_attention(q, k, v.bfloat16())
        assert function(*(x.double() for x in (q, k, v))).dtype == torch.float64
    assert out.dtype == expected.dtype == torch.bfloat16
    assert max_error(out, expected) < 0.02
    with pytest.raises(ValueError, match=r"torch.float32, .* torch.float32, .* torch.bfloat16"):
        function(q, k, v.bfloat16())


@pytest.mark.parametrize("function", [scaled_dot_product_attention, flash])
def test_transforms_of_torch_func_are_right(function):
    q, k, v = hashed_qkv(5, 7, dtype=torch.float64)

    def loss(q, k, v):
        return function(q, k, v).square().sum()

    def expected_loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v).square().sum()

    qg, kg, vg = (x.clone().requires_grad_() for x in (q, k, v))
    expected = torch.autograd.grad(expected_loss(qg, kg, vg), (qg, kg, vg))
    for grads in (
        torch.func.grad(loss, (0, 1, 2))(q, k, v),
        torch.func.vjp(loss, q, k, v)[1](torch.ones((), dtype=torch.float64)),
        torch.func.jacrev(loss, (0, 1, 2))(q, k, v),
        [g[0] for g in torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*(x.unsqueeze(0) for x in (q, k, v)))],
        torch.compile(torch.func.grad(loss, (0, 1, 2)), backend="aot_eager")(q, k, v),
    ):
        assert all(max_error(a, b) < 1e-12 for a, b in zip(grads, expected, strict=True))
    if function is flash:
        with sdpa_kernel(SDPBackend.MATH):
            out, tangent = torch.func.jvp(lambda q: expected_loss(q, k, v), (q,), (q,))
        ours, our_tangent = torch.func.jvp(lambda q: loss(q, k, v), (q,), (q,))
        assert max_error(ours, out) < 1e-10
        assert max_error(our_tangent, tangent) < 1e-10


def test_flash_under_torch_func_with_bands_lse_and_groups():
    q, k, v = hashed_qkv(9, 5, heads=4, heads_kv=2, dtype=torch.float64)

    def loss(q, words):
        out, lse = flash(q, k, v, return_lse=True, **words)
        return out.square().sum() + lse.masked_fill(lse == -math.inf, 0).sum()

    for words in ({"causal": True}, {"window_size": (1, 1)}):
        eager = q.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(eager, words), eager)
        assert max_error(torch.func.grad(loss)(q, words), expected) < 1e-12


def test_vmap_stays_on_our_kernels():
    q, k, v = (hashed(3, 2, 2, 9, 8, seed=i) for i in range(3))
    out, calls = calls_during(lambda: torch.vmap(scaled_dot_product_attention)(q, k, v))
    assert calls["fwd"] == 1
    assert max_error(out, F.scaled_dot_product_attention(q, k, v)) < 1e-5
    out = torch.vmap(lambda q: scaled_dot_product_attention(q, k[0], v[0]))(q)
    assert max_error(out, F.scaled_dot_product_attention(q, k[:1], v[:1])) < 1e-5


def test_uc_103_compile_is_one_graph_with_changing_sizes_and_no_break_where_pytorch_runs():
    def function(q, k, v):
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return out + flash(q, k, v, causal=True, window_size=(3, 0))

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (5, 8, 13):
        q, k, v = hashed_qkv(length, length, requires_grad=True)
        out, calls = calls_during(lambda tensors=(q, k, v): compiled(*tensors))
        assert calls["fwd"] == 2
        assert torch.equal(out, function(q, k, v))
        out.sum().backward()

    with set_fallback("silent"):
        wide = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
        x = hashed(1, 1, 5, 300)
        assert max_error(wide(x, x, x), F.scaled_dot_product_attention(x, x, x)) == 0


def test_export_of_both():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return scaled_dot_product_attention(q, k, v), flash(q, k, v, causal=True)

    q, k, v = hashed_qkv(5, 7)
    for strict in (False, True):
        program = torch.export.export(Model(), (q, k, v), strict=strict)
        assert str(program.graph).count("torch.ops.fa4.fwd") == 2
        assert all(torch.equal(a, b) for a, b in zip(program.module()(q, k, v), Model()(q, k, v), strict=True))


# ---- explain, and the small things


def test_explain_says_what_runs_and_why_nothing_faster():
    q, k, v = hashed_qkv(5, 7)
    found = explain(q, k, v, is_causal=True)
    assert found.backend == "cpu"
    assert found.isa == flash_attn4.cpu_isa()
    assert found.reason is None
    assert set(found.not_faster) >= {"sm_90", "sm_100"}
    text = str(found)
    assert flash_attn4.cpu_isa() in text
    assert "sm_100" in text
    refused = explain(q, k, v, dropout_p=0.1)
    assert refused.backend == "pytorch"
    assert "dropout_p" in str(refused)


def test_explain_under_transforms():
    q, k, v = hashed_qkv(3, 4)
    found = []

    def explained(x):
        found.append(explain(x, k, v))
        return x.sum()

    torch.func.grad(explained)(q)
    torch.func.vmap(explained)(q[None])
    assert [one.backend for one in found] == ["pytorch", "cpu"]
    assert "torch.func" in found[0].reason


def test_explain_agrees_with_what_happens():
    for dim, dtype, gqa in itertools.product((1, 64, 256, 257), DTYPES, (1, 2)):
        q, k, v = hashed_qkv(3, 4, heads=2, heads_kv=gqa, dim=dim, dtype=dtype)
        reason = explain(q, k, v).reason
        try:
            scaled_dot_product_attention(q, k, v, enable_gqa=gqa == 1)
            ran = True
        except NotImplementedError:
            ran = False
        assert ran == (reason is None)


def test_explain_names_a_forced_instruction_set(isa):
    q, k, v = hashed_qkv(3, 4)
    found = explain(q, k, v)
    assert found.isa == isa
    better = list(flash_attn4.cpu_isas())[: list(flash_attn4.cpu_isas()).index(isa)]
    assert set(better) <= set(found.not_faster)


def test_the_public_names_are_documented_and_exist():
    for name in flash_attn4.__all__:
        value = getattr(flash_attn4, name)
        assert name.startswith("__") or value.__doc__
    for function in (
        scaled_dot_product_attention,
        flash_attn_func,
        flash_attn4.enable_sdpa,
        flash_attn4.enable_transformers,
    ):
        assert "Layout [" in function.__doc__.splitlines()[0]


def test_functions_and_results_pickle():
    q, k, v = hashed_qkv(3, 4)
    for value in (scaled_dot_product_attention, flash_attn_func, explain(q, k, v)):
        again = pickle.loads(pickle.dumps(value))
        assert again == value


def test_backends_and_counts():
    assert flash_attn4.backends()["cpu"] is None
    assert {"cpu", "sm_90", "sm_100"} <= set(flash_attn4.backends())
    q, k, v = hashed_qkv(3, 4)
    before = flash_attn4.call_counts()
    scaled_dot_product_attention(q, k, v)
    assert flash_attn4.call_counts()["fwd"] == before["fwd"] + 1


@pytest.mark.parametrize(
    "arch, name",
    [(75, "Turing"), (80, "A100"), (89, "L40"), (110, "Thor"), (120, "RTX 50"), (121, "GB10"), (200, "not know")],
)
def test_a_gpu_without_kernels_is_refused_by_its_name(monkeypatch, arch, name):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: divmod(arch, 10))
    monkeypatch.setattr(ops, "_archs", {})
    found = flash_attn4.backends()
    assert name in found[f"sm_{arch}"]
    assert "H100" in found[f"sm_{arch}"]
    with FakeTensorMode():
        q = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="cuda")
        refused = explain(q, q, q)
        assert refused.backend == "pytorch"
        assert name in refused.reason
        with pytest.raises(NotImplementedError, match=name):
            flash_attn_func(q, q, q)


def test_fake_tensors_of_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(ops, "_archs", {})
    with FakeTensorMode():
        q = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="cuda")
        with set_fallback("silent"):
            assert scaled_dot_product_attention(q, q, q).device.type == "cuda"
        assert explain(q, q, q).reason == "torch finds no CUDA device"
        with pytest.raises(NotImplementedError, match="no CUDA device"):
            flash_attn_func(q, q, q)


@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_is_right_or_refused(grad):
    q, k, v = hashed_qkv(5, 7, dim=8)
    q.requires_grad_(grad)
    tangent = hashed(*q.shape, seed=9)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, tangent)
        with pytest.raises(NotImplementedError, match="forward AD"):
            scaled_dot_product_attention(dual, k, v)
        ours = torch.autograd.forward_ad.unpack_dual(flash(dual, k, v)).tangent
        with sdpa_kernel(SDPBackend.MATH):
            theirs = torch.autograd.forward_ad.unpack_dual(F.scaled_dot_product_attention(dual, k, v)).tangent
    torch.testing.assert_close(ours, theirs)


def test_meta_tensors():
    q, k, v = (x.to("meta") for x in hashed_qkv(5, 7, dim=8))
    assert scaled_dot_product_attention(q, k, v).shape == q.shape
    assert flash(q, k, v).shape == q.shape


@pytest.mark.parametrize("scale", ["x", 1j, 10**400, [0.5], torch.ones(2)], ids=str)
def test_a_scale_that_is_no_number_is_named(scale):
    q, k, v = hashed_qkv(5, 7, dim=8)
    with pytest.raises(TypeError, match=r"^scale must be a number"):
        scaled_dot_product_attention(q, k, v, scale=scale)
    with pytest.raises(TypeError, match=r"^softmax_scale must be a number"):
        flash(q, k, v, softmax_scale=scale)


@pytest.mark.parametrize("dropout_p", [-0.1, math.nan, 2.0, "x", None])
def test_a_dropout_that_is_no_probability_is_refused_as_by_pytorch(dropout_p):
    q, k, v = hashed_qkv(5, 7, dim=8)
    with set_fallback("silent"), pytest.raises((RuntimeError, TypeError), match="dropout"):
        scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)


def test_what_is_not_dense_is_named():
    q, k, v = hashed_qkv(5, 7, dim=8)
    with pytest.raises(NotImplementedError, match=r"key is torch\.sparse_coo"):
        scaled_dot_product_attention(q, k.to_sparse(), v)
    with pytest.raises(NotImplementedError, match=r"k must be a dense tensor.*sparse_coo"):
        flash_attn_func(q, k.to_sparse(), v)
    nested = torch.nested.nested_tensor([hashed(n, 2, 8) for n in (3, 5)], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match="q must be a dense tensor"):
        flash_attn_func(nested, nested, nested)


# ---- calls like one before


@pytest.fixture
def looked(monkeypatch):
    """One element for each call that was looked at closely."""
    calls = []
    check = interface._check_are_tensors
    monkeypatch.setattr(interface, "_check_are_tensors", lambda *args: calls.append(args) or check(*args))
    return calls


FUNCTIONS = {"sdpa": scaled_dot_product_attention, "flash": flash_attn_func}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_like_one_before_is_not_looked_at_again(looked, name):
    function = FUNCTIONS[name]
    for seed in range(3):
        q, k, v = hashed_qkv(6, 6, heads=6, dim=8, seed=seed)
        expected = torch.ops.fa4.fwd(*((q, k, v) if name == "sdpa" else (x.transpose(1, 2) for x in (q, k, v))))[0]
        out = function(q, k, v)
        assert torch.equal(out if name == "sdpa" else out.transpose(1, 2), expected)
    assert len(looked) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_looks_otherwise_is_looked_at(looked, name):
    function = FUNCTIONS[name]
    q, k, v = hashed_qkv(6, 6, heads=6, dim=8)

    def closely(*args, **call):
        before = len(looked)
        function(*args, **call)
        return len(looked) > before

    assert closely(q, k, v)
    assert not closely(q, k, v)
    scale = {"scale" if name == "sdpa" else "softmax_scale": 0.5}
    others = {
        "dtype": (q.half(), k.half(), v.half()),
        "shape": (q[:1], k[:1], v[:1]),
        "stride": (q.transpose(1, 2), k, v),
        "start": (torch.zeros(2 * 6 * 6 * 8 + 1)[1:].view(2, 6, 6, 8), k, v),
        "gradient": (q.clone().requires_grad_(), k, v),
        "parameter": (torch.nn.Parameter(q), k, v),
    }
    assert all(closely(*args) for args in others.values())
    assert closely(q, k, v, **scale)
    assert not closely(q, k, v, **scale)
    with torch.autocast("cpu", torch.bfloat16):
        assert closely(q, k, v)
        assert function(q, k, v).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="must have one dtype"):
        function(q, k.half(), v)
    with pytest.raises(TypeError, match="must be a number"):
        function(q, k, v, **{word: [0.5] for word in scale})
    for mask in ({"attn_mask": torch.ones(6, 6) > 0}, {"is_causal": True}) if name == "sdpa" else ({"causal": True},):
        expected = FUNCTIONS[name](q.double(), k.double(), v.double(), **mask)
        assert max_error(function(q, k, v, **mask), expected) < 1e-5


def test_known_calls_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(interface, "_FINE_MOST", 3)
    for length in range(1, 9):
        scaled_dot_product_attention(*hashed_qkv(length, length, dim=8))
        assert 1 <= len(interface._fine) <= 3


def test_gradients_of_calls_like_one_before():
    for _ in range(3):
        q, k, v = hashed_qkv(5, 7, dim=8, requires_grad=True)
        scaled_dot_product_attention(q, k, v).sum().backward()
        assert all(x.grad.abs().max() > 0 for x in (q, k))
        with torch.no_grad():
            assert not scaled_dot_product_attention(q, k, v).requires_grad


@pytest.mark.parametrize("function", [scaled_dot_product_attention, torch.ops.fa4.fwd], ids=["function", "operator"])
def test_memory_that_is_not_there(function):
    """What torch says of it is kept: programs that try again with less look for it."""
    q, k = (torch.zeros(1, 1, 1, 8).expand(1, 1 << 18, n, 8) for n in (1 << 30, 3))  # an output of 8 PiB
    with pytest.raises(RuntimeError, match="you tried to allocate" if SAYS_WHY else r"is out of memory\."):
        function(q, k, k)
