"""What our kernels assume of a chip, as questions: one kernel launch each, and the words that must come out.

A line of the list is an assumption that the PTX manual leaves open, or that no chip has confirmed: SECTIONS names them.
What must come out is computed here by numpy, from the formulas, not from the kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

SECTIONS = {
    "1": "tcgen05, tensor memory, CTA pairs and cluster launch control do at run time what the manual says",
    "2": "matrix descriptors address shared memory as on Hopper: offsets, swizzle by absolute address, base offset",
    "3": "where elements of D and A lie in tensor memory",
    "4": "lanes that a product leaves out, tcgen05.cp, less common shapes of tcgen05.ld",
    "5": "products of one thread run in the order of issue, also when their accumulators differ (A1)",
    "6": "collector buffers change no result",
    "7": "accumulation, subnormal numbers and the bits of scalar arithmetic",
    "8": "which N a product takes",
    "9": "a sole allocation of tensor memory begins at 0",
    "10": "addresses of shared memory in a cluster: rank << 24 | offset",
    "11": "tensor copies fault at unaligned innermost coordinates, and stores at negative ones",
    "12": "bulk additions of subnormal numbers",
    "13": "scale factors of block-scaled products, metadata of sparse ones",
    "14": "threads that read shared memory need no proxy fence before a copy overwrites it",
    "15": "try_cancel after it has failed",
}

NOT_PROBED = {
    "3": "Layouts C, E and G are those of sparse and weight-stationary products: not used by any kernel.",
    "13": "Block-scaled and sparse products: not used by any kernel.",
    "15": "The manual leaves it undefined, and no kernel uses cluster launch control: there is nothing to ask.",
}

NO_KERNEL = "not used by any kernel"
BOTH = ("Hopper", "Blackwell")
BLANK = 0x5A5A5A5A  # of results that nobody has written
SHARED = 129 * 1024


@dataclasses.dataclass(frozen=True)
class Map:
    """A tensor map of bf16 over the probe's words in or out."""

    of: str  # "in" or "out"
    dims: tuple
    strides: tuple  # bytes
    box: tuple
    swizzle: int = 0
    offset: int = 0  # bytes


@dataclasses.dataclass(frozen=True)
class Probe:
    name: str
    section: str
    assumes: str
    used_by: str
    kernel: str
    given: np.ndarray  # words in
    expected: np.ndarray  # words out, or with agrees what to show for them
    numbers: tuple = ()
    axes: tuple = ()  # names of expected's dimensions
    agrees: Callable | None = None  # words out -> which are right; otherwise all bits must be
    before: np.ndarray | None = None  # words out before
    maps: tuple = ()
    grid: int = 1
    cluster: int = 1
    faults: bool = False  # the launch must end in an error
    races: bool = False  # one run proves little
    practice: bool = False  # goes beyond the manual, which a simulator of it must be told
    chips: tuple = ("Blackwell",)

    @property
    def part(self) -> str | None:
        """Which part of assumption A1 it asks about: what the tests' simulator takes for granted of Blackwell."""
        if self.name.startswith("pair"):
            return "CTA pairs"
        by_section = {"2": "descriptors", "3": "layouts of tensor memory", "5": "order of products"}
        return "exponentials" if self.name == "ex2" else by_section.get(self.section)


def wrong(probe: Probe, out: np.ndarray) -> np.ndarray:
    """Flat indices of out that are not as expected."""
    right = probe.agrees(out) if probe.agrees else out == probe.expected.ravel()
    return np.flatnonzero(~np.asarray(right).ravel())


# ---- Numbers


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def words(x) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32).ravel()


def as_float(x) -> np.ndarray:
    return np.asarray(x, np.uint32).view(np.float32)


