# ruff: noqa: E501  (a form a line, however long)
"""The PTX ISA manual's instructions as a table: what the simulator takes, and what it refuses.

A row is (section of the manual, targets, forms). In a form, <a|b|c> stands for each of its alternatives. Operands are
the registers of the frame in ptx.py and of DECLARE. Targets: ALL, or those that ptxas takes the form for.
"""

import itertools
import re

ALL = ("sm_90a", "sm_100a", "sm_100f", "sm_103a")
HOPPER = ("sm_90a",)
BLACKWELL = ("sm_100a", "sm_100f", "sm_103a")
ULTRA = ("sm_103a",)

DECLARE = """
.reg .b64 A, B, C, D, P;
.reg .b128 W;
.reg .b16 h2, h3, h4;
.reg .b32 m0, m1, m2, m3, v<256>;
"""


def expand(form):
    parts = [part.split("|") if i % 2 else [part] for i, part in enumerate(re.split(r"<([^<>]*)>", form))]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def forms(rows):
    """(section, targets, one form) for every form of the rows."""
    return [(section, targets, form) for section, targets, patterns in rows for p in patterns for form in expand(p)]


def v(count, first=0):
    return "{" + ", ".join(f"v{i}" for i in range(first, first + count)) + "}"


ROUND = "<|.rn|.rz|.rm|.rp>"
ROUNDED = "<.rn|.rz|.rm|.rp>"
FTZ = "<|.ftz>"
SAT = "<|.sat>"
SCOPE = "<cta|cluster|gpu|sys>"

INTEGER = [
    ("Integer Arithmetic Instructions: add, sub", ALL, [
        "<add|sub>.<u16|s16> h0, h1, h2", "<add|sub>.<u32|s32> x, y, z", "<add|sub>.<u64|s64> a, b, c",
        "<add|sub>.sat.s32 x, y, z",
    ]),
    ("Integer Arithmetic Instructions: mul", ALL, [
        "mul.<hi|lo>.<u16|s16> h0, h1, h2", "mul.<hi|lo>.<u32|s32> x, y, z", "mul.<hi|lo>.<u64|s64> a, b, c",
        "mul.wide.<u16|s16> x, h0, h1", "mul.wide.<u32|s32> a, x, y",
    ]),
    ("Integer Arithmetic Instructions: mad", ALL, [
        "mad.<hi|lo>.<u16|s16> h0, h1, h2, h3", "mad.<hi|lo>.<u32|s32> x, y, z, i", "mad.<hi|lo>.<u64|s64> a, b, c, d",
        "mad.wide.<u16|s16> x, h0, h1, y", "mad.wide.<u32|s32> a, x, y, b",
    ]),
    ("Integer Arithmetic Instructions: div, rem", ALL, [
        "<div|rem>.<u16|s16> h0, h1, h2", "<div|rem>.<u32|s32> x, y, z", "<div|rem>.<u64|s64> a, b, c",
    ]),
    ("Integer Arithmetic Instructions: abs, neg", ALL, [
        "<abs|neg>.s16 h0, h1", "<abs|neg>.s32 x, y", "<abs|neg>.s64 a, b",
    ]),
    ("Integer Arithmetic Instructions: min, max", ALL, [
        "<min|max>.<u16|s16> h0, h1, h2", "<min|max>.<u32|s32> x, y, z", "<min|max>.<u64|s64> a, b, c",
    ]),
    ("Integer Arithmetic Instructions: popc, clz, bfind, brev", ALL, [
        "<popc|clz>.b32 x, y", "<popc|clz>.b64 x, a", "bfind<|.shiftamt>.<u32|s32> x, y",
        "bfind<|.shiftamt>.<u64|s64> x, a", "brev.b32 x, y", "brev.b64 a, b",
    ]),
    ("Integer Arithmetic Instructions: bfe, bfi", ALL, [
        "bfe.<u32|s32> x, y, z, i", "bfe.<u64|s64> a, b, x, y", "bfi.b32 x, y, z, i, 5", "bfi.b64 a, b, c, x, y",
    ]),
    ("Logic and Shift Instructions: and, or, xor, not, cnot", ALL, [
        "<and|or|xor>.pred p, p, q", "<and|or|xor>.b16 h0, h1, h2", "<and|or|xor>.b32 x, y, z",
        "<and|or|xor>.b64 a, b, c", "not.pred p, q", "not.b16 h0, h1", "not.b32 x, y", "not.b64 a, b",
    ]),
    ("Logic and Shift Instructions: lop3", ALL, ["lop3.b32 x, y, z, i, 0xCA"]),
    ("Logic and Shift Instructions: shf, shl, shr", ALL, [
        "shf.<l|r>.<clamp|wrap>.b32 x, y, z, i", "shl.b16 h0, h1, x", "shl.b32 x, y, z", "shl.b64 a, b, x",
        "shr.<b16|u16|s16> h0, h1, x", "shr.<b32|u32|s32> x, y, z", "shr.<b64|u64|s64> a, b, x",
    ]),
    ("Data Movement and Conversion Instructions: prmt", ALL, ["prmt.b32<|.f4e|.b4e|.rc8|.ecl|.ecr|.rc16> x, y, z, i"]),
]  # fmt: skip

