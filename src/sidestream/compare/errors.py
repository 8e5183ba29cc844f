"""The one exception of a comparison that cannot be made."""

from __future__ import annotations


class CompareError(ValueError):
    """Something the user can change; `str()` has one line per problem."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
