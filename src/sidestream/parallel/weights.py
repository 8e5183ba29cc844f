"""Read the weights of a checkpoint without its optimizer, for any expert-parallel size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from sidestream.parallel.checkpoint_reader import CheckpointReader, load_state

# Where Lightning and our module put the model's tensors in a checkpoint.
PREFIX = "state_dict.model."


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Load every parameter and buffer of `model` in place. Collective if there are several ranks.

    Args:
        model: Experts as DTensors; each rank reads the slices it owns.
        checkpoint: A checkpoint folder.

    Raises:
        Damaged: A file is not what it should be.
        ValueError: The checkpoint has other tensors or other shapes than the model.
    """
    reader = CheckpointReader(checkpoint)
    saved: dict[str, Any] = {
        name.removeprefix(PREFIX): entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(PREFIX)
    }
    wanted = model.state_dict()
    missing, extra = wanted.keys() - saved.keys(), saved.keys() - wanted.keys()
    shapes = [
        name
        for name in wanted.keys() & saved.keys()
        if getattr(saved[name], "size", None) != wanted[name].shape
    ]
    if missing or extra or shapes:
        first = sorted([*missing, *extra, *shapes])[0]
        raise ValueError(
            f"checkpoint={checkpoint}: it is of another model ({len(missing)} tensors missing, {len(extra)} unknown, "
            f"{len(shapes)} of another shape, first: {first})"
        )
    load_state({"state_dict": {f"model.{name}": value for name, value in wanted.items()}}, reader)
