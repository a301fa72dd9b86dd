"""The order in which persistent CTAs take tiles of queries: each exactly once, and an end that leaves few idle.

A tile is taken to cost the blocks of keys that it sees and one more, and one that the end of the queries cuts short is
half as cheap as it is small. On a machine of C CTAs no order ends before the
sum of the costs divided by C, nor before the longest tile; figures are relative to that. Beside ours:

    naive   tiles by batch, head and block, each to the CTA that is free first: what a grid of one CTA a tile does
    greedy  our list, each to the CTA that is free first: what clusterlaunchcontrol would do
    lpt     all tiles from the longest to the shortest, each to the CTA that is free first: no regard for L2
"""

import concurrent.futures
import functools
import heapq
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pybind11", reason="the simulator needs pybind11: pip install -e '.[test]'")
from ptxsim import plan

CTAS = {90: 132, 100: 148}
DIMS = {64: (64, 64), 128: (128, 128), 192: (192, 128)}


def call(batch, heads_q, heads_kv, len_q, len_kv, dim=128, dim_v=None, **band):
    """The parameters of a call; nothing is allocated."""
    q, k, v, o = (
        torch.empty(batch, *shape, dtype=torch.bfloat16, device="meta")
        for shape in (
            (heads_q, len_q, dim),
            (heads_kv, len_kv, dim),
            (heads_kv, len_kv, dim_v or dim),
            (heads_q, len_q, dim_v or dim),
        )
    )
    return plan.params(q, k, v, o, torch.empty(batch, heads_q, len_q, device="meta"), **band)


