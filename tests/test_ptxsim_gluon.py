# ruff: noqa: RUF005  (no starred lists in the kernels: Gluon does not compile them)
"""Kernels in Gluon, Triton's low-level dialect, for what tl.dot does not reach: CTA pairs, A from tensor memory,
sub-views, other load shapes, tcgen05.cp, multicast, reductions, warp specialisation, cluster launch control.

Compiled by Triton for the sm_100 family and sm_90; they follow the rules of practice, and each test says which of
the manual's they bend.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from ptxsim_kernels.compile_triton import Descriptor, run
from test_ptxsim_triton import BF16, E4M3, F16, F32, integers, practices, unwritten
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    clc,
    fence_async_shared,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_barrier_count,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

SCHEDULES = pytest.mark.parametrize("schedule", ["early", "late", "random"])


def shared_layout(shape, dtype, cga=None, transposed=False):
    return gl.NVMMASharedLayout.get_default_for(shape, dtype, transposed=transposed, cga_layout=cga)


def in_float(x):
    return x.float().numpy()


@gluon.jit
def store_rows(out, tile, N: gl.constexpr):
    """A tile of N columns to a contiguous array, in whatever layout it is."""
    layout: gl.constexpr = tile.type.layout
    m = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, layout))
    gl.store(out + m[:, None] * N + n[None, :], tile)


# ------------------------------------------------------------------------------------------- products of CTA pairs


@gluon.jit
def multicast_product(a_map, b_map, c, steps, acc_layout: gl.constexpr, two: gl.constexpr):
    a = gl.allocate_shared_memory(a_map.dtype, a_map.block_shape, a_map.layout)
    b = gl.allocate_shared_memory(b_map.dtype, b_map.block_shape, b_map.layout)
    M: gl.constexpr = a_map.block_shape[0]
    K: gl.constexpr = a_map.block_shape[1]
    N: gl.constexpr = b_map.block_shape[1]
    acc = allocate_tensor_memory(gl.float32, [M, N], acc_layout)
    loaded = mbarrier.allocate_mbarrier(two_ctas=two)
    consumed = mbarrier.allocate_mbarrier()
    mbarrier.init(loaded, count=1)
    mbarrier.init(consumed, count=tcgen05_mma_barrier_count([a, b], multicast=True, two_ctas=two))
    for step in range(steps):
        mbarrier.expect(loaded, a_map.nbytes_per_cta + b_map.nbytes_per_cta)
        tma.async_load(a_map, [0, step * K], loaded, a, multicast=True)
        tma.async_load(b_map, [step * K, 0], loaded, b, multicast=True)
        mbarrier.wait(loaded, step & 1, deps=[a, b])
        tcgen05_mma(a, b, acc, use_acc=step > 0, multicast=True, mbarriers=[consumed])
        mbarrier.wait(consumed, step & 1, deps=[a, b])
    gl.barrier(cluster=True)  # Triton 3.9 itself puts nothing between the last wait of a warp and another's inval
    mbarrier.invalidate(loaded)
    mbarrier.invalidate(consumed)
    store_rows(c, acc.load(), N)


@SCHEDULES
@pytest.mark.parametrize(
    "m, n, dtype, ctas",
    [(256, 64, BF16, 2), (128, 64, F16, 2), (256, 128, E4M3, 2), (512, 64, BF16, 4)],
    ids=["m256", "m128", "fp8", "four_ctas"],
)
def test_product_of_a_cta_pair(m, n, dtype, ctas, schedule):
    k = 64
    a, b, c = integers(m, 3 * k, dtype=dtype), integers(3 * k, n, dtype=dtype, seed=1), unwritten(m, n)
    pairs = [(1, 0), (2, 0)][: ctas.bit_length() - 1]
    pairs_b = [(0, 1), (0, 0)][: ctas.bit_length() - 1]
    type_of = {BF16: gl.bfloat16, F16: gl.float16, E4M3: gl.float8e4nv}[dtype]
    report = run(
        multicast_product,
        1,
        {
            "a_map": Descriptor(a, [m, k], shared_layout([m, k], type_of, pairs)),
            "b_map": Descriptor(b, [k, n], shared_layout([k, n], type_of, pairs_b)),
            "c": c,
            "steps": 3,
        },
        {"acc_layout": TensorMemoryLayout((m // ctas, n), 1, cga_layout=pairs, two_ctas=True), "two": True},
        100,
        {"num_ctas": ctas},
        schedule=schedule,
        seed=5,
    )
    assert np.array_equal(c.numpy(), in_float(a) @ in_float(b))
    assert practices(report) == "P1 P2 P3 P5"


@gluon.jit
def multicast_copy(source, target):
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, source.nbytes_per_cta)
    tma.async_load(source, [0, 0], bar, tile, multicast=True)
    mbarrier.wait(bar, 0, deps=[tile])
    mbarrier.invalidate(bar)
    tma.async_store(target, [0, 0], tile)
    tma.store_wait(0)


@SCHEDULES
@pytest.mark.parametrize("capability", [90, 100])
def test_tma_multicast(capability, schedule):
    layout = shared_layout([64, 64], gl.float16, [(0, 0)])
    a, c = integers(64, 64, dtype=F16), unwritten(64, 64, dtype=F16)
    values = {"source": Descriptor(a, [64, 64], layout), "target": Descriptor(c, [64, 64], layout)}
    report = run(multicast_copy, 1, values, {}, capability, {"num_ctas": 2}, schedule=schedule)
    assert torch.equal(a, c)
    assert practices(report) == ""


@gluon.jit
def reduce_into(source, total, largest):
    tile = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, source.nbytes_per_cta)
    tma.async_load(source, [gl.program_id(0) * source.block_shape[0], 0], bar, tile)
    mbarrier.wait(bar, 0, deps=[tile])
    mbarrier.invalidate(bar)
    tma.async_atomic_add(total, [0, 0], tile)
    tma.async_atomic_max(largest, [0, 0], tile)
    tma.store_wait(0)


@SCHEDULES
@pytest.mark.parametrize("capability", [90, 100])
def test_tma_reductions(capability, schedule):
    layout = gl.NVMMASharedLayout(64, 32, 2)
    a = integers(4 * 32, 16, dtype=torch.int32, high=1000)
    total, largest = torch.full((32, 16), 7, dtype=torch.int32), torch.full((32, 16), 400, dtype=torch.int32)
    tensors = {"source": a, "total": total, "largest": largest}
    values = {name: Descriptor(tensor, [32, 16], layout) for name, tensor in tensors.items()}
    run(reduce_into, 4, values, {}, capability, schedule=schedule, seed=9)
    assert torch.equal(total, a.view(4, 32, 16).sum(0).int() + 7)
    assert torch.equal(largest, a.view(4, 32, 16).amax(0).clamp(min=400))


# -------------------------------------------------------------------------------------------------- tensor memory


@gluon.jit
def product_from_tensor_memory(a, b_map, c, M: gl.constexpr, K: gl.constexpr):
    N: gl.constexpr = b_map.block_shape[1]
    b = gl.allocate_shared_memory(b_map.dtype, b_map.block_shape, b_map.layout)
    acc = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout((M, N), 1))
    x = allocate_tensor_memory(b_map.dtype, [M, K], TensorMemoryLayout((M, K), 1))
    bar = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(bar.index(i), count=1)
    mbarrier.expect(bar.index(0), b_map.nbytes_per_cta)
    tma.async_load(b_map, [0, 0], bar.index(0), b)
    layout: gl.constexpr = x.get_reg_layout()
    m = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    k = gl.arange(0, K, layout=gl.SliceLayout(0, layout))
    x.store(gl.load(a + m[:, None] * K + k[None, :]))
    mbarrier.wait(bar.index(0), 0, deps=[b])
    tcgen05_mma(x, b, acc, use_acc=False, mbarriers=[bar.index(1)])
    mbarrier.wait(bar.index(1), 0, deps=[b])
    store_rows(c, acc.load(), N)


@SCHEDULES
@pytest.mark.parametrize("m, dtype", [(128, BF16), (64, BF16), (128, E4M3)])
def test_a_from_tensor_memory(m, dtype, schedule):
    type_of = {BF16: gl.bfloat16, E4M3: gl.float8e4nv}[dtype]
    a, b, c = integers(m, 64, dtype=dtype), integers(64, 32, dtype=dtype, seed=1), unwritten(m, 32)
    values = {"a": a, "b_map": Descriptor(b, [64, 32], shared_layout([64, 32], type_of)), "c": c}
    report = run(product_from_tensor_memory, 1, values, {"M": m, "K": 64}, 100, schedule=schedule, seed=2)
    assert np.array_equal(c.numpy(), in_float(a) @ in_float(b))
    assert practices(report) == "P1 P2 P4 P5"


@gluon.jit
def through_tensor_memory(a, c, M: gl.constexpr, N: gl.constexpr, variant: gl.constexpr):
    """To tensor memory in one shape, back in another; the right half by a sub-view."""
    x = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout((M, N), 1))
    write: gl.constexpr = x.get_reg_layout()
    m = gl.arange(0, M, layout=gl.SliceLayout(1, write))
    n = gl.arange(0, N, layout=gl.SliceLayout(0, write))
    x.store(gl.load(a + m[:, None] * N + n[None, :]))
    left = x.slice(0, N // 2)
    right = x.slice(N // 2, N // 2)
    read: gl.constexpr = left.get_reg_layout(instr_variant=variant)
    store_rows(c, left.load(read), N)
    right.store(right.load(read) + 1.0)
    store_rows(c + N // 2, right.load(read), N)


# With 64 rows, the first becomes 16x32bx2.
@pytest.mark.parametrize("variant", ["32x32b", "16x64b", "16x128b", "16x256b"])
@pytest.mark.parametrize("m", [128, 64])
def test_tensor_memory_shapes_and_sub_views(variant, m):
    a, c = integers(m, 64, dtype=F32, high=1000), unwritten(m, 64)
    report = run(through_tensor_memory, 1, {"a": a, "c": c}, {"M": m, "N": 64, "variant": variant}, 100)
    expected = a.clone()
    expected[:, 32:] += 1
    assert torch.equal(c, expected)
    assert practices(report) == "P2"


@gluon.jit
def copied_accumulator(a_map, b_map, d_map, c):
    """acc = D by tcgen05.cp, then acc += A B: the copy is ordered before the product without a wait."""
    M: gl.constexpr = d_map.block_shape[0]
    N: gl.constexpr = d_map.block_shape[1]
    a = gl.allocate_shared_memory(a_map.dtype, a_map.block_shape, a_map.layout)
    b = gl.allocate_shared_memory(b_map.dtype, b_map.block_shape, b_map.layout)
    d = gl.allocate_shared_memory(d_map.dtype, d_map.block_shape, d_map.layout)
    acc = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout((M, N), 1))
    bar = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(bar.index(i), count=1)
    mbarrier.expect(bar.index(0), a_map.nbytes_per_cta + b_map.nbytes_per_cta + d_map.nbytes_per_cta)
    tma.async_load(a_map, [0, 0], bar.index(0), a)
    tma.async_load(b_map, [0, 0], bar.index(0), b)
    tma.async_load(d_map, [0, 0], bar.index(0), d)
    mbarrier.wait(bar.index(0), 0, deps=[a, b, d])
    tcgen05_copy(d, acc)
    tcgen05_mma(a, b, acc, use_acc=True)
    tcgen05_commit(bar.index(1))
    mbarrier.wait(bar.index(1), 0, deps=[a, b, d])
    store_rows(c, acc.load(), N)


@SCHEDULES
@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_copy_into_the_accumulator(swizzle, schedule):
    a, b, d = integers(128, 32, dtype=F16), integers(32, 32, dtype=F16, seed=1), integers(128, 32, dtype=F32, seed=2)
    c = unwritten(128, 32)
    values = {
        "a_map": Descriptor(a, [128, 32], shared_layout([128, 32], gl.float16)),
        "b_map": Descriptor(b, [32, 32], shared_layout([32, 32], gl.float16)),
        "d_map": Descriptor(d, [128, 32], gl.NVMMASharedLayout(swizzle, 32, 2)),
        "c": c,
    }
    report = run(copied_accumulator, 1, values, {}, 100, schedule=schedule, seed=1)
    assert np.array_equal(c.numpy(), in_float(a) @ in_float(b) + d.numpy())
    assert practices(report) == "P1 P2 P4 P5"


@gluon.jit
def accumulated_in_parts(a_map, b_map, c, STEPS: gl.constexpr):
    """Two accumulators, each written in two halves by products with half of B, which is stored transposed."""
    M: gl.constexpr = a_map.block_shape[0]
    K: gl.constexpr = a_map.block_shape[1]
    H: gl.constexpr = b_map.block_shape[0]
    a = gl.allocate_shared_memory(a_map.dtype, [STEPS] + a_map.block_shape, a_map.layout)
    b = gl.allocate_shared_memory(b_map.dtype, [2 * STEPS] + b_map.block_shape, b_map.layout)
    acc = allocate_tensor_memory(gl.float32, [2, M, 2 * H], TensorMemoryLayout((M, 2 * H), 1))
    bar = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(bar.index(i), count=1)
    mbarrier.expect(bar.index(0), STEPS * (a_map.nbytes_per_cta + 2 * b_map.nbytes_per_cta))
    for i in gl.static_range(STEPS):
        tma.async_load(a_map, [0, i * K], bar.index(0), a.index(i))
        for half in gl.static_range(2):
            tma.async_load(b_map, [half * H, i * K], bar.index(0), b.index(2 * i + half))
    mbarrier.wait(bar.index(0), 0, deps=[a, b])
    for i in gl.static_range(STEPS):
        for half in gl.static_range(2):
            part = acc.index(i % 2).slice(half * H, H)
            tcgen05_mma(a.index(i), b.index(2 * i + half).permute((1, 0)), part, use_acc=i > 1)
    tcgen05_commit(bar.index(1))
    mbarrier.wait(bar.index(1), 0, deps=[a, b])
    for i in gl.static_range(2):
        store_rows(c + i * M * 2 * H, acc.index(i).load(), 2 * H)


@SCHEDULES
@pytest.mark.parametrize("m, dtype", [(128, F16), (64, BF16), (128, F32)])
def test_products_into_sub_views(m, dtype, schedule):
    type_of = {F16: gl.float16, BF16: gl.bfloat16, F32: gl.float32}[dtype]
    a, b, c = integers(m, 96, dtype=dtype), integers(64, 96, dtype=dtype, seed=1), unwritten(2, m, 64)
    values = {
        "a_map": Descriptor(a, [m, 32], shared_layout([m, 32], type_of)),
        "b_map": Descriptor(b, [32, 32], shared_layout([32, 32], type_of)),
        "c": c,
    }
    report = run(accumulated_in_parts, 1, values, {"STEPS": 3}, 100, schedule=schedule, seed=7)
    a, b = in_float(a), in_float(b).T
    assert np.array_equal(c[0].numpy(), a[:, :32] @ b[:32] + a[:, 64:] @ b[64:])
    assert np.array_equal(c[1].numpy(), a[:, 32:64] @ b[32:64])
    assert practices(report) == "P1 P2 P4 P5"


@gluon.jit
def attention(q_map, k_map, v_map, o, lse, scale, BLOCKS: gl.constexpr, D: gl.constexpr):
    """S = Q K^T to tensor memory, its softmax back into the same columns as P, O += P V from there."""
    M: gl.constexpr = q_map.block_shape[0]
    N: gl.constexpr = k_map.block_shape[0]
    q = gl.allocate_shared_memory(q_map.dtype, q_map.block_shape, q_map.layout)
    k = gl.allocate_shared_memory(k_map.dtype, k_map.block_shape, k_map.layout)
    v = gl.allocate_shared_memory(v_map.dtype, v_map.block_shape, v_map.layout)
    scores = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout((M, N), 1))
    acc = allocate_tensor_memory(gl.float32, [M, D], TensorMemoryLayout((M, D), 1))
    p_layout: gl.constexpr = TensorMemoryLayout((M, N), 1)
    p_memory = scores.slice(0, N // 2).reinterpret(q_map.dtype, [M, N], p_layout)
    loaded = mbarrier.allocate_mbarrier()
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(loaded, count=1)
    mbarrier.init(done, count=1)
    s_layout: gl.constexpr = scores.get_reg_layout()
    o_layout: gl.constexpr = acc.get_reg_layout()
    m_i = gl.full((M,), float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    l_i = gl.full((M,), 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    mbarrier.expect(loaded, q_map.nbytes_per_cta + k_map.nbytes_per_cta + v_map.nbytes_per_cta)
    tma.async_load(q_map, [0, 0], loaded, q)
    for i in gl.static_range(BLOCKS):
        if i > 0:
            mbarrier.expect(loaded, k_map.nbytes_per_cta + v_map.nbytes_per_cta)
        tma.async_load(k_map, [i * N, 0], loaded, k)
        tma.async_load(v_map, [i * N, 0], loaded, v)
        mbarrier.wait(loaded, i % 2, deps=[q, k, v])
        tcgen05_mma(q, k.permute((1, 0)), scores, use_acc=False, mbarriers=[done])
        mbarrier.wait(done, 0, deps=[q, k])
        s = scores.load(s_layout) * scale
        m_new = gl.maximum(m_i, gl.max(s, 1))
        p = gl.exp2(s - gl.expand_dims(m_new, 1))
        alpha = gl.exp2(m_i - m_new)
        l_i = l_i * alpha + gl.sum(p, 1)
        m_i = m_new
        p_memory.store(gl.convert_layout(p.to(q_map.dtype), p_memory.get_reg_layout()))
        if i > 0:
            x = acc.load(o_layout)
            acc.store(x * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, o_layout)), 1))
        tcgen05_mma(p_memory, v, acc, use_acc=i > 0, mbarriers=[done])
        mbarrier.wait(done, 1, deps=[v])
    x = acc.load(o_layout)
    store_rows(o, x / gl.expand_dims(gl.convert_layout(l_i, gl.SliceLayout(1, o_layout)), 1), D)
    rows = gl.arange(0, M, layout=gl.SliceLayout(1, s_layout))
    gl.store(lse + rows, (m_i + gl.log2(l_i)) * 0.6931471805599453)


@SCHEDULES
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_attention(dtype, schedule):
    rng = np.random.default_rng(2)
    q, k, v = (torch.from_numpy(rng.standard_normal((128, 64)).astype(np.float32)).to(dtype) for _ in range(3))
    o, lse = unwritten(128, 64), unwritten(128)
    type_of = {F16: gl.float16, BF16: gl.bfloat16}[dtype]
    values = {
        "q_map": Descriptor(q, [128, 64], shared_layout([128, 64], type_of)),
        "k_map": Descriptor(k, [64, 64], shared_layout([64, 64], type_of)),
        "v_map": Descriptor(v, [64, 64], shared_layout([64, 64], type_of)),
        "o": o,
        "lse": lse,
        "scale": 1 / 8 / np.log(2),
    }
    report = run(attention, 1, values, {"BLOCKS": 2, "D": 64}, 100, schedule=schedule, seed=8)
    s = q.double() @ k.double().T / 8
    assert (o - torch.softmax(s, 1) @ v.double()).abs().max() < {BF16: 0.01, F16: 0.002}[dtype]
    assert (lse - torch.logsumexp(s, 1)).abs().max() < 1e-5
    assert practices(report) == "P1 P2 P4 P5"


@gluon.jit
def extremes(a, c, low, high, M: gl.constexpr, N: gl.constexpr):
    """tcgen05.ld.red: the tile and its rows' extremes in one load."""
    x = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout((M, N), 1))
    layout: gl.constexpr = x.get_reg_layout()
    m = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    x.store(gl.load(a + m[:, None] * N + n[None, :]))
    tile, largest = x.load_max(abs=True)
    store_rows(c, tile, N)
    gl.store(high + gl.arange(0, M, layout=largest.type.layout), largest)
    _, least = x.load_min()
    gl.store(low + gl.arange(0, M, layout=least.type.layout), least)


