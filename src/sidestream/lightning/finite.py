"""A state that is not finite must not take the place of one that is."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from sidestream import cli
from sidestream.config.errors import PlainError
from sidestream.parallel.reduction import local
from sidestream.tracking.integrity import checkpoints, step_of


def check_finite(trainer: Trainer, module: Any, *, run_folder: Path) -> None:
    """End the run if the state of any rank is not finite. Collective.

    Args:
        module: Its `model` and the `rate` of the step are looked at, and the moments of the trainer's optimizers.
        run_folder: For the line that says how to go on.

    Raises:
        PlainError: On every rank, naming what is not finite.
    """
    # The optimizer holds the rate of the next step already.
    found = [] if math.isfinite(module.rate) else [f"the learning rate of step {trainer.global_step}"]
    named = list(_state(trainer, module.model))
    # One read of the device for all of them.
    finite = torch.stack([torch.isfinite(tensor).all() for _, tensor in named]).tolist()
    found += [name for (name, _), fine in zip(named, finite) if not fine]
    every: list[list[str]] = [found]
    if trainer.world_size > 1:
        every = [[] for _ in range(trainer.world_size)]
        dist.all_gather_object(every, found, group=module.parallel_strategy.parallel.control)
    names = list(dict.fromkeys(name for part in every for name in part))
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise PlainError(
            f"step {trainer.global_step}: not finite: {names[0]}{more}; no checkpoint was written; "
            f"{_how_to_go_on(run_folder)}"
        )


def _state(trainer: Trainer, model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in model.state_dict().items():
        yield name, local(tensor)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in trainer.optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    # Counts of steps may be on the host while moments are on a device.
                    yield f"{key} of {names.get(parameter, 'a parameter')}", local(value).to(parameter.device)


def _how_to_go_on(run_folder: Path) -> str:
    whole = checkpoints(run_folder)
    if not whole:
        return "there is no earlier one: start again, with a lower optimizer.lr"
    command = f"{cli.spelled('python train.py')} resume={os.path.relpath(run_folder)} optimizer.lr=<lower>"
    return f"that of step {step_of(whole[-1])} is kept; go on with: {command}"
