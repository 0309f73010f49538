"""Which architecture a GPU has."""

from __future__ import annotations

import functools

import torch

from . import env


@functools.cache
def arch_of(device: torch.device) -> str | None:
    """ "sm_90", "gfx942" ... of a GPU, "interpreter", or None where torch sees no GPU."""
    if env.triton_interpret():
        return "interpreter"
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
