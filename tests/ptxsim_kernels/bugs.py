"""Planted bugs for test_ptxsim_bugs.py: body(fixed) is the wrong program, or its twin that differs in one thing.

Every kernel is k(data, out, tensor maps ...): data holds the words 0, 1, 2, ...; out has one word a thread of the grid.
"""

import dataclasses
import typing

import numpy
from ptxsim import TensorMap

from .ptx import (
    ALLOC,
    CLUSTER_SYNC,
    COMMIT,
    DATA,
    DEALLOC,
    DESCRIPTORS,
    IDESC,
    MMA_A,
    MMA_B,
    MY_LANES,
    ONES,
    PUBLISH,
    SMEM,
    TMEM_WORD,
    bulk_load,
    bulk_store,
    commit,
    descriptor,
    expect,
    fill,
    init,
    load_word,
    loop,
    mma,
    registers,
    store_word,
    tmem_load,
    tmem_store,
    wait,
    when,
)


@dataclasses.dataclass
class Bug:
    """kinds: one of them at least is reported of the wrong program. every: in every schedule, not only in some."""

    body: typing.Callable
    kinds: set
    every: bool
    expected: typing.Callable  # of a thread's number in the grid: its word of out; None: out is not looked at
    threads: int
    cluster: int
    grid: int
    target: str
    minnctapersm: bool  # of the wrong one; the fixed one always has it
    maps: typing.Callable  # of the data array: a list of tensor maps
    practice: str  # the kind "P1" ... that model="practice" counts instead; None: it reports the bug too
    options: dict  # of the launch


BUGS = {}


def bug(
    kinds,
    expected,
    every=True,
    threads=128,
    cluster=1,
    grid=None,
    target="sm_100a",
    minnctapersm=True,
    maps=lambda data: [],
    practice=None,
    **options,
):
    """Adds a body to BUGS under its name."""

    def add(body):
        BUGS[body.__name__] = Bug(
            body,
            set(kinds.split()),
            every,
            expected if callable(expected) or expected is None else lambda t: expected,
            threads,
            cluster,
            grid or cluster,
            target,
            minnctapersm,
            maps,
            practice,
            options,
        )
        return body

    return add


def itself(t):
    return t


# Where a thread's own word of shared memory is: y.
MINE = f"shl.b32 y, tid, 2; add.u32 y, y, smem; add.u32 y, y, {DATA};"
SYNC = "bar.sync 0;"
FENCE = "fence.proxy.async.shared::cta;"
# A word of its own from the CTA's part of out.
OUT = "{ .reg .b32 n; mov.u32 n, %ntid.x; mad.lo.u32 i, cta, n, tid; }"


def result(register):
    return OUT + store_word("g1", "i", register)


# ---------------------------------------------------------------------------------- generic and asynchronous proxy


def store_tile(before="", fence_all="", fence_one="", wait_for="cp.async.bulk.wait_group 0;"):
    """Every thread writes its word to shared memory; thread 0 stores them all to out with one bulk copy."""
    issue = fence_one + bulk_store("g1", f"smem+{DATA}", 512) + COMMIT + wait_for
    return f"{MINE} {before} st.shared.b32 [y], tid; {fence_all} {SYNC} {when('tid == 0', issue)}"


@bug("proxy", itself)
def proxy_fence_missing(fixed):
    return store_tile(fence_all=FENCE if fixed else "")


@bug("proxy", itself)
def proxy_fence_by_the_issuer_only(fixed):
    return store_tile(fence_all=FENCE) if fixed else store_tile(fence_one=FENCE)


@bug("proxy", itself)
def proxy_fence_before_the_write(fixed):
    return store_tile(fence_all=FENCE) if fixed else store_tile(before=FENCE)


@bug("proxy", itself)
def proxy_fence_of_the_wrong_space(fixed):
    return store_tile(fence_all=FENCE if fixed else "fence.proxy.async.global;")


@bug("proxy", itself)
def proxy_fence_after_the_barrier(fixed):
    issue = bulk_store("g1", f"smem+{DATA}", 512) + COMMIT + "cp.async.bulk.wait_group 0;"
    order = FENCE + SYNC if fixed else SYNC + FENCE
    return f"{MINE} st.shared.b32 [y], tid; {order} {when('tid == 0', issue)}"


@bug("race", itself)
def barrier_missing_before_the_store(fixed):
    issue = bulk_store("g1", f"smem+{DATA}", 512) + COMMIT + "cp.async.bulk.wait_group 0;"
    return f"{MINE} st.shared.b32 [y], tid; {FENCE} {SYNC if fixed else ''} {when('tid == 0', issue)}"


# ---------------------------------------------------------------------------------------------------- bulk groups


@bug("exit race", itself)
def exit_while_a_store_reads_shared_memory(fixed):
    return store_tile(fence_all=FENCE, wait_for="cp.async.bulk.wait_group.read 0;" if fixed else "")


@bug("race", itself)
def wait_group_read_taken_for_the_global_write(fixed):
    # Thread 0 reads back what its bulk store wrote.
    read = "" if fixed else ".read"
    check = load_word("x", "g1", 5) + store_word("g1", 5, "x")
    return store_tile(fence_all=FENCE, wait_for=f"cp.async.bulk.wait_group{read} 0;" + check)


@bug("race", itself)
def source_overwritten_before_wait_group_read(fixed):
    waiting = "cp.async.bulk.wait_group.read 0;"
    again = f"{SYNC} st.shared.b32 [y], 7;" + when("tid == 0", "" if fixed else waiting)
    return store_tile(fence_all=FENCE, wait_for=waiting if fixed else "") + again


