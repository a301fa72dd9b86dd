"""Probe kernels: what a Hopper chip answers to them is stored beside this file, and the simulator must say the same.

Every probe is one launch: PTX of the kernel k, a launch shape, and arguments that numpy makes the same everywhere.
run_h200.py runs them on the chip; test_ptxsim_probes.py in the simulator. Nothing here imports either.
"""

import dataclasses

import numpy as np
from ptxsim_kernels.ptx import (
    CLUSTER_SYNC,
    COMMIT,
    DATA,
    MAP,
    POINTER,
    SMEM,
    U32,
    expect,
    init,
    kernel,
    registers,
    wait,
    when,
)

from . import elementwise

SYNC = "bar.sync 0;"
FENCE = "fence.proxy.async.shared::cta;"


@dataclasses.dataclass
class Map:
    """A tensor map over the probe's input number `array`."""

    array: int
    dtype: str
    dims: tuple
    strides: tuple
    box: tuple
    element_strides: tuple = None
    swizzle: int = 0
    fill: str = "zero"


@dataclasses.dataclass
class Probe:
    """args: arrays (those named in results come back), ints, Maps. results: {index of an argument: name}."""

    name: str
    text: str
    args: list
    results: list
    block: int = 128
    grid: int = 1
    cluster: int = 1
    smem: int = SMEM


PROBES = {}


def probe(name, body, args, results, block=128, grid=1, cluster=1, target="sm_90a", declare=""):
    kinds = [POINTER if isinstance(a, np.ndarray) else MAP if isinstance(a, Map) else U32 for a in args]
    text = kernel(body, kinds, target, block, declare=declare)
    assert name not in PROBES
    PROBES[name] = Probe(name, text, args, results, block, grid, cluster)


def numbers(size, seed, high=2**32, dtype=np.uint32):
    return np.random.default_rng(seed).integers(0, high, size, dtype=np.uint64).astype(dtype)


def words(count):
    return np.zeros(count, np.uint32)


# ---------------------------------------------------------------------------------------------- shared memory in bulk


def fill_shared(size, threads=128):
    """shared word i of the data = 0xE0000000 + i, by all threads; then it may be used by the asynchronous proxy."""
    return f"""
{{
.reg .pred more; .reg .b32 n, at, v;
mov.u32 n, tid;
FILL:
setp.ge.u32 more, n, {size // 4};
@more bra FILLED;
shl.b32 at, n, 2;
add.u32 at, at, smem;
add.u32 v, n, 0xE0000000;
st.shared.b32 [at+{DATA}], v;
add.u32 n, n, {threads};
bra FILL;
FILLED:
}}
{FENCE}
{SYNC}
"""


def dump_shared(size, pointer, threads=128, first=0):
    return f"""
{{
.reg .pred more; .reg .b32 n, at, v; .reg .b64 to;
mov.u32 n, tid;
DUMP:
setp.ge.u32 more, n, {size // 4};
@more bra DUMPED;
shl.b32 at, n, 2;
add.u32 at, at, smem;
ld.shared.b32 v, [at+{DATA}];
add.u32 at, n, {first};
mad.wide.u32 to, at, 4, {pointer};
st.global.b32 [to], v;
add.u32 n, n, {threads};
bra DUMP;
DUMPED:
}}
"""


def load_shared(size, pointer, threads=128):
    """shared word i of the data = pointer[i]."""
    return f"""
{{
.reg .pred more; .reg .b32 n, at, v; .reg .b64 from;
mov.u32 n, tid;
FILL:
setp.ge.u32 more, n, {size // 4};
@more bra FILLED;
mad.wide.u32 from, n, 4, {pointer};
ld.global.b32 v, [from];
shl.b32 at, n, 2;
add.u32 at, at, smem;
st.shared.b32 [at+{DATA}], v;
add.u32 n, n, {threads};
bra FILL;
FILLED:
}}
{FENCE}
{SYNC}
"""


# ------------------------------------------------------------------------------------------------------ tensor maps

BYTES = {"u8": 1, "u16": 2, "bf16": 2, "f16": 2, "u32": 4, "s32": 4, "f32": 4, "u64": 8, "s64": 8}


