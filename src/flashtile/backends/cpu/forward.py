"""Algorithm 1, to be written."""

from ..reference import forward  # noqa