@bug("race", itself)
def wait_group_by_another_thread_than_the_issuer(fixed):
    waiting = "cp.async.bulk.wait_group.read 0;"
    waiter = "tid == 0" if fixed else "tid == 32"
    return (
        store_tile(fence_all=FENCE, wait_for="")
        + when(waiter, waiting)
        + f"{SYNC} st.shared.b32 [y], 7;"
        + (when("tid == 0", waiting))
    )


@bug("race", itself)
def wait_group_leaves_one_too_many(fixed):
    halves = [bulk_store(f"g1+{at}", f"smem+{DATA + at}", 256) + COMMIT for at in (0, 256)]
    both = "".join(halves)
    n = 0 if fixed else 1
    return (
        f"{MINE} st.shared.b32 [y], tid; {FENCE} {SYNC}"
        + when("tid == 0", both + f"cp.async.bulk.wait_group.read {n};")
        + f"{SYNC} st.shared.b32 [y], 7;"
        + when("tid == 0", "cp.async.bulk.wait_group.read 0;")
    )


@bug("race exit", itself)
def wait_group_without_a_commit(fixed):
    issue = bulk_store("g1", f"smem+{DATA}", 512) + (COMMIT if fixed else "") + "cp.async.bulk.wait_group 0;"
    return f"{MINE} st.shared.b32 [y], tid; {FENCE} {SYNC} {when('tid == 0', issue)} {SYNC} st.shared.b32 [y], 7;"


# ------------------------------------------------------------------------------------------ bulk loads and mbarriers

# Thread 0 loads the first 512 bytes of data to shared memory.
LOAD = expect("smem", 512) + bulk_load(f"smem+{DATA}", "g0", 512, "smem")
READ = "ld.shared.b32 x, [y];" + result("x")


@bug("race poison", itself)
def read_without_waiting_for_the_load(fixed):
    return init(1) + SYNC + MINE + when("tid == 0", LOAD) + (wait("smem", 0) if fixed else SYNC) + READ


@bug("race poison", itself)
def wait_for_the_wrong_parity(fixed):
    # A fresh mbarrier lets a wait for parity 1 pass.
    return init(1) + SYNC + MINE + when("tid == 0", LOAD) + wait("smem", 0 if fixed else 1) + READ


@bug("race poison", itself, every=False)
def try_wait_without_a_loop(fixed):
    once = "mbarrier.try_wait.parity.shared::cta.b64 p, [smem], 0;"
    return init(1) + SYNC + MINE + when("tid == 0", LOAD) + (wait("smem", 0) if fixed else once) + READ


@bug("race deadlock mbarrier", itself)
def expect_too_few_bytes(fixed):
    load = expect("smem", 512 if fixed else 256) + bulk_load(f"smem+{DATA}", "g0", 512, "smem")
    return init(1) + SYNC + MINE + when("tid == 0", load) + wait("smem", 0) + READ


@bug("deadlock", itself)
def expect_too_many_bytes(fixed):
    load = expect("smem", 512 if fixed else 528) + bulk_load(f"smem+{DATA}", "g0", 512, "smem")
    return init(1) + SYNC + MINE + when("tid == 0", load) + wait("smem", 0) + READ


@bug("deadlock", itself)
def arrival_count_of_the_mbarrier_too_high(fixed):
    return init(1 if fixed else 2) + SYNC + MINE + when("tid == 0", LOAD) + wait("smem", 0) + READ


@bug("mbarrier-init", itself, practice="P4")
def mbarrier_init_without_its_fence(fixed):
    fence = "fence.mbarrier_init.release.cluster;" if fixed else ""
    return init(1, fence=fence) + SYNC + MINE + when("tid == 0", LOAD) + wait("smem", 0) + READ


@bug("mbarrier race", itself)
def mbarrier_used_before_any_barrier_says_it_exists(fixed):
    return (
        init(4)
        + (SYNC if fixed else "")
        + MINE
        + (when("lane == 0", "mbarrier.arrive.shared::cta.b64 _, [smem];") + wait("smem", 0) + result("tid"))
    )


@bug("mbarrier", itself)
def mbarrier_never_initialised(fixed):
    return (init(1) if fixed else "") + SYNC + MINE + when("tid == 0", LOAD) + wait("smem", 0) + READ


@bug("mbarrier", itself)
def mbarrier_reused_without_inval(fixed):
    inval = "mbarrier.inval.shared::cta.b64 [smem];" if fixed else ""
    first = init(128) + SYNC + "mbarrier.arrive.shared::cta.b64 _, [smem];" + wait("smem", 0) + SYNC
    overlay = when("tid == 0", inval + "st.shared.b64 [smem], 5; ld.shared.b64 a, [smem];")
    return first + overlay + result("tid")


@bug("mbarrier", itself)
def mbarrier_initialised_twice(fixed):
    inval = when("tid == 0", "mbarrier.inval.shared::cta.b64 [smem];") if fixed else ""
    first = init(128) + SYNC + "mbarrier.arrive.shared::cta.b64 _, [smem];" + wait("smem", 0) + SYNC
    return (
        first
        + inval
        + init(128)
        + SYNC
        + ("mbarrier.arrive.shared::cta.b64 _, [smem];" + wait("smem", 0) + result("tid"))
    )


