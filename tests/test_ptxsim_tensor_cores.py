"""The simulator's tensor cores against numpy: operand layouts, kinds, shapes and options of tcgen05.mma, the shapes of
tcgen05.ld and st, mma.sync.

The layouts here are written down once more, element by element, from the manual's address formulas; integers keep every
sum exact.
"""

import itertools

import numpy
import ptxsim
import pytest
import torch
from ptxsim_kernels.ptx import (
    CLUSTER_SYNC,
    DATA,
    MY_LANES,
    POINTER,
    PUBLISH,
    TMEM_WORD,
    commit,
    descriptor,
    init,
    kernel,
    load_word,
    loop,
    registers,
    store_word,
    tmem_load,
    tmem_store,
    wait,
    when,
)

SCHEDULES = "early", "late", "random"
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1}
KIND = {"f16": "f16", "bf16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4"}
FORMAT = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1}  # of the instruction descriptor
SWIZZLE = {0: 0, "128, atoms of 32": 1, 128: 2, 64: 4, 32: 6}  # of the matrix descriptor
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
COMMIT_PAIR = "@p tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [smem], h0;"
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"


def encode(x, dtype):
    """The bytes of a float array's elements, in a new last dimension."""
    tensor = torch.from_numpy(numpy.ascontiguousarray(x)).to(TORCH.get(dtype, torch.float32))
    return tensor.unsqueeze(-1).view(torch.uint8).numpy()


