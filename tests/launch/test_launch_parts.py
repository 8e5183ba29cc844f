"""Parts of the launcher that need no process."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from hydra_plugins.sidestream_launcher.ranks_launcher import _job_return
from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.launch import (
    arguments,
    entry,
    failures,
    phase,
    processes,
    resume,
    stopping,
    supervisor,
    torchrun,
    worker,
)
from sidestream.launch.failures import Failure
from sidestream.launch.processes import Signals
from sidestream.launch.record import RESOLVED, Launch
from sidestream.tracking.folder import RunFolder
from sidestream.tracking.sweep import Job
from tests.fake_checkpoint import make_checkpoint

LAYOUT = Layout(2, 2, 2, 1, 4, 1, "cpu")


def make_run(folder: Path, *overrides: str, flags: tuple[str, ...] = (), checkpoint: bool = True) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    Launch("python train.py", list(overrides), list(flags), {"model": "tiny"}, LAYOUT).save(folder)
    if checkpoint:
        make_checkpoint(folder / "checkpoints" / "step-00000001")
    return folder


def test_resume_keeps_saved_overrides_and_lets_the_users_win(tmp_path: Path):
    run = make_run(tmp_path / "run", "model=small", "optimizer.lr=0.1", "+router.x=1")
    assert resume.rewrite([f"resume={run}", "optimizer.lr=0.2"]) == [
        "model=small",
        "+router.x=1",
        "optimizer.lr=0.2",
        f"resume='{run}'",
        f"hydra.run.dir='{run}'",
        "hydra.output_subdir=.hydra/resume",
    ]


def test_a_resume_with_another_option_leaves_behind_what_only_the_earlier_one_has(tmp_path: Path):
    saved = [
        "scheduler.warmup_steps=9",
        "scheduler.decay_fraction=0.1",
        "optimizer.lr=0.1",
        "model.head_dim=8",
    ]
    run = make_run(tmp_path / "run", *saved)
    there = resume.rewrite([f"resume={run}", "scheduler=constant", "model=small"])[:-3]
    assert there == [saved[0], *saved[2:], "scheduler=constant", "model=small"]


def test_a_refused_option_is_named_as_it_is_typed(tmp_path: Path):
    run = make_run(tmp_path / "run")
    old = {"trainer": {"max_steps": 5}, "model": {"_target_": "a"}}
    OmegaConf.save(OmegaConf.create(old), run / RESOLVED)
    with pytest.raises(ConfigError, match=r"set model=tiny$"):
        resume.check_changes(run, new={**old, "model": {"_target_": "b"}}, layout=LAYOUT)


def test_resume_finds_the_users_own_options_again(tmp_path: Path):
    run = make_run(tmp_path / "run", "router=mine", flags=("--config-dir", "/my conf"))
    with pytest.raises(ConfigError, match="run with --config-dir '/my conf' if you trust it"):
        resume.rewrite([f"resume={run}"])
    other = resume.rewrite(["-cd", "/other", f"resume={run}"])
    assert other[:3] == ["-cd", "/other", "router=mine"]


@pytest.mark.parametrize("argv", [["seed=1"], ["resume=null", "seed=1"], ["--help"]])
def test_without_resume_the_command_line_stays(argv: list[str]):
    assert resume.rewrite(argv) == argv


@pytest.mark.parametrize(
    ("prepare", "flags", "why"),
    [
        (lambda folder: None, [], "there is no such folder"),
        (lambda folder: folder.mkdir(), [], "no run was started in this folder"),
        (lambda folder: make_run(folder, checkpoint=False), [], "no checkpoint yet"),
        (make_run, ["-m"], "a sweep starts new runs"),
    ],
)
def test_resume_of_something_else_is_one_clear_line(tmp_path: Path, prepare, flags: list[str], why: str):
    prepare(tmp_path / "run")
    with pytest.raises(ConfigError, match=why):
        resume.rewrite([*flags, f"resume={tmp_path / 'run'}"])


@pytest.mark.parametrize(
    ("key", "refused"),
    [
        ("model.num_layers", True),
        ("router.top_k", True),
        ("balance.coefficient", True),
        ("data.global_batch_size", True),
        ("seed", True),
        ("data.micro_batch_size", False),
        ("data.cache_dir", False),
        ("optimizer.lr", False),
    ],
)
def test_resume_refuses_another_model_or_data(tmp_path: Path, key: str, refused: bool):
    run = make_run(tmp_path / "run")
    old = OmegaConf.create({"trainer": {"max_steps": 5}})
    OmegaConf.update(old, key, 1, force_add=True)
    OmegaConf.save(old, run / RESOLVED)
    OmegaConf.update(old, key, 2)
    new = OmegaConf.to_container(old)
    if refused:
        with pytest.raises(ConfigError, match=f"^{key}=2: was 1"):
            resume.check_changes(run, new=new, layout=LAYOUT)
    else:
        assert resume.check_changes(run, new=new, layout=LAYOUT) == [f"resume: {key} 1 -> 2"]


@pytest.mark.parametrize(
    ("schedule", "warmup", "steps", "said"),
    [
        ("WSD", 2, (5, 9), True),
        ("Constant", 2, (5, 9), False),
        ("Constant", "auto", (20, 40), True),  # the warm-up is 2 steps, then 4
        ("Constant", "auto", (500, 900), False),  # 50 at most
    ],
)
def test_resume_says_when_more_steps_change_the_learning_rate(
    tmp_path: Path, schedule: str, warmup: int | str, steps: tuple[int, int], said: bool
):
    run = make_run(tmp_path / "run")
    config = {
        "trainer": {"max_steps": steps[0]},
        "scheduler": {"_target_": f"sidestream.lightning.schedules.{schedule}", "warmup_steps": warmup},
    }
    OmegaConf.save(OmegaConf.create(config), run / RESOLVED)
    config["trainer"] = {"max_steps": steps[1]}
    lines = resume.check_changes(run, new=config, layout=LAYOUT)
    assert any("bit-identical" in line for line in lines) == said


def test_a_run_that_has_all_its_steps_is_not_started_again(tmp_path: Path):
    """Nothing would be trained, and result.json would lose what the run reached."""
    run = make_run(tmp_path / "run")
    make_checkpoint(run / "checkpoints" / "step-00000005")
    (run / "result.json").write_text('{"status": "finished"}')
    config = {"trainer": {"max_steps": 5}, "scheduler": {"_target_": "x.Constant"}}
    OmegaConf.save(OmegaConf.create(config), run / RESOLVED)
    with pytest.raises(ConfigError, match=r"^trainer\.max_steps=5: the run has 5 steps already"):
        resume.check_changes(run, new=config, layout=LAYOUT)


def test_every_resume_keeps_the_earlier_configs(tmp_path: Path):
    (tmp_path / ".hydra").mkdir()
    for content in ("first", "second"):
        (tmp_path / RESOLVED).write_text(content)
        resume.keep_previous(tmp_path)
    assert (tmp_path / ".hydra/resolved.0.yaml").read_text() == "first"
    assert (tmp_path / ".hydra/resolved.1.yaml").read_text() == "second"


def test_only_one_of_two_runs_gets_a_folder(tmp_path: Path):
    (tmp_path / "stdout.log").touch()  # a sweep's
    entry._claim(tmp_path)
    with pytest.raises(ConfigError, match="another run wrote in this folder"):
        entry._claim(tmp_path)


@pytest.mark.parametrize("text", ["a=b,c d", "it's", "/x/[1]{2}", "plain"])
def test_a_folder_survives_hydras_grammar(text: str):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    override = OverridesParser.create().parse_override(f"hydra.run.dir={arguments.quoted(text)}")
    assert override.value() == text
    assert arguments.value_of(f"x={arguments.quoted(text)}") == text


def test_folders_of_jobs_hold_no_special_characters():
    label = arguments.job_label(
        ["router.top_k=2", "optimizer.betas=[0.9,0.95]", "data.root='/a b/c'", "name=x"]
    )
    assert label == "top_k-2_betas--0.9-0.95-_root--a-b-c"


def test_the_cause_is_the_earliest_failure_that_follows_no_other():
    lost = Failure(0, 1.0, "RuntimeError: [gloo/transport] Connection reset by peer")
    late = Failure(1, 2.0, "ValueError: the cause")
    later = Failure(2, 3.0, "ValueError: another")
    assert failures.cause([later, lost, late]) is late
    assert failures.cause([lost]) is lost


@pytest.mark.parametrize(
    ("codes", "killed", "received", "exit_code"),
    [
        ((0, 0), (), [], 0),
        ((0, 0), (), [signal.SIGTERM], 0),  # finished just then
        ((143, 143), (), [signal.SIGTERM], 143),
        ((130, 130), (), [signal.SIGINT], 130),
        ((143, 143), (), [], 143),  # somebody asked one rank; they agreed
        ((143, -15), (), [], 143),  # a rank was asked before it could listen
        ((-9, -9), (0, 1), [signal.SIGINT, signal.SIGINT], 130),
        ((143, -9), (1,), [signal.SIGTERM], 143),
        ((-9, 143), (), [signal.SIGTERM], 1),  # killed, but not by us
        ((3, 0), (), [], 1),
    ],
)
def test_exit_code_of_a_run(
    tmp_path: Path,
    codes: tuple[int, int],
    killed: tuple[int, ...],
    received: list[int],
    exit_code: int,
):
    ranks = [
        supervisor.RankProcess(number, process=None, returncode=code, killed=number in killed)
        for number, code in enumerate(codes)
    ]
    signals = Signals()
    signals.received.extend(received)
    assert supervisor._conclude(tmp_path, ranks, signals, debug=False) == exit_code
    status = RunFolder(tmp_path).read_result()
    if exit_code == 1:
        assert status["status"] == "failed"
    elif killed:
        assert status["status"] == "interrupted"


def test_config_errors_of_a_rank_exit_with_2_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    error = ConfigError("a.b", 1, "wrong", expected="2", fix="a.b=2")
    failure = failures.record(tmp_path, rank=0, error=error)
    assert failures.report(tmp_path, failure, world_size=2) == 2
    assert capsys.readouterr().err == "error: a.b=1: wrong; expected 2; set a.b=2\n"


def test_what_a_rank_says_is_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture):
    failure = failures.record(tmp_path, rank=0, error=ValueError("a file says \x1b[2J"))
    assert failures.report(tmp_path, failure, world_size=2) == 1
    shown = capsys.readouterr().err
    assert "\x1b" not in shown and shown.count("a file says \\x1b[2J") == 2


@pytest.fixture
def own_handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, processes.AT_ONCE)
    previous = [signal.getsignal(number) for number in numbers]
    monkeypatch.setattr(stopping, "_received", None)
    yield
    phase.enter(phase.STARTING)
    for number, handler in zip(numbers, previous):
        signal.signal(number, handler)


@pytest.mark.parametrize("name", [phase.TRAINING, phase.VALIDATING, phase.SAVING, phase.FINISHING])
def test_requests_to_stop_only_set_a_flag_however_many_come(own_handlers: None, name: str):
    phase.enter(name)
    stopping.install()
    assert stopping.requested() is None
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
    assert stopping.requested() == signal.SIGINT


def test_a_request_while_a_rank_leaves_changes_nothing():
    """Also in the last moments of the interpreter, which has no handlers any more: the run has finished."""
    code = (
        "import atexit, os, signal\n"
        "from sidestream.launch import stopping\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, 15); kill(pid, 2)\n"
        "stopping.install(); stopping.ignore()\n"
        "os.last = Last(); raise SystemExit(0)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


@pytest.mark.parametrize("name", phase.BEFORE_TRAINING)
def test_before_the_first_step_a_request_ends_at_once(own_handlers: None, name: str):
    phase.enter(name)
    stopping.install()
    with pytest.raises(stopping.Stop):
        signal.raise_signal(signal.SIGTERM)
    assert stopping.requested() == signal.SIGTERM
    signal.raise_signal(signal.SIGTERM)  # while it ends


@pytest.mark.parametrize(
    ("child", "times", "received"),
    [
        (False, [0.0, 0.0], 1),  # a process group's, and the same one passed on
        (False, [0.0, 0.9], 1),
        (False, [0.0, 1.5], 2),
        (True, [0.0, 1.5, 9.0], 1),  # its parent has its own way to say: at once
    ],
)
def test_signals_that_come_together_are_one_request(
    own_handlers: None, monkeypatch: pytest.MonkeyPatch, child: bool, times: list[float], received: int
):
    monkeypatch.setattr(processes, "_is_child", child)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with processes.Signals() as signals:
        for clock.now in times:
            signal.raise_signal(signal.SIGTERM)
        assert len(signals.received) == received
        signal.raise_signal(processes.AT_ONCE)
        assert len(signals.received) == 2
        assert signals.received[0] == signal.SIGTERM


def test_a_failed_job_carries_an_exit_code_and_a_finished_one_its_loss(tmp_path: Path):
    good = Job(0, tmp_path, ["a=1"], code=0, result={"metrics": {"val_loss": 1.5}})
    assert _job_return(good, OmegaConf.create(), 1).return_value == 1.5
    bad = _job_return(Job(1, tmp_path, ["a=2"], code=1), OmegaConf.create(), 1)
    with pytest.raises(SystemExit) as stop:
        _ = bad.return_value
    assert stop.value.code == 1


class FakeStore(dict):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def wait(self, keys: list[str], timeout: object) -> None:
        assert set(keys) <= set(self)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two torchrun ranks that meet in a dictionary; `become(rank)` turns this process into one of them."""
    trained: list[tuple[int, str]] = []

    def become(rank: int) -> None:
        values = (rank, 2, rank, 2, "localhost", 1)
        for name, value in zip(torchrun._VARIABLES, values):
            monkeypatch.setenv(name, str(value))

    def run_rank(cfg, *, layout, folder, env) -> int:
        trained.append((env.rank, str(folder)))
        return 0

    monkeypatch.setattr(torchrun, "store", FakeStore())
    monkeypatch.setattr(torchrun, "_published", False)
    monkeypatch.setattr(torchrun, "run_rank", run_rank)
    return SimpleNamespace(become=become, trained=trained)


