"""Tiles of the Hopper kernels, by head dim: frozen, checked, with the measured reason beside each number."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...spec import AttentionSpec

SHARED_BYTES = 227 * 1024  # of one multiprocessor, all of it for one program


def check_fit(tiles: Tiles | BackwardTiles | QueryTiles) -> None:
    """Raises ValueError unless shared memory holds them."""
    if tiles.shared_bytes > SHARED_BYTES:
        raise ValueError(f"shared memory: got {tiles.shared_bytes} bytes; want at most {SHARED_BYTES}: {tiles}")


@dataclass(frozen=True)
class Tiles:
    """Warpgroups of tile_m rows each, key blocks of tile_n keys, and how many Q and K, V blocks are in flight."""

    head_dim: int  # D as Q and K lie in shared memory
    head_dim_v: int  # Dv, as V and O lie there
    warpgroups: int
    tile_n: int
    q_stages: int
    stages: int
    compute_registers: int
    q_kept: int = 0  # dims of Q, from the first on, in registers, rather than read again for every key block
    parts: int = 1  # Q and K lie in this many blocks, each a power of two wide
    parts_v: int = 1  # as V and, in registers, O do
    out_parts: int = 1  # O leaves in this many parts, through shared memory for one
    load_registers: int = 24
    tails: bool = False  # without a mask, up to 16 keys past the last whole block take products of 16
    flat: bool = True  # a tile's first product runs under the last of the tile before
    o_awaited: str = "behind"  # when O += P V is: before, half way through or behind the softmax of the next block
    tile_m: int = 64  # rows of one wgmma

    def __post_init__(self) -> None:
        if self.o_awaited not in ("before", "half way", "behind"):
            raise ValueError(f"o_awaited: got {self.o_awaited!r}; want before, half way or behind")
        if self.warpgroups not in (2, 3):
            raise ValueError(f"warpgroups: got {self.warpgroups}; want 2 or 3")
        firsts = (0, 2 * self.head_dim // 3 if self.parts == 3 else self.head_dim // 2)
        if self.q_kept not in firsts:
            raise ValueError(f"q_kept: got {self.q_kept}; want one of {firsts} at {self.head_dim} dims: {self}")
        if self.rows - self.tile_m > self.tile_n:
            apart = self.rows - self.tile_m
            raise ValueError(
                f"tile_n: got {self.tile_n}; want at least {apart}, as warpgroups end a block apart: {self}"
            )
        check_fit(self)

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return self.warpgroups * self.tile_m

    @property
    def shared_bytes(self) -> int:
        q_and_k = (self.q_stages * self.rows + self.stages * self.tile_n) * self.head_dim
        v_and_out = self.stages * self.tile_n * self.head_dim_v + self.rows * self.head_dim_v // self.out_parts
        barriers = 16 * (self.warpgroups * self.q_stages + 2 * self.stages)
        failures = 4 * 4 * self.tile_m
        return 2 * (q_and_k + v_and_out) + barriers + failures


D64 = Tiles(
    64, 64, warpgroups=3, tile_n=128, q_stages=2, stages=4, compute_registers=160, tails=True, flat=False,
    o_awaited="before",
)  # fmt: skip
"""Three warpgroups hide more of the exponentials than two: 16k tokens on an H200, S = 2k and 16k full, 457 -> 508 and
484 -> 590 TFLOP/s. They do so by each other's products, and need none of their own under a softmax: O awaited before it
S = 2k, 4k, 16k, 128k full +3, +4.5, +4.5, +4 %, hot +1.5 to +3.5 %, causal 2k 0, 8k +1 %; and no flat loop, which has
room for the registers that this takes, full 0 to +2 %, causal 0; O issued before S +0.5 to +1.5 %. Tails: S = 4097 full
+4 %, other lengths -1 to +1 %; causal, where the code for them made the loops slower, they are not for. Each warpgroup
up to its own rows' last block: S = 4k and 8k causal +6, +5 %, and from 2k on ahead of D64_SHORT, 463 -> 493."""
D64_SHORT = Tiles(64, 64, warpgroups=2, tile_n=128, q_stages=3, stages=4, compute_registers=240, o_awaited="before")
"""Tiles of 192 rows waste more of a short problem: S = 512 causal 175 -> 249 TFLOP/s. Q in three stages: 253 -> 264. O
awaited before the softmax: S = 512 full +1 %, by triton 3.9 +3 %, 1k full +4 and +6 %, causal +0.5 to +4 %."""
D128 = Tiles(
    128, 128, warpgroups=2, tile_n=128, q_stages=2, stages=2, compute_registers=240, tails=True, o_awaited="half way"
)
"""tile_n 128 rather than 64: 573 -> 640 TFLOP/s in an earlier kernel of this shape. Q in two stages, for the flat loop:
+9 % at S = 512, 0 at 16k. Tails: S = 4097 full +1.5 %, other lengths -1 to +2 %; D 64 at S = 512 -3 %. Half way:
S = 512 and 1k +0.4 to +0.7 %, by triton 3.9 +0.6 to +1 %, 8k 0; D 64 and 96 -2 to -5 %."""
D96 = Tiles(
    96, 96, warpgroups=2, tile_n=128, q_stages=2, stages=3, compute_registers=240, q_kept=64, parts=3, parts_v=3,
    out_parts=3,
)  # fmt: skip
"""Q and K in blocks of 32 dims are not padded to 128: S = 4k 0.99 -> 1.04 of flash-attn 4, causal 1.02 -> 1.11. V and O
neither: +4 %, +2 %. The first 64 dims of Q in registers: +2 %, +1 %, hot +4 %, 0."""
D96_DV128 = Tiles(96, 128, warpgroups=2, tile_n=128, q_stages=2, stages=2, compute_registers=240, q_kept=64, parts=3)
"""As above, but for V and O."""
D192_DV128 = Tiles(
    192, 128, warpgroups=2, tile_n=128, q_stages=1, stages=2, compute_registers=240, q_kept=128, parts=3, out_parts=2,
    flat=False,
)  # fmt: skip
"""Q and K in blocks of 64 dims are not padded to 256: S = 2k and 8k full 472 and 502 -> 685 and 742 TFLOP/s. The
first 128 dims of Q in registers: S = 8k 0, hot +1 %. A tile that ends before the next begins compiles in 0.87 of the
time: S = 512 +2 and +1 %, 2k full +1 %, others 0."""
D192 = Tiles(
    192, 192, warpgroups=2, tile_n=64, q_stages=1, stages=3, compute_registers=240, q_kept=128, parts=3, parts_v=3,
    out_parts=3, flat=False,
)  # fmt: skip
"""V and O in blocks of 64 dims are not padded to 256 either: S = 2k and 8k full +15, +16 %; of that, K and V in three
stages, not two, +3, +2 %. The first 128 dims of Q in registers: S = 512 to 8k +0.3 to +0.5 %, and by triton 3.9 full
0.96 to 0.975 of what it makes by 3.6 -> 1.00. A tile that ends before the next begins: S = 512 full
+3.5 %, 2k +1 and +2 %, 8k 0 and +0.5 %."""
D256 = Tiles(
    256, 256, warpgroups=2, tile_n=64, q_stages=1, stages=2, compute_registers=240, q_kept=128, out_parts=2, tails=True,
    flat=False,
)  # fmt: skip
"""What fits: O takes half of the registers, and shared memory has room for one Q and half of O. A product of 64 keys
reads as much of Q as of K: with half of Q in registers S = 8k 0, hot 0 and +1 %, 32k hot 0 to +2 %, 512 -1 to 0 %. A
tile that ends before the next begins: 12 instructions of a step fewer, S = 512 +3 and +2 %, 8k +1 and 0 %, hot +1 %.
Tails: S = 4097 full +1 %, hot +2.5 %, other lengths -0.7 to 0 %."""

