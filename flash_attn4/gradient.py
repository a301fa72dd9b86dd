"""The gradient of fa4::fwd on CUDA by PyTorch's own kernels, until there are some of ours: the backward kernels of
flash attention and of cuDNN take out and lse and do not ask who made them.

cuDNN's is the faster one, and does whole and top-left causal masks. The flash kernel does any band: its window is
aligned at the bottom right, which is no limit once the queries that see nothing and the keys that nobody sees are cut
off.
"""

import torch
import torch.nn.functional as F

_DIM_MAX = 256  # of PyTorch's flash kernels

calls = 0  # of fa4::bwd on CUDA in this process


def unsupported(len_kv):
    """None, or why there is no gradient on CUDA of a call that the forward can run."""
    if len_kv is not None:
        return "on CUDA there is no gradient with lengths of keys per batch (len_kv): give PyTorch's function a mask"
    return None


def backward(dout, dlse, q, k, v, out, lse, lo, hi, scale):
    """dq, dk, dv. q [batch, heads_q, len_q, dim], k [batch, heads_kv, len_kv, dim], v [batch, heads_kv, len_kv, dim_v]
    of float16 or bfloat16; query i sees key j when lo <= j - i <= hi. dlse may be None."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if scale <= 0:  # the kernels want a positive one
        sign = float(scale < 0)
        dq, dk, dv = backward(dout, dlse, q * -sign, k, v, out, lse, lo, hi, -scale or 1.0)
        return dq * -sign, dk, dv
    rows, keys, left, right = _window(q.shape[2], k.shape[2], lo, hi)
    if min(*q.shape[:2], len(rows), len(keys)) == 0:
        return tuple(torch.zeros_like(x) for x in (q, k, v))
    whole = left is right is None
    if dlse is None and (whole or (lo is None and hi == 0)) and _cudnn_can(q, k, v, not whole):
        return _cudnn(dout, q, k, v, out, lse, not whole, scale)

    dim, dim_v = q.shape[3], v.shape[3]
    width = -(-max(dim, dim_v + (0 if dlse is None else 2)) // 8) * 8
    if width > _DIM_MAX:
        raise NotImplementedError(
            f"flash_attn4: on CUDA there is no gradient of lse with a head dim of v over {_DIM_MAX - 2}: {dim_v}"
        )
    cut = [x[:, :, rows.start : rows.stop] for x in (q, out, lse, dout)]
    k_cut, v_cut = (x[:, :, keys.start : keys.stop] for x in (k, v))
    if dlse is not None:
        cut[1], cut[3] = _with_dlse(cut[1], cut[3], dlse[:, :, rows.start : rows.stop])
    q_cut, out_cut, dout_cut, k_cut, v_cut = (
        F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x for x in (cut[0], cut[1], cut[3], k_cut, v_cut)
    )
    dq, dk, dv = _flash(dout_cut, q_cut, k_cut, v_cut, out_cut, cut[2].contiguous(), left, right, scale)
    return (
        _uncut(dq[..., :dim], q.shape[2], rows),
        _uncut(dk[..., :dim], k.shape[2], keys),
        _uncut(dv[..., :dim_v], k.shape[2], keys),
    )


def _window(len_q, len_kv, lo, hi):
    """The queries that see a key and the keys that a query sees, and the flash kernel's window over these: query i of
    them sees key j when -left <= j - i - (keys - queries) <= right. None is an open side."""
    lo = -len_q if lo is None else max(lo, -len_q)
    hi = len_kv if hi is None else min(hi, len_kv)
    rows = range(max(0, -hi), min(len_q, len_kv - lo))
    keys = range(max(0, lo), min(len_kv, len_q + hi))
    if lo > hi:
        rows = keys = range(0)
    shift = (len(keys) - len(rows)) - (rows.start - keys.start)
    left, right = shift - lo, hi - shift
    return rows, keys, None if left >= len(keys) - 1 else left, None if right >= len(rows) - 1 else right


def _cudnn_can(q, k, v, is_causal):
    dims = (q.shape[3], v.shape[3])
    if max(dims) > 128 and dims != (192, 128):
        return False
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, is_causal, q.shape[1] != k.shape[1])
    return torch.backends.cuda.can_use_cudnn_attention(params)


def _cudnn(dout, q, k, v, out, lse, is_causal, scale):
    no_seed = torch.empty((), dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.contiguous().unsqueeze(-1), no_seed, no_seed, None, None, None, q.shape[2], k.shape[2],
        0.0, is_causal, scale=scale,
    )  # fmt: skip


def _flash(dout, q, k, v, out, lse, left, right, scale):
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    no_seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, left is None and right == 0, no_seed, no_seed,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return [grad.transpose(1, 2) for grad in grads]


def _with_dlse(out, dout, dlse):
    """out and dout with two columns more, for which v has zeros. The kernels subtract the sum of out * dout from what
    dout v gives a key; the columns make it that sum less dlse, which is what the gradient of lse is."""
    dlse = dlse.unsqueeze(-1)
    high = dlse.to(out.dtype)
    low = (dlse - high).to(out.dtype)
    ones = torch.ones_like(high)
    return torch.cat([out, ones, ones], -1), torch.cat([dout, -high, -low], -1)


def _uncut(grad, length, kept):
    """Zeros around the rows that were kept."""
    return grad if len(kept) == length else F.pad(grad, (0, 0, kept.start, length - kept.stop))
