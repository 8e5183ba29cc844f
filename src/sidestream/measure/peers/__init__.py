"""Published MoE layers, put together from their own packages, as arms of the layer benchmark.

A peer is imported only when it is asked for. One that is missing, of another version than its adapter was written
for, or cannot run in the asked dtype ends the benchmark with the line that helps.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sidestream.measure.arms import Arm
from sidestream.measure.problem import Weights
from sidestream.measure.shapes import LayerShape

TORCHTITAN_INSTALL = "pip install --no-deps torchtitan==0.3.0 spmd-types==0.2.3 tyro docstring-parser triton"
EXTRA_INSTALL = "pip install -e '.[peers]'"


@dataclass(frozen=True)
class Peer:
    """How to get a peer.

    Attributes:
        module: Below this package; has `build(peer, shape, weights, dtype) -> Arm`.
        package, version: Of the distribution its adapter was written for.
        install: The line that installs it.
        dtypes: It computes in these only.
    """

    module: str
    package: str
    version: str
    install: str
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)


# In the order in which they are imported: megatron's stub comes after the others.
PEERS = {
    "transformers": Peer("huggingface", "transformers", "5.24.0", EXTRA_INSTALL),
    "torchtitan": Peer("titan", "torchtitan", "0.3.0", TORCHTITAN_INSTALL, dtypes=(torch.bfloat16,)),
    "megatron_alltoall": Peer("megatron", "megatron-core", "0.16.1", EXTRA_INSTALL),
    "megatron_allgather": Peer("megatron", "megatron-core", "0.16.1", EXTRA_INSTALL),
}

Builder = Callable[[LayerShape, Weights, torch.dtype], Arm]


def choose(asked: list[str], dtype: torch.dtype) -> tuple[list[str], dict[str, str]]:
    """Peers to run, in import order, and those left out with the reason.

    Args:
        asked: Names, or `["all"]`, or `["none"]`.

    Raises:
        ValueError: An unknown name, or one that cannot compute in `dtype`.
    """
    reasons = {
        name: f"{name} computes its experts in {' and '.join(map(str, peer.dtypes))} only"
        for name, peer in PEERS.items()
        if dtype not in peer.dtypes
    }
    if asked == ["none"]:
        return [], {}
    if asked == ["all"]:
        return [name for name in PEERS if name not in reasons], reasons
    for name in asked:
        if name not in PEERS:
            raise ValueError(f"peers={name}: expected all, none, or any of {', '.join(PEERS)}")
        if name in reasons:
            raise ValueError(f"peers={name}: {reasons[name]}; leave it out or use --dtype bf16")
    return [name for name in PEERS if name in asked], {}


def load(name: str) -> Builder:
    """Import a peer.

    Raises:
        ValueError: It is not installed, or in another version; the message holds the line that installs it.
    """
    peer = PEERS[name]
    try:
        found = importlib.metadata.version(peer.package)
        if found != peer.version:
            raise ImportError(f"{peer.package} {found} is installed, the adapter is for {peer.version}")
        module = importlib.import_module(f"sidestream.measure.peers.{peer.module}")
    except ImportError as error:
        raise ValueError(
            f"peers={name}: {error}; install it with: {peer.install}; or run without: --peers none"
        ) from error
    return lambda shape, weights, dtype: module.build(name, shape, weights, dtype)