# Up to 64 rows, which one warpgroup has, over a cache: reading keys takes longer than computing, and more of them in
# flight than that needs cost time (`bytes_in_flight` in hopper-runs-h200.json).
D64_FEW_ROWS = replace(D64_SHORT, stages=3)
"""96 KiB of K and V in flight, not 128: 64 sequences of 16 queries, 8 heads and 8k keys 259 -> 255 us, 14 of up to 16k
71 -> 69; 64 KiB: 256, 69.5."""
D128_FEW_ROWS = replace(D128, tile_n=64, stages=3)
"""96 KiB, not 128: 64 sequences of 16 queries and up to 1k keys 48 -> 45 us, 32 of up to 2k 42 -> 41, of one length 0
to -2 %, 4 of 1k +2 %; 64 KiB: 45.5, 40.5, but 16 of up to 2k 25 -> 27."""
D128_SHARED = replace(D128_FEW_ROWS, stages=2)
"""64 KiB, where all multiprocessors read equal shares: 64 sequences of 16 queries and 8k keys 494 -> 487 us, 16 of up
to 8k 77.7 -> 76.2, one of 8k 18.1 -> 17.4; 96 KiB: 491, 76.9, 17.3; 48 KiB, in blocks of 32 keys, +4.5, +2, -4 %. Of
one query and key head 80 and 112 sequences take +1 and 0 %."""
D96_FEW_ROWS = replace(D96, tile_n=64, stages=3)
"""72 KiB, not 144: 64 sequences of 16 queries and 4k keys 196 -> 192 us, 16 of up to 8k 65 -> 62, 12 of 8k that have a
program for each tile 87 -> 76, whole tiles of 64 of up to 1k 42 -> 38; 96 KiB, in blocks of 128 keys: 192, 63, 76, 41;
48 KiB: 203, 64, 89, 39."""
D96_DV128_FEW_ROWS = replace(D96_DV128, tile_n=64, stages=2)
"""56 KiB, not 112: 64 of 4k 261 -> 253 us, one of 8k 18.5 -> 17.8, whole tiles of 64 of up to 1k 48 -> 45, a program
for each tile of 12 of 8k 101 -> 102; 84 KiB: 259, 18.1, 46, 98."""
D192_FEW_ROWS = replace(D192, stages=2)
"""96 KiB, not 144: 64 of 2k 198 -> 193 us, 16 of up to 4k 66 -> 65, a program for each tile of 12 of 4k 86 -> 76."""
D192_DV128_FEW_ROWS = replace(D192_DV128, tile_n=64, stages=2)
"""80 KiB, not 160: 64 of 2k 167 -> 162 us, 16 of up to 4k 55 -> 53, a program for each tile of 12 of 4k 71 -> 64; 120
KiB: 166, 55, 68."""


