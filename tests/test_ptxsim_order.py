"""Who may rely on what: small programs whose synchronisation is just enough, and the same with a little less.

Each runs under every schedule and is reported by exactly the kinds that it names, or is clean and computes its words.
"""

import numpy
import ptxsim
import pytest
from ptxsim_kernels import ptx
from ptxsim_kernels.ptx import (
    CLUSTER_SYNC,
    COMMIT,
    POINTER,
    SMEM,
    bulk_load,
    bulk_store,
    expect,
    init,
    kernel,
    store_word,
    when,
)
from ptxsim_kernels.ptx import wait as wait_for

SCHEDULES = [("early", 0), ("late", 0), *(("random", seed) for seed in range(1, 5))]
SYNC = "bar.sync 0;"
THREADS = 64
FIRST = numpy.arange(THREADS)


def thread(n, body):
    return when(f"tid == {n}", body)


def cta(n, body):
    return when(f"cta == {n}", thread(0, body))


def spin(load, value=1):
    """Until the load gives x = value."""
    return f"{{ .reg .pred q; SPIN: {load} setp.ne.u32 q, x, {value}; @q bra SPIN; }}"


# Thread 0 hands the word 7 at smem + 1024 to thread 32 by the flag at smem + 1028.
def message(publish, take, after=""):
    return (
        thread(0, "st.shared.b32 [smem+1028], 0;")
        + SYNC
        + thread(0, f"st.shared.b32 [smem+1024], 7; {publish} [smem+1028], 1;")
        + thread(32, f"{spin(f'{take} x, [smem+1028];')} {after} ld.shared.b32 y, [smem+1024]; st.global.b32 [g1], y;")
    )


# The same between the two CTAs of a grid, in global memory.
def global_message(publish, take, after=""):
    return cta(0, f"st.global.b32 [g1], 7; {publish} [g1+64], 1;") + cta(
        1, f"{spin(f'{take} x, [g1+64];')} {after} ld.global.b32 y, [g1]; st.global.b32 [g1+4], y;"
    )


# The same from CTA 0 to CTA 2, which waits for a flag that CTA 1 has set again. It acquires only then: an acquire that
# saw the first value would have ordered the message, whatever CTA 1 does.
def relayed_message(again):
    return (
        cta(0, "st.global.b32 [g1], 7; st.release.gpu.global.b32 [g1+64], 1;")
        + cta(1, spin("ld.relaxed.gpu.global.b32 x, [g1+64];") + again)
        + cta(
            2,
            spin("ld.relaxed.gpu.global.b32 x, [g1+64];", 2)
            + "ld.acquire.gpu.global.b32 x, [g1+64]; ld.global.b32 y, [g1]; st.global.b32 [g1+4], y;",
        )
    )


# Every CTA adds to a counter; the last one adds up what all have written, and resets it.
SEMAPHORE = thread(
    0,
    """
    mul.wide.u32 a, cta, 4; add.u64 a, a, g1; st.global.b32 [a+16], 5;
    FENCE atom.global.add.u32 x, [g1], 1;
    { .reg .pred q; setp.ne.u32 q, x, 2; @q bra NOT_LAST;
    FENCE ld.global.b32 r1, [g1+16]; ld.global.b32 r2, [g1+20]; ld.global.b32 r3, [g1+24];
    add.u32 r1, r1, r2; add.u32 r1, r1, r3; st.global.b32 [g1+4], r1; st.global.b32 [g1], 0;
    NOT_LAST: }
    """,
)

MY_WORD = "shl.b32 y, tid, 2; add.u32 z, smem, y;"
BULK_ADD = (
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [g1], [smem+1024], 16;"
    + COMMIT
    + "cp.async.bulk.wait_group 0;"
)

# Every thread copies 16 bytes of data by cp.async to z + 1024.
COPY = "shl.b32 y, tid, 4; add.u32 z, smem, y; cvt.u64.u32 a, y; add.u64 a, a, g0;"
COPY_16 = COPY + "cp.async.cg.shared.global [z+1024], [a], 16;"
OWN = "ld.shared.b32 x, [z+1024];" + store_word("g1", "tid", "x")
NEIGHBOUR = "xor.b32 y, z, 16; ld.shared.b32 x, [y+1024];" + store_word("g1", "tid", "x")
STORE_ALL = thread(0, bulk_store("g1", "smem+1024", 1024) + COMMIT + "cp.async.bulk.wait_group 0;")
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [smem];"
WAIT_0, WAIT_1 = wait_for("smem", 0), wait_for("smem", 1)


