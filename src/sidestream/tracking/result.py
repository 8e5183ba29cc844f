"""result.json: the interface between a run and everything that reads runs.

Its keys are stable: every key is always there, null where a run does not know the value. A key is added only
together with a reader of the missing case; renaming or removing one raises `SCHEMA_VERSION`.
"""

import copy
import json
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sidestream.tracking.data_record import DataRecord
from sidestream.tracking.folder import is_figure, to_plain
from sidestream.tracking.untrusted import printable

SCHEMA_VERSION = 1

Status = Literal["running", "finished", "failed", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Validation loss of count models fitted to the same training split, nats per token."""

    bigram: float | None = None
    trigram: float | None = None


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What the run reached. Losses in nats per token (per byte for byte data)."""

    train_loss: float | None = None
    val_loss: float | None = None
    tokens: int | None = None  # trained on, over all ranks
    tokens_per_second: float | None = None  # over all ranks
    step_ms: float | None = None  # median
    waited_share: float | None = (
        None  # of the steps' time, for which the worst rank wanted a core and had none
    )
    mfu: float | None = None  # share of the devices' peak, null where the peak is unknown
    # Per device, and where it is from or why there is none. Older results lack both: read them with `.get`.
    peak_tflops: float | None = None
    peak_source: str | None = None
    peak_memory_bytes: int | None = None  # largest of all ranks
    bytes_on_wire: int | None = None  # sent by the dispatchers, over all ranks
    baselines: Baselines = field(default_factory=Baselines)


@dataclass(frozen=True, kw_only=True)
class Overflow:
    """Steps whose rows did not fit the budget. All null for an eager dispatcher, which has no budget."""

    events: int | None = None
    replays: int | None = None
    dropped: int | None = None  # routes lost, with on_overflow=drop
    budget: int | None = None  # rows per rank at the end
    recommended_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class OverlapResult:
    """Measured times of the slowest rank, medians, and the share of communication hidden."""

    compute_ms: float | None = None
    comm_ms: float | None = None
    serial_ms: float | None = None
    overlapped_ms: float | None = None
    e_hide: float | None = None
    e_comm: float | None = None
    bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class GraphResult:
    """Counts of the step graph, see `graph.base.GraphCounts`; null for `graph=none`.

    Attributes:
        lint: What `graph.lint=true` found, one line per place; null where it was not asked.
    """

    backend: str | None = None
    captures: int | None = None
    replays: int | None = None
    eager: int | None = None
    capture_seconds: float | None = None
    nbytes: int | None = None
    lint: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The content of result.json, one attribute per key.

    Attributes:
        command: what the user typed.
        choices: Hydra group -> option.
        data: what became of the data source.
        transport: what moved the rows: `torch`, the name of a library, or null for one rank.
        eos_token: ends every document of the data, null if nothing does. Older results lack it.
        flops_per_token: forward and backward, without recomputation.
        changes_model: the schedule or `router.force_balance` computes another function than the plain model.
        commit: of the code, with `-dirty` appended if it had uncommitted changes.
        error: one line, null for a finished run.
    """

    schema_version: int = SCHEMA_VERSION
    status: Status
    command: str | None = None
    choices: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    world_size: int | None = None
    expert_parallel_size: int | None = None
    transport: str | None = None
    link: str | None = None
    seed: int | None = None
    precision: str | None = None
    data_checksum: str | None = None
    eos_token: int | None = None
    params_total: int | None = None
    params_active: int | None = None
    flops_per_token: float | None = None
    changes_model: bool | None = None
    data: DataRecord = field(default_factory=DataRecord)
    metrics: Metrics = field(default_factory=Metrics)
    overflow: Overflow = field(default_factory=Overflow)
    overlap: OverlapResult = field(default_factory=OverlapResult)
    graph: GraphResult = field(default_factory=GraphResult)
    versions: dict[str, str | None] = field(default_factory=dict)
    commit: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        assert self.status in get_args(Status), self.status

    def as_dict(self) -> dict[str, Any]:
        """Returns plain JSON types with every key, ready for `RunFolder.write_result`."""
        return to_plain(self)


def misfit(content: Any, of: type = RunResult, where: str = "") -> str:
    """Says what in a result.json that somebody may have written is not of its key's type; empty if nothing is.

    Keys may be missing, or be there that nobody knows.

    Args:
        content: JSON.
        of: The dataclass whose fields `content` should have.
        where: Dotted key of `content`, with its dot.
    """
    if not isinstance(content, dict):
        return f"{where.rstrip('.') or 'it'} is no object"
    for name, hint in get_type_hints(of).items():
        value = content.get(name)
        if value is None:
            continue
        if is_dataclass(hint):
            if found := misfit(value, hint, f"{where}{name}."):  # type: ignore[arg-type]
                return found
        elif not _is_a(value, hint):
            return f"{where}{name} is {printable(json.dumps(value), limit=40)}"
    return ""


def _is_a(value: Any, hint: Any) -> bool:
    parts = get_args(hint)
    origin = get_origin(hint)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(item, parts[1]) for item in value.values())
    if origin is list:
        return isinstance(value, list) and all(_is_a(item, parts[0]) for item in value)
    if origin is Literal:
        return value in parts
    if parts:  # a union
        return any(_is_a(value, part) for part in parts)
    if hint in (int, float):
        return is_figure(value) and (hint is float or isinstance(value, int))
    return isinstance(value, hint)


def minimal_failed_result(
    previous: dict[str, Any] | None,
    *,
    error: str,
    status: Status = "failed",
    command: str | None = None,
    choices: dict[str, str] | None = None,
    world_size: int | None = None,
) -> dict[str, Any]:
    """Builds the result of a run whose rank 0 died before it could write one.

    Args:
        previous: what result.json holds, usually with status `running`; everything it knows is kept.
        error: one line.
        command: used, like `choices` and `world_size`, where `previous` does not know them.
    """
    known = previous or {}
    base = RunResult(
        status=status,
        command=command,
        choices=known.get("choices") or choices or {},
        world_size=world_size,
    )
    return {**_fill(base.as_dict(), known), "status": status, "error": error}


def _fill(base: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Returns `base` with every value that `known` has and that is not null put over it, at any depth."""
    merged = copy.deepcopy(base)
    for key, value in known.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _fill(merged[key], value)
        elif value is not None:
            merged[key] = value
    return merged
