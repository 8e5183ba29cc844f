"""Every command in README and docs is legal; what the README tells as a story is run, with a micro model."""

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from sidestream import cli
from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError
from sidestream.launch import arguments
from sidestream.predict.read import read
from tests.docs.pages import PAGES, README, REPOSITORY, blocks, commands, script, text

Compose = Callable[..., DictConfig]
SECONDS = 400  # about 40 on two quiet cores; other tests run beside it
SECONDS_TO_STOP = 30
# Appended to a command of train.py that is run: two steps of a micro model. Later overrides win.
SHORT = [
    "model.hidden_size=64",
    "model.ffn_hidden_size=64",
    "model.expert_hidden_size=64",
    "data.seq_length=16",
    "scheduler.warmup_steps=2",
    "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=2",
    "trainer.pin_cpu=false",
    "trainer.accelerator=cpu",
]
CONFIGS = {"train.py": "train", "scripts/measure_overlap.py": "measure_overlap"}
ALL = [(page, words) for page in PAGES for block in blocks(page, "bash") for words in commands(block)]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes the README's files (a block's first line is their name) to a folder; returns it."""
    for body in [*blocks(README, "python"), *blocks(README, "yaml")]:
        name = body.partition("\n")[0].removeprefix("# ")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(body, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("page", "words"), ALL, ids=[shlex.join(words)[:60] for _, words in ALL])
@pytest.mark.sample(12)
def test_a_command_is_legal(
    page: Path,
    words: list[str],
    example: Path,
    compose: Compose,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(example if "-cd" in words else REPOSITORY)
    words = in_the_repository(words)
    program, *rest = words
    if words in (["pip", "install", "."], ["sidestream"]):
        pass
    elif program == "source":
        assert rest == [".venv/bin/activate"]
    elif program == "make":
        check_make(rest)
    elif program == "torchrun":
        (ranks,) = [int(part.partition("=")[2]) for part in rest if part.startswith("--nproc-per-node=")]
        (place,) = [place for place, part in enumerate(rest) if part in CONFIGS]
        world = {"world_size": ranks, "local_world_size": ranks}
        check_train(compose, rest[place + 1 :], config=CONFIGS[rest[place]], **world)
    elif words[:2] == ["python", "train.py"]:
        check_train(compose, rest[1:])
    elif words[:2] == ["python", "predict.py"]:
        for job in jobs(
            [
                f"strategy.{part}" if part.startswith("expert_par") else part
                for part in rest[1:]
                if part != "-m"
            ]
        ):
            read(compose(*job, config_name="predict"), name="")
    elif words[:2] == ["python", "scripts/measure_overlap.py"]:
        check_train(compose, rest[1:], config="measure_overlap")
    elif words[:2] == ["python", "scripts/two_hosts.py"]:
        inner = rest.index("--")
        script(rest[0]).arguments(rest[1:])
        two = {"world_size": 2, "local_world_size": 1}
        assert rest[inner + 1] == "python"
        check_train(compose, rest[inner + 3 :], config=CONFIGS[rest[inner + 2]], **two)
    elif words[:2] == ["python", "eval.py"]:
        assert {part.partition("=")[0] for part in rest[1:]} <= script("eval.py").DEFAULTS.keys()
    else:
        assert program == "python", f"{page.name}: a command that no test knows"
        with pytest.raises(SystemExit):
            script(rest[0]).main(["--help"])
        usage = capsys.readouterr().out
        assert all(part in usage for part in rest[1:] if part.startswith("-"))


def test_the_error_in_the_readme_is_what_a_user_sees(compose: Compose):
    key, value = re.search(r"`error: ([\w.]+)=(\S+): ", text(README)).groups()
    with pytest.raises(ConfigError) as refused:
        check(compose(f"{key}={value}"), device_count=0)
    assert f"`error: {refused.value}`" in text(README)


def in_the_repository(words: list[str]) -> list[str]:
    """Spells `sidestream train ...` as `python train.py ...`."""
    if words[0] != "sidestream" or len(words) == 1:
        return words
    folder = "" if words[1] in cli.IN_THE_ROOT else "scripts/"
    return ["python", f"{folder}{cli.COMMANDS[words[1]][0]}.py", *words[2:]]


def check_make(words: list[str]) -> None:
    makefile = text(REPOSITORY / "Makefile")
    for word in words:
        name, equals, _ = word.partition("=")
        assert re.search(rf"^{name} \?=" if equals else rf"^{name}:", makefile, re.MULTILINE), word


def check_train(compose: Compose, argv: list[str], *, config: str = "train", **world: int) -> None:
    """Composes and checks what the arguments ask for, each job of a sweep."""
    flags, overrides = arguments.split(argv)
    if "--help" in flags:
        return
    parsed = arguments.get_args_parser().parse_args(argv)
    search = [f"hydra.searchpath=[file://{Path(parsed.config_dir).absolute()}]"] if parsed.config_dir else []
    kept = [
        part for part in overrides if arguments.key_of(part) not in ("resume", "resume_sweep")
    ]  # these need a run: see the tour below
    for job in jobs(kept):
        check(compose(*job, *search, config_name=config), device_count=0, **world)


def jobs(overrides: list[str]) -> Iterator[tuple[str, ...]]:
    parsed = OverridesParser.create().parse_overrides(overrides)
    choices = [
        [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
        if o.is_sweep_override()
        else [o.input_line]
        for o in parsed
    ]
    return itertools.product(*choices)


def run(block: str, folder: Path, *overrides: str) -> str:
    """Runs a bash block in a folder that looks like the repository, its training shortened; returns its output.

    Args:
        overrides: put at the end of every train.py command.
    """
    for name in ("train.py", "eval.py", "scripts"):
        if not (folder / name).exists():
            (folder / name).symlink_to(REPOSITORY / name)
    extra = shlex.join([*SHORT, *overrides])
    lines = [
        re.sub(r"(.*\btrain\.py\b[^#]*?)(\s+#.*)?$", rf"\1 {extra}\2", line) for line in block.splitlines()
    ]
    body = "\n".join(line for line in lines if not line.startswith("source "))
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", body],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=SECONDS)
    except BaseException:
        # Ended in the way a user ends it: train.py and torchrun then end their ranks.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=SECONDS_TO_STOP)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, f"{body}\n{printed}\n{errors}"
    return printed


def environment() -> dict[str, str]:
    """`python` and `torchrun` are those of this interpreter; no GPU, no key of the user."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("WANDB_", "RANK", "WORLD_SIZE"))
    }
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def block_with(part: str) -> str:
    (found,) = [block for block in blocks(README, "bash") if part in block]
    return found