# CTA 1 writes 8 into CTA 0's shared memory and arrives at its mbarrier.
def peer_message(arrive, wait_semantics):
    return (
        init(1)
        + CLUSTER_SYNC
        + "mapa.shared::cluster.u32 y, smem, 0;"
        + when(
            "rank == 1",
            thread(0, f"st.shared::cluster.b32 [y+1024], 8; mbarrier.arrive{arrive}.shared::cluster.b64 _, [y];"),
        )
        + when(
            "rank == 0",
            wait_for("smem", 0, wait_semantics) + thread(0, "ld.shared.b32 x, [smem+1024]; st.global.b32 [g1], x;"),
        )
        + CLUSTER_SYNC
    )


TO_PEER = "mapa.shared::cluster.u32 y, smem, 1;" + when("rank == 0", thread(0, "st.shared::cluster.b32 [y+1024], 6;"))
FROM_PEER = when("rank == 1", thread(0, "ld.shared.b32 x, [smem+1024]; st.global.b32 [g1], x;"))

# CTA 0 sends 16 bytes to CTA 1, which stores them to out.
PAIR = {"grid": 2, "cluster": 2}
ST_ASYNC = (
    init(1)
    + CLUSTER_SYNC
    + "mapa.shared::cluster.u32 y, smem, 1; add.u32 z, y, 1024; mov.u32 x, 6;"
    + cta(0, "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [z], {x, x, x, x}, [y];")
    + cta(
        1,
        expect("smem", 16)
        + WAIT_0
        + "FENCE"
        + bulk_store("g1", "smem+1024", 16)
        + COMMIT
        + "cp.async.bulk.wait_group 0;",
    )
    + CLUSTER_SYNC
)

# Thread 0 writes a word of global memory by a generic store, and its bulk copy reads it.
GLOBAL_TO_BULK = (
    init(1)
    + SYNC
    + thread(
        0, "st.global.b32 [g1+1024], 3; FENCE" + expect("smem", 16) + bulk_load("smem+1024", "g1+1024", 16, "smem")
    )
    + WAIT_0
    + thread(0, "ld.shared.b32 x, [smem+1024]; st.global.b32 [g1], x;")
)


# Thread 0 issues an MMA and thread 32 another one into the same accumulator, without a wait in between.
def pipelined_mmas(before, after):
    return (
        init(2)
        + ptx.fill(ptx.DATA, 8192, ptx.ONES)
        + ptx.ALLOC
        + "fence.proxy.async.shared::cta;"
        + ptx.PUBLISH
        + ptx.DESCRIPTORS
        + thread(0, ptx.mma() + ptx.commit() + before)
        + SYNC
        + thread(32, after + ptx.mma(accumulate=1) + ptx.commit())
        + WAIT_0
        + "tcgen05.fence::after_thread_sync;"
        + ptx.MY_LANES
        + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {r0}, [x]; tcgen05.wait::ld.sync.aligned;"
        + store_word("g1", "tid", "r0")
        + ptx.DEALLOC
    )


BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"


# Lane 0 of each warp waits for an MMA, all of its lanes load the accumulator.
def wait_of_one_lane(then):
    return (
        init(1)
        + ptx.fill(ptx.DATA, 8192, ptx.ONES)
        + ptx.ALLOC
        + "fence.proxy.async.shared::cta;"
        + ptx.PUBLISH
        + ptx.DESCRIPTORS
        + thread(0, ptx.mma() + ptx.commit())
        + when("lane == 0", WAIT_0)
        + then
        + AFTER
        + ptx.MY_LANES
        + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {r0}, [x]; tcgen05.wait::ld.sync.aligned;"
        + store_word("g1", "tid", "r0")
        + ptx.DEALLOC
    )


