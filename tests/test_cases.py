"""Public bug reports of attention packages, each as a test named by its id: the input of the report, and what is right.

Where a report is about the build, the package, or the documentation, its test stands in test_package.py or
test_readme.py under the same id.
"""

import copy
import io
import math
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.nn.functional as F
from conftest import rounding_floor
from reference import accurate, attention, exact_gradients, hashed, max_error

import flash_attn4
from flash_attn4 import flash_attn_func

sdpa = flash_attn4.scaled_dot_product_attention
HALF = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, *HALF]
inf = math.inf


def check(q, k, v, mask=None, *, lo=None, hi=None, scale=None, **how):
    """Ours by the drop-in is as close to float64 as PyTorch's math path; returns it."""
    out = sdpa(q, k, v, attn_mask=mask, scale=scale, **how)
    return accurate(out, q, k, v, mask=mask, lo=lo, hi=hi, scale=scale)


def gradients(function, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.sum().backward()
    return [x.grad for x in leaves]


def test_uc_001_a_padding_row_that_is_all_false_is_zero():
    q, k, v = hashed((1, 2, 6, 8), (1, 2, 10, 8), (1, 2, 10, 8))
    mask = torch.ones(6, 10, dtype=torch.bool).tril(4)[None, None]
    mask[..., 5, :] = False
    out = check(q, k, v, mask, scale=0.125)
    assert (out[:, :, 5] == 0).all()
    lse = torch.ops.fa4.fwd(q, k, v, attn_mask=mask, scale=0.125)[1]
    assert (lse[:, :, 5] == -inf).all()
    assert lse[:, :, :5].isfinite().all()


def test_uc_002_boolean_hides_and_float_adds():
    q, k, v = hashed((1, 1, 8, 8), (1, 1, 8, 8), (1, 1, 8, 8))
    keep = torch.zeros(8, 8, dtype=torch.bool)
    keep[:4, :4] = True
    hidden = check(q, k, v, keep)
    assert (hidden[:, :, 4:] == 0).all()
    torch.testing.assert_close(hidden[:, :, :4], attention(q[:, :, :4], k[:, :, :4], v[:, :, :4])[0].float())
    check(q, k, v, keep.float())


@pytest.mark.parametrize("dtype", FLOATS)
def test_uc_003_the_most_negative_number_is_no_infinity(dtype):
    q, k, v = hashed((1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4), dtype=dtype)
    mask = torch.ones(3, 3, dtype=dtype)
    mask[0] = torch.finfo(dtype).min
    out = sdpa(q, k, v, attn_mask=mask)
    assert out.isfinite().all()
    if dtype == torch.float32:  # the mask swallows the scores: all equal
        torch.testing.assert_close(out[0, 0, 0], v[0, 0].mean(0))


def test_uc_005_first_tiles_fully_hidden():
    q, k, v = hashed((1, 1, 640, 4), (1, 1, 640, 4), (1, 1, 640, 4))
    distance = torch.arange(640)[None, :] - torch.arange(640)[:, None]
    mask = torch.zeros(640, 640).masked_fill((distance > 0) | (distance < -10), -inf)
    assert check(q, k, v, mask).isfinite().all()
    out, _ = torch.ops.fa4.fwd(q, k, v, lo=-10, hi=0)
    accurate(out, q, k, v, lo=-10, hi=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uc_006_padding_on_both_sides(dtype):
    q, k, v = hashed((2, 4, 8, 128), (2, 4, 16, 128), (2, 4, 16, 128), dtype=dtype)
    mask = torch.ones(2, 1, 8, 16, dtype=torch.bool)
    mask[0, ..., 7:] = False
    mask[1, :, 5:] = False
    out = check(q, k, v, mask)
    assert (out[1, :, 5:] == 0).all()


@pytest.mark.parametrize("grad", [False, True])
def test_uc_009_rows_of_minus_infinity_in_every_mode(grad):
    q, k, v = hashed((1, 2, 12, 16), (1, 2, 12, 16), (1, 2, 12, 16))
    mask = torch.zeros(1, 1, 12, 12)
    mask[..., -3:, :] = -inf
    q.requires_grad_(grad)
    assert (sdpa(q, k, v, attn_mask=mask)[:, :, -3:] == 0).all()
    with torch.no_grad():
        assert (sdpa(q, k, v, attn_mask=mask)[:, :, -3:] == 0).all()


def test_uc_011_an_empty_row_leaves_gradients_finite():
    q, k, v = hashed((2, 1, 4, 8), (2, 1, 4, 8), (2, 1, 4, 8))
    mask = torch.ones(4, 4, dtype=torch.bool).tril().triu(-1).repeat(2, 1, 1, 1)
    mask[1, ..., :2] = False  # key padding: batch 1 loses its first two keys, so rows 0 and 1
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sdpa(q, k, v, attn_mask=mask)
    assert (out[1, :, :2] == 0).all()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert (q.grad[1, :, :2] == 0).all()
    assert (k.grad[1, :, :2] == 0).all()
    assert (v.grad[1, :, :2] == 0).all()


def test_uc_012_block_diagonal_equals_the_blocks_alone():
    q, k, v = hashed((1, 2, 600, 80), (1, 2, 600, 80), (1, 2, 600, 80), dtype=torch.bfloat16)
    mask = torch.zeros(600, 600, dtype=torch.bool)
    blocks = [(0, 128), (128, 256), (256, 384), (543, 600)]
    for a, b in blocks:
        mask[a:b, a:b] = True
    out = sdpa(q, k, v, attn_mask=mask)
    for a, b in blocks:
        accurate(out[:, :, a:b], q[:, :, a:b], k[:, :, a:b], v[:, :, a:b])
    assert (out[:, :, 384:543] == 0).all()


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("len_kv", [31, 32, 33, 64, 65])
def test_uc_013_one_key_more_than_a_vector_with_expanded_heads(dim, len_kv):
    q, k, v = hashed((1, 8, 5, dim), (1, 1, len_kv, dim), (1, 1, len_kv, dim), dtype=torch.bfloat16)
    k, v = k.expand(1, 8, len_kv, dim), v.expand(1, 8, len_kv, dim)
    mask = torch.ones(1, 8, 5, len_kv, dtype=torch.bool)
    out = check(q, k, v, mask)
    assert torch.equal(out, sdpa(q, k.contiguous(), v.contiguous(), attn_mask=mask))


def test_uc_013_head_dim_512_is_right_or_refused():
    q, k, v = hashed((1, 8, 5, 512), (1, 1, 33, 512), (1, 1, 33, 512), dtype=torch.bfloat16)
    k, v = k.expand(1, 8, 33, 512), v.expand(1, 8, 33, 512)
    with pytest.raises(RuntimeError, match="512"):
        torch.ops.fa4.fwd(q, k, v)
    with pytest.warns(RuntimeWarning, match="512"):
        check(q, k, v)


def test_uc_014_masks_of_any_shape_and_stride():
    q, k, v = hashed((4, 8, 10, 16), (4, 8, 10, 16), (4, 8, 10, 16))
    check(q, k, v, torch.rand(4, 8, 10, 10) > 0.3)
    wide = hashed((4, 8, 16, 43))[0]
    bias = wide[:, :, :10, 3:13]
    assert bias.stride() == (8 * 16 * 43, 16 * 43, 43, 1)
    check(q, k, v, bias)
    check(q, k, v, bias.transpose(-1, -2))


def test_uc_015_causal_and_key_padding_together():
    q, k, v = hashed((2, 4, 9, 32), (2, 4, 9, 32), (2, 4, 9, 32))
    padding = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    padding[1, ..., :3] = False
    both = padding & torch.ones(9, 9, dtype=torch.bool).tril()
    out, _ = torch.ops.fa4.fwd(q, k, v, attn_mask=padding, hi=0)
    accurate(out, q, k, v, mask=both)
    with pytest.warns(RuntimeWarning, match="both"):  # PyTorch runs it
        out = sdpa(q, k, v, attn_mask=padding, is_causal=True)
    accurate(out, q, k, v, mask=both)


@pytest.mark.parametrize("len_q, len_kv", [(2, 5), (5, 2), (4, 4)])
def test_uc_016_uc_019_both_corners(len_q, len_kv):
    q, k, v = hashed((1, 2, len_q, 8), (1, 2, len_kv, 8), (1, 2, len_kv, 8))
    check(q, k, v, hi=0, is_causal=True)
    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    accurate(out, q, k, v, hi=len_kv - len_q)


def test_uc_017_one_query_against_a_cache():
    q, k, v = hashed((1, 2, 1, 16), (1, 2, 8, 16), (1, 2, 8, 16))
    torch.testing.assert_close(sdpa(q, k, v, is_causal=True), v[:, :, :1])
    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    accurate(out, q, k, v)


def test_uc_019_new_tokens_line_up_with_the_last_keys():
    q, k, v = hashed((1, 2, 4, 16), (1, 2, 8, 16), (1, 2, 8, 16))
    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    accurate(out, q, k, v, mask=torch.ones(4, 8, dtype=torch.bool).tril(4))


def test_uc_021_a_view_of_a_preallocated_cache():
    cache_k, cache_v, q = hashed((1, 8, 128, 64), (1, 8, 128, 64), (1, 8, 7, 64))
    k, v = cache_k[:, :, :7], cache_v[:, :, :7]
    out = check(q, k, v, hi=0, is_causal=True)
    assert torch.equal(out, sdpa(q, k.contiguous(), v.contiguous(), is_causal=True))


def test_uc_022_grouped_heads_causal_row_by_row():
    q, k, v = hashed((1, 8, 130, 64), (1, 2, 130, 64), (1, 2, 130, 64))
    check(q, k, v, hi=0, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("window", [None, (-1, -1), (None, None), (None, -1), (-1, None)])
def test_uc_023_every_spelling_of_no_window(window):
    q, k, v = (x.transpose(1, 2) for x in hashed((1, 2, 70, 16), (1, 2, 70, 16), (1, 2, 70, 16), dtype=torch.bfloat16))
    expected = flash_attn_func(q, k, v, causal=True)
    assert expected.abs().max() > 0
    assert torch.equal(flash_attn_func(q, k, v, causal=True, window_size=window), expected)


@pytest.mark.parametrize("window", [(-1, 0), (None, 0)])
def test_uc_023_open_on_the_left_only(window):
    q, k, v = (x.transpose(1, 2) for x in hashed((1, 2, 70, 16), (1, 2, 70, 16), (1, 2, 70, 16)))
    assert torch.equal(flash_attn_func(q, k, v, window_size=window), flash_attn_func(q, k, v, causal=True))


@pytest.mark.parametrize("window", [(-2, 0), (0, -5), 3, (1, 2, 3), ("a", 0), (1.5, 0)])
def test_uc_023_anything_else_raises(window):
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises((ValueError, TypeError), match="window_size"):
        flash_attn_func(q, q, q, window_size=window)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 255, 257])
def test_uc_024_every_length(length):
    q, k, v = hashed((1, 4, length, 128), (1, 4, length, 128), (1, 4, length, 128), dtype=torch.bfloat16)
    check(q, k, v)
    check(q, k, v, hi=0, is_causal=True)


@pytest.mark.parametrize("len_q", [1, 100])
def test_uc_026_nan_past_the_end_of_a_slice(len_q):
    q, big_k, big_v = hashed((1, 2, len_q, 64), (1, 2, 160, 64), (1, 2, 160, 64))
    big_k[:, :, 100:] = big_v[:, :, 100:] = math.nan
    k, v = big_k[:, :, :100], big_v[:, :, :100]
    out = check(q, k, v)
    assert torch.equal(out, sdpa(q, k.clone(), v.clone()))


def test_uc_027_padding_rows_are_never_read():
    q, k, v = hashed((1, 16, 24, 128), (1, 1, 24, 128), (1, 1, 24, 128), dtype=torch.bfloat16)
    for x in (q, k, v):
        x[:, :, 21:] = math.nan
    check(q[:, :, :21], k[:, :, :21], v[:, :, :21], enable_gqa=True)


@pytest.mark.parametrize("dim", [8, 16, 24, 256])
def test_uc_028_uc_029_uc_030_small_and_large_head_dims(dim):
    q, k, v = hashed((1, 8, 300, dim), (1, 8, 300, dim), (1, 8, 300, dim), dtype=torch.bfloat16)
    check(q, k, v, hi=0, is_causal=True)


@pytest.mark.parametrize("dim", [1, 7, 20, 36, 63, 65, 100])
def test_uc_032_uc_033_the_operator_itself_takes_any_head_dim(dim):
    for dtype in FLOATS:
        q, k, v = hashed((2, 4, 33, dim), (2, 4, 33, dim), (2, 4, 33, dim), dtype=dtype)
        out, _ = torch.ops.fa4.fwd(q, k, v)
        accurate(out, q, k, v, scale=dim**-0.5)


@pytest.mark.parametrize("dim_v", [64, 96, 72, 80, 88, 104, 112, 120])
def test_uc_035_uc_036_v_has_its_own_head_dim_gradients_too(dim_v):
    q, k, v = hashed((2, 2, 140, 128), (2, 2, 140, 128), (2, 2, 140, dim_v))
    out = check(q, k, v)
    assert out.shape == (2, 2, 140, dim_v)
    for ours, want in zip(gradients(sdpa, q, k, v), exact_gradients(q, k, v), strict=True):
        assert max_error(ours, want) <= 1e-5 * float(want.abs().max())


def test_uc_035_as_reported():
    q, k, v = hashed((8, 2, 640, 128), (8, 2, 640, 128), (8, 2, 640, 64), dtype=torch.bfloat16)
    assert check(q, k, v).shape == (8, 2, 640, 64)


@pytest.mark.parametrize("heads_q, heads_kv", [(12, 1), (5, 1), (7, 1), (6, 2), (96, 8)])
def test_uc_037_any_whole_group(heads_q, heads_kv):
    for len_q in (1, 9):
        q, k, v = hashed((2, heads_q, len_q, 32), (2, heads_kv, 70, 32), (2, heads_kv, 70, 32))
        check(q, k, v, enable_gqa=True)


def test_uc_040_the_mask_of_grouped_heads():
    q, k, v = hashed((2, 8, 5, 16), (2, 2, 7, 16), (2, 2, 7, 16))
    mask = hashed((2, 8, 5, 7))[0] > 0
    check(q, k, v, mask, enable_gqa=True)
    check(q, k, v, mask[:, :1], enable_gqa=True)
    with pytest.raises((ValueError, RuntimeError), match="attn_mask"):
        torch.ops.fa4.fwd(q, k, v, attn_mask=mask[:, 0])  # 3-dim [2, 5, 7] does not broadcast over 8 heads


def test_uc_041_element_by_element():
    q, k, v = hashed((2, 3, 70, 64), (2, 3, 70, 64), (2, 3, 70, 64), dtype=torch.bfloat16)
    check(q, k, v)


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_uc_042_error_does_not_grow_with_length(length):
    q, k, v = hashed((1, 2, 128, 128), (1, 2, length, 128), (1, 2, length, 128), dtype=torch.bfloat16)
    check(q, k, v)


@pytest.mark.parametrize("factor", [1, 5])
def test_uc_043_against_float64_with_large_inputs(factor):
    q, k, v = (factor * x for x in hashed((1, 4, 90, 64), (1, 4, 90, 64), (1, 4, 90, 64), dtype=torch.bfloat16))
    mask = torch.rand(1, 4, 90, 90, generator=torch.Generator().manual_seed(0)) > 0.58
    check(q, k, v, mask)


@pytest.mark.parametrize("dtype", HALF)
def test_uc_044_half_precision(dtype):
    q, k, v = hashed((2, 2, 256, 64), (2, 2, 256, 64), (2, 2, 256, 64), dtype=dtype)
    check(q, k, v)


def test_uc_047_constant_large_inputs():
    q = torch.full((2, 8, 512, 32), 1000.0, dtype=torch.bfloat16)
    assert sdpa(q, q, q).eq(1000).all()
    assert all(g.isfinite().all() for g in gradients(sdpa, q, q, q))


@pytest.mark.parametrize("len_kv", [128, 97])
def test_uc_049_a_strongly_negative_log_sum_exp(len_kv):
    q, k, v = hashed((1, 2, 1, 64), (1, 2, len_kv, 64), (1, 2, len_kv, 64), dtype=torch.bfloat16)
    q[..., 0], k[..., 0] = -32.0, 32.0  # scale 1/8: scores shifted by -128
    lse = torch.ops.fa4.fwd(q, k, v)[1]
    assert (lse < -100).all()
    exact = exact_gradients(q, k, v)
    for ours, want in zip(gradients(sdpa, q, k, v), exact, strict=True):
        assert ours.isfinite().all()
        assert max_error(ours, want) <= 0.03 * float(want.abs().max()) + rounding_floor(want, dtype=ours.dtype)


@pytest.mark.parametrize("shape", [(2, 3, 5, 16), (2, 3, 1, 16), (2, 3, 0, 16), (1, 2, 16, 128)])
def test_uc_051_uc_052_uc_055_log_sum_exp(shape):
    q, k, v = hashed(shape, (*shape[:2], 9, shape[3]), (*shape[:2], 9, shape[3]), dtype=torch.float16)
    lse = torch.ops.fa4.fwd(q, k, v)[1]
    assert lse.shape == shape[:3]
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    scores = q.double() @ k.double().transpose(-1, -2) * shape[3] ** -0.5
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)