FLOAT = [
    ("Floating Point Instructions: add, sub, mul", ALL, [
        f"<add|sub|mul>{ROUND}{FTZ}{SAT}.f32 x, y, z", f"<add|sub|mul>{ROUND}.f64 a, b, c",
    ]),
    ("Floating Point Instructions: add, sub, mul of f32x2", BLACKWELL, [f"<add|sub|mul>{ROUND}{FTZ}.f32x2 a, b, c"]),
    ("Floating Point Instructions: fma", ALL, [
        f"fma{ROUNDED}{FTZ}{SAT}.f32 x, y, z, i", f"fma{ROUNDED}.f64 a, b, c, d",
    ]),
    ("Floating Point Instructions: fma of f32x2", BLACKWELL, [f"fma{ROUNDED}{FTZ}.f32x2 a, b, c, d"]),
    ("Floating Point Instructions: div", ALL, [
        f"div.<approx|full>{FTZ}.f32 x, y, z", f"div{ROUNDED}{FTZ}.f32 x, y, z", f"div{ROUNDED}.f64 a, b, c",
    ]),
    ("Floating Point Instructions: abs, neg", ALL, [f"<abs|neg>{FTZ}.f32 x, y", "<abs|neg>.f64 a, b"]),
    ("Floating Point Instructions: min, max", ALL, [
        f"<min|max>{FTZ}<|.NaN><|.xorsign.abs>.f32 x, y, z", "<min|max>.f64 a, b, c",
    ]),
    ("Floating Point Instructions: min, max of three", BLACKWELL, [f"<min|max>{FTZ}<|.NaN><|.abs>.f32 x, y, z, i"]),
    ("Floating Point Instructions: rcp, sqrt, rsqrt", ALL, [
        f"<rcp|sqrt>.approx{FTZ}.f32 x, y", f"<rcp|sqrt>{ROUNDED}{FTZ}.f32 x, y", f"<rcp|sqrt>{ROUNDED}.f64 a, b",
        f"rsqrt.approx{FTZ}.f32 x, y",
    ]),
    ("Floating Point Instructions: sin, cos, lg2, ex2, tanh", ALL, [
        f"<sin|cos|lg2|ex2>.approx{FTZ}.f32 x, y", "tanh.approx.f32 x, y",
    ]),
    ("Floating Point Instructions: copysign, testp", ALL, [
        "copysign.f32 x, y, z", "copysign.f64 a, b, c",
        "testp.<finite|infinite|number|notanumber|normal|subnormal>.f32 p, x",
    ]),
    ("Half Precision Floating Point Instructions: add, sub, mul", ALL, [
        f"<add|sub|mul><|.rn>{FTZ}{SAT}.f16 h0, h1, h2", f"<add|sub|mul><|.rn>{FTZ}{SAT}.f16x2 x, y, z",
        "<add|sub|mul><|.rn>.bf16 h0, h1, h2", "<add|sub|mul><|.rn>.bf16x2 x, y, z",
    ]),
    ("Half Precision Floating Point Instructions: fma", ALL, [
        f"fma.rn{FTZ}<|.sat|.relu>.f16 h0, h1, h2, h3", f"fma.rn{FTZ}<|.sat|.relu>.f16x2 x, y, z, i",
        "fma.rn<|.relu>.bf16 h0, h1, h2, h3", "fma.rn<|.relu>.bf16x2 x, y, z, i",
    ]),
    ("Half Precision Floating Point Instructions: neg, abs, min, max", ALL, [
        f"<neg|abs>{FTZ}.f16 h0, h1", f"<neg|abs>{FTZ}.f16x2 x, y", "<neg|abs>.bf16 h0, h1", "<neg|abs>.bf16x2 x, y",
        f"<min|max>{FTZ}<|.NaN><|.xorsign.abs>.f16 h0, h1, h2", f"<min|max>{FTZ}<|.NaN><|.xorsign.abs>.f16x2 x, y, z",
        "<min|max><|.NaN><|.xorsign.abs>.bf16 h0, h1, h2", "<min|max><|.NaN><|.xorsign.abs>.bf16x2 x, y, z",
    ]),
    ("Half Precision Floating Point Instructions: ex2, tanh", ALL, [
        "<ex2|tanh>.approx.f16 h0, h1", "<ex2|tanh>.approx.f16x2 x, y", "ex2.approx.ftz.bf16 h0, h1",
        "ex2.approx.ftz.bf16x2 x, y", "tanh.approx.bf16 h0, h1", "tanh.approx.bf16x2 x, y",
    ]),
    ("Mixed Precision Floating Point Instructions: add, sub, fma", BLACKWELL, [
        f"<add|sub>{ROUND}{SAT}.f32.<f16|bf16> x, h0, y", f"fma{ROUNDED}{SAT}.f32.<f16|bf16> x, h0, h1, y",
    ]),
]  # fmt: skip

COMPARE = [
    ("Comparison and Selection Instructions: setp", ALL, [
        "setp.<eq|ne|lt|le|gt|ge>.<s16|u16> p, h0, h1", "setp.<eq|ne|lt|le|gt|ge>.<s32|u32> p, x, y",
        "setp.<eq|ne|lt|le|gt|ge>.<s64|u64> p, a, b", "setp.<lo|ls|hi|hs>.u32 p, x, y", "setp.<eq|ne>.b16 p, h0, h1",
        "setp.<eq|ne>.b32 p, x, y", "setp.<eq|ne>.b64 p, a, b",
        f"setp.<eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan>{FTZ}.f32 p, x, y",
        "setp.<eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan>.f64 p, a, b",
        "setp.<lt|ge>.<and|or|xor>.s32 p, x, y, q", "setp.<lt|ge>.s32 p|q, x, y",
    ]),
    ("Half Precision Comparison Instructions: setp", ALL, [
        f"setp.<eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan>{FTZ}.f16 p, h0, h1",
        "setp.<eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan>.bf16 p, h0, h1",
        "setp.<lt|ge|neu>.f16x2 p|q, x, y", "setp.<lt|ge|neu>.bf16x2 p|q, x, y",
    ]),
    ("Comparison and Selection Instructions: selp, slct", ALL, [
        "selp.<b16|u16|s16> h0, h1, h2, p", "selp.<b32|u32|s32|f32> x, y, z, p", "selp.<b64|u64|s64|f64> a, b, c, p",
    ]),
]  # fmt: skip

