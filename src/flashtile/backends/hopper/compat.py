"""What differs between the Gluon of Triton 3.6 and of later releases, under one name each."""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate
load_async = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_async = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
