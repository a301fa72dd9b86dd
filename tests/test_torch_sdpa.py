"""What PyTorch's own test suite asks of scaled_dot_product_attention, asked of ours: as the function, and as PyTorch's
function with enable_sdpa()."""

import contextlib
import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import DTYPES, Reference, assert_within_bound, band, calls_during, hashed, hashed_qkv, max_error
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import flash_attn4
from flash_attn4 import measure

inf = math.inf


class Way:
    """One way to call attention."""

    def __init__(self, name):
        self.enabled = name == "enabled"
        self.function = F.scaled_dot_product_attention if self.enabled else flash_attn4.scaled_dot_product_attention
        self.counted = ("sdpa_fwd", "sdpa_bwd") if self.enabled else ("fwd", "bwd")

    def is_ours(self, q, k, v, *, attn_mask=None, is_causal=False, **call):
        """enable_sdpa() stands in for PyTorch's fused kernel, and the function for all of SDPA."""
        if not self.enabled:
            return True
        return torch._fused_sdp_choice(q, k, v, attn_mask, 0.0, is_causal, **call) == SDPBackend.FLASH_ATTENTION.value

    def __call__(self, q, k, v, dout, **call):
        """{"out": ..., "dq": ..., "dk": ..., "dv": ...}, of our kernels if they are to run this."""
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

        def both():
            out = self.function(q, k, v, **call)
            return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))

        results, calls = calls_during(both)
        expected = int(self.is_ours(q, k, v, **call))
        assert [calls[name] for name in self.counted] == [expected, expected]
        return dict(zip(("out", "dq", "dk", "dv"), results, strict=True))


@pytest.fixture(params=["function", "enabled"])
def way(request):
    with flash_attn4.set_fallback("error"):
        if request.param == "enabled":
            with flash_attn4.enable_sdpa():
                yield Way("enabled")
        else:
            yield Way("function")


def as_4d(x):
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, x.dim() - 4)


def check(way, q, k, v, *, attn_mask=None, is_causal=False, **call):
    """Result and gradients within the bound. Tensors of any rank whose leading dimensions agree."""
    dout = hashed(*q.shape[:-1], v.shape[-1], seed=9, dtype=q.dtype)
    results = way(q, k, v, dout, attn_mask=attn_mask, is_causal=is_causal, **call)
    for name, like in {"out": dout, "dq": q, "dk": k, "dv": v}.items():
        assert results[name].shape == like.shape
    assert_within_bound(
        {name: as_4d(result) for name, result in results.items()},
        *map(as_4d, (q, k, v)),
        attn_mask=None if attn_mask is None else as_4d(attn_mask.expand(*q.shape[:-1], k.shape[-2])),
        hi=0 if is_causal else None,
        scale=call.get("scale"),
        dout=as_4d(dout),
    )
    return results


def make_mask(kind, *shape, dtype=torch.float32, seed=5):
    numbers = hashed(*shape, seed=seed, dtype=dtype)
    if kind == "bool":
        return numbers > -0.5
    return numbers.masked_fill(hashed(*shape, seed=seed + 1) > 1.5, -inf) if kind == "hiding" else numbers


# ---- masks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bool", "float", "hiding"])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_masks_of_every_rank_broadcast_along_every_dimension(way, rank, kind, dtype):
    """Also a row, a column and a single element for all."""
    sizes = (2, 3, 19, 33)
    q, k, v = hashed_qkv(19, 33, heads=3, dim=8, dtype=dtype)
    for shape in itertools.product(*((n, 1) for n in sizes[-rank:])):
        check(way, q, k, v, attn_mask=make_mask(kind, *shape, dtype=dtype))


@pytest.mark.parametrize("kind", ["bool", "hiding"])
def test_a_mask_of_one_dimension_is_a_row_for_all(kind):
    """PyTorch has this on GPUs; on the CPU its choice of a kernel fails."""
    way = Way("function")
    for dtype, size in itertools.product(DTYPES, (33, 1)):
        check(way, *hashed_qkv(19, 33, dim=8, dtype=dtype), attn_mask=make_mask(kind, size, dtype=dtype))


