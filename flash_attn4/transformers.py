"""enable_transformers(): the attention of Hugging Face transformers models by attn_implementation="fa4"."""

import threading

from .interface import scaled_dot_product_attention
from .sdpa import Handle

NAME = "fa4"

_lock = threading.Lock()
_handles = []  # those that keep the name registered


def enable_transformers():
    """Layout [batch, heads, len, dim]: register our attention and its masks in transformers under the name "fa4".

    Then `model.set_attn_implementation("fa4")`, or attn_implementation="fa4" for from_pretrained and from_config, puts
    a model on our kernels. Masks are those of "sdpa": padding, causal and sliding windows are kept. What our kernels
    cannot run goes to PyTorch's, as in scaled_dot_product_attention.

    Returns a handle: handle.remove(), or `with enable_transformers():`, takes the name away again when it was the last
    one; a model that still uses it then fails.

    Raises ImportError without transformers 4.53 or newer.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def undo(handle):
        with _lock:
            _handles.remove(handle)
            if not _handles:
                for interface in (AttentionInterface, AttentionMaskInterface):
                    interface._global_mapping.pop(NAME, None)

    with _lock:
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        handle = Handle(undo)
        _handles.append(handle)
    return handle


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **kwargs):
    """What transformers calls: query [batch, heads, len, dim], key and value with their own heads.

    Returns [batch, len, heads, dim] and None (no weights). Raises NotImplementedError for attention sinks and softcap.
    """
    for name in ("s_aux", "softcap"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"flash_attn4: {name} of {type(module).__name__} is not implemented")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=attention_mask is None and is_causal and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None
