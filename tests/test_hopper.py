"""The Hopper forward in the simulator: the Blackwell forward's cases on the plan for sm_90, and those of its own."""

import pytest
import torch

test_blackwell = pytest.importorskip("test_blackwell", reason="the simulator needs pybind11: pip install -e '.[test]'")
from test_blackwell import *  # noqa: E402, F403


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setattr(test_blackwell, "ARCH", 90)


def test_the_plan_is_hoppers():
    q, k, v = test_blackwell.inputs("bf16_d128", 10, 10)
    call = test_blackwell.plan.params(q, k, v, torch.empty_like(q), torch.empty(q.shape[:3]))
    assert test_blackwell.plan.fwd_plan(call, 90)["kernel"] == "fa4_sm90_fwd_bf16_d128"


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("dim", [256, 200, 136])
def test_wide_heads(dtype, dim):
    variant = f"{dtype}_d128"  # names the dtype
    test_blackwell.check(*test_blackwell.inputs(variant, 200, 300, heads=2, heads_kv=1, dim=dim, dim_v=dim), hi=120)
    test_blackwell.check(*test_blackwell.inputs(variant, 140, 150, dim=dim, dim_v=64), lo=-30, seeds=2)


@pytest.mark.parametrize(
    "dtype, how",
    [
        ("bf16", {}),
        ("f16", {"hi": 8000}),
        ("bf16", {"lo": 7700, "hi": 8050}),
        ("bf16", {"scale": -0.4}),
        ("f16", {"scale": 4.0}),
    ],
)
def test_many_keys(dtype, how):
    """The tiling for long calls at head dim 128 computes its softmax another way."""
    q, k, v = test_blackwell.inputs(f"{dtype}_d128", 200, 8200, heads=2, heads_kv=1)
    test_blackwell.check(q, k, v, multiprocessors=1, seeds=1, **how)


def test_many_keys_bits_do_not_depend_on_where_a_row_lies_in_its_tile():
    q, k, v = test_blackwell.inputs("bf16_d128", 200, 8200)
    whole, lse = test_blackwell.simulate(q, k, v, hi=8000)
    part = test_blackwell.simulate(q[:, :, 70:150], k, v, hi=8070)
    assert torch.equal(part[0], whole[:, :, 70:150])
    assert torch.equal(part[1], lse[:, :, 70:150])


def test_many_keys_lengths_and_what_is_not_finite():
    q, k, v = test_blackwell.inputs("bf16_d128", 70, 4200, batch=2)
    lengths = torch.tensor([4100, 77], dtype=torch.int32)
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:], v[b, :, n:] = test_blackwell.nan, test_blackwell.inf
    out, lse = test_blackwell.simulate(q, k, v, len_kv_of=lengths)
    clean = k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0)
    test_blackwell.assert_within_bound({"out": out, "lse": lse}, q, *clean, len_kv=lengths)
    for value in (test_blackwell.nan, -test_blackwell.nan, test_blackwell.inf):
        q[0, 0, 5, 0] = value
        out, lse = test_blackwell.simulate(q, k, v, len_kv_of=lengths)
        assert out[0, 0, 5].isnan().all()
        assert lse[0, 0, 5].isnan()
        assert out.isnan().any(-1).sum() == 1