def shape_of(params, arch):
    """Rows of a tile, heads packed into them, keys of a block."""
    made = plan.fwd_plan(params, arch)
    maps = made["maps"]
    if arch == 90:
        return (made["block"][0] // 128 - 1) * 64, 1, maps[2]["box"][1]
    return 256 * made["cluster"][0], maps[0]["box"][1], maps[2]["box"][1]


def cost_of(params, arch):
    """block of queries -> cost."""
    rows, pack, block_kv = shape_of(params, arch)

    @functools.cache
    def cost(block):
        first, last = block * rows // pack, min((block + 1) * rows // pack, params["len_q"]) - 1
        begin = 0 if params["lo"] is None else max(0, first + params["lo"])
        end = params["len_kv"] if params["hi"] is None else min(params["len_kv"], last + params["hi"] + 1)
        blocks = -(-end // block_kv) - begin // block_kv if begin < end else 0
        return (1 + blocks) * (rows + pack * (last + 1 - first))

    return cost


def free_first(costs, ctas):
    """When the last tile ends if each goes to the CTA that is free first."""
    ends = [0] * ctas
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


def in_list_order(tiles):
    """The list that the CTAs were dealt."""
    return [tile for _, *tile in sorted(tile for own in tiles for tile in own)]


sizes = st.integers(1, 700)


@settings(max_examples=300, deadline=None)
@given(
    arch=st.sampled_from([90, 100, 103]),
    batch=st.integers(1, 5),
    heads_kv=st.integers(1, 5),
    group=st.sampled_from([1, 2, 3, 8]),
    len_q=sizes,
    len_kv=sizes,
    dim=st.sampled_from([64, 96, 128]),
    band=st.sampled_from(["full", "causal", "window", "both sides", "nothing"]),
    multiprocessors=st.integers(1, 300),
)
def test_every_tile_exactly_once(arch, batch, heads_kv, group, len_q, len_kv, dim, band, multiprocessors):
    lo, hi = {
        "full": (None, None),
        "causal": (None, len_kv - len_q),
        "window": (-100, 0),
        "both sides": (-60, 90),
        "nothing": (5000, None),
    }[band]
    params = call(batch, heads_kv * group, heads_kv, len_q, len_kv, dim, lo=lo, hi=hi)
    rows, pack, _ = shape_of(params, arch)
    blocks = -(-len_q * pack // rows)
    tiles = plan.fwd_tiles(params, arch, multiprocessors)
    assert sorted(in_list_order(tiles)) == [
        [b, h, h * pack // group, block]
        for b in range(batch)
        for h in range(heads_kv * group // pack)
        for block in range(blocks)
    ]
    assert len(tiles) <= min(multiprocessors, 256)
    assert all(tiles)  # a CTA without a tile would be launched for nothing
    assert max(map(len, tiles)) - min(map(len, tiles)) <= 1


@pytest.mark.parametrize("arch", [90, 100, 103])
@pytest.mark.parametrize("batch, heads", [(65_536, 1), (1, 65_537), (300, 300)])
def test_uc_084_more_tiles_than_a_grid_may_have_in_a_dimension(arch, batch, heads):
    params = call(batch, heads, heads, 1, 40)
    assert max(plan.fwd_plan(params, arch, 132)["grid"]) <= 132
    tiles = in_list_order(plan.fwd_tiles(params, arch, 132))
    assert len(tiles) == batch * heads
    assert {(b, h) for b, h, *_ in tiles} == {(b, h) for b in range(batch) for h in range(heads)}


@pytest.mark.parametrize("arch", [90, 100])
def test_an_order_that_a_thread_keeps_is_of_that_call(arch):
    """Bands and multiprocessors differ, sizes do not: a new thread, which keeps none, has the same orders."""
    bands = [{"hi": 0}, {"hi": -2500}, {"lo": -300, "hi": 0}, {"hi": 2000}]
    asked = [(call(1, 9, 9, 5000, 5000, **band), arch, ctas) for band in bands for ctas in (132, 131)]
    kept = [plan.fwd_tiles(*one) for one in asked]
    for one, tiles in zip(asked, kept, strict=True):
        with concurrent.futures.ThreadPoolExecutor(1) as new:
            assert new.submit(plan.fwd_tiles, *one).result() == tiles
    assert len({str(tiles) for tiles in kept}) > 4, "there is nothing to mistake for another"


def a_model(length, mask, dim, tokens=16384, hidden=2048):
    lo, hi = {"full": (None, None), "causal": (None, 0), "window": (-1024, 0)}[mask]
    heads = hidden // dim
    return call(tokens // length, heads, heads, length, length, *DIMS[dim], lo=lo, hi=hi)


def spans(params, arch, multiprocessors):
    """{order: when its last tile ends, relative to what no order beats}. Pairs of CTAs take tiles together."""
    tiles, cost = plan.fwd_tiles(params, arch, multiprocessors), cost_of(params, arch)
    ctas = multiprocessors // plan.fwd_plan(params, arch)["cluster"][0]
    ordered = in_list_order(tiles)
    costs = [cost(block) for *_, block in ordered]
    least = max(sum(costs) / ctas, max(costs))
    ends = {
        "ours": max(sum(cost(tile[-1]) for tile in own) for own in tiles),
        "naive": free_first([cost(block) for *_, block in sorted(ordered)], ctas),
        "greedy": free_first(costs, ctas),
        "lpt": free_first(sorted(costs, reverse=True), ctas),
    }
    return {name: end / least for name, end in ends.items()}


LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]


@pytest.mark.parametrize("arch, ctas", [(90, 132), (90, 114), (100, 148), (100, 160)])
@pytest.mark.parametrize("mask", ["causal", "window", "full"])
def test_it_ends_about_when_the_best_order_ends(arch, ctas, mask):
    found = [spans(a_model(length, mask, dim), arch, ctas) for length in LENGTHS for dim in DIMS]
    mean = {name: statistics.mean(span[name] for span in found) for name in found[0]}
    assert mean["ours"] <= mean["lpt"] + 0.01
    assert mean["ours"] <= mean["greedy"] + 0.005
    assert mean["ours"] <= mean["naive"]
    assert all(span["ours"] <= span["lpt"] + 0.055 for span in found)
    if mask == "causal":
        assert mean["ours"] <= {90: 1.012, 100: 1.03}[arch]
        assert mean["naive"] >= mean["ours"] + 0.035


@pytest.mark.parametrize("ctas", [1, 7, 78, 114, 132, 148, 160])
@pytest.mark.parametrize("mask", ["causal", "window", "full"])
def test_no_wave_is_left_for_the_end(ctas, mask):
    """With some rounds to fill, all CTAs work to the last: what is left idle is about a tile of the mean length."""
    for length, heads in ((640, 4 * ctas), (4096, ctas), (8192, ctas // 2 + 1)):
        for arch in CTAS:
            params = call(
                1,
                heads,
                heads,
                length,
                length,
                lo=-1000 if mask == "window" else None,
                hi=None if mask == "full" else 0,
            )
            cost = cost_of(params, arch)
            tiles = plan.fwd_tiles(params, arch, ctas)
            loads = [sum(cost(tile[-1]) for tile in own) for own in tiles]
            costs = [cost(tile[-1]) for own in tiles for tile in own]
            assert max(loads) - statistics.mean(loads) <= 1.5 * statistics.mean(costs)


@pytest.mark.parametrize("arch, section_bytes", [(90, 16 << 20), (100, 50 << 20)])
@pytest.mark.parametrize("length", [1024, 8192, 32768])
def test_keys_and_values_of_what_runs_together_fit_in_l2(arch, section_bytes, length):
    """Units come in sections, one after another; what a section's tiles read fits, or one and a half rounds need it."""
    ctas = CTAS[arch]
    for batch, heads_q, heads_kv in ((16, 16, 16), (3, 32, 8), (1, 7, 7)):
        params = call(batch, heads_q, heads_kv, length, length, hi=0)
        rows, pack, _ = shape_of(params, arch)
        order = [b * heads_kv + head_kv for b, _, head_kv, _ in in_list_order(plan.fwd_tiles(params, arch, ctas))]
        unit_bytes, unit_tiles = 2 * length * 2 * 128, -(-length * pack // rows) * (heads_q // heads_kv) // pack
        most = 3 * max(section_bytes // unit_bytes, -(-(3 * ctas // 2) // unit_tiles), 1) // 2
        for at in range(0, len(order) - ctas, ctas):  # a round and its neighbour: at most two sections
            assert len(set(order[at : at + ctas])) <= 2 * most
        first = [order.index(unit) for unit in range(batch * heads_kv)]
        last = [len(order) - 1 - order[::-1].index(unit) for unit in range(batch * heads_kv)]
        for unit in range(batch * heads_kv - 2 * most):  # its tiles are through before those two sections on begin
            assert last[unit] < first[unit + 2 * most] + ctas
