"""Masks that say no more than a band and how many keys each batch has: the GPU kernels take those two, and no mask."""

import dataclasses

import torch
from torch.utils.weak import WeakIdKeyDictionary


@dataclasses.dataclass(frozen=True)
class Keys:
    """Query i of batch b sees key j when lo <= j - i <= hi (None: open) and j < len_kv[b] (None: all are there)."""

    len_kv: torch.Tensor | None  #: int32 [batch], on the mask's device
    lo: int | None
    hi: int | None


_known = WeakIdKeyDictionary()  # of a mask: its version and place, and what for; what keys_of found


def keys_of(mask, batch, len_q):
    """The Keys that a boolean mask [batch or 1, 1, len_q or 1, len_kv] is for so many batches and queries, or why it is
    none, as a sentence.

    Found out once for each mask and each change of it: the device computes, and the host waits for seven numbers. The
    layers of a model that are given the same tensor do not wait again. A tensor of inference_mode does not count its
    changes, so it is looked at each time. While a CUDA graph is captured nothing is found out, nor known: a replay
    might bring another mask in the same memory. What changes a mask behind torch's back is not seen."""
    if mask.dtype != torch.bool:
        return "attn_mask is added to the scores, and the GPU kernels take no mask but one of key lengths"
    if mask.dim() > 4 or (mask.dim() >= 3 and mask.shape[-3] != 1 and mask.stride(-3) != 0):
        return "attn_mask differs from head to head"
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return "attn_mask is not looked at while compiling, or under torch.func"
    if type(mask) not in (torch.Tensor, torch.nn.Parameter):
        return f"attn_mask is not looked at: it is a {type(mask).__name__}"
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return "attn_mask is not looked at while a CUDA graph is captured"
    if mask.is_inference():
        return _find(mask, batch, len_q)
    # mask.data = other is no new version.
    now = mask._version, mask.data_ptr(), mask.shape, mask.stride(), batch, len_q
    known = _known.get(mask)
    if known is None or known[0] != now:
        known = _known[mask] = (now, _find(mask, batch, len_q))
    elif isinstance(known[1], Keys):
        _keep_for_this_stream(known[1].len_kv)
    return known[1]


def _keep_for_this_stream(lengths):
    """A kernel on this stream may still read them when the mask is gone, and its lengths with it."""
    if lengths is not None and lengths.is_cuda:
        lengths.record_stream(torch.cuda.current_stream(lengths.device))


def _find(mask, batch, len_q):
    mask = mask[(None,) * (4 - mask.dim())]
    seen = mask[:, 0].expand(batch, *mask.shape[2:])  # [batch, len_q or 1, len_kv]
    rows, len_kv = seen.shape[1:]
    if seen.numel() == 0:
        return Keys(None, None, None)
    i = torch.arange(rows, device=mask.device)
    # The first key of each row, and one past its last; 0 and 0 where it sees none.
    any_key = seen.any(-1)
    begin = seen.view(torch.uint8).argmax(-1)
    end = torch.where(any_key, len_kv - seen.flip(-1).view(torch.uint8).argmax(-1), 0)
    length = end.amax(1)
    # A row that ends before its batch does ends by the band, one that begins after the first key begins by it. All such
    # rows must agree; the largest is as good as any, since the band is compared with the mask.
    early, late = any_key & (end < length[:, None]), begin > 0
    hi = torch.where(early, end - 1 - i, -rows).amax()
    lo = torch.where(late, begin - i, -rows).amax()
    first = (i + lo).clamp(min=0)
    by_band = torch.where(early.any(), i + hi + 1, len_kv).clamp(max=len_kv)
    past = torch.minimum(by_band, length[:, None])
    j = torch.arange(len_kv, device=mask.device)
    same = (seen == ((j >= first[:, None]) & (j < past[..., None]))).all()
    left, padded = late[:, -1].any(), (length < by_band[-1]).any()
    lengths = length.to(torch.int32)  # before the host waits: whatever stream uses it later, it is there
    same, left, padded, has_lo, has_hi, lo, hi = torch.stack(
        [x.long() for x in (same, left, padded, late.any(), early.any(), lo, hi)]
    ).tolist()
    if rows < len_q and (has_lo or has_hi):
        same = False  # one row for all queries is no band
    if same:
        return Keys(lengths if padded else None, lo if has_lo else None, hi if has_hi else None)
    if left:
        return (
            "attn_mask hides the first keys of a batch (padding on the left), and the GPU kernels only know how many "
            "keys a batch has: pad on the right"
        )
    return "attn_mask is neither a band nor padding on the right, and the GPU kernels take no other"
