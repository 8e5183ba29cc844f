"""What Hydra may build and do for a config, beside what we build: callbacks, plugins, logging, the environment.

Hydra acts on the `hydra` part of a config before any check of ours is called, and options of a folder given with `-cd`
set that part too. So the check is put where Hydra composes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl  # every composition goes through it
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from sidestream.config import trust
from sidestream.config.errors import ConfigError

CALLBACKS = {"sidestream.launch.entry.BeforeRun", "sidestream.predict.command.TableOfSweep"}
_PLUGINS = (
    "hydra._internal.core_plugins",
    "hydra_plugins",
)  # Hydra builds only those that it has found installed
_LOGGING = {
    "class": {"logging.StreamHandler", "logging.FileHandler", "logging.NullHandler"},
    "()": {"colorlog.ColoredFormatter"},  # of Hydra's own option
    "filename": {"${hydra.runtime.output_dir}/${hydra.job.name}.log"},
}
_STREAMS = {"ext://sys.stdout", "ext://sys.stderr"}
_TYPED_ONLY = ("resume", "resume_sweep", trust.KEY)  # also in a sweep of an option

_composes = ConfigLoaderImpl.load_configuration


def install() -> None:
    """Checks every config that Hydra composes from now on. May be called twice."""
    ConfigLoaderImpl.load_configuration = _load_configuration  # type: ignore[method-assign]


def _load_configuration(
    self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], *rest: Any, **options: Any
) -> DictConfig:
    cfg = _composes(self, config_name, overrides, *rest, **options)
    trusted = trust.believed(overrides)
    if trust.KEY in cfg:  # what a file says there is not believed
        with read_write(cfg), open_dict(cfg):
            cfg[trust.KEY] = trusted
    if "hydra" in cfg:
        check_hydra(cfg.hydra, typed=overrides, trusted=trusted)
    return cfg


def check_hydra(hydra: DictConfig, *, typed: list[str], trusted: list[str]) -> None:
    """Checks the `hydra` part of a composed config.

    Args:
        typed: The overrides of the command line.
        trusted: See `trust.believed`.

    Raises:
        ConfigError: for the first key that only a command line may set, or that names what may not be built.
    """
    plain: Any = OmegaConf.to_container(hydra, resolve=False)
    keys = tuple(f"{word.lstrip('+~').partition('=')[0]}." for word in typed)
    cfg = OmegaConf.create({trust.KEY: trusted})
    swept = (plain.get("sweeper") or {}).pop("params", None) or {}  # overrides of our own config
    for key, value in _leaves(plain, "hydra"):
        group, name = key.split(".")[1], key.rpartition(".")[2]
        if name == "_target_":
            _check_target(key, value, group, cfg)
        elif group in ("job_logging", "hydra_logging"):
            _check_logging(key, name, value)
        elif key.startswith("hydra.job.env_set.") and not f"{key}.".startswith(keys):
            raise _typed_only(key, value)
    if plain.get("output_subdir") not in (None, ".hydra") and "hydra.output_subdir." not in keys:
        raise _typed_only("hydra.output_subdir", plain["output_subdir"])
    for key, value in swept.items():
        word = str(key).lstrip("+~")
        if word.startswith("hydra") or word.split(".")[0] in _TYPED_ONLY:
            raise _typed_only(word, value)


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict | list) and node:
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(value, f"{key}.{name}")
    else:
        yield key, node


def _check_target(key: str, value: Any, group: str, cfg: DictConfig) -> None:
    if group == "callbacks":
        if value not in CALLBACKS:
            trust.check_foreign(key, value, cfg)
    elif not (isinstance(value, str) and value.startswith(tuple(f"{package}." for package in _PLUGINS))):
        trust.check_foreign(key, value, cfg)


def _check_logging(key: str, name: str, value: Any) -> None:
    wrong = name in _LOGGING and value not in _LOGGING[name]
    if wrong or (isinstance(value, str) and "://" in value and value not in _STREAMS):
        why, expected = "logging may not build or write that", "an option of Hydra's"
        raise ConfigError(key, value, why, expected=expected, fix=f"remove {key}")


def _typed_only(key: str, value: Any) -> ConfigError:
    why = "set by a file; only a command line may say that"
    return ConfigError(key, value, why, expected="it typed", fix=f"run with {key}=<value> if you trust it")


__all__ = ["check_hydra", "install"]
