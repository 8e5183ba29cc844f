"""One global order of sequences; each rank takes its slice of every step."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class StepSampler(Sampler[list[int]]):
    """Batch sampler without end: one item per optimizer step, this rank's sequence indices.

    Step s uses positions s*B .. (s+1)*B of an endless order, epoch after epoch without a gap: within an epoch
    no sequence is left out or repeated, also where an epoch ends inside a step. The order depends on `seed`,
    `shuffle`, B and the number of sequences only, so batches are the same for every world size.

    Drawing a step does not advance the state, because a loader may fetch ahead: only `commit` does. A step
    attempted twice, or fetched but not trained before a checkpoint, is neither lost nor counted twice.

    Args:
        num_sequences: Sequences of the corpus.
        global_batch_size: B, sequences of one step over all ranks.
        rank: This rank, in [0, world_size).
        world_size: Number of ranks; must divide B.
        seed: Not negative.
        shuffle: False gives the order of the corpus in every epoch.

    Raises:
        ValueError: `world_size` does not divide `global_batch_size`.
    """

    def __init__(
        self,
        num_sequences: int,
        *,
        global_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        if global_batch_size % world_size:
            raise ValueError(
                f"global_batch_size={global_batch_size}: expected a multiple of the world size {world_size}"
            )
        self.num_sequences = num_sequences
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.next_step = 0
        share = global_batch_size // world_size
        self._slice = slice(rank * share, (rank + 1) * share)
        self._cached: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __iter__(self) -> Iterator[list[int]]:
        step = self.next_step
        while True:
            yield self.step_indices(step)[self._slice].tolist()
            step += 1

    def step_indices(self, step: int) -> np.ndarray:
        """Sequence indices of all ranks in `step`, whatever the state: int64 [global_batch_size]."""
        positions = np.arange(step * self.global_batch_size, (step + 1) * self.global_batch_size)
        epochs, places = np.divmod(positions, self.num_sequences)
        return np.concatenate([self._order(int(e))[places[epochs == e]] for e in np.unique(epochs)])

    def commit(self, next_step: int) -> None:
        """Records that all steps before `next_step` are trained; a checkpoint continues there."""
        self.next_step = next_step

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint needs; equal on every rank."""
        return {"next_step": self.next_step, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues at the step of a checkpoint, with any world size.

        Raises:
            ValueError: The checkpoint was written under another order of sequences.
        """
        for key, mine in self._identity().items():
            if state_dict[key] != mine:
                raise ValueError(
                    f"{key}={mine}: the checkpoint was trained with another order of sequences; "
                    f"expected {key}={state_dict[key]}"
                )
        self.next_step = state_dict["next_step"]

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "num_sequences": self.num_sequences,
            "shuffle": self.shuffle,
        }

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            epoch = 0
        if self._cached[0] != epoch:
            if self.shuffle:
                # Sorting raw bits instead of Generator.permutation: numpy promises the former never changes.
                bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch]))
                order = np.argsort(bits.random_raw(self.num_sequences), kind="stable")
            else:
                order = np.arange(self.num_sequences)
            self._cached = (epoch, order)
        return self._cached[1]
