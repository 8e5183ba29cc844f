"""Builds the loggers of a run from `cfg.logger`, one per option of the Hydra group `logger`.

An option's `_target_` names a function `(context: LoggerContext, **options) -> Logger`; `logger=none` has no
`_target_`. The function is called on rank 0 only; the other ranks get a `SilentLogger` in its place. Loggers
mirror metrics.jsonl, which is written without them too (names in `sidestream.tracking.names`).
"""

import importlib.util
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from sidestream.config import withheld
from sidestream.config.construct import construct
from sidestream.config.errors import ConfigError
from sidestream.launch import arguments
from sidestream.tracking import names, sweep
from sidestream.tracking.folder import RunFolder, write_text_atomic
from sidestream.tracking.integrity import resumed, step_of
from sidestream.tracking.untrusted import parse_yaml, read_text
from sidestream.tracking.wandb_mode import mode_of, user_settings


@dataclass(frozen=True, kw_only=True)
class LoggerContext:
    """What a logger may want to know about the run.

    Attributes:
        folder: the run folder.
        config: the resolved config in plain Python.
        choices: Hydra group -> option.
        identity: flat keys to group runs by, e.g. `world_size`, `expert_parallel_size`, `commit`.
        job_type: `train`, `bench`, `eval` or `profile`.
    """

    folder: Path
    config: dict[str, Any]
    choices: dict[str, str]
    identity: dict[str, Any]
    job_type: str


def build_loggers(
    logger_cfg: DictConfig | None,
    *,
    folder: Path,
    cfg: DictConfig,
    choices: Mapping[str, str],
    identity: Mapping[str, Any],
    rank: int,
    job_type: str = "train",
) -> list[Logger]:
    """Builds what `Trainer(logger=...)` takes; an empty list for `logger=none` and `logger=null`.

    Args:
        logger_cfg: the node `cfg.logger`.
        cfg: the whole config, resolved here.
        rank: global rank; only rank 0 writes.

    Raises:
        ConfigError: the option needs a package that is not installed.
    """
    if logger_cfg is None or "_target_" not in logger_cfg:
        return []
    if rank > 0:
        return [SilentLogger()]
    config: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    context = LoggerContext(
        folder=Path(folder),
        config=withheld.names(config, withheld.published()),
        choices=dict(choices),
        identity=dict(identity),
        job_type=job_type,
    )
    made = construct("logger", logger_cfg, cfg, partial=True)(context)
    if not isinstance(made, Logger):
        why, expected = (
            f"gives a {type(made).__name__}",
            "a function of the context that gives a Lightning logger",
        )
        raise ConfigError("logger", logger_cfg["_target_"], why, expected=expected, fix="logger=none")
    return [made]


def finish_loggers(loggers: Sequence[Logger], exit_code: int) -> None:
    """Writes out and closes every logger; belongs in a `finally`. Calling it again does nothing.

    Lightning never closes a wandb run, and the next run of the process would then be logged into it.
    """
    for logger in loggers:
        logger.finalize("success" if exit_code == 0 else "failed")
        if isinstance(logger, ClosingWandbLogger):
            logger.close(exit_code)


def mirror_picture(loggers: Sequence[Logger], name: str, picture: Path, *, step: int) -> None:
    """Shows a PNG file in the loggers that can show one."""
    for logger in loggers:
        if isinstance(logger, ClosingWandbLogger):
            logger.log_image(name, [str(picture)], step=step)
        elif isinstance(logger, TensorBoardLogger):
            import numpy as np
            from PIL import Image

            pixels = np.asarray(Image.open(picture).convert("RGB"))
            logger.experiment.add_image(name, pixels, global_step=step, dataformats="HWC")


def csv_logger(context: LoggerContext) -> CSVLogger:
    """`logger=csv`: `<run>/csv/version_N/metrics.csv`, a new N for each resume."""
    # Lightning tests `(step + 1) % n`, which a multiple of log_every_n_steps may never fulfil for n > 1.
    return CSVLogger(context.folder, name="csv", flush_logs_every_n_steps=1)


