"""The operator on a GPU: the bodies of the simulator's tests with the kernels on the real chip, gradients, streams,
graphs, many calls, large tensors, several GPUs."""

import gc
import importlib
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import SAYS_WHY, assert_within_bound, calls_during, cuda_missing, hashed, hashed_qkv, max_error, run
from torch.library import opcheck

if cuda_missing():
    pytest.skip(cuda_missing(), allow_module_level=True)

test_blackwell = pytest.importorskip("test_blackwell", reason="it needs pybind11: pip install -e '.[test]'")
import flash_attn4  # noqa: E402

fwd, bwd = torch.ops.fa4.fwd.default, torch.ops.fa4.bwd.default
HALVES = [torch.bfloat16, torch.float16]


# ---- the bodies of test_blackwell.py, and on Hopper those of test_hopper.py, which has these and more


bodies = importlib.import_module("test_hopper" if torch.cuda.get_device_capability()[0] == 9 else "test_blackwell")
globals().update({name: body for name, body in vars(bodies).items() if name.startswith("test_") and callable(body)})


def to_gpu(x):
    """x with its strides, and with what lies around it in its storage."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return whole.cuda().as_strided(x.shape, x.stride(), x.storage_offset())


def on_the_gpu(q, k, v, *, schedule=None, seed=None, multiprocessors=None, len_kv_of=None, **how):
    """What simulate() gives; the chip has its own schedule and multiprocessors."""
    len_kv = None if len_kv_of is None else len_kv_of.cuda()
    out, lse = fwd(*map(to_gpu, (q, k, v)), len_kv=len_kv, **how)
    return out.cpu(), lse.cpu()


@pytest.fixture(autouse=True)
def the_chip_in_place_of_the_simulator(monkeypatch):
    monkeypatch.setattr(test_blackwell, "simulate", on_the_gpu)


# ---- bits


def large_qkv(dtype=torch.bfloat16, dim=128):
    return hashed_qkv(1000, 1500, batch=3, heads=8, heads_kv=2, dim=dim, dtype=dtype, device="cuda")


def equal(results, expected):
    return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_bits_are_the_same_from_run_to_run_and_in_any_batch(dim):
    q, k, v = large_qkv(dim=dim)
    expected = fwd(q, k, v, hi=500)
    for _ in range(50):
        assert equal(fwd(q, k, v, hi=500), expected)
    for b in range(3):
        one = fwd(q[b : b + 1, 4:8, 300:700], k[b : b + 1, 1:], v[b : b + 1, 1:], hi=800)
        assert equal(one, [x[b : b + 1, 4:8, 300:700] for x in expected])


def test_two_streams_at_once():
    work = [large_qkv(dtype) for dtype in HALVES]
    expected = [fwd(*x, hi=500) for x in work]
    streams = [torch.cuda.Stream() for _ in work]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(20):
        for stream, x, got in zip(streams, work, results, strict=True):
            with torch.cuda.stream(stream):
                got.append(fwd(*x, hi=500))
    torch.cuda.synchronize()
    for got, right in zip(results, expected, strict=True):
        assert all(equal(x, right) for x in got)


def test_uc_118_the_callers_stream_is_the_one_that_works():
    """What is queued before a call on its stream has happened when the kernel reads."""
    q, k, v = large_qkv()
    expected = fwd(q, k, v)
    late, stream = torch.zeros_like(q), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(q)
        results = fwd(late, k, v)
    stream.synchronize()
    assert equal(results, expected)


def test_many_threads_at_once():
    work = [large_qkv(dtype) for dtype in HALVES]
    expected = [fwd(*x) for x in work]

    def attend(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            return all(equal(fwd(*work[i % 2]), expected[i % 2]) for _ in range(50))

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(attend, range(4)))


def test_the_first_that_a_thread_does_on_a_gpu():
    """With inputs from another thread and memory that torch has kept, nothing has made the thread's context current."""
    q, k, v = large_qkv()
    expected = [x.clone() for x in fwd(q, k, v)]
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(fwd, q, k, v).result()
    assert equal(results, expected)


