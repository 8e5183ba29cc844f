"""What a machine can run, and if not: why, and what helps. Imports neither torch nor the libraries it is about.

The check of a config and `scripts/doctor.py` ask the same function, `verdict`, so they say the same words.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from sidestream.config.devices import count_gpus

HOPPER = (9, 0)
TO_TORCH = "set dispatcher.transport=torch"


@dataclass(frozen=True)
class Library:
    """A library that moves rows between ranks, and what it needs of a machine.

    Attributes:
        name: The library's name as its authors write it.
        modules: What must be importable; the first is the library itself.
        symbol: Class that the package must have: two libraries install under one name.
        install: Commands that install it.
        nccl: Oldest version of NCCL; None if it does without.
        nccl_below: First version of NCCL that is too new.
        nccl_install: What to ask pip for.
        nvcc_variables: Environment variables that name the compiler, beside CUDA_HOME and PATH.
        min_ranks: Smallest expert-parallel group.
        host_reads_eager: See `capabilities.Capabilities`; in static mode the host reads nothing.
    """

    name: str
    modules: tuple[str, ...]
    install: str
    symbol: str | None = None
    nccl: tuple[int, ...] | None = None
    nccl_below: tuple[int, ...] | None = None
    nccl_install: str = ""
    nvcc_variables: tuple[str, ...] = ()
    min_ranks: int = 1
    host_reads_eager: int = 1

    @property
    def module(self) -> str:
        return self.modules[0]


# All three compile kernels with nvcc when they are first used, and need a Hopper GPU or newer.
# NCCL: torch 2.13 brings 2.29.7; torch loads it dynamically, so a newer wheel may be put in its place.
LIBRARIES = {
    "nccl_ep": Library(
        name="NCCL EP",
        modules=("nccl.ep", "nccl.core"),
        install='pip install nccl-extensions nccl4py && pip install --no-deps "{nccl}==2.30.7"',
        # The library is built against 2.30.7; another NCCL has led to illegal memory accesses.
        nccl=(2, 30, 7),
        nccl_below=(2, 31),
        nccl_install="{nccl}==2.30.7",
        nvcc_variables=("NCCL_EP_JIT_NVCC", "NVCC"),
        # The total is read to size the buffer, and dispatch itself waits once more.
        host_reads_eager=2,
    ),
    "deep_ep": Library(
        name="DeepEP v2",
        modules=("deep_ep",),
        symbol="ElasticBuffer",
        install='pip install --no-deps "{nccl}>=2.30.4" && git clone https://github.com/deepseek-ai/DeepEP && '
        "cd DeepEP && git checkout dd758ca && ./install.sh",
        nccl=(2, 30, 4),
        nccl_install="{nccl}>=2.30.4",
        nvcc_variables=("EP_JIT_NVCC_COMPILER",),
    ),
    "hybrid_ep": Library(
        name="HybridEP",
        modules=("deep_ep",),
        symbol="HybridEPBuffer",
        # The branch moves and its interface with it, hence a commit.
        install="git clone -b hybrid-ep https://github.com/deepseek-ai/DeepEP && cd DeepEP && "
        'git checkout 94a9f8f && TORCH_CUDA_ARCH_LIST="9.0 10.0" pip install --no-build-isolation .',
        min_ranks=2,
    ),
}


@dataclass(frozen=True)
class Machine:
    """What is known of a machine without starting anything on it.

    Attributes:
        device_type: Where the ranks compute: `cpu` or `cuda`.
        gpus: NVIDIA GPUs that torch would see.
        gpu_names: Names of the installed GPUs, without repetition.
        capability: Compute capability of the GPUs; None if unknown, or if they differ.
        modules: Of what `LIBRARIES` name, what is here: modules that can be imported, and `module.symbol` for
            classes found in their source text.
        nvcc: Path of the compiler that CUDA_HOME or PATH lead to.
        nvcc_variables: Environment variables that name another compiler which exists.
        nccl: Version of the NCCL wheel; None: no wheel, then torch's build decides.
        nccl_wheel: Name of that wheel, or of the one to install.
        platform: `sys.platform`.
        torch: Version of torch; None if it is not installed.
    """

    device_type: str = "cpu"
    gpus: int = 0
    gpu_names: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    modules: frozenset[str] = frozenset()
    nvcc: str | None = None
    nvcc_variables: frozenset[str] = frozenset()
    nccl: str | None = None
    nccl_wheel: str = "nvidia-nccl-cu13"
    platform: str = "linux"
    python: str = ""
    torch: str | None = None

    @classmethod
    def here(cls) -> "Machine":
        """Looks at this machine; imports no library and starts at most nvidia-smi."""
        gpus = count_gpus()
        names, capability = _gpu_models() if gpus else ((), None)
        wheel, nccl = _nccl()
        return cls(
            device_type="cuda" if gpus else "cpu",
            gpus=gpus,
            gpu_names=names,
            capability=capability,
            modules=_found(),
            nvcc=_nvcc(),
            nvcc_variables=frozenset(
                name
                for library in LIBRARIES.values()
                for name in library.nvcc_variables
                if shutil.which(os.environ.get(name, ""))
            ),
            nccl=nccl,
            nccl_wheel=wheel,
            platform=sys.platform,
            python=platform.python_version(),
            torch=_version("torch"),
        )

    @classmethod
    def with_everything(cls, *, gpus: int) -> "Machine":
        """A machine on which every library runs: what is asked is whether the layout suits it."""
        modules = {module for library in LIBRARIES.values() for module in library.modules}
        symbols = {f"{library.module}.{library.symbol}" for library in LIBRARIES.values() if library.symbol}
        return cls(device_type="cuda", gpus=gpus, modules=frozenset(modules | symbols), nvcc="nvcc")

    def on(self, device_type: str) -> "Machine":
        """Returns this machine with its ranks on another kind of device."""
        return replace(self, device_type=device_type)


@dataclass(frozen=True)
class Availability:
    """Whether an option runs on a machine.

    Attributes:
        why: Why not; of what runs, what is worth knowing, possibly nothing.
        fix: What helps, as an instruction (`set ...`, `run ...`); empty if there is nothing to do.
    """

    ok: bool
    why: str = ""
    fix: str = ""


def verdict(
    group: str, option: str, *, machine: Machine, transport: str | None = None, ranks: int | None = None
) -> Availability:
    """Says whether an option of a config group runs on a machine.

    Args:
        group: A config group, such as `dispatcher`.
        option: Its name; with `transport=library` a key of `LIBRARIES`.
        machine: What is there.
        transport: `library` or `torch`, of a dispatcher that has both.
        ranks: Size of the expert-parallel group; None: one rank per GPU of this machine.
    """
    if transport == "library":
        return _library(LIBRARIES[option], machine, machine.gpus if ranks is None else ranks)
    look = REMARKS.get((group, option))
    return Availability(True) if look is None else look(machine)


def takes_library(wanted: str, option: str, *, machine: Machine, ranks: int | None = None) -> bool:
    """Whether a dispatcher with `transport=wanted` calls its library: the rule of `dispatch.switch`, for one rank.

    `auto` takes what can be imported, even where it will then not run: that a slower transport takes the place of a
    library which was installed for the purpose should be the user's decision. On one rank nothing travels.
    """
    there = machine.device_type == "cuda" and LIBRARIES[option].module in machine.modules
    several = (machine.gpus if ranks is None else ranks) > 1
    return wanted == "library" or (wanted == "auto" and there and several)


def _library(library: Library, machine: Machine, ranks: int) -> Availability:
    refusal = (
        _hardware(library, machine, ranks)
        or _software(library, machine)
        or _nccl_version(library, machine)
        or _compiler(library, machine)
    )
    if refusal is not None:
        return refusal
    return Availability(
        True, "what it needs is here; this adapter ran only against a double of the library so far"
    )


def _hardware(library: Library, machine: Machine, ranks: int) -> Availability | None:
    if machine.device_type != "cuda":
        why = f"{library.name} moves rows between NVIDIA GPUs, and the ranks are on the CPU"
    elif not machine.platform.startswith("linux"):
        why = f"{library.name} exists for Linux only"
    elif machine.capability is not None and machine.capability < HOPPER:
        found, needed = (".".join(map(str, version)) for version in (machine.capability, HOPPER))
        why = f"{library.name} needs GPUs of compute capability {needed} or newer, these have {found}"
    elif ranks < library.min_ranks:
        why = f"{library.name} needs {library.min_ranks} or more expert-parallel ranks, there is {ranks}"
    else:
        return None
    return Availability(False, why, TO_TORCH)


def _software(library: Library, machine: Machine) -> Availability | None:
    install = library.install.format(nccl=machine.nccl_wheel)
    missing = [name for name in library.modules if name not in machine.modules]
    if missing:
        return _to_install(f"{library.name} is not installed: no module {missing[0]}", install)
    if library.symbol is None or f"{library.module}.{library.symbol}" in machine.modules:
        return None
    others = [
        other
        for other in LIBRARIES.values()
        if other.module == library.module and f"{other.module}.{other.symbol}" in machine.modules
    ]
    what = f"is {others[0].name}" if others else "is neither (the one on PyPI is a placeholder)"
    why = f"{library.module} {what} and has no {library.symbol}: {library.name} installs under the same name"
    return _to_install(why, f"pip uninstall {library.module} && {install}")


def _nccl_version(library: Library, machine: Machine) -> Availability | None:
    if library.nccl is None or machine.nccl is None:
        return None
    found = tuple(int(part) for part in re.findall(r"\d+", machine.nccl)[:3])
    too_new = library.nccl_below is not None and found >= library.nccl_below
    if found >= library.nccl and not too_new:
        return None
    limits = f"{_dotted(library.nccl)} or newer"
    if library.nccl_below is not None:
        limits += f", below {_dotted(library.nccl_below)}"
    why = f"{library.name} needs NCCL {limits}, and {machine.nccl_wheel} is {machine.nccl}"
    wanted = library.nccl_install.format(nccl=machine.nccl_wheel)
    return _to_install(why, f'pip install --no-deps "{wanted}"')


def _compiler(library: Library, machine: Machine) -> Availability | None:
    if machine.nvcc is not None or machine.nvcc_variables.intersection(library.nvcc_variables):
        return None
    why = f"{library.name} compiles its kernels when they are first used, and there is no nvcc"
    return Availability(False, why, f"set CUDA_HOME to a CUDA toolkit, or {TO_TORCH}")


def _to_install(why: str, commands: str) -> Availability:
    return Availability(False, why, f"run {commands}, or {TO_TORCH}")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _grouped(machine: Machine) -> Availability:
    """torch's grouped product has a kernel without a host read for bf16 from Hopper on, and a loop for the rest."""
    if machine.device_type != "cuda":
        return Availability(True)
    if machine.capability is not None and machine.capability < HOPPER:
        found = _dotted(machine.capability)
        return Availability(
            True, f"reads sizes on the host: compute capability {found}, the fast kernel needs 9.0"
        )
    return Availability(True, "without a host read for bf16 rows only", "set trainer.precision=bf16-mixed")