def test_extremes_while_loading():
    a, c, low, high = integers(128, 64, dtype=F32, high=10**6), unwritten(128, 64), unwritten(128), unwritten(128)
    report = run(extremes, 1, {"a": a, "c": c, "low": low, "high": high}, {"M": 128, "N": 64}, 103)
    assert torch.equal(c, a)
    assert torch.equal(low, a.min(1).values)
    assert torch.equal(high, a.abs().max(1).values)
    assert practices(report) == "P2"


# ------------------------------------------------------------------------------------------- warp specialisation


@gluon.jit
def load_partition(a_map, b_map, a, b, full, empty, steps):
    K: gl.constexpr = a_map.block_shape[1]
    STAGES: gl.constexpr = a.shape[0]
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), a_map.nbytes_per_cta + b_map.nbytes_per_cta)
        tma.async_load(a_map, [0, step * K], full.index(stage), a.index(stage))
        tma.async_load(b_map, [step * K, 0], full.index(stage), b.index(stage))


@gluon.jit
def mma_partition(a, b, acc, full, empty, done, steps):
    STAGES: gl.constexpr = a.shape[0]
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        tcgen05_mma(a.index(stage), b.index(stage), acc, use_acc=step > 0, mbarriers=[empty.index(stage)])
    tcgen05_commit(done)