CONVERT = [
    ("Data Movement and Conversion Instructions: mov", ALL, [
        "mov.<b16|u16|s16> h0, h1", "mov.<b32|u32|s32|f32> x, y", "mov.<b64|u64|s64|f64> a, b", "mov.pred p, q",
        "mov.b32 x, {h0, h1}", "mov.b32 {h0, h1}, x", "mov.b64 a, {x, y}", "mov.b64 {x, y}, a",
        "mov.b64 a, {h0, h1, h2, h3}", "mov.b64 {h0, h1, h2, h3}, a", "mov.b128 W, {a, b}", "mov.b128 {a, b}, W",
        "mov.u32 x, %<tid.x|ntid.y|ctaid.z|nctaid.x|laneid|warpid|nwarpid|smid|cluster_ctarank|cluster_nctarank>",
        "mov.u32 x, %<clusterid.x|nclusterid.y|cluster_ctaid.x|cluster_nctaid.z|lanemask_lt|lanemask_ge|clock>",
        "mov.u32 x, %<dynamic_smem_size|total_smem_size>", "mov.u64 a, %<clock64|globaltimer>",
    ]),
    ("Data Movement and Conversion Instructions: cvt between integers", ALL, [
        "cvt.<u16|s16>.<u32|s32> h0, x", "cvt.<u32|s32>.<u16|s16> x, h0", "cvt.<u64|s64>.<u32|s32> a, x",
        "cvt.<u32|s32>.<u64|s64> x, a", "cvt.<u32|s32>.<u8|s8> x, y", "cvt.sat.<u16|s16>.s32 h0, x",
        "cvt.sat.<s32|u32>.s64 x, a", "cvt.sat.u8.s32 x, y", "cvt.<u64|s64>.<u16|s16> a, h0",
    ]),
    ("Data Movement and Conversion Instructions: cvt of f32, f64", ALL, [
        "cvt.<rni|rzi|rmi|rpi><|.ftz><|.sat>.<s32|u32>.f32 x, y", "cvt.<rni|rzi|rmi|rpi>.<s64|u64>.f32 a, x",
        "cvt.<rni|rzi|rmi|rpi>.<s32|u32>.f64 x, a", "cvt.<rni|rzi|rmi|rpi><|.ftz><|.sat>.f32.f32 x, y",
        "cvt.<rn|rz|rm|rp>.f32.<s32|u32> x, y", "cvt.<rn|rz|rm|rp>.f32.<s64|u64> x, a",
        "cvt.rn.f64.<s64|u64> a, b", "cvt.rn.f64.<s32|u32> a, x", "cvt<|.ftz>.f64.f32 a, x",
        "cvt.<rn|rz|rm|rp><|.ftz>.f32.f64 x, a", "cvt.sat.f32.f32 x, y",
    ]),
    ("Data Movement and Conversion Instructions: cvt of 16-bit floats", ALL, [
        "cvt<|.ftz>.f32.f16 x, h0", "cvt.f32.bf16 x, h0", "cvt.<rn|rz|rm|rp><|.ftz><|.sat>.f16.f32 h0, x",
        "cvt.<rn|rz><|.relu>.<f16|bf16>.f32 h0, x", "cvt.<rn|rz><|.relu>.<f16x2|bf16x2>.f32 x, y, z",
        "cvt.<rn|rz|rm|rp>.f16.<s32|u32> h0, x", "cvt.rn.bf16.<s32|u32> h0, x", "cvt.<rni|rzi>.<s32|u32>.f16 x, h0",
        "cvt.rn.f16.f64 h0, a", "cvt.f64.f16 a, h0",
    ]),
    ("Data Movement and Conversion Instructions: cvt to tf32", ALL, [
        "cvt.rna.tf32.f32 x, y", "cvt.<rn|rz><|.relu>.tf32.f32 x, y",
    ]),
    ("Data Movement and Conversion Instructions: cvt of fp8", ALL, [
        "cvt.rn.satfinite<|.relu>.<e4m3x2|e5m2x2>.f32 h0, x, y", "cvt.rn.satfinite<|.relu>.<e4m3x2|e5m2x2>.f16x2 h0, x",
        "cvt.rn<|.relu>.f16x2.<e4m3x2|e5m2x2> x, h0",
    ]),
    ("Data Movement and Conversion Instructions: cvt to ue8m0", BLACKWELL, [
        "cvt.<rz|rp>.satfinite.ue8m0x2.f32 h0, x, y", "cvt.rn.bf16x2.ue8m0x2 x, h0",
    ]),
    ("Data Movement and Conversion Instructions: cvta, isspacep, mapa, getctarank", ALL, [
        "cvta.<global|shared|local|const|param>.u64 a, b", "cvta.to.<global|shared|shared::cta|shared::cluster|local>.u64 a, b",
        "isspacep.<global|shared|shared::cta|shared::cluster|local|const> p, a", "mapa.shared::cluster.u32 x, y, z",
        "mapa.u64 a, b, x", "getctarank.shared::cluster.u32 x, y", "getctarank.u64 x, a",
    ]),
]  # fmt: skip

