"""FlashAttention-4 in C and CUDA as a PyTorch operator."""

__version__ = "0.1.0"