def bf16(x) -> np.ndarray:
    """Bits, rounded to nearest even; NaN is 0x7FFF."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def f16(x) -> np.ndarray:
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore"):
        return np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(np.uint16)).astype(np.uint16)


def bf16_value(bits) -> np.ndarray:
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


# ---- Operands in shared memory, as the manual's canonical layouts have them

SWIZZLE_CODE = {0: 0, 128: 2, 64: 4, 32: 6}
SWIZZLE_MASK = {0: 0, 32: 1, 64: 3, 128: 7}


@dataclasses.dataclass(frozen=True)
class Operand:
    """rows x depth elements of 16 (tf32: 32) bits, in slabs as wide as the swizzle along the depth or the rows."""

    rows: int
    depth: int
    swizzle: int
    k_major: bool = True
    start: int = 0  # of the first byte, past a multiple of 1024
    base_offset: int = 0
    size: int = 2  # bytes of an element

    @property
    def step_depth(self):
        return 32 // self.size

    @property
    def strides(self):
        """Leading and stride byte offset."""
        if self.k_major:
            return (16, 8 * self.swizzle) if self.swizzle else (self.rows * 16, 128)
        return (self.depth * self.swizzle, 8 * self.swizzle) if self.swizzle else (128, self.depth // 8 * 128)

    @property
    def steps(self):
        """inner, step, slab of the kernels' product_args, in units of 16 bytes."""
        if not self.k_major:
            return 1, 0, self.swizzle if self.swizzle else 16
        if not self.swizzle:
            return 1, 0, 2 * self.rows
        return self.swizzle // 32, 2, self.rows * self.swizzle // 16

    @property
    def descriptor(self):
        """High and low word, without the address."""
        lbo, sbo = self.strides
        return sbo >> 4 | 1 << 14 | self.base_offset << 17 | SWIZZLE_CODE[self.swizzle] << 29, lbo >> 4 << 16

    def addresses(self):
        """Of element [row, k], from the multiple of 1024."""
        r, k_all = np.meshgrid(np.arange(self.rows), np.arange(self.depth), indexing="ij")
        (lbo, sbo), (inner, step, slab) = self.strides, self.steps
        i, k = k_all // self.step_depth, k_all % self.step_depth
        first = self.start + 16 * (i // inner * slab + i % inner * step)
        span, chunk = self.swizzle, 16 // self.size
        if self.k_major:
            off = r % 8 * span + r // 8 * sbo + k * self.size
            if not span:
                off = r % 8 * 16 + r // 8 * sbo + k % chunk * self.size + k // chunk * lbo
        elif span:
            per = span // self.size
            off = r % per * self.size + r // per * lbo + k % 8 * span + k // 8 * sbo
        else:
            off = r % chunk * self.size + r // chunk * sbo + k % 8 * 16 + k // 8 * lbo
        a = first + off
        return a ^ (((a >> 7) - self.base_offset & SWIZZLE_MASK[span]) << 4)

    def image(self, bits):
        """Bytes of shared memory that hold these elements; what lies between them is no number."""
        at = self.addresses()
        size = -(-(int(at.max()) + self.size) // 1024) * 1024
        image = np.full(size // self.size, 0x7F81 if self.size == 2 else 0x7F810001, f"u{self.size}")
        image[at // self.size] = bits
        return image.view(np.uint8)


def d_lanes(m, n, pair):
    """CTA, lane and column of D[m][n], all of them: layouts D, F, A, B."""
    i, j = np.meshgrid(np.arange(m), np.arange(n), indexing="ij")
    if not pair:
        return 0 * i, i if m == 128 else 32 * (i // 16) + i % 16, j
    if m == 256:
        return i // 128, i % 128, j
    return i // 64, i % 64 + 64 * (j // (n // 2)), j % (n // 2)


def instruction(m, n, a, b, form=1, negate=0):
    """Instruction descriptor with f32 results; form of the elements: 0 f16, 1 bf16, 2 tf32."""
    majors = (not a.k_major) << 15 | (not b.k_major) << 16
    return 1 << 4 | form << 7 | form << 10 | negate << 13 | majors | n // 8 << 17 | m // 16 << 24


def product(
    name,
    section,
    assumes,
    used_by,
    a: Operand,
    b: Operand,
    *,
    pair=False,
    a_in_tmem=False,
    form="bf16",
    values=None,  # matrices A and B; otherwise small whole numbers
    accumulate=False,
    negate=0,
    mask=None,
    kernel="fa4_probe_product",
    bound=None,  # of the error: times the sum of absolute products
    twice=False,  # the collector: B has a second part beside the first
):
    """A product of a (M rows in all, of a pair too) and b (N rows in all)."""
    ctas = 2 if pair else 1
    m, n = a.rows, b.rows
    a, b = (dataclasses.replace(x, rows=x.rows // ctas) for x in (a, b))
    rng = random(m + n + a.depth)
    if values is None:
        values = [rng.integers(-3, 4, (rows, a.depth)).astype(np.float32) for rows in (m, n)]
    to_bits = {"bf16": bf16, "f16": f16, "tf32": lambda x: np.asarray(x, np.float32).view(np.uint32)}[form]
    a_bits, b_bits = map(to_bits, values)
    if form == "tf32":
        a_bits, b_bits = (x | rng.integers(0, 1 << 13, x.shape).astype(np.uint32) for x in (a_bits, b_bits))
    b_parts = [b.image(part) for part in np.split(b_bits, ctas)]
    if twice:
        second = rng.integers(-3, 4, (n, a.depth)).astype(np.float32)
        b_slab = len(b_parts[0]) // 16
        b_parts = [np.concatenate([b_parts[0], b.image(to_bits(second))])]
    a_parts = [np.zeros(0, np.uint8)] * ctas if a_in_tmem else [a.image(part) for part in np.split(a_bits, ctas)]
    columns = 8 * (a.depth // a.step_depth) if a_in_tmem else 0

    before = np.zeros((ctas, 128, n + columns), np.uint32)
    lane, column = np.meshgrid(np.arange(128), np.arange(n), indexing="ij")
    before[:, :, :n] = ((3 * lane + 7 * column) % 100 - 50).astype(np.float32).view(np.uint32)
    if a_in_tmem:  # a row lies where column 0 of its D does; of a pair's 64 rows twice
        cta, at, _ = (x[:, 0] for x in d_lanes(m, n, pair))
        rows = np.ascontiguousarray(a_bits).view(np.uint32)
        before[cta, at, n:] = rows
        if pair and m == 128:
            before[cta, at + 64, n:] = rows

    exact = np.asarray(values[0], np.float64) @ np.asarray(values[1], np.float64).T
    exact *= (-1) ** bin(negate).count("1")
    if twice:
        exact += values[0].astype(np.float64) @ second.astype(np.float64).T
    expected = before[:, :, :n].copy()
    cta, at, j = d_lanes(m, n, pair)
    if accumulate:
        exact = exact + as_float(expected)[cta, at, j]
    keep = np.zeros((ctas, 128), bool)
    if mask is not None:
        keep = (np.array(mask, np.uint32).reshape(ctas, 4)[:, :, None] >> np.arange(32) & 1).astype(bool)
        keep = keep.reshape(ctas, 128)
    new = exact.astype(np.float32).view(np.uint32)
    expected[cta, at, j] = np.where(keep[cta, at], expected[cta, at, j], new)

    def agrees(out):  # of a zero, any sign
        return (out == expected.ravel()) | (out & 0x7FFFFFFF == 0) & (expected.ravel() & 0x7FFFFFFF == 0)

    if bound is not None:
        allowed = bound * (np.abs(values[0]).astype(np.float64) @ np.abs(values[1]).astype(np.float64).T)

        def agrees(out):
            with np.errstate(invalid="ignore"):
                got = as_float(out).reshape(expected.shape)[cta, at, j].astype(np.float64)
            return np.abs(got - exact) <= allowed

    given = []
    for x, y, tmem in zip(a_parts, b_parts, before, strict=True):
        given += [words(x), words(y), words(tmem)]
    image = len(a_parts[0]) + len(b_parts[0])
    assert image <= 128 * 1024
    idesc = instruction(m, n, a, b, {"f16": 0, "bf16": 1, "tf32": 2}[form], negate)
    b_steps = (*b.steps[:2], b_slab) if twice else b.steps
    return Probe(
        name,
        section,
        assumes,
        used_by,
        kernel,
        np.concatenate(given),
        expected,
        (
            *(image // 16, n, columns, idesc, a.depth // a.step_depth, int(accumulate)),
            *(a.start, *a.descriptor, *a.steps),
            *(len(a_parts[0]) + b.start, *b.descriptor, *b_steps),
            *(mask or ()),
        ),
        ("CTA", "lane", "column"),
        agrees,
        grid=ctas,
        cluster=ctas,
    )


def numbered(m, n, depth=16):
    """A and B with D[m][n] = 128 m + n: where an element went shows which it is."""
    a, b = np.zeros((m, depth), np.float32), np.zeros((n, depth), np.float32)
    a[:, 0], b[:, 0] = np.arange(m) % 128, 128
    a[:, 1], b[:, 1] = 1, np.arange(n) % 128
    a[:, 2], b[:, 2] = np.arange(m) // 128, 128 * 128
    a[:, 3], b[:, 3] = 1, np.arange(n) // 128 * 128
    return a, b


def identity(m, depth):
    """A numbered, B the identity: D[m][n] = A[m][n]."""
    i, k = np.meshgrid(np.arange(m), np.arange(depth), indexing="ij")
    return ((7 * i + 3 * k) % 251 - 125).astype(np.float32), np.eye(depth, dtype=np.float32)


def products():
    s, o = "scores, S = Q Kᵀ", "output, O += P V"
    k128, k64 = Operand(128, 128, 128), Operand(128, 96, 64)
    v128, v64 = Operand(128, 128, 128, False), Operand(96, 128, 64, False)
    small = Operand(128, 16, 32)
    tmem = {"a_in_tmem": True, "kernel": "fa4_probe_product_tmem"}
    yield product("scores_128", "2", "a K-major tile of 128-byte rows, two slabs wide, is read as it is swizzled",
                  f"{s}, head dims that are multiples of 64", k128, k128)  # fmt: skip
    yield product("scores_64", "2", "a K-major tile of 64-byte rows, three slabs wide, is read as it is swizzled",
                  f"{s}, head dim 96", k64, k64)  # fmt: skip
    yield product(
        "scores_f16", "2", "K-major tiles of f16 are read as those of bf16", f"{s}, float16", k128, k128, form="f16"
    )
    yield product("scores_negated", "2", "bit 13 of the instruction descriptor negates A", f"{s}, negative scales",
                  k128, k128, negate=1)  # fmt: skip
    yield product("output_128", "2", "an N-major tile of 128-byte rows: leading offset from slab to slab",
                  f"{o}, head dims that are multiples of 64", Operand(128, 128, 0), v128, **tmem)  # fmt: skip
    yield product("output_64", "2", "an N-major tile of 64-byte rows, three slabs", f"{o}, head dim 96",
                  Operand(128, 128, 0), v64, **tmem, accumulate=True)  # fmt: skip
    for swizzle, n in ((0, 64), (32, 64)):
        name = f"of {swizzle}-byte rows" if swizzle else "without swizzle"
        yield product(f"k_major_{swizzle}", "2", f"K-major tiles {name}", NO_KERNEL,
                      Operand(128, 32, swizzle), Operand(n, 32, swizzle))  # fmt: skip
        yield product(f"n_major_{swizzle}", "2", f"M- and N-major tiles {name}", NO_KERNEL,
                      Operand(128, 32, swizzle, False), Operand(n, 32, swizzle, False))  # fmt: skip
    yield product("m_major_128", "2", "an M-major A of 128-byte rows", NO_KERNEL,
                  Operand(128, 32, 128, False), Operand(64, 32, 128, False))  # fmt: skip
    yield product("inside_an_atom", "2", "the swizzle follows bits of the absolute address, wherever a tile begins",
                  NO_KERNEL, Operand(128, 32, 128, start=384), Operand(64, 32, 128, start=640))  # fmt: skip
    yield product("base_offset", "2", "the base offset is subtracted from the row that a swizzle takes", NO_KERNEL,
                  Operand(128, 16, 128, base_offset=3), Operand(64, 16, 128, base_offset=1))  # fmt: skip

    yield product("d_of_128_rows", "3", "D[m][n] lies in lane m, column n (layout D)", "S and O",
                  small, Operand(128, 16, 32), values=numbered(128, 128))  # fmt: skip
    yield product("d_of_64_rows", "3", "rows of a product with M = 64 lie in lanes 32 (m / 16) + m % 16 (layout F)",
                  NO_KERNEL, Operand(64, 16, 32), Operand(64, 16, 32), values=numbered(64, 64))  # fmt: skip
    yield product("a_in_tensor_memory", "3", "A[m][k] in tensor memory lies in lane m, half k % 2 of column k / 2",
                  "P", Operand(128, 64, 0), Operand(64, 64, 128), values=identity(128, 64), **tmem)  # fmt: skip

    four = (0x0F0F0F0F, 0, 0xFFFFFFFF, 0x80000001)
    yield product("lanes_left_out", "4", "a lane whose bit of the mask is 1 keeps its D", NO_KERNEL, small,
                  Operand(64, 16, 32), mask=four, kernel="fa4_probe_product_masked")  # fmt: skip

    yield product("collector", "6", "fill, then the last use of an A, multiply as without", NO_KERNEL,
                  small, Operand(64, 16, 32), twice=True, kernel="fa4_probe_product_collector")  # fmt: skip

    rng = random(5)
    real = [rng.standard_normal((128, 128)).astype(np.float32) for _ in range(2)]
    real = [bf16_value(bf16(x)).astype(np.float32) for x in real]
    yield product("accumulation", "7", "sums of 128 products are as exact as if each step had lost one bit of f32",
                  f"{s}; {o}", k128, k128, values=real, bound=128 * 2.0**-23)  # fmt: skip
    tiny = [np.full((128, 16), 2.0**-133, np.float32), np.full((64, 16), 2.0**90, np.float32)]
    tiny[0][::2] = 3 * 2.0**-130
    yield product(
        "subnormal_bf16", "7", "subnormal bf16 operands count", f"{s}; {o}", small, Operand(64, 16, 32), values=tiny
    )
    tiny = [np.full((128, 16), 2.0**-24, np.float32), np.full((64, 16), 1024.0, np.float32)]
    tiny[0][::2] = 3 * 2.0**-20
    yield product("subnormal_f16", "7", "subnormal f16 operands count: a weight below 2^-14 is one", f"{o}, float16",
                  small, Operand(64, 16, 32), values=tiny, form="f16")  # fmt: skip
    yield product("tf32", "7", "the low 13 bits of a tf32 operand do not count", NO_KERNEL,
                  Operand(128, 8, 32, size=4), Operand(64, 8, 32, size=4), form="tf32",
                  kernel="fa4_probe_product_tf32")  # fmt: skip

    for n, m in ((16, 128), (48, 128), (8, 64)):
        yield product(f"n_{n}", "8", f"M = {m} goes with N = {n}", NO_KERNEL, Operand(m, 16, 32), Operand(n, 16, 32))
    yield product("n_48_tmem", "8", "A in tensor memory goes with an N that is no multiple of 32", NO_KERNEL,
                  Operand(128, 16, 0), Operand(48, 16, 32), **tmem)  # fmt: skip
    yield product("n_96_tmem", "8", "A in tensor memory goes with N = 96", f"{o}, head dim 96",
                  Operand(128, 16, 0), Operand(96, 16, 64, False), **tmem)  # fmt: skip


def pairs():
    """Products of a CTA pair: each CTA has half of A's rows, half of B's."""
    both = {"pair": True}
    use = "tilings of CTA pairs"
    a, b = Operand(256, 128, 128), Operand(128, 128, 128)
    yield product("pair_scores", "1", "a pair multiplies: each CTA has half of A's rows, half of B's, at equal offsets",
                  use, a, b, **both, kernel="fa4_probe_pair")  # fmt: skip
    yield product("pair_output", "1", "a pair multiplies A in tensor memory and an N-major B, half of N in each CTA",
                  use, Operand(256, 128, 0), Operand(128, 128, 128, False), **both, a_in_tmem=True,
                  kernel="fa4_probe_pair_tmem")  # fmt: skip
    yield product("pair_d_of_256_rows", "3", "D[m][n] lies in CTA m / 128, lane m % 128, column n (layout A)", use,
                  Operand(256, 16, 32), Operand(128, 16, 32), values=numbered(256, 128), **both,
                  kernel="fa4_probe_pair")  # fmt: skip
    yield product("pair_d_of_128_rows", "3",
                  "with M = 128 lanes 64 to 127 of CTA m / 64 have the right half of the columns (layout B)", NO_KERNEL,
                  Operand(128, 16, 32), Operand(64, 16, 32), values=numbered(128, 64), **both,
                  kernel="fa4_probe_pair")  # fmt: skip
    yield product("pair_n_96_tmem", "8", "a pair's product with A in tensor memory goes with N = 96",
                  NO_KERNEL, Operand(256, 16, 0), Operand(96, 16, 32), **both, a_in_tmem=True,
                  kernel="fa4_probe_pair_tmem")  # fmt: skip
    eight = (0x0F0F0F0F, 0, 0xFFFFFFFF, 0x80000001, 0x3, 0xF0000000, 0x12345678, 0)
    yield product("pair_lanes_left_out", "4", "words 4 to 7 of a pair's mask are the odd CTA's", NO_KERNEL,
                  Operand(256, 16, 32), Operand(64, 16, 32), mask=eight, **both,
                  kernel="fa4_probe_pair_masked")  # fmt: skip

    rng = random(11)
    values = [rng.integers(-3, 4, (rows, 64)).astype(np.float32) for rows in (256, 64)]
    exact = (values[0] @ values[1].T).astype(np.float32)
    tile = Operand(128, 64, 128)
    yield Probe(
        "pair_load", "1", "two CTAs load, and both arrive and count at the even one's barrier",
        use, "fa4_probe_pair_load", words(np.concatenate([bf16(x).ravel() for x in values])),
        exact.view(np.uint32).reshape(2, 128, 64), (*tile.descriptor, instruction(256, 64, tile, tile)),
        ("CTA", "lane", "column"), grid=2, cluster=2,
        maps=(Map("in", (64, 256, 1, 1), (128, 16, 16), (64, 128, 1, 1), 128),
              Map("in", (64, 64, 1, 1), (128, 16, 16), (64, 32, 1, 1), 128, 256 * 128)),
    )  # fmt: skip


# ---- Hopper


def hopper_product(name, assumes, used_by, a: Operand, b: Operand, a_in_registers=False):
    """64 rows of A, 64 of B, on one warpgroup: the layouts that Blackwell's products are asked about, where they are
    known."""
    rng = random(a.depth + b.depth)
    values = [rng.integers(-3, 4, (64, a.depth)).astype(np.float32) for _ in range(2)]
    a_image = np.zeros(0, np.uint8) if a_in_registers else a.image(bf16(values[0]))
    b_image = b.image(bf16(values[1]))
    given = np.concatenate([words(a_image), words(b_image), words(bf16(values[0]))])
    t, i = np.meshgrid(np.arange(128), np.arange(32), indexing="ij")
    row, column = t // 32 * 16 + t % 32 // 4 + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * (t % 4) + (i & 1)
    expected = (values[0] @ values[1].T).astype(np.float32)[row, column].view(np.uint32)

    def descriptor(operand):
        lbo, sbo = operand.strides
        return sbo >> 4 | operand.base_offset << 17 | {0: 0, 128: 1, 64: 2, 32: 3}[
            operand.swizzle
        ] << 30, lbo >> 4 << 16

    numbers = ((len(a_image) + len(b_image)) // 16, a.depth // 16, a.start, *descriptor(a), *a.steps)
    numbers += (len(a_image) + b.start, *descriptor(b), *b.steps)
    kernel = "fa4_probe_wgmma_registers" if a_in_registers else "fa4_probe_wgmma"
    return Probe(f"wgmma_{name}", "2", assumes, used_by, kernel, given, expected, numbers, ("thread", "register"),
                 chips=("Hopper",))  # fmt: skip


def hopper_products():
    s, o = "scores of the Hopper forward", "output of the Hopper forward"
    yield hopper_product("scores_128", "wgmma reads K-major tiles of 128-byte rows as they are swizzled", s,
                         Operand(64, 128, 128), Operand(64, 128, 128))  # fmt: skip
    yield hopper_product("scores_64", "wgmma reads K-major tiles of 64-byte rows as they are swizzled", s,
                         Operand(64, 96, 64), Operand(64, 96, 64))  # fmt: skip
    for swizzle in (128, 64):
        yield hopper_product(f"output_{swizzle}", f"wgmma reads N-major tiles of {swizzle}-byte rows", o,
                             Operand(64, 128, 0), Operand(64, 128, swizzle, False), a_in_registers=True)  # fmt: skip
    yield hopper_product("inside_an_atom", "wgmma's swizzle follows bits of the absolute address", NO_KERNEL,
                         Operand(64, 32, 128, start=384), Operand(64, 32, 128, start=640))  # fmt: skip
    yield hopper_product("base_offset", "wgmma subtracts the base offset from the row that a swizzle takes", NO_KERNEL,
                         Operand(64, 16, 128, base_offset=3), Operand(64, 16, 128, base_offset=1))  # fmt: skip


# ---- Tensor memory


def tensor_memory(multiprocessors):
    ctas = 2 * multiprocessors
    yield Probe(
        "alloc", "9", "all 512 columns, allocated by a CTA that is alone on its multiprocessor, begin at 0",
        "every kernel: columns are constants", "fa4_probe_alloc", np.zeros(4, np.uint32), np.zeros(ctas, np.uint32),
        axes=("CTA",), grid=ctas,
    )  # fmt: skip
    everything = random(3).integers(0, 2**32, (128, 512), dtype=np.uint64).astype(np.uint32)
    yield Probe(
        "words", "1", "what a warp stores to its lanes of tensor memory it loads again", "every kernel",
        "fa4_probe_words", everything.ravel(), everything, (512,), ("lane", "column"),
    )  # fmt: skip
    t, j = np.meshgrid(np.arange(128), np.arange(8), indexing="ij")
    lane = t % 32
    memory = np.arange(128 * 128, dtype=np.uint32).reshape(128, 128)
    for number, (shape, row, column) in enumerate(
        [
            ("16x64b", lane // 4 + 8 * (lane & 1), 2 * j + (lane >> 1 & 1)),
            ("16x128b", lane // 4 + 8 * (j & 1), 4 * (j >> 1) + lane % 4),
            ("16x256b", lane // 4 + 8 * (j >> 1 & 1), 8 * (j >> 2) + 2 * (lane % 4) + (j & 1)),
            ("16x32bx2", lane % 16, lane // 16 * 64 + j),
        ]
    ):
        yield Probe(
            f"load_{shape}", "4", f"which lane and column a thread's registers are in tcgen05.ld.{shape}", NO_KERNEL,
            "fa4_probe_shapes", memory.ravel(), memory[t // 32 * 32 + row, column], (number,), ("thread", "register"),
        )  # fmt: skip
    for pair in (False, True):
        ctas, name = (2, "_pair") if pair else (1, "")
        for kind, shape, rows, width, to in [
            (0, "128x256b", 128, 32, lambda r: [r]),
            (1, "4x256b", 4, 32, lambda r: [32 * r]),
            (2, "32x128b", 32, 16, lambda r: [r, r + 32, r + 64, r + 96]),
        ]:
            # K-major without swizzle: 8 rows of 16 bytes are contiguous.
            source = random(kind).integers(0, 2**32, (ctas, rows, width // 4), dtype=np.uint64).astype(np.uint32)
            groups = max(rows // 8, 1)
            image = np.zeros((ctas, width // 16, groups * 8, 4), np.uint32)
            image[:, :, :rows] = source.reshape(ctas, rows, width // 16, 4).transpose(0, 2, 1, 3)
            tmem = memory[:, :8].copy()
            expected = np.repeat(tmem[None], ctas, 0)
            for r in range(rows):
                expected[:, to(r), : width // 4] = source[:, r, None]
            what = " of each CTA's shared memory" if pair else ""
            yield Probe(
                f"cp_{shape}{name}", "4", f"tcgen05.cp.{shape} puts row r{what} into lane{'s' if kind == 2 else ''} "
                f"{('r', '32 r', 'r, r + 32, r + 64, r + 96')[kind]}", NO_KERNEL, f"fa4_probe_cp{name}",
                np.concatenate([image.ravel(), tmem.ravel()]), expected,
                (kind, image[0].size // 4, 8 | 1 << 14, groups * 128 >> 4 << 16), ("CTA", "lane", "column"), grid=ctas,
                cluster=ctas,
            )  # fmt: skip


def load_red():
    """Loads that find maxima."""
    rng = random(19)
    inf, tiny, most = np.inf, 2.0**-149, float(np.finfo(np.float32).max)

    def ask(name, section, assumes, used_by, *parts):
        """parts: bits of 128 lanes in all, [lanes][4 loads][32 columns]."""
        bits = np.concatenate(parts)
        magnitude = (bits & 0x7FFFFFFF).astype(np.int64)
        rank = np.where(bits >> 31, -1 - magnitude, magnitude)  # of numbers, -0 below +0
        largest = np.take_along_axis(bits, rank.argmax(2)[..., None], 2)
        nan = (magnitude > 0x7F800000).any(2, keepdims=True)
        return Probe(
            f"load_red_{name}", section, f"tcgen05.ld.red.max.NaN.f32 {assumes}", used_by, "fa4_probe_load_red",
            bits.ravel(), np.concatenate([bits, np.where(nan, np.uint32(0x7FFFFFFF), largest)], 2),
            axes=("lane", "load", "register"), chips=("B300",),
        )  # fmt: skip

    def some(lanes, *values):
        """Each element one of the values; without any a random number."""
        shape = (lanes, 4, 32)
        x = rng.choice(np.array(values, np.float32), shape) if values else rng.standard_normal(shape, np.float32)
        return x.view(np.uint32)

    def with_one(x, bits):
        """One element of each load is these bits: everywhere, if there are 32 lanes."""
        lane, load = np.meshgrid(np.arange(len(x)), np.arange(4), indexing="ij")
        x[lane, load, (lane + 8 * load) % 32] = bits
        return x

    def one(x):
        return np.float32(x).view(np.uint32)

    use = "the row maximum on B300"
    yield ask(
        "numbers", "1", "also gives the largest of its 32 columns, of negative, equal and infinite ones too", use,
        with_one(some(32), one(10)), with_one(some(32, -inf), one(-most)), some(16, -3, -2, -1, 0, 1, 2),
        some(16, -most, -5, -1), some(8, -inf), some(8, -inf, -inf, -inf, -5), some(16, inf, -inf, most, 1, -1),
    )  # fmt: skip
    quiet, signalling = (0x7FC00000, 0xFFC00000, 0xFFFFFFFF), (0x7F800001, 0xFF800001)
    alone = with_one(some(4), quiet[0])
    alone[:, ::2] = some(4)[:, ::2]
    yield ask(
        "nan", "7", "gives the canonical NaN when one of its columns is NaN, of whatever bits", use,
        *(with_one(some(20), x) for x in quiet + signalling), with_one(some(12, inf), quiet[0]),
        with_one(some(12, -inf), quiet[0]), alone,
    )  # fmt: skip
    yield ask(
        "small", "7", "takes +0 for larger than -0, and keeps subnormal numbers", NO_KERNEL,
        with_one(some(32, -0.0), one(0.0)), with_one(some(32, -0.0, -1), one(0.0)), some(16, -0.0),
        some(16, 0.0, -0.0), some(16, 0.0, -0.0, tiny, -tiny, 2.0**-127, -(2.0**-126)),
        some(16, -tiny, -2 * tiny, -(2.0**-127)),
    )  # fmt: skip


def order(multiprocessors):
    """P over S, as the forward does it."""
    rounds = 8
    runs = "may overwrite the columns that the product issued before it reads: they run in order"
    over, pair_use = "S(n - 1) overwrites the P of O += P V(n)", "tilings of CTA pairs"
    for name, section, kernel, ctas, assumes, used_by in (
        ("order", "5", "order", 1, f"a product {runs}", over),
        ("order_pair", "5", "order_pair", 2, f"a product of a CTA pair {runs}", f"{over}, {pair_use}"),
        ("pair_relaxed", "1", "relaxed", 2,
         "relaxed arrivals between tcgen05 fences order what both CTAs stored in tensor memory before a pair's product",
         pair_use),
    ):  # fmt: skip
        rng = random(7)
        q = rng.integers(-1, 2, (ctas * 128, 64)).astype(np.float32)
        k = rng.integers(-1, 2, (128, 64)).astype(np.float32)
        v = rng.integers(-1, 2, (128, 128)).astype(np.float32)  # [d][keys]
        p = rng.integers(-1, 2, (rounds, ctas * 128, 128)).astype(np.float32)
        q_tile, k_tile = Operand(128, 64, 128), Operand(128 // ctas, 64, 128)
        v_tile = Operand(128 // ctas, 128, 128, False)
        images, given = [], []
        for q_part, k_part, v_part, p_part in zip(
            np.split(q, ctas), np.split(k, ctas), np.split(v, ctas), np.split(p, ctas, 1), strict=True
        ):
            images = [q_tile.image(bf16(q_part)), k_tile.image(bf16(k_part)), v_tile.image(bf16(v_part))]
            given += [*map(words, images), words(bf16(p_part))]
        starts = np.cumsum([len(image) for image in images])
        results = np.concatenate([q @ k.T, p.sum(0) @ v.T], 1).reshape(ctas, 128, 256)
        expected = words(np.concatenate([results] * multiprocessors)).reshape(-1, 128, 256)
        yield Probe(
            name, section, assumes, used_by, f"fa4_probe_{kernel}", np.concatenate(given), expected,
            (starts[2] // 16, rounds, starts[0], starts[1], *k_tile.descriptor, *v_tile.descriptor,
             instruction(ctas * 128, 128, q_tile, k_tile), instruction(ctas * 128, 128, q_tile, v_tile)),
            ("CTA", "lane", "column"), grid=len(expected), cluster=ctas, races=True,
        )  # fmt: skip


# ---- Arithmetic


def flush(x):
    """Subnormal numbers are 0 of their sign."""
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def near(exact, places=None, absolute=0.0):
    """Within so many units in the last place, or an absolute error. Below the normal numbers it may be 0."""

    def agrees(out):
        got = as_float(out).reshape(-1, 2)[:, 0].astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            allowed = np.full(exact.shape, absolute)
            if places is not None:
                exponent = np.floor(np.log2(np.abs(exact)))
                allowed = np.maximum(allowed, places * 2.0 ** (np.maximum(exponent, -126) - 23))
            close = (np.abs(got - exact) <= allowed) | (got == exact) | (np.isnan(got) & np.isnan(exact))
            close |= (np.abs(exact) < 2.0**-126 * (1 + 2.0**-20)) & (got == 0)
        return np.stack([close, as_float(out).reshape(-1, 2)[:, 1] == 0], 1)

    return agrees


def arithmetic():
    rng = random(9)
    inf, nan = np.inf, np.nan
    special = np.array(
        [0.0, -0.0, inf, -inf, nan, 1.0, -1.0, 2.0**-127, -(2.0**-140), 3e38, -3e38, 2.0**-126], np.float32
    )

    def ask(number, name, assumes, used_by, operands, expected, agrees=None, chips=BOTH):
        """operands: up to six columns; expected: one or two columns of bits, or exact values with agrees."""
        given = np.zeros((len(operands[0]), 6), np.float32)
        for i, column in enumerate(operands):
            given[:, i] = column
        bits = np.zeros((len(given), 2), np.uint32)
        for i, column in enumerate(expected):
            with np.errstate(over="ignore", invalid="ignore"):
                bits[:, i] = column.astype(np.float32).view(np.uint32) if column.dtype.kind == "f" else column
        return Probe(name, "7", assumes, used_by, "fa4_probe_arithmetic", words(given), bits, (len(given), number),
                     ("row", "result"), agrees, grid=2, chips=chips)  # fmt: skip

    x = np.concatenate([special, rng.uniform(-140, 3, 4000), np.arange(-149, 128)]).astype(np.float32)
    with np.errstate(all="ignore"):
        exact = np.exp2(flush(x).astype(np.float64))
        exact[exact > np.finfo(np.float32).max] = inf
        yield ask(0, "ex2", "ex2.approx.ftz.f32 is within 2 units in the last place, 2^-inf is 0", "the weights",
                  [x], [exact], near(exact, 2))  # fmt: skip
        x = np.concatenate([[1.0, 2.0, 0.0, inf, nan], 2.0 ** rng.uniform(-20, 40, 2000)]).astype(np.float32)
        exact = np.log2(x.astype(np.float64))
        yield ask(1, "lg2", "lg2.approx.ftz.f32 is within 2^-22, absolute or relative", "the log-sum-exp", [x], [exact],
                  near(exact, 4, 2.0**-22))  # fmt: skip
        x = np.concatenate([[1.0, -2.0, 0.0, inf, nan], 2.0 ** rng.uniform(-40, 40, 2000)]).astype(np.float32)
        exact = 1 / x.astype(np.float64)
        yield ask(2, "rcp", "rcp.approx.ftz.f32 is within 1 unit in the last place", "the division of O",
                  [x], [exact], near(exact, 1))  # fmt: skip

    a, b = (np.repeat(special, len(special)), np.tile(special, len(special)))
    canonical = np.uint32(0x7FFFFFFF).view(np.float32)

    def larger(a, b):
        return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))

    with np.errstate(invalid="ignore"):
        expected = np.where(np.isnan(a) | np.isnan(b), canonical, larger(a, b))
        yield ask(3, "max_nan", "max.NaN.f32 gives the canonical NaN when one operand is one, and max(-0, +0) = +0",
                  "the row maximum", [a, b], [expected])  # fmt: skip
        least = np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))
        yield ask(4, "min_number", "min.f32 gives the number when the other operand is NaN", "Hopper's row maximum",
                  [a, b], [np.where(np.isnan(a) & np.isnan(b), canonical, least)])  # fmt: skip
        a3, b3, c3 = np.repeat(a, len(special)), np.repeat(b, len(special)), np.tile(special, len(a))
        none = np.isnan(a3) | np.isnan(b3) | np.isnan(c3)
        largest = larger(larger(a3, b3), c3)
        yield ask(12, "max3_nan", "max.NaN.f32 of three gives NaN when one of them is", "the row maximum",
                  [a3, b3, c3], [np.where(none, canonical, largest)], chips=("Blackwell",))  # fmt: skip

    a = np.concatenate([special, rng.standard_normal(500), 2.0 ** rng.uniform(-26, 17, 500)]).astype(np.float32)
    b = np.roll(a, 3)
    for number, name, to in ((5, "cvt_bf16x2", bf16), (6, "cvt_f16x2", f16)):
        expected = to(a).astype(np.uint32) | to(b).astype(np.uint32) << 16
        yield ask(number, name, f"cvt.rn.{name[4:]}.f32 rounds to nearest even, the first operand is the high half",
                  "P and the output", [a, b], [expected])  # fmt: skip

    # Pairs: numbers whose exact results fit long double, so that they are rounded once.
    shape = (6, 800)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7, shape)).astype(np.float32)
    x[:, :6] = [[2.0**-130], [1.5], [2.0**-100], [0.0], [-(2.0**-127)], [2.0**-126]]
    long = flush(x).astype(np.longdouble)

    def rounded(y):
        return flush(y.astype(np.float32))

    def pair_of(number, name, assumes, used_by, operands, low, high):
        return ask(number, name, assumes, used_by, operands, [low, high], chips=("Blackwell",))

    yield pair_of(8, "fma_f32x2", "fma.rn.ftz.f32x2 rounds each half once", "scaled scores, the cubic", x,
                  rounded(long[0] * long[2] + long[4]), rounded(long[1] * long[3] + long[5]))  # fmt: skip
    yield pair_of(9, "add_f32x2", "add.rn.ftz.f32x2 adds each half", "the row sum", x[:4],
                  rounded(long[0] + long[2]), rounded(long[1] + long[3]))  # fmt: skip
    yield pair_of(11, "mul_f32x2", "mul.rn.ftz.f32x2 multiplies each half", "the correction of O", x[:4],
                  rounded(long[0] * long[2]), rounded(long[1] * long[3]))  # fmt: skip
    x = np.stack([rng.uniform(-127, 127, 800), rng.uniform(-127, 127, 800)]).astype(np.float32)
    x[0, :255] = np.arange(-127, 128)
    magic = np.float32(12582912)

    def down(y):
        near_ = y.astype(np.float32)
        return np.where(near_.astype(np.float64) > y, np.nextafter(near_, np.float32(-inf)), near_)

    yield pair_of(10, "add_rm_f32x2", "add.rm.ftz.f32x2 of 2^23 + 2^22 leaves the integer below x in the low bits",
                  "exponentials on the FMA pipe", [x[0], x[1], np.full(800, magic), np.full(800, magic)],
                  down(x[0].astype(np.float64) + 12582912.0), down(x[1].astype(np.float64) + 12582912.0))  # fmt: skip


# ---- Copies


def swizzled(tile, swizzle):
    """Bytes in shared memory of a tile [rows][columns] of 16-bit elements whose rows are as long as the swizzle."""
    rows = tile.shape[0]
    at = np.arange(rows)[:, None] * swizzle + 2 * np.arange(swizzle // 2)
    out = np.zeros(rows * swizzle // 2, np.uint16)
    out[(at ^ (at >> 7 & SWIZZLE_MASK[swizzle]) << 4) // 2] = tile
    return out


def copies(multiprocessors):
    rng = random(13)
    batch, heads, length = 2, 2, 200

    def box(data, batch, head, row, column, rows, columns):
        """Zeros outside."""
        out = np.zeros((rows, columns), np.uint16)
        inside = data[batch, head, row : row + rows, column : column + columns]
        out[: inside.shape[0], : inside.shape[1]] = inside
        return out

    for swizzle, dim in ((128, 128), (64, 96)):
        columns = swizzle // 2
        data = rng.integers(0, 1 << 16, (batch, heads, length, dim), dtype=np.uint16)
        strides = (dim * 2, length * dim * 2, heads * length * dim * 2)
        for what, row, column in (("inside", 64, columns), ("past_the_end", 128, 0), ("outside", 256, columns)):
            text = {"inside": "swizzled by absolute address bits",
                    "past_the_end": "rows past the tensor's end arrive as zeros and count",
                    "outside": "a box outside the tensor arrives as zeros and counts"}[what]  # fmt: skip
            yield Probe(
                f"load_{swizzle}_{what}", "1", f"a tensor copy of {swizzle}-byte rows: {text}", "loads of K and V",
                "fa4_probe_load", words(data), words(swizzled(box(data, 1, 1, row, column, 128, columns), swizzle)),
                (column, row, 1, 1, 0, 128 * swizzle), ("word",),
                maps=(Map("in", (dim, length, heads, batch), strides, (columns, 128, 1, 1), swizzle),), chips=BOTH,
            )  # fmt: skip
        tile = rng.integers(0, 1 << 16, (128, columns), dtype=np.uint16)
        before = rng.integers(0, 1 << 16, (batch, heads, length, dim), dtype=np.uint16)
        after = before.copy()
        after[1, 0, 128:200, columns : 2 * columns] = tile[:72]
        yield Probe(
            f"store_{swizzle}", "1", f"a tensor copy to memory of {swizzle}-byte rows drops what is past the end",
            "the store of O", "fa4_probe_store", words(swizzled(tile, swizzle)), words(after),
            (columns, 128, 0, 1, 0, 128 * swizzle), ("word",), before=words(before),
            maps=(Map("out", (dim, length, heads, batch), strides, (columns, 128, 1, 1), swizzle),), chips=BOTH,
        )  # fmt: skip

    # [batch, units, len, pack, dim]: 4 heads share the rows of a tile, of 8 heads.
    pack, dim, length = 4, 64, 40
    data = rng.integers(0, 1 << 16, (2, 2, pack, length, dim), dtype=np.uint16)
    before = rng.integers(0, 1 << 16, data.shape, dtype=np.uint16)
    after = before.copy()
    after[1, 1, :, 32:] = data[1, 1, :, 32:]
    head = length * dim * 2
    geometry = ((dim, pack, length, 2, 2), (head, dim * 2, pack * head, 2 * pack * head), (64, pack, 32, 1, 1), 128)
    yield Probe(
        "five_dimensions", "1", "tensor copies of five dimensions, heads inside of queries, there and back",
        "Q and O where heads share a tile", "fa4_probe_five_dimensions", words(data), words(after),
        (0, 0, 32, 1, 1, 128 * 128), ("word",), before=words(before),
        maps=(Map("in", *geometry), Map("out", *geometry)), chips=BOTH,
    )  # fmt: skip

    tiny = np.array([1e-40, 2.0**-149, -1e-40, 1.0], np.float32)
    start = np.array([2e-40, 2.0**-127, 1e-40, 2.0**-130], np.float32)
    kept = (start + tiny).view(np.uint32)
    lost = (flush(start) + flush(tiny)).view(np.uint32)
    yield Probe(
        "reduce_subnormal", "12", "a bulk addition keeps subnormal numbers (as Hopper) or flushes them (as the manual)",
        NO_KERNEL, "fa4_probe_reduce", words(tiny), kept, axes=("word",), before=words(start),
        agrees=lambda out: (out == kept) | (out & 0x7FFFFFFF == lost & 0x7FFFFFFF), chips=BOTH,
    )  # fmt: skip

    rounds = 64
    rows = random(17).integers(0, 2**32, (rounds, 1024), dtype=np.uint64).astype(np.uint32)
    read = rows[:, (np.arange(8)[:, None] * 128 + np.arange(128) * 37) % 1024]
    sums = read.sum(1, dtype=np.uint64).astype(np.uint32)
    ctas = 2 * multiprocessors
    yield Probe(
        "overwrite", "14", "reads, then an arrival: a copy that waits for it and overwrites does not show in them",
        NO_KERNEL, "fa4_probe_overwrite", rows.ravel(), np.repeat(sums[None], ctas, 0), (rounds,),
        ("CTA", "round", "thread"), grid=ctas, races=True, practice=True, chips=BOTH,
    )  # fmt: skip

    data = rng.integers(0, 1 << 16, (1, 1, 64, 64), dtype=np.uint16)
    flat = ((64, 64, 1, 1), (128, 16, 16), (64, 8, 1, 1), 128)
    yield Probe(
        "fault_unaligned", "11", "a tensor copy whose innermost coordinate is no multiple of 16 bytes ends in an error",
        NO_KERNEL, "fa4_probe_load", words(data), np.zeros(256, np.uint32), (1, 0, 0, 0, 0, 1024), ("word",),
        maps=(Map("in", *flat),), faults=True, chips=BOTH,
    )  # fmt: skip
    yield Probe(
        "fault_negative", "11", "a tensor copy to memory at a negative coordinate ends in an error", NO_KERNEL,
        "fa4_probe_store", words(data), words(data), (0, 0xFFFFFFFF, 0, 0, 0, 1024), ("word",),
        maps=(Map("out", *flat),), faults=True, chips=BOTH,
    )  # fmt: skip


def clusters(multiprocessors):
    ctas = 4 * max(1, multiprocessors // 8)
    expected = np.zeros((ctas, 8), np.uint32)
    rank = np.arange(ctas) % 4
    expected[:, 0], expected[:, 1:5], expected[:, 7] = rank, 1, rank
    expected[:, 5] = np.where(rank % 2 == 0, 100 + rank, 99)
    expected[:, 6] = np.where(rank % 2 == 0, 101 + rank, 99)
    yield Probe(
        "addresses", "10", "a cluster's shared addresses are rank << 24 | offset: clearing bit 24 gives the even CTA's",
        NO_KERNEL, "fa4_probe_addresses", np.zeros(4, np.uint32), expected, axes=("CTA", "answer"),
        grid=ctas, cluster=4, chips=BOTH,
    )  # fmt: skip
    ctas = 40 * multiprocessors
    yield Probe(
        "work", "1", "by cluster launch control every CTA of a grid runs once, or is taken over once", NO_KERNEL,
        "fa4_probe_work", np.zeros(4, np.uint32), np.ones(ctas, np.uint32), axes=("CTA",),
        before=np.zeros(ctas, np.uint32), grid=ctas, races=True,
    )  # fmt: skip


def probes(multiprocessors: int, capability: int) -> list[Probe]:
    """All that can be asked of the chip."""
    chips = {90: {"Hopper"}, 103: {"Blackwell", "B300"}}.get(capability, {"Blackwell"})
    found = [
        *tensor_memory(multiprocessors),
        *load_red(),
        *products(),
        *pairs(),
        *hopper_products(),
        *order(multiprocessors),
        *arithmetic(),
        *copies(multiprocessors),
        *clusters(multiprocessors),
    ]
    assert len({p.name for p in found}) == len(found)
    return [p for p in found if chips.intersection(p.chips)]
