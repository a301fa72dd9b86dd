"""Kernels in Triton's language, compiled by Triton for sm_90 and sm_100, give numpy's answers in the simulator.

Nobody here wrote their PTX. They follow the rules of practice, not all of the manual's: each test says which.
"""

import math

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
from ptxsim_kernels.compile_triton import Descriptor, run  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CAPABILITIES = pytest.mark.parametrize("capability", [100, 90])


def integers(*shape, dtype, seed=0, high=3):
    """Small whole numbers, so that every product and sum is exact."""
    values = np.random.default_rng(seed).integers(-high, high + 1, shape)
    return torch.from_numpy(values.astype(np.float32)).to(dtype)


def unwritten(*shape, dtype=F32):
    return torch.full(shape, math.nan, dtype=dtype)


def practices(report):
    """Which rules of the manual the kernel bends, as a string. A1 is not one of them."""
    return " ".join(name for name, count in report.practice.items() if count and name != "A1")


def check_known_findings(report, kind, place, other):
    """What the simulator holds against Triton's own code, and rightly: no less and no more than this."""
    assert report.finished
    assert report.findings
    for f in report.findings:
        assert (f.kind, place in f.where, other in f.other) == (kind, True, True), report


@triton.jit
def product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, AT: tl.constexpr, BT: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    if AT:
        x = tl.trans(tl.load(a + k[:, None] * M + m[None, :]))
    else:
        x = tl.load(a + m[:, None] * K + k[None, :])
    if BT:
        y = tl.trans(tl.load(b + n[:, None] * K + k[None, :]))
    else:
        y = tl.load(b + k[:, None] * N + n[None, :])
    z = tl.dot(x, y)
    tl.store(c + m[:, None] * N + n[None, :], z.to(c.dtype.element_ty))


@CAPABILITIES
@pytest.mark.parametrize(
    "m, n, k, dtype, transposed, warps",
    [
        (128, 128, 64, BF16, "", 4),
        (64, 64, 64, F16, "", 4),
        (256, 64, 32, BF16, "", 8),
        (128, 256, 16, F16, "", 8),
        (64, 128, 128, BF16, "a", 4),
        (128, 64, 64, BF16, "b", 4),
        (128, 32, 64, F16, "ab", 4),
        (128, 64, 64, E4M3, "", 4),
        (64, 128, 32, E5M2, "b", 4),
        (128, 64, 32, F32, "", 4),
        (64, 64, 16, F32, "b", 4),
    ],
)
def test_product(capability, m, n, k, dtype, transposed, warps):
    a, b, c = integers(m, k, dtype=dtype), integers(k, n, dtype=dtype, seed=1), unwritten(m, n)
    report = run(
        product,
        1,
        {
            "a": a.T.contiguous() if "a" in transposed else a,
            "b": b.T.contiguous() if "b" in transposed else b,
            "c": c,
        },
        {"M": m, "N": n, "K": k, "AT": "a" in transposed, "BT": "b" in transposed},
        capability,
        {"num_warps": warps},
    )
    assert np.array_equal(c.numpy(), a.float().numpy() @ b.float().numpy())
    assert practices(report) == {100: "P1 P4", 90: ""}[capability]


