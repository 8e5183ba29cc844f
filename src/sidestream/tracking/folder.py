"""A run folder: metrics, expert load, result.json and env.json, written so that a crash leaves whole files."""

import dataclasses
import importlib.metadata
import json
import math
import numbers
import os
import platform
import stat
import subprocess
import sys
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sidestream.tracking.names import STEP
from sidestream.tracking.untrusted import Unreadable, printable, read_json, read_records

PACKAGES = ("torch", "lightning", "hydra-core", "omegaconf", "wandb", "numpy")
# What env.json keeps of the environment: settings that change speed or numbers, by name. Run folders get shared, and
# any variable that is not known may hold a secret.
ENVIRONMENT = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_LOGS",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
)


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file in UTF-8, see `write_bytes_atomic`."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file so that readers see the old or the new content, never a part.

    The new content is on the disk before it gets the name, so this also holds for a power failure.

    Raises:
        OSError: the folder is missing or cannot be written; the old file is untouched.
    """
    path = Path(path)
    # In the same folder: a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json_atomic(path: str | os.PathLike[str], obj: Any) -> None:
    """Writes `obj` as indented JSON, see `to_plain` for what is accepted.

    Raises:
        TypeError: `obj` holds something JSON has no form for; the old file is untouched.
    """
    write_text_atomic(path, json.dumps(to_plain(obj), indent=2, allow_nan=False) + "\n")


def to_plain(value: Any) -> Any:
    """Turns dataclasses, paths, tuples and NumPy numbers into JSON types; NaN and infinities become None.

    Tensors are refused: turning one into a number waits for the device, which the caller should see.

    Raises:
        TypeError: a value, or a key of a mapping, that has no JSON form.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"JSON keys are strings; got {key!r}")
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    raise TypeError(f"no JSON form for {type(value).__name__}: {value!r}")


def sync_folder(folder: Path) -> None:
    """Makes a rename durable. Folders cannot be opened on Windows, which has no equivalent."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RunFolder:
    """The files of one run. Only rank 0 may write.

    Anybody may have written what is read: what can be read is, and the rest is told.

    Args:
        path: the folder; it is made if it does not exist.
        tell: Takes a printable line per file of which something was skipped; default: shown on stderr.
    """

    def __init__(self, path: str | os.PathLike[str], *, tell: Callable[[str], None] | None = None) -> None:
        self.path = Path(path)
        self._tell = tell or _warn
        self.path.mkdir(parents=True, exist_ok=True)
        self.metrics_path = self.path / "metrics.jsonl"
        self.expert_load_path = self.path / "expert_load.jsonl"
        self.result_path = self.path / "result.json"
        self.env_path = self.path / "env.json"

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Appends one line. A crash leaves at most an unfinished last line, which the next append removes.

        Raises:
            TypeError: see `to_plain`.
        """
        _append_line(self.metrics_path, record)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Returns the records in the order they were written, without an unfinished last line.

        Records have a step; lines that are none are skipped.

        Raises:
            Unreadable: the file is there, but no file of a run.
        """
        return self._read_lines(self.metrics_path)

    def append_expert_load(self, record: dict[str, Any]) -> None:
        """Appends a record of `sidestream.tracking.expert_load`, as safely as `append_metrics`."""
        _append_line(self.expert_load_path, record)

    def read_expert_load(self) -> list[dict[str, Any]]:
        """Returns what `append_expert_load` wrote, like `read_metrics`."""
        return self._read_lines(self.expert_load_path)

    def _read_lines(self, path: Path) -> list[dict[str, Any]]:
        if not os.path.lexists(path):
            return []
        records, skipped = read_records(path, inside=self.path)
        if skipped:
            self._tell(skipped)
        whole = [record for record in records if is_count(record.get(STEP))]
        if len(whole) < len(records):
            self._tell(f"{printable(path)}: skipped records without a step: {len(records) - len(whole)}")
        return whole

    def cut_metrics(self, step: int) -> None:
        """Atomically drops every record of a step after `step`, so that a resumed run logs each step once."""
        for path in (self.metrics_path, self.expert_load_path):
            if path.exists():
                kept = [record for record in self._read_lines(path) if record[STEP] <= step]
                write_text_atomic(path, "".join(json.dumps(record) + "\n" for record in kept))

    def write_env(self, *, command: list[str] | None = None) -> dict[str, Any]:
        """Writes env.json: what ran, where, and with which versions.

        A resumed run keeps what the earlier starts wrote under `previous`.

        Args:
            command: what the user typed; default `sys.argv` of this process.
        """
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        commit, dirty = code_state()
        env: dict[str, Any] = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": list(sys.argv) if command is None else command,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpu": cpu_model(),
            "cpu_count": os.cpu_count(),
            "versions": package_versions(),
            "commit": commit,
            "dirty": dirty,
            "environment": dict(sorted(environment.items())),
            "previous": [],
        }
        if (earlier := self._read(self.env_path)) is not None:
            before = earlier.pop("previous", [])
            env["previous"] = [*(before if isinstance(before, list) else []), earlier]
        write_json_atomic(self.env_path, env)
        return env

    def write_result(self, result: dict[str, Any]) -> None:
        """Writes result.json, see `sidestream.tracking.result` for its keys."""
        write_json_atomic(self.result_path, result)

    def read_result(self) -> dict[str, Any] | None:
        """Returns result.json, or None if the run has not written one that can be read."""
        return self._read(self.result_path)

    def _read(self, path: Path) -> dict[str, Any] | None:
        if not os.path.lexists(path):
            return None
        try:
            return read_json(path, inside=self.path)
        except Unreadable as error:
            self._tell(str(error))
            return None


def is_count(value: object) -> bool:
    """Whether a value that was read is a number of steps or tokens."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def is_figure(value: object) -> bool:
    """Whether a value that was read is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)


def _append_line(path: Path, record: dict[str, Any]) -> None:
    line = json.dumps(to_plain(record), allow_nan=False).encode() + b"\n"
    # In a folder that somebody else prepared the name may lead to another file, or to a pipe.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(path, "a+b", opener=lambda name, _: os.open(name, flags, 0o666)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Unreadable(f"{printable(path)}: not a regular file")
        _drop_unfinished_line(file)
        file.write(line)


def _drop_unfinished_line(file: Any) -> None:
    """Cuts what a crash left behind the last newline of a binary file opened for appending."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)


def package_versions() -> dict[str, str | None]:
    """Returns the installed version of each of `PACKAGES`, None for one that is not installed."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def code_state() -> tuple[str | None, bool | None]:
    """Returns (commit, has uncommitted changes) of the code that runs, or (None, None) outside a checkout."""
    here = Path(__file__).resolve()
    # An environment in somebody's repository lies in a checkout too, but not in one of this code.
    if _git(here, "ls-files", "--error-unmatch", here.name) is None:
        return None, None
    commit = _git(here, "rev-parse", "HEAD")
    status = _git(here, "status", "--porcelain", "--untracked-files=no")
    return commit, None if commit is None or status is None else bool(status)


def _git(file: Path, *arguments: str) -> str | None:
    """Output of a git command run beside `file`, None if it fails, hangs or there is no git."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=file.parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
            # Without this `status` rewrites the index and may collide with a git command of the user.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def cpu_model() -> str | None:
    """Returns the marketing name of the processor, None where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        try:
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(
                command, capture_output=True, text=True, timeout=5, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return platform.processor() or None