def tensorboard_logger(context: LoggerContext) -> TensorBoardLogger:
    """`logger=tensorboard`: event files in `<run>/tensorboard/`; a resume hides what lies after its checkpoint.

    Raises:
        ConfigError: tensorboard is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "logger",
            "tensorboard",
            "tensorboard is not installed",
            expected="an installed tensorboard",
            fix="run pip install 'tensorboard>=2.16' or set logger=csv",
        )
    resume = context.config.get("resume")
    # From this step on the viewer drops what an earlier start wrote: it is logged again.
    purge: dict[str, Any] = {"purge_step": step_of(resumed(resume)) + 1} if resume else {}
    logger = TensorBoardLogger(context.folder, name="tensorboard", version="", **purge)
    text = OmegaConf.to_yaml(
        OmegaConf.create({**context.identity, "choices": context.choices, **context.config})
    )
    logger.experiment.add_text("config", f"```yaml\n{text}```")
    return logger


def wandb_logger(
    context: LoggerContext, *, project: str, group: str | None, tags: list[str], offline: bool | str
) -> Logger:
    """`logger=wandb`: one wandb run per run folder, continued by a resume.

    Args:
        group: null takes the name of the sweep folder, or else the experiment.
        tags: added to those made of the choices.
        offline: `auto` is offline when there is no API key; it leaves a WANDB_MODE that is set alone.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise ConfigError(
            "logger",
            "wandb",
            "wandb is not installed",
            expected="an installed wandb",
            fix="run pip install 'wandb>=0.31,<0.32' or set logger=csv",
        ) from None
    clash = context.config.keys() & {"choices", *context.identity}
    assert not clash, f"identity would hide config keys {sorted(clash)}"
    experiment, named = context.choices.get("experiment"), str(context.config.get("name") or "")
    mirrored = _mirrored(context.folder)
    run_id = _wandb_id(context.folder)
    run = wandb.init(
        project=project,
        id=run_id,
        resume="allow",
        name=_run_name(context),
        group=group or sweep.group_of(context.folder.resolve().parent, named) or experiment,
        job_type=context.job_type,
        tags=[*_choice_tags(context.choices), *tags],
        config={**context.config, "choices": context.choices, **context.identity},
        dir=str(context.folder),
        # An argument and not WANDB_MODE: the environment would reach later runs of this process and children.
        mode=mode_of(offline, user_settings()),
        # Without it wandb returns a run that an earlier job of this process left open.
        reinit="finish_previous",
        # Capturing the console would copy every redraw of the progress bar.
        settings=wandb.Settings(console="off"),
    )
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    run.define_metric("perf/*", step_metric=names.TOKENS)
    run.define_metric(names.TOKENS_PER_SECOND, step_metric=names.TOKENS, summary="mean")
    run.define_metric(names.VAL_LOSS, step_metric="trainer/global_step", step_sync=True, summary="min")
    logger = ClosingWandbLogger(project=project, id=run_id, save_dir=context.folder, experiment=run)
    logger.mirrored = mirrored
    return logger


class ClosingWandbLogger(WandbLogger):
    """A WandbLogger whose run can be closed, and that shows every step once.

    Attributes:
        mirrored: The last step that an earlier start of the run has logged. After a crash a resume computes the steps
            since the checkpoint again; a wandb run cannot be cut, and its axis would jump back.
    """

    _closed = False
    mirrored = -1

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if step is None or step > self.mirrored:
            super().log_metrics(metrics, step)

    def close(self, exit_code: int) -> None:
        """Closes the run once."""
        if not self._closed:
            self._closed = True
            self.experiment.finish(exit_code=exit_code)


class SilentLogger(Logger):
    """The logger of ranks above 0. `logger.experiment` accepts whatever the real one may be asked to do.

    Lightning's own stand-in fails on `logger.experiment.config.update(...)` (pytorch-lightning#13166).
    """

    @property
    def name(self) -> str:
        return "silent"

    @property
    def version(self) -> str:
        return "silent"

    @property
    def experiment(self) -> "_Anything":
        return _Anything()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass


class _Anything:
    """Every attribute, item and call gives it again."""

    def __getattr__(self, name: str) -> "_Anything":
        if name.startswith("__"):  # copy, pickle and inspect ask for protocols that it does not have
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Anything":
        return self

    def __getitem__(self, key: Any) -> "_Anything":
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def _wandb_id(folder: Path) -> str:
    """The id of the folder's wandb run. Random: a hash of the path would revive a deleted folder's run."""
    path = folder / "wandb_id"
    if not path.exists():
        write_text_atomic(path, uuid.uuid4().hex[:10] + "\n")
    return read_text(path, inside=folder, limit=100).strip()


def _mirrored(folder: Path) -> int:
    """The last recorded step of a run that was mirrored before, -1 for a new one."""
    records = RunFolder(folder).read_metrics() if (folder / "wandb_id").exists() else []
    return max((record[names.STEP] for record in records), default=-1)


def _run_name(context: LoggerContext) -> str:
    """`<experiment>-<what was swept>`, or what was typed for a run of its own.

    The folder's name stands in for what exceeds the 128 characters of a wandb name: nothing is cut, or the jobs of a
    sweep that differ in their last overrides would all be called the same.
    """
    path = context.folder / ".hydra" / "overrides.yaml"
    listed = parse_yaml(read_text(path, inside=context.folder)) if path.exists() else []
    overrides = [str(item) for item in listed] if isinstance(listed, list) else []
    kept = arguments.swept(overrides, sweep.typed(context.folder.resolve().parent))
    kept = [item for item in kept if not item.startswith("experiment=")]
    experiment = context.choices.get("experiment") or context.config.get("name") or "run"
    name = f"{experiment}-{','.join(kept)}"
    return name if kept and len(name) <= 128 else f"{experiment}-{context.folder.name}"[:128]


def _choice_tags(choices: Mapping[str, str]) -> list[str]:
    """`group:option` for every choice of ours, within the 64 characters of a wandb tag."""
    return [f"{g}:{o}"[:64] for g, o in choices.items() if o and not g.startswith("hydra/")]
