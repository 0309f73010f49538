"""How a backend would run a spec, for people to read: what its optional `plan(spec, device) -> Plan` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The forward launch of one spec. `plan` must answer for a device that is not there too, saying what it assumed.

    config: the configuration in the backend's own words.
    grid: programs launched (or independent tasks, on a CPU).
    tile_m, tile_n: queries and keys of one tile.
    """

    config: str
    grid: int
    tile_m: int
    tile_n: int
