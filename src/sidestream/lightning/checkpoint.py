"""When checkpoints are written, where, and which are kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from sidestream.lightning.finite import check_finite
from sidestream.tracking.integrity import FOLDER, checkpoints, step_of

__all__ = ["FOLDER", "SaveCheckpoints", "checkpoints", "step_of"]


class SaveCheckpoints(Callback):
    """Saves every n steps, after the last step, and when the run was asked to stop.

    Args:
        run_folder: The run.
        every_n_steps: Steps between checkpoints.
        keep_last: Older ones are deleted.
    """

    def __init__(self, *, run_folder: Path, every_n_steps: int, keep_last: int) -> None:
        self.run_folder, self.every_n_steps, self.keep_last = run_folder, every_n_steps, keep_last
        self._saved: int | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        step = trainer.global_step
        if step % self.every_n_steps == 0 or step == trainer.max_steps or pl_module.stopping:
            self._save(trainer, step)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """A validation that was left because of a request to stop."""
        if pl_module.stopping and self._saved != trainer.global_step:
            # Else a resume would go on in the middle of it, and take the mean over the rest.
            trainer.fit_loop.epoch_loop.val_loop.batch_progress.reset()
            self._save(trainer, trainer.global_step)

    def _save(self, trainer: Trainer, step: int) -> None:
        self._saved = step
        check_finite(trainer, trainer.lightning_module, run_folder=self.run_folder)
        trainer.save_checkpoint(self.run_folder / FOLDER / f"step-{step:08d}")
        if trainer.is_global_zero:
            # Later ones are damaged: the resume passed them over.
            earlier = [one for one in checkpoints(self.run_folder) if step_of(one) <= step]
            for old in earlier[: -self.keep_last]:
                # Out of sight first: a kill while deleting must not leave a checkpoint with holes.
                doomed = old.with_name(f".{old.name}.old")
                shutil.rmtree(doomed, ignore_errors=True)  # of an earlier kill
                old.rename(doomed)
                shutil.rmtree(doomed)