@triton.jit
def pipelined(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):
    m, n, k = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    z = tl.zeros((M, N), dtype=tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        x = tl.load(a + m[:, None] * K + (start + k)[None, :])
        y = tl.load(b + (start + k)[:, None] * N + n[None, :])
        z = tl.dot(x, y, z)
    tl.store(c + m[:, None] * N + n[None, :], z)


@CAPABILITIES
@pytest.mark.parametrize("schedule", ["early", "late", "random"])
def test_pipelined_product(capability, schedule):
    a, b, c = integers(128, 192, dtype=BF16), integers(192, 64, dtype=BF16, seed=1), unwritten(128, 64)
    values, constants = {"a": a, "b": b, "c": c, "K": 192}, {"M": 64, "N": 64, "BK": 32, "STAGES": 3}
    report = run(pipelined, 2, values, constants, capability, schedule=schedule, seed=3)
    assert np.array_equal(c.numpy(), a.float().numpy() @ b.float().numpy())
    assert practices(report) == {100: "P1", 90: ""}[capability]


@triton.jit
def split_k(a, b, c, K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.program_id(0) * BK + tl.arange(0, BK)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    tl.atomic_add(c + m[:, None] * N + n[None, :], tl.dot(x, y), sem="relaxed")


@CAPABILITIES
def test_split_k(capability):
    a, b, c = integers(64, 128, dtype=F16), integers(128, 64, dtype=F16, seed=1), torch.zeros(64, 64)
    run(split_k, 4, {"a": a, "b": b, "c": c}, {"K": 128, "M": 64, "N": 64, "BK": 32}, capability)
    assert np.array_equal(c.numpy(), a.float().numpy() @ b.float().numpy())


@triton.jit
def edges(a, b, c, LM, LN, LK, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * LK + k[None, :], mask=(m[:, None] < LM) & (k[None, :] < LK), other=0)
    y = tl.load(b + k[:, None] * LN + n[None, :], mask=(k[:, None] < LK) & (n[None, :] < LN), other=0)
    tl.store(c + m[:, None] * LN + n[None, :], tl.dot(x, y), mask=(m[:, None] < LM) & (n[None, :] < LN))


@CAPABILITIES
def test_masked_edges(capability):
    a, b, c = integers(97, 31, dtype=BF16), integers(31, 75, dtype=BF16, seed=1), unwritten(97, 75)
    run(edges, (2, 2), {"a": a, "b": b, "c": c, "LM": 97, "LN": 75, "LK": 31}, {"M": 64, "N": 64, "K": 32}, capability)
    assert np.array_equal(c.numpy(), a.float().numpy() @ b.float().numpy())


@triton.jit
def chained(a, b, d, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + n[None, :])
    z = tl.dot(x, y)
    z = z - tl.max(z, 1)[:, None]
    w = tl.load(d + n[:, None] * K + k[None, :])
    tl.store(c + m[:, None] * K + k[None, :], tl.dot(z.to(a.dtype.element_ty), w))


@CAPABILITIES
def test_product_of_a_product(capability):
    a, b, d = integers(64, 32, dtype=F16), integers(32, 64, dtype=F16, seed=1), integers(64, 32, dtype=F16, seed=2)
    c = unwritten(64, 32)
    run(chained, 1, {"a": a, "b": b, "d": d, "c": c}, {"M": 64, "N": 64, "K": 32}, capability)
    z = a.float().numpy() @ b.float().numpy()
    assert np.array_equal(c.numpy(), (z - z.max(1, keepdims=True)) @ d.float().numpy())


@triton.jit
def attention(q, k, v, o, scale, LEN, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    i, d = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    x = tl.load(q + i[:, None] * D + d[None, :])
    m_i, l_i = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * M, N):
        j = start + tl.arange(0, N)
        s = tl.dot(x, tl.trans(tl.load(k + j[:, None] * D + d[None, :]))) * scale
        s = tl.where(i[:, None] >= j[None, :], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype.element_ty), tl.load(v + j[:, None] * D + d[None, :]), acc * alpha[:, None])
        m_i = m_new
    tl.store(o + i[:, None] * D + d[None, :], acc / l_i[:, None])


@CAPABILITIES
def test_attention(capability):
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.standard_normal((128, 64)).astype(np.float32)).to(BF16) for _ in range(3))
    o = unwritten(128, 64)
    scale = 1 / 8 / math.log(2)
    report = run(
        attention,
        2,
        {"q": q, "k": k, "v": v, "o": o, "scale": scale, "LEN": 128},
        {"M": 64, "N": 64, "D": 64},
        capability,
        check=False,
    )
    s = q.double().numpy() @ k.double().numpy().T / 8
    s[np.triu_indices(128, 1)] = -np.inf
    p = np.exp(s - s.max(1, keepdims=True))
    assert np.abs(o.numpy() - p / p.sum(1, keepdims=True) @ v.double().numpy()).max() < 0.02
    if capability == 90:
        # The fence that is to show the stores of v to the tensor core comes after the barrier.
        check_known_findings(report, "proxy", "wgmma", "st.shared")
    else:
        assert not report.findings, report
        assert practices(report) == "P1 P2"


