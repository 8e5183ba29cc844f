"""Importing Lightning without what it would bring along and nothing here needs."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def without_transformers() -> Iterator[None]:
    """While entered, torchmetrics, which Lightning imports, takes transformers for not installed.

    It would import it for a few text and image metrics, in every rank: a third of the time that Lightning takes. These
    metrics (BERTScore, InfoLM, CLIPScore) are then missing in this process; transformers itself can be imported.
    """
    try:
        from lightning_utilities.core.imports import RequirementCache
    except ImportError:
        yield
        return
    check = RequirementCache._check_requirement

    def check_others(self: RequirementCache) -> None:
        if str(self.requirement).startswith("transformers"):
            self.available, self.message = False, "left out: a rank of Sidestream does without"
        else:
            check(self)

    RequirementCache._check_requirement = check_others  # type: ignore[method-assign]
    try:
        yield
    finally:
        RequirementCache._check_requirement = check  # type: ignore[method-assign]


__all__ = ["without_transformers"]
