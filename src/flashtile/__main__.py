"""`python -m flashtile`: the `flashtile` command."""

from .cli import main

main()
