"""Random cases on every instruction set: shapes, dtypes, masks, bands, groups, scales, strides, poisoned surroundings.

FA4_RANDOM_CASES=10000 runs that many instead of the 2,000 of CI; FA4_RANDOM_SEED draws others.
"""

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from reference import accurate, accurate_gradients, attention, hashed, max_error, scattered

import flash_attn4
from flash_attn4 import _C

CASES = int(os.environ.get("FA4_RANDOM_CASES", 2000))
SEED = int(os.environ.get("FA4_RANDOM_SEED", 0))
ISAS = [name for name, why in flash_attn4.cpu_isas().items() if why is None]
ODD = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 61, 63, 64, 65, 97, 127, 128, 129]

lengths = st.one_of(st.sampled_from([0, *ODD, 191, 193, 256, 257]), st.integers(1, 130))
dims = st.one_of(st.sampled_from([*ODD, 24, 40, 80, 96, 192, 255, 256]), st.integers(1, 72))
orders = st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0), (1, 0, 2, 3)])
layouts = st.fixed_dictionaries(
    {
        "order": orders,
        "offset": st.integers(0, 9),
        "gap": st.sampled_from([0, 0, 1, 3, 8]),
        "last": st.sampled_from([1, 1, 1, 2]),
    }
)


@st.composite
def cases(draw, backward):
    case = {
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])),
        "batch": draw(st.sampled_from([1, 1, 2, 3])),
        "heads_kv": draw(st.sampled_from([1, 1, 2, 3])),
        "group": draw(st.sampled_from([1, 1, 1, 2, 3, 4, 5])),
        "len_q": draw(lengths),
        "len_kv": draw(lengths),
        "dim": draw(dims),
        "dim_v": draw(dims),
        "scale": draw(st.sampled_from([None, None, None, 1.0, 0.0, -0.3, 0.01])),
        "size": draw(st.sampled_from([1.0, 1.0, 1.0, 5.0])),
        "lo": draw(st.one_of(st.none(), st.none(), st.integers(-140, 140))),
        "hi": draw(st.one_of(st.none(), st.just(0), st.integers(-140, 140))),
        "mask": draw(st.sampled_from(["none", "none", "bool", "float", "own"])),
        "mask_shape": draw(st.tuples(*[st.booleans()] * 4)),
        "lengths": draw(st.booleans()) and draw(st.booleans()),
        "layouts": [draw(layouts) for _ in range(4)],
        "expand_kv": draw(st.integers(0, 7)) == 0,
        "isa": draw(st.sampled_from(ISAS)),
        "seed": draw(st.integers(0, 1000)),
        "dlse": backward and draw(st.booleans()),
    }
    if backward:
        case["len_q"], case["len_kv"] = min(case["len_q"], 193), min(case["len_kv"], 193)
    return case


def build(case):
    """q, k, v and the keywords of the operator."""
    b, h, g = case["batch"], case["heads_kv"], case["group"]
    shapes = [
        (b, h * g, case["len_q"], case["dim"]),
        (b, h, case["len_kv"], case["dim"]),
        (b, h, case["len_kv"], case["dim_v"]),
    ]
    mask_shape = tuple(
        n if keep else 1 for n, keep in zip((b, h * g, case["len_q"], case["len_kv"]), case["mask_shape"], strict=True)
    )
    q, k, v, bias = hashed(*shapes, mask_shape, dtype=case["dtype"], seed=case["seed"])
    q, k = q * case["size"], k * case["size"]
    q, k, v = (scattered(x, **layout) for x, layout in zip((q, k, v), case["layouts"], strict=False))
    if case["expand_kv"]:
        k, v = k[:, :1].expand(-1, h, -1, -1), v[:, :1].expand(-1, h, -1, -1)
    how = {"lo": case["lo"], "hi": case["hi"], "scale": case["scale"]}
    if case["mask"] == "bool":
        how["mask"] = scattered(bias > -0.8, **case["layouts"][3], fill=True)
    elif case["mask"] != "none":
        bias = bias.masked_fill(bias < -1.5, -math.inf)
        bias = bias.float() if case["mask"] == "float" and case["dtype"] != torch.float64 else bias
        how["mask"] = scattered(bias, **case["layouts"][3])
    if case["lengths"]:
        how["len_kv"] = torch.tensor(
            [(case["seed"] * (i + 3)) % (case["len_kv"] + 1) for i in range(b)], dtype=torch.int32
        )
    return q, k, v, how


def operator(q, k, v, *, mask=None, **how):
    return torch.ops.fa4.fwd(q, k, v, attn_mask=mask, **how)


def run(test, count):
    """test as a hypothesis test of `count` cases, the same in every run."""
    profile = settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    return seed(SEED)(profile(test))


def in_isa(case, test):
    _C.force_isa(case["isa"])
    try:
        return test()
    finally:
        _C.force_isa(None)


@pytest.mark.timeout(1800)
def test_forward():
    @given(cases(backward=False))
    def one(case):
        q, k, v, how = build(case)
        out, lse = in_isa(case, lambda: operator(q, k, v, **how))
        accurate(out, q, k, v, **how)
        exact = attention(q, k, v, **how)[1]
        tight = 1e-12 if case["dtype"] == torch.float64 else 1e-5
        assert max_error(lse, exact) <= tight * (
            1 + float(exact[exact.isfinite()].abs().max() if exact.isfinite().any() else 0)
        )

    run(one, CASES * 3 // 4)()


@pytest.mark.timeout(1800)
def test_backward():
    @given(cases(backward=True))
    def one(case):
        q, k, v, how = build(case)
        dout = hashed((*q.shape[:3], v.shape[3]), dtype=q.dtype, seed=case["seed"] + 1)[0]
        dlse = hashed(q.shape[:3], seed=case["seed"] + 2)[0] if case["dlse"] else None
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def backward():
            out, lse = operator(*leaves, **how)
            results, grads = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse.to(lse.dtype)])
            return torch.autograd.grad(results, leaves, grads)

        ours = in_isa(case, backward)
        accurate_gradients(ours, q, k, v, dout, dlse, **how)

    run(one, CASES - CASES * 3 // 4)()
