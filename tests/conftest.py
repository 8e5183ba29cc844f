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