@triton.jit
def batched_gelu(x, w, bias, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    batch = tl.program_id(0)
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(x + batch * M * K + m[:, None] * K + k[None, :])
    b = tl.load(w + batch * K * N + k[:, None] * N + n[None, :])
    z = tl.dot(a, b) + tl.load(bias + batch * N + n)[None, :]
    z = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))
    tl.store(out + batch * M * N + m[:, None] * N + n[None, :], z.to(out.dtype.element_ty))


@CAPABILITIES
def test_batched_product_with_bias_and_gelu(capability):
    x, w, bias = integers(3, 64, 32, dtype=BF16), integers(3, 32, 64, dtype=BF16, seed=1), integers(3, 64, dtype=F32)
    x = x / 8
    out = unwritten(3, 64, 64, dtype=F16)
    values = {"x": x, "w": w, "bias": bias, "out": out}
    report = run(batched_gelu, 3, values, {"M": 64, "N": 64, "K": 32}, capability, check=False)
    if capability == 90:
        # The accumulator's zeros are moved into its registers between the wgmma.fence and the wgmma, which ends it.
        assert report.kinds == {"wgmma"}, report
        assert all("after the last wgmma.fence" in f.sentence for f in report.findings), report
        return
    z = x.double() @ w.double() + bias[:, None].double()
    expected = 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))
    assert torch.allclose(out.double(), expected, rtol=2**-10, atol=2**-14)
    assert not report.findings, report
    assert practices(report) == "P1 P2 P4"


