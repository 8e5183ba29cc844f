"""Enums and configuration objects of `nccl.ep`, for its double. Sections are of the API reference."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.doubles.rules import Pointer, require


# 1.3: enums and keyword-only dataclasses, names and defaults as in the wheel.
class Algorithm(enum.IntEnum):
    LOW_LATENCY = 0
    HIGH_THROUGHPUT = 1


class Layout(enum.IntEnum):
    UNSET = 0
    EXPERT_MAJOR = 1
    RANK_MAJOR = 2
    FLAT = 3


class PassDir(enum.IntEnum):
    FWD = 0
    BWD = 1


class OverflowPolicy(enum.IntEnum):
    AUTO = 0
    TRAP = 1
    DROP = 2


class ZeroCopyMode(enum.IntEnum):
    AUTO = 0
    OFF = 1
    ON = 2


class ExpertIdKind(enum.IntEnum):
    AUTO = 0
    LOCAL = 1
    GLOBAL = 2


class DispatchQuantizationRecipe(enum.IntEnum):
    NONE = 0
    FWD = 1
    DS_FP8E3M4 = 2


class CombineQuantizationRecipe(enum.IntEnum):
    NONE = 0
    NVFP4 = 1


@dataclass(kw_only=True)
class AllocConfig:
    alloc_fn: int = 0
    free_fn: int = 0
    context: int = 0


@dataclass(kw_only=True)
class GroupConfig:
    algorithm: Algorithm = Algorithm.LOW_LATENCY
    num_experts: int = 0
    max_dispatch_tokens_per_rank: int = 0
    max_recv_tokens_per_rank: int = 0
    max_token_bytes: int = 0
    rdma_buffer_size: int = 0
    num_qp_per_rank: int = 0
    num_channels: int = 0
    max_num_sms: int = 0
    alloc: AllocConfig = field(default_factory=AllocConfig)
    enable_mask: bool = False
    timeout_ns: int = 0
    zero_copy: ZeroCopyMode = ZeroCopyMode.AUTO
    overflow_policy: OverflowPolicy = OverflowPolicy.AUTO
    num_topk: int = 0


@dataclass(kw_only=True)
class HandleConfig:
    dispatch_output_per_expert_alignment: int = 0


@dataclass(kw_only=True)
class DispatchConfig:
    send_only: int = 0
    round_scales: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: DispatchQuantizationRecipe = DispatchQuantizationRecipe.NONE


@dataclass(kw_only=True)
class CombineConfig:
    send_only: int = 0
    pass_direction: PassDir = PassDir.FWD
    quantization_recipe: CombineQuantizationRecipe = CombineQuantizationRecipe.NONE


class Tensor:
    """1.3: a raw pointer with a shape. 1.3: "the library keeps raw pointers", so this holds no reference."""

    def __init__(
        self,
        buffer: Any,
        *,
        dtype: Any = None,
        shape: Any = None,
        window: Any = None,
        window_offset: Any = None,
    ) -> None:
        require(isinstance(buffer, torch.Tensor), "double: raw integer pointers are not modelled")
        require(buffer.is_contiguous(), "tensors are read through their address: contiguous ones only")
        self.pointer = Pointer(buffer, "tensor")
        self.dtype, self.shape = buffer.dtype, tuple(buffer.shape)


@dataclass(kw_only=True)
class LayoutInfo:
    expert_counters: Tensor | None = None
    src_rank_counters: Tensor | None = None
    expert_offsets: Tensor | None = None
    recv_total_counter: Tensor | None = None
    recv_topk_idx_kind: ExpertIdKind = ExpertIdKind.AUTO


# 1.9: fields default to None.
@dataclass(kw_only=True)
class DispatchInputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass(kw_only=True)
class DispatchOutputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None
    topk_idx: Tensor | None = None


@dataclass(kw_only=True)
class CombineInputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
    scales: Tensor | None = None


@dataclass(kw_only=True)
class CombineOutputs:
    tokens: Tensor | None = None
    topk_weights: Tensor | None = None
