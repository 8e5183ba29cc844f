"""Every key of every group is changed on resume, one at a time, and the run is held to the contract.

free: the bits of the uninterrupted run. changes: the new value, read from the optimizer, the model, the strategy; other
bits where the update is what changes. refused: one line, before ranks start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from omegaconf import OmegaConf

from sidestream.config import schema
from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.config.resume_contract import OWN_KEYS, RULES
from sidestream.launch import resume
from sidestream.launch.record import RESOLVED, Launch
from sidestream.lightning import schedules
from tests.train.resumed import SAVED, Ended, changes, config, cut_back, run_all

# All that has a state or draws random numbers.
STATE = ["balance=bias", "balance.update_rate=0.01", "model.dropout=0.1", "router.jitter=0.05"]


@dataclass(frozen=True)
class Base:
    """What a run is started with, beside `STATE`."""

    options: dict[str, str] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tried:
    """A change of one key.

    Attributes:
        value: The new one; of a `_target_`, the name of the option.
        base: Name of what the run is started with.
        look: Reads off the module what is in effect.
        sees: What it reads, if not the value.
        also: Keys that must go with the change, such as a limit that follows from it.
    """

    value: Any
    base: str = "plain"
    look: Callable[[Any], Any] | None = None
    sees: Any = None
    also: dict[str, Any] = field(default_factory=dict)


_STATIC = {"dispatcher.capacity_factor": 4.0, "model.hidden_size": 32}
BASES = {
    "plain": Base(),
    "library": Base({"dispatcher": "nccl_ep"}, _STATIC),
    "taped": Base(
        {"graph": "step", "link": "throttled", "overlap": "shared_expert"},
        {**_STATIC, "optimizer.fused": True},
    ),
    "drops": Base({}, {"dispatcher.capacity_factor": 2.0, "dispatcher.on_overflow": "drop"}),
    "mega": Base({"dispatcher": "none", "fusion": "mega"}),
    "chunked": Base({"overlap": "chunked"}),
    "mega_drops": Base(
        {"dispatcher": "none", "fusion": "mega"},
        {"fusion.capacity_factor": 2.0, "fusion.on_overflow": "drop"},
    ),
    "shortcut": Base({"overlap": "shortcut"}, {"overlap.slot": 1}),
    "sgd": Base({"optimizer": "sgd", "scheduler": "cosine"}, {"scheduler.warmup_steps": 2}),
    "validated": Base({}, {"trainer.limit_val_batches": 1}),
}


def of_group(name: str) -> Callable[[Any], Any]:
    return lambda module: module.trainer.optimizers[0].param_groups[0][name]


def of(*path: str) -> Callable[[Any], Any]:
    """The attribute at the end of a path from the module."""

    def read(module: Any) -> Any:
        for name in path:
            module = getattr(module, name)
        return module if isinstance(module, int | float | str | bool | None) else type(module).__name__

    return read


_DISPATCHER, _FUSION = ("model", "parts", "dispatcher"), ("model", "parts", "fusion")
_STRATEGY, _BUDGET = ("parallel_strategy",), ("parallel_strategy", "budget")

# Every key that is not refused, and that a rank reads.
TRIED: dict[str, Tried] = {
    "model.activation_checkpointing": Tried(True),
    "dispatcher._target_": Tried("allgather", look=of(*_DISPATCHER, "name")),
    "dispatcher.transport": Tried("torch", "library", of(*_DISPATCHER, "transport")),
    "dispatcher.wire_dtype": Tried("mxfp8", "library", of(*_DISPATCHER, "wire_dtype")),
    "dispatcher.alignment": Tried(16, look=of(*_DISPATCHER, "own_alignment")),
    "dispatcher.capacity_factor": Tried(None, "library"),
    "dispatcher.on_overflow": Tried("replay", "drops", of(*_BUDGET, "mode")),
    "fusion._target_": Tried("loop", look=of(*_FUSION), sees="LoopExperts"),
    "fusion.alignment": Tried(16, look=of(*_FUSION, "alignment")),
    "fusion.library": Tried("windows", "mega", of(*_FUSION, "library")),
    "fusion.capacity_factor": Tried(4.0, "mega"),
    "fusion.on_overflow": Tried("replay", "mega_drops", of(*_BUDGET, "mode")),
    "overlap._target_": Tried("chunked", look=of("model", "schedule"), sees="ChunkedOverlap"),
    "overlap.num_chunks": Tried(3, "chunked", of("model", "schedule", "num_chunks")),
    "overlap.enabled": Tried(False, "taped"),
    "overlap.delay_wgrad": Tried(True, "taped"),
    "overlap.slot": Tried(2, "shortcut"),
    "graph._target_": Tried("none", "taped"),
    "graph.backend": Tried("tape", "taped"),
    "graph.warmup_steps": Tried(3, "taped"),
    "graph.include_optimizer": Tried(True, "taped"),
    "link._target_": Tried("native", "taped"),
    "link.gbps": Tried(5.0, "taped"),
    "link.latency_us": Tried(1.0, "taped"),
    "strategy.bucket_mb": Tried(0.001, look=of(*_STRATEGY, "reduction", "_limit"), sees=0.001 * 2**20),
    "strategy.expert_parallel_size": Tried(1, look=of(*_STRATEGY, "expert_parallel_size")),
    "strategy.timeout_seconds": Tried(123),
    "trainer.accelerator": Tried("auto"),
    "trainer.max_steps": Tried(7, look=of("trainer", "max_steps")),
    "trainer.precision": Tried("bf16-mixed", look=of("recipe", "autocast"), sees=True),
    "trainer.gradient_clip_val": Tried(0.01, look=of("recipe", "max_norm")),
    "trainer.limit_val_batches": Tried(
        2, "validated", look=lambda module: len(module.trainer.val_dataloaders)
    ),
    "trainer.val_check_interval": Tried(1, "validated"),
    "trainer.log_every_n_steps": Tried(2),
    "optimizer.lr": Tried(1e-4, look=of_group("initial_lr")),
    "optimizer.betas": Tried([0.5, 0.6], look=lambda module: list(of_group("betas")(module))),
    "optimizer.eps": Tried(1e-3, look=of_group("eps")),
    "optimizer.weight_decay": Tried(0.5, look=of_group("weight_decay")),
    "optimizer.momentum": Tried(0.5, "sgd", of_group("momentum")),
    "optimizer.fused": Tried(True, look=of_group("fused")),
    "scheduler._target_": Tried("cosine", also={"scheduler.warmup_steps": 2}),
    "scheduler.warmup_steps": Tried(1),
    "scheduler.min_ratio": Tried(0.5, "sgd"),
    "scheduler.decay_fraction": Tried(1.0, also={"scheduler.warmup_steps": 5}),
    "data.micro_batch_size": Tried(1, look=of("recipe", "micro_batch_size")),
    "data.cache_dir": Tried("{folder}/other"),
    "callbacks.checkpoint.every_n_steps": Tried(1),
    "callbacks.checkpoint.keep_last": Tried(1),
    "callbacks.overlap_report.every_n_steps": Tried(None, "taped"),
}
# Whose update is another one: the bits differ from the next step on.
OTHER_BITS = {
    "optimizer.lr",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.momentum",
    "trainer.gradient_clip_val",
    "scheduler.warmup_steps",
    "scheduler.min_ratio",
    "scheduler._target_",
    "trainer.precision",
}
# No rank computes with them. Where they are read is tested elsewhere.
NOT_TRAINED_WITH = {
    "strategy._target_",
    "strategy.reshard_after_forward",  # below, with a config of their own
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.threads_per_rank",
    "trainer.pin_cpu",  # the launcher
    "trainer.peak_tflops",
    "callbacks.progress.enabled",
    "paths.log_dir",
    "paths.cache_dir",
    "name",
    "debug",
    "resume",
    "trusted_targets",
    "initial_weights",
    "graph.lint",  # `CASES` has the last two
    *(key for key in RULES if key.startswith(("logger.", "predict."))),
}
# Of this command, or in `CASES`, or never taken from a folder.
SAID_ELSEWHERE = {"resume", "debug", "trusted_targets", "initial_weights", "graph.lint"}
REFUSED = sorted(key for key, rule in RULES.items() if rule.kind == "refused")


def of_schema() -> set[str]:
    """Every key that a shipped option has, `_target_` where a group has a choice, nested optional parts too."""

    def walk(prefix: str, kind: Any) -> Iterator[str]:
        hints = get_type_hints(kind)
        for item in fields(kind):
            inner = [
                part
                for part in (hints[item.name], *get_args(hints[item.name]))
                if hasattr(part, "__dataclass_fields__")
            ]
            if not inner or inner[0] is not hints[item.name]:
                yield f"{prefix}{item.name}"
            for part in inner:
                yield from walk(f"{prefix}{item.name}.", part)

    ours = {group: kinds for group, kinds in schema.SCHEMAS.items() if group not in ("measure", "cluster")}
    found = {
        key for group, kinds in ours.items() for kind in kinds.values() for key in walk(f"{group}.", kind)
    }
    return found | {item.name for item in fields(schema.Root) if item.name not in schema.SCHEMAS}


def test_every_key_has_a_rule_and_is_tried() -> None:
    assert RULES.keys() == of_schema()
    assert RULES.keys() == TRIED.keys() | NOT_TRAINED_WITH | set(REFUSED)
    assert not TRIED.keys() & NOT_TRAINED_WITH and not TRIED.keys() & set(REFUSED)
    # What a user may write an option of, see `schema.Root`.
    open_groups = {
        item.name for item in fields(schema.Root) if item.type is Any and item.name in schema.SCHEMAS
    }
    assert OWN_KEYS.keys() == open_groups - {"cluster"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def started_with(place: Path, name: str, **keys: Any) -> Any:
    base = BASES[name]
    return config(place, *STATE, options=base.options, **{**base.keys, **keys})


def changed(place: Path, key: str, folder: Path) -> Any:
    """The config of a resume that changes one key of what `TRIED` says."""
    tried = TRIED[key]
    base = BASES[tried.base]
    given = {**base.keys, **tried.also, "resume": str(folder)}
    if key.endswith("._target_"):
        group = key.partition(".")[0]
        kept = {
            name: value
            for name, value in given.items()
            if not name.startswith(f"{group}.") or name in tried.also
        }
        return config(place, *STATE, options={**base.options, group: tried.value}, **kept)
    value = tried.value.format(folder=place) if isinstance(tried.value, str) else tried.value
    return config(place, *STATE, options=base.options, **{**given, key: value})


@pytest.fixture(scope="module")
def straight(place: Path) -> dict[str, Ended]:
    """Every base from the first step to the last."""
    found = run_all([(started_with(place, name), place / name, None) for name in BASES])
    assert not [ended for ended in found if isinstance(ended, str)], found
    return dict(zip(BASES, found))


def read(key: str, module: Any) -> Any:
    look = TRIED[key].look
    return look(module) if look is not None else None


@pytest.fixture(scope="module")
def resumed(place: Path, straight: dict[str, Ended]) -> dict[str, tuple[list[str], Any]]:
    """Key -> what the parent says of its change, and how the resumed run ended."""
    said, cases = {}, []
    for key, tried in TRIED.items():
        folder = cut_back(place / tried.base, place / f"resumed-{key}")
        cfg = changed(place, key, folder)
        said[key] = changes(folder, cfg)
        cases.append((cfg, folder, partial(read, key)))
    return {key: (said[key], ended) for key, ended in zip(TRIED, run_all(cases))}


@pytest.mark.parametrize("key", TRIED)
@pytest.mark.full
def test_a_change_does_what_the_contract_says(
    key: str, straight: dict[str, Ended], resumed: dict[str, tuple[list[str], Any]], place: Path
) -> None:
    tried, rule, (said, ended) = TRIED[key], RULES[key], resumed[key]
    assert any(line.startswith(f"resume: {key} ") for line in said), said
    assert isinstance(ended, Ended), ended
    before = straight[tried.base]
    if rule.kind == "free":
        assert ended.bits == before.bits
    elif tried.look is not None:
        assert ended.seen == (tried.sees if tried.sees is not None else tried.value)
    if key in OTHER_BITS:
        assert ended.bits != before.bits
    elif key != "trainer.max_steps":
        # No more than rounding.
        assert ended.losses.keys() >= {2, 4, 6}
        assert all(abs(loss - before.losses[step]) < 0.01 for step, loss in ended.losses.items())
    # The rate of every step is the schedule's of this config.
    cfg = changed(place, key, place)
    factor = of_config(cfg)
    assert all(ended.rates[step] == pytest.approx(factor(step - 1)) for step in ended.rates if step > SAVED)


def of_config(cfg: Any) -> Callable[[int], float]:
    """Step -> learning rate."""
    options = {name: value for name, value in cfg.scheduler.items() if name != "_target_"}
    kind = getattr(schedules, cfg.scheduler._target_.rpartition(".")[2])
    schedule = kind(max_steps=cfg.trainer.max_steps, **options)
    return lambda step: cfg.optimizer.lr * schedule(step)


LAYOUT = Layout(1, 1, 1, 1, 4, 1, "cpu")


def said_of(run: Path, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What the parent says of keys that had and have these values."""
    nested: list[Any] = [OmegaConf.create({"trainer": {"max_steps": 6}}) for _ in range(2)]
    for content, values in zip(nested, (before, after)):
        for key, value in values.items():
            OmegaConf.update(content, key, value, force_add=True)
    (run / ".hydra").mkdir()
    OmegaConf.save(nested[0], run / RESOLVED)
    Launch("python train.py", [], [], {}, LAYOUT).save(run)
    return resume.check_changes(run, new=OmegaConf.to_container(nested[1]), layout=LAYOUT)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", REFUSED)
