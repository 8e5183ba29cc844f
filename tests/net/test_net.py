"""Sixteen combinations compute what they always did, bit for bit: see record.py."""

import subprocess
import sys

import pytest

from tests.docs.pages import REPOSITORY


@pytest.mark.timeout(420)
@pytest.mark.full
def test_sixteen_combinations_compute_what_they_always_did() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.net.record"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
