"""The wheel, installed where there is no checkout: every command runs from any folder, with the configs inside.

Nothing is downloaded: the environment has links to those libraries of this one that the package asks for, and to no
others.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import sidestream
from tests.docs.pages import README, REPOSITORY, blocks

pytestmark = [pytest.mark.full, pytest.mark.shell, pytest.mark.timeout(500)]
PARTS = ("src", "conf", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
MICRO = [
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
Run = Callable[..., str]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `pip install .` builds it, from a copy: a build leaves files behind."""
    source = tmp_path_factory.mktemp("source")
    for name in PARTS:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(
                REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
            )
        else:
            shutil.copy(REPOSITORY / name, source / name)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(source / "dist"), str(source)]
    pip(*build)
    (found,) = (source / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the commands of an environment with the wheel in it."""
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, with_pip=False, symlinks=True)
    pip("--python", str(root / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = root.glob("lib/python*/site-packages")
    for dist in required("sidestream"):
        for top in {file.parts[0] for file in dist.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(dist.locate_file(top))
    return root / "bin"


def required(name: str) -> list[Distribution]:
    """Returns what pip would install with a package: what it asks for, and what that asks for."""
    seen: set[tuple[str, str]] = set()
    waiting = [(name, "")]
    while waiting:
        package, extra = waiting.pop()
        if (package, extra) in seen:
            continue
        seen.add((package, extra))
        for wanted in map(Requirement, distribution(package).requires or ()):
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                waiting += [(wanted.name, more) for more in ("", *wanted.extras)]
    return [distribution(package) for package in {package for package, _ in seen} - {name}]


def pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Returns a function that runs words in an empty folder and returns what they print."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "RANK", "PYTHON"))
    }
    environment = {
        **kept,
        "PATH": os.pathsep.join([str(installed), os.environ["PATH"]]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    return run


def result_in(folder: Path) -> dict:
    (found,) = folder.rglob("result.json")
    return json.loads(found.read_text())


def test_the_wheel_has_the_configs_the_licence_and_the_types(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {f"sidestream/{path.relative_to(REPOSITORY)}" for path in (REPOSITORY / "conf").rglob("*.yaml")}
    assert {name for name in names if name.startswith("sidestream/conf/")} == shipped
    assert "sidestream/py.typed" in names
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names} == {
        "sidestream",
        "hydra_plugins",
        f"sidestream-{sidestream.__version__}.dist-info",
    }


def test_a_run_from_training_to_the_picture(run: Run, tmp_path: Path):
    """Trains on two ranks, goes on, evaluates, draws; each names the next command as it can be typed."""
    run("sidestream", "train", "trainer.max_steps=5", *MICRO)
    result = result_in(tmp_path / "logs" / "train" / "runs")
    assert (result["status"], result["metrics"]["tokens"]) == ("finished", 5 * 8 * 16)
    (folder,) = (tmp_path / "logs" / "train" / "runs").glob("*/*")
    launch = json.loads((folder / ".hydra" / "launch.json").read_text())
    assert launch["command"].startswith("sidestream train trainer.max_steps=5 ")
    run("sidestream", "train", "resume=latest", "trainer.max_steps=6")
    assert result_in(folder)["metrics"]["tokens"] == 6 * 8 * 16
    printed = run("sidestream", "eval", "run=latest", "num_tokens=5")
    assert f"val_loss   {result_in(folder)['metrics']['val_loss']:.4f}" in printed
    run("sidestream", "plot-loss", "latest", "--out", "loss.png")
    run("sidestream", "plot-load", "latest")
    assert (tmp_path / "loss.png").exists()
    export = run("sidestream", "convert-hf", "export", "latest", "hf", code=2)
    assert "error: " in export and ".py" not in export
    assert not [path for path in tmp_path.iterdir() if path.name not in ("logs", "loss.png")]


def test_a_sweep_and_its_comparison(run: Run, tmp_path: Path):
    printed = run("sidestream", "train", "-m", "fusion=grouped,loop", "trainer.max_steps=2", *MICRO)
    assert "finished jobs: 2 of 2" in printed
    (sweep,) = (tmp_path / "logs" / "train" / "multiruns").glob("*/*")
    assert run("sidestream", "compare", "latest", "--out", "compared").startswith("Comparison of fusion\n")
    assert (tmp_path / "compared" / "compare.html").exists()
    shutil.rmtree(next(sweep.glob("1-*")))
    printed = run("sidestream", "train", f"resume_sweep={sweep}")
    assert len(list(sweep.glob("*/result.json"))) == 2


def test_options_of_ones_own(run: Run, tmp_path: Path):
    """The example of the README: a class and a YAML file beside it."""
    for body in [*blocks(README, "python"), *blocks(README, "yaml")]:
        path = tmp_path / body.partition("\n")[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
    mine = ["dispatcher=mine", "trusted_targets=[my_pkg]"]
    run("sidestream", "train", "-cd", "my_conf", *mine, "trainer.max_steps=2", *MICRO)
    assert result_in(tmp_path / "logs")["choices"]["dispatcher"] == "mine"
    assert "my_pkg.Bf16Wire" in run("sidestream", "train", "--config-dir", "my_conf", *mine, "--cfg", "job")
    assert "properties hold" in run("sidestream", "check-part", "my_pkg.Bf16Wire")


def test_torchrun_starts_the_module(run: Run, tmp_path: Path):
    words = ["--nproc-per-node=2", "-m", "sidestream", "train", "trainer.max_steps=2", *MICRO]
    run("python", "-m", "torch.distributed.run", *words)
    result = result_in(tmp_path / "logs")
    assert (result["status"], result["world_size"]) == ("finished", 2)


def test_what_needs_no_run(run: Run, tmp_path: Path):
    assert "TFLOP/s" in run("sidestream", "predict", "-m", "dispatcher=alltoall,nccl_ep")
    run("sidestream", "doctor", "--json", "doctor.json")
    assert {row["option"] for row in json.loads((tmp_path / "doctor.json").read_text())["options"]} >= {
        "shortcut"
    }
    assert "run sidestream train -m seed=1,2" in run("sidestream", "train", "seed=1,2", code=2)
    steps = ["measure.rounds=2", "measure.warmup=0", "overlap=shared_expert", "model.num_shared_experts=1"]
    run("sidestream", "measure", *steps, *MICRO)
    assert list((tmp_path / "logs" / "measure_overlap" / "runs").glob("*/*/overlap.json"))