def test_a_refused_change_is_one_line(key: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{key}=2: was 1 when the run started, .*; set {key}=1$"
    ) as refused:
        said_of(tmp_path, {key: 1}, {key: 2})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", sorted(NOT_TRAINED_WITH - SAID_ELSEWHERE))
def test_a_change_outside_of_training_is_printed(key: str, tmp_path: Path) -> None:
    assert said_of(tmp_path, {key: 1}, {key: 2})[0].startswith(f"resume: {key} 1 -> 2")


_NONE, _SHORTCUT = "sidestream.overlap.none.NoOverlap", "sidestream.overlap.shortcut.ShortcutOverlap"
CASES: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    ({"trainer.precision": "32-true"}, {"trainer.precision": "bf16-true"}, "refused"),
    ({"optimizer.momentum": 0}, {"optimizer.momentum": 0.9}, "refused"),
    ({"graph.lint": False}, {"graph.lint": True}, "refused"),
    ({"graph.lint": True}, {"graph.lint": False}, None),
    ({"initial_weights": None}, {"initial_weights": "/w"}, "refused"),
    ({"initial_weights": "/v"}, {"initial_weights": "/w"}, None),
    ({"overlap._target_": _NONE}, {"overlap._target_": _SHORTCUT}, "refused"),
    ({"optimizer._target_": "torch.optim.AdamW"}, {"optimizer._target_": "torch.optim.SGD"}, "refused"),
    ({"router.mine": 1}, {"router.mine": 2}, "refused"),
    ({"optimizer.mine": 1}, {"optimizer.mine": 2}, None),
    ({}, {"data.encoding": "utf-8"}, None),  # an earlier version's run
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "kind"), CASES, ids=[str(after) for _, after, _ in CASES])
def test_values_decide_where_the_contract_says_so(
    before: dict[str, Any], after: dict[str, Any], kind: str | None, tmp_path: Path
) -> None:
    if kind == "refused":
        with pytest.raises(ConfigError, match="does not change in a resume"):
            said_of(tmp_path, before, after)
    else:
        assert said_of(tmp_path, before, after)[0].startswith(f"resume: {next(iter(after))} ")
