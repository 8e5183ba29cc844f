"""scripts/two_hosts.py: what it refuses, that it leaves nothing behind, and that link=throttled agrees with it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import REPOSITORY, script

two_hosts = script("scripts/two_hosts.py")
root = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0, reason="network namespaces need root on Linux"
)
SECONDS = 150


def test_the_command_behind_the_dashes_is_what_torchrun_runs():
    options = two_hosts.arguments(["--gbps", "2", "--", "python", "train.py", "seed=1"])
    assert (options.gbps, options.command) == (2.0, ["python", "train.py", "seed=1"])
    assert two_hosts.torchrun_arguments(options.command) == ["train.py", "seed=1"]
    assert two_hosts.torchrun_arguments(["python3.11", "-m", "my.module", "-x"]) == ["-m", "my.module", "-x"]
    assert two_hosts.torchrun_arguments(["./job.py", "1"]) == ["./job.py", "1"]
    with pytest.raises(two_hosts.Refused, match="expected python <script>"):
        two_hosts.torchrun_arguments(["torchrun", "train.py"])


@pytest.mark.parametrize("argv", [[], ["--gbps", "0", "--", "python", "x.py"], ["--gbps", "1"]])
def test_wrong_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        two_hosts.main(argv)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="says something else elsewhere")
@pytest.mark.parametrize(
    ("missing", "why"), [("ip", "ip is not installed"), ("tc", "tc is not installed"), (None, "needs root")]
)
def test_a_machine_that_cannot_do_it_is_told_why(
    missing: str | None, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(two_hosts.shutil, "which", lambda name: None if name == missing else f"/sbin/{name}")
    monkeypatch.setattr(two_hosts.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(two_hosts, "run", lambda *command: pytest.fail("something was done"))
    assert two_hosts.main(["--", "python", "train.py"]) == 2
    assert why in capsys.readouterr().err


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith("sidestream-")}


def start(*command: str, **options: Any) -> subprocess.Popen:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(
        [sys.executable, str(REPOSITORY / "scripts" / "two_hosts.py"), *command],
        env={**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@root
@pytest.mark.full
@pytest.mark.parametrize("how", ["finishes", "fails", "interrupted"])
def test_nothing_is_left_behind(how: str, tmp_path: Path):
    before = namespaces()
    program = tmp_path / "job.py"
    program.write_text(
        "import os, pathlib, socket, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "devices = sorted(name for _, name in socket.if_nameindex())\n"
        "(folder / os.environ['RANK']).write_text(' '.join([*devices, os.environ['WORLD_SIZE']]))\n"
        f"how = {how!r}\n"
        "if how == 'interrupted':\n    time.sleep(600)\n"
        "sys.exit(how == 'fails' and os.environ['RANK'] == '1')\n"
    )
    process = start("--port", "29533", "--", "python", str(program))
    files = [tmp_path / "0", tmp_path / "1"]
    if how == "interrupted":
        deadline = time.monotonic() + SECONDS
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == {"finishes": 0, "fails": 1, "interrupted": 130}[how], errors
    assert [file.read_text() for file in files] == ["lo wire 2"] * 2
    assert namespaces() == before


@root
@pytest.mark.full
@pytest.mark.timeout(4 * SECONDS)
def test_the_throttled_link_agrees_with_a_real_one(tmp_path: Path):
    """The same rows travel over both. How nearly their times agree, is read on a quiet machine."""
    lengths = {"attention": 30, "attention_before": 5, "feed_forward": 40, "experts": 15, "shared": 30}
    measure = [
        str(REPOSITORY / "scripts" / "measure_overlap.py"),
        "overlap=shortcut",
        "overlap.slot=1",
        "measure.compute=sleep",
        *(f"measure.sleep_ms.{part}={ms}" for part, ms in lengths.items()),
        "measure.rounds=8",
        "measure.warmup=1",
    ]
    real = start(
        "--gbps", "0.25", "--", "python", *measure, f"hydra.run.dir={tmp_path / 'real'}", cwd=tmp_path
    )
    _, errors = real.communicate(timeout=SECONDS)
    assert real.returncode == 0, errors
    wire = ["link=throttled", "link.gbps=0.25", "link.latency_us=0"]
    command = [sys.executable, *measure, *wire, f"hydra.run.dir={tmp_path / 'throttled'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    found = {}
    for name in ("real", "throttled"):
        record = json.loads((tmp_path / name / "overlap.json").read_text())
        rounds = record["passes"]["both"]["rounds_ms"]
        found[name] = {arm: len(times) for arm, times in rounds.items()}, record["shape"], record["schedule"]
    assert found["real"] == found["throttled"]
