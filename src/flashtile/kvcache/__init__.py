"""Key/value caches in the form that flash_attn_with_kvcache reads."""

from .contiguous import ContiguousCache

__all__ = ["ContiguousCache"]
