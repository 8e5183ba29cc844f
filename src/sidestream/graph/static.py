"""Where recordings read a batch: tensors made once, into which every batch is copied."""

from __future__ import annotations

from torch import Tensor

from sidestream.data.batch import Batch


class StaticBatch:
    """Inputs at fixed addresses."""

    def __init__(self) -> None:
        self.batch: Batch | None = None

    def bind(self, batch: Batch) -> Batch:
        """Copy a batch to its place; the first one makes it.

        Raises:
            ValueError: Another shape or dtype than the first one had.
        """
        if self.batch is None:
            self.batch = batch.clone()
            return self.batch
        for name, (new, old) in self.batch.pairs(batch).items():
            if new is None and old is None:
                continue
            if new is None or old is None or new.shape != old.shape or new.dtype != old.dtype:
                raise ValueError(
                    f"graph=step: {name} of this batch is {_described(new)}, the first one's was {_described(old)}; a "
                    f"recording has fixed shapes; set graph=none"
                )
            old.copy_(new, non_blocking=True)
        return self.batch


def _described(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
