"""FlashAttention-4 in C and CUDA as a PyTorch operator.

flash_attn4.scaled_dot_product_attention    PyTorch's function, [batch, heads, len, dim]
flash_attn4.flash_attn_func                 the flash packages' words, [batch, len, heads, dim]
flash_attn4.enable_sdpa                     PyTorch's own function on our kernels, by one line
flash_attn4.enable_transformers             attn_implementation="fa4"
flash_attn4.explain                         what would run, and why nothing faster
torch.ops.fa4.fwd, torch.ops.fa4.bwd        the operators
"""

from .interface import (
    Explanation,
    backends,
    call_counts,
    cpu_isa,
    cpu_isas,
    explain,
    flash_attn_func,
    scaled_dot_product_attention,
    set_fallback,
)
from .sdpa import enable_sdpa
from .transformers import enable_transformers

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "__version__",
    "backends",
    "call_counts",
    "cpu_isa",
    "cpu_isas",
    "enable_sdpa",
    "enable_transformers",
    "explain",
    "flash_attn_func",
    "scaled_dot_product_attention",
    "set_fallback",
]