MEMORY = [
    ("Data Movement and Conversion Instructions: ld", ALL, [
        "ld<|.global|.local>.<b8|u8|s8> x, [A]", "ld.shared<|::cta>.<b8|u8|s8> x, [y]",
        "ld<|.global><|.ca|.cg|.cs|.lu|.cv>.<b32|f32> x, [A]",
        "ld.global.<b16|u16|s16> h0, [A]", "ld.global.<b64|f64> a, [A+8]", "ld.global.b128 W, [A]",
        "ld.shared.<b32|u32|f32> x, [y+4]", "ld.shared.b128 W, [y]", "ld.shared::cluster.b32 x, [y]",
        "ld.global<|.nc>.v2.<b32|f32> {x, y}, [A]", "ld.global<|.nc>.v4.b32 {x, y, z, i}, [A]",
        "ld.global<|.nc>.v2.b64 {a, b}, [A]", "ld.shared.v4.f32 {x, y, z, i}, [tid]",
        f"ld.<relaxed|acquire>.{SCOPE}<|.global>.b32 x, [A]", f"ld.<relaxed|acquire>.{SCOPE}.shared::cluster.u32 x, [y]",
        "ld.volatile<|.global>.b32 x, [A]", "ld.volatile.shared.u32 x, [y]",
        "ld.global.L1::<evict_normal|evict_unchanged|evict_first|evict_last|no_allocate>.b32 x, [A]",
        "ld.global.L2::<64B|128B|256B>.b32 x, [A]", "ld.global.L2::cache_hint.b32 x, [A], P",
        "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {x, y, z, i}, [A]",
    ]),
    ("Data Movement and Conversion Instructions: 256-bit ld, st", BLACKWELL, [
        f"ld.global.v8.b32 {v(8)}, [A]", "ld.global.v4.b64 {a, b, c, d}, [A]", f"st.global.v8.b32 [A], {v(8)}",
        "st.global.v4.b64 [A], {a, b, c, d}",
    ]),
    ("Data Movement and Conversion Instructions: st", ALL, [
        "st<|.global|.local><|.wb|.cg|.cs|.wt>.<b32|f32> [A], x", "st.global.<b8|u8> [A], x", "st.global.b16 [A], h0",
        "st.shared<|::cta>.b32 [x], y", "st.shared::cluster.b32 [x], y", "st.shared.v2.b32 [x], {y, z}",
        "st.shared.v4.b32 [x], {x, y, z, i}", "st.shared.b128 [x], W", "st.global.v2.b64 [A], {a, b}",
        f"st.<relaxed|release>.{SCOPE}<|.global>.b32 [A], x", "st.volatile.global.b32 [A], x",
        "st.global.L1::no_allocate.b32 [A], x", "st.global.L2::cache_hint.b32 [A], x, P",
    ]),
    ("Data Movement and Conversion Instructions: prefetch, createpolicy", ALL, [
        "prefetch.global.<L1|L2> [A]", "prefetch<|.param>.tensormap [A]", "prefetchu.L1 [A]",
        "createpolicy.fractional.L2::<evict_last|evict_first|evict_normal|evict_unchanged>.b64 P, 1.0",
    ]),
    ("Parallel Synchronization and Communication Instructions: atom, red", ALL, [
        f"atom<|.relaxed|.acquire|.release|.acq_rel>.{SCOPE}.global.add.u32 x, [A], y",
        "atom<|.global>.<add|min|max>.<u32|s32> x, [A], y", "atom.global.<add|min|max>.u64 a, [A], b",
        "atom.global.<min|max>.s64 a, [A], b", "atom.global.<and|or|xor|exch>.b32 x, [A], y",
        "atom.global.<and|or|xor|exch>.b64 a, [A], b", "atom.global.<inc|dec>.u32 x, [A], y", "atom.global.add.f32 x, [A], y",
        "atom.global.add.f64 a, [A], b", "atom.global.add.noftz.<f16x2|bf16x2> x, [A], y",
        "atom.global.add.noftz.<f16|bf16> h0, [A], h1", "atom.global.cas.b16 h0, [A], h1, h2",
        "atom.global.cas.b32 x, [A], y, z", "atom.global.cas.b64 a, [A], b, c", "atom.shared<|::cta>.add.u32 x, [y], z",
        "atom.shared::cluster.add.u32 x, [y], z", "atom.shared.exch.b32 x, [y], z",
        "atom.global.add.v2.f32 {x, y}, [A], {z, i}", "atom.global.add.v4.f32 {x, y, z, i}, [A], {x, y, z, i}",
        f"red<|.relaxed|.release>.{SCOPE}.global.add.u32 [A], y", "red<|.global>.<add|min|max>.<u32|s32> [A], y",
        "red.global.<and|or|xor>.b32 [A], y", "red.global.<inc|dec>.u32 [A], y", "red.global.add.<f32|u32|s32> [A], x",
        "red.global.add.f64 [A], a", "red.global.add.noftz.<f16x2|bf16x2> [A], x", "red.shared.add.u32 [x], y",
        "red.global.add.v4.f32 [A], {x, y, z, i}", "red.global.add.noftz.v2.bf16x2 [A], {x, y}",
    ]),
    ("Parallel Synchronization and Communication Instructions: membar, fence", ALL, [
        "membar.<cta|gl|sys>", f"fence<|.sc|.acq_rel>.{SCOPE}", "fence.mbarrier_init.release.cluster",
        "fence.proxy.async<|.global|.shared::cta|.shared::cluster>", "fence.proxy.alias",
        f"fence.proxy.tensormap::generic.release.{SCOPE}", f"fence.proxy.tensormap::generic.acquire.{SCOPE} [A], 128",
    ]),
    ("Asynchronous copy: cp.async", ALL, [
        "cp.async.ca.shared<|::cta>.global [x], [A], <4|8|16>", "cp.async.cg.shared<|::cta>.global [x], [A], 16",
        "cp.async.ca.shared.global [x], [A], 16, y", "cp.async.cg.shared.global.L2::128B [x], [A], 16",
        "cp.async.cg.shared.global.L2::cache_hint [x], [A], 16, P", "cp.async.commit_group", "cp.async.wait_group <0|1|7>",
        "cp.async.wait_all", "cp.async.mbarrier.arrive<|.noinc><.shared|.shared::cta>.b64 [x]",
    ]),
    ("Warp Level Matrix Instructions: ldmatrix, stmatrix, movmatrix", ALL, [
        "ldmatrix.sync.aligned.m8n8.x1<|.trans>.shared<|::cta>.b16 {x}, [y]",
        "ldmatrix.sync.aligned.m8n8.x2<|.trans>.shared.b16 {x, z}, [y]",
        f"ldmatrix.sync.aligned.m8n8.x4<|.trans>.shared.b16 {v(4)}, [y]", "stmatrix.sync.aligned.m8n8.x1<|.trans>.shared.b16 [y], {x}",
        "stmatrix.sync.aligned.m8n8.x2<|.trans>.shared.b16 [y], {x, z}", f"stmatrix.sync.aligned.m8n8.x4<|.trans>.shared.b16 [y], {v(4)}",
        f"stmatrix.sync.aligned.x4.m8n8.shared.b16 [y], {v(4)}", "movmatrix.sync.aligned.m8n8.trans.b16 x, y",
    ]),
]  # fmt: skip

