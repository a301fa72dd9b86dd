"""The kernels through the operator, on every instruction set that the machine has: shapes that break kernels,
what must not be read, and what must not change a bit. Random cases are in test_random.py."""

import math
import subprocess
import sys

import pytest
import torch
from reference import accurate, accurate_gradients, attention, hashed, scattered

import flash_attn4
from flash_attn4 import _C

HALF = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, *HALF]
ALL = [*FLOATS, torch.float64]
inf, nan = math.inf, math.nan


BEST = next(name for name, missing in _C.isas() if missing is None)
pytestmark = pytest.mark.usefixtures("isa")


def fwd(q, k, v, *, mask=None, **how):
    return torch.ops.fa4.fwd(q, k, v, attn_mask=mask, **how)


def both(q, k, v, dout, **how):
    """out, lse, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = fwd(*leaves, **how)
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout))


def test_the_instruction_set_is_the_forced_one(isa):
    assert flash_attn4.cpu_isa() == isa


def test_every_length_from_1_to_130(isa):
    for length in range(1, 131, 1 if isa == BEST else 4):
        q, k, v, dout = hashed(*[(1, 2, length, 24)] * 4, dtype=FLOATS[length % 3], seed=length)
        out, _, *ours = both(q, k, v, dout, hi=0)
        accurate(out, q, k, v, hi=0)
        accurate_gradients(ours, q, k, v, dout, hi=0)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(
    "len_q, len_kv", [(1, 1), (1, 257), (257, 1), (63, 65), (127, 128), (128, 127), (129, 383), (263, 257)]
)
def test_primes_and_tiles_and_unequal_lengths(dtype, len_q, len_kv):
    q, k, v, dout = hashed((1, 2, len_q, 64), (1, 1, len_kv, 64), (1, 1, len_kv, 40), (1, 2, len_q, 40), dtype=dtype)
    for lo, hi in [(None, None), (None, len_kv - len_q), (-20, 7)]:
        out, _, *ours = both(q, k, v, dout, lo=lo, hi=hi)
        accurate(out, q, k, v, lo=lo, hi=hi)
        accurate_gradients(ours, q, k, v, dout, lo=lo, hi=hi)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_head_dim(dtype):
    for dim in [*range(1, 70, 3), 96, 100, 127, 128, 129, 160, 192, 200, 255, 256]:
        dim_v = 1 + (dim * 37) % 256
        q, k, v, dout = hashed((1, 1, 35, dim), (1, 1, 40, dim), (1, 1, 40, dim_v), (1, 1, 35, dim_v), dtype=dtype)
        out, _, *ours = both(q, k, v, dout)
        accurate(out, q, k, v)
        accurate_gradients(ours, q, k, v, dout)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_grouped_heads(dtype, group):
    q, k, v, dout = hashed((2, 2 * group, 70, 32), (2, 2, 90, 32), (2, 2, 90, 32), (2, 2 * group, 70, 32), dtype=dtype)
    out, _, *ours = both(q, k, v, dout, hi=20)
    accurate(out, q, k, v, hi=20)
    accurate_gradients(ours, q, k, v, dout, hi=20)


@pytest.mark.parametrize("dtype", ALL)
def test_nothing_around_the_views_is_read(dtype):
    layout = {"order": (0, 2, 1, 3), "offset": 5, "gap": 3, "last": 2}
    q, k, v, dout = hashed((2, 3, 67, 33), (2, 3, 71, 33), (2, 3, 71, 18), (2, 3, 67, 18), dtype=dtype)
    bias = hashed((2, 1, 67, 71), dtype=dtype)[0]
    poisoned = [scattered(x, **layout) for x in (q, k, v, dout, bias)]
    clean = both(q, k, v, dout, mask=bias, hi=30)
    for a, b in zip(both(*poisoned[:4], mask=poisoned[4], hi=30), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", ALL)
def test_keys_past_len_kv_are_never_read(dtype):
    q, k, v, dout = hashed(*[(3, 2, 40, 16)] * 4, dtype=dtype)
    lengths = torch.tensor([0, 17, 40], dtype=torch.int32)
    k[0], v[0], k[1, :, 17:], v[1, :, 17:] = nan, inf, inf, nan
    out, lse, *ours = both(q, k, v, dout, len_kv=lengths)
    accurate(out[1:], q[1:], k[1:].nan_to_num(0, 0, 0), v[1:].nan_to_num(0, 0, 0), len_kv=lengths[1:])
    assert (out[0] == 0).all()
    assert (lse[0] == -inf).all()
    for g, unseen in zip(ours, [slice(0, 0), slice(17, None), slice(17, None)], strict=True):
        assert g.isfinite().all()
        assert (g[0] == 0).all()
        assert (g[1, :, unseen] == 0).all()


@pytest.mark.parametrize("dtype", ALL)
def test_a_masked_key_never_shows(dtype):
    q, k, v, dout = hashed(*[(1, 2, 70, 16)] * 4, dtype=dtype)
    mask = torch.ones(70, 70, dtype=torch.bool)
    mask[:, [0, 33, 69]] = False
    clean = both(q, k, v, dout, mask=mask)
    k, v = k.clone(), v.clone()
    k[:, :, [0, 33]], v[:, :, [0, 69]], k[:, :, 69], v[:, :, 33] = nan, nan, inf, -inf
    for a, b in zip(both(q, k, v, dout, mask=mask), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_nan_that_is_seen_makes_the_row_nan(dtype, where):
    tensors = dict(zip("qkv", hashed(*[(1, 1, 40, 16)] * 3, dtype=dtype), strict=True))
    tensors[where][0, 0, 20, 3] = nan
    out, lse = fwd(*tensors.values(), hi=0)
    rows = out[0, 0].isnan().any(-1)
    assert rows.tolist() == [i == 20 if where == "q" else i >= 20 for i in range(40)]
    if where != "v":
        assert lse[0, 0].isnan().tolist() == rows.tolist()
    else:
        assert lse.isfinite().all()
        assert out[0, 0].isnan().sum() == 20  # of v's one column


@pytest.mark.parametrize("dtype", ALL)
def test_infinite_scores_follow_the_formula(dtype):
    q, k, v = hashed(*[(1, 1, 9, 8)] * 3, dtype=dtype)
    q[..., 0] = 1
    k[0, 0, 3, 0] = -inf  # a score of -inf: weight 0
    out, lse = fwd(q, k, v)
    rest = [j for j in range(9) if j != 3]
    accurate(out, q, k[:, :, rest], v[:, :, rest])
    assert lse.isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [0.0, -1.0, -0.05, 3.0, 1e-30])
def test_any_finite_scale(dtype, scale):
    q, k, v, dout = hashed(*[(1, 2, 50, 24)] * 4, dtype=dtype)
    out, _, *ours = both(q, k, v, dout, hi=0, scale=scale)
    accurate(out, q, k, v, hi=0, scale=scale)
    accurate_gradients(ours, q, k, v, dout, hi=0, scale=scale)


@pytest.mark.parametrize("dtype", FLOATS)
def test_scores_of_ten_thousand(dtype):
    q, k, v, dout = hashed(*[(1, 1, 65, 16)] * 4, dtype=dtype)
    q[..., 0], k[..., 0] = 100, 100 * torch.linspace(-1, 1, 65)
    out, _, *ours = both(q, k, v, dout, scale=1.0)
    accurate(out, q, k, v, scale=1.0)
    accurate_gradients(ours, q, k, v, dout, scale=1.0)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_whose_rounding_is_large(dtype, sign):
    """Their unit in the last place is up to 2^14: each row is the value of one key, or the mean of equal ones."""
    sizes = [40, 500, 4000] if dtype == torch.float16 else [1e4, 1e5, 1e6]
    for size in sizes:
        q, k, v, dout = hashed((1, 2, 40, 24), (1, 2, 300, 24), (1, 2, 300, 24), (1, 2, 40, 24), dtype=dtype)
        q[..., 1:], k[..., 1:] = 0, 0
        q[..., 0] = size
        k[..., 0] = sign * size * (1 + torch.arange(300) // 3 / 8)
        out, lse, *ours = both(q, k, v, dout, scale=0.3)
        accurate(out, q, k, v, scale=0.3)
        assert lse.isfinite().all()
        assert all(g.isfinite().all() for g in ours)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_float64_mask_beyond_float32_hides_nothing(dtype):
    """The only key that a row may see, weighed down by more than float32 has, still takes all."""
    q, k, v, dout = hashed(*[(1, 1, 9, 8)] * 4, dtype=dtype)
    mask = torch.full((9, 9), -inf, dtype=torch.float64).fill_diagonal_(-1e300)
    out, lse, _, _, dv = both(q, k, v, dout, mask=mask)
    assert torch.equal(out, v)
    assert lse.isfinite().all()
    assert torch.equal(dv, dout)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_maximum_grows_slowly_and_at_the_last_key(dtype):
    q, k, v = hashed((1, 1, 8, 8), (1, 1, 600, 8), (1, 1, 600, 8), dtype=dtype)
    q[..., 1:], k[..., 1:], q[..., 0] = 0, 0, 1
    k[..., 0] = torch.linspace(0, 60, 600)
    accurate(fwd(q, k, v, scale=1.0)[0], q, k, v, scale=1.0)
    k[..., 0] = 0
    k[0, 0, -1, 0] = 90
    accurate(fwd(q, k, v, scale=1.0)[0], q, k, v, scale=1.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_last_products_of_a_long_row(dtype):
    q, k, v = hashed((1, 1, 2, 64), (1, 1, 5000, 64), (1, 1, 5000, 64), dtype=dtype)
    accurate(fwd(q, k, v)[0], q, k, v)


@pytest.mark.parametrize("dtype", ALL)
def test_the_gradient_of_the_log_sum_exp(dtype):
    q, k, v, dout = hashed((1, 2, 33, 24), (1, 1, 40, 24), (1, 1, 40, 16), (1, 2, 33, 16), dtype=dtype)
    dlse = hashed((1, 2, 33), seed=5)[0].to(torch.float64 if dtype == torch.float64 else torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = fwd(*leaves, hi=3)
    ours = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    accurate_gradients(ours, *(x.detach() for x in leaves), dout, dlse, hi=3)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("causal", [False, True])
def test_bits_do_not_depend_on_threads_batch_or_neighbours(dtype, causal):
    q, k, v, dout = hashed((3, 4, 300, 32), (3, 2, 300, 32), (3, 2, 300, 32), (3, 4, 300, 32), dtype=dtype)
    how = {"hi": 0 if causal else None}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = both(q, k, v, dout, **how)
        for n in (2, 3):
            torch.set_num_threads(n)
            assert all(map(torch.equal, both(q, k, v, dout, **how), expected))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, both(q, k, v, dout, **how), expected))
    one = both(q[1:2, 2:], k[1:2, 1:], v[1:2, 1:], dout[1:2, 2:], **how)
    for a, b, heads in zip(one, expected, (2, 2, 2, 1, 1), strict=True):
        assert torch.equal(a, b[1:2, heads:])


@pytest.mark.parametrize("dtype", ALL)
def test_bits_do_not_depend_on_threads_where_one_head_is_spread_over_them(dtype):
    q, k, v, dout = hashed((1, 2, 130, 16), (1, 1, 1300, 16), (1, 1, 1300, 16), (1, 2, 130, 16), dtype=dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = both(q, k, v, dout)
        for n in (2, 3, 4):
            torch.set_num_threads(n)
            assert all(map(torch.equal, both(q, k, v, dout), expected))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", ALL)
def test_a_row_has_the_same_bits_in_a_shorter_query(dtype):
    q, k, v = hashed((1, 2, 300, 32), (1, 2, 300, 32), (1, 2, 300, 32), dtype=dtype)
    whole, lse = fwd(q, k, v)
    for rows in (slice(0, 2), slice(3, 70), slice(255, 300)):
        part, part_lse = fwd(q[:, :, rows], k, v)
        assert torch.equal(part, whole[:, :, rows])
        assert torch.equal(part_lse, lse[:, :, rows])


def test_bits_do_not_depend_on_strides():
    q, k, v, dout = hashed(*[(2, 3, 100, 48)] * 4, dtype=torch.bfloat16)
    expected = both(q, k, v, dout)
    for order in [(0, 2, 1, 3), (3, 2, 1, 0), (2, 3, 0, 1)]:
        others = [scattered(x, order=order, offset=3) for x in (q, k, v, dout)]
        assert all(map(torch.equal, both(*others), expected))


@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (0, 0, 0, 0)])
def test_sizes_of_zero(shape):
    b, h, len_q, len_kv = shape
    q, k, v, dout = hashed((b, h, len_q, 8), (b, h, len_kv, 8), (b, h, len_kv, 8), (b, h, len_q, 8))
    out, lse, dq, dk, dv = both(q, k, v, dout, hi=0)
    assert (out == 0).all()
    assert (lse == -inf).all()
    assert dq.shape == q.shape
    assert dk.shape == dv.shape == k.shape
    assert all((g == 0).all() for g in (dq, dk, dv))


@pytest.mark.timeout(300)
def test_memory_grows_with_the_length_not_its_square(isa):
    code = """if True:
        import resource, torch, flash_attn4
        torch.set_num_threads(2)
        q = torch.randn(1, 1, 32768, 64, requires_grad=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out, _ = torch.ops.fa4.fwd(q, q, q, lo=-300, hi=0)
        out.sum().backward()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"FA4_CPU_ISA": isa, "PATH": ""}
    )
    assert int(done.stdout) < 200 * 1024  # KiB; a row of float scores for each query would take 4 GiB
    q = hashed((1, 1, 32768, 16))[0]
    rows = slice(32700, 32768)
    out, _ = fwd(q, q, q, lo=-300, hi=0)
    exact, _ = attention(q[:, :, 32300:], q[:, :, 32300:], q[:, :, 32300:], lo=-300, hi=0)
    torch.testing.assert_close(out[:, :, rows].double(), exact[:, :, -68:], atol=1e-5, rtol=1e-5)
