"""The `flashtile` command's door: says what to install where its extra is missing."""

from __future__ import annotations

import sys

_EXTRA = ("typer", "rich", "matplotlib")


def main() -> None:
    """Runs the command line; exits with status 1 and a hint where typer, rich or matplotlib is not installed."""
    try:
        from .commands import app
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        sys.exit(f'flashtile: the command line needs {package}; install it with: pip install "flashtile[bench]"')
    app()