WARP = [
    ("Data Movement and Conversion Instructions: shfl.sync", ALL, [
        "shfl.sync.<up|down|bfly|idx>.b32 x, y, z, 0x1f, -1", "shfl.sync.<up|down|bfly|idx>.b32 x|p, y, z, 0x1f, -1",
    ]),
    ("Parallel Synchronization and Communication Instructions: vote, match, activemask, redux, elect", ALL, [
        "vote.sync.<all|any|uni>.pred p, q, -1", "vote.sync.ballot.b32 x, p, -1", "match.any.sync.b32 x, y, -1",
        "match.any.sync.b64 x, a, -1", "match.all.sync.b32 x|p, y, -1", "activemask.b32 x",
        "redux.sync.<add|min|max>.<u32|s32> x, y, -1", "redux.sync.<and|or|xor>.b32 x, y, -1", "elect.sync <x|_>|p, -1",
    ]),
    ("Parallel Synchronization and Communication Instructions: redux.sync of f32", BLACKWELL, [
        "redux.sync.<min|max><|.abs><|.NaN>.f32 x, y, -1",
    ]),
    ("Parallel Synchronization and Communication Instructions: bar, barrier", ALL, [
        "bar<|.cta>.sync <0|x>", "bar<|.cta>.sync 1, <64|x>", "bar<|.cta>.arrive 1, 64",
        "bar.red.popc.u32 x, 1, p", "bar.red.<and|or>.pred p, 1, q", "bar.warp.sync <-1|x>",
        "barrier<|.cta>.sync<|.aligned> 1, 64", "barrier<|.cta>.arrive<|.aligned> 1, 64",
        "barrier.cluster.arrive<|.release|.relaxed><|.aligned>", "barrier.cluster.wait<|.acquire><|.aligned>",
    ]),
    ("Miscellaneous Instructions", ALL, [
        "nanosleep.u32 <20|x>", "trap", "griddepcontrol.<wait|launch_dependents>", "setmaxnreg.<inc|dec>.sync.aligned.u32 248",
    ]),
]  # fmt: skip

MBARRIER = [
    ("mbarrier: init, inval", ALL, [
        "mbarrier.init<.shared|.shared::cta>.b64 [x], 1", "mbarrier.init.b64 [A], y", "mbarrier.inval.shared::cta.b64 [x]",
    ]),
    ("mbarrier: arrive, arrive_drop", ALL, [
        "mbarrier.<arrive|arrive_drop><|.release.cta|.release.cluster><.shared|.shared::cta>.b64 <a|_>, [x]<|, 2|, y>",
        "mbarrier.arrive.relaxed.<cta|cluster>.shared::cta.b64 a, [x]",
        "mbarrier.<arrive|arrive_drop><|.release.cluster>.shared::cluster.b64 _, [x]<|, 2>",
        "mbarrier.<arrive|arrive_drop>.expect_tx<|.release.cta|.release.cluster>.shared::cta.b64 <a|_>, [x], 64",
        "mbarrier.<arrive|arrive_drop>.expect_tx<|.release.cluster>.shared::cluster.b64 _, [x], y",
        "mbarrier.<arrive|arrive_drop>.noComplete.shared::cta.b64 a, [x], 2",
    ]),
    ("mbarrier: expect_tx, complete_tx", ALL, [
        "mbarrier.<expect_tx|complete_tx><|.relaxed.cta>.shared::cta.b64 [x], 64",
        "mbarrier.<expect_tx|complete_tx><|.relaxed.cluster>.shared::cluster.b64 [x], y",
    ]),
    ("mbarrier: test_wait, try_wait, pending_count", ALL, [
        "mbarrier.<test_wait|try_wait><|.acquire.cta|.acquire.cluster>.shared<|::cta>.b64 p, [x], a",
        "mbarrier.<test_wait|try_wait>.parity<|.acquire.cta|.acquire.cluster|.relaxed.cluster>.shared::cta.b64 p, [x], <0|y>",
        "mbarrier.try_wait.shared::cta.b64 p, [x], a, 100",
        "mbarrier.try_wait.parity.shared::cta.b64 p, [x], y, 100", "mbarrier.pending_count.b64 x, a",
    ]),
]  # fmt: skip

