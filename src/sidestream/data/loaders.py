"""Loaders over a corpus. A batch has B / W rows of L tokens, for B rows a step and W ranks.

A row is a window of the corpus as one stream (`packing="concat"`), or packed documents (`packing="documents"`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from sidestream.config.errors import ConfigError
from sidestream.data.batch import Batch
from sidestream.data.corpus import Corpus
from sidestream.data.document_packing import PackedDataset, packed_dataset
from sidestream.data.sampler import StepSampler
from sidestream.data.sequences import SequenceDataset

Rows = SequenceDataset | PackedDataset


class StatefulLoader(DataLoader[Any]):
    """Endless loader; Lightning saves its place in the data through the two state methods."""

    def __init__(self, dataset: Rows, sampler: StepSampler, *, vocab_size: int) -> None:
        # No worker processes: the state is then exact, and a window is only a copy of a few hundred bytes.
        super().__init__(
            dataset,
            batch_sampler=sampler,
            collate_fn=collator(dataset, vocab_size),
            generator=_own_generator(),
        )
        self.rows, self.step_sampler = dataset, sampler

    def commit(self, next_step: int) -> None:
        """Records that all steps before `next_step` are trained (`StepSampler.commit`)."""
        self.step_sampler.commit(next_step)

    def state_dict(self) -> dict[str, int]:
        """State of the sampler."""
        return self.step_sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restores the sampler; takes effect at the next `iter()`.

        Raises:
            ValueError: The checkpoint was written under another order of sequences.
        """
        self.step_sampler.load_state_dict(state_dict)


def train_loader(
    corpus: Corpus,
    *,
    seq_length: int,
    global_batch_size: int,
    shuffle: bool,
    rank: int,
    world_size: int,
    seed: int,
    packing: str = "concat",
) -> StatefulLoader:
    """Endless training batches of this rank, one per optimizer step.

    Raises:
        ConfigError: The split holds no sequence, or documents are to be packed that have no ends.
        ValueError: `world_size` does not divide `global_batch_size`.
    """
    dataset = rows_of(corpus, "train", seq_length=seq_length, packing=packing)
    sampler = StepSampler(
        len(dataset),
        global_batch_size=global_batch_size,
        rank=rank,
        world_size=world_size,
        seed=seed,
        shuffle=shuffle,
    )
    return StatefulLoader(dataset, sampler, vocab_size=corpus.vocab_size)


def val_loader(
    corpus: Corpus,
    *,
    seq_length: int,
    global_batch_size: int,
    rank: int,
    world_size: int,
    num_batches: int | None = None,
    packing: str = "concat",
) -> DataLoader[Any]:
    """Validation batches of this rank: always the same ones, equally many on every rank.

    The sequences of all ranks together are spread evenly over the split and depend on B and `num_batches`
    only, so losses of different world sizes are comparable.

    Args:
        corpus: Its validation split is used.
        seq_length: L, in tokens.
        global_batch_size: B, sequences of one batch over all ranks.
        rank: This rank, in [0, world_size).
        world_size: Number of ranks; must divide B.
        num_batches: At most this many batches; None takes as many as the split fills.
        packing: The same as in training.

    Raises:
        ConfigError: The split does not fill one batch, or documents are to be packed that have no ends.
        ValueError: `world_size` does not divide `global_batch_size`.
    """
    dataset = rows_of(corpus, "val", seq_length=seq_length, packing=packing)
    full = len(dataset) // global_batch_size
    if full < 1:
        raise ConfigError(
            "data.global_batch_size",
            global_batch_size,
            f"the validation split has {len(dataset)} sequences of {seq_length} tokens, less than one batch",
            expected=f"at most {len(dataset)}",
            fix="data.global_batch_size=<a smaller number>, or a shorter data.seq_length",
        )
    if global_batch_size % world_size:
        raise ValueError(
            f"global_batch_size={global_batch_size}: expected a multiple of the world size {world_size}"
        )
    batches = full if num_batches is None else min(num_batches, full)
    chosen = np.arange(batches * global_batch_size) * len(dataset) // (batches * global_batch_size)
    mine = chosen.reshape(batches, world_size, -1)[:, rank]
    return DataLoader(
        dataset,
        batch_sampler=mine.tolist(),
        collate_fn=collator(dataset, corpus.vocab_size),
        generator=_own_generator(),
    )


def rows_of(corpus: Corpus, split: str, *, seq_length: int, packing: str) -> Rows:
    """The rows of a split ("train" or "val").

    Raises:
        ConfigError: There is none.
    """
    if packing == "documents":
        return packed_dataset(corpus, split, seq_length)
    return SequenceDataset(corpus.train_tokens if split == "train" else corpus.val_tokens, seq_length)


def collator(rows: Rows, vocab_size: int) -> Callable[[list[Any]], Batch]:
    """Returns what makes a batch of the items of `rows`.

    It raises ValueError for a token that a model of `vocab_size` tokens does not know: the start reads only samples
    of big files, and a GPU would stop without saying why.
    """
    dtype = rows.tokens.dtype
    may_exceed = dtype.kind == "i" or vocab_size <= np.iinfo(dtype).max

    def collate(items: list[Any]) -> Batch:
        batch = Batch.join(items) if isinstance(items[0], Batch) else Batch.of(torch.stack(items))
        if may_exceed:
            low, high = int(batch.inputs.min()), int(max(batch.inputs.max(), batch.targets.max()))
            if low < 0 or high >= vocab_size:
                raise ValueError(
                    f"the data holds the tokens {low} and {high}: expected 0 to {vocab_size - 1}"
                )
        return batch

    return collate


def _own_generator() -> torch.Generator:
    """For the number each `iter()` draws: the global generator would shift dropout and break resume."""
    return torch.Generator().manual_seed(0)