@dataclass(frozen=True)
class BackwardTiles:
    """dK and dV, and dQ unless it has a kernel of its own: two warpgroups, and how many blocks of tile_m queries, and
    of K and V, are in flight.

    With dQ each warpgroup has 64 keys; else both share 64 keys, and one holds their dV, the other dK.
    """

    head_dim: int  # D as Q and K lie in shared memory
    head_dim_v: int  # Dv, as V and dO lie there
    stages: int
    key_stages: int
    value_stages: int
    compute_registers: int = 240
    load_registers: int = 24
    tile_m: int = 64  # or 128, in two parts, up to 64 dims
    parts: int = 1  # Q and K lie in this many blocks, each a power of two wide
    parts_v: int = 1  # as V and dO do
    k_kept: int = 0  # dims of K of a tile, from the first on, in registers, rather than read again in every step
    v_kept: int = 0  # of V
    masked: str = "S"  # or exponents: these where only keys past the end of K are masked, else P
    dq_apart: bool = False  # dQ has a kernel of its own
    together: bool = True  # programs, where a head is too large for the cache: together.py
    box_keys: int = 64  # rows of one wgmma

    def __post_init__(self) -> None:
        if self.masked not in (("S",) if self.dq_apart else ("S", "exponents")):
            raise ValueError(f"masked: got {self.masked!r}; want S or, with dQ, exponents")
        if self.key_stages < 2 and not self.dq_apart:
            raise ValueError(f"key_stages: got {self.key_stages}; want 2: a tile ends after the next has begun")
        if self.tile_m not in ((64, 128) if (self.head_dim, self.parts) == (64, 1) else (64,)):
            raise ValueError(f"tile_m: got {self.tile_m}; want 64, or 128 at 64 dims in one part")
        if not self.dq_apart and (self.head_dim, self.parts) != (self.head_dim_v, self.parts_v):
            raise ValueError(f"head_dim: want one width, in as many parts, with dQ: {self}")
        if not self.dq_apart and self.parts not in (1, 3):
            raise ValueError(f"parts: got {self.parts}; want 1, or 3 of which two are one to a product, with dQ")
        check_fit(self)

    @property
    def dq_parts(self) -> int:
        """In how many parts dQ is computed: those of K, but one for each warpgroup at least."""
        return max(self.parts, 2)

    @property
    def sum_columns(self) -> tuple[int, int]:
        """Columns of the first of the sums of dK and of dV: those of a part or, with dQ, of two of three."""
        parts = 2 if self.parts == 3 and not self.dq_apart else 1
        return parts * self.head_dim // self.parts, parts * self.head_dim_v // self.parts_v

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return self.box_keys if self.dq_apart else 2 * self.box_keys

    @property
    def shared_bytes(self) -> int:
        dims = self.head_dim + self.head_dim_v
        rows = self.stages * (2 * self.tile_m * dims + 2 * 4 * self.tile_m)  # Q and dO, shifts and deltas
        keys = 2 * self.keys * (self.key_stages * self.head_dim + self.value_stages * self.head_dim_v)
        scores = 2 * 2 * self.keys * self.tile_m  # dS twice; P, if wide
        dq = 0 if self.dq_apart else 4 * self.tile_m * self.head_dim
        return rows + keys + scores + dq + 32 * self.stages + 16 * (self.key_stages + self.value_stages) + 64