COORDINATES = {1: "x", 2: "x, y", 3: "x, y, z", 4: "x, y, z, i", 5: "x, y, z, i, tid"}
BULK = [
    ("cp.async.bulk", ALL, [
        "cp.async.bulk.shared::<cluster|cta>.global.mbarrier::complete_tx::bytes [x], [A], 64, [y]",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [x], [A], 64, [y], P",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [x], [A], z, [y], h0",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[x], [A], z, [y], h0, P",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [x], [z], 64, [y]",
        "cp.async.bulk.global.shared::cta.bulk_group [A], [x], 64",
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [A], [x], 64, P",
        "cp.async.bulk.prefetch.L2.global [A], 64", "cp.async.bulk.commit_group", "cp.async.bulk.wait_group<|.read> <0|3>",
    ]),
    ("cp.async.bulk with a mask of bytes", BLACKWELL, ["cp.async.bulk.global.shared::cta.bulk_group.cp_mask [A], [x], 64, h0"]),
    ("cp.reduce.async.bulk", ALL, [
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.<add|min|max>.<u32|s32|u64> [A], [x], 64",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.<min|max>.s64 [A], [x], 64",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.<and|or|xor>.<b32|b64> [A], [x], 64",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.<inc|dec>.u32 [A], [x], 64",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.<f32|f64|noftz.f16|noftz.bf16> [A], [x], 64",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.<min|max>.<f16|bf16> [A], [x], 64",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.<add|min|max>.<u32|s32> [x], [z], 64, [y]",
    ]),
    ("cp.async.bulk.tensor", ALL, [
        *(
            f"cp.async.bulk.tensor.{n}d.shared::<cluster|cta>.global<|.tile>.mbarrier::complete_tx::bytes [x], [A, {{{c}}}], [y]"
            for n, c in COORDINATES.items()
        ),
        *(
            f"cp.async.bulk.tensor.{n}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
            f"<|.L2::cache_hint> [x], [A, {{{c}}}], [y], h0CACHE" for n, c in COORDINATES.items()
        ),
        *(f"cp.async.bulk.tensor.{n}d.global.shared::cta<|.tile>.bulk_group [A, {{{c}}}], [x]" for n, c in COORDINATES.items()),
        *(f"cp.async.bulk.prefetch.tensor.{n}d.L2.global<|.tile> [A, {{{c}}}]" for n, c in COORDINATES.items()),
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [A, {x, y}], [z], P",
    ]),
    ("cp.async.bulk.tensor of CTA groups", BLACKWELL, [
        "cp.async.bulk.tensor.2d<.cta_group::1|.cta_group::2>.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[x], [A, {y, z}], [i]",
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.cta_group::2 "
        "[x], [A, {x, y, z, i}], [i], h0",
    ]),
    ("cp.reduce.async.bulk.tensor", ALL, [
        *(
            f"cp.reduce.async.bulk.tensor.{n}d.global.shared::cta.<add|min|max|inc|dec|and|or|xor><|.tile>.bulk_group "
            f"[A, {{{c}}}], [x]" for n, c in COORDINATES.items()
        ),
    ]),
    ("st.async, red.async", ALL, [
        "st.async<|.weak>.shared::cluster.mbarrier::complete_tx::bytes.<b32|u32|f32> [x], y, [z]",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [x], a, [z]",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [x], {y, z}, [i]",
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [x], {v(4)}, [z]",
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.<add|min|max>.<u32|s32> [x], y, [z]",
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.<and|or|xor>.b32 [x], y, [z]",
    ]),
    ("st.bulk", BLACKWELL, ["st.bulk.weak.shared::cta [x], 64, 0"]),
    ("clusterlaunchcontrol", BLACKWELL, [
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [x], [y]",
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 [x], [y]",
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, W",
        "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {x, y, z, i}, W",
        "clusterlaunchcontrol.query_cancel.get_first_ctaid::<x|y|z>.b32.b128 x, W",
    ]),
]  # fmt: skip
for _, _, patterns in BULK:  # a cache policy where the form asks for one
    patterns[:] = [
        form.replace("CACHE", ", P" if ".L2::cache_hint" in form else "") for p in patterns for form in expand(p)
    ]


def wgmma_forms():
    for n in range(8, 257, 8):
        for d, ab, k, extra in [
            ("f32", "bf16", 16, ", 0, 1"), ("f32", "f16", 16, ", 1, 0"), ("f16", "f16", 16, ", 0, 0"), ("f32", "tf32", 8, ""),
            ("f32", "e4m3", 32, ""), ("f32", "e5m2", 32, ""), ("f16", "e4m3", 32, ""), ("f16", "e5m2", 32, ""),
        ]:  # fmt: skip
            count = n // 2 if d == "f32" else n // 4
            name = f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{ab}.{ab}"
            yield f"{name} {v(count)}, a, b, p, 1, 1{extra}"
            yield f"{name} {v(count)}, {v(4, 200)}, b, p, 1, -1{extra[:3]}"
    yield f"wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e5m2 {v(4)}, a, b, 0, 1, 1"


WGMMA = [
    ("Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async", HOPPER, list(wgmma_forms())),
    ("Asynchronous Warpgroup Level Matrix Instructions: fence, commit_group, wait_group", HOPPER, [
        "wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned", "wgmma.wait_group.sync.aligned <0|1|7>",
    ]),
]  # fmt: skip
MATRIX = [
    ("Warp Level Matrix Instructions: mma", ALL, [
        f"mma.sync.aligned.m16n8k16.row.col.f32.<bf16.bf16|f16.f16>.f32 {v(4)}, {v(4, 4)}, {v(2, 8)}, {v(4, 10)}",
        f"mma.sync.aligned.m16n8k8.row.col.f32.<bf16.bf16|f16.f16>.f32 {v(4)}, {v(2, 4)}, {{v8}}, {v(4, 10)}",
        f"mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {v(2)}, {v(4, 4)}, {v(2, 8)}, {v(2, 10)}",
        f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {v(4)}, {v(4, 4)}, {v(2, 8)}, {v(4, 10)}",
    ]),
]  # fmt: skip

