"""A checkpoint of other text, another model or another optimizer than its folder says: one line from a rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from sidestream.lightning.options import ConfiguredOptions, plain_rates
from tests.train.resumed import config, cut_back, run_all, write_text

BASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "plain": ({}, {}),
    "wider": ({}, {"model.hidden_size": 32}),
    "deeper": ({}, {"model.num_layers": 4}),
    "sgd": ({"optimizer": "sgd"}, {"optimizer.momentum": 0.0}),
    "shortcut": ({"overlap": "shortcut"}, {}),
}
# Name of what is resumed, of the run whose checkpoint lies there, and what the line says.
MISFITS = [
    ("plain", "wider", "is of another model: model.blocks.0.* is"),
    ("plain", "deeper", "is of another model: model.blocks.2.* there and none here"),
    ("deeper", "plain", "is of another model: model.blocks.2.* is none there and"),
    ("plain", "sgd", "is of another optimizer: torch.optim.sgd.SGD there and torch.optim.adamw.AdamW here"),
    ("plain", "shortcut", "computes another model: shortcut auto add tap_norm there and plain here"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each."""
    folder = tmp_path_factory.mktemp("misfits")
    cases = [
        (config(folder, options=options, **keys), folder / name, None)
        for name, (options, keys) in BASES.items()
    ]
    assert not [ended for ended in run_all(cases) if isinstance(ended, str)]
    return folder


def resumed(place: Path, name: str, folder: Path, **keys: Any) -> Any:
    options, given = BASES[name]
    return config(place, options=options, **{**given, "resume": str(folder), **keys})


@pytest.mark.full
def test_a_checkpoint_that_does_not_fit_is_one_line(place: Path) -> None:
    cases = []
    for number, (name, other, _) in enumerate(MISFITS):
        folder = cut_back(place / name, place / str(number))
        shutil.rmtree(folder / "checkpoints")
        shutil.copytree(place / other / "checkpoints", folder / "checkpoints")
        cases.append((resumed(place, name, folder), folder, None))
    # Momentum that was off when the checkpoint was written; `train.py` refuses it before.
    folder = cut_back(place / "sgd", place / "momentum")
    cases.append((resumed(place, "sgd", folder, **{"optimizer.momentum": 0.9}), folder, None))
    lines = run_all(cases)
    for (_, _, expected), line in zip([*MISFITS, ("", "", "does not fit this optimizer: Missing")], lines):
        assert isinstance(line, str) and "\n" not in line, line
        assert line.startswith("ConfigError: resume="), line
        for part in expected.split("*"):
            assert part in line, line


def test_other_text_is_one_line(place: Path) -> None:
    folder = cut_back(place / "plain", place / "text")
    text = write_text(place)
    content = text.read_text()
    text.write_text(content.replace("squared", "cubed"))
    try:
        (line,) = run_all([(resumed(place, "plain", folder), folder, None)])
    finally:
        text.write_text(content)
    assert line.startswith("ConfigError: resume=") and "was trained on other text: checksum" in line


class Passing(AdamW):
    """Passes on what it does not name, and keeps something in its groups."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            group["estimate"] = 1.0


def make(**options: Any) -> tuple[Any, ConfiguredOptions]:
    optimizer = Passing([torch.nn.Parameter(torch.ones(2))], **options)
    return optimizer, ConfiguredOptions(LambdaLR(optimizer, lambda step: 1.0))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("in_memory", [True, False])
def test_options_are_the_configs_and_estimates_the_checkpoints(fused: bool, in_memory: bool) -> None:
    earlier, _ = make(lr=0.5, betas=(0.5, 0.6), weight_decay=0.3, foreach=True)
    earlier.param_groups[0]["params"][0].grad = torch.ones(2)
    earlier.step()
    earlier.param_groups[0]["estimate"] = 7.0
    rate = torch.tensor(0.1, dtype=torch.float64) if in_memory and fused else 0.1
    now, options = make(lr=rate, weight_decay=0.0, fused=fused)
    now.load_state_dict(earlier.state_dict())
    options.restore(0.5)
    (group,) = now.param_groups
    assert (group["lr"] is rate) == (in_memory and fused)
    assert float(group["lr"]) == 0.05 and float(options.scheduler.base_lrs[0]) == 0.1
    assert (group["betas"], group["weight_decay"], group["fused"], group["foreach"]) == (
        (0.9, 0.999),
        0.0,
        fused,
        None,
    )
    assert group["estimate"] == 7.0
    assert now.state[group["params"][0]]["step"] == 1


def test_a_checkpoint_holds_rates_as_numbers() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.25), foreach=True)
    (group,) = plain_rates(optimizer.state_dict())["param_groups"]
    assert group["lr"] == 0.25 and isinstance(group["lr"], float)
