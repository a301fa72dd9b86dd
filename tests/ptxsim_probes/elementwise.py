"""Instructions whose result depends on their operands alone: the table that one probe kernel runs through.

A line is "result opcode operands": r, s, t are 32-bit operands, h, i, j 16-bit ones, d, e, f 64-bit ones, p a
predicate, and u, k, w odd ones of 32, 16 and 64 bits (to divide by); anything else is written as it is. The result's
letter says how wide it is (p: 0 or 1).
"""

EXACT = """
r add.u32 r s
r sub.u32 r s
r mul.lo.u32 r s
r mul.hi.u32 r s
r mul.hi.s32 r s
d mul.wide.u32 r s
d mul.wide.s32 r s
r mul.wide.u16 h i
r mul.wide.s16 h i
h mul.lo.u16 h i
h mul.hi.s16 h i
h mul.hi.u16 h i
d mul.lo.u64 d e
d mul.hi.u64 d e
d mul.hi.s64 d e
r mul24.lo.u32 r s
r mul24.hi.s32 r s
r mad.lo.s32 r s t
r mad.hi.u32 r s t
r mad.hi.s32 r s t
d mad.wide.u32 r s d
d mad.wide.s32 r s d
d mad.lo.u64 d e f
r add.sat.s32 r s
r sub.sat.s32 r s
r mad.hi.sat.s32 r s t
r sad.u32 r s t
r sad.s32 r s t
r abs.s32 r
r neg.s32 r
d abs.s64 d
h neg.s16 h
r min.s32 r s
r max.s32 r s
r min.u32 r s
r max.u32 r s
d min.s64 d e
d max.u64 d e
h min.s16 h i
h max.u16 h i
r and.b32 r s
r or.b32 r s
r xor.b32 r s
r not.b32 r
r cnot.b32 r
d and.b64 d e
h xor.b16 h i
r lop3.b32 r s t 0xCA
r lop3.b32 r s t 0x96
r lop3.b32 r s t 0xE8
r shl.b32 r s
r shr.u32 r s
r shr.s32 r s
d shl.b64 d s
d shr.s64 d s
d shr.u64 d s
h shl.b16 h s
h shr.s16 h s
r shf.l.clamp.b32 r s t
r shf.r.clamp.b32 r s t
r shf.l.wrap.b32 r s t
r shf.r.wrap.b32 r s t
r popc.b32 r
r popc.b64 d
r clz.b32 r
r clz.b64 d
r brev.b32 r
d brev.b64 d
r bfind.u32 r
r bfind.s32 r
r bfind.shiftamt.u32 r
r bfind.u64 d
r bfe.u32 r s t
r bfe.s32 r s t
d bfe.u64 d s t
d bfe.s64 d s t
r bfi.b32 r s t 9
r bfi.b32 r s 5 t
d bfi.b64 d e s t
r bmsk.clamp.b32 r s
r bmsk.wrap.b32 r s
r szext.clamp.s32 r s
r szext.wrap.u32 r s
r fns.b32 r 3 2
r prmt.b32 r s t
r prmt.b32.f4e r s t
r prmt.b32.b4e r s t
r prmt.b32.rc8 r s t
r prmt.b32.ecl r s t
r prmt.b32.ecr r s t
r prmt.b32.rc16 r s t
r dp4a.u32.u32 r s t
r dp4a.s32.s32 r s t
r dp4a.u32.s32 r s t
r dp2a.lo.s32.s32 r s t
r dp2a.hi.u32.u32 r s t
r selp.b32 r s p
r slct.b32.s32 r s t
r slct.f32.f32 r s t
p setp.lt.s32 r s
p setp.hs.u32 r s
p setp.eq.b32 r s
p setp.ge.s64 d e
p setp.lt.u16 h i
p setp.lt.f32 r s
p setp.ge.f32 r s
p setp.ne.f32 r s
p setp.equ.f32 r s
p setp.neu.f32 r s
p setp.ltu.f32 r s
p setp.geu.f32 r s
p setp.num.f32 r s
p setp.nan.f32 r s
p setp.lt.ftz.f32 r s
p setp.gt.f64 d e
p setp.gtu.f64 d e
p setp.lt.f16 h i
p setp.leu.bf16 h i
r set.lt.u32.f32 r s
p testp.finite.f32 r
p testp.infinite.f32 r
p testp.number.f32 r
p testp.notanumber.f32 r
p testp.normal.f32 r
p testp.subnormal.f32 r
p testp.subnormal.f64 d
r add.f32 r s
r add.rz.f32 r s
r add.rm.f32 r s
r add.rp.f32 r s
r add.ftz.f32 r s
r add.sat.f32 r s
r sub.f32 r s
r sub.rm.ftz.f32 r s
r mul.f32 r s
r mul.rz.f32 r s
r mul.rp.f32 r s
r mul.ftz.f32 r s
r mul.ftz.sat.f32 r s
r fma.rn.f32 r s t
r fma.rz.f32 r s t
r fma.rm.f32 r s t
r fma.rp.f32 r s t
r fma.rn.ftz.f32 r s t
r fma.rn.sat.f32 r s t
r div.rn.f32 r s
r div.rz.f32 r s
r div.rp.ftz.f32 r s
r rcp.rn.f32 r
r rcp.rz.f32 r
r rcp.rn.ftz.f32 r
r sqrt.rn.f32 r
r sqrt.rm.f32 r
r sqrt.rn.ftz.f32 r
r abs.f32 r
r abs.ftz.f32 r
r neg.f32 r
r neg.ftz.f32 r
r copysign.f32 r s
r min.f32 r s
r max.f32 r s
r min.ftz.f32 r s
r max.NaN.f32 r s
r min.NaN.ftz.f32 r s
r max.xorsign.abs.f32 r s
d add.f64 d e
d add.rm.f64 d e
d mul.f64 d e
d mul.rz.f64 d e
d fma.rn.f64 d e f
d fma.rp.f64 d e f
d div.rn.f64 d e
d rcp.rn.f64 d
d sqrt.rn.f64 d
d min.f64 d e
d max.f64 d e
h add.f16 h i
h add.ftz.sat.f16 h i
h sub.f16 h i
h mul.f16 h i
h fma.rn.f16 h i j
h fma.rn.relu.f16 h i j
h neg.f16 h
h abs.f16 h
h min.f16 h i
h max.NaN.f16 h i
r add.f16x2 r s
r sub.f16x2 r s
r mul.ftz.f16x2 r s
r fma.rn.f16x2 r s t
r fma.rn.sat.f16x2 r s t
r fma.rn.relu.f16x2 r s t
r max.f16x2 r s
r min.NaN.f16x2 r s
r max.NaN.xorsign.abs.f16x2 r s
r neg.f16x2 r
r abs.f16x2 r
h add.bf16 h i
h sub.bf16 h i
h mul.bf16 h i
h fma.rn.bf16 h i j
h fma.rn.relu.bf16 h i j
r add.bf16x2 r s
r sub.bf16x2 r s
r mul.bf16x2 r s
r fma.rn.bf16x2 r s t
r fma.rn.relu.bf16x2 r s t
r max.bf16x2 r s
r min.bf16x2 r s
r max.NaN.bf16x2 r s
r neg.bf16x2 r
r abs.bf16x2 r
h cvt.rn.f16.f32 r
h cvt.rz.f16.f32 r
h cvt.rm.f16.f32 r
h cvt.rp.f16.f32 r
h cvt.rn.ftz.f16.f32 r
h cvt.rn.sat.f16.f32 r
h cvt.rn.relu.f16.f32 r
h cvt.rn.bf16.f32 r
h cvt.rz.bf16.f32 r
h cvt.rn.relu.bf16.f32 r
r cvt.rn.f16x2.f32 r s
r cvt.rz.f16x2.f32 r s
r cvt.rn.relu.f16x2.f32 r s
r cvt.rn.bf16x2.f32 r s
r cvt.rz.bf16x2.f32 r s
r cvt.rn.relu.bf16x2.f32 r s
r cvt.rna.tf32.f32 r
r cvt.rn.tf32.f32 r
r cvt.rz.tf32.f32 r
h cvt.rn.satfinite.e4m3x2.f32 r s
h cvt.rn.satfinite.e5m2x2.f32 r s
h cvt.rn.satfinite.relu.e4m3x2.f32 r s
h cvt.rn.satfinite.e4m3x2.f16x2 r
h cvt.rn.satfinite.e5m2x2.f16x2 r
r cvt.rn.f16x2.e4m3x2 h
r cvt.rn.f16x2.e5m2x2 h
r cvt.f32.f16 h
r cvt.f32.bf16 h
r cvt.ftz.f32.f16 h
d cvt.f64.f32 r
d cvt.ftz.f64.f32 r
r cvt.rn.f32.f64 d
r cvt.rz.f32.f64 d
r cvt.rp.ftz.f32.f64 d
h cvt.rn.f16.f64 d
r cvt.rni.s32.f32 r
r cvt.rzi.s32.f32 r
r cvt.rmi.s32.f32 r
r cvt.rpi.s32.f32 r
r cvt.rzi.u32.f32 r
r cvt.rzi.ftz.u32.f32 r
d cvt.rzi.s64.f32 r
d cvt.rni.u64.f32 r
d cvt.rzi.s64.f64 d
r cvt.rzi.s32.f64 d
h cvt.rzi.s16.f32 r
h cvt.rni.u16.f16 h
r cvt.rni.f32.f32 r
r cvt.rmi.f32.f32 r
r cvt.rpi.ftz.f32.f32 r
r cvt.sat.f32.f32 r
r cvt.rn.f32.s32 r
r cvt.rz.f32.u32 r
r cvt.rp.f32.s64 d
r cvt.rn.f32.u64 d
r cvt.rn.f32.s16 h
d cvt.rn.f64.s32 r
d cvt.rn.f64.u64 d
h cvt.rn.f16.s32 r
h cvt.rz.f16.u32 r
h cvt.rn.bf16.s32 r
h cvt.rn.bf16.u64 d
d cvt.s64.s32 r
d cvt.u64.u32 r
d cvt.s64.s16 h
r cvt.u32.u64 d
r cvt.s32.s16 h
r cvt.u32.u16 h
h cvt.u16.u32 r
r cvt.sat.s32.s64 d
r cvt.sat.u32.s32 r
h cvt.sat.s16.s32 r
h cvt.sat.u16.s32 r
r cvt.s32.s8 r
r cvt.u32.u8 r
h cvt.sat.s8.s32 r
r div.u32 r u
r div.s32 r u
r rem.u32 r u
r rem.s32 r u
h div.s16 h k
h rem.u16 h k
d div.u64 d w
d div.s64 d w
d rem.s64 d w
r mad.lo.u32 r s t
r mad24.lo.s32 r s t
d mad.hi.s64 d e f
h mad.lo.s16 h i j
r set.le.u32.u32 r s
r set.neu.f32.f32 r s
p setp.lt.and.s32 r s p
p setp.ge.or.f32 r s p
p setp.gt.xor.u32 r s !p
p setp.ne.s16 h i
p setp.ls.u32 r s
p setp.num.f64 d e
p setp.equ.bf16 h i
p setp.geu.f16 h i
d selp.f64 d e p
h selp.b16 h i p
d slct.f64.s32 d e r
d copysign.f64 d e
d neg.f64 d
d abs.f64 d
d sub.rp.f64 d e
d div.rz.f64 d e
d sqrt.rp.f64 d
r sub.rz.f32 r s
r fma.rz.sat.f32 r s t
r fma.rp.ftz.f32 r s t
r div.rm.f32 r s
r rcp.rp.f32 r
r sqrt.rz.f32 r
r min.NaN.f32 r s
r min.xorsign.abs.f32 r s
h fma.rn.sat.f16 h i j
h fma.rn.ftz.f16 h i j
h mul.sat.f16 h i
h min.NaN.f16 h i
h max.xorsign.abs.f16 h i
h max.bf16 h i
h min.NaN.bf16 h i
h neg.bf16 h
r fma.rn.ftz.f16x2 r s t
r add.sat.f16x2 r s
r min.NaN.xorsign.abs.bf16x2 r s
p setp.lt.f16x2 r s
h cvt.rn.satfinite.relu.e5m2x2.f32 r s
h cvt.rn.satfinite.relu.e4m3x2.f16x2 r
r cvt.rn.relu.f16x2.e4m3x2 h
r cvt.rn.relu.tf32.f32 r
h cvt.rz.relu.bf16.f32 r
h cvt.rm.ftz.f16.f32 r
h cvt.rp.sat.f16.f32 r
d cvt.f64.f16 h
h cvt.rz.f16.f64 d
h cvt.rn.f16.s64 d
h cvt.rm.f16.s16 h
h cvt.rn.bf16.s16 h
h cvt.rp.bf16.u32 r
r cvt.rzi.s32.f16 h
r cvt.rni.u32.bf16 h
d cvt.rpi.s64.bf16 h
h cvt.rni.f16.f16 h
h cvt.rzi.s16.f64 d
d cvt.rmi.u64.f64 d
d cvt.rni.f64.f64 d
r cvt.rm.f32.u64 d
r cvt.rz.f32.s64 d
r cvt.rmi.ftz.f32.f32 r
r cvt.rni.sat.f32.f32 r
r cvt.rni.ftz.s32.f32 r
r cvt.sat.u32.s64 d
d cvt.sat.u64.s32 r
d cvt.s64.s8 d
h cvt.u16.u64 d
h cvt.s16.s8 r
r cvt.sat.u8.s32 r
r cvt.sat.s32.u32 r
r shf.l.clamp.b32 r s 40
r shr.s32 r 33
h shr.u16 h 17
d shl.b64 d 64
r bfi.b32 r s 40 3
r bfe.s32 r 31 9
r lop3.b32 r s t 0x1B
r mov.b32 {h,i}
d mov.b64 {r,s}
d mov.b64 {h,i,j,h}
"""