@bug("race", lambda t: t ^ 32)
def more_arrivals_than_the_mbarrier_counts(fixed):
    # 127 arrivals are counted and 128 come: whose is the last one, nobody has waited for that thread.
    arrive = "st.shared.b32 [y], tid; mbarrier.arrive.shared::cta.b64 _, [smem];"
    read = "xor.b32 z, y, 128; ld.shared.b32 x, [z];"
    return init(128 if fixed else 127) + SYNC + MINE + arrive + wait("smem", 0) + read + result("x")


@bug("mbarrier", 1, threads=64)
def mbarrier_completes_twice_between_two_looks(fixed):
    # Warp 1 arrives for two phases; unless warp 0 has looked in between, the parity it waits for has come round again.
    arrive = when("tid == 32", "mbarrier.arrive.shared::cta.b64 _, [smem];")
    between = (wait("smem", 0) + SYNC) if fixed else ""
    late = "" if fixed else wait("smem", 0)
    return init(1) + SYNC + arrive + between + arrive + SYNC + late + wait("smem", 1) + "mov.b32 x, 1;" + result("x")


# Two stages of 256 bytes. Thread 32 loads 64 words four times; threads 0 to 31 add up their two words of each.
def ring(full_parity="p0", empty_parity="p1", wait_empty=True, arrive_late=True, stages=2, fence=FENCE):
    waits = wait("z", empty_parity) if wait_empty else ""
    stage = f"rem.u32 x, i, {stages}; shl.b32 x, x, 3; add.u32 y, smem, x;"  # y: full, z: empty
    parities = f"div.u32 p0, i, {stages}; and.b32 p0, p0, 1; xor.b32 p1, p0, 1;"
    place = f"shl.b32 x, x, 5; add.u32 x, x, smem; add.u32 x, x, {DATA};"
    common = f"{stage} add.u32 z, y, {8 * stages}; {parities} {place}"
    produce = f"""
    {common}
    {waits}
    mul.wide.u32 a, i, 256;
    add.u64 a, a, g0;
    {expect("y", 256)}
    {bulk_load("x", "a", 256, "y")}
    """
    read = """
    shl.b32 r0, lane, 2;
    add.u32 r0, r0, x;
    ld.shared.b32 r1, [r0];
    ld.shared.b32 r2, [r0+128];
    add.u32 r3, r3, r1;
    add.u32 r3, r3, r2;
    """
    arrive = "mbarrier.arrive.shared::cta.b64 _, [z];"
    order = read + fence + arrive if arrive_late else arrive + read + fence
    consume = f"{common} {wait('y', full_parity)} {order}"
    declare = ".reg .b32 p0, p1; mov.b32 r3, 0;"
    return (
        declare
        + init(*[1] * stages, *[32] * stages)
        + SYNC
        + when("tid == 32", loop(5, produce))
        + when("warp == 0", loop(5, consume) + result("r3"))
        + when("warp == 1", result("tid"))
    )


def ring_sum(t):
    return sum(64 * i + t + 64 * i + t + 32 for i in range(5)) if t < 32 else t


@bug("proxy", ring_sum, threads=64, practice="P5")
def stage_given_back_without_a_proxy_fence(fixed):
    return ring(fence=FENCE if fixed else "")


@bug("race mbarrier", ring_sum, threads=64)
def stage_refilled_without_waiting_for_it_to_be_empty(fixed):
    return ring(wait_empty=fixed)


@bug("race", ring_sum, threads=64, every=False)
def stage_given_back_before_it_is_read(fixed):
    return ring(arrive_late=fixed)


@bug("race mbarrier deadlock", ring_sum, threads=64)
def parity_off_by_one_after_an_odd_number_of_wraps(fixed):
    # As if the ring had turned every time, not every third time.
    return (
        ring(stages=3, full_parity="p0")
        if fixed
        else ring(stages=3, full_parity="x").replace(
            "mbarrier.try_wait.parity.shared::cta.b64 done, [y], x",
            "and.b32 p0, i, 1; mbarrier.try_wait.parity.shared::cta.b64 done, [y], p0",
        )
    )


@bug("deadlock", ring_sum, threads=64)
def empty_wait_starts_with_parity_0(fixed):
    return ring(empty_parity="p1" if fixed else "p0")


# ------------------------------------------------------------------------------------------------ threads of a warp


@bug("race", lambda t: t ^ 1)
def lane_race_without_syncwarp(fixed):
    # Lanes run together on every chip that exists, and the value comes out right.
    syncwarp = "bar.warp.sync -1;" if fixed else ""
    return f"{MINE} st.shared.b32 [y], tid; {syncwarp} xor.b32 z, y, 4; ld.shared.b32 x, [z];" + result("x")


@bug("race", lambda t: t ^ 32)
def warp_race_without_a_barrier(fixed):
    return f"{MINE} st.shared.b32 [y], tid; {SYNC if fixed else ''} xor.b32 z, y, 128; ld.shared.b32 x, [z];" + result(
        "x"
    )


@bug("race", lambda t: t ^ 32)
def second_write_without_a_second_barrier(fixed):
    again = (SYNC if fixed else "") + "st.shared.b32 [y], 0;"
    return f"{MINE} st.shared.b32 [y], tid; {SYNC} xor.b32 z, y, 128; ld.shared.b32 x, [z]; {again}" + result("x")