# Lanes 0 and 1 read a word; lane 1 tells thread 32, which overwrites it.
def read_by_two_lanes(between):
    return (
        thread(0, "st.shared.b32 [smem+1024], 0; st.shared.b32 [smem+1028], 0;")
        + SYNC
        + thread(0, "ld.shared.b32 x, [smem+1024];")
        + between
        + thread(1, "ld.shared.b32 x, [smem+1024]; st.release.cta.shared.b32 [smem+1028], 1;")
        + thread(32, spin("ld.acquire.cta.shared.b32 x, [smem+1028];") + "st.shared.b32 [smem+1024], 5;")
    )


# Lane 0 writes 16 bytes, lane 1 the last four of them; a bulk store reads all.
def written_by_two_lanes(fence):
    return (
        thread(0, "st.shared.v4.b32 [smem+1024], {1, 1, 1, 1};" + fence)
        + "bar.warp.sync -1;"
        + thread(1, "st.shared.b32 [smem+1036], 2; fence.proxy.async.shared::cta;")
        + SYNC
        + thread(0, bulk_store("g1", "smem+1024", 16) + COMMIT + "cp.async.bulk.wait_group 0;")
    )


def fenced_arrival_at_a_peer(fence):
    return peer_message(".relaxed.cluster", ".acquire.cluster").replace("mbarrier.arrive", fence + "mbarrier.arrive")


