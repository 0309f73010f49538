"""Algorithm 2, to be written."""

from ..reference import backward  # noqa