GROUP = "<.cta_group::1|.cta_group::2>"
MASKS = {1: v(4, 100), 2: v(8, 100)}


def tcgen05_ld_st():
    for shape, per, most in [("32x32b", 1, 128), ("16x64b", 1, 128), ("16x128b", 2, 64), ("16x256b", 4, 32)]:
        n = 1
        while n <= most:
            yield f"tcgen05.ld.sync.aligned.{shape}.x{n}<|.pack::16b>.b32 {v(n * per)}, [x]"
            yield f"tcgen05.st.sync.aligned.{shape}.x{n}<|.unpack::16b>.b32 [x], {v(n * per)}"
            n *= 2
    n = 1
    while n <= 128:
        yield f"tcgen05.ld.sync.aligned.16x32bx2.x{n}<|.pack::16b>.b32 {v(n)}, [x], 16"
        yield f"tcgen05.st.sync.aligned.16x32bx2.x{n}<|.unpack::16b>.b32 [x], 16, {v(n)}"
        n *= 2


def tcgen05_mma(g):
    yield f"tcgen05.mma.cta_group::{g}.kind::<f16|tf32|f8f6f4> [x], a, b, y, <p|!p|0|1>"
    yield f"tcgen05.mma.cta_group::{g}.kind::<f16|tf32|f8f6f4> [x], [z], b, y, p"
    yield f"tcgen05.mma.cta_group::{g}.kind::<f16|tf32> [x], <a|[z]>, b, y, p, <0|15>"
    yield f"tcgen05.mma.cta_group::{g}.kind::f16 [x], <a|[z]>, b, y, {MASKS[g]}, p<|, 3>"
    yield f"tcgen05.mma.cta_group::{g}.kind::f16.collector::a::<fill|use|lastuse|discard> [x], <a|[z]>, b, y, p"


def tcgen05(g):
    return [
        ("tcgen05.alloc, dealloc, relinquish_alloc_permit", BLACKWELL, [
            f"tcgen05.alloc.cta_group::{g}.sync.aligned.shared::cta.b32 [x], <32|64|128|256|512|y>",
            f"tcgen05.alloc.cta_group::{g}.sync.aligned.b32 [A], 32", f"tcgen05.dealloc.cta_group::{g}.sync.aligned.b32 x, <32|y>",
            f"tcgen05.relinquish_alloc_permit.cta_group::{g}.sync.aligned",
        ]),
        ("tcgen05.mma", BLACKWELL, list(tcgen05_mma(g))),
        ("tcgen05.commit", BLACKWELL, [
            f"tcgen05.commit.cta_group::{g}.mbarrier::arrive::one.shared::cluster.b64 [x]",
            f"tcgen05.commit.cta_group::{g}.mbarrier::arrive::one.b64 [A]",
            f"tcgen05.commit.cta_group::{g}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [x], h0",
        ]),
        ("tcgen05.cp", BLACKWELL, [
            f"tcgen05.cp.cta_group::{g}.<128x256b|128x128b|4x256b|64x128b.warpx2::02_13|64x128b.warpx2::01_23|32x128b.warpx4>"
            " [x], a",
        ]),
        ("tcgen05.ld, st", BLACKWELL, list(tcgen05_ld_st())),
        ("tcgen05.wait, fence", BLACKWELL, [
            "tcgen05.wait::<ld|st>.sync.aligned", "tcgen05.fence::<before|after>_thread_sync",
        ]),
        ("tcgen05.ld.red", ULTRA, [
            "tcgen05.ld.red.sync.aligned.32x32b.x2.<min|max>.<u32|s32|f32> {v0, v1}, v9, [x]",
            "tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {v0, v1}, {v9}, [x]",
        ]),
    ]  # fmt: skip


TABLE = [*INTEGER, *FLOAT, *COMPARE, *CONVERT, *MEMORY, *WARP, *MBARRIER, *BULK, *MATRIX]
# One kernel may not use both groups; ptxas does not end well when wgmma meets all the rest.
TABLES = {"cta_group::1": [*TABLE, *tcgen05(1)], "cta_group::2": tcgen05(2), "wgmma": WGMMA}