CASES = {
    # name: (body, kinds or "", expected words of out, launch options)
    "release and acquire": (message("st.release.cta.shared.b32", "ld.acquire.cta.shared.b32"), "", [7], {}),
    "a relaxed flag": (message("st.relaxed.cta.shared.b32", "ld.relaxed.cta.shared.b32"), "race", None, {}),
    "a release that nobody acquires": (
        message("st.release.cta.shared.b32", "ld.relaxed.cta.shared.b32"),
        "race",
        None,
        {},
    ),
    "fences around a relaxed flag": (
        message("fence.acq_rel.cta; st.relaxed.cta.shared.b32", "ld.relaxed.cta.shared.b32", "fence.acq_rel.cta;"),
        "",
        [7],
        {},
    ),
    "a fence on one side": (
        message("fence.acq_rel.cta; st.relaxed.cta.shared.b32", "ld.relaxed.cta.shared.b32"),
        "race",
        None,
        {},
    ),
    "a release fence and an acquire fence": (
        message("fence.release.cta; st.relaxed.cta.shared.b32", "ld.relaxed.cta.shared.b32", "fence.acquire.cta;"),
        "",
        [7],
        {},
    ),
    "a release fence where one must acquire": (
        message("fence.release.cta; st.relaxed.cta.shared.b32", "ld.relaxed.cta.shared.b32", "fence.release.cta;"),
        "race",
        None,
        {},
    ),
    "an acquire fence where one must release": (
        message("fence.acquire.cta; st.relaxed.cta.shared.b32", "ld.relaxed.cta.shared.b32", "fence.acquire.cta;"),
        "race",
        None,
        {},
    ),
    "volatile and membar": (
        message("membar.cta; st.volatile.shared.b32", "ld.volatile.shared.b32", "membar.cta;"),
        "",
        [7],
        {},
    ),
    "a message between CTAs": (
        global_message("st.release.gpu.global.b32", "ld.acquire.gpu.global.b32"),
        "",
        [7, 7],
        {"grid": 2},
    ),
    "a relaxed message between CTAs": (
        global_message("st.relaxed.gpu.global.b32", "ld.relaxed.gpu.global.b32"),
        "race",
        None,
        {"grid": 2},
    ),
    "a message between CTAs at cta scope": (
        global_message("st.release.cta.global.b32", "ld.acquire.gpu.global.b32"),
        "race",
        None,
        {"grid": 2},
    ),
    "a fenced message between CTAs": (
        global_message(
            "fence.acq_rel.gpu; st.relaxed.gpu.global.b32", "ld.relaxed.gpu.global.b32", "fence.acq_rel.gpu;"
        ),
        "",
        [7, 7],
        {"grid": 2},
    ),
    "a message between CTAs after a fence of cta scope": (
        global_message("fence.acq_rel.cta; st.relaxed.gpu.global.b32", "ld.acquire.gpu.global.b32"),
        "race",
        None,
        {"grid": 2},
    ),
    "a message between CTAs before a fence of cta scope": (
        global_message("st.release.gpu.global.b32", "ld.relaxed.gpu.global.b32", "fence.acq_rel.cta;"),
        "race",
        None,
        {"grid": 2},
    ),
    "a message whose flag another CTA overwrites": (
        relayed_message("st.relaxed.gpu.global.b32 [g1+64], 2;"),
        "race",
        None,
        {"grid": 3},
    ),
    "a message whose flag another CTA exchanges": (
        relayed_message("atom.relaxed.gpu.global.exch.b32 x, [g1+64], 2;"),
        "",
        [7, 7],
        {"grid": 3},
    ),
    "the last CTA adds up": (SEMAPHORE.replace("FENCE", "membar.gl;"), "", [0, 15], {"grid": 3}),
    "the last CTA adds up without fences": (SEMAPHORE.replace("FENCE", ""), "race", None, {"grid": 3}),
    "two CTAs write one word": (thread(0, "st.global.b32 [g1], cta;"), "race", None, {"grid": 2}),
    "two CTAs write the same word": (thread(0, "st.global.b32 [g1], 3;"), "", [3], {"grid": 2}),
    "atomics of all lanes": (
        thread(0, "st.shared.b32 [smem+1024], 0;")
        + SYNC
        + "atom.shared.add.u32 x, [smem+1024], 1;"
        + SYNC
        + thread(0, "ld.shared.b32 x, [smem+1024]; st.global.b32 [g1], x;"),
        "",
        [THREADS],
        {},
    ),
    "an atomic and a load": (
        thread(0, "st.shared.b32 [smem+1024], 0;")
        + SYNC
        + "atom.shared.add.u32 x, [smem+1024], 1;"
        + thread(0, "ld.shared.b32 x, [smem+1024];"),
        "race",
        None,
        {},
    ),
    "a store of the sum while others still add nothing": (
        thread(0, "st.shared.b32 [smem+1024], 4;")
        + SYNC
        + when("tid >= 32", "atom.shared.add.u32 x, [smem+1024], 0;")
        + thread(0, "st.shared.b32 [smem+1024], 4;"),
        "race",
        None,
        {},
    ),
    "atomics and a bulk reduction": (
        MY_WORD
        + "st.shared.b32 [z+1024], 1; fence.proxy.async.shared::cta;"
        + SYNC
        + thread(0, BULK_ADD)
        + thread(32, "red.global.add.u32 [g1], 1;"),
        "race",
        None,
        {},
    ),
    "bulk reductions of two CTAs": (
        MY_WORD + "st.shared.b32 [z+1024], 1; fence.proxy.async.shared::cta;" + SYNC + thread(0, BULK_ADD),
        "",
        [2, 2, 2, 2],
        {"grid": 2},
    ),
    "a volatile store that its thread reads back, then a bulk store": (
        MY_WORD
        + "st.volatile.shared.b32 [z+1024], 1; ld.volatile.shared.b32 x, [z+1024]; bar.warp.sync -1;"
        + thread(0, bulk_store("g1", "smem+1024", 16) + COMMIT + "cp.async.bulk.wait_group 0;"),
        "proxy",
        None,
        {},
    ),
    "a non-coherent load of what the grid writes": (
        thread(0, "st.global.b32 [g1], 1;") + SYNC + "ld.global.nc.b32 x, [g1];",
        "race",
        None,
        {},
    ),
    "cp.async and wait_group": (
        COPY_16 + "cp.async.commit_group; cp.async.wait_group 0;" + OWN,
        "",
        4 * FIRST,
        {},
    ),
    "another thread's cp.async": (COPY_16 + "cp.async.wait_all;" + NEIGHBOUR, "race", None, {}),
    "another thread's cp.async after a barrier": (
        COPY_16 + "cp.async.wait_all;" + SYNC + NEIGHBOUR,
        "",
        4 * (FIRST ^ 1),
        {},
    ),
    "cp.async fills up with zeros": (
        COPY + "cp.async.ca.shared.global [z+1024], [a], 16, 4; cp.async.wait_all;"
        "ld.shared.v2.b32 {x, y}, [z+1024]; add.u32 x, x, y;" + store_word("g1", "tid", "x"),
        "",
        4 * FIRST,
        {},
    ),
    "cp.async ignores its source": (
        COPY + "{ .reg .pred q; setp.eq.u32 q, tid, tid; cp.async.ca.shared.global [z+1024], [a], 8, q; }"
        "cp.async.wait_all;" + OWN,
        "",
        0 * FIRST,
        {},
    ),
    "cp.async arrives at an mbarrier": (
        init(THREADS) + SYNC + COPY_16 + "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [smem];" + WAIT_0 + NEIGHBOUR,
        "",
        4 * (FIRST ^ 1),
        {},
    ),
    "cp.async arrives beside its thread": (
        init(THREADS)
        + SYNC
        + COPY_16
        + "cp.async.mbarrier.arrive.shared::cta.b64 [smem];"
        + ARRIVE
        + WAIT_0
        + NEIGHBOUR,
        "",
        4 * (FIRST ^ 1),
        {},
    ),
    "cp.async, then a bulk store without a proxy fence": (
        COPY_16 + "cp.async.wait_all;" + SYNC + STORE_ALL,
        "proxy",
        None,
        {},
    ),
    "cp.async, then a bulk store": (
        COPY_16 + "cp.async.wait_all; fence.proxy.async;" + SYNC + STORE_ALL,
        "",
        numpy.arange(256),
        {},
    ),
    "a bulk load of a generic store": (GLOBAL_TO_BULK.replace("FENCE", "fence.proxy.async.global;"), "", [3], {}),
    "a bulk load of a generic store without a proxy fence": (GLOBAL_TO_BULK.replace("FENCE", ""), "proxy", None, {}),
    "a bulk load of a generic store with the other space's fence": (
        GLOBAL_TO_BULK.replace("FENCE", "fence.proxy.async.shared::cta;"),
        "proxy",
        None,
        {},
    ),
    "a state token": (
        init(THREADS)
        + SYNC
        + "mbarrier.arrive.shared::cta.b64 a, [smem];"
        + "{ .reg .pred q; W: mbarrier.try_wait.shared::cta.b64 q, [smem], a; @!q bra W; }"
        + "mbarrier.pending_count.b64 x, a;"
        + "{ .reg .pred q; setp.gt.u32 q, x, 64; @q trap; }",
        "",
        [],
        {},
    ),
    "arrive_drop": (
        init(THREADS)
        + SYNC
        + when("tid < 32", "mbarrier.arrive_drop.shared::cta.b64 _, [smem];")
        + when("tid >= 32", ARRIVE + WAIT_0 + ARRIVE + WAIT_1),
        "",
        [],
        {},
    ),
    "a tx-count that overflows": (
        init(1) + SYNC + thread(0, 2 * "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [smem], 1048575;"),
        "mbarrier",
        None,
        {},
    ),
    "more arrivals than pending": (
        init(4) + SYNC + thread(0, "mbarrier.arrive.shared::cta.b64 _, [smem], 5;"),
        "mbarrier",
        None,
        {},
    ),
    "inval while another thread may wait": (
        init(1) + SYNC + thread(32, WAIT_0) + thread(0, ARRIVE + "mbarrier.inval.shared::cta.b64 [smem];"),
        "mbarrier",
        None,
        {},
    ),
    "a word to the peer": (CLUSTER_SYNC + TO_PEER + CLUSTER_SYNC + FROM_PEER, "", [6], {"grid": 2, "cluster": 2}),
    "a word to a peer that may not have started": (
        TO_PEER + CLUSTER_SYNC + FROM_PEER,
        "race",
        None,
        {"grid": 2, "cluster": 2},
    ),
    "a word to a peer that may have exited": (CLUSTER_SYNC + TO_PEER, "exit", None, {"grid": 2, "cluster": 2}),
    "an arrival at a peer": (
        peer_message(".release.cluster", ".acquire.cluster"),
        "",
        [8],
        {"grid": 2, "cluster": 2},
    ),
    "an arrival at a peer of cta scope": (
        peer_message("", ".acquire.cluster"),
        "scope",
        None,
        {"grid": 2, "cluster": 2},
    ),
    "a wait of cta scope for a peer": (
        peer_message(".release.cluster", ".acquire.cta"),
        "scope",
        None,
        {"grid": 2, "cluster": 2},
    ),
    "st.async, then a bulk store": (ST_ASYNC.replace("FENCE", "fence.proxy.async.shared::cta;"), "", [6] * 4, PAIR),
    "st.async, then a bulk store without a proxy fence": (ST_ASYNC.replace("FENCE", ""), "proxy", None, PAIR),
    "a relaxed arrival at a peer": (
        fenced_arrival_at_a_peer(""),
        "race",
        None,
        {"grid": 2, "cluster": 2},
    ),
    "a relaxed arrival at a peer after a fence": (
        fenced_arrival_at_a_peer("fence.acq_rel.cluster;"),
        "",
        [8],
        {"grid": 2, "cluster": 2},
    ),
    "a relaxed arrival at a peer after a fence of cta scope": (
        fenced_arrival_at_a_peer("fence.acq_rel.cta;"),
        "scope",
        None,
        {"grid": 2, "cluster": 2},
    ),
    "a lane answers for another's read": (read_by_two_lanes(""), "race", None, {}),
    "a lane answers for another's read after a barrier of the warp": (
        read_by_two_lanes("bar.warp.sync -1;"),
        "",
        [],
        {},
    ),
    "a fenced write over part of an unfenced one": (written_by_two_lanes(""), "proxy", None, {}),
    "a fenced write over part of a fenced one": (
        written_by_two_lanes("fence.proxy.async.shared::cta;"),
        "",
        [1, 1, 1, 2],
        {},
    ),
    "a warp's load after one lane's wait": (wait_of_one_lane(""), "race", None, {}),
    "a warp's load after one lane's wait and a barrier of the warp": (
        wait_of_one_lane("bar.warp.sync -1;"),
        "",
        [0x41800000] * THREADS,
        {},
    ),
    "MMAs of two threads, pipelined": (pipelined_mmas(BEFORE, AFTER), "", [0x42000000], {}),
    "MMAs of two threads, no fence after the first": (pipelined_mmas("", AFTER), "race", None, {}),
    "MMAs of two threads, no fence before the second": (pipelined_mmas(BEFORE, ""), "race", None, {}),
    "cp.async reads what a bulk store overwrites": (
        COPY.replace("g0", "g1") + "cp.async.cg.shared.global [z+1024], [a], 16; cp.async.wait_all; "
        "st.shared.v4.b32 [z+4096], {tid, tid, tid, tid}; fence.proxy.async.shared::cta;"
        + SYNC
        + STORE_ALL.replace("smem+1024", "smem+4096"),
        "proxy",
        None,
        {},
    ),
    "cp.async reads what a bulk store overwrites after a fence": (
        COPY.replace("g0", "g1")
        + "cp.async.cg.shared.global [z+1024], [a], 16; cp.async.wait_all; fence.proxy.async.global;"
        "st.shared.v4.b32 [z+4096], {tid, tid, tid, tid}; fence.proxy.async.shared::cta;"
        + SYNC
        + STORE_ALL.replace("smem+1024", "smem+4096"),
        "",
        FIRST // 4,
        {},
    ),
    "a bulk load over a generic store that nobody has read, by practice": (
        init(1)
        + thread(32, "st.shared.b32 [smem+1024], 1;")
        + SYNC
        + thread(0, expect("smem", 16) + bulk_load("smem+1024", "g0", 16, "smem"))
        + WAIT_0,
        "proxy",
        None,
        {"model": "practice"},
    ),
    "a peer of cta scope, by practice": (
        peer_message("", ""),
        "",
        [8],
        {"grid": 2, "cluster": 2, "model": "practice"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_orders_what(name):
    body, kinds, expected, options = CASES[name]
    module = ptxsim.Module(kernel(body, [POINTER, POINTER], threads=THREADS))
    for schedule, seed in SCHEDULES:
        data, out = numpy.arange(1024, dtype=numpy.uint32), numpy.zeros(1024, numpy.uint32)
        launch = {"grid": 1, "block": THREADS, "smem": SMEM, "args": [data, out], "check": False, **options}
        report = module.launch("k", schedule=schedule, seed=seed, **launch)
        assert " ".join(sorted(report.kinds)) == kinds, f"{schedule} {seed}: {report}"
        if expected is not None:
            assert (out[: len(expected)] == expected).all(), (schedule, seed, out[: len(expected)])


def test_a_bulk_reduction_reads_what_it_adds_to():
    body = MY_WORD + "st.shared.b32 [z+1024], 1; fence.proxy.async.shared::cta;" + SYNC + thread(0, BULK_ADD)
    data, out = numpy.zeros(4, numpy.uint32), ptxsim.empty(4, numpy.uint32)
    module = ptxsim.Module(kernel(body, [POINTER, POINTER], threads=THREADS))
    report = module.launch("k", grid=1, block=THREADS, smem=SMEM, args=[data, out], check=False)
    assert report.kinds == {"poison"}


def test_a_counter_of_very_many_ctas():
    """More than a cell remembers."""
    ctas = 33000
    data, out = numpy.zeros(4, numpy.uint32), numpy.zeros(4, numpy.uint32)
    module = ptxsim.Module(kernel("red.global.add.u32 [g1], 1;", [POINTER, POINTER], "sm_90a", threads=1))
    module.launch("k", grid=ctas, block=1, args=[data, out])
    assert out[0] == ctas


WORDS = {
    # One thread's program: what it leaves in the first words of out.
    "vectors of 32 bytes": (
        "ld.global.v8.b32 {r0, r1, r2, r3, r4, r5, r6, r7}, [g0+32];"
        "st.global.v8.b32 [g1], {r7, r6, r5, r4, r3, r2, r1, r0};",
        range(15, 7, -1),
    ),
    "128 bits": ("{ .reg .b128 q; ld.global.b128 q, [g0+16]; st.global.b128 [g1], q; }", [4, 5, 6, 7]),
    "signed bytes": (
        "st.shared.b32 [smem+1024], 0x80; ld.shared.s8 x, [smem+1024]; st.global.b32 [g1], x;",
        [0xFFFFFF80],
    ),
    "unsigned bytes": ("st.shared.b32 [smem+1024], 0x80; ld.shared.u8 x, [smem+1024]; st.global.b32 [g1], x;", [0x80]),
    "cas and exch": (
        "atom.global.cas.b32 x, [g1], 0, 9; atom.global.exch.b32 y, [g1+4], 3; st.global.b32 [g1+8], x;",
        [9, 3, 0],
    ),
    "inc and dec": (
        "atom.global.inc.u32 x, [g1], 1; atom.global.inc.u32 x, [g1], 1; atom.global.dec.u32 y, [g1+4], 6;",
        [0, 6],
    ),
    "a vector of f32 added": (
        2 * "red.global.add.v4.f32 [g1], {0f3f800000, 0f3f800000, 0f3f800000, 0f40000000};",
        [0x40000000] * 3 + [0x40800000],
    ),
    "packed bf16 added": (2 * "red.global.add.noftz.bf16x2 [g1], 0x3f803fc0;", [0x40004040]),
    "a subnormal sum is flushed in global memory": (2 * "red.global.add.f32 [g1], 0f00000100;", [0]),
    "a generic address of shared memory": (
        "cvt.u64.u32 a, smem; cvta.shared.u64 a, a; st.b32 [a+1024], 4; ld.shared.b32 x, [smem+1024];"
        "st.global.b32 [g1], x; { .reg .pred q; isspacep.shared q, a; @q st.global.b32 [g1+4], 1; }",
        [4, 1],
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_what_one_thread_leaves(name):
    body, expected = WORDS[name]
    data, out = numpy.arange(1024, dtype=numpy.uint32), numpy.zeros(1024, numpy.uint32)
    text = kernel(thread(0, body), [POINTER, POINTER], threads=32)
    ptxsim.Module(text).launch("k", grid=1, block=32, smem=SMEM, args=[data, out])
    assert list(out[: len(expected)]) == list(expected)


UNDEFINED = "ld.shared.b32 x, [smem+1024];"  # nobody wrote it
SPREADS = {
    # What takes an undefined x and gives y: is y undefined?
    "shl by": ("shl.b32 y, 1, x;", True),
    "shr by": ("shr.u32 y, 1, x;", True),
    "shr.s32 of": ("shr.s32 y, x, 31;", True),
    "shl of, all out": ("shl.b32 y, x, 32;", False),
    "shf by": ("shf.l.wrap.b32 y, tid, tid, x;", True),
    "prmt by": ("prmt.b32 y, tid, tid, x;", True),
    "prmt of a defined byte": ("prmt.b32 y, x, tid, 0x7654;", False),
    "bfe from": ("bfe.u32 y, tid, x, 4;", True),
    "bfi by": ("bfi.b32 y, tid, tid, 4, x;", True),
    "and 0": ("and.b32 y, x, 0;", False),
    "or": ("or.b32 y, x, 0;", True),
    "lop3": ("lop3.b32 y, x, tid, tid, 0x96;", True),
    "the carry of": ("add.cc.u32 z, x, x; addc.u32 y, tid, tid;", True),
    "the carry of mad": ("mad.lo.cc.u32 z, x, x, tid; madc.hi.u32 y, tid, tid, tid;", True),
    "mad": ("mad.lo.u32 y, tid, tid, x;", True),
    "fma": ("fma.rn.f32 y, x, x, x;", True),
    "cvt": ("cvt.rn.f32.u32 y, x;", True),
    "popc": ("popc.b32 y, x;", True),
    "setp and selp": ("setp.eq.u32 p, x, 3; selp.b32 y, 1, 2, p;", True),
    "selp of the other": ("setp.eq.u32 p, tid, tid; selp.b32 y, 1, x, p;", False),
    "shfl": ("shfl.sync.idx.b32 y, x, 0, 31, 1;", True),
    "memory": ("st.shared.b32 [smem+2048], x; ld.shared.b32 y, [smem+2048];", True),
}


@pytest.mark.parametrize("name", SPREADS)
def test_what_is_undefined_spreads(name):
    body, undefined = SPREADS[name]
    data, out = numpy.zeros(4, numpy.uint32), ptxsim.empty(4, numpy.uint32)
    text = kernel(thread(0, UNDEFINED + body + "st.global.b32 [g1], y;"), [POINTER, POINTER], threads=32)
    report = ptxsim.Module(text).launch("k", grid=1, block=32, smem=SMEM, args=[data, out], check=False)
    assert report.kinds == ({"poison"} if undefined else set()), report


def test_ldmatrix_gives_rows_to_quads_of_lanes():
    # Row i of the 32 x 8 halves holds 8 i, 8 i + 1, ... : matrix m is rows 8 m to 8 m + 7.
    store = "mul.lo.u32 r0, tid, 8;" + "".join(
        f"add.u32 r1, r0, {2 * j}; add.u32 r2, r0, {2 * j + 1}; shl.b32 r2, r2, 16; or.b32 r{4 + j}, r1, r2;"
        for j in range(4)
    )
    body = f"""
    {store} shl.b32 y, tid, 4; add.u32 z, smem, y;
    st.shared.v4.b32 [z+1024], {{r4, r5, r6, r7}};
    bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{r8, r9, r10, r11}}, [z+1024];
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{r12, r13, r14, r15}}, [z+1024];
    bar.warp.sync -1;
    stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [z+1024], {{r12, r13, r14, r15}};
    bar.warp.sync -1;
    ld.shared.v4.b32 {{r16, r17, r18, r19}}, [z+1024];
    movmatrix.sync.aligned.m8n8.trans.b16 r20, r8;
    mul.wide.u32 a, tid, 64; add.u64 a, a, g1;
    st.global.v4.b32 [a], {{r8, r9, r10, r11}};
    st.global.v4.b32 [a+16], {{r12, r13, r14, r15}};
    st.global.v4.b32 [a+32], {{r16, r17, r18, r19}};
    st.global.b32 [a+48], r20;
    """
    data, out = numpy.zeros(4, numpy.uint32), numpy.zeros((32, 32), numpy.uint16)
    ptxsim.Module(kernel(body, [POINTER, POINTER], threads=32)).launch(
        "k", grid=1, block=32, smem=SMEM, args=[data, out]
    )
    rows = numpy.arange(256, dtype=numpy.uint16).reshape(4, 8, 8)
    for t in range(32):
        plain, transposed = rows[:, t // 4, 2 * (t % 4) :][:, :2], rows[:, 2 * (t % 4) :, t // 4][:, :2]
        assert (out[t, :8].reshape(4, 2) == plain).all()
        assert (out[t, 8:16].reshape(4, 2) == transposed).all()
        assert (out[t, 16:24] == rows.reshape(32, 8)[t]).all()
        assert (out[t, 24:26] == transposed[0]).all()