def test_uc_120_a_graph_is_captured_and_replayed():
    q, k, v = large_qkv()
    lengths = torch.tensor([1500, 3, 700], dtype=torch.int32, device="cuda")
    fwd(q, k, v, None, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = fwd(q, k, v, None, lengths)
    for seed in range(3):
        for tensor, new in zip((q, k, v), large_qkv(), strict=True):
            tensor.copy_(new.roll(seed, 2))
        lengths.copy_(lengths.roll(1))
        graph.replay()
        assert equal(results, fwd(q, k, v, None, lengths))


# ---- many calls, large tensors, several GPUs


def test_memory_that_is_not_there():
    q, k, v = hashed_qkv(1 << 16, 16, batch=1, heads=1, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match="CUDA out of memory" if SAYS_WHY else r"is out of memory\."):
        fwd(*(x.expand(-1, 1 << 18, -1, -1) for x in (q, k, v)))  # an output of 2 TiB
    assert_within_bound({"out": fwd(q, k, v)[0]}, q, k, v)


def test_100000_calls_take_no_more_memory():
    q, k, v = hashed_qkv(64, 64, dtype=torch.bfloat16, device="cuda")

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def calls(n):
        for _ in range(n):
            fwd(q, k, v)
        torch.cuda.synchronize()
        gc.collect()
        return resident(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    before = calls(10_000)
    after = calls(100_000)
    assert after[0] - before[0] < 8 << 20
    assert after[1:] == before[1:]


@pytest.mark.parametrize("batch, heads", [(65_536, 1), (1, 65_537), (70_000, 2)])
def test_uc_084_decoding_with_more_than_65535_of_anything(batch, heads):
    q, k, v = hashed_qkv(1, 40, batch=batch, heads=heads, dim=64, dtype=torch.bfloat16, device="cuda")
    out, lse = fwd(q, k, v)
    for b, h in ((0, 0), (batch - 1, heads - 1), (batch // 2, heads // 2)):
        at = slice(b, b + 1), slice(h, h + 1)
        part = q[at], k[at], v[at]
        assert equal((out[at], lse[at]), fwd(*part))
        assert_within_bound({"out": out[at]}, *part)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_more_than_2_to_the_31_elements(order):
    shape = (2, 64, 131_200, 128)
    assert math.prod(shape) > 2**31
    q = torch.empty([shape[d] for d in order], dtype=torch.bfloat16, device="cuda").permute(order)
    q.uniform_(-2, 2)
    k, v = (hashed(2, 1, 300, 128, seed=i, dtype=torch.bfloat16, device="cuda") for i in range(2))
    out, lse = fwd(q, k, v)
    assert out.stride() == q.stride()
    for b, h, i in ((0, 0, 0), (0, 33, 70_000), (1, 0, 131_100), (1, 63, 131_100)):
        at = slice(b, b + 1), slice(h, h + 1), slice(i, i + 100)
        part = q[at], k[b : b + 1], v[b : b + 1]
        assert equal((out[at], lse[at]), fwd(*part))
        assert_within_bound({"out": out[at]}, *part)


def test_strides_beyond_2_to_the_31():
    q, k, v = hashed_qkv(200, 300, heads=2, dim=128, dtype=torch.bfloat16, device="cuda")
    expected = fwd(q, k, v)
    step = 2**31 + 64
    storage = torch.full((step + 200_000,), math.nan, dtype=torch.bfloat16, device="cuda")

    def spread(x, stride, offset):
        view = storage.as_strided(x.shape, stride, offset)
        return view.copy_(x)

    far = (spread(q, (step, 25_600, 128, 1), 0), spread(k, (step, 38_400, 128, 1), 100_000))
    assert equal(fwd(*far, v), expected)
    v_far = spread(v, (76_800, step, 128, 1), 0)
    assert equal(fwd(q, k, v_far), expected)


def test_uc_116_two_gpus_in_one_process():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    work = [large_qkv(), [x.to("cuda:1") for x in large_qkv()]]
    expected = fwd(*work[0], hi=500)
    for _ in range(20):  # by turns, the current device staying the first
        results = [fwd(*x, hi=500) for x in work]
        assert torch.cuda.current_device() == 0
        for result, x in zip(results, work, strict=True):
            assert result[0].device == x[0].device
            assert equal([r.to("cuda:0") for r in result], expected)

    def attend(device):
        with torch.cuda.device(device):
            return all(equal([r.to("cuda:0") for r in fwd(*work[device], hi=500)], expected) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(attend, [0, 1, 0, 1]))
    leaves = [x.detach().requires_grad_() for x in work[1]]
    grads = torch.autograd.grad(fwd(*leaves)[0].float().square().sum(), leaves)
    assert all(g.device == leaves[0].device for g in grads)
    for place in range(3):
        mixed = [*work[0][:place], work[1][place], *work[0][place + 1 :]]
        with pytest.raises(RuntimeError, match="is on another device than q"):
            fwd(*mixed)


def test_arguments_on_the_cpu_are_named():
    on_gpu = large_qkv()
    for place, message in enumerate(
        ("q is on no GPU", "k is on another device than q", "v is on another device than q")
    ):
        with pytest.raises(RuntimeError, match=message):
            fwd(*on_gpu[:place], on_gpu[place].cpu(), *on_gpu[place + 1 :])
    assert torch.cuda.current_device() == 0


# ---- gradients


GRADIENTS = {
    "full": {},
    "causal": {"hi": 0},
    "bottom_right": {"hi": 60},
    "window": {"lo": -30, "hi": 50},
    "window_ahead": {"lo": 40, "hi": 90},
    "rows_that_see_nothing": {"lo": 150, "hi": 180},
    "no_key_visible": {"lo": 1000},
    "scale": {"scale": 0.4, "hi": 0},
    "scale_negative": {"scale": -0.2},
    "scale_0": {"scale": 0.0, "hi": 3},
}
DIMS = [(64, 64), (128, 128), (192, 128), (96, 64), (256, 256), (8, 16)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_as_near_as_the_math_path(name, dims, dtype):
    for heads_kv, len_q, len_kv in ((4, 200, 260), (1, 260, 200)):
        q, k, v = hashed_qkv(
            len_q, len_kv, heads=4, heads_kv=heads_kv, dim=dims[0], dim_v=dims[1], dtype=dtype, device="cuda"
        )
        dout = hashed(2, 4, len_q, dims[1], seed=9, dtype=dtype, device="cuda")
        call = {**GRADIENTS[name], "dout": dout}
        assert_within_bound(run(q, k, v, **call), q, k, v, **call)


@pytest.mark.parametrize("dims", DIMS[:4], ids=str)
@pytest.mark.parametrize("name", ["full", "causal", "window", "rows_that_see_nothing"])
def test_gradients_through_lse(name, dims):
    q, k, v = hashed_qkv(100, 130, dim=dims[0], dim_v=dims[1], dtype=torch.bfloat16, device="cuda")
    dout = hashed(2, 2, 100, dims[1], seed=9, dtype=torch.bfloat16, device="cuda")
    dlse = hashed(2, 2, 100, seed=10, device="cuda")
    call = {**GRADIENTS[name], "dout": dout, "dlse": dlse}
    assert_within_bound(run(q, k, v, **call), q, k, v, **call)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)])
def test_gradients_have_the_strides_that_the_fake_promises(order):
    shape = (2, 4, 40, 64)
    memory = hashed(*(shape[d] for d in order), dtype=torch.bfloat16, device="cuda")
    q = memory.permute(*(order.index(d) for d in range(4)))
    results = fwd(q, q, q)
    grads = bwd(results[0], None, q, q, q, *results)
    fakes = bwd(*(x if x is None else x.to("meta") for x in (results[0], None, q, q, q, *results)))
    for grad, fake in zip((*results, *grads), (*fwd(*(q.to("meta"),) * 3), *fakes), strict=True):
        assert grad.stride() == fake.stride()
        assert grad.shape == fake.shape


def test_deterministic_algorithms_make_the_gradient_deterministic():
    q, k, v = large_qkv()
    dout = torch.ones_like(q)
    torch.use_deterministic_algorithms(True)
    try:
        results = [run(q, k, v, dout=dout, hi=0) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        assert all(torch.equal(results[0][name], other[name]) for name in other)


def test_what_has_no_gradient_is_refused_in_the_forward_and_goes_to_pytorch():
    q, k, v = hashed_qkv(50, 60, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    lengths = torch.tensor([60, 7], dtype=torch.int32, device="cuda")
    with pytest.raises(NotImplementedError, match="no gradient with lengths of keys per batch"):
        fwd(q, k, v, None, lengths)
    with torch.no_grad():
        fwd(q, k, v, None, lengths)
    with pytest.raises(RuntimeError, match="lse has shape"):
        bwd(q, None, q, k, v, q, torch.zeros(2, 2, 49, device="cuda"))
    with pytest.raises(RuntimeError, match=r"dout is float16, and it must be bfloat16"):
        bwd(q.half(), None, q, k, v, q, torch.zeros(2, 2, 50, device="cuda"))


# ---- torch around the operator


@pytest.mark.parametrize("call", [{}, {"hi": 0}, {"lo": -9, "hi": 4, "scale": 0.3}], ids=str)
def test_opcheck(call):
    q, k, v = hashed_qkv(17, 23, heads=4, heads_kv=2, dtype=torch.bfloat16, device="cuda")
    opcheck(fwd, (q, k, v), call)
    opcheck(fwd, tuple(x.detach().requires_grad_() for x in (q, k, v)), call)
    out, lse = fwd(q, k, v, **call)
    opcheck(bwd, (torch.ones_like(out), None, q, k, v, out, lse), call)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_is_one_graph_and_agrees(backend):
    def function(q, k, v, hi):
        out, lse = torch.ops.fa4.fwd(q * 2, k, v, None, None, None, hi)
        return out.float().square().sum() + lse.sum()

    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    for length in (50, 90, 130):
        q, k, v = hashed_qkv(length, length + 20, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        ours = torch.autograd.grad(compiled(q, k, v, length), (q, k, v))
        expected = torch.autograd.grad(function(q, k, v, length), (q, k, v))
        assert all(max_error(a, b) <= 0.02 * float(b.abs().max()) for a, b in zip(ours, expected, strict=True))


def test_compiled_python_functions():
    q, k, v = hashed_qkv(50, 50, heads=4, heads_kv=2, dtype=torch.bfloat16, device="cuda")
    sdpa = torch.compile(flash_attn4.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    flash = torch.compile(flash_attn4.flash_attn_func, fullgraph=True, backend="aot_eager")
    expected = flash_attn4.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    ours, calls = calls_during(lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True))
    assert calls["fwd"] == 1
    assert torch.equal(ours, expected)
    assert torch.equal(flash(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2), expected)


def test_autocast():
    q, k, v = hashed_qkv(50, 70, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        out, calls = calls_during(lambda: flash_attn4.scaled_dot_product_attention(q, k, v))
    assert calls["fwd"] == 1
    assert torch.equal(out, fwd(*(x.bfloat16() for x in (q, k, v)))[0])
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_vmap_equals_a_loop():
    q, k, v = (hashed(3, 2, 2, n, 64, seed=n, dtype=torch.bfloat16, device="cuda") for n in (17, 23, 24))
    v = v[:, :, :, :23]
    out, lse = torch.vmap(lambda q, k, v: fwd(q, k, v))(q, k, v)
    for i in range(3):
        assert equal((out[i], lse[i]), fwd(q[i], k[i], v[i]))


def test_explain_and_backends_name_the_chip():
    q = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="cuda")
    found = flash_attn4.explain(q, q, q)
    assert found.backend.startswith("sm_")
    assert re.fullmatch(r"fa4_sm\d+_fwd_f16_d64", found.kernel)
    assert None in [why for machine, why in flash_attn4.backends().items() if machine.startswith("sm_")]
    with flash_attn4.set_fallback("error"), pytest.raises(NotImplementedError, match="float16 and bfloat16 only"):
        flash_attn4.scaled_dot_product_attention(q.float(), q.float(), q.float())
