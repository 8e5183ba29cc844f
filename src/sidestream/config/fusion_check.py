"""What fits `fusion=mega`, which takes the dispatcher's place. Pure."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.config.mok_limits import MoKSizes, first_violation

MEGA = "sidestream.fusion.mega.fused.MegaExperts"
NONE = "sidestream.dispatch.none.NoDispatcher"


CHUNKED = "fusion=mega has no transfers of its own beside the experts, so there is nothing to hide in chunks"


def is_mega(fusion: DictConfig) -> bool:
    """Whether this is `fusion=mega`."""
    return fusion.get("_target_") == MEGA


def check_fusion(cfg: DictConfig, layout: Layout) -> None:
    """Checks what `fusion=mega` needs, and that nothing else goes without a dispatcher.

    Raises:
        ConfigError: naming the key to change.
    """
    none = cfg.dispatcher.get("_target_") == NONE
    if not is_mega(cfg.fusion):
        if none:
            raise ConfigError(
                "dispatcher",
                "none",
                "without fusion=mega something must move the rows",
                expected="a dispatcher",
                fix="dispatcher=alltoall",
            )
        return
    if not none:
        name = str(cfg.dispatcher.get("_target_", "?")).split(".")[-2]
        raise _refuse("dispatcher", name, "fusion=mega moves the rows itself", "none", "dispatcher=none")
    if "gbps" in cfg.link:
        why = "fusion=mega reads rows where they lie, and an emulated link slows exchanges only"
        raise _refuse("link", "throttled", why, "link=native", "link=native")
    _check_overlap(cfg)
    _check_library(cfg, layout)
    if cfg.fusion.library == "mok":
        _check_mok(cfg, layout)
    if layout.expert_parallel_size > layout.local_world_size:
        raise _refuse(
            "strategy.expert_parallel_size",
            cfg.strategy.expert_parallel_size,
            f"fusion=mega shares memory among {layout.expert_parallel_size} ranks, and a host has "
            f"{layout.local_world_size}",
            "ranks of one host",
            f"strategy.expert_parallel_size={layout.local_world_size}",
        )
    if cfg.fusion.capacity_factor is not None and cfg.router.get("pad_to_capacity") is True:
        raise _refuse(
            "fusion.capacity_factor",
            cfg.fusion.capacity_factor,
            "router.pad_to_capacity=true gives every expert one number of rows already",
            "null",
            "fusion.capacity_factor=null",
        )


def _refuse(key: str, value: Any, why: str, expected: str, fix: str) -> ConfigError:
    return ConfigError(key, value, why, expected=expected, fix=fix)


def _check_overlap(cfg: DictConfig) -> None:
    if str(cfg.overlap.get("_target_", "")).endswith("ChunkedOverlap"):
        raise _refuse("overlap", "chunked", CHUNKED, "another schedule", "overlap=none")
    if cfg.overlap.get("delay_wgrad") is True:
        why = "fusion=mega computes weight gradients inside its one operation"
        raise _refuse("overlap.delay_wgrad", True, why, "false", "overlap.delay_wgrad=false")


def _check_library(cfg: DictConfig, layout: Layout) -> None:
    library, device = cfg.fusion.library, layout.device_type
    if library == "auto":
        return
    if library == "windows" and device != "cpu":
        why = "it reads the memory of CPUs, and the ranks are on GPUs"
        raise _refuse("fusion.library", library, why, "auto, triton or mok", "fusion.library=auto")
    if library != "windows" and device == "cpu":
        why = "it runs on GPUs, and the ranks are on CPUs"
        raise _refuse("fusion.library", library, why, "auto or windows", "fusion.library=auto")


def _check_mok(cfg: DictConfig, layout: Layout) -> None:
    if not str(cfg.overlap.get("_target_", "")).endswith("NoOverlap"):
        name = str(cfg.overlap.get("_target_", "?")).split(".")[-2]
        why = "fusion.library=mok computes the shared expert too, on the rows that it routes, in one go"
        raise _refuse("overlap", name, why, "none", "overlap=none")
    if cfg.fusion.capacity_factor is not None:
        why = "fusion.library=mok makes room for the worst case: with less it traps the device"
        raise _refuse(
            "fusion.capacity_factor", cfg.fusion.capacity_factor, why, "null", "fusion.capacity_factor=null"
        )
    model = cfg.model
    width = model.expert_hidden_size
    violation = first_violation(
        MoKSizes(
            ranks=layout.expert_parallel_size,
            tokens=layout.micro_batch_size * cfg.data.seq_length,
            sequence=cfg.data.seq_length,
            hidden=model.hidden_size,
            top_k=cfg.router.top_k,
            experts=model.num_experts,
            width=width,
            num_shared=model.num_shared_experts,
            shared_width=model.shared_expert_hidden_size or model.num_shared_experts * width,
            shared_gate=model.shared_expert_gate,
            precision=cfg.trainer.precision,
            alignment=cfg.fusion.alignment,
            on_gpu=layout.device_type == "cuda",
        )
    )
    if violation is not None:
        key, value, why, expected, fix = violation
        raise _refuse(key, value, why, expected, fix)
