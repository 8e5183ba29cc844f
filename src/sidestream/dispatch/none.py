"""`dispatcher=none`: what `fusion=mega` takes the place of."""

from __future__ import annotations


class NoDispatcher:
    """Moves nothing. Composed with `fusion=mega`, which moves the rows itself; refused with any other fusion."""

    name = "none"
