"""What a rank imports before it trains."""

import subprocess
import sys

import pytest
from lightning_utilities.core.imports import RequirementCache

from sidestream.launch.lighter import without_transformers

RANK = """
import sys
from omegaconf import OmegaConf
from sidestream.launch import worker
worker._job(OmegaConf.create({}))
assert "lightning.pytorch" in sys.modules and "torchmetrics" in sys.modules
assert "transformers" not in sys.modules
import transformers
"""


def test_only_transformers_is_taken_for_missing_and_only_meanwhile():
    with without_transformers():
        assert not RequirementCache("transformers>=4.4.0")
        assert RequirementCache("torch>=2.1.0")
    assert RequirementCache("transformers>=4.4.0")


@pytest.mark.full
def test_a_rank_does_not_import_transformers():
    done = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
