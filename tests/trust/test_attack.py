"""`make attack`: the real commands on hostile folders of every kind. Nothing runs, nothing hangs, one line says why."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trust.hostile import ATTACKS, make_run

ROOT = Path(__file__).parents[2]
SECONDS = 240  # of one command; a few on a quiet machine
SHORT = ["trainer.max_steps=4", "data.cache_dir={cache}"]
TINY = [
    "trainer.max_steps=1",
    "trainer.limit_val_batches=1",
    "data.seq_length=16",
    "data.global_batch_size=2",
]
COMMANDS = {
    "resume": ["train.py", "resume={run}", *SHORT],
    "resume_sweep": ["train.py", "resume_sweep={run}", *SHORT, *TINY],  # what is honest in it is trained
    "initial_weights": [
        "train.py",
        "initial_weights={run}/checkpoints/step-00000003",
        "trainer.devices=1",
        *SHORT,
    ],
    "initial_weights_of_a_run": ["train.py", "initial_weights={run}", "trainer.devices=1", *SHORT],
    "eval": ["eval.py", "run={run}", "num_tokens=2"],
    "export": ["scripts/convert_hf.py", "export", "{run}", "{out}"],
    "describe": ["scripts/convert_hf.py", "describe", "{run}"],
    "import": ["scripts/convert_hf.py", "import", "{run}", "{out}"],
    "compare": ["scripts/compare.py", "{run}", "{run}"],
    "plot_loss": ["scripts/plot_loss.py", "{run}", "--out", "{out}.png"],
    "plot_load": ["scripts/plot_load.py", "{run}"],
}

pytestmark = [pytest.mark.attack, pytest.mark.timeout(SECONDS + 30)]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("honest") / "run")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_runs(command: str, attack: str, honest: Path, tmp_path: Path) -> None:
    run, canary = Path(shutil.copytree(honest, tmp_path / "run")), tmp_path / "canary"
    ATTACKS[attack](run, canary)
    script, *words = COMMANDS[command]
    places = {"run": run, "out": tmp_path / "out", "cache": tmp_path / "cache"}
    environment = {**os.environ, "SECRET": "the secret", "WANDB_MODE": "disabled", "MPLBACKEND": "agg"}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / script), *(word.format(**places) for word in words)],
        cwd=run,  # where somebody looks at what he was given
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = (part.decode(errors="replace") for part in process.communicate(timeout=SECONDS))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    said = f"{script} {words}: {process.returncode}\n{out}\n{err}"
    assert not canary.exists(), said
    assert not Path("/tmp/canary").exists(), said
    assert process.returncode in (0, 1, 2), said
    assert "Traceback (most recent call last)" not in out + err, said
    assert "the secret" not in out + err, said
    assert re.fullmatch(r"[^\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]*", out + err), said
    if process.returncode:
        lines = [line for line in err.splitlines() if line.startswith(("error: ", "usage: "))]
        assert lines, said