def test_under_torchrun_all_ranks_get_rank_0s_folder(ranks: SimpleNamespace, tmp_path: Path):
    ranks.become(0)
    assert torchrun.lead(OmegaConf.create({"seed": 1}), layout=LAYOUT, folder=tmp_path) == 0
    torchrun.release()
    ranks.become(1)
    assert torchrun.follows()
    assert torchrun.follow() == 0
    assert ranks.trained == [(0, str(tmp_path)), (1, str(tmp_path))]


def test_under_torchrun_followers_end_quietly_when_rank_0_has_nothing_to_train(ranks: SimpleNamespace):
    torchrun.store[f"{torchrun._KEY}/read/1"] = "1"
    ranks.become(0)
    torchrun.release()
    assert json.loads(torchrun.store[torchrun._KEY]) == {}
    ranks.become(1)
    assert torchrun.follow() == 0
    assert ranks.trained == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="affinity is a Linux call")
def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch):
    pinned: list[list[int]] = []
    monkeypatch.setattr(worker, "available_cores", lambda: [2, 3, 6, 7])
    monkeypatch.setattr(worker.os, "sched_setaffinity", lambda pid, cores: pinned.append(cores))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    trainer = OmegaConf.create({"threads_per_rank": "auto", "pin_cpu": True})
    for rank in (0, 1):
        worker._use_cores(trainer, worker.RankEnv(rank, rank, 2, 2, "file:///x"))
    assert pinned == [[2, 3], [6, 7]]
    worker._use_cores(trainer, worker.RankEnv(0, 0, 8, 8, "file:///x"))  # more ranks than cores: no pinning
    assert len(pinned) == 2


