"""`graph=none`: an attempt runs eagerly."""

from collections.abc import Callable


class NoGraph:
    def __init__(self, *, lint: bool = False) -> None:
        self.lint = lint

    def run(self, attempt: Callable[[], None]) -> None:
        attempt()

    def report(self) -> list[str]:
        return []