def _padded(mask):
    """As compilers make masks: rows of a whole number of vectors, of which the last elements are not the mask's."""
    return F.pad(mask, (3, 10), value=True if mask.dtype == torch.bool else math.nan)[..., 3:-10]


MASK_LAYOUTS = {
    "transposed": lambda m: m.transpose(-1, -2).contiguous().transpose(-1, -2),
    "heads_innermost": lambda m: m.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "backwards": lambda m: m.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "padded": _padded,
    "every_other_element": lambda m: m.repeat_interleave(2, -1)[..., ::2],
    "one_row_for_all": lambda m: m[:1, :1, :1].expand(m.shape),
    "one_column_for_all": lambda m: m[..., :1].expand(m.shape),
    "one_head_for_all": lambda m: m[:, :1].expand(m.shape),
    "a_row_by_strides": lambda m: m.as_strided(m.shape, (0, 0, 0, 1)),
    "overlapping_rows": lambda m: m.as_strided(m.shape, (m.shape[3], 0, 1, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("layout", MASK_LAYOUTS)
def test_masks_of_any_strides(way, layout, kind, dtype):
    q, k, v = hashed_qkv(37, 53, dim=16, dtype=dtype)
    mask = make_mask(kind, 2, 2, 37, 53, dtype=dtype)
    check(way, q, k, v, attn_mask=MASK_LAYOUTS[layout](mask))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float32_mask_for_half_precision(way, dtype):
    q, k, v = hashed_qkv(37, 53, dim=16, dtype=dtype)
    check(way, q, k, v, attn_mask=make_mask("hiding", 2, 1, 37, 53))


def test_a_band_of_infinities(way):
    """Blocks of keys that are hidden whole, before and after those that are not; and rows that see none."""
    hidden = ~band(600, 600, lo=-9, hi=0)
    q, k, v = hashed_qkv(600, 600, dim=8, batch=1)
    mask = torch.zeros(600, 600).masked_fill(hidden, -inf)
    check(way, q, k, v, attn_mask=mask)
    mask[[0, 127, 300, 599]] = -inf
    results = check(way, q, k, v, attn_mask=mask)
    for name in ("out", "dq"):
        assert (results[name][:, :, [0, 127, 300, 599]] == 0).all()
    boolean = check(way, q, k, v, attn_mask=mask == 0)
    assert all(max_error(boolean[name], results[name]) < 1e-5 for name in results)


def test_padding_masks_hide_what_is_there(way):
    """Batches of different lengths: the keys past an end change nothing."""
    q, k, v = hashed_qkv(40, 40, batch=3, dim=16)
    lengths = torch.tensor([40, 1, 17])
    mask = (torch.arange(40) < lengths[:, None])[:, None, None]
    results = check(way, q, k, v, attn_mask=mask)
    for i, length in enumerate(lengths.tolist()):
        alone = way(q[i : i + 1], k[i : i + 1, :, :length], v[i : i + 1, :, :length], hashed(3, 2, 40, 16)[i : i + 1])
        assert max_error(results["out"][i : i + 1], alone["out"]) < 1e-6
        assert (results["dk"][i, :, length:] == 0).all()
        assert (results["dv"][i, :, length:] == 0).all()


@pytest.mark.parametrize("shape", [(19, 33), (1, 33), (2, 1, 19, 33), (2, 3, 19, 33)])
def test_a_mask_that_requires_grad_gets_its_gradient_from_pytorch(way, shape):
    q, k, v = hashed_qkv(19, 33, heads=3, dim=8, dtype=torch.float64)
    mask = make_mask("float", *shape, dtype=torch.float64).requires_grad_()
    theirs = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(8) + mask, -1) @ v
    (expected,) = torch.autograd.grad(theirs.square().sum(), mask)
    with flash_attn4.set_fallback("silent"):
        (ours,) = torch.autograd.grad(way.function(q, k, v, mask).square().sum(), mask)
    assert max_error(ours, expected) < 1e-12
    with torch.no_grad():
        assert max_error(way.function(q, k, v, mask), theirs) < 1e-12


# ---- is_causal


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "len_q, len_kv", [(1, 1), (1, 40), (40, 1), (23, 56), (56, 23), (64, 64), (128, 256), (256, 128), (267, 130)]
)
def test_is_causal_with_lengths_that_differ(way, len_q, len_kv, dtype):
    q, k, v = hashed_qkv(len_q, len_kv, batch=1, dim=15, dtype=dtype)
    causal = check(way, q, k, v, is_causal=True)
    mask = torch.ones(len_q, len_kv, dtype=torch.bool).tril()
    masked = check(way, q, k, v, attn_mask=mask)
    for name, result in causal.items():
        exact = getattr(Reference(q, k, v, hi=0, dout=hashed(*q.shape, seed=9, dtype=dtype)), name)
        allowed = 16 * torch.finfo(dtype).eps * max(1.0, float(exact.abs().max()))
        assert max_error(result, masked[name]) <= allowed


# ---- shapes


LEADING = [(), (3,), (2, 3), (2, 1, 3), (1, 2, 2, 3)]


@pytest.mark.parametrize("call", ["plain", "causal", "bool_mask", "float_mask", "row_mask"])
@pytest.mark.parametrize("leading", LEADING, ids=len)
def test_inputs_of_2_to_6_dimensions(way, leading, call):
    q, k, v = hashed(*leading, 21, 16), hashed(*leading, 34, 16, seed=1), hashed(*leading, 34, 16, seed=2)
    words = {
        "plain": {},
        "causal": {"is_causal": True},
        "bool_mask": {"attn_mask": make_mask("bool", *leading, 21, 34)},
        "float_mask": {"attn_mask": make_mask("hiding", *leading, 21, 34)},
        "row_mask": {"attn_mask": make_mask("float", 1, 34)},
    }
    check(way, q, k, v, **words[call])


@pytest.mark.parametrize("which", ["q", "k", "v", "kv", "qk"])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=str)
def test_leading_dimensions_that_broadcast(way, which, dims):
    """As if expanded before the call; what was shown to many gets the sum of their gradients."""
    inputs = dict(zip("qkv", hashed_qkv(11, 14, heads=3, dim=8, dtype=torch.float64), strict=True))
    for name in which:
        for dim in dims:
            inputs[name] = inputs[name].narrow(dim, 0, 1)
    for rank in (4, 2) if dims == (0, 1) else (4,):
        small = [x[0, 0] if rank == 2 and name in which else x for name, x in inputs.items()]
        dout = hashed(2, 3, 11, 8, seed=9, dtype=torch.float64)
        ours = way(*small, dout)
        expanded = check(way, *(x.expand(2, 3, *x.shape[-2:]) for x in small))
        for name, x in zip(("dq", "dk", "dv"), small, strict=True):
            assert max_error(ours[name], expanded[name].sum_to_size(x.shape)) < 1e-12
        assert max_error(ours["out"], expanded["out"]) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (3, 3), (8, 4)], ids=str)
