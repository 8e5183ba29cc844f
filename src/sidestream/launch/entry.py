"""What `train.py` does before and after Hydra: errors in one line, exit codes, and starting the ranks."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from sidestream import cli
from sidestream.config import hydra_trust, schema, trust, withheld
from sidestream.config.compatibility import check, remarks
from sidestream.config.errors import ConfigError, cannot_write, is_of_place
from sidestream.config.help import help_text, list_options_once
from sidestream.config.hydra_errors import USER_ERRORS, explain, is_of_user
from sidestream.config.layout import Layout
from sidestream.launch import (
    arguments,
    failures,
    phase,
    resume,
    status,
    stopping,
    sweeps,
    terminal,
    torchrun,
)
from sidestream.launch.processes import die_with_parent
from sidestream.launch.record import Launch, as_config, save_resolved
from sidestream.launch.scratch import scratch
from sidestream.launch.stored import refuse_links, refused
from sidestream.launch.supervisor import rank_environment, supervise
from sidestream.launch.worker import RankEnv, run_rank
from sidestream.tracking import lock
from sidestream.tracking.integrity import check_given
from sidestream.tracking.untrusted import printable

_typed: list[str] = []  # the arguments before `resume=` or `resume_sweep=` was expanded


def run(main: Callable[[], None], *, shows_status: bool = True) -> NoReturn:
    """Runs a function decorated with `@hydra.main` and ends the process with the documented exit code.

    Args:
        shows_status: Say on stdout what takes long before `main` has something to show.
    """
    die_with_parent(signal.SIGTERM)
    terminal.outlive()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints and exits before we can explain
    register()
    _typed[:] = sys.argv[1:]
    try:
        if trust.believed(_typed):  # the user's package may lie here; otherwise nothing here is code
            sys.path.append(os.getcwd())
        if torchrun.follows():
            sys.exit(torchrun.follow())
        _typed[:] = arguments.with_latest(_typed)
        flags, overrides = arguments.split(_typed)
        if shows_status and arguments.runs(_typed):
            status.begin()
            status.say("composing the configuration")
        # Hydra wants its flags in front.
        plain = resume.without_strict(arguments.without_null([*flags, *overrides]))
        sys.argv[1:] = arguments.with_config_path(resume.rewrite(sweeps.rewrite(plain)))
        main()
    except Exception as error:
        if not is_of_user(error) and not is_of_place(error):
            raise
        _refuse(error)
    finally:
        status.end()
        torchrun.release()
    sys.exit(0)


def register() -> None:
    """Makes schemas and resolvers known; `conf/` cannot be composed without. May be called twice."""
    schema.register()
    hydra_trust.install()
    list_options_once()
    OmegaConf.register_new_resolver("help_text", help_text, replace=True)
    OmegaConf.register_new_resolver("spelled", cli.spelled, replace=True)
    OmegaConf.register_new_resolver("job_label", arguments.job_label, replace=True)


def _refuse(error: Exception) -> NoReturn:
    status.end()
    if "debug=true" in sys.argv:
        traceback.print_exception(error)
    _, overrides = arguments.split(sys.argv[1:])
    if is_of_place(error):
        line = str(_of_folder(error, overrides))
    else:
        line = str(arguments.several_values(error, _typed) or explain(error, overrides))
    print(f"error: {printable(line, limit=2000)}", file=sys.stderr, flush=True)
    sys.exit(2)


def _of_folder(error: OSError, overrides: list[str]) -> ConfigError:
    """Explains that a run, or a sweep, cannot write where it should, by the key that led there."""
    typed = {arguments.key_of(part): arguments.value_of(part) for part in overrides}
    keys = ("resume", "resume_sweep", "hydra.run.dir", "hydra.sweep.dir")
    key = next((key for key in keys if key in typed), "paths.log_dir")
    return cannot_write(key, typed.get(key, "logs"), error)


class BeforeRun(Callback):
    """Checks the config before Hydra makes a folder or writes a file."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        # Hydra turns an exception of a callback into a warning, but lets SystemExit pass.
        try:
            self._check(config)
        except USER_ERRORS as error:
            _refuse(error)
        except Exception as error:
            if is_of_place(error):
                _refuse(error)
            traceback.print_exc()
            sys.exit(1)

    def _check(self, config: DictConfig) -> None:
        torchrun.refuse_tasks(_typed)
        if config.resume is None:
            arguments.refuse_study(config.hydra, _typed)
        folder = Path(config.hydra.run.dir).absolute()
        cfg = of_the_task(config, folder=folder)
        with refused(folder, "resume") if cfg.resume is not None else contextlib.nullcontext():
            self._check_task(cfg, folder)

    def _check_task(self, cfg: DictConfig, folder: Path) -> None:
        if cfg.resume is not None and Path(cfg.resume).absolute() != folder:
            why = "only the command line can resume a run"
            raise ConfigError("resume", cfg.resume, why, expected="null in YAML", fix="resume=null")
        layout = check(cfg, **torchrun.world())
        from sidestream.predict.here import check_memory  # `--help` does without it

        check_memory(cfg, layout)
        for remark in remarks(cfg, layout):
            status.line(f"warning: {printable(remark, limit=2000)}")
        if cfg.resume is None:
            _check_initial_weights(cfg.initial_weights)
            _claim(folder)
            lock.hold(folder, key="hydra.run.dir")
        else:
            status.say("checking the checkpoints")
            refuse_links(folder, "resume")
            chosen = resume.choose(folder)
            changes = resume.check_changes(folder, new=resolve(cfg), layout=layout, done=chosen.step)
            for line in [*chosen.lines, *changes]:
                status.line(printable(line, limit=2000))