def test_uc_056_log_sum_exp_without_a_gradient():
    q = hashed((1, 7, 2, 16))[0]
    with torch.no_grad():
        _, lse = flash_attn_func(q, q, q, return_lse=True)
    torch.testing.assert_close(lse.double(), attention(*[q.transpose(1, 2)] * 3)[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_uc_057_uc_060_uc_064_last_stride_is_not_one(which, dtype):
    tensors = {}
    for i, name in enumerate("qkv"):
        x = hashed((2, 3, 9, 16), (2, 3, 9, 16), (2, 3, 9, 16), dtype=dtype)[i]
        tensors[name] = x.transpose(-1, -2).contiguous().transpose(-1, -2) if name in which else x
    q, k, v = tensors.values()
    assert ("q" in which) == (q.stride(-1) != 1)
    out = check(q, k, v)
    assert torch.equal(out, sdpa(*(x.contiguous() for x in (q, k, v))))

    def backward(tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        sdpa(*leaves).sum().backward()
        return [x.grad for x in leaves]

    for a, b in zip(backward((q, k, v)), backward([x.contiguous() for x in (q, k, v)]), strict=True):
        assert torch.equal(a, b)


def test_uc_058_one_kv_head_shown_to_many():
    q, k, v = hashed((1, 16, 1, 128), (1, 1, 16, 128), (1, 1, 16, 128))
    k, v = k.expand(1, 16, 16, 128), v.expand(1, 16, 16, 128)
    mask = torch.ones(1, 1, 1, 16, dtype=torch.bool)
    mask[..., 11:] = False
    assert torch.equal(check(q, k, v, mask), sdpa(q, k.contiguous(), v.contiguous(), attn_mask=mask))


def test_uc_060_only_v_is_a_transposed_view():
    q, k, v = hashed((1, 16, 62, 128), (1, 16, 62, 128), (1, 62, 2048), dtype=torch.bfloat16)
    v = v.view(1, 62, 16, 128).transpose(1, 2)
    assert torch.equal(check(q, k, v), sdpa(q, k, v.contiguous()))


def test_uc_063_contiguous_first_then_strided():
    q, k, v = hashed((1, 40, 6, 256), (1, 40, 3, 256), (1, 3, 40, 256))
    strided = q.transpose(1, 2), k.transpose(1, 2), v
    first = sdpa(*(x.contiguous() for x in strided), is_causal=True, enable_gqa=True)
    for _ in range(2):
        assert torch.equal(sdpa(*strided, is_causal=True, enable_gqa=True), first)


def test_uc_066_output_in_the_order_of_the_query():
    q, k, v = (x.transpose(1, 2) for x in hashed((2, 9, 3, 16), (2, 9, 3, 16), (2, 9, 3, 16)))
    assert sdpa(q, k, v).transpose(1, 2).is_contiguous()


def test_uc_067_slices_of_one_projection():
    qkv = hashed((2048, 1, 18, 64), dtype=torch.float16)[0].permute(1, 2, 0, 3)
    q, k, v = qkv.split([16, 1, 1], dim=1)
    q, k, v = (x[:, :, :300] for x in (q, k, v))
    out = check(q, k, v, enable_gqa=True)
    assert torch.equal(out, sdpa(*(x.contiguous() for x in (q, k, v)), enable_gqa=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset", [1, 3, 8])
def test_uc_068_views_that_start_anywhere(offset, dtype):
    shape, n = (1, 2, 33, 40), 2 * 33 * 40
    q, k, v = (x[offset : offset + n].view(shape) for x in hashed((n + 8,), (n + 8,), (n + 8,), dtype=dtype))
    assert torch.equal(check(q, k, v), sdpa(*(x.clone() for x in (q, k, v))))


def test_uc_070_no_tokens():
    q = torch.zeros(7, 9, 0, 7, dtype=torch.float16)
    assert sdpa(q, q, q, is_causal=True).shape == (7, 9, 0, 7)
    with flash_attn4.enable_sdpa():
        assert F.scaled_dot_product_attention(q, q, q, is_causal=True).shape == (7, 9, 0, 7)


def test_uc_072_no_kv_heads():
    q, k = torch.zeros(1, 4, 3, 8), torch.zeros(1, 0, 3, 8)
    with pytest.raises((RuntimeError, ValueError), match="heads"):
        torch.ops.fa4.fwd(q, k, k)
    with pytest.raises((RuntimeError, ValueError)):
        sdpa(q, k, k, enable_gqa=True)


@pytest.mark.timeout(30)
def test_uc_074_no_keys_and_no_queries():
    q, k, v = hashed((1, 2, 64, 16), (1, 2, 0, 16), (1, 2, 0, 16))
    out, lse = torch.ops.fa4.fwd(q, k, v)
    assert (out == 0).all()
    assert (lse == -inf).all()
    assert all((g == 0).all() for g in gradients(lambda *x: torch.ops.fa4.fwd(*x)[0], q, k, v))
    out, lse = torch.ops.fa4.fwd(k, q, q)
    assert out.shape == (1, 2, 0, 16)
    assert lse.shape == (1, 2, 0)
    assert all((g == 0).all() for g in gradients(lambda *x: torch.ops.fa4.fwd(*x)[0], k, q, q))


@pytest.mark.parametrize("len_kv", [128, 1])
def test_uc_077_everything_of_size_one(len_kv):
    q, k, v = hashed((1, 1, 1, 64), (1, 1, len_kv, 64), (1, 1, len_kv, 64), dtype=torch.bfloat16)
    out = check(q, k, v)
    if len_kv == 1:
        assert torch.equal(out, v)


def test_uc_079_mask_offsets_past_2_to_the_31():
    row = 2**31 + 64
    storage = torch.empty(2 * row + 8, dtype=torch.bool)  # 4 GiB of address space, three pages touched
    mask = storage.as_strided((3, 8), (row, 1))
    keep = torch.tensor(
        [[1, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]], dtype=torch.bool
    )
    mask.copy_(keep)
    q, k, v = hashed((1, 1, 3, 8), (1, 1, 8, 8), (1, 1, 8, 8))
    assert torch.equal(sdpa(q, k, v, attn_mask=mask), check(q, k, v, keep))


def test_uc_080_late_rows_of_97220_tokens():
    first, n = 96_940, 97_220
    q, k, v = hashed((1, 1, 280, 80), (1, 1, n, 80), (1, 1, n, 80), dtype=torch.bfloat16)
    late = torch.ops.fa4.fwd(q, k, v, lo=first - 64, hi=first)  # row i sees the 65 keys that end at its own position
    cut = 96_768  # where a block of keys begins, whatever its size
    lo, hi = first - 64 - cut, first - cut
    short = torch.ops.fa4.fwd(q, k[:, :, cut:], v[:, :, cut:], lo=lo, hi=hi)
    for a, b in zip(late, short, strict=True):
        assert torch.equal(a, b)
    accurate(late[0], q, k[:, :, cut:], v[:, :, cut:], lo=lo, hi=hi)
    check(q[:, :, -3:], k, v)


def test_uc_081_gradients_of_a_large_batch_of_single_tokens():
    q, k, v, dout = torch.randn(4, 8300, 1, 16, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    leaves = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    out = sdpa(*leaves)
    assert torch.equal(out, leaves[2])
    dq, dk, dv = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
    assert torch.equal(dv, dout.transpose(1, 2))
    terms = (dout.float() * v).norm(dim=-1).max()  # dP - D is a difference of two sums of such terms
    for grad in (dq, dk):
        assert grad.abs().max() <= 2**-7 * terms * max(q.abs().max(), k.abs().max()) / math.sqrt(128)


@pytest.mark.parametrize("mask_grad", [False, True])
@pytest.mark.parametrize("len_kv", [361, 364])
@pytest.mark.parametrize("dtype", FLOATS)
def test_uc_089_saved_tensors_that_were_moved_away_and_back(dtype, len_kv, mask_grad):
    q, k, v, mask = hashed((1, 2, 30, 64), (1, 2, len_kv, 64), (1, 2, len_kv, 64), (1, 1, 30, len_kv + 7), dtype=dtype)
    mask = mask[..., 3 : len_kv + 3]  # neither its start nor its rows are aligned
    mask.requires_grad_(mask_grad)
    leaves = [x.requires_grad_() for x in (q, k, v)] + [mask] * mask_grad

    def both():
        out = sdpa(q, k, v, attn_mask=mask)
        return out.detach(), *torch.autograd.grad(out.sum(), leaves)

    with flash_attn4.set_fallback("silent"):  # the gradient of a mask is PyTorch's
        expected = both()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous().clone(), torch.clone):
            moved = both()
    for a, b in zip(moved, expected, strict=True):
        torch.testing.assert_close(a, b)
    accurate(moved[0], *(x.detach() for x in (q, k, v)), mask=mask.detach())


def test_uc_083_uc_084_batch_and_heads_above_65535():
    for shape in [(65536, 8, 4, 64), (1, 65536, 10, 16), (65537, 1, 1, 8)]:
        q = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        out = sdpa(q, q, q)
        for b, h in [(0, 0), (shape[0] - 1, shape[1] - 1)]:
            one = q[b : b + 1, h : h + 1]
            accurate(out[b : b + 1, h : h + 1], one, one, one)


def test_uc_091_devices_are_named():
    q, k = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8, device="meta")
    for function in (sdpa, torch.ops.fa4.fwd):
        with pytest.raises((RuntimeError, ValueError), match=r"(?s)cpu.*meta|meta.*cpu"):
            function(q, k, q)
    with pytest.raises((RuntimeError, ValueError), match=r"(?s)cpu.*meta|meta.*cpu"):
        flash_attn_func(q, k, q)


def test_uc_092_uc_094_thirty_backward_passes_agree():
    q, k, v = hashed((2, 2, 200, 32), (2, 1, 150, 32), (2, 1, 150, 32), dtype=torch.bfloat16)
    first = gradients(lambda *x: sdpa(*x, enable_gqa=True), q, k, v)
    for _ in range(30):
        assert all(map(torch.equal, gradients(lambda *x: sdpa(*x, enable_gqa=True), q, k, v), first))


def test_uc_095_dropout_looks_at_its_argument_only():
    q = hashed((1, 2, 40, 16))[0]
    with pytest.warns(RuntimeWarning, match="dropout"):
        dropped = sdpa(q, q, q, dropout_p=0.5)
    assert not torch.equal(dropped, sdpa(q, q, q))
    layer = torch.nn.TransformerEncoderLayer(16, 2, dropout=0.5, batch_first=True).eval()
    x = hashed((2, 40, 16))[0]
    with flash_attn4.enable_sdpa():
        assert torch.equal(layer(x), layer(x))


def test_uc_097_a_gradient_of_stride_zero():
    q, k, v = hashed((1, 16, 1, 64), (1, 16, 4096, 64), (1, 16, 4096, 64), dtype=torch.bfloat16)
    exact = exact_gradients(q, k, v)
    for ours, want in zip(gradients(sdpa, q, k, v), exact, strict=True):
        assert max_error(ours, want) <= 0.02 * float(want.abs().max()) + rounding_floor(want, dtype=ours.dtype)


def test_uc_105_the_schema_is_the_recorded_one():
    options = "Tensor? attn_mask=None, Tensor? len_kv=None, SymInt? lo=None, SymInt? hi=None, float? scale=None"
    assert str(torch.ops.fa4.fwd.default._schema) == (
        f"fa4::fwd(Tensor q, Tensor k, Tensor v, {options}) -> (Tensor out, Tensor lse)"
    )
    assert str(torch.ops.fa4.bwd.default._schema) == (
        f"fa4::bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {options}) "
        "-> (Tensor dq, Tensor dk, Tensor dv)"
    )


@pytest.mark.parametrize("dtype", HALF)
def test_uc_107_autocast_with_mixed_inputs(dtype):
    q, k, v = hashed((1, 2, 20, 16), (1, 2, 20, 16), (1, 2, 20, 16))
    with torch.autocast("cpu", dtype):
        out = sdpa(q, k, v.to(dtype))
    assert out.dtype == dtype
    accurate(out, *(x.to(dtype) for x in (q, k, v)))
    with pytest.raises((ValueError, RuntimeError), match=r"(?s)float32.*float32.*float16"):
        flash_attn_func(q, k, v.half())


def test_uc_108_vmap_equals_a_loop():
    q, k, v = hashed((3, 2, 4, 9, 16), (3, 2, 4, 9, 16), (3, 2, 4, 9, 16))
    for function in (sdpa, lambda *x: torch.ops.fa4.fwd(*x)[0]):
        loop = torch.stack([function(*x) for x in zip(q, k, v, strict=True)])
        assert torch.equal(torch.vmap(function)(q, k, v), loop)
    q, k, v = hashed((32, 8, 40, 64), (32, 8, 40, 64), (32, 8, 40, 64))
    torch.testing.assert_close(torch.vmap(sdpa)(q, k, v), sdpa(q, k, v))


TWO_PROCESSES = """
    import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
    import flash_attn4

    def work(rank, port):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=2)
        {body}
        dist.destroy_process_group()

    if __name__ == "__main__":
        import socket
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        mp.spawn(work, (port,), nprocs=2)
        print("ok")
"""


def two_processes(tmp_path, body):
    file = tmp_path / "two.py"
    body = textwrap.indent(textwrap.dedent(body), " " * 4).strip()
    file.write_text(textwrap.dedent(TWO_PROCESSES).format(body=body))
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ok" in done.stdout


@pytest.mark.timeout(150)
def test_uc_110_heads_sharded_over_two_processes(tmp_path):
    two_processes(
        tmp_path,
        """
        from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 4, 10, 8) for _ in range(3))
        local = [distribute_tensor(x, mesh, [Shard(1)]).to_local() for x in (q, k, v)]
        mine = flash_attn4.scaled_dot_product_attention(*local)
        out = DTensor.from_local(mine, mesh, [Shard(1)]).full_tensor()
        torch.testing.assert_close(out, flash_attn4.scaled_dot_product_attention(q, k, v))
        """,
    )


def test_uc_111_checkpoint_policies_name_the_operator():
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    q, k, v = hashed((1, 2, 30, 16), (1, 2, 30, 16), (1, 2, 30, 16))

    def model(q, k, v):
        return torch.ops.fa4.fwd(q * 1.5, k, v)[0].relu()

    plain = gradients(model, q, k, v)
    for wanted in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE):
        seen = []

        def policy(context, op, *args, wanted=wanted, seen=seen, **kwargs):
            seen.append(str(op))
            return wanted if op is torch.ops.fa4.fwd.default else CheckpointPolicy.PREFER_RECOMPUTE

        def contexts(policy=policy):
            return create_selective_checkpoint_contexts(policy)

        def saved(*x, contexts=contexts):
            return checkpoint(model, *x, use_reentrant=False, context_fn=contexts)

        assert all(map(torch.equal, gradients(saved, q, k, v), plain))
        assert "fa4.fwd.default" in seen


@pytest.mark.timeout(150)
def test_uc_111_under_ddp(tmp_path):
    two_processes(
        tmp_path,
        """
        from torch.utils.checkpoint import checkpoint
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.qkv = torch.nn.Linear(16, 48)
            def forward(self, x):
                q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
                return checkpoint(flash_attn4.scaled_dot_product_attention, q, k, v, use_reentrant=False)
        torch.manual_seed(0)
        net = torch.nn.parallel.DistributedDataParallel(Net())
        x = torch.randn(4, 12, 16)
        net(x[2 * rank : 2 * rank + 2]).mean().backward()
        torch.manual_seed(0)
        alone = Net()
        alone(x).mean().backward()
        torch.testing.assert_close(net.module.qkv.weight.grad, alone.qkv.weight.grad)
        """,
    )


def test_uc_112_never_silently_cut_off_from_the_graph():
    q = hashed((1, 2, 5, 8))[0].requires_grad_()
    out, lse = torch.ops.fa4.fwd(q, q, q)
    assert out.requires_grad
    assert lse.requires_grad
    (out.sum() + lse.sum()).backward()
    assert q.grad.isfinite().all()
    assert q.grad.abs().max() > 0


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = sdpa
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.attention(self.linear(x), x, x)


def test_uc_114_copies_and_pickles(tmp_path):
    model, x = Model(), hashed((1, 2, 5, 8))[0]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), model(x))
    pickle.loads(pickle.dumps(flash_attn_func))


def test_uc_115_a_bias_that_needs_a_gradient_gets_it_or_is_refused():
    q, k, v = hashed((1, 2, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    bias = hashed((1, 2, 6, 6))[0].requires_grad_()
    F.scaled_dot_product_attention(q, k, v, attn_mask=bias).sum().backward()
    want, bias.grad = bias.grad, None
    with pytest.warns(RuntimeWarning, match="requires grad"):
        out = sdpa(q, k, v, attn_mask=bias)
    out.sum().backward()
    torch.testing.assert_close(bias.grad, want)
    with pytest.raises((RuntimeError, NotImplementedError, ValueError), match="mask"):
        torch.ops.fa4.fwd(q, k, v, attn_mask=bias)


@pytest.mark.timeout(120)
def test_uc_121_many_threads_at_once():
    shapes = [(1, 2, 10 + 7 * i, 8 + 8 * (i % 3)) for i in range(8)]
    inputs = [hashed(s, s, s) for s in shapes]
    expected = [sdpa(*x) for x in inputs]
    wrong = []

    def work(x, want):
        for _ in range(200):
            if not torch.equal(sdpa(*x), want):
                wrong.append(x[0].shape)

    threads = [threading.Thread(target=work, args=a) for a in zip(inputs, expected, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_uc_122_import_without_a_gpu():
    code = "import flash_attn4, torch; assert not torch.cuda.is_initialized(); print('ok')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout == "ok\n"
    assert done.stderr == ""


def test_uc_123_one_error_with_every_reason():
    q = torch.zeros(2, 4, 8)
    with pytest.raises((RuntimeError, ValueError), match="q"):
        torch.ops.fa4.fwd(q, q, q)
    q = torch.zeros(1, 1, 2, 1000)
    with pytest.raises(RuntimeError, match=r"(?s)256.*1000"):
        torch.ops.fa4.fwd(q, q, q)
    a, b = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8, dtype=torch.float64)
    with pytest.raises((RuntimeError, ValueError), match=r"k is float64.*float32"):
        torch.ops.fa4.fwd(a, b, a)
    with pytest.raises((RuntimeError, ValueError), match=r"(?is)int|long"):
        torch.ops.fa4.fwd(*[torch.zeros(1, 1, 2, 8, dtype=torch.int64)] * 3)
    assert sdpa(*[torch.zeros(2, 4, 8)] * 3).shape == (2, 4, 8)


def test_uc_126_every_architecture_has_kernels_or_is_named():
    ask = flash_attn4.ops.ask
    family = [ask(False, arch, "bfloat16", 64, 64) for arch in (100, 103)]  # code of sm_100f runs on both
    assert family == [None, None] or all("no CUDA kernels" in reason for reason in family)
    for arch in (70, 80, 86, 89, 91, 101, 110, 120, 121):
        assert f"capability {arch // 10}.{arch % 10}" in ask(False, arch, "bfloat16", 64, 64)


def test_uc_142_padding_masks_both_ways():
    q, k, v = hashed((2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))
    ignore = torch.zeros(2, 6, dtype=torch.bool)
    ignore[1, 4:] = True
    out = sdpa(q, k, v, attn_mask=~ignore[:, None, None, :])
    torch.testing.assert_close(out[1:], sdpa(q[1:], k[1:, :, :4], v[1:, :, :4]))
    torch.testing.assert_close(torch.ops.fa4.fwd(q, k, v, len_kv=torch.tensor([6, 4], dtype=torch.int32))[0], out)


def test_uc_144_the_layouts_of_the_two_functions():
    q, k, v = hashed((2, 8, 8, 16), (2, 8, 8, 16), (2, 8, 8, 16))  # len == heads: the shape cannot tell
    heads_first = sdpa(q, k, v)
    len_first = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    assert torch.equal(heads_first, len_first)
    assert not torch.equal(heads_first, flash_attn_func(q, k, v))
    assert "[batch, len, heads, dim]" in " ".join(flash_attn_func.__doc__.split()[:40])
    assert "heads, len, dim]" in " ".join(sdpa.__doc__.split()[:40])


@pytest.mark.timeout(60)
def test_uc_146_the_first_result_of_a_process_comes_at_once():
    code = """if True:
        import time, torch, flash_attn4
        q = torch.ones(1, 1, 4, 8)
        start = time.perf_counter()
        torch.ops.fa4.fwd(q, q, q)
        print(time.perf_counter() - start)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5


# Checks that catch whole groups.


def test_a_zero_query_gives_the_mean_of_the_visible_values():
    for len_kv in (1, 31, 64, 65, 130):
        k, v = hashed((1, 2, len_kv, 24), (1, 2, len_kv, 24))
        out = flash_attn_func(
            torch.zeros(1, len_kv, 2, 24), k.transpose(1, 2), v.transpose(1, 2), causal=True
        ).transpose(1, 2)
        mean = v.double().cumsum(2) / torch.arange(1, len_kv + 1)[:, None]
        torch.testing.assert_close(out.double(), mean, atol=1e-6, rtol=1e-6)


def test_halves_of_the_keys_merge_through_the_log_sum_exp():
    q, k, v = hashed((1, 2, 40, 32), (1, 2, 150, 32), (1, 2, 150, 32))
    whole, lse = torch.ops.fa4.fwd(q, k, v)
    (a, la), (b, lb) = (torch.ops.fa4.fwd(q, k[:, :, s], v[:, :, s]) for s in (slice(0, 70), slice(70, 150)))
    both = torch.logaddexp(la, lb)
    torch.testing.assert_close(both, lse)
    torch.testing.assert_close(a * (la - both).exp()[..., None] + b * (lb - both).exp()[..., None], whole)


def test_decode_equals_prefill():
    q, k, v = hashed((1, 4, 67, 32), (1, 2, 67, 32), (1, 2, 67, 32))
    whole = sdpa(q, k, v, is_causal=True, enable_gqa=True)
    for i in (0, 1, 31, 63, 64, 66):
        one = flash_attn_func(
            q[:, :, i : i + 1].transpose(1, 2),
            k[:, :, : i + 1].transpose(1, 2),
            v[:, :, : i + 1].transpose(1, 2),
            causal=True,
        )
        torch.testing.assert_close(one.transpose(1, 2), whole[:, :, i : i + 1], atol=2e-6, rtol=2e-6)


def test_results_do_not_depend_on_earlier_calls():
    q, k, v = hashed((2, 2, 33, 40), (2, 2, 65, 40), (2, 2, 65, 40))
    first = sdpa(q, k, v)
    for dtype, shape in [
        (torch.float16, (1, 1, 200, 256)),
        (torch.float64, (3, 1, 1, 1)),
        (torch.bfloat16, (1, 5, 17, 96)),
    ]:
        x = hashed(shape, dtype=dtype)[0]
        sdpa(x, x, x)
        assert torch.equal(sdpa(q, k, v), first)
