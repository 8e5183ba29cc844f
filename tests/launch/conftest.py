"""Runs train.py with `sidestream.run` replaced, so that only the launching is tested."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_checkpoint import EMPTY

REPOSITORY = Path(__file__).parents[2]
SECONDS = 150  # of a run that takes about 10 on two quiet cores: a machine may be busy

# Imported by every Python process that has its folder on PYTHONPATH: parent, ranks and jobs of a sweep.
SITECUSTOMIZE = '''
import sys, types
sys.modules["torch"] = sys.modules["lightning"] = None  # importing them is an error
module = types.ModuleType("sidestream.run")
exec("""
import json, os, signal, time
from pathlib import Path

def gone(folder):  # rank 1 has ended, whether or not anybody has asked how
    found = folder / "pid1"
    if not found.exists() or not found.read_text():
        return False
    status = Path("/proc", found.read_text(), "stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX"

def train(cfg, *, layout, folder, env):
    from sidestream.launch import phase, stopping
    behaviour = cfg.name
    seen = {"rank": env.rank, "folder": str(folder), "seed": cfg.seed, "world_size": env.world_size}
    (folder / f"seen{env.rank}.json").write_text(json.dumps(seen))
    if env.rank == 1:
        if behaviour == "raises":
            raise RuntimeError("the wheel came off")
        if behaviour == "killed":
            (folder / "pid1").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "hangs":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif behaviour in ("killed", "raises"):
        while behaviour == "raises" and not (folder / "failures").exists():
            time.sleep(0.02)
        while behaviour == "killed" and not gone(folder):
            time.sleep(0.02)
        raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:5")
    elif behaviour == "hangs":
        raise ValueError("rank 0 has a bug")
    if behaviour == "one_seed_fails" and cfg.seed == 2 and cfg.router.top_k == 1:
        raise RuntimeError("this job fails")
    if behaviour == "waits":
        phase.enter(phase.TRAINING, step=4)  # before it, a stop leaves no checkpoint
        (folder / f"ready{env.rank}").touch()
    while behaviour in ("waits", "hangs") and not (stopping.requested() and behaviour == "waits"):
        time.sleep(0.02)
    status = "interrupted" if behaviour == "waits" else "finished"
    result = {"status": status, "metrics": {"val_loss": 1.0 + cfg.seed}}
    if env.rank == 0:
        checkpoint = folder / "checkpoints" / "step-3"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / ".metadata").write_bytes(bytes.fromhex("METADATA"))
        (checkpoint / "meta.pt").write_bytes(b"meta")
        (folder / "result.json").write_text(json.dumps(result))
    return result
""", module.__dict__)
sys.modules["sidestream.run"] = module
'''.replace("METADATA", EMPTY.hex())


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of processes that find the replaced `sidestream.run` and that cannot import torch."""
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "sitecustomize.py").write_text(SITECUSTOMIZE)
    kept = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    path = os.pathsep.join([str(fake), str(REPOSITORY / "src")])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def train(environment: dict[str, str], work: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Returns a function that runs `python train.py <arguments>` with a hard time limit."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(REPOSITORY / "train.py"), *arguments]
        return subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=SECONDS
        )

    return run