def of_the_task(config: DictConfig, *, folder: Path) -> DictConfig:
    """Returns a composed config without its `hydra` part, as it is when it runs in `folder`."""
    with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
        config.hydra.runtime.output_dir = str(folder)
    HydraConfig.instance().set_config(config)  # for ${hydra:...} in a user's option
    cfg = config.copy()
    with read_write(cfg), open_dict(cfg):
        del cfg["hydra"]
    return cfg


def _check_initial_weights(value: str | None) -> None:
    """Verifies one of our checkpoints; Hugging Face folders have no checksums."""
    folder = Path(value or "").expanduser()
    if value is not None and (folder / ".metadata").exists():
        lines = check_given(folder, key="initial_weights", needs=(".metadata",))
        print(*lines, sep="\n", end="\n" if lines else "", flush=True)


def _claim(folder: Path) -> None:
    """Takes a folder for a new run, so that no second run writes into it."""
    expected, fix = "a new or empty folder", "resume=<folder> to go on with the run in it"
    found = {path.name for path in folder.iterdir()} - {"stdout.log"} if folder.is_dir() else set()
    try:
        if not found:
            # mkdir succeeds for one of two runs that try at once; Hydra fills this folder.
            (folder / ".hydra").mkdir(parents=True)
            return
    except FileExistsError:
        pass
    raise ConfigError("hydra.run.dir", folder, "another run wrote in this folder", expected=expected, fix=fix)


def start(cfg: DictConfig) -> None:
    """Starts the ranks of a composed config and waits for them; exits the process unless the run finished.

    Raises:
        ConfigError: see `compatibility.check`.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    layout = check(cfg, **torchrun.world())
    evaluated = _evaluated(cfg)
    from_environment = withheld.find(cfg, evaluated)
    plain = withheld.names(evaluated, from_environment)
    if cfg.resume is not None:
        chosen = resume.chosen or resume.choose(folder)
        plain["resume"] = str(chosen.folder)  # the ranks take the one that was checked
        resume.clear_up(folder, chosen.passed)
        resume.keep_previous(folder)
    save_resolved(folder, plain)
    choices = {k: v or "none" for k, v in hydra.runtime.choices.items() if not k.startswith("hydra/")}
    for name, nothing in (
        ("experiment", "none"),
        ("arm", "none"),
        ("cluster", "none"),
        ("predict", "default"),
    ):
        if choices.get(name) == nothing:  # says nothing of the run
            del choices[name]
    Launch(
        command=shlex.join([*cli.typed(), *_typed]),
        overrides=[part for part in arguments.of_task(hydra) if arguments.key_of(part) != "resume"],
        flags=arguments.config_flags(sys.argv[1:]),
        choices=choices,
        layout=layout,
    ).save(folder)
    failures.clear(folder)
    withheld.publish(from_environment)
    resolved = as_config(withheld.values(plain, from_environment))
    os.environ[trust.VARIABLE] = json.dumps(plain[trust.KEY])  # the ranks believe this, and no file
    ranks = f"{layout.world_size} ranks" if layout.world_size > 1 else "1 rank"
    status.say(f"starting {ranks}")
    if torchrun.active():
        code = torchrun.lead(resolved, layout=layout, folder=folder)
    elif layout.world_size > 1:
        code = supervise(folder, layout=layout, debug=cfg.debug)
    else:
        code = run_here(resolved, layout=layout, folder=folder)
    if code:
        sys.exit(code)


def run_here(cfg: DictConfig, *, layout: Layout, folder: Path) -> int:
    """Runs a run of one rank in this process and returns its exit code."""
    with scratch() as shared:
        os.environ.update(rank_environment(layout, rank=0, store=shared / "store"))

        def give_up(number: int, why: str) -> NoReturn:
            failures.interrupted(folder, why)
            shutil.rmtree(shared, ignore_errors=True)
            os._exit(128 + number)

        stopping.install()
        stopping.watch(give_up)
        status.follow(lambda: status.of_ranks([phase.current()]))
        try:
            code = run_rank(cfg, layout=layout, folder=folder, env=RankEnv.from_environ())
        except stopping.Stop:
            code = 128 + (stopping.requested() or signal.SIGTERM)
        status.end()
    if code > 128:
        failures.interrupted(folder)
    if code in (1, 2):
        failures.report(folder, failures.cause(failures.recorded(folder)), world_size=1, debug=cfg.debug)
    return code


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """Returns the config as it is stored: evaluated, but for what comes from the environment, see `withheld`."""
    plain = _evaluated(cfg)
    return withheld.names(plain, withheld.find(cfg, plain))


def _evaluated(cfg: DictConfig) -> dict[str, Any]:
    """Returns the config with every interpolation evaluated and `~` expanded: the only time this happens to a run."""
    resolved = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(resolved, dict)
    for group in ("paths", "data"):
        for name, value in resolved[group].items():
            if isinstance(value, str) and value.startswith("~"):
                resolved[group][name] = str(Path(value).expanduser())
    if resolved["initial_weights"] is not None:  # a resume or an evaluation may run in another folder
        resolved["initial_weights"] = str(Path(resolved["initial_weights"]).expanduser().absolute())
    return resolved  # type: ignore[return-value]


__all__ = ["BeforeRun", "of_the_task", "register", "resolve", "run", "run_here", "start"]
