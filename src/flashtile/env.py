"""Every environment variable flashtile reads."""

from __future__ import annotations

import os
from pathlib import Path


def triton_interpret() -> bool:
    """TRITON_INTERPRET=1 (Triton's own): kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def names_ptxas() -> bool:
    """TRITON_PTXAS_BLACKWELL_PATH (Triton's own, from 3.9 on for Hopper too): the user has chosen a ptxas."""
    return "TRITON_PTXAS_BLACKWELL_PATH" in os.environ


def names_line_info() -> bool:
    """TRITON_DISABLE_LINE_INFO (Triton's own): the user has said whether a profiler is to find a kernel's lines."""
    return "TRITON_DISABLE_LINE_INFO" in os.environ


def tuned_configs() -> Path:
    """FLASHTILE_TUNED: the file `flashtile tune` writes and the Triton backend reads at start."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "flashtile" / "tuned.json"
    return Path(os.environ.get("FLASHTILE_TUNED", default)).expanduser()
