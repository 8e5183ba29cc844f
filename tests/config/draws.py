"""Any config at all: hypothesis strategies over every group, option and key that `conf/` and the schemas have.

What a key may be is read from its type and limits, so that a new option or key is drawn as soon as it exists. `VALUES`
holds what a schema cannot say: which numbers are worth trying, which files exist.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from sidestream.config.schema import SCHEMAS, Root

REPOSITORY = Path(__file__).parents[2]
CONF = REPOSITORY / "conf"
TEXT = REPOSITORY / "docs" / "configuration.md"

# Values of keys for which type and limits say too little. An empty tuple: not drawn.
VALUES: dict[str, tuple[str, ...]] = {
    # Folders and names, and what would only make a run longer.
    "name": (),
    "resume": (),
    "initial_weights": (),
    "trusted_targets": (),
    "paths.log_dir": (),
    "paths.cache_dir": (),
    "data.cache_dir": (),
    "trainer.max_steps": (),
    "strategy.timeout_seconds": ("60", "300"),
    # The source of `python_source` is cut anew for another share.
    "data.val_fraction": ("0.05",),
    # More ranks than a small machine has cores would only be slow.
    "trainer.devices": ("2", "1"),
    "trainer.pin_cpu": ("false",),
    # What is written as a list, or as either.
    "model.moe_layers": ("1", "2", "3", "[]", "[1]", "[1,3]", "[0,2]", "[2,3]", "[1,9]"),
    "model.full_attention_layers": ("[]", "1", "2", "[0]", "[0,3]"),
    "optimizer.betas": ("[0.9,0.95]", "[0.0,0.0]"),
    # Sizes that sometimes fit each other.
    "model.hidden_size": ("32", "48", "64", "96"),
    "model.num_layers": ("2", "3", "4"),
    "model.num_heads": ("1", "2", "3", "4"),
    "model.num_experts": ("1", "2", "3", "4", "6", "8"),
    "model.vocab_size": ("null", "100", "256", "300"),
    "model.dropout": ("0.0", "0.1"),
    "model.init_std": ("0.0", "0.02"),
    "model.rope_theta": ("10000.0",),
    "router.top_k": ("1", "2", "3", "4", "8", "0"),
    "router.jitter": ("0.0", "0.1"),
    "router.expert_capacity_factor": ("null", "0.5", "1.0", "1.25"),
    "dispatcher.capacity_factor": ("null", "0.5", "1.5", "2.0"),
    "optimizer.lr": ("0.0", "0.001"),
    "data.seq_length": ("8", "16", "17"),
    "data.global_batch_size": ("2", "4", "6", "8"),
    "data.micro_batch_size": ("auto", "1", "2", "3", "4"),
    "data.vocab_size": ("auto", "256", "300"),
    # Some of it, which is there.
    "data.files": (f"[{TEXT}]",),
    "data.val_files": ("[]", f"[{TEXT}]"),
    "data.separator": ("null",),
    "data.dataset": ("text",),
    "data.data_files": (f"[{TEXT}]",),
    "data.val_split": ("null", "train"),
    "data.train_file": (str(TEXT),),
    "data.val_file": ("null", str(TEXT)),
    "data.dtype": ("uint8",),
    "data.eos_token": ("null", "10", "300"),
    "data.tokenizer": ("bytes",),
    "model.mla": ("null",),
    # Of predict.py: refused in training, each once is enough.
    "model.trainable": ("true",),
    "model.num_mtp_layers": ("0", "1"),
    "predict.skew": ("1.0", "1.5"),
    "predict.plot": (),
    "trainable": (),
}
RARE = ("experiment", "cluster", "predict")  # groups that are drawn now and then
# Needed by an option to be complete, beside the keys that have no value in its YAML.
NEEDED = {"tokens": ("data.dtype",), "huggingface": ("data.data_files",)}

NUMBERS = (0, 1, 2, 3, 4, 8, 16, 64)
FRACTIONS = (0.0, 0.1, 0.5, 0.9, 1.0, 1.5, 4.0)
# Under these sizes each shipped model takes milliseconds. Keys that are drawn take their place.
MICRO = {
    "model.num_layers": "4",
    "model.hidden_size": "64",
    "model.ffn_hidden_size": "32",
    "model.expert_hidden_size": "32",
    "model.num_heads": "4",
    "model.num_kv_heads": "4",
    "model.head_dim": "null",
    "model.num_experts": "4",
    "model.vocab_size": "null",
    "model.first_dense_layers": "0",
    "data.seq_length": "16",
}


@dataclass(frozen=True)
class Key:
    """A key of an option: its dotted name, its type, and the limits of its schema."""

    name: str
    kind: Any
    limits: Any


@dataclass(frozen=True)
class Draw:
    """A config as a user would type it: `choices` of groups and values of keys."""

    choices: dict[str, str]
    keys: dict[str, str]

    def overrides(self) -> list[str]:
        return [f"{name}={value}" for name, value in {**self.choices, **self.keys}.items()]

    def set(self, name: str, value: str) -> Draw:
        """With another value. Keys that another option does not have go with the old option."""
        if name not in GROUPS:
            return replace(self, keys={**self.keys, name: value})
        known = {key.name.split(".")[1] for key in keys_of(name, value)}
        keys = {
            k: v for k, v in self.keys.items() if not k.startswith(f"{name}.") or k.split(".")[1] in known
        }
        return Draw({**self.choices, name: value}, keys)

    def micro(self) -> Draw:
        return replace(self, keys={**MICRO, **self.keys})


GROUPS: dict[str, list[str]] = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(CONF.iterdir())
    if folder.is_dir()
}


@functools.cache
def _yaml(group: str, option: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / group / f"{option}.yaml").read_text())


def _lineage(group: str, option: str) -> Iterator[str]:
    """The option and those it builds on, then its schema with a slash in front."""
    yield option
    for entry in _yaml(group, option).get("defaults", []):
        if isinstance(entry, str) and entry.startswith("/schema/"):
            yield "/" + entry.partition("@")[0].rpartition("/")[2]
        elif (
            isinstance(entry, str) and entry != "_self_" and "@" not in entry
        ):  # with one: into another group
            yield from _lineage(group, entry)


@functools.cache
def keys_of(group: str, option: str) -> list[Key]:
    """Every key of an option, from its schema."""
    schemas = [name[1:] for name in _lineage(group, option) if name.startswith("/")]
    return list(_fields(group, SCHEMAS[group][schemas[0]])) if schemas else []


def required(group: str, option: str) -> list[str]:
    """Keys without which an option is not complete."""
    options = [name for name in _lineage(group, option) if not name.startswith("/")]
    stated = {key: value for name in reversed(options) for key, value in _yaml(group, name).items()}
    missing = [f"{group}.{name}" for name, value in stated.items() if value == "???"]
    return missing + [key for name in options for key in NEEDED.get(name, ())]


def _fields(prefix: str, schema: type) -> Iterator[Key]:
    hints = typing.get_type_hints(schema)
    for item in dataclasses.fields(schema):
        name, kind = f"{prefix}.{item.name}" if prefix else item.name, hints[item.name]
        if dataclasses.is_dataclass(kind):
            yield from _fields(name, typing.cast(type, kind))
        elif item.name != "_target_":
            yield Key(name, kind, item.metadata)


ROOT = [key for key in _fields("", Root) if key.name.partition(".")[0] not in SCHEMAS]


def kinds(key: Key) -> tuple[Any, ...]:
    """The types a key takes."""
    union = isinstance(key.kind, types.UnionType) or typing.get_origin(key.kind) is typing.Union
    return typing.get_args(key.kind) if union else (key.kind,)


def values(key: Key) -> list[str]:
    """Values of the right type and within the limits; none for free text."""
    if key.name in VALUES:
        return list(VALUES[key.name])
    found: list[object] = list(key.limits.get("choices") or ())
    if not found:
        found += ["auto"] * bool(key.limits.get("auto"))
        found += ["null"] * (type(None) in kinds(key))
        found += [True, False] * (bool in kinds(key))
        numeric = int in kinds(key) or (key.kind is Any and key.limits.get("auto"))
        found += [n for n in NUMBERS if _within(n, key.limits)] * bool(numeric)
        found += [n for n in FRACTIONS if _within(n, key.limits)] * (float in kinds(key))
    return [
        {True: "true", False: "false", None: "null"}[v] if isinstance(v, bool | None) else str(v)
        for v in found
    ]


@functools.cache
def values_of(name: str) -> list[str]:
    """As `values`, of a key of any option."""
    known = (key for group, options in GROUPS.items() for option in options for key in keys_of(group, option))
    return values(next(key for key in known if key.name == name))


def _within(number: float, limits: Any) -> bool:
    low, above, high = limits.get("low"), limits.get("above"), limits.get("high")
    return (
        (low is None or number >= low)
        and (above is None or number > above)
        and (high is None or number <= high)
    )


@st.composite
def latent_attention(draw: st.DrawFn, kind: type) -> str:
    """A value for a key that takes null or a group of sizes."""
    sizes = {key.name: draw(st.sampled_from(values(key))) for key in _fields("", kind)}
    return "{" + ",".join(f"{name}:{value}" for name, value in sizes.items()) + "}"


def value_of(key: Key) -> st.SearchStrategy[str] | None:
    groups = [kind for kind in kinds(key) if dataclasses.is_dataclass(kind)]
    plain = values(key)
    if groups:
        return st.one_of(st.sampled_from(plain), latent_attention(typing.cast(type, groups[0])))
    return st.sampled_from(plain) if plain else None


@st.composite
def draws(draw: st.DrawFn, most_keys: int = 3) -> Draw:
    """A choice for each group, and up to `most_keys` keys of each. At times an experiment, at times full sizes."""
    choices = {}
    for group, options in GROUPS.items():
        if group not in RARE or draw(st.integers(0, 9)) == 7:
            choices[group] = draw(st.sampled_from(options))
    keys: dict[str, str] = {}
    groups: list[tuple[str, list[Key]]] = [("", ROOT)]
    groups += [(group, keys_of(group, option)) for group, option in choices.items()]
    for group, known in groups:
        strategies = {key.name: value for key in known if (value := value_of(key)) is not None}
        names = (
            draw(st.lists(st.sampled_from(sorted(strategies)), max_size=most_keys, unique=True))
            if strategies
            else []
        )
        needed = required(group, choices[group]) if group else []
        for name in dict.fromkeys([*needed, *names]):
            keys[name] = draw(strategies[name])
    keys.setdefault("trainer.devices", draw(st.sampled_from(VALUES["trainer.devices"])))
    found = Draw(choices, keys)
    return found.micro() if draw(st.integers(0, 3)) != 3 else found