@pytest.mark.parametrize("leading", [(), (2,), (2, 2)], ids=len)
def test_grouped_heads(way, leading, heads, dtype):
    heads_q, heads_kv = heads
    q = hashed(*leading, heads_q, 21, 16, dtype=dtype)
    k, v = (hashed(*leading, heads_kv, 34, 16, seed=i, dtype=dtype) for i in (1, 2))
    for words in (
        {},
        {"is_causal": True},
        {"attn_mask": make_mask("bool", 21, 34)},
        {"attn_mask": make_mask("float", *leading, heads_q, 21, 34, dtype=dtype)},
    ):
        check(way, q, k, v, enable_gqa=True, **words)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_dim_of_its_own_for_v(way, dtype):
    for dim, dim_v in ((16, 8), (8, 16), (1, 30), (64, 65)):
        q, k, v = hashed_qkv(21, 34, dim=dim, dim_v=dim_v, dtype=dtype)
        check(way, q, k, v, is_causal=True)


@pytest.mark.parametrize("empty", ["batch", "heads", "len_q", "len_kv", "dim_v", "len_q and len_kv"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_zero_sizes(way, empty, is_causal):
    sizes = {"batch": 2, "heads": 3, "len_q": 4, "len_kv": 5, "dim_v": 8} | dict.fromkeys(empty.split(" and "), 0)
    q, k, v = hashed_qkv(dim=8, requires_grad=True, **sizes)
    with flash_attn4.set_fallback("silent"):
        out = way.function(q, k, v, is_causal=is_causal)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert (out == 0).all()
    for grad, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()


# ---- layouts


def _packed(order):
    """q, k, v as parts of one projection [batch, len, 3 * heads * dim]."""
    x = hashed(2, 45, 3 * 4 * 16)
    parts = x.chunk(3, dim=-1) if order == "parts" else x.view(2, 45, 16 * 4, 3).unbind(-1)
    return [part.unflatten(-1, (4, 16)).transpose(1, 2) for part in parts]


def _each(change):
    return lambda: [change(x) for x in hashed_qkv(45, 45, heads=4, dim=16)]


LAYOUTS = {
    "contiguous": _each(lambda x: x),
    "parts_of_one_projection": lambda: _packed("parts"),
    "interleaved_projection": lambda: _packed("interleaved"),
    "lengths_outermost": _each(lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)),
    "dims_before_lengths": _each(lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
    "sliced_everywhere": _each(lambda x: F.pad(x, (4, 9, 2, 3, 1, 0), value=math.nan)[:, 1:, 2:-3, 4:-9]),
    "every_other_row": _each(lambda x: x.repeat_interleave(2, 2)[:, :, ::2]),
    "every_other_element": _each(lambda x: x.repeat_interleave(2, 3)[..., ::2]),
    "one_head_expanded": _each(lambda x: x[:, :1].expand(x.shape)),
    "one_batch_expanded": _each(lambda x: x[:1].expand(x.shape)),
    "one_row_expanded": _each(lambda x: x[:, :, :1].expand(x.shape)),
    "one_number_expanded": _each(lambda x: x[:1, :1, :1, :1].expand(x.shape)),
    "odd_offsets": _each(lambda x: F.pad(x.flatten(), (1, 0))[1:].view(x.shape)),
    "overlapping": _each(lambda x: x.flatten().as_strided(x.shape, (64, 16, 8, 1))),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_strides(way, layout, dtype):
    q, k, v = (x.to(dtype) for x in LAYOUTS[layout]())
    for words in ({}, {"is_causal": True}):
        check(way, q, k, v, **words)


def test_one_query_with_an_expanded_cache_and_a_mask(way):
    """Strides as a model makes them that decodes with one head of keys for all, its cache longer than what is in it."""
    q = hashed(3, 1, 16, 32).transpose(1, 2)
    cache = hashed(2, 3, 20, 1, 32, seed=1)[:, :, :14].expand(2, 3, 14, 16, 32).transpose(2, 3)
    mask = make_mask("hiding", 3, 14)[:, None, None]
    results = check(way, q, cache[0], cache[1], attn_mask=mask)
    contiguous = check(way, q.contiguous(), cache[0].contiguous(), cache[1].contiguous(), attn_mask=mask.contiguous())
    assert all(torch.equal(results[name], contiguous[name]) for name in results)


def test_strides_of_dimensions_of_one_element_do_not_matter(way):
    q = hashed(1, 1, 1, 2, dtype=torch.float16).transpose(2, 3)  # two queries of head dim 1, last stride 2
    k, v = hashed(1, 1, 1, 1, seed=1, dtype=torch.float16), hashed(1, 1, 1, 1, seed=2, dtype=torch.float16)
    check(way, q, k, v)
    strange = [hashed(1, 1, 5, 8, seed=i).as_strided((1, 1, 5, 8), (7, 3, 8, 1)) for i in range(3)]
    check(way, *strange)


# ---- numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 1, -0.2, 2.5, 1e-5])
def test_a_scale_that_is_given(way, scale, dtype):
    q, k, v = hashed_qkv(37, 53, dim=16, dtype=dtype)
    check(way, q, k, v, scale=scale)
    check(way, q, k, v, scale=scale, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [-1e4, 1e4])
def test_a_scale_that_leaves_each_row_one_key(way, scale, dtype):
    """The weights of the gradient are made from the log-sum-exp: they are as good as its last place allows."""
    q, k, v = hashed_qkv(37, 53, dim=16, dtype=dtype)
    dout = hashed(2, 2, 37, 16, seed=9, dtype=dtype)
    results = way(q, k, v, dout, scale=scale)
    assert_within_bound({"out": results["out"]}, q, k, v, scale=scale)
    exact = Reference(q, k, v, scale=scale, dout=dout)
    last_place = torch.finfo(dtype).eps * float(exact.lse.abs().max())
    assert max_error(results["dv"], exact.dv) <= 4 * last_place * exact.magnitude["dv"]
    assert results["dq"].isfinite().all()
    assert results["dk"].isfinite().all()


def test_the_given_default_scale_is_the_default(way):
    q, k, v = hashed_qkv(37, 53, dim=24)
    dout = hashed(2, 2, 37, 24, seed=9)
    default, given = way(q, k, v, dout), way(q, k, v, dout, scale=1 / math.sqrt(24))
    assert all(torch.equal(default[name], given[name]) for name in default)


@pytest.mark.parametrize("dtype, size", [(torch.float16, 64.0), (torch.bfloat16, 133120.0), (torch.float32, 1e15)])
def test_scores_beyond_the_range_of_the_inputs(way, dtype, size):
    """All keys alike, and their score no number of that dtype: the mean of the values all the same."""
    x = torch.full((1, 2, 23, 80), size, dtype=dtype)
    values = hashed(1, 2, 23, 80, dtype=dtype)
    assert_within_bound({"out": way.function(x, x, values)}, x, x, values)
    assert max_error(way.function(x, x, x), x) <= 2 * torch.finfo(dtype).eps * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", ["plain", "causal", "bool_mask", "float_mask"])
@pytest.mark.parametrize("len_q, len_kv, dim", [(267, 514, 8), (70, 1030, 16)])
def test_fused_against_the_formula_over_many_blocks(way, len_q, len_kv, dim, words, dtype):
    q, k, v = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in hashed_qkv(len_q, len_kv, batch=1, dim=dim, dtype=dtype)
    )
    call = {
        "plain": {},
        "causal": {"is_causal": True},
        "bool_mask": {"attn_mask": make_mask("bool", 1, 2, len_q, len_kv)},
        "float_mask": {"attn_mask": make_mask("hiding", len_q, len_kv, dtype=dtype)},
    }
    check(way, q, k, v, **call[words])


# ---- gradients


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("words", ["plain", "causal", "mask"])
def test_gradcheck(way, words, contiguous):
    inputs = [hashed(2, n, 2, 5, seed=n, dtype=torch.float64, spread=1.0).transpose(1, 2) for n in (4, 6, 7)]
    q, k, v = (x[:, :, :6].contiguous() if contiguous else x[:, :, :6] for x in inputs)
    call = {
        "plain": {},
        "causal": {"is_causal": True},
        "mask": {"attn_mask": make_mask("hiding", 4, 6, dtype=torch.float64)},
    }
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: way.function(*x, **call[words]), leaves)


@pytest.mark.parametrize("wanted", [w for n in range(4) for w in itertools.combinations("qkv", n)], ids="".join)
def test_only_what_requires_grad_gets_one(way, wanted):
    tensors = dict(zip("qkv", hashed_qkv(21, 34, dim=16), strict=True))
    dout = hashed(2, 2, 21, 16, seed=9)
    all_of_them = way(*tensors.values(), dout)
    leaves = {name: x.clone().requires_grad_(name in wanted) for name, x in tensors.items()}
    out = way.function(*leaves.values())
    assert out.requires_grad == bool(wanted)
    assert torch.equal(out, all_of_them["out"])
    if wanted:
        out.backward(dout)
    for name, x in leaves.items():
        if name in wanted:
            assert torch.equal(x.grad, all_of_them[f"d{name}"])
        else:
            assert x.grad is None


def test_the_gradient_of_one_tensor_in_all_three_places_is_the_sum(way):
    x = hashed(2, 2, 33, 16, dtype=torch.float64)
    dout = hashed(2, 2, 33, 16, seed=9, dtype=torch.float64)
    parts = way(x, x, x, dout, is_causal=True)
    leaf = x.clone().requires_grad_()
    way.function(leaf, leaf, leaf, is_causal=True).backward(dout)
    assert max_error(leaf.grad, parts["dq"] + parts["dk"] + parts["dv"]) < 1e-12


@pytest.mark.parametrize("layout", ["one_number", "one_row", "transposed", "every_other_element"])
def test_gradients_of_any_strides_come_in(way, layout):
    q, k, v = hashed_qkv(21, 34, dim=16)
    x = hashed(2, 2, 21, 16, seed=9)
    dout = {
        "one_number": lambda: torch.ones(()).expand(x.shape),
        "one_row": lambda: x[:, :, :1].expand(x.shape),
        "transposed": lambda: x.transpose(2, 3).contiguous().transpose(2, 3),
        "every_other_element": lambda: x.repeat_interleave(2, 3)[..., ::2],
    }[layout]()
    ours, same = way(q, k, v, dout), way(q, k, v, dout.contiguous())
    assert_within_bound(ours, q, k, v, dout=dout)
    assert all(torch.equal(ours[name], same[name]) for name in ours)


def test_deterministic_algorithms_are_no_matter(way):
    q, k, v = hashed_qkv(300, 300, dim=16)
    dout = hashed(2, 2, 300, 16, seed=9)
    before = way(q, k, v, dout)
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = way(q, k, v, dout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(before[name], again[name]) for name in before)


# ---- the log-sum-exp


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", ["plain", "causal", "hiding", "scale"])
def test_the_log_sum_exp(way, words, dtype):
    q, k, v = hashed_qkv(37, 53, dim=16, dtype=dtype)
    mask = make_mask("hiding", 37, 53, dtype=dtype) if words == "hiding" else None
    if mask is not None:
        mask[5] = -inf
    scale = 0.3 if words == "scale" else None
    if way.enabled:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = operator(q, k, v, 0.0, words == "causal", attn_mask=mask, scale=scale)
    else:
        out, lse = torch.ops.fa4.fwd(q, k, v, mask, hi=0 if words == "causal" else None, scale=scale)
    hi = 0 if words == "causal" else None
    assert_within_bound({"out": out, "lse": lse}, q, k, v, attn_mask=mask, hi=hi, scale=scale)
    assert (lse == -inf).any() == (words == "hiding")


# ---- dropout, the choice of a kernel, other kinds of tensors


@pytest.mark.parametrize("dropout_p", [0.0, 0, False])
def test_dropout_of_zero_is_none(way, dropout_p):
    q, k, v = hashed_qkv(21, 34, dim=16)
    state = torch.get_rng_state()
    out, calls = calls_during(lambda: way.function(q, k, v, None, dropout_p))
    assert calls[way.counted[0]] == 1
    assert torch.equal(out, way.function(q, k, v))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dropout_p", [0.7, 1.0])
def test_dropout_is_pytorchs_and_of_its_random_numbers(way, dropout_p):
    q, k, v = hashed_qkv(21, 34, dim=16)
    results = []
    for function in (way.function, F.scaled_dot_product_attention):
        torch.manual_seed(1)
        with flash_attn4.set_fallback("silent"):
            results.append(function(q, k, v, dropout_p=dropout_p))
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch_chooses_a_kernel_as_before(dtype):
    """That it takes the fused one for these is what the other tests rely on to reach ours."""
    q, k, v = hashed_qkv(128, 64, dim=16, dtype=dtype)
    mask = make_mask("float", 128, 64, dtype=dtype)
    calls = {
        "plain": ((q, k, v), {}),
        "causal": ((q, k, v), {"is_causal": True}),
        "mask": ((q, k, v, mask), {}),
        "mask_4d": ((q, k, v, mask[None, None]), {}),
        "bool_mask": ((q, k, v, mask > 0), {}),
        "scale": ((q, k, v), {"scale": 0.3}),
        "gqa": ((q, k[:, :1], v[:, :1]), {"enable_gqa": True}),
        "transposed": ([x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)], {}),
        "expanded": ([x[:1, :1].expand(x.shape) for x in (q, k, v)], {}),
    }
    maths = {
        "dropout": ((q, k, v, None, 0.7), {}),
        "rank_3": ((q[0], k[0], v[0]), {}),
        "mask_3d": ((q, k, v, mask[None]), {}),
    }
    for context in (contextlib.nullcontext, flash_attn4.enable_sdpa, contextlib.nullcontext):
        with context():
            for name, (args, words) in (calls | maths).items():
                expected = SDPBackend.FLASH_ATTENTION if name in calls else SDPBackend.MATH
                assert torch._fused_sdp_choice(*args, **words) == expected.value, name


