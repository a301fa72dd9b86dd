"""The Blackwell forward in pairs of CTAs: what the plan gives them, and that they make of every row the very bits that
CTAs alone make of it. So the plan may look at the number of queries when it chooses.

Every case runs in pairs with operations as early and as late as they may be, and is compared with CTAs alone.
"""

import math

import pytest
import torch
from reference import scattered
from test_blackwell import ARCH, check, growing_maxima, inputs, planned, right, simulate

inf, nan = math.inf, math.nan
pairs = pytest.mark.parametrize("variant", ["bf16_d128", "bf16_d192_v128"])
f16_pairs = pytest.mark.parametrize("variant", ["f16_d128", "f16_d192_v128"])


def check_pair(q, k, v, *, seeds=0, **how):
    out, lse = check(q, k, v, ctas=2, seeds=seeds, **how)
    alone = simulate(q, k, v, ctas=1, **how)
    assert torch.equal(out, alone[0])
    assert torch.equal(lse, alone[1])
    return out, lse


@pytest.mark.parametrize(
    "shape, how, kernel",
    [
        (((1, 1, 384, 128), (1, 1, 50, 128), (1, 1, 50, 128)), {}, "d128_pair"),
        (((1, 1, 383, 128), (1, 1, 50, 128), (1, 1, 50, 128)), {}, "d128"),
        (((1, 1, 512, 104), (1, 1, 50, 104), (1, 1, 50, 128)), {}, "d128_pair"),
        (((1, 1, 767, 128), (1, 1, 50, 128), (1, 1, 50, 128)), {}, "d128"),
        (((1, 1, 768, 128), (1, 1, 50, 128), (1, 1, 50, 128)), {}, "d128_pair"),
        (((1, 1, 9999, 128), (1, 1, 50, 128), (1, 1, 50, 128)), {}, "d128_pair"),
        (((1, 8, 48, 128), (1, 1, 50, 128), (1, 1, 50, 128)), {}, "d128_pair"),  # rows: heads of queries
        (((1, 8, 47, 128), (1, 1, 50, 128), (1, 1, 50, 128)), {}, "d128"),
        (((9, 3, 1, 128), (9, 1, 50, 128), (9, 1, 50, 128)), {}, "d128"),
        (((1, 1, 512, 192), (1, 1, 50, 192), (1, 1, 50, 128)), {}, "d192_v128_pair"),
        (((1, 1, 512, 96), (1, 1, 50, 96), (1, 1, 50, 96)), {}, "d96"),
        (((1, 1, 512, 64), (1, 1, 50, 64), (1, 1, 50, 64)), {}, "d64"),
        (((1, 1, 512, 128), (1, 1, 50, 128), (1, 1, 50, 128)), {"hi": 48}, "d128"),
        (((1, 1, 512, 128), (1, 1, 50, 128), (1, 1, 50, 128)), {"hi": 49}, "d128_pair"),
        (((1, 1, 512, 128), (1, 1, 50, 128), (1, 1, 50, 128)), {"lo": -510}, "d128"),
        (((1, 1, 512, 128), (1, 1, 50, 128), (1, 1, 50, 128)), {"lo": -511}, "d128_pair"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_plan_takes_pairs_for_full_attention_of_many_queries(shape, how, kernel, dtype):
    q, k, v = (torch.empty(s, dtype=dtype) for s in shape)
    made = planned(q, k, v, ctas=0, multiprocessors=148, **how)
    ctas = 2 if kernel.endswith("pair") else 1
    assert made["kernel"] == f"fa4_sm{ARCH}_fwd_{'bf16' if dtype == torch.bfloat16 else 'f16'}_{kernel}"
    assert made["cluster"] == (ctas, 1, 1)
    assert made["grid"][0] % ctas == 0


def test_the_grid_is_whole_pairs():
    q, k, v = inputs("bf16_d128", 5000, 100, heads=20)
    for multiprocessors, ctas in [(1, 2), (2, 2), (3, 2), (147, 146), (148, 148), (1000, 400)]:
        assert planned(q, k, v, ctas=2, multiprocessors=multiprocessors)["grid"] == (ctas, 1, 1)


@pairs
@pytest.mark.parametrize(
    "length", [1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385, 511, 512, 513, 767, 769]
)
def test_lengths(variant, length):
    check_pair(*inputs(variant, length, length))


@f16_pairs
@pytest.mark.parametrize("length", [1, 129, 385, 513])
def test_lengths_of_float16(variant, length):
    check_pair(*inputs(variant, length, length))


@pairs
@pytest.mark.parametrize("len_q, len_kv", [(1, 700), (700, 1), (300, 130), (530, 65), (257, 0)])
def test_unequal_lengths(variant, len_q, len_kv):
    check_pair(*inputs(variant, len_q, len_kv))


@pairs
def test_random_schedules(variant):
    """More tiles than pairs, more blocks than places in the ring several times over, under 20 random schedules."""
    check_pair(*inputs(variant, 1100, 1000), seeds=20)


@pairs
@pytest.mark.parametrize(
    "len_q, len_kv, band",
    [
        (700, 700, {"hi": 0}),
        (300, 900, {"hi": 600}),
        (900, 900, {"lo": -200, "hi": 10}),
        (900, 900, {"lo": 100, "hi": 300}),
        (1100, 500, {"hi": -300}),
        (600, 600, {"lo": 300}),
        (512, 512, {"lo": -130, "hi": -120}),
    ],
)
def test_masks(variant, len_q, len_kv, band):
    """The plan gives them to CTAs alone, but the kernels can: both CTAs take the blocks that any row of theirs sees."""
    check_pair(*inputs(variant, len_q, len_kv), seeds=1, **band)


@pairs
def test_a_long_row_wraps_every_ring(variant):
    check_pair(*inputs(variant, 130, 128 * 27 + 5), seeds=2)


@pairs
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_grouped_heads(variant, group):
    check_pair(*inputs(variant, 140, 200, heads=group, heads_kv=1))
    if group == 3:
        check_pair(*inputs(variant, 20, 150, batch=2, heads=6, heads_kv=2))


@pairs
def test_each_batch_has_its_own_number_of_keys(variant):
    q, k, v = inputs(variant, 300, 400, batch=7)
    lengths = torch.tensor([0, 1, 64, 127, 128, 255, 400], dtype=torch.int32)
    k, v = k.clone(), v.clone()
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:], v[b, :, n:] = nan, inf
    clean = k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0)
    out, lse = simulate(q, k, v, len_kv_of=lengths, ctas=2)
    right(out, lse, q, *clean, len_kv=lengths)
    for other in (
        {"schedule": "late", "ctas": 2},
        {"ctas": 1},
        *({"schedule": "random", "seed": s, "ctas": 2} for s in range(4)),
    ):
        again = simulate(q, k, v, len_kv_of=lengths, **other)
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])
    assert (out[0] == 0).all()
    assert (lse[0] == -inf).all()