BACKWARD_D64 = BackwardTiles(
    64, 64, stages=2, key_stages=2, value_stages=2, tile_m=128, k_kept=64, v_kept=64, masked="exponents"
)
"""128 queries in a step: half as many fences, and dQ 64 columns wide: products of 32 take longer to read shared memory
than to compute. S = 2k, 8k and 16k full +4, +4, +3 %, causal +4, +5, +5 % on an H200. K and V of a tile in registers,
which takes a sixth of its work off shared memory: S = 2k to 16k full +3 %, causal +1 %, hot +5 %, 512 0 on an H100.
Exponents masked, not P: S = 1k to 16k full +1.4 to +2 %; S masked: full 0 to +0.5 %, causal -2.5 to -4 %."""
BACKWARD_D128 = BackwardTiles(128, 128, stages=2, key_stages=2, value_stages=1)
"""V in one slot leaves room for dQ on its way out. S masked, not P: S = 8k full +0.6 %, causal +0.4 %, since dV is
issued as soon as there is P; exponents: full +0.4 %, causal 0."""
BACKWARD_D96 = BackwardTiles(
    96, 96, stages=2, key_stages=2, value_stages=2, parts=3, parts_v=3, k_kept=64, v_kept=64, together=False
)
"""Nothing is padded to 128, and there is room for V in two slots. Products take two parts as one: those of 32 columns
take longer to read dS from shared memory, for dQ, than to compute. S = 512 full +10 %, causal +21 %, 2k to 8k +1 to
+4 % on an H200, against 128 dims with zeros. 64 dims of K and V in registers: S = 4k full +3 % on an H100. S masked,
not P: S = 4k and 8k full +3 %, causal 0 on an H200; exponents: full +1.5 %. Programs that look whether they are
together: S = 512, 4k and 8k full -1.5 to -2 %, causal -0.5 %."""
KEYS_D128 = BackwardTiles(128, 128, stages=4, key_stages=2, value_stages=2, k_kept=128, v_kept=128, dq_apart=True)
"""For queries that see few keys: no kernels before and after. S = 256 causal +5 %, full -2 %, S = 512 causal -1 % on an
H200."""
KEYS_D192_DV128 = BackwardTiles(
    192, 128, stages=2, key_stages=2, value_stages=2, parts=3, k_kept=192, v_kept=128, dq_apart=True
)
"""dQ in a kernel of its own: S = 2k causal +24 %, 8k full +15 % on an H200. Blocks of 64 dims are not padded to
256. Three stages: -1 %. K and V in registers: S = 8k full +1 % on an H100."""
KEYS_D192 = replace(KEYS_D192_DV128, head_dim_v=192, parts_v=3, v_kept=192)
"""As above: S = 2k full +8 %, 8k causal +4 %; three stages, with K and V in one, 0 and -2 %. K and V in
registers: +0.5 % on an H100."""
KEYS_D256 = BackwardTiles(256, 256, stages=2, key_stages=1, value_stages=1, k_kept=128, v_kept=128, dq_apart=True)
"""What fits. dQ in a kernel of its own: S = 512, 2k and 8k full +20, +10, +8 %, causal +30, +16, +11 % on an H200.
128 dims of K and V in registers: S = 1k 0, 4k full and 8k causal +1 % on an H100."""
KEYS_D256_DV128 = replace(KEYS_D256, head_dim_v=128, key_stages=2, value_stages=2, k_kept=256, v_kept=128)
"""Dv is not padded. Three stages: 0 %."""


@dataclass(frozen=True)
class QueryTiles:
    """dQ in a kernel of its own: two warpgroups of 64 queries, and how many blocks of tile_n keys are in flight."""

    head_dim: int  # D as Q and K lie in shared memory
    head_dim_v: int  # Dv, as V and dO lie there
    key_stages: int
    value_stages: int
    parts: int = 1  # Q and K lie in this many blocks
    parts_v: int = 1  # as V and dO do
    compute_registers: int = 240
    load_registers: int = 24
    turns: bool = True  # of the warpgroups on the matrix units
    tile_m: int = 64
    tile_n: int = 64
    warpgroups: int = 2

    def __post_init__(self) -> None:
        check_fit(self)

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return self.warpgroups * self.tile_m

    @property
    def shared_bytes(self) -> int:
        rows = 2 * self.rows * (self.head_dim + self.head_dim_v)
        keys = 2 * self.tile_n * (self.key_stages * self.head_dim + self.value_stages * self.head_dim_v)
        return rows + keys + 32 * self.warpgroups + 16 * (self.key_stages + self.value_stages)


