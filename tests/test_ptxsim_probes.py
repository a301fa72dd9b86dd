"""The simulator and a real Hopper chip give the same bits: probes ran on an H200, and what it answered is stored.

ptxsim_probes/run_h200.py makes the data again. MMAs have whole numbers for inputs, so that the order of their sums
cannot hide a wrong layout; approximations may differ by what the manual allows.
"""

import copy
import json
import pathlib

import numpy as np
import ptxsim
import pytest
from ptxsim_kernels.ptx import POINTER, kernel
from ptxsim_probes import elementwise
from ptxsim_probes.probes import ATOMICS, OPERANDS, PROBES, Map

FILES = sorted(pathlib.Path(__file__).parent.glob("ptxsim_probes/*.npz"))
DATA = np.load(FILES[-1]) if FILES else {}
ONE_BY_ONE = ("exact", "approximate")
pytestmark = pytest.mark.skipif(not FILES, reason="no probe has been stored")


def simulate(p, **how):
    args = copy.deepcopy(p.args)
    passed = []
    for a in args:
        if isinstance(a, Map):
            a = ptxsim.TensorMap(args[a.array], a.dtype, a.dims, a.strides, a.box, a.element_strides, a.swizzle, a.fill)
        passed.append(a)
    ptxsim.Module(p.text).launch("k", grid=p.grid, block=p.block, cluster=p.cluster, smem=p.smem, args=passed, **how)
    return args


def test_the_data_says_where_it_is_from():
    about = json.loads(str(DATA["about"]))
    assert "H200" in about["chip"]
    assert about["date"]


def comparable(name, words):
    """Without what ptxas 13.0 assembles wrongly: packed 16-bit additions in shared memory take the upper half of the
    addend from another register (so says the machine code, and all 128 of the chip's answers)."""
    if name != "atomics_shared":
        return words
    wrong = [ATOMICS.index(f"add.noftz.{t}") for t in ("f16x2", "bf16x2")]
    return np.delete(words.reshape(len(ATOMICS), -1), wrong, 0)


@pytest.mark.parametrize("name", [name for name in PROBES if name not in ONE_BY_ONE])
def test_probe(name):
    p = PROBES[name]
    if f"{name}/{p.results[0]}" not in DATA:
        pytest.skip("the stored data has no answer of the chip")
    for schedule in ("early", "late"):
        args = simulate(p, schedule=schedule)
        for i in p.results:
            assert np.array_equal(comparable(name, args[i]), comparable(name, DATA[f"{name}/{i}"]))


def run_line(table, n):
    """The simulator's and the chip's results of a line of the table: 256 of each."""
    out = ptxsim.empty(512, np.uint32)
    text = kernel(elementwise.body(table.strip().splitlines()[n]), [POINTER, POINTER], "sm_90a", 256)
    ptxsim.Module(text).launch("k", block=256, args=[OPERANDS.copy(), out])
    name = "exact" if table is elementwise.EXACT else "approximate"
    return out.view(np.uint64), DATA[f"{name}/1"].view(np.uint64)[256 * n : 256 * n + 256]


# Where the chip did not run what the PTX says, as the machine code shows.
MISASSEMBLED = {
    "r set.neu.f32.f32 r s": "ptxas 13.0 folds it to 1 here, and makes FSET.BF.NEU of it elsewhere",
    "h cvt.rm.ftz.f16.f32 r": "ptxas 13.0 makes F2F without .FTZ of it",
}
EXACT_LINES = elementwise.EXACT.strip().splitlines()


@pytest.mark.parametrize("n", range(len(EXACT_LINES)), ids=EXACT_LINES)
def test_exact(n):
    ours, chip = run_line(elementwise.EXACT, n)
    wrong = np.flatnonzero(ours != chip)
    if EXACT_LINES[n] in MISASSEMBLED:
        assert wrong.size, "no longer different: take the line off the list"
        return
    rows = OPERANDS.view(np.uint64).reshape(256, 3)
    assert not wrong.size, [
        ([f"{x:016x}" for x in rows[i]], f"ours {ours[i]:016x}", f"chip {chip[i]:016x}") for i in wrong[:4]
    ]


# Relative errors that the manual allows, and absolute ones where it says so or where results may be subnormal.
ALLOWED = {
    "ex2.approx.f32": (2**-22, 0),
    "ex2.approx.ftz.f32": (2**-22, 0),
    "lg2.approx.f32": (2**-22, 2**-22),
    "lg2.approx.ftz.f32": (2**-22, 2**-22),
    "rcp.approx.f32": (2**-23, 0),
    "rcp.approx.ftz.f32": (2**-23, 0),
    "rsqrt.approx.f32": (2**-22.9, 0),
    "rsqrt.approx.ftz.f32": (2**-22.9, 0),
    "sqrt.approx.f32": (2**-23, 0),
    "div.approx.f32": (2**-22, 0),
    "div.full.f32": (2**-22, 0),
    "tanh.approx.f32": (2**-11, 0),
    "sin.approx.f32": (0, 2**-20.5),
    "cos.approx.f32": (0, 2**-20.5),
    "ex2.approx.f16": (2**-9.9, 2**-24),
    "ex2.approx.f16x2": (2**-9.9, 2**-24),
    "ex2.approx.ftz.bf16x2": (2**-7, 0),
    "tanh.approx.f16": (2**-10.987, 0),
    "tanh.approx.bf16x2": (2**-8, 0),
}


def as_floats(bits, opcode):
    """Every result, as float64: one a row, or two of a packed type."""
    low = bits.astype(np.uint32)
    if opcode.endswith("bf16x2"):
        return np.stack([low << 16, low & 0xFFFF0000], 1).view(np.float32).astype(float)
    if opcode.endswith("f16x2"):
        return low.view(np.float16).reshape(-1, 2).astype(float)
    if opcode.endswith("f16"):
        return low.astype(np.uint16).view(np.float16).astype(float)
    return low.view(np.float32).astype(float)


LINES = elementwise.APPROXIMATE.strip().splitlines()


@pytest.mark.parametrize("n", range(len(LINES)), ids=LINES)
def test_approximate(n):
    opcode = elementwise.parse(elementwise.APPROXIMATE)[n][1]
    ours, chip = (as_floats(bits, opcode) for bits in run_line(elementwise.APPROXIMATE, n))
    relative, absolute = ALLOWED[opcode]
    with np.errstate(invalid="ignore"):
        a, b = OPERANDS.reshape(256, 6)[:, [0, 2]].view(np.float32).astype(float).T
    sure = np.ones(256, bool)
    if opcode.startswith(("sin", "cos")):
        sure = abs(a) <= np.pi  # the manual says nothing of what lies outside
    if opcode.startswith("div"):
        sure = abs(b) < 2.0**126  # beyond, the manual lets the result be 0
    with np.errstate(invalid="ignore"):
        close = abs(ours - chip) <= 2 * (relative * abs(chip) + absolute)
    # Either side of the smallest normal number, flushing is the chip's choice.
    close |= (ours == chip) | (np.isnan(ours) & np.isnan(chip)) | (np.maximum(abs(ours), abs(chip)) < 2.0**-126)
    wrong = np.flatnonzero(~close.reshape(256, -1).all(1) & sure)
    assert not wrong.size, [(a[i], b[i], ours[i], chip[i]) for i in wrong[:4]]
