"""flashtile: exact FlashAttention for PyTorch, written in Python."""

from .interface import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_with_kvcache
from .version import __version__

__all__ = [
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_with_kvcache",
]
