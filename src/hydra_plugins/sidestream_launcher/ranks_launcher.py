"""Hydra launcher `ranks`: every job of a sweep is a fresh process tree.

Process groups, CUDA contexts and loggers of one job would otherwise reach into the next.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

# Imported by Hydra's plugin scan: nothing here may be slow to import.


@dataclass
class RanksLauncherConf:
    _target_: str = "hydra_plugins.sidestream_launcher.ranks_launcher.RanksLauncher"


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
_OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass
class Job:
    """One job of a sweep and how it ended."""

    number: int
    folder: Path
    overrides: list[str]
    label: str = ""  # the overrides that tell it from the other jobs
    code: int | None = None  # None: not started
    seconds: float = 0.0
    result: dict = field(default_factory=dict)

    @property
    def val_loss(self) -> float | None:
        return self.result.get("metrics", {}).get("val_loss")

    @property
    def state(self) -> str:
        return {None: "not started", 0: "done", 130: "interrupted", 143: "interrupted"}.get(
            self.code, "FAILED"
        )

    def line(self) -> str:
        """Returns the job's line of the console and of the table."""
        loss = "" if self.val_loss is None else f"val_loss {self.val_loss:.4f}"
        return f"#{self.number:<3} {self.state:11} {loss:16} {self.seconds:7.1f} s  {self.label}"

    def reason(self) -> str:
        """Returns why the job failed, in one line."""
        log = self.folder / "stdout.log"
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
        errors = [line for line in lines if line.startswith("error: ")]
        return errors[-1] if errors else f"error: exit code {self.code}; see {_short(log)}"


class RanksLauncher(Launcher):
    """Runs the jobs one after another; one that fails does not stop the others."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context = hydra_context
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Returns one JobReturn per job, its value the validation loss.

        The first failed one carries SystemExit(1): Hydra raises it after the last job, without a traceback.
        """
        from sidestream.config.errors import ConfigError
        from sidestream.launch import torchrun
        from sidestream.launch.processes import Signals

        if torchrun.active():
            why = "a sweep starts the ranks of each job itself"
            raise ConfigError("-m", "", why, expected="no torchrun", fix="run without torchrun")
        pairs = [self._job(list(overrides), initial_job_idx + n) for n, overrides in enumerate(job_overrides)]
        common = set.intersection(*(set(job.overrides) for job, _ in pairs)) if len(pairs) > 1 else set()
        for job, _ in pairs:
            job.label = " ".join(part for part in job.overrides if part not in common)
        print(f"{len(pairs)} jobs in {_short(Path(self.config.hydra.sweep.dir))}", flush=True)
        with Signals() as signals:
            for job, _ in pairs:
                if signals.received:
                    break
                print(f"#{job.number:<3} starts      {_short(job.folder)}/stdout.log", flush=True)
                self._run(job, signals)
                print(job.line(), flush=True)
        _summarise([job for job, _ in pairs])
        stopped = 128 + signals.received[0] if signals.received else 1
        return [_job_return(job, config, stopped) for job, config in pairs]

    def _job(self, overrides: list[str], number: int) -> tuple[Job, DictConfig]:
        config = self.context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(number), number
        HydraConfig.instance().set_config(config)
        folder = (Path(config.hydra.sweep.dir) / str(config.hydra.sweep.subdir)).absolute()
        return Job(number, folder, list(config.hydra.overrides.task)), config

    def _run(self, job: Job, signals: "Signals") -> None:  # type: ignore[name-defined] # noqa: F821
        from sidestream.launch import processes

        environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
        environment[processes.PARENT] = str(os.getpid())
        job.folder.mkdir(parents=True, exist_ok=True)
        started, forwarded = time.monotonic(), 0
        with (job.folder / "stdout.log").open("ab") as log:
            process = subprocess.Popen(
                self._command(job),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while process.poll() is None:
                    for number in signals.received[forwarded:]:
                        processes.send(process, number)
                        forwarded += 1
                    time.sleep(0.05)
            finally:
                processes.kill_group(process)
        job.code, job.seconds = process.returncode, time.monotonic() - started
        result = job.folder / "result.json"
        if result.exists():
            job.result = json.loads(result.read_text(encoding="utf-8"))

    def _command(self, job: Job) -> list[str]:
        from sidestream.launch import arguments

        hydra = [part for part in self.config.hydra.overrides.hydra if not part.startswith(_OF_THE_SWEEP)]
        return [
            sys.executable,
            arguments.script(),
            *arguments.config_flags(sys.argv[1:]),
            *job.overrides,
            *hydra,
            "hydra.mode=RUN",
            f"hydra.run.dir={arguments.quoted(job.folder)}",
        ]


def _summarise(jobs: list[Job]) -> None:
    failed = [job for job in jobs if job.state == "FAILED"]
    print(f"\nfinished jobs: {sum(job.code == 0 for job in jobs)} of {len(jobs)}", flush=True)
    print(*(job.line() for job in jobs), sep="\n", flush=True)
    for job in failed:
        print(f"error: job #{job.number} ({_short(job.folder)}): {job.reason()[7:]}", file=sys.stderr)


def _job_return(job: Job, config: DictConfig, code: int) -> JobReturn:
    returned = JobReturn(overrides=job.overrides, cfg=config, hydra_cfg=config, working_dir=str(job.folder))
    returned.status = JobStatus.COMPLETED if job.code == 0 else JobStatus.FAILED
    returned.return_value = job.val_loss if job.code == 0 else SystemExit(code)
    return returned


def _short(path: Path) -> str:
    return os.path.relpath(path)
