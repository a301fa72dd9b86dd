"""The Blackwell forward's code for compute capability 10.3 (B300) in the simulator: no exponential is emulated there,
and loads from tensor memory find maxima. Some of test_blackwell.py's cases on each of its kernels."""

import pytest
import torch

test_blackwell = pytest.importorskip("test_blackwell", reason="the simulator needs pybind11: pip install -e '.[test]'")
check, inputs, planned, simulate = (getattr(test_blackwell, n) for n in ("check", "inputs", "planned", "simulate"))
test_a_nan_shows_in_the_rows_that_see_it = test_blackwell.test_a_nan_shows_in_the_rows_that_see_it
VARIANTS, bf16 = test_blackwell.VARIANTS, test_blackwell.bf16


@pytest.fixture(autouse=True)
def on_b300(monkeypatch):
    monkeypatch.setattr(test_blackwell, "ARCH", 103)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_plan_takes_its_own_kernels_and_otherwise_the_same(variant, monkeypatch):
    q, k, v = inputs(variant, 300, 100)
    own = planned(q, k, v, ctas=1)
    assert own["kernel"] == f"fa4_sm103_fwd_{variant}"
    monkeypatch.setattr(test_blackwell, "ARCH", 100)
    others = planned(q, k, v, ctas=1)
    assert others["kernel"] == f"fa4_sm100_fwd_{variant}"
    for name in ("grid", "block", "cluster", "shared_bytes", "args"):
        assert own[name] == others[name], name


@pytest.mark.parametrize("variant", VARIANTS)
def test_lengths_and_causal(variant):
    check(*inputs(variant, 129, 257))
    check(*inputs(variant, 200, 300), hi=100)


@bf16
@pytest.mark.parametrize("lo, hi", [(-100, 0), (5, 200), (-130, -120)])
def test_windows(variant, lo, hi):
    check(*inputs(variant, 400, 420), lo=lo, hi=hi)


@bf16
def test_random_schedules(variant):
    q, k, v = inputs(variant, 260, 600, heads=3, heads_kv=1)
    check(q, k, v, multiprocessors=1, seeds=20, lo=-50, hi=320)
    check(q, k, v, multiprocessors=1, seeds=1, len_kv_of=torch.tensor([411], dtype=torch.int32))


@bf16
def test_the_maximum_grows(variant):
    q, k, v = inputs(variant, 140, 500)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = 1
    for scores in (torch.linspace(0, 60, 500), torch.linspace(10000, -10000, 500), torch.linspace(-10000, 10000, 500)):
        k[..., 0] = scores.to(k.dtype)
        check(q, k, v, scale=1.0)


@pytest.mark.parametrize("variant", ["bf16_d128", "f16_d128", "bf16_d192_v128", "f16_d192_v128"])
def test_pairs_give_the_same_bits(variant):
    q, k, v = inputs(variant, 520, 300, heads=2, heads_kv=1)
    out, lse = check(q, k, v, ctas=2)
    alone = simulate(q, k, v, ctas=1)
    assert torch.equal(out, alone[0])
    assert torch.equal(lse, alone[1])