# Largest allowed difference in units of the last place of an f32 result, or of 2**-24 absolutely where noted: what the
# manual allows, so that any chip's answer and the simulator's may differ by twice that.
APPROXIMATE = """
r ex2.approx.f32 r
r ex2.approx.ftz.f32 r
r lg2.approx.f32 r
r lg2.approx.ftz.f32 r
r rcp.approx.f32 r
r rcp.approx.ftz.f32 r
r rsqrt.approx.f32 r
r rsqrt.approx.ftz.f32 r
r sqrt.approx.f32 r
r div.approx.f32 r s
r div.full.f32 r s
r tanh.approx.f32 r
r sin.approx.f32 r
r cos.approx.f32 r
h ex2.approx.f16 h
r ex2.approx.f16x2 r
r ex2.approx.ftz.bf16x2 r
h tanh.approx.f16 h
r tanh.approx.bf16x2 r
"""


def parse(table):
    """[(result letter, opcode, [operands])]"""
    return [(words[0], words[1], words[2:]) for words in map(str.split, table.strip().splitlines())]


def body(table):
    """One word, or two, a thread and line: out[line * threads + tid] of 64 bits. Operands from g0: 64 bits each."""
    declare = ".reg .b64 d, e, f, rd; .reg .b32 r, s, t, rr; .reg .b16 h, i2, j2, rh; .reg .pred pp, rp; .reg .b64 at;"
    operands = {"i": "i2", "j": "j2", "p": "pp", "!p": "!pp", "{h,i}": "{h, i2}", "{h,i,j,h}": "{h, i2, j2, h}"}
    lines = [
        declare,
        "mad.wide.u32 at, tid, 24, g0;",
        "ld.global.b64 d, [at]; ld.global.b64 e, [at+8]; ld.global.b64 f, [at+16];",
        "cvt.u32.u64 r, d; cvt.u32.u64 s, e; cvt.u32.u64 t, f;",
        "cvt.u16.u32 h, r; cvt.u16.u32 i2, s; cvt.u16.u32 j2, t;",
        "setp.lt.s32 pp, t, 0;",
        ".reg .b32 u; .reg .b16 k; .reg .b64 w; or.b32 u, s, 1; or.b16 k, i2, 1; or.b64 w, e, 1;",
        "mad.wide.u32 at, tid, 8, g1;",
    ]
    for n, (result, opcode, args) in enumerate(parse(table)):
        given = ", ".join(operands.get(a, a) for a in args)
        target = {"h": "rh", "r": "rr", "d": "rd", "p": "rp"}[result]
        lines.append(f"{opcode} {target}, {given};")
        lines.append(
            {"h": "cvt.u64.u16 rd, rh;", "r": "cvt.u64.u32 rd, rr;", "d": "", "p": "selp.b64 rd, 1, 0, rp;"}[result]
        )
        lines.append(f"st.global.b64 [at+{n * 8 * 256}], rd;")
    return "{" + "\n".join(lines) + "}"