QUERIES_D128 = QueryTiles(128, 128, key_stages=3, value_stages=3, turns=False)
"""With turns S = 512 causal -0.5 %, with steps of 128 keys too -1 % on an H200."""
QUERIES_D192_DV128 = QueryTiles(192, 128, key_stages=3, value_stages=3, parts=3)
"""Without turns S = 2k causal -3 %, 8k full -6 % on an H200."""
QUERIES_D192 = QueryTiles(192, 192, key_stages=3, value_stages=2, parts=3, parts_v=3)
"""Without turns S = 2k full and 8k causal -2 %."""
QUERIES_D256 = QueryTiles(256, 256, key_stages=2, value_stages=1, turns=False)
"""What fits: K of a step is read in the next, too. Without turns full +1 to +2 %, causal 0 to +1 %, hot 0 to -0.5 %; by
triton 3.9 with a mask they pay: `in_turns` in backward_apart_launch.py."""
QUERIES_D256_DV128 = QueryTiles(256, 128, key_stages=2, value_stages=3)
"""Dv is not padded."""


# Keys that a query sees, from so many down to KEYS_D128: 128 pay on average, 256 do not.
FEW_KEYS = 192


def choose_backward(spec: AttentionSpec) -> BackwardTiles:
    """The tiles of the backward pass for a spec."""
    dims = max(spec.head_dim, spec.head_dim_v)
    if dims > 192:
        return KEYS_D256 if spec.head_dim_v > 128 else KEYS_D256_DV128
    if dims > 128:
        return KEYS_D192 if spec.head_dim_v > 128 else KEYS_D192_DV128
    if dims > 96:
        first, end = spec.visible_keys(spec.seqlen_q // 2)
        return KEYS_D128 if end - first <= FEW_KEYS else BACKWARD_D128
    return BACKWARD_D96 if dims > 64 else BACKWARD_D64


def choose_queries(spec: AttentionSpec) -> QueryTiles:
    """The tiles of dQ where it has a kernel of its own."""
    dims = max(spec.head_dim, spec.head_dim_v)
    if dims > 192:
        return QUERIES_D256 if spec.head_dim_v > 128 else QUERIES_D256_DV128
    if dims > 128:
        return QUERIES_D192 if spec.head_dim_v > 128 else QUERIES_D192_DV128
    return QUERIES_D128


def heads_per_tile(spec: AttentionSpec, tiles: Tiles) -> int:
    """How many query heads of a group lie in the rows of a tile: what makes the fewest tiles, if Sq is less than one.

    Longer queries would save a tile or two, for a variant of the kernel that depends on their length.
    """
    if spec.seqlen_q >= tiles.rows:
        return 1
    powers = [1 << i for i in range(tiles.tile_m.bit_length()) if spec.group % (1 << i) == 0]
    return min(powers, key=lambda heads: -(-spec.seqlen_q * heads // tiles.rows) * (spec.group // heads))


def choose(spec: AttentionSpec) -> Tiles:
    """The tiles for a spec."""
    dims = max(spec.head_dim, spec.head_dim_v)
    if dims > 192:
        return D256
    if dims > 128:
        return D192 if spec.head_dim_v > 128 else D192_DV128
    if dims > 64:
        if spec.head_dim > 96:
            return D128
        return D96_DV128 if spec.head_dim_v > 96 else D96
    return D64_SHORT if spec.seqlen_q <= 1024 else D64


def choose_cached(spec: AttentionSpec, shared: bool) -> Tiles:
    """Those for a call over a cache; shared: all multiprocessors have equal shares of its keys."""
    tiles = choose(spec)
    of_few_rows = {
        D64_SHORT: D64_FEW_ROWS, D96: D96_FEW_ROWS, D96_DV128: D96_DV128_FEW_ROWS,
        D128: D128_SHARED if shared else D128_FEW_ROWS, D192: D192_FEW_ROWS, D192_DV128: D192_DV128_FEW_ROWS,
    }  # fmt: skip
    return of_few_rows.get(tiles, tiles) if has_few_rows(spec) else tiles


def has_few_rows(spec: AttentionSpec) -> bool:
    """Whether a tile's rows are no more than one warpgroup has."""
    tiles = choose(spec)
    return spec.seqlen_q * heads_per_tile(spec, tiles) <= tiles.tile_m
