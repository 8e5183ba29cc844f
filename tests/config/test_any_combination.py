"""Any combination of options and keys trains, or is refused in one line whose advice leads to one that does."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from sidestream.config.compatibility import check
from sidestream.config.hints import unknown_key
from sidestream.config.hydra_errors import explain, is_of_user
from sidestream.config.schema import known_keys
from sidestream.launch import entry
from tests.config.draws import CONF, GROUPS, Draw, Key, draws, keys_of, kinds, required, values_of
from tests.train.fit import fit

# Draws do not differ from day to day. A counterexample is printed as it was drawn, without minutes of shrinking.
STEADY = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# A draw may hold many mistakes, each of which is told on its own.
MOST_FIXES = 12

LINE = re.compile(r"^[\w.]+=.*?: .+; expected .+; (?P<fix>(?:set|run|remove) .+)$")


@pytest.fixture(scope="module", autouse=True)
def hydra() -> Iterator[None]:
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def composed(draw: Draw) -> tuple[DictConfig | None, str | None]:
    """Returns (config, None), or as far as it came and the one line that says why not."""
    try:
        cfg = compose("train", draw.overrides())
    except Exception as error:
        if not is_of_user(error):
            raise
        return None, explain(error, draw.overrides())
    return cfg, refusal(cfg, draw)


# Groups whose options set keys of other groups.
RECIPES = ("experiment", "arm")


def refusal(cfg: DictConfig, draw: Draw) -> str | None:
    """Why a config is refused, in the words a user sees; None: it is not."""
    try:
        check(cfg, device_count=0)
    except Exception as error:
        if not is_of_user(error):
            raise
        return explain(error, draw.overrides())
    return None


def assignments(line: str) -> list[tuple[str, str]]:
    """The overrides that a refusal advises."""
    found = LINE.match(line)
    assert found is not None and "\n" not in line, (
        f"not one line `key=value: why; expected ...; set ...`: {line}"
    )
    advice = found["fix"]
    names = re.findall(r"([A-Za-z_][\w.]*)=(\S+)", advice) if advice.startswith("set ") else []
    assert names and "<" not in advice, f"no override that could be typed: {line}"
    return names


@functools.cache
def option(group: str, name: str) -> DictConfig:
    """An option as Hydra composes it."""
    needed = [f"{key}={values_of(key)[0]}" for key in required(group, name)]
    return compose("train", [f"{group}={name}", *needed])[group]


def change(cfg: DictConfig, draw: Draw, name: str, value: str) -> Draw:
    """Changes `cfg` as an override would; composing everything again takes ten times as long."""
    draw = draw.set(name, value)
    again = {name: value}
    if name in GROUPS:
        cfg[name] = copy.deepcopy(option(name, value))
        again = {key: typed for key, typed in draw.keys.items() if key.startswith(f"{name}.")}
    for key, typed in again.items():
        OmegaConf.update(cfg, key, OverridesParser.create().parse_override(f"{key}={typed}").value())
    return draw


def follow(draw: Draw) -> tuple[Draw, list[str]]:
    """Does as each refusal says until a config is accepted. Returns it, and the refusals."""
    lines: list[str] = []
    cfg, line = composed(draw)
    while line is not None:
        assert line not in lines, "advice goes in circles:\n" + "\n".join([*lines, line])
        lines.append(line)
        assert len(lines) <= MOST_FIXES, "too many steps:\n" + "\n".join(lines)
        fixes = assignments(line)
        # What an experiment or an arm states goes on top of another option again.
        anew = any(recipe in draw.choices for recipe in RECIPES) and any(name in GROUPS for name, _ in fixes)
        if cfg is None or anew:
            for name, value in fixes:
                draw = draw.set(name, value)
            cfg, line = composed(draw)
            continue
        for name, value in fixes:
            draw = change(cfg, draw, name, value)
        line = refusal(cfg, draw)
    return draw, lines


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [10, pytest.param(80, marks=pytest.mark.full)])
def test_any_draw_is_accepted_or_advice_leads_to_one_that_is(count: int) -> None:
    seen = []

    @settings(STEADY, max_examples=count)
    @given(draws())
    def each(draw: Draw) -> None:
        _, lines = follow(draw)
        seen.append(len(lines))

    each()
    assert len(seen) >= count


# For runs: no place a graph cannot repeat ends them, nothing reaches for a network, and the corpus is at hand.
QUIET = {"graph.lint": "false", "trainer.accelerator": "cpu", "trainer.pin_cpu": "false", "debug": "false"}


def to_run(draw: Draw) -> tuple[list[str], int]:
    """Returns (overrides of an accepted draw for a run of two steps, or of four where a graph records, ranks)."""
    steps = 4 if draw.choices["graph"] == "step" else 2
    keys = {**draw.keys, **QUIET, "trainer.max_steps": str(steps)}
    if steps == 4:
        keys["graph.warmup_steps"] = "2"
    if keys.get("dispatcher.on_overflow") == "error":  # ends a run on purpose
        keys["dispatcher.on_overflow"] = "replay"
    if draw.choices["logger"] == "wandb":
        keys["logger.offline"] = "true"
    world = int(keys["trainer.devices"])
    return Draw(draw.choices, keys).overrides(), world


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [1, pytest.param(12, marks=pytest.mark.full)])
@pytest.mark.full
def test_what_is_accepted_trains(count: int, tmp_path: Path) -> None:
    ran = []

    @settings(STEADY, max_examples=count)
    @given(draws())
    def each(draw: Draw) -> None:
        accepted, _ = follow(draw.micro())
        overrides, world = to_run(accepted)
        folder = tmp_path / str(len(ran))
        GlobalHydra.instance().clear()  # `fit` composes on its own
        try:
            results = fit(folder, *overrides, world=world, limit_s=240)
        except AssertionError as error:
            raise AssertionError(f"python train.py {' '.join(overrides)}\n{error}") from error
        finally:
            GlobalHydra.instance().clear()
            initialize_config_dir(str(CONF), version_base="1.3")
        assert [result["status"] for result in results] == ["finished"] * world, overrides
        ran.append(overrides)

    each()
    assert len(ran) >= count


DGMOE = "overlap=shortcut overlap.double_gating=true model.num_shared_experts=0 router.top_k=1"
PADDED = "router.expert_capacity_factor=1.0 router.pad_to_capacity=true"
STATIC = "dispatcher.capacity_factor=1.5 graph=step trainer.max_steps=4"


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        f"{DGMOE} trainer.precision=bf16-true",
        f"{DGMOE} {STATIC} model.activation_checkpointing=true",
        f"overlap=chunked {PADDED} data.seq_length=17",
        f"overlap=shortcut {PADDED} model.dropout=0.1",
        "overlap=shortcut overlap.tap=pos2 strategy=fully_shard",
        "overlap=shortcut overlap.tap=pos3 strategy=fully_shard trainer.precision=bf16-mixed",
        "overlap=two_batch strategy=fully_shard data.seq_length=17",
        f"overlap=two_batch {STATIC} model.tie_embeddings=true",
        "overlap=shortcut model.moe_layers=[]",
        f"overlap=chunked model.moe_layers=[] {STATIC}",
        "router.num_groups=4 router.top_groups=2 router.top_k=2 balance=bias",
        "dispatcher.on_overflow=error",
        "dispatcher=local model.moe_layers=[0] graph=step trainer.max_steps=4",
    ],
)
def test_combinations_that_were_suspected_train(overrides: str, tmp_path: Path) -> None:
    GlobalHydra.instance().clear()
    try:
        results = fit(tmp_path, "trainer.max_steps=2", *overrides.split())
    finally:
        GlobalHydra.instance().clear()
        initialize_config_dir(str(CONF), version_base="1.3")
    assert [result["status"] for result in results] == ["finished"] * 2


def typos(name: str) -> list[str]:
    """Slips of a key: a letter left out, doubled, or two exchanged; none of them a key itself."""
    head, _, tail = name.rpartition(".")
    middle = len(tail) // 2
    slips = [
        tail[:middle] + tail[middle + 1 :],
        tail[:middle] + tail[middle] + tail[middle:],
        tail[: middle - 1] + tail[middle] + tail[middle - 1] + tail[middle + 1 :],
    ]
    found = [f"{head}.{slip}" if head else slip for slip in slips if slip and slip != tail]
    return [slip for slip in dict.fromkeys(found) if slip not in known_keys()]


@pytest.mark.parametrize("name", known_keys())
def test_a_slip_in_any_key_names_the_key(name: str) -> None:
    slips = typos(name)
    assert slips
    for slip in slips:
        line = str(unknown_key(slip, "1"))
        found = LINE.match(line)
        assert found is not None and "\n" not in line
        assert name in re.split(r"[ ,;=]+", line), line


def wrong(key: Key) -> list[str]:
    """Values of a wrong type or beyond the limits."""
    if key.kind is str and not key.limits.get("choices"):
        return []  # anything is a text
    found = ["{x:1}"] if "model.mla" not in key.name else ["3"]
    if str not in kinds(key) or key.limits.get("choices") or key.limits.get("auto"):
        found += ["nonsense"]
    if not any(dataclasses.is_dataclass(kind) for kind in kinds(key)) and key.kind not in (
        list[str],
        list[float],
    ):
        found += ["[[1]]"]
    if (low := key.limits.get("low")) is not None:
        found += [str(int(low) - 1)]
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [5, pytest.param(40, marks=pytest.mark.full)])
def test_a_wrong_key_or_value_in_any_draw_is_refused_naming_the_key(count: int) -> None:
    seen = []

    @settings(STEADY, max_examples=count)
    @given(draws(most_keys=1), st.data())
    def each(draw: Draw, data: st.DataObject) -> None:
        draw = replace(draw, choices={k: v for k, v in draw.choices.items() if k not in RECIPES})
        known = [key for group, name in draw.choices.items() for key in keys_of(group, name)]
        key = data.draw(st.sampled_from([key for key in known if typos(key.name)]))
        slip = data.draw(st.sampled_from(typos(key.name)))
        _, line = composed(replace(draw, keys={slip: "1", **draw.keys}))
        assert line is not None and LINE.match(line) and "\n" not in line, line
        assert line.startswith(f"{slip}=1: ") and key.name in re.split(r"[ ,;=]+", line), line

        accepted, _ = follow(draw)
        key = data.draw(st.sampled_from([key for key in known if wrong(key)]))
        value = data.draw(st.sampled_from(wrong(key)))
        _, line = composed(replace(accepted, keys={**accepted.keys, key.name: value}))
        assert line is not None and LINE.match(line) and "\n" not in line, f"{key.name}={value}: {line}"
        assert line.startswith(f"{key.name}"), f"{key.name}={value}: {line}"
        seen.append(key.name)

    each()
    assert len(seen) >= count