def test_a_run_that_was_killed_behind_its_last_step_is_finished(tmp_path: Path):
    run = make_run(tmp_path / "run")
    make_checkpoint(run / "checkpoints" / "step-00000005")
    (run / "result.json").write_text('{"status": "running"}')
    config = {"trainer": {"max_steps": 5}, "scheduler": {"_target_": "x.Constant"}}
    OmegaConf.save(OmegaConf.create(config), run / RESOLVED)
    lines = resume.check_changes(run, new=config, layout=LAYOUT, done=5)
    assert lines == ["resume: all 5 steps are trained; what is missing behind the last one is done now"]


def test_what_killed_saves_left_goes_and_damaged_checkpoints_make_room(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    for name in (".step-3.partial", ".step-00000002.old", ".step-mine", "step-00000004", "step-00000008"):
        (folder / name).mkdir(parents=True)
    (folder / ".step-9.old").symlink_to(tmp_path)
    resume.clear_up(tmp_path, [folder / "step-00000008"])
    left = {path.name for path in folder.iterdir()}
    assert left == {".step-mine", ".step-9.old", "step-00000004", ".step-00000008.damaged-0"}
    (folder / "step-00000008").mkdir()
    resume.clear_up(tmp_path, [folder / "step-00000008"])
    assert (folder / ".step-00000008.damaged-1").is_dir()
