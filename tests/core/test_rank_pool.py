"""The pool of ranks that the tests share."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests import rank_pool
from tests.rank_pool import ranks


def answer(rank: int, world: int, *, value: str, seconds: float = 0.0) -> str:
    time.sleep(seconds)
    return value


def test_an_interrupted_job_leaves_no_answer_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest's time limit raises in the middle of waiting."""

    def interrupt(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    before = ranks(1)
    with monkeypatch.context() as patched:
        patched.setattr(rank_pool, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            before.run(answer, value="late", seconds=0.2)
    assert ranks(1) is not before
    assert ranks(1).run(answer, value="next") == ["next"]
