"""Speed of the PTX simulator on an attention-like kernel, every check on, in CPU time: python benchmarks/ptxsim.py

Three kernels: scores and products by tcgen05.mma (S = Q K^T, O += P V) with a softmax between them; the same without
the products; the products alone. What to reach: 100 million lane-instructions and 10 GFLOP of MMA a second.
"""

import argparse
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

import numpy
import ptxsim
from ptxsim_kernels.ptx import (
    DATA,
    ONES,
    POINTER,
    TMEM_WORD,
    descriptor,
    fill,
    init,
    kernel,
    registers,
    store_word,
    wait,
    when,
)

from flash_attn4.arguments import count

BLOCK, D = 128, 64  # queries and keys of a tile, head dimension
Q, K, V = DATA, DATA + BLOCK * D * 2, DATA + 2 * BLOCK * D * 2
S, O = 0, BLOCK  # columns; P goes over S
SMEM = DATA + 3 * BLOCK * D * 2


def idesc(m, n):
    return 1 << 4 | 1 << 7 | 1 << 10 | n // 8 << 17 | m // 16 << 24


def scores():
    """S = Q K^T: D / 16 instructions."""
    text = "mov.b64 c, a; mov.b64 d, b;"
    for step in range(D // 16):
        text += f"tcgen05.mma.cta_group::1.kind::f16 [tmem], c, d, {idesc(BLOCK, BLOCK)}, {int(step > 0)};"
        text += "add.u64 c, c, 256; add.u64 d, d, 256;"  # two 16-byte columns of BLOCK rows
    return text


def output():
    """O += P V: BLOCK / 16 instructions."""
    text = f"mov.b64 d, e; add.u32 y, tmem, {O}; mov.b32 z, tmem;"
    for _ in range(BLOCK // 16):
        text += f"tcgen05.mma.cta_group::1.kind::f16 [y], [z], d, {idesc(BLOCK, D)}, 1;"
        text += "add.u64 d, d, 128; add.u32 z, z, 8;"
    return text


def softmax():
    """A row a thread: exp2 of every score less the largest, packed to bf16 over the scores."""
    text = "mov.b32 r40, 0fFF800000; mov.b32 r41, 0f00000000;"
    for part in range(BLOCK // 32):
        text += f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {registers(0, 32)}, [x+{32 * part}];"
        text += "tcgen05.wait::ld.sync.aligned;"
        text += "".join(f"max.f32 r40, r40, r{i};" for i in range(32))
        text += "".join(f"sub.f32 r{i}, r{i}, r40; ex2.approx.ftz.f32 r{i}, r{i};" for i in range(32))
        text += "".join(f"add.f32 r41, r41, r{i};" for i in range(32))
        text += "".join(f"cvt.rn.bf16x2.f32 r{i}, r{2 * i + 1}, r{2 * i};" for i in range(16))
        text += f"tcgen05.st.sync.aligned.32x32b.x16.b32 [x+{16 * part}], {registers(0, 16)};"
    return text + "tcgen05.wait::st.sync.aligned;"


def commit(barrier):
    return f"tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{barrier}];"


def attention(products, with_softmax, tiles):
    """Barriers: smem products of scores done, smem+8 P written by 128 threads, smem+16 output done."""
    before, after = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
    loop = f"""
    and.b32 i, tile, 1;
    {when("tid == 0", (scores() if products else "") + commit("smem"))}
    {wait("smem", "i")}
    {after}
    {softmax() if with_softmax else ""}
    {before}
    mbarrier.arrive.shared::cta.b64 _, [smem+8];
    {when("tid == 0", wait("smem+8", "i") + after + (output() if products else "") + commit("smem+16"))}
    {wait("smem+16", "i")}
    {after}
    """
    zero = "".join(f"mov.b32 r{i}, 0;" for i in range(32))
    zero += "".join(
        f"tcgen05.st.sync.aligned.32x32b.x32.b32 [x+{column}], {registers(0, 32)};"
        for column in range(0, BLOCK + D, 32)
    )
    body = f"""
    .reg .b32 tile; .reg .b64 e;
    {when("warp == 0", f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+{TMEM_WORD}], 256;")}
    {init(1, 128, 1)}
    {fill(Q, 3 * BLOCK * D * 2, ONES)}
    fence.proxy.async.shared::cta;
    {before} bar.sync 0; {after}
    ld.shared.b32 tmem, [smem+{TMEM_WORD}];
    {descriptor("a", Q, BLOCK * 16, 128)}
    {descriptor("b", K, BLOCK * 16, 128)}
    {descriptor("e", V, D * 16, 128)}
    {{ .reg .b32 t; shl.b32 t, warp, 21; add.u32 x, tmem, t; }}
    {zero} tcgen05.wait::st.sync.aligned;
    {before} bar.sync 0; {after}
    mov.b32 tile, 0;
    TILES:
    {loop}
    add.u32 tile, tile, 1;
    setp.lt.u32 p, tile, {tiles};
    @p bra TILES;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{r0}}, [x+{O}];
    tcgen05.wait::ld.sync.aligned;
    {store_word("g0", "tid", "r0")}
    {before} bar.sync 0; {after}
    {when("warp == 0", "tcgen05.dealloc.cta_group::1.sync.aligned.b32 tmem, 256;")}
    """
    return ptxsim.Module(kernel(body, [POINTER]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiles", type=count, default=64, help="key tiles a run")
    parser.add_argument("--runs", type=count, default=5)
    arguments = parser.parse_args()
    flop = 2 * 2 * BLOCK * BLOCK * D * arguments.tiles
    print(f"{arguments.tiles} tiles of {BLOCK} x {BLOCK}, head dimension {D}; CPU time, median of {arguments.runs}")
    print("| kernel | ms | M lane-instructions | M lane-instructions/s | MMA GFLOP/s |")
    print("|---|---|---|---|---|")
    for name, products, with_softmax in [
        ("softmax and products", True, True),
        ("softmax", False, True),
        ("products", True, False),
    ]:
        module = attention(products, with_softmax, arguments.tiles)
        seconds = []
        for _ in range(arguments.runs):
            out = ptxsim.empty(128, numpy.float32)
            start = time.process_time()
            report = module.launch("k", block=128, smem=SMEM, args=[out], threads=1, schedule="random", seed=1)
            seconds.append(time.process_time() - start)
        # Every weight is exp2(0) = 1 and every v is 1.
        expected = arguments.tiles * BLOCK if products and with_softmax else None
        if expected is not None and not (out == expected).all():
            raise SystemExit(f"{name}: {out} is not {expected}")
        median, lanes = statistics.median(seconds), sum(report.executed.values())
        rate = f"{flop / median / 1e9:.1f}" if products else "-"
        print(f"| {name} | {median * 1e3:.0f} | {lanes / 1e6:.1f} | {lanes / median / 1e6:.0f} | {rate} |")


if __name__ == "__main__":
    main()
