"""flashtile: exact FlashAttention for PyTorch, written in Python."""

from .interface import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func

__version__ = "0.1.0"

__all__ = ["__version__", "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]
