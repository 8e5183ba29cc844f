"""Fixed-length windows over a flat token array."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sidestream.config.errors import ConfigError


class SequenceDataset(Dataset[Tensor]):
    """Windows that do not overlap in what they predict: item i is tokens i*L .. (i+1)*L, both ends included.

    Item: int64 [L + 1], L = `seq_length`; the first L are inputs, the last L targets. A tail that does not
    fill a window is left out.

    Args:
        tokens: Integers [N].
        seq_length: L, in tokens.

    Raises:
        ConfigError: There are not enough tokens for one window.
    """

    def __init__(self, tokens: np.ndarray, seq_length: int) -> None:
        self.tokens = tokens
        self.seq_length = seq_length
        if len(self) < 1:
            raise ConfigError(
                "data.seq_length",
                seq_length,
                f"a split of {tokens.size} tokens holds no sequence",
                expected=f"1 to {tokens.size - 1}" if tokens.size > 1 else "more data in both splits",
                fix="data.seq_length=<a smaller number>" if tokens.size > 1 else "data.val_fraction=<more>",
            )

    def __len__(self) -> int:
        return max(0, self.tokens.size - 1) // self.seq_length

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = index * self.seq_length
        return torch.from_numpy(self.tokens[begin : begin + self.seq_length + 1].astype(np.int64))
