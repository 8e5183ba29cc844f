"""The config of a run that is only read: by eval.py and by exports. Its folder may come from anybody."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from sidestream.config import trust
from sidestream.config.errors import ConfigError
from sidestream.config.schema import Model, Trainer
from sidestream.launch.record import as_config, load_resolved
from sidestream.tracking.untrusted import Unreadable

TYPED = {"model": Model, "trainer": Trainer}  # the types of the other groups depend on their option


def read_config(run: Path, *, trusted: list[str]) -> DictConfig:
    """Returns the config of a run, for one rank: a checkpoint does not depend on how many wrote it.

    Args:
        run: The run folder.
        trusted: What the command line says, see `trust.believed`. The folder has no say.

    Raises:
        ConfigError: the folder holds no config, or one that names what may not be built.
    """
    with refused(run):
        cfg = as_config({**load_resolved(run), trust.KEY: trusted})
        for name, schema in TYPED.items():
            cfg[name] = OmegaConf.merge(OmegaConf.structured(schema), cfg[name])
        cfg.trainer.devices, cfg.trainer.num_nodes, cfg.strategy.expert_parallel_size = 1, 1, "auto"
        cfg.initial_weights = None  # the checkpoint takes their place
        trust.check_targets(cfg)
        return cfg


@contextmanager
def refused(run: Path, option: str = "run") -> Iterator[None]:
    """Makes one line of whatever goes wrong with the content of a run folder.

    Args:
        option: What the user named the folder with.

    Raises:
        ConfigError: in place of it.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        found = str(error) if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}"
        why, expected = f"its config is none of a run ({found})", "the folder of a run"
        raise ConfigError(option, run, why, expected=expected, fix=f"{option}=<folder>") from error


def refuse_links(run: Path, option: str) -> None:
    """Refuses a folder with links that lead out of it, before anything is written there: logs are appended to.

    Raises:
        ConfigError: naming the first.
    """
    inside = run.resolve()
    for place, folders, files in os.walk(run):
        for path in (Path(place) / name for name in (*folders, *files)):
            if path.is_symlink() and not path.resolve().is_relative_to(inside):
                why = f"{path.relative_to(run)} is a link that leads out of it"
                expected, fix = "what is written into a run stays there", f"remove the link {path}"
                raise ConfigError(option, run, why, expected=expected, fix=fix)


__all__ = ["read_config", "refuse_links", "refused"]