# What ptxas takes and the simulator refuses, by name: other features than attention kernels need.
REFUSED = [
    ("cvt, stochastic rounding", "sm_100a", "cvt.rs.bf16x2.f32 x, y, z, i"),
    ("cvt to ue8m0 without satfinite", "sm_100a", "cvt.rp.ue8m0x2.f32 h0, x, y"),
    ("tcgen05.shift", "sm_100a", "tcgen05.shift.cta_group::1.down [x]"),
    ("tcgen05.mma.ws", "sm_100a", "tcgen05.mma.ws.cta_group::1.kind::f16 [x], a, b, y, p"),
    ("tcgen05.mma.sp", "sm_100a", "tcgen05.mma.sp.cta_group::1.kind::f16 [x], a, b, [z], y, p"),
    ("tcgen05.mma, block scaling", "sm_100a",
     "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [x], a, b, y, [z], [i], p"),
    ("tcgen05.mma, kind::i8", "sm_100a", "tcgen05.mma.cta_group::1.kind::i8 [x], a, b, y, p"),
    ("cp.async.bulk.tensor, gather4", "sm_100a",
     "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [x], [A, {x, y, z, i, tid}], [y]"),
    ("cp.async.bulk.tensor, im2col", "sm_90a",
     "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [x], [A, {x, y, z}], [y], {h0}"),
    ("tcgen05.cp, decompression", "sm_100a", "tcgen05.cp.cta_group::1.128x256b.b8x16.b6x16_p32 [x], a"),
    ("wgmma, integers", "sm_90a", f"wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {v(4)}, a, b, p"),
    ("wgmma.sp", "sm_90a",
     f"wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {v(4)}, a, b, x, 0, p, 1, 1, 0, 0"),
    ("mma.sp", "sm_90a",
     f"mma.sp.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {v(4)}, {v(4, 4)}, {v(4, 8)}, {v(4, 12)}, x, 0"),
]  # fmt: skip
# What neither takes for that target.
WRONG = [
    ("sm_90a", "add.rn.f32x2 a, b, c"),
    ("sm_90a", "max.f32 x, y, z, i"),
    ("sm_90a", "redux.sync.max.f32 x, y, -1"),
    ("sm_90a", f"ld.global.v8.b32 {v(8)}, [A]"),
    ("sm_90a", "tcgen05.wait::ld.sync.aligned"),
    ("sm_90a", "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, W"),
    ("sm_90a",
     "cp.async.bulk.tensor.2d.cta_group::1.shared::cluster.global.mbarrier::complete_tx::bytes [x], [A, {y, z}], [i]"),
    ("sm_90a", "st.bulk.weak.shared::cta [x], 64, 0"),
    ("sm_90a", "cvt.rs.bf16x2.f32 x, y, z, i"),
    ("sm_100a", "wgmma.fence.sync.aligned"),
    ("sm_100a", f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {v(4)}, a, b, p, 1, 1, 0, 0"),
    ("sm_100a", "tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32 {v0, v1}, v9, [x]"),
    ("sm_100a", "tcgen05.mma.cta_group::1.kind::f16 [x], a, b, y, p, 16"),
    ("sm_100a", "tcgen05.mma.cta_group::1.kind::f8f6f4 [x], a, b, y, p, 3"),
    ("sm_100a", f"tcgen05.mma.cta_group::1.kind::f16 [x], a, b, y, {v(8)}, p"),
    ("sm_100a", "tcgen05.mma.cta_group::1.kind::f16.ashift [x], a, b, y, p"),
    ("sm_100a", f"tcgen05.ld.sync.aligned.32x32b.x3.b32 {v(3)}, [x]"),
    ("sm_100a", f"tcgen05.ld.sync.aligned.32x32b.x4.b32 {v(3)}, [x]"),
    ("sm_100a", f"tcgen05.ld.sync.aligned.16x128b.x128.b32 {v(128)}, [x]"),
    ("sm_100a", "tcgen05.alloc.cta_group::3.sync.aligned.shared::cta.b32 [x], 32"),
    ("sm_100a", "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [x]"),
    ("sm_100a", "setmaxnreg.inc.sync.aligned.u32 100"),
    ("sm_100a", "mbarrier.test_wait.parity.shared::cluster.b64 p, [x], 0"),
    ("sm_100a", "mbarrier.arrive.shared::cluster.b64 a, [x]"),
    ("sm_100a", "cp.async.bulk.tensor.6d.shared::cta.global.mbarrier::complete_tx::bytes [x], [A, {y, z}], [i]"),
    ("sm_100a", "cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes [x], [A, {y, z}], [i]"),
    ("sm_100a", "cp.async.cg.shared.global [x], [A], 8"),
    ("sm_100a", "add.rn.s32 x, y, z"),
    ("sm_100a", "mul.s32 x, y, z"),
    ("sm_100a", "mul.wide.s64 a, b, c"),
    ("sm_100a", "fma.f32 x, y, z, i"),
    ("sm_100a", "fma.rn.sat.bf16 h0, h1, h2, h3"),
    ("sm_100a", "add.sat.u32 x, y, z"),
    ("sm_100a", "div.f32 x, y, z"),
    ("sm_100a", "ex2.f32 x, y"),
    ("sm_100a", "setp.lo.s32 p, x, y"),
    ("sm_100a", "setp.lt.b32 p, x, y"),
    ("sm_100a", "cvt.f16.f32 h0, x"),
    ("sm_100a", "cvt.rn.s32.f32 x, y"),
    ("sm_100a", "cvt.rn.bf16x2.f32 x, y"),
    ("sm_100a", "shfl.sync.left.b32 x, y, z, 0x1f, -1"),
    ("sm_100a", "ld.shared.v3.b32 {x, y, z}, [i]"),
    ("sm_100a", "ld.global.acquire.b32 x, [A]"),
    ("sm_100a", "ld.shared.nc.b32 x, [y]"),
    ("sm_100a", "st.release.global.b32 [A], x"),
    ("sm_100a", "atom.global.add.b32 x, [A], y"),
    ("sm_100a", "atom.global.inc.s32 x, [A], y"),
    ("sm_100a", "red.global.exch.b32 [A], y"),
    ("sm_100a", "fence.proxy.sync"),
    ("sm_100a", "mbarrier.arrive.release.relaxed.cta.shared::cta.b64 _, [x]"),
    ("sm_100a", "mbarrier.try_wait.acquire.relaxed.cta.shared::cta.b64 p, [x], A"),
    ("sm_100a", "tcgen05.mma.cta_group::1.kind::f16.kind::tf32 [x], A, A, y, p"),
    ("sm_100a", "cp.async.bulk.commit_group.commit_group"),
    ("sm_100a", "cp.async.bulk.wait_group.read.read 0"),
    ("sm_100a", "barrier.cluster.wait.release"),
    ("sm_100a", "bar.arrive 1"),
    ("sm_100a", "elect.sync x, -1"),
    ("sm_100a", "no.such.instruction x"),
]  # fmt: skip
