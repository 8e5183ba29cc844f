"""What fits a dispatcher: its own keys, and its library with the machine, the model and the ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from omegaconf import DictConfig, OmegaConf

from sidestream.config.availability import LIBRARIES, TO_TORCH, Machine, takes_library, verdict
from sidestream.config.capabilities import CAPABILITIES
from sidestream.config.errors import ConfigError
from sidestream.config.graph_check import is_step
from sidestream.config.layout import Layout

MXFP8_BLOCK = 32  # values that share a scale
NATIVE_LINK = "sidestream.exchange.link.NativeLink"


@dataclass(frozen=True)
class Limits:
    """What a library refuses, or what its code or release notes name as the end of what was tried.

    Attributes:
        row_bytes: A row is a multiple of so many bytes.
        value_bytes: Sizes a value may have.
        budget_holds_tokens: A static buffer holds at least the tokens of a rank.
        experts_of_machine: The experts of ranks that are all on one machine are a multiple of this. Of ranks on
            several the library checks itself, because how many of them share NVLink is not known here.
        tokens: Most tokens per rank; `tokens_across`: the same when the ranks are on several machines.
        hidden, experts, local_experts, ranks, top_k: At most.
    """

    row_bytes: int
    value_bytes: tuple[int, ...]
    budget_holds_tokens: bool = False
    experts_of_machine: int = 1
    tokens: int | None = None
    tokens_across: int | None = None
    hidden: int | None = None
    experts: int | None = None
    local_experts: int | None = None
    ranks: int | None = None
    top_k: int | None = None


LIMITS = {
    "nccl_ep": Limits(
        row_bytes=16,
        value_bytes=(2, 4),
        budget_holds_tokens=True,
        experts_of_machine=4,
        tokens=8192,
        hidden=16384,
        local_experts=256,
        ranks=64,
    ),
    "deep_ep": Limits(row_bytes=512, value_bytes=(2,), experts=2048, local_experts=256, ranks=1024, top_k=32),
    "hybrid_ep": Limits(row_bytes=32, value_bytes=(2,), experts_of_machine=4, tokens_across=21844),
}


def check_dispatch(cfg: DictConfig, layout: Layout, *, machine: Machine | None = None) -> None:
    """Checks the dispatcher's keys. A user's own class has keys of its own, which are not looked at.

    Args:
        cfg: The root config.
        layout: How many ranks there are, and how they share experts.
        machine: Where they run; None looks at this one, if it matters.

    Raises:
        ConfigError: naming the key to change.
    """
    target = cfg.dispatcher.get("_target_")
    if target not in CAPABILITIES:
        return
    why = "the libraries pad to powers of two, and every dispatcher does as they do"
    _check_alignment("dispatcher.alignment", cfg.dispatcher.get("alignment", 1), why=why)
    _check_padded(cfg)
    _check_wire(cfg)
    option = CAPABILITIES[target].library
    if option is None:
        return
    machine = _machine(layout) if machine is None else machine.on(layout.device_type)
    ranks, wanted = layout.expert_parallel_size, _transport(cfg)
    if takes_library(wanted, option, machine=machine, ranks=ranks):
        _check_library(cfg, option, machine, ranks)
        _check_link(cfg, option)
        _check_limits(cfg, layout, option)
        if LIMITS[option].budget_holds_tokens:
            _check_budget(cfg, layout, option)


def _machine(layout: Layout) -> Machine:
    # On a CPU the answer is known without looking.
    return Machine() if layout.device_type == "cpu" else Machine.here().on(layout.device_type)


def _transport(cfg: DictConfig) -> str:
    return cfg.dispatcher.get("transport", "auto")


def _check_alignment(key: str, value: object, *, why: str) -> None:
    if not isinstance(value, int) or value & (value - 1) == 0:  # `auto` of the experts is a power of two
        return
    raise ConfigError(key, value, why, expected="a power of two", fix=f"{key}={1 << value.bit_length()}")


def _check_padded(cfg: DictConfig) -> None:
    factor = cfg.dispatcher.get("capacity_factor")
    if factor is None or cfg.router.get("pad_to_capacity") is not True:
        return
    raise ConfigError(
        "dispatcher.capacity_factor",
        factor,
        "router.pad_to_capacity=true gives every expert one number of rows already",
        expected="one of the two",
        # A step graph cannot do without the factor.
        fix="router.pad_to_capacity=false" if is_step(cfg.graph) else "dispatcher.capacity_factor=null",
    )


def _check_wire(cfg: DictConfig) -> None:
    key, wire = "dispatcher.wire_dtype", cfg.dispatcher.get("wire_dtype")
    if wire != "mxfp8":
        return
    if cfg.model.hidden_size % MXFP8_BLOCK:
        raise ConfigError(
            key,
            wire,
            f"{MXFP8_BLOCK} values share a scale, and model.hidden_size={cfg.model.hidden_size} is no multiple of it",
            expected=f"model, or a multiple of {MXFP8_BLOCK} as model.hidden_size",
            fix=f"{key}=model",
        )
    if _transport(cfg) == "library":
        raise _mxfp8_in_library(wire)


def _mxfp8_in_library(wire: str) -> ConfigError:
    why = "the libraries have 8-bit formats of their own, which differ; this one is of the torch transport"
    return ConfigError(
        "dispatcher.wire_dtype", wire, why, expected="dispatcher.transport=torch beside it", fix=TO_TORCH
    )


def _check_library(cfg: DictConfig, option: str, machine: Machine, ranks: int) -> None:
    found = verdict("dispatcher", option, transport="library", machine=machine, ranks=ranks)
    wanted, wire = _transport(cfg), cfg.dispatcher.get("wire_dtype")
    if not found.ok:
        raise ConfigError(
            "dispatcher.transport",
            wanted,
            found.why,
            expected="auto or torch here" if wanted == "library" else "torch here",
            fix=found.fix,
        )
    if wire == "mxfp8":  # and transport=auto, which takes the library
        raise _mxfp8_in_library(wire)


def _check_link(cfg: DictConfig, option: str) -> None:
    target = cfg.link.get("_target_", "")
    if target != NATIVE_LINK:
        raise ConfigError(
            "link",
            target.rpartition(".")[2].removesuffix("Link").lower(),
            f"{LIBRARIES[option].name} moves rows itself, where a link cannot slow it",
            expected="native, or dispatcher.transport=torch",
            fix=TO_TORCH,
        )


def _check_limits(cfg: DictConfig, layout: Layout, option: str) -> None:
    limits, name = LIMITS[option], LIBRARIES[option].name
    if _value_bytes(cfg) not in limits.value_bytes:
        raise ConfigError(
            "trainer.precision",
            cfg.trainer.precision,
            f"{name} moves 16-bit values only",
            expected="bf16-mixed or bf16-true, or dispatcher.transport=torch",
            fix="trainer.precision=bf16-mixed",
        )
    for key, value, unit, what in _multiples(cfg, layout, limits):
        if value % unit:
            raise ConfigError(
                key,
                OmegaConf.select(cfg, key),
                f"{value} {what}, and {name} takes multiples of {unit}",
                expected=f"a multiple of {unit} {what}, or dispatcher.transport=torch",
                fix=TO_TORCH,
            )
    for key, value, most, what in _maxima(cfg, layout, limits):
        if value > most:
            raise ConfigError(
                key,
                OmegaConf.select(cfg, key),
                f"{value} {what}, and {name} takes {most}",
                expected=f"at most {most} {what}, or dispatcher.transport=torch",
                fix=_fewer_tokens(cfg, layout, most) if key == "data.micro_batch_size" else TO_TORCH,
            )
    why = f"{name} pads the rows of an expert to powers of two"
    _check_alignment("fusion.alignment", cfg.fusion.get("alignment", "auto"), why=why)


def _multiples(cfg: DictConfig, layout: Layout, limits: Limits) -> Iterator[tuple[str, int, int, str]]:
    """Yields (key, value, what it is a multiple of, what is counted)."""
    yield (
        "model.hidden_size",
        cfg.model.hidden_size,
        max(1, limits.row_bytes // _value_bytes(cfg)),
        "values in a row",
    )
    if layout.expert_parallel_size <= layout.local_world_size:
        yield "model.num_experts", cfg.model.num_experts, limits.experts_of_machine, "experts on one machine"


def _maxima(cfg: DictConfig, layout: Layout, limits: Limits) -> Iterator[tuple[str, int, int, str]]:
    """Yields (key, value, the most it may be, what is counted)."""
    ranks, experts = layout.expert_parallel_size, cfg.model.num_experts
    across = limits.tokens_across if ranks > layout.local_world_size else None
    for key, value, most, what in (
        ("data.micro_batch_size", max_tokens(cfg, layout), limits.tokens or across, "tokens per rank"),
        ("model.hidden_size", cfg.model.hidden_size, limits.hidden, "values in a row"),
        ("model.num_experts", experts, limits.experts, "experts"),
        ("model.num_experts", experts // ranks, limits.local_experts, "experts per rank"),
        ("strategy.expert_parallel_size", ranks, limits.ranks, "ranks"),
        ("router.top_k", cfg.router.get("top_k", 1), limits.top_k, "experts per token"),
    ):
        if most is not None:
            yield key, value, most, what


def max_tokens(cfg: DictConfig, layout: Layout) -> int:
    """Returns the most tokens of a rank in one exchange, those that `router.pad_to_capacity` adds included."""
    sequences, length = layout.micro_batch_size, cfg.data.seq_length
    padding, factor = 0, cfg.router.get("expert_capacity_factor")
    if cfg.router.get("pad_to_capacity") is True and factor is not None:
        experts, top_k = cfg.model.num_experts, cfg.router.top_k
        capacity = math.ceil(Fraction(str(factor)) * sequences * length * top_k / experts)
        padding = math.ceil(capacity * experts / top_k)
    # As `tokens_per_plan` of the schedules, which need torch; a user's own schedule may send everything at once.
    schedule = cfg.overlap.get("_target_")
    if schedule == "sidestream.overlap.chunked.ChunkedOverlap":
        return math.ceil((sequences * length + padding) / cfg.overlap.get("num_chunks", 2))
    if schedule == "sidestream.overlap.two_batch.TwoBatchOverlap":
        sequences = math.ceil(sequences / 2)
    return sequences * length + padding


def _check_budget(cfg: DictConfig, layout: Layout, option: str) -> None:
    key, factor = "dispatcher.capacity_factor", cfg.dispatcher.get("capacity_factor")
    top_k = cfg.router.get("top_k")
    if factor is None or top_k is None:  # eager, or a user's own router
        return
    tokens = max_tokens(cfg, layout)
    rows = receive_budget(cfg, tokens)
    if rows < tokens:
        enough = math.ceil(1000 / top_k) / 1000
        raise ConfigError(
            key,
            factor,
            f"a buffer of {rows} rows, and {LIBRARIES[option].name} wants room for the {tokens} tokens of a rank",
            expected=f"at least {enough:g}, or dispatcher.transport=torch",
            fix=f"{key}={enough:g}",
        )


def receive_budget(cfg: DictConfig, tokens: int) -> int:
    """Returns the rows of a static receive buffer on a GPU: `dispatch.base.receive_budget`, which needs torch."""
    of_experts = cfg.fusion.get("alignment", "auto")
    unit = math.lcm(cfg.dispatcher.get("alignment", 1), of_experts if isinstance(of_experts, int) else 1, 64)
    rows = math.ceil(Fraction(str(cfg.dispatcher.capacity_factor)) * tokens * cfg.router.top_k)
    return -(-rows // unit) * unit


def _fewer_tokens(cfg: DictConfig, layout: Layout, most: int) -> str:
    per_rank = layout.micro_batch_size * layout.accumulation
    fits = [n for n in range(1, most // cfg.data.seq_length + 1) if per_rank % n == 0]
    return f"data.micro_batch_size={fits[-1]}" if fits else TO_TORCH


def _value_bytes(cfg: DictConfig) -> int:
    """Bytes of a value in a row: experts compute in the type of autocast."""
    return 4 if cfg.trainer.precision == "32-true" else 2
