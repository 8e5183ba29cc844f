"""Initial weights by name: each parameter, and each expert, has its own seed.

So expert e starts from the same numbers for every expert-parallel size, and adding a module does not shift the
random numbers of the others.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from sidestream.model.moe import local
from sidestream.model.transformer import MoETransformer


def seed_of(*parts: object) -> int:
    """A 63-bit seed from a name, the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _normal_(tensor: Tensor, std: float, seed: int) -> None:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    values = torch.empty(tensor.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
    tensor.copy_(values)


@torch.no_grad()
def initialize(model: MoETransformer, *, seed: int) -> None:
    """Fill every parameter in place. Residual projections are scaled by `1 / sqrt(2 * layers)` (GPT-2); norms are ones.

    Args:
        model: Its expert weights hold the experts `model.parts.expert_range`, as plain tensors or DTensors.
        seed: The run's seed, the same on every rank.
    """
    std = model.shape.init_std
    residual_std = std / (2 * model.shape.num_layers) ** 0.5
    first_expert = model.parts.expert_range[0]
    for name, parameter in model.named_parameters():
        weight = local(parameter.data)
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
            continue
        is_residual = name.endswith(("out.weight", "down.weight", "w_down"))
        scale = residual_std if is_residual else std
        if ".experts." in name:
            for index, expert in enumerate(weight.unbind(0)):
                _normal_(expert, scale, seed_of(seed, name, first_expert + index))
        else:
            _normal_(weight, scale, seed_of(seed, name))
    for moe in model.moe_layers():
        moe.selection_bias.zero_()
