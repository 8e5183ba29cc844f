"""What rows look like on the wire.

`MXFP8` follows the OCP microscaling format (MX v1.0): blocks of 32 values share a power-of-two scale; values are e4m3.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
_LARGEST = 448.0  # of e4m3
_BIAS = 127  # of the scale's exponent (E8M0)


def _reinterpret(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes of each row as another dtype.

    Flat in between: `Tensor.view` looks at strides, which say nothing where there is one row, or none.
    """
    width = rows.shape[1] * rows.element_size() // dtype.itemsize
    return rows.reshape(-1).view(dtype).view(rows.shape[0], width)


class MXFP8:
    """8-bit rows: `[N, H]` -> `[N, H + H / 32]` uint8, values first, then scales.

    The scale is the smallest power of two with which the block's largest value stays within e4m3, so nothing
    saturates. Error of a value x in a block with largest magnitude m: at most `max(|x| / 16, m / 2**17, 2**-137)`:
    half a unit of 3 mantissa bits, or half of e4m3's smallest number (2**-9) times a scale of at most `2 m / 448`,
    which is not below 2**-127. A block with a value that is not finite becomes NaN as a whole. Values within 3 % of
    fp32's largest number round up to infinity.
    """

    def encode(self, rows: Tensor) -> Tensor:
        num_rows, width = rows.shape
        blocks = rows.float().view(num_rows, width // BLOCK, BLOCK)
        largest = blocks.abs().amax(dim=-1)
        # frexp: largest / 448 = m * 2**e with m in [0.5, 1), so 2**e is the power of two above it.
        exponent = torch.frexp(largest / _LARGEST).exponent.clamp(-_BIAS, _BIAS)
        values = torch.ldexp(blocks, -exponent.unsqueeze(-1)).to(torch.float8_e4m3fn)
        scales = torch.where(largest.isfinite(), exponent + _BIAS, 255).to(torch.uint8)
        return torch.cat([_reinterpret(values.view(num_rows, width), torch.uint8), scales], dim=1)

    def decode(self, wire: Tensor, like: torch.dtype) -> Tensor:
        num_rows, width = wire.shape[0], wire.shape[1] * BLOCK // (BLOCK + 1)
        values = _reinterpret(wire[:, :width], torch.float8_e4m3fn).float()
        exponent = wire[:, width:].int()
        blocks = values.view(num_rows, width // BLOCK, BLOCK)
        rows = torch.ldexp(blocks, (exponent - _BIAS).unsqueeze(-1))
        rows.masked_fill_((exponent == 255).unsqueeze(-1), torch.nan)
        return rows.view(num_rows, width).to(like)


class WithIds:
    """Routing weights `[N, J]` fp32 with the expert ids of the same routes: `[N, J]` int32 words of both.

    Ids are 16-bit and travel only forward; `ids` holds what arrived, `[R, J]` int64.
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def encode(self, rows: Tensor) -> Tensor:
        return torch.cat(
            [_reinterpret(rows, torch.uint8), _reinterpret(self.ids.short(), torch.uint8)], dim=1
        )

    def decode(self, wire: Tensor, like: torch.dtype) -> Tensor:
        width = wire.shape[1] // 6
        self.ids = _reinterpret(wire[:, 4 * width :], torch.int16).long()
        return _reinterpret(wire[:, : 4 * width], torch.float32)
