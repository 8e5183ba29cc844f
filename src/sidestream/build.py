"""Config -> objects. The only place that reads the config's groups; nothing from OmegaConf goes past it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.optim import Optimizer

from sidestream.config.construct import OF_EVERY_STRATEGY, construct
from sidestream.config.errors import ConfigError
from sidestream.conformance import answers
from sidestream.convert.initial import load_before_sharding
from sidestream.convert.start import check_weights, other_tokens
from sidestream.dispatch.local import LocalDispatcher
from sidestream.fusion.base import fused_of
from sidestream.fusion.grouped import GroupedExperts
from sidestream.model.config import ModelShape, shape_from
from sidestream.model.transformer import MoETransformer
from sidestream.overlap.base import Schedule, completed
from sidestream.parallel.assemble import assemble
from sidestream.parallel.mesh import Parallel
from sidestream.parallel.reduction import Reduction, is_expert
from sidestream.routing.capacity import expert_capacity

log = logging.getLogger(__name__)

# trainer.precision -> dtype of the parameters, dtype of autocast
PRECISIONS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "32-true": (torch.float32, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "bf16-true": (torch.bfloat16, None),
}


def make(cfg: DictConfig, group: str, **kwargs: Any) -> Any:
    """The object that the option of a group describes, see `construct`."""
    return _complete(group, construct(group, cfg[group], cfg, **kwargs))


def _complete(group: str, part: Any) -> Any:
    answers.check_complete(group, part)
    return part


def model_shape(cfg: DictConfig, *, vocab_size: int) -> ModelShape:
    """The model's sizes.

    Args:
        cfg: The root config.
        vocab_size: Number of different tokens in the data, the model's vocabulary unless it states a larger one.
    """
    values: Any = OmegaConf.to_container(cfg.model, resolve=True)
    stated = values.get("vocab_size")
    if stated is not None and stated < vocab_size:
        raise ConfigError(
            "model.vocab_size",
            stated,
            f"the data has {vocab_size} different tokens",
            expected=f"null or at least {vocab_size}",
            fix="model.vocab_size=null",
        )
    return shape_from(values, vocab_size=vocab_size)


def padding_rows(cfg: DictConfig, num_tokens: int) -> int:
    """Rows that `router.pad_to_capacity` adds behind the tokens of a rank."""
    if not cfg.router.get("pad_to_capacity"):
        return 0
    experts, top_k = cfg.model.num_experts, cfg.router.top_k
    factor = cfg.router.expert_capacity_factor
    capacity = expert_capacity(num_tokens, top_k=top_k, num_experts=experts, factor=factor)
    return -(-capacity * experts // top_k)


def make_schedule(cfg: DictConfig) -> Schedule:
    """The overlap option's schedule."""
    return completed(make(cfg, "overlap"))


def make_movers(cfg: DictConfig, *, exact: bool = False) -> tuple[Any, Any]:
    """The dispatcher and the experts' fusion; one object twice where one operation does both (`fusion=mega`).

    Args:
        cfg: The root config.
        exact: See `model_builder`.
    """
    # On one rank nothing travels, and a library may not even run there.
    fusion = make(cfg, "fusion")
    if fused_of(fusion) is not None:
        return (LocalDispatcher(), GroupedExperts()) if exact else (fusion, fusion)
    plain = {"capacity_factor": None, "transport": "torch"} if exact else {}
    own: dict[str, Any] = {name: value for name, value in plain.items() if name in cfg.dispatcher}
    return make(cfg, "dispatcher", **own), fusion


def initial_weights(cfg: DictConfig) -> Path | None:
    """The folder to start from; None if there is none, or if a checkpoint of the run takes its place."""
    value = cfg.get("initial_weights")
    return None if value is None or cfg.get("resume") is not None else Path(value).expanduser()


def model_builder(
    cfg: DictConfig,
    *,
    vocab_size: int,
    device: torch.device,
    tokenizer: str | None = None,
    num_sequences: int = 0,
    exact: bool = False,
) -> Callable[[Parallel], MoETransformer]:
    """Return a function that builds this rank's part of the model, given the groups.

    Args:
        cfg: The root config.
        vocab_size: See `model_shape`.
        device: Where the parameters live.
        tokenizer: Of the data, see `Corpus.tokenizer`.
        num_sequences: Most sequences of a rank in one forward pass.
        exact: Dispatch without a static budget and without a library, whatever the config says: for evaluation, on
            one rank, where nothing may be lost.
    """
    dtype, compute_dtype = PRECISIONS[cfg.trainer.precision]
    shape = model_shape(cfg, vocab_size=vocab_size)
    router, balance = make(cfg, "router"), make(cfg, "balance")
    dispatcher, fusion = make_movers(cfg, exact=exact)
    schedule, link = make_schedule(cfg), answers.link_of(make(cfg, "link"))

    folder = initial_weights(cfg)
    if folder is not None:
        # Again, because only now the data has said how many tokens there are.
        plain: Any = OmegaConf.to_container(cfg, resolve=True)
        for line in (check_weights(plain, folder, vocab_size=vocab_size), other_tokens(folder, tokenizer)):
            if line:
                log.warning("initial_weights: %s", line)
    padding = padding_rows(cfg, num_sequences * cfg.data.seq_length) if num_sequences else 0

    def build(parallel: Parallel) -> MoETransformer:
        model = assemble(
            shape,
            router=router,
            balance=balance,
            dispatcher=dispatcher,
            fusion=fusion,
            schedule=schedule,
            link=link,
            parallel=parallel,
            seed=cfg.seed,
            device=device,
            dtype=dtype,
            compute_dtype=compute_dtype,
            max_tokens=schedule.tokens_per_plan(num_sequences, cfg.data.seq_length, padding=padding),
        )
        if folder is not None:
            load_before_sharding(model, folder)
        return model

    return build


def reduction(cfg: DictConfig) -> Reduction:
    """The owner of the gradients: `_target_` of the strategy, with its own keys."""
    options = {k: v for k, v in cfg.strategy.items() if k not in OF_EVERY_STRATEGY}
    return _complete("strategy", construct("strategy", OmegaConf.create(options), cfg))


def param_groups(model: torch.nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters by mesh and by decay: plain and DTensor do not step together; only matrices decay."""
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for parameter in model.parameters():
        decays = parameter.dim() > 1
        group = {"params": [], "weight_decay": weight_decay if decays else 0.0}
        groups.setdefault((is_expert(parameter), decays), group)["params"].append(parameter)
    return list(groups.values())


def optimizer_builder(cfg: DictConfig) -> Callable[[MoETransformer], Optimizer]:
    """Return a function that builds the optimizer of a model."""
    weight_decay = float(cfg.optimizer.get("weight_decay", 0.0))
    build = make(cfg, "optimizer", partial=True)
    recorded = bool(cfg.graph.get("include_optimizer"))

    def build_for(model: MoETransformer) -> Optimizer:
        groups = param_groups(model, weight_decay=weight_decay)
        if not recorded:
            optimizer = build(groups)
            answers.check_optimizer(optimizer, list(model.parameters()))
            return optimizer
        # The rate is read where it lies: a number would be the one of the capture for ever.
        # In double precision, as the number would be; the CUDA kernel takes single precision only.
        device = next(model.parameters()).device
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        rate = torch.tensor(float(cfg.optimizer.lr), dtype=dtype, device=device)
        return build(groups, lr=rate, **({"capturable": True} if device.type == "cuda" else {}))

    return build_for
