"""Properties of a part, tried one after another: what `scripts/check_part.py` prints, and what tests assert.

    for property in ROUTER:            name, check
        check(part) -> problem, or None

A check that raises has failed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Property:
    """Something that a part promises.

    Attributes:
        name: In a few words.
        check: Part -> what is wrong with it in one clause; None: nothing.
        applies: Part -> whether it promises this at all.
    """

    name: str
    check: Callable[[Any], str | None]
    applies: Callable[[Any], bool] = lambda part: True


@dataclass(frozen=True)
class Verdict:
    """What came of a property; `problem` is None where it holds."""

    name: str
    problem: str | None

    def line(self) -> str:
        """For the terminal."""
        return f"pass  {self.name}" if self.problem is None else f"FAIL  {self.name}: {self.problem}"


def verdicts(properties: list[Property], part: Any) -> Iterator[Verdict]:
    """Try all that apply."""
    for item in properties:
        if not item.applies(part):
            continue
        try:
            problem = item.check(part)
        except Exception as error:  # whatever a user's class does
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield Verdict(item.name, problem)