@triton.jit
def persistent(a, b, c, SM, SN, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    tiles_m, tiles_n = SM // M, SN // N
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        group = tile // (GROUP * tiles_n)
        height = min(tiles_m - group * GROUP, GROUP)
        row = (group * GROUP + tile % (GROUP * tiles_n) % height) * M + m
        column = tile % (GROUP * tiles_n) // height * N + n
        z = tl.zeros((M, N), dtype=tl.float32)
        for start in tl.range(0, K, BK, num_stages=2):
            x = tl.load(a + row[:, None] * K + (start + k)[None, :])
            y = tl.load(b + (start + k)[:, None] * SN + column[None, :])
            z = tl.dot(x, y, z)
        tl.store(c + row[:, None] * SN + column[None, :], z)


@CAPABILITIES
@pytest.mark.parametrize("schedule", ["early", "late"])
def test_persistent_product_in_groups_of_rows(capability, schedule):
    a, b, c = integers(192, 64, dtype=F16), integers(64, 128, dtype=F16, seed=1), unwritten(192, 128)
    values = {"a": a, "b": b, "c": c, "SM": 192, "SN": 128, "K": 64}
    report = run(persistent, 2, values, {"M": 64, "N": 64, "BK": 32, "GROUP": 2}, capability, schedule=schedule)
    assert np.array_equal(c.numpy(), a.float().numpy() @ b.float().numpy())
    assert practices(report) == {100: "P1", 90: ""}[capability]


@triton.jit
def scaled(a, b, a_scale, b_scale, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    z = tl.zeros((M, N), dtype=tl.float32)
    for block in range(K // BK):
        x = tl.load(a + m[:, None] * K + (block * BK + k)[None, :])
        y = tl.load(b + n[None, :] * K + (block * BK + k)[:, None])
        scale = tl.load(a_scale + m * (K // BK) + block)[:, None] * tl.load(b_scale + block)
        z += tl.dot(x, y) * scale
    tl.store(c + m[:, None] * N + n[None, :], z.to(c.dtype.element_ty))


@CAPABILITIES
def test_mixed_fp8_with_block_scales(capability):
    a, b = integers(64, 128, dtype=E4M3), integers(64, 128, dtype=E5M2, seed=1)
    a_scale, b_scale = 2.0 ** integers(64, 4, dtype=F32, seed=2), 2.0 ** integers(4, dtype=F32, seed=3)
    c = unwritten(64, 64)
    values = {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale, "c": c}
    report = run(scaled, 1, values, {"M": 64, "N": 64, "K": 128, "BK": 32}, capability)
    scale = (a_scale * b_scale).repeat_interleave(32, 1)
    assert torch.equal(c, (a.float() * scale) @ b.float().T)
    assert practices(report) == {100: "P1 P2", 90: ""}[capability]


@triton.jit
def experts(x, w, rows, chosen, out, COUNT, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Rows gathered for an expert, multiplied by its weights, scattered back."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    place = tl.program_id(0) * M + m
    row = tl.load(rows + place, mask=place < COUNT, other=-1)
    expert = tl.load(chosen + tl.program_id(0))
    a = tl.load(x + row[:, None] * K + k[None, :], mask=row[:, None] >= 0, other=0)
    b = tl.load(w + expert * K * N + n[None, :] * K + k[:, None])
    tl.store(out + row[:, None] * N + n[None, :], tl.dot(a, b), mask=row[:, None] >= 0)


@CAPABILITIES
def test_gathered_rows(capability):
    rng = np.random.default_rng(7)
    x, w, out = integers(110, 32, dtype=BF16), integers(3, 64, 32, dtype=BF16, seed=1), unwritten(110, 64)
    rows = torch.from_numpy(rng.permutation(110).astype(np.int32))
    values = {"x": x, "w": w, "rows": rows, "chosen": torch.tensor([2, 0], dtype=torch.int32), "out": out, "COUNT": 110}
    report = run(experts, 2, values, {"M": 64, "N": 64, "K": 32}, capability)
    assert torch.equal(out[rows[:64]], x[rows[:64]].float() @ w[2].float().T)
    assert torch.equal(out[rows[64:]], x[rows[64:]].float() @ w[0].float().T)
    assert practices(report) == {100: "P1 P4", 90: ""}[capability]


@triton.jit
def dequantised(x, w, zero, out, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr):
    """out = (w - zero) x: the 8-bit weights become bfloat16 in registers; K ends within a block."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    z = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, K, BK):
        inside = start + k < K
        a = tl.load(w + m[:, None] * K + (start + k)[None, :], mask=inside[None, :], other=0)
        a = (a.to(tl.int16) - tl.load(zero + m)[:, None].to(tl.int16)).to(x.dtype.element_ty)
        b = tl.load(x + (start + k)[:, None] * N + n[None, :], mask=inside[:, None], other=0)
        z = tl.dot(a, b, z)
    tl.store(out + m[:, None] * N + n[None, :], z)


@CAPABILITIES
def test_eight_bit_weights_with_a_tail_of_k(capability):
    rng = np.random.default_rng(5)
    w, zero = (torch.from_numpy(rng.integers(0, 16, shape).astype(np.uint8)) for shape in ((64, 83), (64,)))
    x, out = integers(83, 64, dtype=BF16), unwritten(64, 64)
    values = {"x": x, "w": w, "zero": zero, "out": out, "K": 83}
    report = run(dequantised, 1, values, {"M": 64, "N": 64, "BK": 32}, capability)
    assert torch.equal(out, (w.float() - zero.float()[:, None]) @ x.float())
    assert practices(report) == {100: "P1", 90: ""}[capability]


@triton.jit
def gram(x, c, M: tl.constexpr, K: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    a = tl.load(x + k[:, None] * M + m[None, :])
    z = tl.dot(tl.trans(a), a, input_precision="tf32")
    tl.store(c + m[:, None] * M + m[None, :], z)


@CAPABILITIES
def test_tf32_of_a_tile_and_its_transpose(capability):
    # tf32 reads 11 bits of the significand: what is below them does not matter.
    x, c = integers(32, 64, dtype=F32, high=31), unwritten(64, 64)
    report = run(gram, 1, {"x": x * (1 + 2.0**-15), "c": c}, {"M": 64, "K": 32}, capability)
    assert torch.equal(c, x.T @ x)
    assert practices(report) == {100: "P1 P4", 90: ""}[capability]


@triton.jit
def decode(
    q, k, v, pages, lengths, o, lse, scale, PAGES: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr
):
    """One query of G heads that share a head of k and v, in pages of P keys; the same heads again fill M up to 64."""
    batch = tl.program_id(0)
    m, d, j = tl.arange(0, 64), tl.arange(0, D), tl.arange(0, P)
    x = tl.load(q + (batch * G + m % G)[:, None] * D + d[None, :])
    length = tl.load(lengths + batch)
    m_i, l_i = tl.full((64,), float("-inf"), tl.float32), tl.zeros((64,), tl.float32)
    acc = tl.zeros((64, D), tl.float32)
    for start in range(0, length, P):
        page = tl.load(pages + batch * PAGES + start // P)
        keys = (page * P + j)[:, None] * D + d[None, :]
        s = tl.dot(x, tl.trans(tl.load(k + keys))) * scale
        s = tl.where((start + j)[None, :] < length, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype.element_ty), tl.load(v + keys))
        m_i = m_new
    tl.store(o + (batch * G + m)[:, None] * D + d[None, :], acc / l_i[:, None], mask=m[:, None] < G)
    tl.store(lse + batch * G + m, (m_i + tl.log2(l_i)) * 0.6931471805599453, mask=m < G)


@CAPABILITIES
def test_paged_decode_of_grouped_heads(capability):
    rng = np.random.default_rng(1)
    q = torch.from_numpy(rng.standard_normal((2, 4, 64)).astype(np.float32)).to(F16)
    k, v = (torch.from_numpy(rng.standard_normal((6, 32, 64)).astype(np.float32)).to(F16) for _ in range(2))
    pages, lengths = torch.tensor([[4, 1, 3], [0, 5, 2]], dtype=torch.int32), torch.tensor([70, 33], dtype=torch.int32)
    o, lse = unwritten(2, 4, 64), unwritten(2, 4)
    values = {"q": q, "k": k, "v": v, "pages": pages, "lengths": lengths, "o": o, "lse": lse}
    report = run(
        decode,
        2,
        {**values, "scale": 1 / 8 / math.log(2)},
        {"PAGES": 3, "G": 4, "D": 64, "P": 32},
        capability,
        check=False,
    )
    for batch, length in enumerate(lengths.tolist()):
        keys, also = (x[pages[batch].long()].reshape(96, 64)[:length].double() for x in (k, v))
        s = q[batch].double() @ keys.T / 8
        assert (o[batch] - torch.softmax(s, 1) @ also).abs().max() < 0.002
        assert (lse[batch] - torch.logsumexp(s, 1)).abs().max() < 1e-5
    if capability == 90:
        check_known_findings(report, "proxy", "wgmma", "st.shared")
    else:
        assert not report.findings, report
        assert practices(report) == "P1 P2"


@triton.jit
def descriptors(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, SPECIAL: tl.constexpr):
    m = tl.program_id(0) * M
    z = tl.zeros((M, N), dtype=tl.float32)
    for start in tl.range(0, K, BK, num_stages=3, warp_specialize=SPECIAL):
        z = tl.dot(a.load([m, start]), b.load([start, 0]), z)
    c.store([m, 0], z.to(tl.bfloat16))


@pytest.mark.parametrize(
    "capability, dtype",
    [(100, BF16), (90, BF16), (100, F16), (90, F16)],
)
def test_tensor_maps(capability, dtype):
    # 120 rows in tiles of 128 and a K of 100 in steps of 32: boxes reach past every edge.
    a, b = integers(120, 104, dtype=dtype, high=1), integers(104, 64, dtype=dtype, seed=1, high=1)
    c = unwritten(120, 64, dtype=BF16)
    report = run(
        descriptors,
        1,
        {
            "a": Descriptor(a, [128, 32]),
            "b": Descriptor(b, [32, 64]),
            "c": Descriptor(c, [128, 64]),
            "K": 104,
        },
        {"M": 128, "N": 64, "BK": 32, "SPECIAL": False},
        capability,
    )
    assert np.array_equal(c.float().numpy(), a.float().numpy() @ b.float().numpy())
    assert practices(report) == {100: "P1 P2 P4 P5", 90: "P4"}[capability]


def test_triton_s_warp_specialisation():
    """It invalidates mbarriers that the last commits may still signal."""
    a, b = integers(128, 96, dtype=BF16), integers(96, 64, dtype=BF16, seed=1)
    c = unwritten(128, 64, dtype=BF16)
    values = {"a": Descriptor(a, [128, 32]), "b": Descriptor(b, [32, 64]), "c": Descriptor(c, [128, 64]), "K": 96}
    report = run(descriptors, 1, values, {"M": 128, "N": 64, "BK": 32, "SPECIAL": True}, 100, check=False)
    assert report.kinds == {"mbarrier"}, report
    assert all("mbarrier.inval" in f.where for f in report.findings), report