@pairs
@pytest.mark.parametrize("scale", [0.0, -0.2, 2.0, 1e-30])
def test_scales(variant, scale):
    check_pair(*inputs(variant, 300, 300), scale=scale)


@pairs
def test_smaller_head_dims_are_zero_filled(variant):
    dim = 104 if variant == "bf16_d128" else 136
    check_pair(*inputs(variant, 300, 150, dim=dim, dim_v=40))


@pairs
def test_the_maximum_grows_slowly_at_the_threshold_and_at_the_end(variant):
    for q, k, v in growing_maxima(variant, 300):
        check_pair(q, k, v, scale=1.0)


@pairs
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("row", [77, 150])  # of one CTA's half of q and k, and of the other's
def test_a_nan_shows_in_the_rows_that_see_it(variant, where, row):
    tensors = dict(zip("qkv", inputs(variant, 300, 200), strict=True))
    tensors[where][0, 0, row, 100] = nan
    out, lse = simulate(*tensors.values(), ctas=2)
    rows = out[0, 0].isnan().any(-1)
    if where == "q":
        assert rows.nonzero().flatten().tolist() == [row]
    else:
        assert rows.all()
    if where == "v":
        assert out[0, 0].isnan().any(0).nonzero().flatten().tolist() == [100]
        assert lse.isfinite().all()
    else:
        assert torch.equal(lse[0, 0].isnan(), rows)


@pairs
def test_strides(variant):
    q, k, v = inputs(variant, 300, 150, batch=2, heads=2)
    expected, _ = simulate(q, k, v, ctas=2)
    for order in [(0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)]:
        others = [scattered(x, order=order, offset=8, gap=8) for x in (q, k, v)]
        assert torch.equal(simulate(*others, ctas=2)[0], expected)
    k, v = k[:, :1].expand(-1, 2, -1, -1), v[:, :1].expand(-1, 2, -1, -1)
    assert torch.equal(simulate(q, k, v, ctas=2)[0], simulate(q, k.contiguous(), v.contiguous(), ctas=2)[0])


@pairs
def test_bits_do_not_depend_on_neighbours_or_the_number_of_pairs(variant):
    q, k, v = inputs(variant, 600, 300, batch=2, heads=2)
    expected, lse = simulate(q, k, v, ctas=2, multiprocessors=2)
    for multiprocessors in (6, 100):
        assert torch.equal(simulate(q, k, v, ctas=2, multiprocessors=multiprocessors)[0], expected)
    for first in (0, 128, 599):  # in another CTA, in other tiles; few enough for CTAs alone
        one = simulate(q[1:, 1:, first:], k[1:, 1:], v[1:, 1:], ctas=0)
        assert torch.equal(one[0], expected[1:, 1:, first:])
        assert torch.equal(one[1], lse[1:, 1:, first:])