@bug("race", itself, every=False, threads=32)
def elect_sync_assumed_to_be_lane_0(fixed):
    # The elected lane stores; lane 0 waits for its own bulk groups, of which it may have none.
    issue = bulk_store("g1", f"smem+{DATA}", 128) + COMMIT
    waiting = "cp.async.bulk.wait_group.read 0;"
    return f"""
    {MINE} st.shared.b32 [y], tid; {FENCE} bar.warp.sync -1;
    elect.sync _|p, -1;
    selp.u32 x, 1, 0, p;
    {when("x == 1", issue)}
    {when("x == 1" if fixed else "lane == 0", waiting)}
    bar.warp.sync -1;
    st.shared.b32 [y], 7;
    {when("x == 1", waiting)}
    """


@bug("divergence", itself)
def shuffle_waits_for_lanes_that_never_come(fixed):
    mask = 0xFFFF if fixed else 0xFFFFFFFF
    shuffle = f"shfl.sync.idx.b32 x, tid, 3, 0x1f, {mask};"
    return when("lane < 16", shuffle) + SYNC + result("tid")


# ------------------------------------------------------------------------------------------------- named barriers


@bug("race deadlock barrier", lambda t: t ^ 32, every=False)
def named_barrier_used_by_two_groups_at_once(fixed):
    # Warps 0 and 1 are a group, 2 and 3 another; barrier 1 may pair a warp of each.
    number = "add.u32 x, x, 1;" if fixed else "mov.b32 x, 1;"
    return f"""
    {MINE} shr.u32 x, warp, 1; {number}
    st.shared.b32 [y], tid;
    barrier.sync x, 64;
    xor.b32 z, y, 128; ld.shared.b32 x, [z];
    """ + result("x")


@bug("race", itself)
def named_barrier_arrive_where_sync_is_needed(fixed):
    # Warp 1 reads what warp 0 wrote, but only says that it is there.
    return (
        f"{MINE}"
        + when("warp == 0", "st.shared.b32 [y], 9; barrier.sync 1, 64;")
        + when("warp == 1", f"barrier.{'sync' if fixed else 'arrive'} 1, 64; xor.b32 z, y, 128; ld.shared.b32 x, [z];")
        + result("tid")
    )


@bug("deadlock", itself)
def named_barrier_counts_a_warp_that_never_comes(fixed):
    return when("warp < 2", f"barrier.sync 1, {64 if fixed else 96};") + result("tid")


@bug("barrier", itself, every=False)
def named_barrier_with_two_different_counts(fixed):
    return (
        when("warp == 0", "barrier.sync 1, 64;")
        + when("warp == 1", f"barrier.sync 1, {64 if fixed else 96};")
        + (when("warp == 2", "" if fixed else "barrier.sync 1, 96;") + result("tid"))
    )


# ----------------------------------------------------------------------------------------------------- cp.async

COPY_16 = f"""
shl.b32 y, tid, 4; mul.wide.u32 a, tid, 16; add.u64 a, a, g0;
add.u32 y, y, smem; add.u32 y, y, {DATA};
cp.async.cg.shared.global [y], [a], 16;
cp.async.commit_group;
"""


@bug("race poison", lambda t: 4 * t)
def cp_async_read_without_a_wait(fixed):
    return COPY_16 + ("cp.async.wait_group 0;" if fixed else "") + "ld.shared.b32 x, [y];" + result("x")


@bug("race poison", lambda t: 4 * (t ^ 32))
def cp_async_of_another_thread_without_a_barrier(fixed):
    return (
        COPY_16 + f"cp.async.wait_all; {SYNC if fixed else ''} xor.b32 z, y, 512; ld.shared.b32 x, [z];" + result("x")
    )


@bug("race poison", lambda t: 4 * (t ^ 32))
def cp_async_waited_for_after_the_barrier(fixed):
    order = f"cp.async.wait_all; {SYNC}" if fixed else f"{SYNC} cp.async.wait_all;"
    return COPY_16 + order + "xor.b32 z, y, 512; ld.shared.b32 x, [z];" + result("x")


# -------------------------------------------------------------------------------------------------------- poison


@bug("poison", itself)
def shared_memory_taken_for_zero(fixed):
    clear = "st.shared.b32 [y], 0;" if fixed else ""
    return f"{MINE} {clear} ld.shared.b32 x, [y]; add.u32 x, x, tid;" + result("x")


@bug("poison", itself)
def register_taken_for_zero(fixed):
    return ("mov.b32 r5, 0;" if fixed else "") + "add.u32 x, r5, tid;" + result("x")


@bug("poison", itself)
def result_read_before_anyone_wrote_it(fixed):
    return OUT + (store_word("g1", "i", "tid") if fixed else "") + load_word("x", "g1", "i") + result("x")


@bug("poison", itself)
def branch_on_a_register_that_nothing_wrote(fixed):
    return ("mov.b32 r5, 0;" if fixed else "") + when("r5 == 0", "mov.b32 r6, 1;") + result("tid")


# -------------------------------------------------------------------------------------------- addresses and sizes


@bug("out-of-bounds", itself)
def store_past_the_end_of_an_array(fixed):
    last = f"mul.wide.u32 a, i, 4; add.u64 a, a, g1; st.global.b32 [a+{0 if fixed else 4}], tid;"
    return result("tid") + when("tid == 127", last)


@bug("out-of-bounds", itself)
def shared_memory_past_what_was_asked_for(fixed):
    return when("tid == 0", f"st.shared.b32 [smem+{SMEM - 4 if fixed else SMEM}], 1;") + result("tid")


@bug("misaligned", itself)
def vector_load_at_an_odd_word(fixed):
    load = f"ld.global.v4.b32 {registers(0, 4)}, [g0+{16 if fixed else 4}];"
    return when("tid == 0", load) + result("tid")


