"""The Blackwell forward: its plan, run in the simulator on the PTX that the build made.

Every case runs with operations as early and as late as they may be, under the manual's rules, and must come out within
the bound that the CPU's results have, without a finding. FA4_SIM_SEEDS=20 adds that many random schedules to every
case, not only to those that CI gives them.
"""

import functools
import math
import os
from pathlib import Path

import pytest
import torch
from conftest import Reference, assert_within_bound
from reference import hashed, scattered

ROOT = Path(__file__).parents[1]
PTX = ROOT / "build" / "ptx"
SEEDS = int(os.environ.get("FA4_SIM_SEEDS", 0))
DIMS = {"d64": (64, 64), "d96": (96, 96), "d128": (128, 128), "d192_v128": (192, 128)}
VARIANTS = [f"{dtype}_{name}" for dtype in ("bf16", "f16") for name in DIMS]
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385]
ARCH = 100
inf, nan = math.inf, math.nan

pytest.importorskip("pybind11", reason="the simulator needs pybind11: pip install -e '.[test]'")
import ptxsim  # noqa: E402
from ptxsim import plan  # noqa: E402


@functools.cache
def module(kernel):
    path = PTX / f"{kernel}.ptx"
    if not path.exists():
        pytest.skip(f"{path} does not exist: the build found no nvcc")
    return ptxsim.Module(path.read_text())


def dtype_of(variant):
    return torch.bfloat16 if variant.startswith("bf16") else torch.float16


def planned(q, k, v, *, multiprocessors=2, ctas=0, **how):
    tensors = plan.params(q, k, v, q.new_empty(*q.shape[:3], v.shape[3]), torch.empty(q.shape[:3]), **how)
    return plan.fwd_plan(tensors, ARCH, multiprocessors, ctas)


def simulate(q, k, v, *, schedule="early", seed=0, multiprocessors=2, ctas=0, **how):
    """out, lse of the kernel that the plan picks, in the simulator; a finding raises. ctas asks for the form: 1 CTAs
    alone, 2 pairs."""
    chosen = {"multiprocessors": multiprocessors, "ctas": ctas, **how}
    kernel = planned(q, k, v, **chosen)["kernel"]
    out, lse, report = plan.forward(module(kernel), q, k, v, arch=ARCH, schedule=schedule, seed=seed, **chosen)
    assert report is None or report.finished
    return out, lse


def right(out, lse, q, k, v, **call):
    """out is within the bound. So is the log-sum-exp, but for the exponentials of a row that a cubic makes: each is
    right to a part in 9e-5, and so is their sum."""
    assert_within_bound({"out": out}, q, k, v, **call)
    exact = Reference(q, k, v, **call).lse
    seen = exact.isfinite()
    assert torch.equal(lse.double()[~seen], exact[~seen])
    if seen.any():
        assert float((lse.double() - exact)[seen].abs().max()) <= 9e-5 + 4e-6 * float(exact[seen].abs().max())


def check(q, k, v, *, schedules=("early", "late"), seeds=0, **how):
    """Right under every schedule, and the same bits under all of them."""
    bound = {name: value for name, value in how.items() if name not in ("len_kv_of", "multiprocessors", "ctas")}
    results = [simulate(q, k, v, schedule=schedule, **how) for schedule in schedules]
    results += [simulate(q, k, v, schedule="random", seed=s, **how) for s in range(max(seeds, SEEDS))]
    out, lse = results[0]
    right(out, lse, q, k, v, len_kv=how.get("len_kv_of"), **bound)
    for other in results[1:]:
        assert torch.equal(other[0], out)
        assert torch.equal(other[1], lse)
    return out, lse


