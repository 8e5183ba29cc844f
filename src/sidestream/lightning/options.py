"""What of a loaded optimizer is the config's, and what is the checkpoint's.

A checkpoint brings the optimizer's groups whole, and with them how the earlier run was configured: its rate, decay and
betas, which kernel it used, whether the rate lay in memory. What the constructor takes is the config's, so it is kept
over a load; what an optimizer keeps there for itself (moments, an estimate of the rate) is the checkpoint's.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

_OF_THE_SCHEDULE = "initial_lr"  # what factors multiply


class ConfiguredOptions:
    """The options of a fresh optimizer and its schedule.

    Args:
        scheduler: Just built, on an optimizer just built.
    """

    def __init__(self, scheduler: LambdaLR) -> None:
        self.scheduler, self.optimizer = scheduler, scheduler.optimizer
        names = {*_constructor_names(type(self.optimizer)), _OF_THE_SCHEDULE} - {"params"}
        self._groups = [
            {name: value for name, value in group.items() if name in names}
            for group in self.optimizer.param_groups
        ]

    def restore(self, factor: float) -> None:
        """After a load: the options again, and the rates as they are at this step.

        Args:
            factor: The schedule's factor of the learning rate at the step to come.
        """
        for group, options in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update(options)
            self._place_steps(group)
        self.scheduler.base_lrs = [group[_OF_THE_SCHEDULE] for group in self._groups]
        for group, base in zip(self.optimizer.param_groups, self.scheduler.base_lrs, strict=True):
            rate = base * factor  # as the schedule computes it
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _place_steps(self, group: dict[str, Any]) -> None:
        """Steps are counted where the kernel of these options looks for them; a load goes by the earlier run's."""
        if not {"fused", "capturable"} & group.keys():
            return
        for parameter in group["params"]:
            state = self.optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor):
                there = group.get("fused") or group.get("capturable")
                state["step"] = state["step"].to(parameter.device if there else "cpu")


def _constructor_names(kind: type) -> set[str]:
    """Arguments of a class and of those above it: a subclass may pass on what it does not name."""
    own = [vars(above)["__init__"] for above in kind.__mro__ if "__init__" in vars(above)]
    return {name for init in own for name in inspect.signature(init).parameters}


def plain_rates(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state for a checkpoint: a rate is a number there, wherever the run keeps it."""
    groups = [
        {name: value.item() if _is_rate(name, value) else value for name, value in group.items()}
        for group in state["param_groups"]
    ]
    return {**state, "param_groups": groups}


def _is_rate(name: str, value: Any) -> bool:
    return name in ("lr", _OF_THE_SCHEDULE) and isinstance(value, torch.Tensor)


__all__ = ["ConfiguredOptions", "plain_rates"]