@gluon.jit
def epilogue_partition(c, acc, done, N: gl.constexpr):
    mbarrier.wait(done, 0)
    store_rows(c, acc.load(), N)


@gluon.jit
def specialised_product(a_map, b_map, c, steps, STAGES: gl.constexpr):
    M: gl.constexpr = a_map.block_shape[0]
    N: gl.constexpr = b_map.block_shape[1]
    a = gl.allocate_shared_memory(a_map.dtype, [STAGES] + a_map.block_shape, a_map.layout)
    b = gl.allocate_shared_memory(b_map.dtype, [STAGES] + b_map.block_shape, b_map.layout)
    acc = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout((M, N), 1))
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    done = mbarrier.allocate_mbarrier()
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(done, count=1)
    gl.warp_specialize(
        [
            (epilogue_partition, (c, acc, done, N)),
            (load_partition, (a_map, b_map, a, b, full, empty, steps)),
            (mma_partition, (a, b, acc, full, empty, done, steps)),
        ],
        [1, 1],
        [24, 24],
    )


@SCHEDULES
def test_warp_specialised_pipeline(schedule):
    a, b, c = integers(128, 7 * 32, dtype=BF16), integers(7 * 32, 64, dtype=BF16, seed=1), unwritten(128, 64)
    values = {
        "a_map": Descriptor(a, [128, 32], shared_layout([128, 32], gl.bfloat16)),
        "b_map": Descriptor(b, [32, 64], shared_layout([32, 64], gl.bfloat16)),
        "c": c,
        "steps": 7,
    }
    report = run(specialised_product, 1, values, {"STAGES": 3}, 100, schedule=schedule, seed=4)
    assert np.array_equal(c.numpy(), in_float(a) @ in_float(b))
    assert practices(report) == "P1 P2 P4 P5"


