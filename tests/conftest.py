"""One thread per process, set before torch is imported: results then do not depend on the number of cores."""

import os
import sys
from collections.abc import Iterator

import pytest

from tests import faster_compose

os.environ.setdefault("OMP_NUM_THREADS", "1")
faster_compose.install()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sample(n)`, n cases, evenly spread, are for `make test`, the others for `make test-all`."""
    cases: dict[tuple[pytest.Item | None, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sample") is not None:
            cases.setdefault((item.parent, item.originalname), []).append(item)
    for found in cases.values():
        (kept,) = found[0].get_closest_marker("sample").args  # type: ignore[union-attr]
        chosen = {round(place * (len(found) - 1) / max(1, kept - 1)) for place in range(kept)}
        for place, item in enumerate(found):
            if place not in chosen:
                item.add_marker(pytest.mark.full)


@pytest.fixture(autouse=True)
def forget_own_packages() -> Iterator[None]:
    """Many tests write a package `my_pkg` of their own: the next one is not given the last one's."""
    yield
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


@pytest.fixture(autouse=True, scope="module")
def end_ranks() -> Iterator[None]:
    """Ranks that wait for work still take time: each of gloo's threads wakes up a hundred times a second."""
    yield
    if pools := sys.modules.get("tests.rank_pool"):
        pools.discard_all()
