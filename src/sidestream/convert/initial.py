"""`initial_weights`: weights to start from, of a Hugging Face folder or of one of our checkpoints."""

from __future__ import annotations

from pathlib import Path

from sidestream.config.errors import ConfigError
from sidestream.convert.huggingface_folder import load_huggingface
from sidestream.convert.start import is_checkpoint
from sidestream.model.transformer import MoETransformer
from sidestream.parallel.weights import load_weights
from sidestream.tracking.integrity import Damaged


def load_before_sharding(model: MoETransformer, folder: Path) -> None:
    """Read a Hugging Face folder: each rank its own experts. Does nothing for a checkpoint of ours."""
    if not is_checkpoint(folder):
        load_huggingface(model, folder)


def load_after_sharding(model: MoETransformer, folder: Path) -> None:
    """Read a checkpoint of ours, whatever the number of ranks that wrote it. Collective."""
    if is_checkpoint(folder):
        try:
            load_weights(model, folder)
        except Damaged as error:
            why, fix = str(error), "initial_weights=<a whole checkpoint>"
            raise ConfigError(
                "initial_weights", folder, why, expected="a whole checkpoint", fix=fix
            ) from error
        except ValueError as error:
            why, fix = str(error), "model=<that of the checkpoint>"
            raise ConfigError("initial_weights", folder, why, expected="the same model", fix=fix) from error
