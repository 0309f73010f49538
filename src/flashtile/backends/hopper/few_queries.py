"""The forward pass of few queries over many keys, as a call over a cache whose keys programs share."""

from __future__ import annotations

import functools

from torch import Tensor

from ...cache import MANY_KEYS, over_a_cache
from ...spec import AttentionSpec
from ..launcher import Launcher, Run
from .cached_launch import CACHED, CachedSpec
from .cached_schedule import are_shared
from .config import choose
from .launch import shares


class FewQueries(Launcher):
    """`forward_kernel` and `merge_kernel`."""

    def prepare(self, spec: AttentionSpec, tensors: tuple) -> Run:
        *queries_and_keys, out, lse = tensors
        given = over_a_cache(spec, *queries_and_keys).given
        _, _, _, *nothing = given
        cached = CachedSpec(spec, page_size=0, seqlen_new=0, rows=spec.batch)
        run = CACHED.run_for((None, cached), (*given, spec.seqlen_k, None), (out, lse))

        def launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
            run(q, k, v, *nothing, spec.seqlen_k, None, out, lse)

        return launch


FEW_QUERIES = FewQueries()


@functools.lru_cache(maxsize=4096)
def are_few(spec: AttentionSpec, programs: int) -> bool:
    """Whether a call without a cache is better one over a cache: not where it shares out the last round of its tiles as
    it is, without a mask. 64 queries of 32 heads and 8 key heads over 8k keys take 24 us for 80, without a mask 24 for
    23, 256 of these 53 for 86, 54 for 55, 64 over 2k 15 for 24 either way."""
    if spec.seqlen_k < MANY_KEYS * spec.seqlen_q or not are_shared(spec, True, programs):
        return False
    return spec.window_right >= 0 or not any(shares(spec, choose(spec), programs).pieces)