def dense_strides(dtype, dims, pad=0):
    strides, pitch = [], BYTES[dtype]
    for size in dims[:-1]:
        pitch = -(-(pitch * size) // 16) * 16 + pad
        strides.append(pitch)
    return tuple(strides)


def tensor_load_probe(name, dtype, dims, box, at, swizzle=0, fill="zero", offset=0, element_strides=None, pad=0):
    rank = len(dims)
    strides = dense_strides(dtype, dims, pad)
    size = strides[-1] * dims[-1] if strides else BYTES[dtype] * dims[0]
    data = numbers(-(-size // 4) + 64, 17)
    # Rows take a whole span when swizzled.
    row = max(box[0] * BYTES[dtype], swizzle)
    reach = offset + row * int(np.prod(box[1:])) + 128
    steps = element_strides or (1,) * rank
    count = box[0] * int(np.prod([-(-b // s) for b, s in zip(box[1:], steps[1:], strict=True)])) * BYTES[dtype]
    coordinates = ", ".join(f"u{i}" for i in range(rank))
    load = expect("smem", count) + (
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[smem+{DATA + offset}], [m0, {{{coordinates}}}], [smem];"
    )
    shared = -(-reach // 128) * 128
    body = fill_shared(shared) + init(1) + SYNC + when("tid == 0", load) + wait("smem", 0) + dump_shared(shared, "g1")
    at = [x & 0xFFFFFFFF for x in at]
    the_map = Map(0, dtype, dims, strides, box, element_strides, swizzle, fill)
    probe(name, body, [data, words(shared // 4), the_map, *at], [1])


for swizzle in (0, 32, 64, 128):
    for dtype in ("u8", "u16", "u32", "u64"):
        inner = (swizzle or 64) // BYTES[dtype]
        tensor_load_probe(f"tma_load_{dtype}_s{swizzle}", dtype, (inner * 2, 16), (inner, 16), (inner, 0), swizzle)
    inner = (swizzle or 64) // 2
    tensor_load_probe(f"tma_load_half_span_s{swizzle}", "u16", (64, 16), (max(8, inner // 2), 8), (8, 3), swizzle)
    for offset in (128, 384, 640):
        tensor_load_probe(
            f"tma_load_at_{offset}_s{swizzle}", "u16", (64, 16), (inner, 8), (0, 2), swizzle, offset=offset
        )
    for at in ((-8, -3), (40, 12), (-64, 0), (0, 100), (8, -2)):
        tensor_load_probe(
            f"tma_load_outside_s{swizzle}_{at[0]}_{at[1]}".replace("-", "m"), "u16", (56, 15), (inner, 8), at, swizzle
        )
for rank, dims, box, at in [
    (1, (200,), (64,), (160,)),
    (2, (40, 9), (16, 5), (32, 6)),
    (3, (32, 6, 5), (16, 4, 3), (24, 3, -1)),
    (4, (16, 5, 4, 3), (16, 3, 2, 2), (0, 4, -1, 2)),
    (5, (16, 3, 4, 3, 3), (8, 2, 2, 2, 2), (8, -1, 3, 1, 2)),
]:
    tensor_load_probe(f"tma_load_rank{rank}", "u16", dims, box, at)
    tensor_load_probe(f"tma_load_rank{rank}_padded", "f32", dims, box, (0, *at[1:]), pad=48)
for dtype in ("bf16", "f16", "f32"):
    tensor_load_probe(f"tma_load_nan_{dtype}", dtype, (40, 9), (16, 8), (32, 5), fill="nan")
tensor_load_probe("tma_load_element_strides", "u16", (64, 32), (32, 8), (16, 3), element_strides=(1, 2))


def tensor_store_probe(name, dtype, dims, box, at, swizzle=0, reduce=None, data=None, source=None):
    rank = len(dims)
    strides = dense_strides(dtype, dims)
    size = strides[-1] * dims[-1] if strides else BYTES[dtype] * dims[0]
    data = numbers(-(-size // 4) + 64, 23) if data is None else data
    shared = max(row_bytes(box, dtype, swizzle) * int(np.prod(box[1:])), 512)
    source = numbers(shared // 4, 29) if source is None else source
    coordinates = ", ".join(f"u{i}" for i in range(rank))
    opcode = f"cp.reduce.async.bulk.tensor.{rank}d" if reduce else f"cp.async.bulk.tensor.{rank}d"
    middle = f".{reduce}" if reduce else ""
    issue = f"{opcode}.global.shared::cta{middle}.tile.bulk_group [m0, {{{coordinates}}}], [smem+{DATA}];"
    body = load_shared(shared, "g1") + when("tid == 0", issue + COMMIT + "cp.async.bulk.wait_group 0;")
    at = [x & 0xFFFFFFFF for x in at]
    probe(name, body, [data, source, Map(0, dtype, dims, strides, box, None, swizzle), *at], [0])


def row_bytes(box, dtype, swizzle):
    return max(box[0] * BYTES[dtype], swizzle)


for swizzle in (0, 32, 64, 128):
    inner = (swizzle or 64) // 2
    tensor_store_probe(f"tma_store_s{swizzle}", "u16", (64, 24), (inner, 8), (0, 5), swizzle)
    tensor_store_probe(f"tma_store_past_the_end_s{swizzle}", "u16", (56, 15), (inner, 8), (40, 12), swizzle)
    tensor_store_probe(f"tma_store_outside_s{swizzle}", "u16", (56, 15), (inner, 8), (0, 200), swizzle)
tensor_store_probe("tma_store_rank1", "u32", (200,), (64,), (160,))
tensor_store_probe("tma_store_rank3", "u16", (32, 6, 5), (16, 4, 3), (16, 3, 3))
tensor_store_probe("tma_store_rank4", "u16", (16, 5, 4, 3), (16, 3, 2, 2), (8, 4, 3, 2))
tensor_store_probe("tma_store_rank5", "u16", (16, 3, 4, 3, 3), (8, 2, 2, 2, 2), (8, 2, 3, 1, 2))
for dtype, kinds in {
    "u32": ["add", "min", "max", "inc", "dec", "and", "or", "xor"],
    "s32": ["add", "min", "max", "and"],
    "u64": ["add", "min", "max", "and", "or", "xor"],
    "s64": ["min", "max"],
}.items():
    for kind in kinds:
        tensor_store_probe(f"tma_reduce_{kind}_{dtype}", dtype, (16, 6), (8, 4), (8, 1), reduce=kind)


def floats(count, dtype, seed):
    """count words of whole numbers and halves: their sums are exact."""
    x = np.random.default_rng(seed).integers(-64, 65, 2 * count).astype(np.float32) / 2
    if dtype == "f32":
        return x[:count].view(np.uint32)
    if dtype == "f16":
        return x.astype(np.float16).view(np.uint32)
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)


for dtype, kinds in {"f32": ["add"], "f16": ["add", "min", "max"], "bf16": ["add", "min", "max"]}.items():
    for kind in kinds:
        tensor_store_probe(
            f"tma_reduce_{kind}_{dtype}",
            dtype,
            (16, 6),
            (8, 4),
            (8, 1),
            reduce=kind,
            data=floats(512, dtype, 3),
            source=floats(512, dtype, 4),
        )


# ----------------------------------------------------------------------------------------------------- bulk copies

for kind, types in {
    "add": ["u32", "s32", "u64", "f32", "f64", "noftz.f16", "noftz.bf16"],
    "min": ["u32", "s32", "u64", "s64", "f16", "bf16"],
    "max": ["u32", "s32", "u64", "s64", "f16", "bf16"],
    "inc": ["u32"],
    "dec": ["u32"],
    "and": ["b32", "b64"],
    "or": ["b32", "b64"],
    "xor": ["b32", "b64"],
}.items():
    for dtype in types:
        is_float = dtype[-3:] in ("f32", "f64", "f16") or dtype.endswith("bf16")
        name = "f64" if dtype == "f64" else dtype.split(".")[-1]
        make = (lambda n, seed, name=name: floats(n, name, seed)) if is_float and name != "f64" else numbers
        if name == "f64":

            def make(n, seed):
                return (np.random.default_rng(seed).integers(-99, 99, n // 2) / 4).view(np.uint32)

        body = load_shared(256, "g1") + when(
            "tid == 0",
            f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{kind}.{dtype} [g0], [smem+{DATA}], 256;"
            + COMMIT
            + "cp.async.bulk.wait_group 0;",
        )
        probe(f"bulk_reduce_{kind}_{dtype.replace('.', '_')}", body, [make(64, 5), make(64, 6)], [0])

body = (
    fill_shared(1024)
    + init(1)
    + SYNC
    + when(
        "tid == 0",
        expect("smem", 304) + "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[smem+{DATA + 64}], [g0+32], 304, [smem];",
    )
    + wait("smem", 0)
    + dump_shared(1024, "g1")
)
probe("bulk_load", body, [numbers(128, 7), words(256)], [1])
for size, source in [(4, 4), (8, 8), (16, 16), (16, 5), (16, 0), (8, 3)]:
    cache = "cg" if size == 16 else "ca"
    body = (
        fill_shared(128 * 16)
        + f"""
    {{ .reg .b32 at; .reg .b64 from;
    mul.lo.u32 at, tid, 16; add.u32 at, at, smem; mad.wide.u32 from, tid, 16, g0;
    cp.async.{cache}.shared.global [at+{DATA}], [from], {size}, {source};
    cp.async.wait_all; }}
    {SYNC}
    """
        + dump_shared(128 * 16, "g1")
    )
    probe(f"cp_async_{size}_{source}", body, [numbers(512, 8), words(512)], [1])


# ------------------------------------------------------------------------------------------------------ mbarriers


def mbarrier_script(name, count, steps):
    """Thread 0 does the steps; after each it notes whether phases of parity 0 and 1 are complete."""
    look = """
    mbarrier.test_wait.parity.shared::cta.b64 p, [smem], 0; selp.u32 x, 1, 0, p;
    mbarrier.test_wait.parity.shared::cta.b64 p, [smem], 1; selp.u32 y, 2, 0, p;
    or.b32 x, x, y; st.global.b32 [g0+{0}], x;
    """
    text = f"mbarrier.init.shared::cta.b64 [smem], {count};" + look.format(0)
    for i, step in enumerate(steps):
        text += step + look.format(4 * i + 4)
    probe(f"mbarrier_{name}", when("tid == 0", text), [words(32)], [0], block=32)


ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [smem];"
PENDING = "mbarrier.arrive.shared::cta.b64 a, [smem]; mbarrier.pending_count.b64 z, a; st.global.b32 [g0+{0}], z;"


def expect_tx(n):
    return f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [smem], {n};"


def complete_tx(n):
    return f"mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [smem], {n};"


mbarrier_script("arrivals", 3, [ARRIVE] * 7)
mbarrier_script("arrive_n", 5, ["mbarrier.arrive.shared::cta.b64 _, [smem], 2;", ARRIVE, ARRIVE, ARRIVE, ARRIVE])
mbarrier_script("tx_after", 1, [expect_tx(64), ARRIVE, complete_tx(32), complete_tx(32), ARRIVE])
mbarrier_script("tx_before_expect", 1, [complete_tx(64), ARRIVE, expect_tx(64), ARRIVE])
mbarrier_script("arrive_expect_tx", 2, [expect("smem", 48), ARRIVE, complete_tx(16), complete_tx(32), ARRIVE, ARRIVE])
mbarrier_script("expect_tx_alone_never_completes", 1, [expect_tx(16), complete_tx(16), ARRIVE])
mbarrier_script(
    "arrive_drop",
    3,
    ["mbarrier.arrive_drop.shared::cta.b64 _, [smem];", ARRIVE, ARRIVE, ARRIVE, ARRIVE, ARRIVE, ARRIVE],
)
mbarrier_script("pending_count", 4, [PENDING.format(64 + 4 * i) for i in range(6)])
mbarrier_script(
    "state", 2, ["mbarrier.arrive.shared::cta.b64 a, [smem]; mbarrier.test_wait.shared::cta.b64 q, [smem], a;"
                 "selp.u32 z, 1, 0, q; st.global.b32 [g0+64], z;", ARRIVE,
                 "mbarrier.test_wait.shared::cta.b64 q, [smem], a; selp.u32 z, 1, 0, q; st.global.b32 [g0+68], z;"]
)  # fmt: skip
mbarrier_script("inval_and_again", 1, [ARRIVE, "mbarrier.inval.shared::cta.b64 [smem];"
                                       "mbarrier.init.shared::cta.b64 [smem], 2;", ARRIVE, ARRIVE])  # fmt: skip


# --------------------------------------------------------------------------------------------------------- wgmma

# An operand area of 16 KiB each for A and B, filled with small whole numbers of the type, everywhere.
AREA = 16384


def small_numbers(dtype, count, seed):
    """count words of elements in [-2, 2]."""
    x = np.random.default_rng(seed).integers(-2, 3, count * 4).astype(np.float32)
    if dtype == "f16":
        return x[: count * 2].astype(np.float16).view(np.uint32)
    if dtype == "bf16":
        return (x[: count * 2].view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)
    if dtype == "tf32":
        return x[:count].view(np.uint32) | (numbers(count, seed) & 0x1FFF)  # low bits are ignored
    one = {"e4m3": 0x38, "e5m2": 0x3C}[dtype]  # 1.0; 2.0 is one exponent up
    step = 8 if dtype == "e4m3" else 4
    magnitude = np.select([x == 0, abs(x) == 1], [0, one], one + step).astype(np.uint8)
    return (magnitude | np.where(x < 0, 0x80, 0).astype(np.uint8)).view(np.uint32)


def hash_registers(count):
    lines = ["mov.b32 x, 0;"]
    lines += [f"mad.lo.u32 x, x, 1000003, v{i};" for i in range(count)]
    return " ".join(lines)


def wgmma_probe(
    name,
    n,
    dtype,
    accumulator="f32",
    a=(0, 128, 1024),
    b=(0, 128, 1024),
    transposed=(0, 0),
    in_registers=False,
    start=0,
    base_offset=0,
    signs="1, 1",
):
    """a, b: swizzle code, LBO, SBO. The result is a hash of each thread's accumulators: every one in its order."""
    k = {"f16": 16, "bf16": 16, "tf32": 8}.get(dtype, 32)
    count = n // 2 if accumulator == "f32" else n // 4
    d = ", ".join(f"v{i}" for i in range(count))

    def matrix(register, offset, swizzle, lbo, sbo):
        constant = lbo >> 4 << 16 | sbo >> 4 << 32 | base_offset << 49 | swizzle << 62
        return f"""
        {{ .reg .b32 t; add.u32 t, smem, {DATA + offset}; and.b32 t, t, 0x3ffff; shr.u32 t, t, 4;
        cvt.u64.u32 {register}, t; or.b64 {register}, {register}, {constant:#x}; }}
        """

    flags = f"p, {signs}"
    if dtype in ("f16", "bf16"):
        flags += f", {transposed[1]}" if in_registers else f", {transposed[0]}, {transposed[1]}"
    source = registers(0, 4) if in_registers else "a"
    load_a = "".join(
        f"{{ .reg .b64 t; mad.wide.u32 t, tid, 16, g0; ld.global.b32 r{i}, [t+{4 * i}]; }}" for i in range(4)
    )
    opcode = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{accumulator}.{dtype}.{dtype}"
    mma = f"{opcode} {{{d}}}, {source}, b, {flags};"
    body = (
        f".reg .b32 v<{count}>;"
        + load_shared(2 * AREA, "g0")
        + matrix("a", start, *a)
        + matrix("b", AREA + start, *b)
        + (load_a if in_registers else "")
        + "setp.ne.u32 p, smem, smem;"
        + "wgmma.fence.sync.aligned;"
        + mma
        + "setp.eq.u32 p, smem, smem;"
        + mma
        + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
        + hash_registers(count)
        + "{ .reg .b64 t; mad.wide.u32 t, tid, 4, g1; st.global.b32 [t], x; }"
    )
    probe(name, body, [small_numbers(dtype, 2 * AREA // 4, 11), words(128)], [1])


for n in range(8, 257, 8):
    wgmma_probe(f"wgmma_bf16_n{n}", n, "bf16", a=(0, 128, 256), b=(0, 128, 256))
    wgmma_probe(f"wgmma_f16_n{n}", n, "f16", "f16", a=(0, 128, 256), b=(0, 128, 256))
    wgmma_probe(f"wgmma_f16_f32_n{n}", n, "f16", a=(0, 128, 256), b=(0, 128, 256))
    wgmma_probe(f"wgmma_tf32_n{n}", n, "tf32", a=(0, 128, 256), b=(0, 128, 256))
    wgmma_probe(f"wgmma_e4m3_n{n}", n, "e4m3", a=(0, 128, 256), b=(0, 128, 256))
    wgmma_probe(f"wgmma_e5m2_n{n}", n, "e5m2", a=(0, 128, 256), b=(0, 128, 256))
SPANS = {0: 0, 32: 3, 64: 2, 128: 1}
for span, code in SPANS.items():
    for major in (0, 1):
        group = max(16, span) * 8
        # A's rows are 64 and B's 32; strides that no dense tile has.
        a = (code, 2 * group, group) if major and code else (code, 256, 512)
        for which in "ab":
            layouts = {"a": (0, 128, 256), "b": (0, 128, 256), which: a if code or major else (0, 272, 144)}
            flags = (major, 0) if which == "a" else (0, major)
            wgmma_probe(f"wgmma_{which}_span{span}_{'mn' if major else 'k'}", 32, "bf16", transposed=flags, **layouts)
    for dtype in ("tf32", "e4m3"):
        wgmma_probe(f"wgmma_{dtype}_span{span}", 24, dtype, a=(code, 16, 1024), b=(code, 16, 1024))
for dtype in ("bf16", "f16", "tf32", "e4m3", "e5m2"):
    wgmma_probe(f"wgmma_registers_{dtype}", 48, dtype, b=(0, 128, 256), in_registers=True)
wgmma_probe("wgmma_registers_mn", 64, "bf16", b=(1, 8192, 1024), transposed=(0, 1), in_registers=True)


# -------------------------------------------------------------------------------------------------- matrix in warps

for n in (1, 2, 4):
    for trans in ("", ".trans"):
        load = (
            f"""
        {{ .reg .b32 at; .reg .b64 to; and.b32 at, lane, {8 * n - 1}; mad.lo.u32 at, at, 48, smem;
        ldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 {registers(0, n)}, [at+{DATA}];
        mad.wide.u32 to, tid, 16, g1;
        """
            + "".join(f"st.global.b32 [to+{4 * i}], r{i};" for i in range(n))
            + "}"
        )
        probe(
            f"ldmatrix_x{n}{trans.replace('.', '_')}",
            fill_shared(4096, 32) + load,
            [words(1), words(128)],
            [1],
            block=32,
        )
        store = (
            f"""
        {{ .reg .b32 at; and.b32 at, lane, {8 * n - 1}; mad.lo.u32 at, at, 48, smem;
        """
            + "".join(f"mad.lo.u32 r{i}, lane, 0x10001, {i * 0x1000100};" for i in range(n))
            + f"""
        stmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 [at+{DATA}], {registers(0, n)}; }} {SYNC}
        """
        )
        name = f"stmatrix_x{n}{trans.replace('.', '_')}"
        probe(name, fill_shared(2048, 32) + store + dump_shared(2048, "g0", 32), [words(512)], [0], block=32)
probe(
    "movmatrix",
    "mad.lo.u32 x, lane, 0x30005, 77; movmatrix.sync.aligned.m8n8.trans.b16 y, x;"
    "{ .reg .b64 t; mad.wide.u32 t, tid, 4, g0; st.global.b32 [t], y; }",
    [words(32)],
    [0],
    block=32,
)
for shape, dtypes, counts in [
    ("m16n8k16", ("f32", "bf16"), (4, 2, 4)),
    ("m16n8k16", ("f32", "f16"), (4, 2, 4)),
    ("m16n8k16", ("f16", "f16"), (4, 2, 2)),
    ("m16n8k8", ("f32", "bf16"), (2, 1, 4)),
    ("m16n8k8", ("f32", "tf32"), (4, 2, 4)),
    ("m16n8k4", ("f32", "tf32"), (2, 1, 4)),
    ("m16n8k32", ("f32", "e4m3"), (4, 2, 4)),
]:
    d, ab = dtypes
    na, nb, nd = counts
    body = (
        "{ .reg .b64 t; mad.wide.u32 t, tid, 24, g0;"
        + "".join(f"ld.global.b32 r{i}, [t+{4 * i}];" for i in range(na + nb))
        + "".join(f"mov.b32 r{i + 10}, 0;" for i in range(nd))
        + f"mma.sync.aligned.{shape}.row.col.{d}.{ab}.{ab}.{d} {registers(20, nd)}, {registers(0, na)},"
        + f"{registers(na, nb)}, {registers(10, nd)}; mad.wide.u32 t, tid, 16, g1;"
        + "".join(f"st.global.b32 [t+{4 * i}], r{20 + i};" for i in range(nd))
        + "}"
    )
    probe(f"mma_{shape}_{d}_{ab}", body, [small_numbers(ab, 192, 13), words(128)], [1], block=32)


# ----------------------------------------------------------------------------------------------------------- warps

SHUFFLES = [
    (mode, b, c)
    for mode, clamps in {
        "idx": (0x1F, 0x181F, 0x0F0F),
        "up": (0, 0x1800),
        "down": (0x1F, 0x181F),
        "bfly": (0x1F, 0x101F),
    }.items()
    for c in clamps
    for b in (0, 1, 3, 9, 31, 33)
]
body = ".reg .b32 v; mad.lo.u32 v, lane, 0x01010101, 7; { .reg .b64 t; mad.wide.u32 t, tid, 8, g0;"
for i, (mode, b, c) in enumerate(SHUFFLES):
    body += f"shfl.sync.{mode}.b32 x|p, v, {b}, {c}, -1; selp.u32 y, 1, 0, p;"
    body += f"st.global.v2.b32 [t+{256 * i}], {{x, y}};"
probe("shfl", body + "}", [words(64 * len(SHUFFLES))], [0], block=32)

WARP = [
    "setp.lt.u32 p, lane, 7; vote.sync.ballot.b32 x, p, -1;",
    "setp.lt.u32 p, lane, 7; vote.sync.any.pred q, p, -1; selp.u32 x, 1, 0, q;",
    "setp.lt.u32 p, lane, 7; vote.sync.all.pred q, p, -1; selp.u32 x, 1, 0, q;",
    "setp.lt.u32 p, lane, 32; vote.sync.uni.pred q, p, -1; selp.u32 x, 1, 0, q;",
    "rem.u32 y, lane, 5; match.any.sync.b32 x, y, -1;",
    "rem.u32 y, lane, 5; match.all.sync.b32 x|q, y, -1;",
    "mov.b32 y, 3; match.all.sync.b32 x|q, y, -1;",
    "cvt.u64.u32 a, lane; shl.b64 a, a, 35; shr.u64 a, a, 37; match.any.sync.b64 x, a, -1;",
    *(f"mul.lo.u32 y, lane, 0x9E3779B1; redux.sync.{op} x, y, -1;" for op in (
        "add.u32", "add.s32", "min.u32", "max.u32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32")),
    "mov.b32 x, %lanemask_lt; mov.b32 y, %lanemask_ge; xor.b32 x, x, y; mov.b32 y, %lanemask_eq; add.u32 x, x, y;",
    "mov.b32 x, %lanemask_le; mov.b32 y, %lanemask_gt; mad.lo.u32 x, x, 3, y;",
]  # fmt: skip
body = "{ .reg .b64 t; mad.wide.u32 t, tid, 4, g0;"
for i, text in enumerate(WARP):
    body += text + f"st.global.b32 [t+{128 * i}], x;"
probe("warp", body + "}", [words(32 * len(WARP))], [0], block=32)
half = when("lane < 12", "shfl.sync.bfly.b32 x, lane, 3, 0x1f, 0xfff; redux.sync.add.u32 y, lane, 0xfff;")
probe(
    "part_of_a_warp",
    "mov.b32 x, 99; mov.b32 y, 98;"
    + half
    + "{ .reg .b64 t; mad.wide.u32 t, tid, 8, g0; st.global.v2.b32 [t], {x, y}; }",
    [words(64)],
    [0],
    block=32,
)
body = "{ .reg .b64 t; mad.wide.u32 t, tid, 12, g0; rem.u32 x, tid, 7; setp.lt.u32 p, x, 3;"
body += "bar.red.popc.u32 y, 1, 128, p; st.global.b32 [t], y;"
body += "bar.red.and.pred q, 2, 128, p; selp.u32 y, 1, 0, q; st.global.b32 [t+4], y;"
body += "bar.red.or.pred q, 1, 128, p; selp.u32 y, 1, 0, q; st.global.b32 [t+8], y; }"
probe("barrier_reductions", body, [words(384)], [0])
body = f"""
shl.b32 y, tid, 2; add.u32 y, y, smem; st.shared.b32 [y+{DATA}], 0;
{SYNC}
{when("warp < 2", f"st.shared.b32 [y+{DATA}], tid; barrier.arrive 5, 128;")}
{when("warp >= 2", f"barrier.sync 5, 128; ld.shared.b32 x, [y+{DATA - 256}]; st.shared.b32 [y+{DATA}], x;")}
{SYNC}
""" + dump_shared(512, "g0")
probe("named_barrier", body, [words(128)], [0])


# --------------------------------------------------------------------------------------------------------- atomics

ATOMICS = [
    *(f"add.{t}" for t in ("u32", "s32", "u64", "f32", "f64", "noftz.f16x2", "noftz.bf16x2")),
    *(f"{op}.{t}" for op in ("min", "max") for t in ("u32", "s32", "u64", "s64")),
    *(f"{op}.{t}" for op in ("and", "or", "xor", "exch") for t in ("b32", "b64")),
    "inc.u32", "dec.u32", "cas.b32", "cas.b64", "cas.b16",
]  # fmt: skip
for place in ("global", "shared"):
    body = "{ .reg .b64 from, to, at, v, w, old; .reg .b32 sv, sw, so; .reg .b16 hv, hw, ho;"
    body += "mad.wide.u32 from, tid, 16, g0; ld.global.v2.b64 {v, w}, [from]; cvt.u32.u64 sv, v; cvt.u32.u64 sw, w;"
    body += "cvt.u16.u32 hv, sv; cvt.u16.u32 hw, sw; shl.b32 y, tid, 3; add.u32 y, y, smem;"
    for i, op in enumerate(ATOMICS):
        size = "32" if op.endswith("x2") else op[-2:]
        value, other, old = {"64": ("v", "w", "old"), "32": ("sv", "sw", "so"), "16": ("hv", "hw", "ho")}[size]
        body += f"mad.wide.u32 at, tid, 8, g1; add.u64 at, at, {1024 * i};"
        body += "mad.lo.u32 z, tid, 7, 3; cvt.u64.u32 a, z; xor.b64 a, a, w; st.global.b64 [at], a;"
        where = "[at]"
        if place == "shared":
            body += f"st.shared.b64 [y+{DATA}], a;"
            where = f"[y+{DATA}]"
        extra = f", {other}" if op.startswith("cas") else ""
        body += f"atom.relaxed.gpu.{place}.{op} {old}, {where}, {value}{extra};"
        if place == "shared":
            body += f"ld.shared.b64 a, [y+{DATA}]; st.global.b64 [at], a;"
        body += {"64": "", "32": "cvt.u64.u32 old, so;", "16": "cvt.u64.u16 old, ho;"}[size]
        body += f"mad.wide.u32 at, tid, 8, g2; st.global.b64 [at+{1024 * i}], old;"
    values = numbers(512, 31)
    values[::8] = floats(64, "f32", 32)
    values[4::8] = np.float32(1.5).view(np.uint32)
    probe(f"atomics_{place}", body + "}", [values, words(256 * len(ATOMICS)), words(256 * len(ATOMICS))], [1, 2])
body = "red.relaxed.gpu.global.add.u32 [g0], tid; red.relaxed.gpu.global.max.s32 [g0+4], tid;"
body += "red.global.add.f32 [g0+8], 0f3F000000; red.global.xor.b32 [g0+12], tid;"
probe("contended_reductions", body, [words(4)], [0], grid=4)


# --------------------------------------------------------------------------------------------------------- clusters

body = (
    f"""
{{ .reg .b32 n, to, v; .reg .b64 t;
shl.b32 y, tid, 2; add.u32 y, y, smem;
mad.lo.u32 v, rank, 1000, tid;
st.shared.b32 [y+{DATA}], v;
{CLUSTER_SYNC}
add.u32 n, rank, 1; and.b32 n, n, 3;
mapa.shared::cluster.u32 to, y, n;
ld.shared::cluster.b32 v, [to+{DATA}];
mad.lo.u32 n, cta, 128, tid;
mad.wide.u32 t, n, 16, g0;
st.global.b32 [t], v;
getctarank.shared::cluster.u32 v, to; st.global.b32 [t+4], v;
mov.u32 v, %cluster_nctarank; st.global.b32 [t+8], v;
mov.u32 v, %clusterid.x; st.global.b32 [t+12], v;
{CLUSTER_SYNC}
xor.b32 n, rank, 2; mapa.shared::cluster.u32 to, y, n;
atom.shared::cluster.add.u32 v, [to+{DATA}], 5;
st.shared::cluster.b32 [to+{DATA + 512}], v;
{CLUSTER_SYNC} }}
"""
    + "{ .reg .b64 t; .reg .b32 n; mad.lo.u32 n, cta, 256, tid; mad.wide.u32 t, n, 4, g1;"
    + f"""
ld.shared.b32 x, [y+{DATA}]; st.global.b32 [t], x; ld.shared.b32 x, [y+{DATA + 512}]; st.global.b32 [t+512], x; }}
"""
)
probe("cluster_memory", body, [words(4 * 128 * 8), words(256 * 8)], [0, 1], grid=8, cluster=4)

MULTICAST_PART = (
    "mov.b16 h0, 13; "
    "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
    f"[smem+{DATA}], [m0, {{8}}], [smem], h0;"
)
body = (
    fill_shared(512)
    + init(1)
    + CLUSTER_SYNC
    + when("rank != 1", when("tid == 0", expect("smem", 256)))
    + CLUSTER_SYNC
    + when("rank == 2", when("tid == 0", MULTICAST_PART))
    + when("rank != 1", wait("smem", 0))
    + "{ .reg .b64 g; mad.wide.u32 g, cta, 512, g1;"
    + dump_shared(512, "g")
    + "}"
    + CLUSTER_SYNC
)
probe("multicast", body, [numbers(256, 41), words(512), Map(0, "u32", (200,), (), (64,))], [1], grid=4, cluster=4)

body = (
    load_shared(512, "g0")
    + init(2)
    + CLUSTER_SYNC
    + when("tid == 0", expect("smem", 512 + 16))
    + """
    xor.b32 z, rank, 1; mapa.shared::cluster.u32 x, smem, z;
    """
    + when(
        "tid == 0",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        f"[x+{DATA + 512}], [smem+{DATA}], 512, [x];"
        f"mov.b32 r0, 5; mov.b32 r1, 6; mov.b32 r2, rank; mov.b32 r3, 8;"
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [x+{DATA + 1024}], {registers(0, 4)}, [x];"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [x];",
    )
    + wait("smem", 0, ".acquire.cluster")
    + "{ .reg .b64 g; mad.wide.u32 g, cta, 1040, g1;"
    + dump_shared(1040, "g")
    + "}"
    + CLUSTER_SYNC
)
probe("copy_to_a_peer", body, [numbers(128, 43), words(520)], [1], grid=2, cluster=2)


# An mbarrier of the peer: expected and completed, armed and arrived at from afar.
body = (
    init(1, 2)
    + CLUSTER_SYNC
    + "xor.b32 z, rank, 1; mapa.shared::cluster.u32 x, smem, z;"
    + when(
        "tid == 0",
        "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [x], 32;"
        "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [x], 32;"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [x+8], 2;",
    )
    + wait("smem", 0, ".acquire.cluster")
    + wait("smem+8", 0, ".acquire.cluster")
    + "{ .reg .b64 t; .reg .b32 n; mad.lo.u32 n, cta, 128, tid; mad.wide.u32 t, n, 4, g0; st.global.b32 [t], n; }"
    + CLUSTER_SYNC
)
probe("mbarrier_of_a_peer", body, [words(256)], [0], grid=2, cluster=2)

# Bulk reductions into the peer's shared memory, and single ones.
for kind, dtype in [("add", "u32"), ("min", "s32"), ("max", "u32"), ("xor", "b32"), ("add", "u64"), ("inc", "u32")]:
    body = (
        load_shared(512, "g0")
        + init(1)
        + CLUSTER_SYNC
        + when("tid == 0", expect("smem", 256))
        + CLUSTER_SYNC
        + "xor.b32 z, rank, 1; mapa.shared::cluster.u32 x, smem, z;"
        + when(
            "tid == 0",
            f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{kind}.{dtype} "
            f"[x+{DATA + 256}], [smem+{DATA}], 256, [x];",
        )
        + wait("smem", 0)
        + "{ .reg .b64 g; mad.wide.u32 g, cta, 512, g1;"
        + dump_shared(512, "g")
        + "}"
        + CLUSTER_SYNC
    )
    probe(f"bulk_reduce_at_a_peer_{kind}_{dtype}", body, [numbers(128, 47), words(256)], [1], grid=2, cluster=2)
for kind in ("add.u32", "min.s32", "max.u32", "and.b32", "inc.u32", "add.u64"):
    size = 8 if kind.endswith("64") else 4
    value = "a" if size == 8 else "z"
    body = (
        load_shared(512, "g0")
        + init(1)
        + CLUSTER_SYNC
        + when("tid == 0", expect("smem", 32 * size))
        + CLUSTER_SYNC
        + f"xor.b32 z, rank, 1; mapa.shared::cluster.u32 x, smem, z; mad.lo.u32 y, tid, {size}, x;"
        + "mad.lo.u32 z, tid, 0x9E3779B1, 5; cvt.u64.u32 a, z;"
        + when(
            "tid < 32",
            f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{kind} [y+{DATA}], {value}, [x];",
        )
        + wait("smem", 0)
        + "{ .reg .b64 g; mad.wide.u32 g, cta, 512, g1;"
        + dump_shared(512, "g")
        + "}"
        + CLUSTER_SYNC
    )
    probe(f"red_async_{kind.replace('.', '_')}", body, [numbers(128, 48), words(256)], [1], grid=2, cluster=2)

# A multicast tile, swizzled, of which each CTA of four loads a quarter.
body = (
    fill_shared(4096)
    + init(1)
    + CLUSTER_SYNC
    + when("tid == 0", expect("smem", 4096))
    + CLUSTER_SYNC
    + f"shl.b32 x, rank, 10; add.u32 x, x, smem; add.u32 x, x, {DATA};"
    + "shl.b32 y, rank, 3; mov.b16 h0, 15; mov.b32 z, 0;"
    + when(
        "tid == 0",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[x], [m0, {z, y}], [smem], h0;",
    )
    + wait("smem", 0)
    + "{ .reg .b64 g; mad.wide.u32 g, cta, 4096, g1;"
    + dump_shared(4096, "g")
    + "}"
    + CLUSTER_SYNC
)
tile = Map(0, "u16", (64, 40), (128,), (64, 8), None, 128)
probe("multicast_quarters", body, [numbers(64 * 20, 49), words(4096), tile], [1], grid=4, cluster=4)

# wgmma: operands that start anywhere, other signs, the base offset.
for start in (16, 48, 112, 144, 1040):
    wgmma_probe(f"wgmma_start_{start}", 32, "bf16", a=(0, 128, 256), b=(1, 16, 1024), start=start)
for base in (1, 3, 7):
    wgmma_probe(f"wgmma_base_offset_{base}", 32, "f16", a=(1, 16, 1024), b=(1, 16, 1024), base_offset=base)
for signs in ("-1, 1", "1, -1", "-1, -1"):
    name = signs.replace("-1", "m").replace(", ", "").replace("1", "p")
    wgmma_probe(f"wgmma_signs_{name}", 16, "bf16", a=(0, 128, 256), b=(0, 128, 256), signs=signs)
for dtype in ("e4m3", "e5m2"):
    wgmma_probe(f"wgmma_f16_{dtype}", 64, dtype, "f16", a=(0, 128, 256), b=(0, 128, 256))
wgmma_probe("wgmma_registers_f16_f16", 40, "f16", "f16", b=(0, 128, 256), in_registers=True)

# Loads and stores of every width, through every space; what modules initialise; carries, calls, jump tables.
body = "{ .reg .b64 from, to; .reg .b32 v; .reg .b64 w; .reg .b16 s;"
body += "mad.wide.u32 from, tid, 16, g0; mad.wide.u32 to, tid, 64, g1;"
for i, kind in enumerate(("u8", "s8", "b8", "u16", "s16", "u32", "s32")):
    body += f"ld.global.{kind} v, [from+{i}];" if kind[1:] == "8" else f"ld.global.{kind} v, [from+{4 * (i // 4)}];"
    body += f"st.global.b32 [to+{4 * i}], v;"
body += "ld.global.s8 w, [from+3]; st.global.b64 [to+32], w; ld.global.s32 w, [from+4]; st.global.b64 [to+40], w;"
body += "ld.global.s8 s, [from+5]; st.global.b16 [to+48], s; ld.global.b32 v, [from+8]; st.global.b8 [to+50], v;"
body += "st.global.b8 [to+51], 200; st.global.b16 [to+52], v; st.global.b16 [to+54], s; st.global.b64 [to+56], w;"
body += "st.global.b32 [to+28], 7; }"
probe("widths", body, [numbers(512, 51), words(2048)], [1])
DECLARED = """
.const .align 4 .b32 table[4] = {10, 20, 30, 40};
.global .align 8 .b8 bytes[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
.global .align 4 .f32 number = 0f40490FDB;
.func (.param .b32 result) twice(.param .b32 given)
{
.reg .b32 v;
ld.param.b32 v, [given];
add.u32 v, v, v;
st.param.b32 [result], v;
ret;
}
"""
body = """
{
.local .align 8 .b8 frame[64];
.reg .b64 to, at; .reg .b32 v, w, n; .reg .pred more;
mad.wide.u32 to, tid, 32, g0;
and.b32 n, tid, 3; mov.b64 at, table; mad.wide.u32 at, n, 4, at; ld.const.b32 v, [at]; st.global.b32 [to], v;
and.b32 n, tid, 15; mov.b64 at, bytes; cvt.u64.u32 a, n; add.u64 at, at, a; ld.global.u8 v, [at];
st.global.b32 [to+4], v; ld.global.b32 v, [number]; st.global.b32 [to+8], v;
mov.b64 at, frame; st.local.b32 [at+8], tid; cvta.local.u64 at, at; ld.b32 v, [at+8]; st.global.b32 [to+12], v;
{ .param .b32 given; .param .b32 result; st.param.b32 [given], tid; call (result), twice, (given);
ld.param.b32 v, [result]; }
st.global.b32 [to+16], v;
mov.b32 v, 0; and.b32 n, tid, 7;
AROUND:
setp.ge.u32 more, v, n; @more bra AROUND_END; add.u32 v, v, 2; bra AROUND;
AROUND_END:
st.global.b32 [to+20], v;
and.b32 n, tid, 3;
TARGETS: .branchtargets ONE, TWO, THREE, FOUR;
brx.idx n, TARGETS;
ONE: mov.b32 w, 111; bra AFTER;
TWO: mov.b32 w, 222; bra AFTER;
THREE: add.u32 w, tid, 333; bra AFTER;
FOUR: mov.b32 w, 444;
AFTER:
st.global.b32 [to+24], w;
add.cc.u32 v, tid, 0xFFFFFFFE; addc.u32 w, v, 5; sub.cc.u32 v, w, 9; subc.u32 v, v, 1; mad.lo.cc.u32 w, v, 77, w;
madc.hi.u32 v, w, v, 3; st.global.b32 [to+28], v;
}
"""
probe("spaces_and_jumps", body, [words(8 * 64)], [0], block=64, declare=DECLARED)


# ----------------------------------------------------------------------------------------------------- elementwise

SPECIAL = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x3F800001,
    0x40490FDB, 0xC2C80000, 0x4B000001, 0xCF000000, 0x5F000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000,
    0x7FC00000, 0xFFC12345, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x00008000, 0x0000FC00, 0x7C003C00, 0x3C00BC01,
    0x477FE000, 0x477FF000, 0x33800000, 0x33000001, 0x38800000,
]  # fmt: skip


def operands():
    """256 rows of three 64-bit operands, whose low halves are the 32-bit and 16-bit ones."""
    rng = np.random.default_rng(1)
    low = rng.integers(0, 1 << 32, (256, 3), dtype=np.uint64)
    low[:96, 0] = np.resize(SPECIAL, 96)
    low[:96, 1] = np.roll(np.resize(SPECIAL, 96), 5)
    low[32:96, 1] = np.roll(np.resize(SPECIAL, 64), 11)
    low[:96, 2] = np.roll(np.resize(SPECIAL, 96), 17)
    low[96:144] = (rng.standard_normal((48, 3)) * 8).astype(np.float32).view(np.uint32)
    low[144:160] = rng.integers(0, 40, (16, 3))
    # 16-bit floats of either kind in both halves
    halves = (rng.standard_normal((32, 3, 2)) * 4).astype(np.float16).view(np.uint16).astype(np.uint64)
    low[160:192] = halves[..., 0] | halves[..., 1] << 16
    high = rng.integers(0, 1 << 32, (256, 3), dtype=np.uint64)
    doubles = (rng.standard_normal((128, 3)) * 1e3).view(np.uint64)
    whole = low | high << 32
    whole[128:] = np.where(np.arange(128)[:, None] % 2 == 1, doubles, whole[128:])
    return whole.view(np.uint32)


OPERANDS = operands()
for name, table in (("exact", elementwise.EXACT), ("approximate", elementwise.APPROXIMATE)):
    results = words(512 * len(elementwise.parse(table)))
    probe(name, elementwise.body(table), [OPERANDS, results], [1], block=256)
