"""Key/value caches in the form that flash_attn_with_kvcache reads: contiguous, and paged."""

from .contiguous import ContiguousCache
from .paged import OutOfPagesError, PagedCache

__all__ = ["ContiguousCache", "OutOfPagesError", "PagedCache"]
