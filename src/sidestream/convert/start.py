"""The model that is built must be the one that the weights are of: `initial_weights`, a resume, eval.py. No torch.

A checkpoint says so itself, in `model.json`: the sections of the config that decide what its weights compute, and the
tokenizer whose tokens they know.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sidestream.config.errors import ConfigError, as_typed
from sidestream.convert.families import model_options
from sidestream.convert.folder import ModelFolder
from sidestream.convert.function import BIASED, ROUTER, function_of, is_own, read_sections
from sidestream.tracking.untrusted import Unreadable, printable, read_bytes

MODEL = "model.json"  # in a checkpoint
_SECTIONS = ("model", "router", "balance", "overlap")
_ABSENT = object()

# How a model is trained from its weights is free: what an expert may take, and routes that are dealt out.
_FREE = ("router.expert_capacity_factor", "router.drop_policy", "router.force_balance")
_OPTIONS = {
    "SoftmaxRouter": "router=softmax",
    "SigmoidRouter": "router=sigmoid",
    "SqrtSoftplusRouter": "router=sqrtsoftplus",
    "ExpertBias": "balance=bias",
    "QuantileBalance": "balance=quantile",
    "ShortcutOverlap": "overlap=shortcut",
}


def is_checkpoint(folder: Path) -> bool:
    """Whether this is a checkpoint folder of ours (torch's distributed format)."""
    return (folder / ".metadata").is_file()


def described(
    cfg: Mapping[str, Any], *, vocab_size: int | None = None, tokenizer: str | None = None
) -> dict[str, Any]:
    """What a checkpoint says of its model, in types of JSON.

    Args:
        cfg: The plain root config, in which what comes from the environment is a name.
        vocab_size: Number of tokens in the data, for a model that leaves it open.
        tokenizer: See `Corpus.tokenizer`.
    """
    sections = {name: cfg.get(name) or {} for name in _SECTIONS}
    sections["model"] = {**cfg["model"], "vocab_size": cfg["model"].get("vocab_size") or vocab_size}
    # A class of somebody's own may have any keys; what no JSON can say is text on both sides of a comparison.
    text = json.dumps({**sections, "tokenizer": tokenizer}, default=str)
    return json.loads(text, parse_constant=str)  # type: ignore[no-any-return]


def trained_as(checkpoint: Path, *, key: str) -> dict[str, Any] | None:
    """What a checkpoint of ours says of its model, see `described`; None where an earlier version wrote it.

    Args:
        key: What names it on the command line.

    Raises:
        ConfigError: It says nothing that can be read.
    """
    if not (checkpoint / MODEL).exists():
        return None
    try:
        return read_sections(checkpoint / MODEL, inside=checkpoint)
    except Unreadable as error:
        expected, fix = "a whole checkpoint", "name another one"
        raise ConfigError(key, printable(checkpoint), str(error), expected=expected, fix=fix) from None


def check_same_model(cfg: Mapping[str, Any], checkpoint: Path, *, key: str, fix: str) -> None:
    """Hold the config of a run against the checkpoint that is loaded for it: any weights of these sizes would load.

    Args:
        cfg: The plain root config, in which what comes from the environment is a name.
        key, fix: Of the refusal.

    Raises:
        ConfigError: The weights were trained as part of another function; names the keys and both values.
    """
    saved = trained_as(checkpoint, key=key)
    if saved is None:
        return
    now = described(cfg)
    theirs, built = function_of(saved), function_of(now)
    for function, sections in ((theirs, saved), (built, now)):
        balance = (sections.get("balance") or {}).get("_target_")
        if is_own(balance):  # it may have used a bias
            function["balance._target_"] = balance
    different = [
        f"{name} is {_shown(value)} there and {_shown(built.get(name))} here"
        for name, value in theirs.items()
        if built.get(name, _ABSENT) != value and not (name == "model.vocab_size" and built[name] is None)
    ]
    if different:
        why = f"{printable(checkpoint.name)} is of another model: {', '.join(different)}"
        raise ConfigError(key, printable(checkpoint), why, expected="a checkpoint of this model", fix=fix)


def other_tokens(folder: Path, tokenizer: str | None) -> str | None:
    """A line for the user where the weights to start from know the tokens of another tokenizer than the data's.

    Args:
        folder: A Hugging Face folder, or a checkpoint of ours.
        tokenizer: See `Corpus.tokenizer`.
    """
    if is_checkpoint(folder):
        theirs = (trained_as(folder, key="initial_weights") or {}).get("tokenizer")
    else:
        theirs = tokenizer_of(folder)
    if None in (theirs, tokenizer) or theirs == tokenizer:
        return None
    names = f"{printable(theirs, limit=20)} there and {printable(tokenizer, limit=20)} here"
    return (
        f"the weights in {printable(folder)} know the tokens of another tokenizer ({names}): each token begins with "
        "the embedding of some other text; data=tokens with their tokenizer would go on from what they learned"
    )


def tokenizer_of(folder: Path) -> str | None:
    """The tokenizer of a Hugging Face folder, as `Corpus.tokenizer`; None where it has none that we could read."""
    try:
        return f"sha256:{hashlib.sha256(read_bytes(folder / 'tokenizer.json')).hexdigest()}"
    except Unreadable:
        return None


def check_weights(cfg: Mapping[str, Any], folder: Path, *, vocab_size: int | None = None) -> str | None:
    """Hold a config against the weights it starts from.

    Args:
        cfg: The plain root config.
        folder: A Hugging Face folder, or a checkpoint of ours.
        vocab_size: Number of tokens in the data, for a model that leaves it open; None: not known yet.

    Returns:
        What could not be compared, as a line for the user; None where all was.

    Raises:
        ConfigError: Names the first key that differs, both values and the overrides that make the models equal; or
            says what is wrong with the folder.
    """
    if is_checkpoint(folder):
        sections = trained_as(folder, key="initial_weights") or _config_beside(folder)
        if sections is None:
            return f"{printable(folder)}: no config beside this checkpoint, only the shapes of its weights are compared"
    else:
        theirs = ModelFolder(folder)
        sections = model_options(theirs.config)
        theirs.check_tensors()
    model = {**cfg["model"], "vocab_size": cfg["model"].get("vocab_size") or vocab_size}
    balance = sections.get("balance") or {}
    of_weights, built = function_of(sections), function_of({**cfg, "model": model, "balance": balance})
    for name in (
        "ffn_hidden_size",
        "num_experts",
        "expert_hidden_size",
    ):  # also where no block of ours has it yet
        built[f"model.{name}"] = None if of_weights[f"model.{name}"] is None else model[name]
    own = is_own(of_weights.get("router._target_", ROUTER)) or is_own(built.get("router._target_", ROUTER))
    different = [
        key
        for key, value in of_weights.items()
        if built.get(key) != value
        and key not in _FREE
        and not (own and key.startswith("router."))
        and not (key == "model.vocab_size" and None in (value, built[key]))
    ]
    # A bias that the weights were chosen with is part of their model; a new one starts at zero.
    target = cfg["balance"].get("_target_")
    if balance.get("_target_") in BIASED and target not in BIASED and not is_own(target):
        built["balance._target_"] = target
        different.append("balance._target_")
    if different:
        raise _refusal(folder, different, of_weights, built, cfg)
    return (
        f"the router is not compared with that of {printable(folder)}: a class of your own" if own else None
    )


def _config_beside(checkpoint: Path) -> dict[str, Any] | None:
    """The resolved config of the run, or the import, that wrote a checkpoint."""
    folder = checkpoint.resolve()
    for parent in reversed(folder.parents[:2]):  # one of them only at the root of a file system
        path = parent / ".hydra" / "resolved.yaml"
        if path.is_file():
            try:
                return read_sections(path, inside=parent)
            except Unreadable as error:
                raise ConfigError(
                    "initial_weights",
                    printable(checkpoint),
                    str(error),
                    expected="a checkpoint with the config of its run",
                    fix="initial_weights=<another checkpoint>",
                ) from None
    return None


def _refusal(
    folder: Path, keys: list[str], theirs: dict[str, Any], built: dict[str, Any], cfg: Mapping[str, Any]
) -> ConfigError:
    first, *others = keys
    why = f"the weights in {printable(folder)} are of a model with {_shown(theirs[first])}"
    if others:
        told = [f"{key}={_shown(built.get(key))} where theirs is {_shown(theirs[key])}" for key in others]
        why = f"{why}; also {', '.join(told)}"
    fixes = dict.fromkeys(_override(key, theirs, cfg) for key in keys)
    return ConfigError(
        first,
        _shown(built.get(first)),
        why,
        expected="the model of the weights",
        fix=f"set {' '.join(fixes)}",
    )


def _override(key: str, theirs: dict[str, Any], cfg: Mapping[str, Any]) -> str:
    value = theirs[key]
    if key.endswith("._target_"):
        group, name = key.partition(".")[0], str(value).rpartition(".")[2]
        return _OPTIONS.get(name, f"{group}={'aux_loss' if group == 'balance' else 'none'}")
    if key == "model.moe_layers":
        reset = " model.first_dense_layers=0" if cfg["model"].get("first_dense_layers") else ""
        return f"{key}={1 if len(value) == theirs['model.num_layers'] else _shown(value)}{reset}"
    if isinstance(value, Mapping):
        return "model=<the preset of the weights>"
    return f"{key}={_shown(value)}"


def _shown(value: Any) -> str:
    return printable(as_typed(value), limit=120)