def inputs(variant, len_q, len_kv, *, batch=1, heads=1, heads_kv=None, dim=None, dim_v=None, seed=0):
    own_dim, own_dim_v = DIMS[variant.split("_", 1)[1]]
    dim, dim_v = dim or own_dim, dim_v or own_dim_v
    heads_kv = heads if heads_kv is None else heads_kv
    shapes = (batch, heads, len_q, dim), (batch, heads_kv, len_kv, dim), (batch, heads_kv, len_kv, dim_v)
    return hashed(*shapes, dtype=dtype_of(variant), seed=seed)


each_variant = pytest.mark.parametrize("variant", VARIANTS)
bf16 = pytest.mark.parametrize("variant", [v for v in VARIANTS if v.startswith("bf16")])


@each_variant
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(variant, length):
    check(*inputs(variant, length, length))


@bf16
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_causal(variant, length):
    check(*inputs(variant, length, length), hi=0)


@bf16
@pytest.mark.parametrize("len_q, len_kv", [(1, 300), (300, 1), (130, 520), (520, 130), (257, 255)])
def test_unequal_lengths_and_both_corners(variant, len_q, len_kv):
    q, k, v = inputs(variant, len_q, len_kv)
    for hi in (None, 0, len_kv - len_q):
        check(q, k, v, hi=hi)


@bf16
@pytest.mark.parametrize(
    "lo, hi", [(-100, 0), (-300, 20), (5, 200), (-130, -120), (300, None), (None, -200), (-9999, 9999)]
)
def test_windows(variant, lo, hi):
    check(*inputs(variant, 400, 420), lo=lo, hi=hi)


@bf16
def test_a_long_row_wraps_every_ring(variant):
    check(*inputs(variant, 130, 128 * 27 + 5), seeds=2)


@each_variant
@pytest.mark.parametrize("mask", ["full", "causal", "window", "lengths"])
def test_random_schedules(variant, mask):
    """More tiles than CTAs, more blocks than places in the ring, under 20 random schedules."""
    q, k, v = inputs(variant, 260, 600, heads=3, heads_kv=1)
    how = {
        "full": {},
        "causal": {"hi": 340},
        "window": {"lo": -50, "hi": 320},
        "lengths": {"len_kv_of": torch.tensor([411], dtype=torch.int32)},
    }[mask]
    check(q, k, v, multiprocessors=1, seeds=20 if ARCH == 100 else 3, **how)


@bf16
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_grouped_heads(variant, group):
    check(*inputs(variant, 140, 200, heads=group, heads_kv=1), hi=60)
    if group == 3:
        check(*inputs(variant, 20, 150, batch=2, heads=6, heads_kv=2))


@bf16
def test_each_batch_has_its_own_number_of_keys(variant):
    q, k, v = inputs(variant, 150, 400, batch=8)
    lengths = torch.tensor([0, 1, 79, 111, 127, 128, 255, 400], dtype=torch.int32)  # one key less than blocks, too
    k, v = k.clone(), v.clone()
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:], v[b, :, n:] = nan, inf
    clean = k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0)
    out, lse = simulate(q, k, v, len_kv_of=lengths)
    right(out, lse, q, *clean, len_kv=lengths)
    late = simulate(q, k, v, len_kv_of=lengths, schedule="late")
    assert torch.equal(out, late[0])
    assert (out[0] == 0).all()
    assert (lse[0] == -inf).all()


@bf16
@pytest.mark.parametrize("scale", [0.0, -0.2, 2.0, 1e-30])
def test_scales(variant, scale):
    check(*inputs(variant, 150, 300), scale=scale, hi=100)


@bf16
def test_what_a_band_hides_stays_far_below_large_scores(variant):
    check(*inputs(variant, 200, 300), scale=3.0, lo=-10, hi=10)


@each_variant
def test_smaller_head_dims_are_zero_filled(variant):
    dim, dim_v = DIMS[variant.split("_", 1)[1]]
    check(*inputs(variant, 100, 150, dim=dim - 24, dim_v=dim_v - 16))
    if dim == 64:
        check(*inputs(variant, 100, 150, dim=8, dim_v=16))


