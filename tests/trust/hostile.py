"""Run folders as somebody who means harm would make them. Each tries to create the canary, hang, fill memory, or shout.

`make_run` gives an honest folder without a training; the functions of `ATTACKS` change it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sidestream.config.compatibility import check
from sidestream.launch import entry
from sidestream.launch.record import LAUNCH, RESOLVED, Launch, save_resolved
from sidestream.tracking.untrusted import parse_yaml
from tests.fake_checkpoint import make_checkpoint

CONF = Path(__file__).parents[2] / "conf"
SHOUT = "\x1b]0;owned\x07\x1b[2J\u202e"
BOMB = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi")
)

Attack = Callable[[Path, Path], Any]  # (folder, canary)
ATTACKS: dict[str, Attack] = {}


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__] = function
    return function


def make_run(folder: Path) -> Path:
    """An honest run folder, and the sweep folder that it could be a job of."""
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", ["trainer.devices=1", "trainer.accelerator=cpu", "model.hidden_size=32"])
    layout = check(cfg)
    (folder / ".hydra").mkdir(parents=True)
    save_resolved(folder, entry.resolve(cfg))
    Launch("python train.py", ["trainer.devices=1"], [], {"model": "tiny"}, layout).save(folder)
    make_checkpoint(folder / "checkpoints" / "step-00000003")
    record = {"step": 1, "train/loss": 1.0, "progress/tokens": 8}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (folder / "result.json").write_text(json.dumps({"status": "interrupted", "metrics": {}, "choices": {}}))
    hydra = {
        "overrides": {"task": ["trainer.devices=1"], "hydra": []},
        "job": {"config_name": "train"},
        "runtime": {"config_sources": []},
    }
    (folder / "multirun.yaml").write_text(OmegaConf.to_yaml({"hydra": hydra}))
    return folder


def change(path: Path, **values: Any) -> None:
    """Sets dotted keys (`__` for a dot) of a JSON or YAML file."""
    content = json.loads(path.read_text()) if path.suffix == ".json" else parse_yaml(path.read_text())
    for key, value in values.items():
        *parents, last = key.split("__")
        node = content
        for name in parents:
            node = node[name]
        node[last] = value
    path.write_text(json.dumps(content))  # JSON is YAML too


def replace(path: Path, content: bytes | str | None) -> Path:
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


TEXTS = (RESOLVED, LAUNCH, "multirun.yaml", "metrics.jsonl", "result.json")


@attack
def target_in_the_config(folder: Path, canary: Path) -> None:
    change(folder / RESOLVED, router={"_target_": "os.system", "command": f"touch {canary}"})


@attack
def target_through_a_trusted_prefix(folder: Path, canary: Path) -> None:
    target = "torch.optim.optimizer.torch.hub.os.system"
    change(folder / RESOLVED, optimizer={"_target_": target, "command": f"touch {canary}", "lr": 0.1})


@attack
def folder_that_trusts_itself(folder: Path, canary: Path) -> None:
    target = {"_target_": "pathlib.Path.touch", "self": {"_target_": "pathlib.Path", "_args_": [str(canary)]}}
    change(folder / RESOLVED, trusted_targets=["pathlib", "os", "torch"], router=target)
    change(folder / LAUNCH, overrides=["trusted_targets=[os]", "router._target_=os.system"])


@attack
def overrides_for_hydra(folder: Path, canary: Path) -> None:
    evil = ["+hydra.callbacks.evil._target_=os.system", f"+hydra.callbacks.evil.command='touch {canary}'"]
    change(folder / LAUNCH, overrides=evil)
    change(folder / "multirun.yaml", hydra__overrides={"task": evil, "hydra": evil})


@attack
def flags_of_the_folder(folder: Path, canary: Path) -> None:
    conf = folder / "conf" / "hydra" / "callbacks"
    conf.mkdir(parents=True)
    (conf / "evil.yaml").write_text(f"evil:\n  _target_: os.system\n  command: touch {canary}\n")
    flags = ["--config-dir", str(folder / "conf")]
    change(folder / LAUNCH, flags=flags, overrides=["+hydra/callbacks=evil", *flags, "--multirun"])
    sources = [{"provider": "command-line", "path": str(folder / "conf")}]
    change(folder / "multirun.yaml", hydra__runtime={"config_sources": sources})


@attack
def modules_in_the_folder(folder: Path, canary: Path) -> None:
    code = f"open({str(canary)!r}, 'w')\n"
    for name in ("torch", "json", "sidestream", "hydra", "deep_ep", "triton", "sitecustomize"):
        (folder / f"{name}.py").write_text(code)
    (folder / "hydra_plugins").mkdir()
    (folder / "hydra_plugins" / "evil.py").write_text(code)


@attack
def settings_of_matplotlib(folder: Path, canary: Path) -> None:
    os.mkfifo(folder / "matplotlibrc")


@attack
def pickles(folder: Path, canary: Path) -> None:
    evil = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    step = folder / "checkpoints" / "step-00000003"
    for name in (".metadata", "meta.pt", "__0_0.distcp"):
        (step / name).write_bytes(evil)
    (step / "manifest.json").unlink(missing_ok=True)


@attack
def secrets_of_the_environment(folder: Path, canary: Path) -> None:
    change(folder / RESOLVED, name="${oc.env:SECRET}", seed="${oc.decode:${oc.env:SECRET}}")
    change(folder / LAUNCH, overrides=["name=${oc.env:SECRET}"], command="${oc.env:SECRET}")


@attack
def shouts(folder: Path, canary: Path) -> None:
    change(folder / RESOLVED, router={"_target_": SHOUT}, name=SHOUT)
    change(
        folder / LAUNCH,
        overrides=[f"{SHOUT}=1", f"model.num_layers={SHOUT}"],
        command=SHOUT,
        choices={"model": SHOUT},
    )
    change(folder / "multirun.yaml", hydra__overrides={"task": [f"{SHOUT}=1"], "hydra": [SHOUT]})
    change(folder / "result.json", status=SHOUT, error=SHOUT, choices={SHOUT: SHOUT})
    (folder / f"checkpoints/step-{SHOUT}".replace("/step", "/step")).mkdir()


def _each(name: str, make: Callable[[Path], Any]) -> None:
    def whole(folder: Path, canary: Path) -> None:
        for text in TEXTS:
            make(folder / text)

    ATTACKS[name] = whole


_each("pipes", lambda path: os.mkfifo(replace(path, None)))
_each("links_to_secrets", lambda path: replace(path, None).symlink_to("/etc/passwd"))
_each("links_to_nowhere", lambda path: replace(path, None).symlink_to("/nowhere/x"))
_each("links_in_a_circle", lambda path: replace(path, None).symlink_to(path.name))
_each("links_to_a_device", lambda path: replace(path, None).symlink_to("/dev/zero"))
_each("alias_bombs", lambda path: replace(path, BOMB))
_each("deep_nesting", lambda path: replace(path, "[" * 200_000))
_each("huge_files", lambda path: os.truncate(replace(path, b""), 1 << 40))
_each("empty_files", lambda path: replace(path, b""))
_each("binary_files", lambda path: replace(path, bytes(range(256)) * 8))
_each("tags_of_python", lambda path: replace(path, "!!python/object/apply:os.system ['touch /tmp/canary']\n"))
_each("numbers", lambda path: replace(path, "7"))
_each("lists", lambda path: replace(path, "[1, {}, null]"))
_each("folders", lambda path: replace(path, None).mkdir())


@attack
def giant_numbers(folder: Path, canary: Path) -> None:
    change(folder / RESOLVED, model__num_layers=10**30, model__hidden_size=1e300, trainer__devices=10**9)
    change(folder / LAUNCH, overrides=["trainer.max_steps=1e30", f"model.num_layers={10**30}"])
    change(folder / "result.json", metrics={"val_loss": 10**400, "tokens": "many"})


@attack
def wrong_types(folder: Path, canary: Path) -> None:
    change(
        folder / RESOLVED, model=[1], trainer="x", data=None, router=7, strategy={"expert_parallel_size": {}}
    )
    change(folder / LAUNCH, overrides=[1, None], flags={"a": 1}, choices=[], layout=[], command=7)
    change(folder / "multirun.yaml", hydra=[1])
    change(folder / "result.json", metrics=[1], choices=7, status={})
    replace(folder / "metrics.jsonl", '[1]\n{"step": "x"}\nnull\n{"step": 1e999, "train/loss": {}}\n')


@attack
def logs_that_lead_out(folder: Path, canary: Path) -> None:
    for name in ("rank0.log", "expert_load.jsonl", "env.json", "wandb_id"):
        (folder / name).symlink_to(canary)
