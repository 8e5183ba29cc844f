"""Hydra launcher `ranks`: every job of a sweep is a fresh process tree.

Process groups, CUDA contexts and loggers of one job would otherwise reach into the next.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

# Imported by Hydra's plugin scan: nothing here may be slow to import.
if TYPE_CHECKING:
    from sidestream.config.errors import ConfigError
    from sidestream.tracking.sweep import Job


@dataclass
class RanksLauncherConf:
    _target_: str = "hydra_plugins.sidestream_launcher.ranks_launcher.RanksLauncher"
    max_concurrent: int = 1  # jobs at once, each on its own share of the cores


ConfigStore.instance().store(
    group="hydra/launcher", name="ranks", node=RanksLauncherConf, provider="sidestream"
)

# Overrides of the sweep itself, not of its jobs.
_OF_THE_SWEEP = (
    "hydra.run.",
    "hydra.sweep.",
    "hydra.mode",
    "hydra/launcher",
    "hydra.launcher",
    "hydra/sweeper",
    "hydra.sweeper",
)


class RanksLauncher(Launcher):
    """Runs the jobs, `max_concurrent` at once.

    One that fails does not stop the others, one that cannot run is skipped.
    """

    def __init__(self, max_concurrent: int = 1) -> None:
        self.max_concurrent = max_concurrent
        self.jobs: list[Job] = []  # of the whole sweep; a sweeper may launch in batches

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context = hydra_context
        self.config = config

    @property
    def folder(self) -> Path:
        """The sweep's folder."""
        return Path(self.config.hydra.sweep.dir).absolute()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Returns one JobReturn per job, its value the validation loss, None for a skipped job.

        The first failed one carries SystemExit(1): Hydra raises it after the last job, without a traceback.

        Raises:
            ConfigError: no job can run, torchrun started this process, another process runs a sweep in this
                folder, or there are fewer cores than jobs at once.
        """
        from sidestream.launch import pool, status, sweeps
        from sidestream.launch.processes import Signals
        from sidestream.tracking import sweep

        self._refuse_world()
        cores = pool.shares(self.max_concurrent)
        pairs = []
        for n, overrides in enumerate(job_overrides):
            status.say(f"composing job {n + 1} of {len(job_overrides)}")
            pairs.append(self._job(list(overrides), initial_job_idx + n))
        jobs = [job for job, _ in pairs]
        self.jobs += jobs
        common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
        for job in jobs:
            job.label = " ".join(part for part in job.overrides if part not in common)
        if sweeps.again:
            sweeps.find_earlier(jobs)
        status.line(f"{len(jobs)} jobs in {_short(self.folder)}")
        status.say("checking the jobs")
        refusals = [error for job, config in pairs if job.code is None and (error := _refusal(job, config))]
        sweep.write_table(self.folder, self.jobs)
        if len(refusals) == len(jobs):
            raise refusals[0]

        def started(job: "Job") -> None:
            how = "goes on" if job.from_checkpoint else "starts"
            status.line(f"#{job.number:<3} {how:11} {_short(job.folder)}/stdout.log")

        def ended(job: "Job") -> None:
            status.line(job.line())
            sweep.write_table(self.folder, self.jobs)

        def doing() -> str:
            running = ", ".join(f"#{job.number}" for job in jobs if job.running)
            return f"{sum(job.code is not None for job in jobs)} of {len(jobs)} jobs done; {running} running"

        waiting = [job for job in jobs if job.state == "not started"]
        for job in jobs:
            if job not in waiting:  # skipped, or done before
                status.line(job.line())
        status.follow(doing)
        with Signals() as signals:
            pool.run(
                waiting, command=self._command, cores=cores, signals=signals, started=started, ended=ended
            )
        status.end()
        _summarise(jobs)
        sweep.after_sweep(self.folder, self.jobs)
        stopped = 128 + signals.received[0] if signals.received else 1
        return [_job_return(job, config, stopped) for job, config in pairs]

    def _refuse_world(self) -> None:
        from sidestream.config.errors import ConfigError
        from sidestream.launch import sweeps, torchrun

        torchrun.refuse_tasks(sys.argv[1:])
        if torchrun.active():
            why = "a sweep starts the ranks of each job itself"
            raise ConfigError("-m", "", why, expected="no torchrun", fix="run without torchrun")
        if not sweeps.hold(self.folder):
            key, why = "hydra.sweep.dir", "another process runs a sweep in this folder"
            raise ConfigError(
                key, self.folder, why, expected="a folder of its own", fix=f"{key}=<new folder>"
            )

    def _job(self, overrides: list[str], number: int) -> "tuple[Job, DictConfig]":
        from sidestream.launch import arguments
        from sidestream.tracking.sweep import Job

        config = self.context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(number), number
        HydraConfig.instance().set_config(config)
        folder = (Path(config.hydra.sweep.dir) / str(config.hydra.sweep.subdir)).absolute()
        return Job(number, folder, arguments.of_task(config.hydra)), config

    def _command(self, job: "Job") -> list[str]:
        """Makes the folder of a job ready and returns the command line that runs it there."""
        from sidestream import cli
        from sidestream.launch import arguments, resume, sweeps
        from sidestream.tracking import lock

        if sweeps.again and not job.from_checkpoint and not lock.owner_of(job.folder):
            sweeps.set_aside(job.folder)
        hydra = [part for part in self.config.hydra.overrides.hydra if not part.startswith(_OF_THE_SWEEP)]
        key = "resume" if job.from_checkpoint else "hydra.run.dir"
        return [
            *cli.again(),
            *arguments.config_flags(sys.argv[1:]),
            *job.overrides,
            *hydra,
            "hydra.mode=RUN",
            f"{key}={arguments.quoted(job.folder)}",
            *([f"{resume.STRICT}=true"] if resume.strict and job.from_checkpoint else []),
        ]


def _refusal(job: "Job", config: DictConfig) -> "ConfigError | None":
    """Returns why a job cannot run, and notes it; also decides whether it goes on from a checkpoint."""
    from sidestream.config.compatibility import check
    from sidestream.config.errors import ConfigError
    from sidestream.launch import entry, sweeps
    from sidestream.tracking import lock

    try:
        if sweeps.again:
            lock.refuse_held(job.folder, key="resume")
        cfg = entry.of_the_task(config, folder=job.folder)
        layout = check(cfg)
        if sweeps.again:
            job.from_checkpoint = sweeps.goes_on(job.folder, new=entry.resolve(cfg), layout=layout)
    except ConfigError as error:
        job.refused = str(error)
        return error
    except Exception:
        pass  # not for us to judge: the job meets it again and says so in its own log
    return None


def _summarise(jobs: "list[Job]") -> None:
    skipped = sum(job.state == "skipped" for job in jobs)
    print(f"\nfinished jobs: {sum(job.code == 0 for job in jobs)} of {len(jobs)}", end="")
    print(f", skipped: {skipped}" if skipped else "", flush=True)
    print(*(job.line() for job in jobs), sep="\n", flush=True)
    for job in jobs:
        if job.state == "FAILED":
            print(f"error: job #{job.number} ({_short(job.folder)}): {job.reason}", file=sys.stderr)


def _job_return(job: "Job", config: DictConfig, code: int) -> JobReturn:
    returned = JobReturn(overrides=job.overrides, cfg=config, hydra_cfg=config, working_dir=str(job.folder))
    fine = job.state in ("done", "skipped")
    returned.status = JobStatus.COMPLETED if fine else JobStatus.FAILED
    returned.return_value = job.val_loss if fine else SystemExit(code)
    return returned


def _short(path: Path) -> str:
    return os.path.relpath(path)