# Options that run everywhere need no row.
REMARKS: dict[tuple[str, str], Callable[[Machine], Availability]] = {("fusion", "grouped"): _grouped}


def _gpu_models() -> tuple[tuple[str, ...], tuple[int, int] | None]:
    """Returns (names, compute capability) of the installed GPUs."""
    command = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return (), None
    rows = [line.rpartition(",") for line in printed.splitlines() if "," in line]
    names = tuple(dict.fromkeys(name.strip() for name, _, _ in rows))
    versions = {
        found.groups() for _, _, text in rows if (found := re.fullmatch(r"(\d+)\.(\d+)", text.strip()))
    }
    if len(versions) != 1:
        return names, None
    ((major, minor),) = versions
    return names, (int(major), int(minor))


def _found() -> frozenset[str]:
    found = set()
    for library in LIBRARIES.values():
        found |= {name for name in library.modules if _folders(name) is not None}
        if library.symbol is not None and _defines(_folders(library.module) or (), library.symbol):
            found.add(f"{library.module}.{library.symbol}")
    return frozenset(found)


def _folders(module: str) -> list[str] | None:
    """Returns the folders of a package, [] of a plain module; None if it cannot be imported."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a parent is missing, or is no package
        return None
    return None if spec is None else list(spec.submodule_search_locations or ())


def _defines(folders: Iterable[str], symbol: str) -> bool:
    """Whether the source text of a package offers a class. Importing it would need a GPU."""
    exported, defined = re.compile(rf"\b{symbol}\b"), re.compile(rf"^class {symbol}\b", re.MULTILINE)
    for folder in map(Path, folders):
        for path in folder.rglob("*.py"):
            pattern = exported if path == folder / "__init__.py" else defined
            if pattern.search(path.read_text(encoding="utf-8", errors="ignore")):
                return True
    return False


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    at_home = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None
    return at_home or shutil.which("nvcc")


def _nccl() -> tuple[str, str | None]:
    """Returns (name, version) of the NCCL wheel."""
    for wheel in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        if (version := _version(wheel)) is not None:
            return wheel, version
    return "nvidia-nccl-cu13", None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