# ------------------------------------------------------------------------------------------ cluster launch control


@gluon.jit
def take_all_the_work(counts):
    """Every launched CTA goes on with CTAs that have not been launched, until there is none."""
    answer = gl.allocate_shared_memory(gl.int64, [2], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    work = gl.program_id(0)
    more = True
    phase = 0
    while more:
        gl.atomic_add(counts + work, 1)
        mbarrier.expect(bar, 16)
        clc.try_cancel(answer, bar)
        mbarrier.wait(bar, phase)
        phase ^= 1
        result = clc.load_result(answer)
        more = result.is_canceled()
        work = result.program_id(0)
        fence_async_shared()
        gl.barrier()


@SCHEDULES
def test_cluster_launch_control(schedule):
    counts = torch.zeros(13, dtype=torch.int32)
    run(take_all_the_work, 13, {"counts": counts}, {}, 100, schedule=schedule)
    assert counts.tolist() == [1] * 13


# ---------------------------------------------------------------------------------------------------------- Hopper


@gluon.jit
def warpgroup_product(a_map, b_map, c, steps):
    M: gl.constexpr = a_map.block_shape[0]
    K: gl.constexpr = a_map.block_shape[1]
    N: gl.constexpr = b_map.block_shape[1]
    a = gl.allocate_shared_memory(a_map.dtype, [2] + a_map.block_shape, a_map.layout)
    b = gl.allocate_shared_memory(b_map.dtype, [2] + b_map.block_shape, b_map.layout)
    bar = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(bar.index(i), count=1)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    acc = hopper.warpgroup_mma_init(gl.zeros((M, N), gl.float32, layout))
    for step in range(steps):
        s = step % 2
        acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.expect(bar.index(s), a_map.nbytes_per_cta + b_map.nbytes_per_cta)
        tma.async_load(a_map, [0, step * K], bar.index(s), a.index(s))
        tma.async_load(b_map, [step * K, 0], bar.index(s), b.index(s))
        mbarrier.wait(bar.index(s), step // 2 & 1)
        acc = hopper.warpgroup_mma(a.index(s), b.index(s), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    store_rows(c, acc, N)


@SCHEDULES
def test_hopper_pipeline(schedule):
    a, b, c = integers(64, 160, dtype=BF16), integers(160, 64, dtype=BF16, seed=1), unwritten(64, 64)
    values = {
        "a_map": Descriptor(a, [64, 32], shared_layout([64, 32], gl.bfloat16)),
        "b_map": Descriptor(b, [32, 64], shared_layout([32, 64], gl.bfloat16)),
        "c": c,
        "steps": 5,
    }
    report = run(warpgroup_product, 1, values, {}, 90, schedule=schedule, seed=6)
    assert np.array_equal(c.numpy(), in_float(a) @ in_float(b))
    assert practices(report) == "P4"