def growing_maxima(variant, len_q):
    """q, k and v for a scale of 1 whose rows' maxima grow slowly, by the threshold, suddenly at the end, and not."""
    q, k, v = inputs(variant, len_q, 700)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0] = 1
    log2e = math.log2(math.e)
    for scores in (
        torch.linspace(0, 60, 700),
        torch.arange(700).flip(0)
        // 128
        * (8 / log2e),  # by the threshold from block to block, from the last to the first
        torch.where(torch.arange(700) < 5, 90.0, 0.0),
        torch.linspace(-10000, 10000, 700),
        torch.linspace(10000, -10000, 700),
    ):
        k[..., 0] = scores.to(k.dtype)
        yield q, k, v


@bf16
def test_the_maximum_grows_slowly_at_the_threshold_and_at_the_end(variant):
    for q, k, v in growing_maxima(variant, 140):
        check(q, k, v, scale=1.0)


@bf16
def test_blocks_that_no_row_sees(variant):
    q, k, v = inputs(variant, 300, 500)
    out, lse = check(q, k, v, lo=-20, hi=-150)  # nothing
    assert (out == 0).all()
    assert (lse == -inf).all()
    check(q, k, v, lo=260)  # rows from 240 on see nothing
    check(q, k, v, hi=-200)


@bf16
def test_tiles_one_after_another_that_see_no_key(variant):
    """No role may run ahead of another by more than a barrier tells: nothing is loaded that would hold it back."""
    q, k, v = inputs(variant, 1, 40, heads=6)
    check(q, k[:, :, :0], v[:, :, :0], multiprocessors=1, seeds=12)
    check(q, k, v, hi=-300, multiprocessors=2, seeds=2)


@bf16
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_nan_shows_in_the_rows_that_see_it(variant, where):
    tensors = dict(zip("qkv", inputs(variant, 200, 200), strict=True))
    tensors[where][0, 0, 77, 3] = nan
    out, lse = simulate(*tensors.values(), hi=0)
    rows = out[0, 0].isnan().any(-1)
    assert rows[77]
    if where == "v":  # 0 times it may show in rows that do not see it, in its column alone
        assert rows[77:].all()
        assert not out[0, 0, :, :3].isnan().any()
        assert lse.isfinite().all()
        return
    assert not rows[:77].any()
    assert rows[78:].all() if where == "k" else not rows[78:].any()
    assert torch.equal(lse[0, 0].isnan(), rows)


@bf16
def test_strides(variant):
    q, k, v = inputs(variant, 140, 150, batch=2, heads=2)
    expected, _ = simulate(q, k, v)
    for order in [(0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)]:
        others = [scattered(x, order=order, offset=8, gap=8) for x in (q, k, v)]
        assert torch.equal(simulate(*others)[0], expected)
    k, v = k[:, :1].expand(-1, 2, -1, -1), v[:, :1].expand(-1, 2, -1, -1)
    assert torch.equal(simulate(q, k, v)[0], simulate(q, k.contiguous(), v.contiguous())[0])


@bf16
def test_bits_do_not_depend_on_neighbours_or_the_number_of_ctas(variant):
    q, k, v = inputs(variant, 300, 300, batch=2, heads=2)
    expected, lse = simulate(q, k, v, hi=0, multiprocessors=1)
    for multiprocessors in (3, 100):
        assert torch.equal(simulate(q, k, v, hi=0, multiprocessors=multiprocessors)[0], expected)
    one = simulate(q[1:, 1:], k[1:, 1:], v[1:, 1:], hi=0)
    assert torch.equal(one[0], expected[1:, 1:])
    assert torch.equal(one[1], lse[1:, 1:])


def test_empty_sizes_launch_nothing():
    q, k, v = inputs("bf16_d64", 0, 10)
    assert simulate(q, k, v)[0].shape == (1, 1, 0, 64)
    q, k, v = inputs("bf16_d64", 10, 0)
    out, lse = simulate(q, k, v)
    assert (out == 0).all()
    assert (lse == -inf).all()
