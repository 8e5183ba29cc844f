"""`initial_weights`: the model that is built must be the one that the weights are of. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sidestream.config.errors import ConfigError, as_typed
from sidestream.convert.families import model_options
from sidestream.convert.folder import ModelFolder
from sidestream.convert.function import BIASED, ROUTER, function_of, is_own, read_sections
from sidestream.tracking.untrusted import Unreadable, printable

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
        sections = _config_beside(folder)
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