@bug("misaligned", itself)
def bulk_copy_size_no_multiple_of_16(fixed):
    size = "mov.b32 x, 512;" if fixed else "mov.b32 x, 520;"
    load = size + expect("smem", "x") + bulk_load(f"smem+{DATA}", "g0", "x", "smem")
    return init(1) + SYNC + MINE + when("tid == 0", load) + wait("smem", 0) + READ


# --------------------------------------------------------------------------------------------------- tensor maps


def tile_maps(data):
    """data as 128 rows of 128 words; boxes of 32 words x 4 rows: 512 bytes."""
    return [TensorMap(data, "u32", (128, 128), (512,), (32, 4))]


def swizzled_maps(data):
    return [TensorMap(data, "u32", (128, 128), (512,), (32, 8), swizzle=128)]


def tensor_load(place, x=0, y=0, size=512):
    return expect("smem", size) + (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        f"[smem+{place}], [m0, {{{x}, {y}}}], [smem];"
    )


@bug("misaligned", lambda t: t % 32 + t // 32 * 128, maps=tile_maps)
def tensor_load_to_a_place_that_is_not_128_byte_aligned(fixed):
    place = DATA + (0 if fixed else 64)
    return (
        init(1)
        + SYNC
        + MINE
        + when("tid == 0", tensor_load(place))
        + wait("smem", 0)
        + (f"ld.shared.b32 x, [y+{place - DATA}];" + result("x"))
    )


@bug("tensor-map misaligned", lambda t: t % 32 + t // 32 * 128 + 4, maps=tile_maps)
def innermost_coordinate_between_two_units_of_16_bytes(fixed):
    return init(1) + SYNC + MINE + when("tid == 0", tensor_load(DATA, x=4 if fixed else 3)) + wait("smem", 0) + READ


@bug("tensor-map out-of-bounds", itself, maps=tile_maps)
def negative_coordinate_in_a_store(fixed):
    y = 0 if fixed else -1
    issue = f"cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [m0, {{0, {y}}}], [smem+{DATA}];" + COMMIT
    return (
        f"{MINE} st.shared.b32 [y], tid; {FENCE} {SYNC}"
        + when("tid == 0", issue + "cp.async.bulk.wait_group 0;")
        + result("tid")
    )


@bug("wrong", lambda t: t % 32 + t // 32 * 128, maps=swizzled_maps)
def swizzle_off_by_one(fixed):
    # Row r of the tile holds 16-byte chunk j at j ^ r; the wrong one takes the row above.
    row = "mov.b32 x, warp;" if fixed else "add.u32 x, warp, 1;"
    return (
        init(1)
        + SYNC
        + MINE
        + when("tid == 0", tensor_load(DATA, size=1024))
        + wait("smem", 0)
        + f"""
    {row}
    and.b32 x, x, 7;
    shl.b32 x, x, 4;
    xor.b32 y, y, x;
    """
        + READ
    )


# -------------------------------------------------------------------------------------------------------- clusters


@bug("exit", lambda t: t % 128 + 128 * (1 - t // 128), cluster=2)
def exit_of_a_cta_that_a_peer_still_reads(fixed):
    # Rank 1 reads late.
    last = CLUSTER_SYNC if fixed else ""
    mine = f"{MINE} mad.lo.u32 x, rank, 128, tid; st.shared.b32 [y], x;"
    read = f"xor.b32 z, rank, 1; mapa.shared::cluster.u32 z, y, z; ld.shared::cluster.b32 x, [z]; {result('x')}"
    return (
        mine
        + CLUSTER_SYNC
        + when("rank == 0", read)
        + (when("rank == 1", "mov.b32 i, 0; nanosleep.u32 100;" + read) + last)
    )


@bug("race exit", lambda t: t % 128, cluster=2)
def write_to_a_peer_that_may_not_have_started(fixed):
    write = f"{MINE} xor.b32 z, rank, 1; mapa.shared::cluster.u32 z, y, z; st.shared::cluster.b32 [z], tid;"
    return (CLUSTER_SYNC if fixed else "") + write + CLUSTER_SYNC + READ


@bug("race", lambda t: t % 128, cluster=2)
def cluster_barrier_arrives_relaxed(fixed):
    relaxed = "" if fixed else ".relaxed"
    write = f"{MINE} xor.b32 z, rank, 1; mapa.shared::cluster.u32 z, y, z; st.shared::cluster.b32 [z], tid;"
    sync = f"barrier.cluster.arrive{relaxed}.aligned; barrier.cluster.wait.aligned;"
    return CLUSTER_SYNC + write + sync + READ


# Each CTA writes a word a thread into its peer's shared memory, and arrives there 128 times.
def hand_to_peer(scope, last=CLUSTER_SYNC):
    return (
        init(128)
        + CLUSTER_SYNC
        + f"""
    {MINE}
    xor.b32 z, rank, 1;
    mapa.shared::cluster.u32 x, y, z;
    st.shared::cluster.b32 [x], tid;
    mapa.shared::cluster.u32 x, smem, z;
    mbarrier.arrive.release.{scope}.shared::cluster.b64 _, [x];
    """
        + wait("smem", 0, f".acquire.{scope}")
        + READ
        + last
    )


@bug("scope", lambda t: t % 128, cluster=2, practice="P3")
def cta_scope_for_the_data_of_a_peer(fixed):
    return hand_to_peer("cluster" if fixed else "cta")


@bug("exit", lambda t: t % 128, cluster=2, every=False)
def exit_of_a_cta_that_a_peer_still_signals(fixed):
    # Rank 0 does not wait for its own mbarrier, and leaves.
    text = (
        init(128)
        + CLUSTER_SYNC
        + when(
            "rank == 1",
            "mov.b32 z, 0; mapa.shared::cluster.u32 x, smem, z;"
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [x];",
        )
        + OUT
        + "and.b32 x, tid, 127;"
        + result("x")
    )
    return text + (CLUSTER_SYNC if fixed else "")


MULTICAST = """
mov.b16 h0, 3;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [smem+1024], [g0], 512, [smem], h0;
"""


ARM = when("tid == 0", expect("smem", 512))
LOOK = wait("smem", 0)


def multicast(arm=ARM, issue=MULTICAST, look=LOOK, last=CLUSTER_SYNC):
    return init(1) + CLUSTER_SYNC + MINE + arm + CLUSTER_SYNC + when("rank == 0", when("tid == 0", issue)) + look + last


@bug("exit", lambda t: t % 128, cluster=2, every=False)
def exit_of_a_cta_that_a_peer_multicasts_into(fixed):
    look = wait("smem", 0) + READ
    return multicast(look=look if fixed else when("rank == 0", look) + when("rank == 1", result("tid")), last="")


@bug("mbarrier race exit deadlock", lambda t: t % 128, cluster=2)
def expect_tx_by_one_cta_of_two(fixed):
    arm = when("tid == 0", expect("smem", 512))
    return multicast(arm=arm if fixed else when("rank == 0", arm), look=wait("smem", 0) + READ)


@bug("race poison", lambda t: t % 128, cluster=2)
def expect_tx_for_one_cta_of_two(fixed):
    # Both CTAs load half of what rank 0's mbarrier counts.
    load = """
    mov.b32 z, 0; mapa.shared::cluster.u32 x, smem, z; shl.b32 r0, rank, 8; add.u32 r1, smem, r0; cvt.u64.u32 a, r0;
    add.u64 a, a, g0; mapa.shared::cluster.u32 r2, r1, z;
    """ + bulk_load("r2+1024", "a", 256, "x")
    arm = when("rank == 0", when("tid == 0", expect("smem", 512 if fixed else 256)))
    return (
        init(1)
        + CLUSTER_SYNC
        + MINE
        + arm
        + CLUSTER_SYNC
        + when("tid == 0", load)
        + when("rank == 0", wait("smem", 0) + READ)
        + when("rank == 1", "and.b32 x, tid, 127;" + result("x"))
        + CLUSTER_SYNC
    )


# ------------------------------------------------------------------------------------------------- global memory


@bug("race", itself, grid=2)
def two_ctas_add_without_an_atomic(fixed):
    add = "ld.global.b32 x, [g0]; add.u32 x, x, 1; st.global.b32 [g0], x;"
    return when("tid == 0", "red.global.add.u32 [g0], 1;" if fixed else add) + result("i")


@bug("race", itself, grid=2, threads=32, every=False)
def message_between_ctas_without_release(fixed):
    store = f"st.global.b32 [g0], 5; st.{'release.gpu' if fixed else 'relaxed.gpu'}.global.b32 [g0+4096], 1;"
    look = """
    mov.b32 i, 0;
    LOOK:
    ld.acquire.gpu.global.b32 x, [g0+4096];
    add.u32 i, i, 1;
    setp.ne.u32 p, x, 1;
    setp.lt.u32 q, i, 1000;
    and.pred q, p, q;
    @q bra LOOK;
    setp.eq.u32 p, x, 1;
    @p ld.global.b32 y, [g0];
    """
    return when("tid == 0", when("cta == 0", store) + when("cta == 1", look)) + result("i")


# ------------------------------------------------------------------------------------------------- register pool


@bug("setmaxnreg deadlock", itself)
def setmaxnreg_by_three_of_four_warps(fixed):
    change = "setmaxnreg.dec.sync.aligned.u32 40;"
    return (change if fixed else when("warp < 3", change)) + result("tid")


@bug("setmaxnreg", itself)
def setmaxnreg_in_the_wrong_direction(fixed):
    return f"setmaxnreg.{'dec' if fixed else 'inc'}.sync.aligned.u32 40;" + result("tid")


@bug("setmaxnreg", itself, minnctapersm=False)
def setmaxnreg_without_a_register_bound(fixed):
    return "setmaxnreg.dec.sync.aligned.u32 40;" + result("tid")


@bug("deadlock", itself, threads=512)
def setmaxnreg_asks_for_more_than_the_pool_has(fixed):
    # 512 threads start with 128 registers each. Three warpgroups give back 24 each, the fourth takes 96 at once.
    take = 200 if fixed else 208
    return (
        when("warp < 4", f"setmaxnreg.inc.sync.aligned.u32 {take};")
        + when("warp >= 4", "setmaxnreg.dec.sync.aligned.u32 104;")
        + result("tid")
    )


# --------------------------------------------------------------------------------------------------- tensor memory

SIXTEEN = int(numpy.float32(16).view(numpy.uint32))  # every element of the product
START = ALLOC + init(1, 1, 128, 128) + fill(MMA_A, 4096, ONES) + fill(MMA_B, 512, ONES)
AFTER = "tcgen05.fence::after_thread_sync;"
BEFORE = "tcgen05.fence::before_thread_sync;"
WAIT_LD = "tcgen05.wait::ld.sync.aligned;"
WAIT_ST = "tcgen05.wait::st.sync.aligned;"
ARRIVE_8 = "mbarrier.arrive.shared::cta.b64 _, [smem+16];"


PRODUCT = mma() + commit()
LOAD_D = tmem_load() + WAIT_LD


def product(
    publish=FENCE + PUBLISH,
    issue=PRODUCT,
    others="",
    look=LOOK + AFTER,
    load=LOAD_D,
    end=DEALLOC,
):
    """One 128 x 16 x 16 product by thread 0; every thread takes the first element of its row."""
    return (
        START + publish + DESCRIPTORS + MY_LANES + when("tid == 0", issue) + others + look + load + result("r0") + end
    )


@bug("proxy race", SIXTEEN)
def mma_operands_without_a_proxy_fence(fixed):
    return product(publish=(FENCE if fixed else "") + PUBLISH)


@bug("race", SIXTEEN)
def barrier_taken_for_the_completion_of_an_mma(fixed):
    return product(look=wait("smem", 0) + AFTER if fixed else BEFORE + SYNC + AFTER)


@bug("race proxy", SIXTEEN)
def proxy_fence_in_place_of_a_commit(fixed):
    look = wait("smem", 0) + AFTER if fixed else FENCE + BEFORE + SYNC + AFTER
    return product(look=look + fill(MMA_A, 4096, 0) + BEFORE + SYNC + AFTER)


@bug("race deadlock", SIXTEEN)
def commit_by_another_thread_than_the_mma(fixed):
    other = "tid == 0" if fixed else "tid == 32"
    return product(issue=mma(), others=when(other, commit()))


@bug("tcgen05-fence", SIXTEEN, practice="P1")
def no_tcgen05_fence_after_the_wait(fixed):
    return product(look=wait("smem", 0) + (AFTER if fixed else ""))


@bug("poison", SIXTEEN)
def first_mma_adds_to_what_was_never_written(fixed):
    return product(issue=mma(accumulate=0 if fixed else 1) + commit())


@bug("tcgen05", SIXTEEN)
def tensor_memory_of_another_warp(fixed):
    return product(load=("" if fixed else "xor.b32 x, x, 0x200000;") + LOAD_D)


@bug("tcgen05", SIXTEEN)
def columns_that_were_not_allocated(fixed):
    return product(load=LOAD_D + ("" if fixed else tmem_load("x+64", first=16) + WAIT_LD))


@bug("tcgen05", SIXTEEN)
def tensor_memory_never_freed(fixed):
    return product(end=DEALLOC if fixed else "")


@bug("tcgen05", SIXTEEN)
def dealloc_of_another_size_than_alloc(fixed):
    return product(end=DEALLOC if fixed else DEALLOC.replace("tmem, 64", "tmem, 32"))


@bug("tcgen05", SIXTEEN)
def alloc_after_giving_up_the_permit(fixed):
    again = "" if fixed else f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+{TMEM_WORD + 8}], 32;"
    free = (
        ""
        if fixed
        else f"ld.shared.b32 y, [smem+{TMEM_WORD + 8}]; tcgen05.dealloc.cta_group::1.sync.aligned.b32 y, 32;"
    )
    return product(others=when("warp == 0", again + free))


@bug("race tcgen05", SIXTEEN)
def dealloc_while_an_mma_is_pending(fixed):
    again = when("tid == 0", mma() + commit("smem+8"))
    return product(load=LOAD_D + BEFORE + SYNC + AFTER + again + (wait("smem+8", 0) if fixed else "") + AFTER)


@bug("race tcgen05", SIXTEEN)
def dealloc_while_a_load_is_pending(fixed):
    return product(load=LOAD_D + tmem_load(first=16) + (WAIT_LD if fixed else ""))


def overwrite(load):
    """The threads hand their columns back by an mbarrier, thread 0 lets an MMA overwrite them."""
    again = when("tid == 0", wait("smem+16", 0) + AFTER + mma() + commit("smem+8"))
    return product(load=load + again + wait("smem+8", 0) + AFTER)


@bug("race", SIXTEEN)
def arrival_before_wait_ld(fixed):
    return overwrite(tmem_load() + (WAIT_LD + BEFORE + ARRIVE_8 if fixed else BEFORE + ARRIVE_8 + WAIT_LD))


@bug("race", SIXTEEN, practice="P2")
def use_of_the_registers_taken_for_wait_ld(fixed):
    use = "mov.b32 r20, 0;" + "".join(f"xor.b32 r20, r20, r{i};" for i in range(16))
    return overwrite(tmem_load() + use + (WAIT_LD if fixed else "") + BEFORE + ARRIVE_8)


# P = all ones, 8 columns of two bf16 each, goes to columns 32 .. 39 and is the A operand of thread 0's MMA.
ONES_IN_R0_TO_R7 = "".join(f"mov.b32 r{i}, {ONES:#x};" for i in range(8))
TS = mma(a="[y]") + commit()


def hand_over(write, issue, before=""):
    return product(
        issue="",
        others=f"add.u32 z, x, 32; add.u32 y, tmem, 32; {ONES_IN_R0_TO_R7}"
        + write
        + when("tid == 0", before + wait("smem+16", 0) + AFTER + issue),
    )


@bug("race poison", SIXTEEN)
def arrival_before_wait_st(fixed):
    order = WAIT_ST + BEFORE + ARRIVE_8 if fixed else BEFORE + ARRIVE_8 + WAIT_ST
    return hand_over(tmem_store("z", 8) + order, TS)


@bug("race poison", SIXTEEN)
def second_part_of_a_hand_over_not_awaited(fixed):
    second = "mbarrier.arrive.shared::cta.b64 _, [smem+24];"
    write = tmem_store("z", 4) + WAIT_ST + BEFORE + ARRIVE_8 + tmem_store("z+4", 4) + WAIT_ST + BEFORE + second
    return hand_over(write, TS, before=wait("smem+24", 0) if fixed else "")


@bug("race poison", SIXTEEN)
def store_read_back_without_wait_st(fixed):
    write = tmem_store("z", 8) + (WAIT_ST if fixed else "") + tmem_load("z", 8, first=8) + WAIT_LD
    return hand_over(write + WAIT_ST + BEFORE + ARRIVE_8, TS)


@bug("race", SIXTEEN)
def loaded_columns_overwritten_without_wait_ld(fixed):
    load = tmem_load() + (WAIT_LD if fixed else "") + tmem_store("x", 16, first=16) + WAIT_LD + WAIT_ST
    return product(others="".join(f"mov.b32 r{i}, 0;" for i in range(16, 32)), load=load)


@bug("race", SIXTEEN)
def operand_overwritten_while_the_mma_reads_it(fixed):
    # The barrier says that the MMA was issued, not that it has read A.
    return product(look=(wait("smem", 0) if fixed else BEFORE + SYNC) + fill(MMA_A, 4096, 0) + wait("smem", 0) + AFTER)


@bug("descriptor", SIXTEEN)
def descriptor_address_overflow(fixed):
    # Stepping by more than the 14 bits of the address field hold runs into the leading byte offset.
    return product(issue=("" if fixed else "add.u64 b, b, 0x3fff;") + mma() + commit())


@bug("descriptor", SIXTEEN)
def descriptor_of_hopper(fixed):
    # Without the version bits.
    return product(issue=("" if fixed else "and.b64 a, a, 0xffff3fffffffffff;") + mma() + commit())


@bug("descriptor tcgen05", SIXTEEN)
def instruction_descriptor_with_an_impossible_m(fixed):
    return product(issue=mma(idesc=IDESC if fixed else IDESC + (1 << 24)) + commit())


@bug("race", SIXTEEN, strict_mma_order=True)
def two_products_trust_the_order_of_issue(fixed):
    # The second reads as A what the first writes (as bits): only assumption A1 orders them.
    first = mma() + commit("smem+8") + (wait("smem+8", 0) + AFTER if fixed else "")
    second = "add.u32 y, tmem, 16;" + mma("y", a="[tmem]") + commit()
    return product(issue=first + second)


# ----------------------------------------------------------------------------------------------- wgmma (sm_90a)

WGMMA_FENCE = "wgmma.fence.sync.aligned;"
WGMMA_WAIT = "wgmma.wait_group.sync.aligned 0;"
ZERO_REGISTERS = "".join(f"mov.b32 r{i}, 0;" for i in range(8))
WGMMA = f"wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {registers(0, 8)}, a, b, 1, 1, 1, 0, 0;"
WGMMA += "wgmma.commit_group.sync.aligned;"


def warpgroup_product(publish=FENCE + SYNC, fence=WGMMA_FENCE, finish=WGMMA_WAIT, after=""):
    """64 x 16 x 16 of all ones by a warpgroup, added to accumulators of 0; every thread takes its first element."""
    return (
        fill(MMA_A, 2048, ONES)
        + fill(MMA_B, 512, ONES)
        + publish
        + descriptor("a", MMA_A, 1024, 128, version=0)
        + descriptor("b", MMA_B, 256, 128, version=0)
        + ZERO_REGISTERS
        + fence
        + WGMMA
        + finish
        + result("r0")
        + after
    )


@bug("proxy race", SIXTEEN, target="sm_90a")
def wgmma_operands_without_a_proxy_fence(fixed):
    return warpgroup_product(publish=(FENCE if fixed else "") + SYNC)


@bug("wgmma race", SIXTEEN, target="sm_90a")
def accumulators_read_before_the_wait(fixed):
    return warpgroup_product(finish=WGMMA_WAIT if fixed else "", after=WGMMA_WAIT)


@bug("wgmma race", SIXTEEN, target="sm_90a")
def wait_group_that_leaves_the_last_product_pending(fixed):
    return warpgroup_product(finish=WGMMA_WAIT if fixed else WGMMA_WAIT.replace("0", "1"), after=WGMMA_WAIT)


@bug("wgmma race", SIXTEEN, target="sm_90a")
def accumulators_written_without_wgmma_fence(fixed):
    return warpgroup_product(fence=WGMMA_FENCE if fixed else "")


@bug("race", SIXTEEN, target="sm_90a")
def operands_overwritten_before_the_wgmma_is_done(fixed):
    overwrite = fill(MMA_A, 2048, 0)
    return warpgroup_product(finish=WGMMA_WAIT + SYNC + overwrite if fixed else overwrite + WGMMA_WAIT)


# ------------------------------------------------------------------------------------------ cluster launch control


def next_tile(look=LOOK, proxy=FENCE):
    """One CTA asks for the next one's work twice, and counts what it got."""
    ask = expect("smem", 16) + (
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [smem+1024], [smem];"
    )
    read = """
    { .reg .b128 v; ld.shared.b128 v, [smem+1024];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, v; }
    selp.u32 x, 1, 0, p;
    """
    return init(1) + SYNC + when("tid == 0", ask + look + read + proxy) + result("tid")


@bug("race poison", itself, threads=32)
def cluster_launch_control_answer_read_too_early(fixed):
    return next_tile(look=wait("smem", 0) if fixed else "")
