"""Which calls over a cache the forward kernel takes by itself, and which it leaves to Flash-Decoding: as measured on an
H200, `cached_rows` and `cached_chunks` in hopper-runs-h200.json."""

from __future__ import annotations

from ...cache import CachedCall
from ..triton.config import padded_dim
from ..triton.decode_config import MANY_SEQUENCES, UNEVEN, bytes_of_a_task, whole_tasks
from .config import choose
from .launch import programs_on

# Of a key head, queries times group: up to so many rows most of a product is for rows that are not there. At D 96 and
# 192, whose keys Flash-Decoding's tiles pad, 16 rows and long tasks are faster even so: 64 sequences of 8 heads and 4k
# keys take 191 us for 206, 373 for 386, 16 of these 52 for 62, 97 for 102; of 1k keys 17.5 for 16.3, 29 for 31.
FEW_ROWS = 16
NARROW = 32  # rows, up to which Flash-Decoding takes about as long as reading keys
# Tiles for each multiprocessor from which on whole ones are faster than keys split among programs: narrow or not, and
# whether one sequence may be much longer than others, whose tiles all wait for then. Of 8 heads and 8k keys, 64 rows:
# 5, 6, 8 sequences 60 us for 60, 62 for 72, 67 for 89, but of unlike lengths 61 for 55 at 8, 70 for 76 at 12. 32 rows:
# 62 for 58, 62 for 65 at 6, 7, unlike 61 for 45, 68 for 62 at 8, 12; of 1k keys 12.3 for 14.6 at 6, unlike 15.1 for
# 19.1 at 16.
LEAST = {(False, False): 0.3, (False, True): 0.45, (True, False): 0.4, (True, True): 0.9}
# And beyond which narrow ones of lengths on the device are left to whole tasks of Flash-Decoding, which begin the
# longest first, and where each ends: 64 of 32 rows and 1k, 2k keys take 72 us for 72, 133 for 131, unlike 47 for 41, 78
# for 71. Without lengths those are as fast from the second round on. Of head dims that they pad, or have tiles of 16
# rows for, they take 1.1 to 1.6 times as long.
MANY = 3.3


def passes_on_cached(call: CachedCall, num_splits: int) -> str | None:
    """Why it leaves a call over a cache that it could take to the next backend."""
    of, rows, size = call.spec, call.spec.seqlen_q * call.spec.group, bytes_of_a_task(call)
    programs, alike = programs_on(call.given.q.device), call.cache.alike or call.spec.batch == 1
    tiles = of.batch * of.heads_k * -(-rows // choose(of).rows)
    narrow = rows <= NARROW
    if num_splits:
        return "it does not split keys, and how a tile is computed may depend on those before it"
    if narrow and call.given.sinks is not None:
        return "sinks come in behind it, which takes longer than what it saves"
    fitting = of.head_dim == of.head_dim_v == padded_dim(of)
    few = rows <= FEW_ROWS and (fitting or size < 2 * UNEVEN)
    if few or tiles < LEAST[narrow, not alike and (not narrow or size > UNEVEN)] * programs:
        return f"{rows} rows for each of {of.heads_k} key heads of {of.batch} sequences are few for its tiles"
    many = tiles > programs if alike else tiles > MANY * programs and of.batch <= MANY_SEQUENCES
    if narrow and fitting and of.head_dim <= 128 and many and whole_tasks(call, programs):
        return f"tiles of {rows} rows are many, and nothing of them is split elsewhere either"
    return None
