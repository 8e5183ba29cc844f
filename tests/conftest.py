"""One thread per process, set before torch is imported: results then do not depend on the number of cores."""

import os
import sys
from collections.abc import Iterator

import pytest

from tests import faster_compose

os.environ.setdefault("OMP_NUM_THREADS", "1")
faster_compose.install()


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
