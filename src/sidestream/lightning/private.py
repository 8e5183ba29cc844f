"""The private names of Lightning that Sidestream touches, all of them, and why. A test names each.

An upgrade that renames one fails in that test and not in a user's run.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Trainer


def own_signals(trainer: Trainer) -> None:
    """Leave signals to us.

    Lightning's SIGTERM handler issues a broadcast from inside the handler, which hangs unless every rank is
    interrupted at the same place, and its loop broadcasts a flag before every step. Our flag rides on the reduction
    that `TrainingStep.check` does anyway.
    """
    connector = trainer._signal_connector
    assert callable(connector.register_signal_handlers)
    connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    epoch_loop = trainer.fit_loop.epoch_loop
    assert callable(epoch_loop._broadcast_sigterm_tensor)
    epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def finish_after_fit(trainer: Trainer, finish: Callable[[], None]) -> None:
    """Call `finish` behind the training loop, before anything is torn down.

    Where a checkpoint has all steps, Lightning's loop returns before the first hook, and without validation data.
    """
    loop = trainer.fit_loop
    plain, validation = loop.run, loop.epoch_loop.val_loop

    def run() -> None:
        plain()
        if validation._combined_loader is None and validation._data_source.is_defined():
            trainer.validating = True
            validation.setup_data()
            trainer.training = True
        finish()

    loop.run = run  # type: ignore[method-assign]