class Operand:
    """rows x 32 bytes of depth in shared memory, from a multiple of 1024 plus start."""

    def __init__(self, dtype, mn_major, swizzle, rows, start=0):
        self.dtype, self.mn_major, self.swizzle, self.start = dtype, mn_major, swizzle, start
        size = ELEMENT_BYTES[dtype]
        self.span = 128 if isinstance(swizzle, str) else swizzle
        self.group = 4 if isinstance(swizzle, str) else 8  # k rows of a swizzle atom
        groups = max(1, 32 // size // self.group)
        if not mn_major:
            self.lbo, self.sbo = (rows * 16, 128) if not swizzle else (16, 8 * self.span)
            self.bytes = rows * max(32, self.span)
        elif not swizzle:
            self.lbo, self.sbo = 128, groups * 128
            self.bytes = rows * size // 16 * self.sbo
        else:
            self.lbo, self.sbo = groups * self.group * self.span, self.group * self.span
            self.bytes = -(-rows * size // self.span) * self.lbo

    def address(self, r, k):
        """PTX ISA, "Canonical layouts" and "Shared memory swizzling"."""
        size, span, group = ELEMENT_BYTES[self.dtype], self.span, self.group
        chunk = 16 // size
        if not self.mn_major:
            if span:
                offset = r % 8 * span + r // 8 * self.sbo + k * size
            else:
                offset = r % 8 * 16 + r // 8 * self.sbo + k % chunk * size + k // chunk * self.lbo
        elif span:
            row = span // size
            offset = r % row * size + r // row * self.lbo + k % group * span + k // group * self.sbo
        else:
            offset = r % chunk * size + r // chunk * self.sbo + k % 8 * 16 + k // 8 * self.lbo
        address = self.start + offset
        if isinstance(self.swizzle, str):
            return address ^ (address >> 7 & 3) << 5
        return address ^ (address >> 7 & {0: 0, 32: 1, 64: 3, 128: 7}[span]) << 4

    def image(self, matrix):
        data = numpy.zeros(-(-(self.bytes + self.start) // 1024) * 1024, numpy.uint8)
        encoded = encode(matrix, self.dtype)
        for r, k in itertools.product(*map(range, matrix.shape)):
            at = self.address(r, k)
            data[at : at + encoded.shape[-1]] = encoded[r, k]
        return data

    def descriptor(self, register, offset):
        return descriptor(register, offset + self.start, self.lbo, self.sbo, swizzle=SWIZZLE[self.swizzle])


def lanes(m, rows, group):
    """The TMEM lanes of row m of a CTA's part: layouts A and D, B, F."""
    if rows == 128:
        return [m]
    return [m, m + 64] if group == 2 else [32 * (m // 16) + m % 16]


def each_column(columns, body):
    """body for column = 0, 8, ...: y is its TMEM address, c where its words are in [lane of the grid][columns] of g."""
    return loop(
        columns // 8,
        f"""
        {{ .reg .b32 column, o;
        shl.b32 column, i, 3;
        add.u32 y, x, column;
        mad.lo.u32 o, cta, 128, tid;
        mad.lo.u32 o, o, {columns}, column;
        mul.wide.u32 c, o, 4;
        {body} }}""",
    )


def product_kernel(a, b, a_bytes, b_bytes, n, group, instruction, columns, mask):
    """g0: images of A and B by CTA; g1: D by CTA, lane and column, after; g2: before; g3: A as 8 words of each lane."""
    sync = "bar.sync 0;" if group == 1 else CLUSTER_SYNC
    size = a_bytes + b_bytes
    return kernel(
        f"""
        {{ .reg .pred more; .reg .b32 at, e; .reg .b64 s;
        mov.u32 at, tid;
        COPY:
        setp.ge.u32 more, at, {size // 16};
        @more bra COPIED;
        mad.lo.u32 e, cta, {size // 16}, at;
        mul.wide.u32 s, e, 16;
        add.u64 s, s, g0;
        ld.global.v4.b32 {registers(0, 4)}, [s];
        shl.b32 e, at, 4;
        add.u32 e, e, smem;
        st.shared.v4.b32 [e+{DATA}], {registers(0, 4)};
        add.u32 at, at, 128;
        bra COPY;
        COPIED: }}
        fence.proxy.async.shared::cta;
        {init(1)}
        {
            when(
                "warp == 0",
                f"tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [smem+{TMEM_WORD}], {columns};",
            )
        }
        {PUBLISH}
        {MY_LANES}
        {
            each_column(
                n,
                f'''add.u64 c, c, g2;
        ld.global.v4.b32 {registers(0, 4)}, [c];
        ld.global.v4.b32 {registers(4, 4)}, [c+16];
        {tmem_store("y", 8)}''',
            )
        }
        {{ .reg .b32 o;
        mad.lo.u32 o, cta, 128, tid;
        mul.wide.u32 c, o, 32; }}
        add.u64 c, c, g3;
        ld.global.v4.b32 {registers(0, 4)}, [c];
        ld.global.v4.b32 {registers(4, 4)}, [c+16];
        add.u32 y, x, {n};
        {tmem_store("y", 8)}
        tcgen05.wait::st.sync.aligned;
        {BEFORE} {sync} {AFTER}
        {a.descriptor("a", DATA)}
        {b.descriptor("b", DATA + a_bytes)}
        add.u32 z, tmem, {n};
        setp.eq.u32 p, tid, 0;
        {"setp.eq.and.u32 p, rank, 0, p; mov.b16 h0, 3;" if group == 2 else ""}
        {instruction}
        {"@p " + commit() if group == 1 else COMMIT_PAIR}
        {wait("smem", 0, ".acquire.cluster" if group == 2 else "")}
        {AFTER}
        {
            each_column(
                n,
                f'''{tmem_load("y", 8)}
        tcgen05.wait::ld.sync.aligned;
        {"".join(f"and.b32 r{i}, r{i}, {mask};" for i in range(8))}
        add.u64 c, c, g1;
        st.global.v4.b32 [c], {registers(0, 4)};
        st.global.v4.b32 [c+16], {registers(4, 4)};''',
            )
        }
        {BEFORE} {sync} {AFTER}
        {when("warp == 0", f"tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 tmem, {columns};")}
        """,
        [POINTER] * 4,
    )


def check_product(
    dtype="bf16",
    dtype_b=None,
    m=128,
    n=64,
    group=1,
    major=(0, 0),
    swizzle=(128, 128),
    start=(0, 0),
    a_in_tmem=False,
    accumulate=False,
    scale=None,
    negate=0,
    mask=None,
    half_d=False,
    schedule="early",
):
    """One tcgen05.mma: D, all of TMEM's lanes, must come out as numpy says."""
    random = numpy.random.default_rng(m + n)
    dtype_b = dtype_b or dtype
    rows, depth = m // group, 32 // ELEMENT_BYTES[dtype]
    a = random.integers(-3, 4, (m, depth)).astype(numpy.float32)
    b = random.integers(-3, 4, (n, depth)).astype(numpy.float32)
    before = random.integers(-50, 50, (group, 128, n)).astype(numpy.float32)
    a_operand = Operand(dtype, major[0], swizzle[0], rows, start[0])
    b_operand = Operand(dtype_b, major[1], swizzle[1], n // group, start[1])
    a_images = [a_operand.image(part) for part in numpy.split(a, group)]
    b_images = [b_operand.image(part) for part in numpy.split(b, group)]
    images = numpy.concatenate([part for pair in zip(a_images, b_images, strict=True) for part in pair])
    a_words = encode(a, dtype).reshape(m, 32).view(numpy.uint32)
    a_lanes = numpy.zeros((group, 128, 8), numpy.uint32)
    for r in range(m):
        for lane in lanes(r % rows, rows, group):
            a_lanes[r // rows, lane] = a_words[r]

    idesc = int(not half_d) << 4 | FORMAT[dtype] << 7 | FORMAT[dtype_b] << 10 | negate << 13
    idesc |= major[0] << 15 | major[1] << 16 | n // 8 << 17 | m // 16 << 24
    lane_words = ", ".join(f"r{20 + i}" for i in range(len(mask or [])))
    operands = ["[tmem]", "[z]" if a_in_tmem else "a", "b", str(idesc), *([f"{{{lane_words}}}"] if mask else [])]
    operands += [str(int(accumulate)), *([str(scale)] if scale is not None else [])]
    instruction = "".join(f"mov.b32 r{20 + i}, {word};" for i, word in enumerate(mask or []))
    instruction += f"@p tcgen05.mma.cta_group::{group}.kind::{KIND[dtype]} {', '.join(operands)};"
    columns = next(2**i for i in range(5, 10) if 2**i >= n + 8)
    text = product_kernel(
        a_operand,
        b_operand,
        len(a_images[0]),
        len(b_images[0]),
        n,
        group,
        instruction,
        columns,
        0xFFFF if half_d else -1,
    )
    words = before.astype(numpy.float16).view(numpy.uint16).astype(numpy.uint32) if half_d else before
    after = numpy.zeros_like(words)  # an f16 D has the low half of each column
    args = [images, after, words, a_lanes]
    how = {"grid": group, "cluster": group, "block": 128, "smem": 128 * 1024}
    ptxsim.Module(text).launch("k", args=args, schedule=schedule, **how)

    expected = before.copy()
    d = a @ b.T * (-1) ** bin(negate).count("1")
    for r in range(m):
        places = lanes(r % rows, rows, group)
        for part, lane in zip(numpy.split(d[r], len(places)), places, strict=True):
            cta = r // rows
            if mask and mask[4 * cta + lane // 32] >> lane % 32 & 1:
                continue
            old = before[cta, lane, : len(part)] * 2.0 ** -(scale or 0) if accumulate else 0
            expected[cta, lane, : len(part)] = part + old
    if half_d:
        after = after.astype(numpy.uint16).view(numpy.float16)
    numpy.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("major", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=["KK", "KM", "MK", "MM"])
@pytest.mark.parametrize("a_swizzle", [0, 32, 64, 128])
def test_operand_layouts(major, a_swizzle):
    b_swizzle = {0: 128, 32: 0, 64: 32, 128: 64}[a_swizzle]
    check_product(major=major, swizzle=(a_swizzle, b_swizzle), schedule=SCHEDULES[(a_swizzle // 32 + sum(major)) % 3])


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
@pytest.mark.parametrize("m, group", [(128, 1), (64, 1), (256, 2), (128, 2)])
@pytest.mark.parametrize("a_in_tmem", [False, True], ids=["shared", "tmem"])
def test_kinds_and_shapes(dtype, m, group, a_in_tmem):
    check_product(dtype, m=m, n=96, group=group, a_in_tmem=a_in_tmem, accumulate=a_in_tmem, schedule=SCHEDULES[m % 3])


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "tf32", "major": (1, 1), "swizzle": ("128, atoms of 32",) * 2},
        {"dtype": "e4m3", "dtype_b": "e5m2", "major": (1, 1)},
        {"accumulate": True, "scale": 3},
        {"accumulate": True, "negate": 1},
        {"negate": 2},
        {"dtype": "f16", "half_d": True, "accumulate": True},
        {"dtype": "e4m3", "half_d": True, "m": 256, "group": 2},
        {"accumulate": True, "negate": 3},
        {"mask": [0x0F0F0F0F, 0, 0xFFFFFFFF, 1]},
        {"m": 256, "group": 2, "mask": [0x0F0F0F0F, 0, 0xFFFFFFFF, 1, 3, 4, 5, 6], "accumulate": True},
        {"start": (256, 384)},
        {"n": 8, "m": 64},
        {"n": 248, "m": 64},
        {"n": 240},
    ],
    ids=str,
)
def test_options(options):
    check_product(**options)


# --------------------------------------------------------------------------------------------------------- ld and st

# lanes, columns and registers of .x1, largest count
SHAPES = {"32x32b": (32, 1, 1, 128), "16x64b": (16, 2, 1, 128), "16x128b": (16, 4, 2, 64), "16x256b": (16, 8, 4, 32)}
SHAPES["16x32bx2"] = (16, 1, 1, 128)


def fragment(shape, t, j):
    """Lane and column of thread t's register j: PTX ISA, "Matrix fragments for shape ..."."""
    match shape:
        case "32x32b":
            return t, j
        case "16x64b":
            return t // 4 + 8 * (t & 1), 2 * j + (t >> 1 & 1)
        case "16x128b":
            return t // 4 + 8 * (j & 1), 4 * (j >> 1) + t % 4
        case "16x256b":
            return t // 4 + 8 * (j >> 1 & 1), 8 * (j >> 2) + 2 * (t % 4) + (j & 1)
        case "16x32bx2":
            return t % 16, j


def transfers():
    for shape, (_, columns, _, most) in SHAPES.items():
        for pack in False, True:
            for count in 1, 4, most:
                halves = 2 if shape == "16x32bx2" else 1
                if count * columns * (2 if pack else 1) * halves <= 512:
                    yield shape, count, pack


@pytest.mark.parametrize("store", [False, True], ids=["ld", "st"])
@pytest.mark.parametrize("shape, count, pack", list(transfers()))
def test_load_and_store(shape, count, pack, store):
    """TMEM holds lane * 1000 + column; a load of the shape, or a store of it and loads of everything."""
    lanes_, columns, per_count, _ = SHAPES[shape]
    values, span = count * per_count, count * columns * (2 if pack else 1)
    split = span if shape == "16x32bx2" else 0
    total, half = span + split, 16 if lanes_ == 16 and count == 4 else 0  # also the upper 16 lanes of the quarter
    allocated = next(2**i for i in range(5, 10) if 2**i >= total)
    vector = "{" + ", ".join(f"v{j}" for j in range(values)) + "}"
    where = f"[x]{f', {split}' if split else ''}"
    lower = f"add.u32 x, x, {half << 16};"
    if store:
        act = "".join(f"mad.lo.u32 v{j}, tid, 65536, {j + 7};" for j in range(values)) + lower
        act += f"tcgen05.st.sync.aligned.{shape}.x{count}{'.unpack::16b' if pack else ''}.b32 {where}, {vector};"
        act += f"tcgen05.wait::st.sync.aligned; {MY_LANES}"
        kept = "and.b32 y, y, 0xffff;" if pack else ""
        act += loop(
            total,
            "add.u32 z, x, i; tcgen05.ld.sync.aligned.32x32b.x1.b32 {y}, [z]; tcgen05.wait::ld.sync.aligned;"
            f"{kept} mad.lo.u32 z, tid, {total}, i; {store_word('g0', 'z', 'y')}",
        )
    else:
        act = f"{lower} tcgen05.ld.sync.aligned.{shape}.x{count}{'.pack::16b' if pack else ''}.b32 {vector}, {where};"
        act += "tcgen05.wait::ld.sync.aligned;"
        act += "".join(f"mad.lo.u32 z, tid, {values}, {j}; {store_word('g0', 'z', f'v{j}')}" for j in range(values))
    text = kernel(
        f"""
        .reg .b32 v<128>;
        {when("warp == 0", f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+{TMEM_WORD}], {allocated};")}
        {PUBLISH}
        {MY_LANES}
        {
            loop(
                total,
                '''mad.lo.u32 y, tid, 1000, i;
        add.u32 z, x, i;
        tcgen05.st.sync.aligned.32x32b.x1.b32 [z], {y};''',
            )
        }
        tcgen05.wait::st.sync.aligned;
        {act}
        {BEFORE} bar.sync 0; {AFTER}
        {when("warp == 0", f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 tmem, {allocated};")}
        """,
        [POINTER],
    )
    out = numpy.zeros((128, total if store else values), numpy.uint32)
    ptxsim.Module(text).launch("k", block=128, smem=4096, args=[out], schedule=SCHEDULES[count % 3])

    memory = (numpy.arange(128)[:, None] * 1000 + numpy.arange(total)).astype(numpy.uint32)
    expected = numpy.zeros_like(out)
    for thread, j in itertools.product(range(128), range(values)):
        lane, column = fragment(shape, thread % 32, j)
        lane += thread // 32 * 32 + half
        first = thread % 32 // 16 * split
        if pack:
            low, high = first + 2 * column, first + 2 * column + 1
            if store:
                memory[lane, low], memory[lane, high] = j + 7, thread
            else:
                expected[thread, j] = (memory[lane, low] & 0xFFFF) | (memory[lane, high] & 0xFFFF) << 16
        elif store:
            memory[lane, first + column] = thread * 65536 + j + 7
        else:
            expected[thread, j] = memory[lane, first + column]
    if store:
        expected = memory & 0xFFFF if pack else memory
    numpy.testing.assert_array_equal(out, expected)


# ---------------------------------------------------------------------------------------------------------- mma.sync


@pytest.mark.parametrize("half_depth", [False, True], ids=["whole", "half"])
@pytest.mark.parametrize(
    "dtype, accumulator",
    [*((dtype, "f32") for dtype in ELEMENT_BYTES), ("f16", "f16"), ("e4m3", "f16"), ("e5m2", "f16")],
)
def test_warp_products(dtype, accumulator, half_depth):
    """mma.sync of m16n8: a fragment register holds neighbours along K, quads of lanes follow each other."""
    random = numpy.random.default_rng(1)
    per_word = 4 // ELEMENT_BYTES[dtype]
    depth = 4 * per_word * (1 if half_depth else 2)
    a = random.integers(-3, 4, (16, depth)).astype(numpy.float32)
    b = random.integers(-3, 4, (depth, 8)).astype(numpy.float32)
    c = random.integers(-9, 9, (16, 8)).astype(numpy.float32)
    a_words = encode(a, dtype).reshape(16, -1).view(numpy.uint32)  # [row][word along K]
    b_words = encode(b.T, dtype).reshape(8, -1).view(numpy.uint32)
    na, nb = (2, 1) if half_depth else (4, 2)
    nd = 2 if accumulator == "f16" else 4
    lane = numpy.arange(32)
    g, q = lane // 4, lane % 4
    a_fragment = numpy.stack([a_words[g + 8 * (j & 1), q + 4 * (j >> 1)] for j in range(na)], 1)
    b_fragment = numpy.stack([b_words[g, q + 4 * j] for j in range(nb)], 1)
    rows = numpy.stack([g + 8 * (i >> 1) for i in range(4)], 1)
    columns = numpy.stack([2 * q + (i & 1) for i in range(4)], 1)
    c_fragment = c[rows, columns].astype(numpy.float16 if accumulator == "f16" else numpy.float32)
    load = ""
    for pointer, name, count in (("g0", "a", na), ("g1", "b", nb), ("g2", "c", nd)):
        for j in range(count):
            load += f"mad.lo.u32 z, tid, {count}, {j}; {load_word(f'f{name}{j}', pointer, 'z')}"
    vectors = [
        "{" + ", ".join(f"f{x}{j}" for j in range(n)) + "}" for x, n in (("d", nd), ("a", na), ("b", nb), ("c", nd))
    ]
    text = kernel(
        f"""
        .reg .b32 fa<4>, fb<2>, fc<4>, fd<4>;
        {load}
        mma.sync.aligned.m16n8k{depth}.row.col.{accumulator}.{dtype}.{dtype}.{accumulator} {", ".join(vectors)};
        {"".join(f"mad.lo.u32 z, tid, {nd}, {j}; {store_word('g3', 'z', f'fd{j}')}" for j in range(nd))}
        """,
        [POINTER] * 4,
        threads=32,
    )
    out = numpy.zeros_like(c_fragment)
    args = [numpy.ascontiguousarray(a_fragment), numpy.ascontiguousarray(b_fragment), c_fragment, out]
    ptxsim.Module(text).launch("k", block=32, smem=4096, args=args)
    numpy.testing.assert_array_equal(out, (a @ b + c)[rows, columns])