def results(folder: Path) -> list[dict]:
    found = sorted((folder / "logs").rglob("result.json"), key=lambda path: path.stat().st_mtime)
    return [json.loads(path.read_text(encoding="utf-8")) for path in found]


@pytest.mark.full
@pytest.mark.shell
@pytest.mark.timeout(SECONDS + SECONDS_TO_STOP + 10)
def test_the_tour_of_a_run(tmp_path: Path):
    """Train, resume, evaluate, draw: the README's block, with 2 and 4 steps for its numbers."""
    block = block_with("resume=")
    steps = re.findall(r"trainer\.max_steps=(\d+)", block)
    assert len(steps) == 2
    for number, shorter in zip(steps, (2, 4)):
        block = block.replace(f"trainer.max_steps={number}", f"trainer.max_steps={shorter}")
    printed = run(block, tmp_path)
    (result,) = results(tmp_path)
    assert (result["status"], result["metrics"]["tokens"]) == ("finished", 4 * 8 * 16)
    assert "resume: trainer.max_steps 2 -> 4" in printed
    loss = re.search(r"^val_loss +([\d.]+)", printed, re.MULTILINE)
    assert float(loss.group(1)) == pytest.approx(result["metrics"]["val_loss"], abs=1e-4)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.shell
@pytest.mark.timeout(SECONDS + SECONDS_TO_STOP + 10)
def test_the_readmes_dispatcher_halves_the_bytes(example: Path):
    run(block_with("-cd my_conf") + "python train.py\n", example, "trainer.max_steps=2")
    mine, plain = results(example)
    assert (mine["choices"]["dispatcher"], plain["choices"]["dispatcher"]) == ("mine", "alltoall")
    # Rows are halved; routing weights and counts travel as they did.
    assert 0.5 < mine["metrics"]["bytes_on_wire"] / plain["metrics"]["bytes_on_wire"] < 0.52
    assert mine["metrics"]["val_loss"] == pytest.approx(plain["metrics"]["val_loss"], abs=1e-3)


@pytest.mark.full
@pytest.mark.shell
@pytest.mark.timeout(SECONDS + SECONDS_TO_STOP + 10)
def test_a_sweep_and_torchrun(tmp_path: Path):
    printed = run(block_with("torchrun"), tmp_path, "trainer.max_steps=2")
    assert "finished jobs: 2 of 2" in printed
    found = results(tmp_path)
    assert [result["status"] for result in found] == ["finished"] * 3
    assert [result["choices"]["fusion"] for result in found] == ["grouped", "loop", "grouped"]
    assert found[0]["metrics"]["val_loss"] == found[2]["metrics"]["val_loss"]