# ---- torch.nn.attention.bias


BIASES = {"upper_left": causal_upper_left, "lower_right": causal_lower_right}
BIAS_SHAPES = [(32, 32, 16), (32, 64, 32), (64, 32, 32), (23, 56, 15)]


def bias_mask(variant, len_q, len_kv):
    return torch.ones(len_q, len_kv).tril(len_kv - len_q if variant == "lower_right" else 0).bool()


def make_bias(variant, len_q, len_kv):
    with warnings.catch_warnings():  # of rows that see no key
        warnings.simplefilter("ignore")
        return BIASES[variant](len_q, len_kv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
@pytest.mark.parametrize("variant", BIASES)
def test_causal_biases(way, variant, shape, dtype):
    len_q, len_kv, dim = shape
    leaves = hashed_qkv(len_q, len_kv, dim=dim, dtype=dtype, requires_grad=True)
    dout = hashed(2, 2, len_q, dim, seed=9, dtype=dtype)
    with flash_attn4.set_fallback("silent"):
        out, calls = calls_during(lambda: way.function(*leaves, make_bias(variant, len_q, len_kv)))
    assert calls["sdpa_fwd"] == way.enabled
    grads = torch.autograd.grad(out, leaves, dout)
    if way.enabled:
        ours = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
        assert_within_bound(ours, *leaves, attn_mask=bias_mask(variant, len_q, len_kv), dout=dout)


def test_a_bias_is_the_mask_that_it_stands_for_and_upper_left_is_is_causal(way):
    q, k, v = hashed_qkv(23, 56, dim=15)
    with flash_attn4.set_fallback("silent"):
        for variant in BIASES:
            biased = way.function(q, k, v, make_bias(variant, 23, 56))
            assert max_error(biased, way.function(q, k, v, bias_mask(variant, 23, 56))) < 1e-5
        biased = way.function(q, k, v, make_bias("upper_left", 23, 56))
    assert max_error(biased, way.function(q, k, v, is_causal=True)) < 1e-5


class Biased(torch.nn.Module):
    """Attention over what a projection makes of x, with a causal bias."""

    def __init__(self, function, bias):
        super().__init__()
        self.function, self.bias = function, bias
        self.projection = torch.nn.Linear(32, 3 * 32)

    def forward(self, x, past):
        q, k, v = self.projection(x).unflatten(-1, (3, 2, 16)).transpose(1, 3).unbind(2)
        k, v = (torch.cat([past, y], dim=2) for y in (k, v))
        return self.function(q, k, v, attn_mask=self.bias)


@pytest.mark.parametrize("variant", BIASES)
def test_a_compiled_module_with_a_causal_bias(way, variant):
    torch.manual_seed(0)
    module = Biased(way.function, make_bias(variant, 23, 56))
    x, past = hashed(2, 23, 32), hashed(2, 2, 33, 16, seed=1)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    results = []
    with flash_attn4.set_fallback("silent"):
        for run in (module, compiled):
            module.zero_grad()
            out, calls = calls_during(lambda run=run: run(x, past))
            assert calls["sdpa_fwd"] == way.enabled
            out.square().sum().backward()
            results.append([out, *(p.grad for p in module.parameters())])
    for eager, graph in zip(*results, strict=True):
        assert max_error(graph, eager) <= 1e-5 * max(1.0, float(eager.detach().abs().max()))
    q, k, v = module.projection(x).unflatten(-1, (3, 2, 16)).transpose(1, 3).unbind(2)
    k, v = (torch.cat([past, y], dim=2) for y in (k, v))
    assert max_error(out, Reference(q, k, v, attn_mask=bias_mask(variant, 23, 56)).out) < 1e-5


# ---- what is refused


def refused():
    q, k, v = hashed_qkv(9, 14, heads=4, dim=16)
    yield "dtypes", (q, k.half(), v.half()), {}
    yield "integers", (q.int(), k.int(), v.int()), {}
    yield "query_1d", (q[0, 0, 0], k[0, 0], v[0, 0]), {}
    yield "key_1d", (q[0, 0], k[0, 0, 0], v[0, 0]), {}
    yield "value_1d", (q[0, 0], k[0, 0], v[0, 0, 0]), {}
    yield "all_1d", (q[0, 0, 0], k[0, 0, 0], v[0, 0, 0]), {}
    yield "batch", (torch.cat([q, q[:1]]), k, v), {}
    yield "heads_without_gqa", (q, k[:, :2], v[:, :2]), {}
    yield "heads_no_multiple", (q[:, :3], k[:, :2], v[:, :2]), {"enable_gqa": True}
    yield "head_dims", (q, k[..., :8], v), {}
    yield "lengths", (q, k, v[:, :, :9]), {}
    yield "mask_of_integers", (q, k, v, torch.ones(9, 14, dtype=torch.int64)), {}
    yield "mask_of_bytes", (q, k, v, torch.ones(9, 14, dtype=torch.uint8)), {}
    yield "mask_of_half_precision", (q, k, v, torch.zeros(9, 14, dtype=torch.float16)), {}
    yield "mask_of_bfloat16_for_float64", (q.double(), k.double(), v.double(), torch.zeros(9, 14).bfloat16()), {}
    yield "mask_of_other_len_q", (q, k, v, torch.zeros(8, 14)), {}
    yield "mask_of_other_len_kv", (q, k, v, torch.zeros(9, 9)), {}
    yield "mask_transposed", (q, k, v, torch.zeros(14, 9)), {}
    yield "mask_of_other_heads", (q, k, v, torch.zeros(2, 3, 9, 14)), {}
    yield "mask_of_other_batch", (q, k, v, torch.zeros(3, 4, 9, 14)), {}
    yield "bias_and_is_causal", (q, k, v, causal_upper_left(9, 14), 0.0, True), {}
    yield "dropout_above_1", (q, k, v, None, 1.5), {}
    yield "dropout_below_0", (q, k, v, None, -0.5), {}


@pytest.mark.parametrize("name, args, words", refused(), ids=lambda x: x if isinstance(x, str) else "")
def test_what_pytorch_refuses_is_refused(way, name, args, words):
    if name != "lengths":  # PyTorch's fused kernel does not look at these
        with flash_attn4.set_fallback("silent"), pytest.raises((RuntimeError, ValueError, TypeError), match=r"\w"):
            F.scaled_dot_product_attention(*args, **words)
    with flash_attn4.set_fallback("silent"), pytest.raises((RuntimeError, ValueError, TypeError), match=r"\w"):
        way.function(*args, **words)


@pytest.mark.parametrize("kind", ["bool", "hiding"])
def test_a_mask_and_is_causal_are_refused_or_both_obeyed(way, kind):
    """PyTorch's fused kernel obeys both, its math path refuses."""
    q, k, v = hashed_qkv(9, 14)
    mask = make_mask(kind, 9, 14)
    with flash_attn4.set_fallback("silent"):
        assert_within_bound({"out": way.function(q, k, v, mask, 0.0, True)}, q, k, v, attn_mask=mask, hi=0)
        with pytest.raises(RuntimeError, match="is_causal"):
            way.function(q[0], k[0], v[0], mask, 0.0, True)


# ---- what causal saves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_costs_about_half(way, dtype):
    """Of 2048 queries and keys just over half the blocks have something to do, forward and backward."""
    q, k, v = hashed_qkv(2048, 2048, batch=1, heads=1, dim=64, dtype=dtype, requires_grad=True)
    dout = hashed(1, 1, 2048, 64, seed=9, dtype=dtype)
    full, causal = way.function(q, k, v), way.function(q, k, v, is_causal=True)

    def forward(is_causal):
        with torch.no_grad():
            return way.function(q, k, v, is_causal=is_causal)

    def backward(out):
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    pairs = {
        "forward": {"full": lambda: forward(False), "causal": lambda: forward(True)},
        "backward": {"full": lambda: backward(full), "causal": lambda: backward(causal)},
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, functions in pairs.items():
            parts = []
            while not parts or (parts[-1] > 0.7 and len(parts) < 4):  # again: a busy machine spoils a measurement
                times = measure.paired(functions, seconds=0.3, min_runs=9)
                parts.append(measure.ratio(times["causal"], times["full"]).median)
            assert parts[-1] <= 0.7, f"{name}: causal takes {parts} of full"
    finally:
        torch.set_num_threads(threads)
