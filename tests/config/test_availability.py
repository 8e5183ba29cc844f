"""What runs on which machine, in which words, and that the check of a config says the same."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from sidestream import build
from sidestream.config import availability, devices, dispatch_check
from sidestream.config.availability import LIBRARIES, Availability, Machine, takes_library, verdict
from sidestream.config.capabilities import CAPABILITIES, capabilities
from sidestream.config.compatibility import check
from sidestream.config.dispatch_check import LIMITS
from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.dispatch.base import DispatchSpec, receive_budget
from tests.config import machines
from tests.config.machines import H100, MACHINES

Compose = Callable[..., DictConfig]
CONF = Path(__file__).parents[2] / "conf"
# A model that every library takes.
FITS = (
    "model.hidden_size=256",
    "trainer.precision=bf16-mixed",
    "data.seq_length=128",
)

COMPOSED: dict[tuple[str, ...], DictConfig] = {}  # composing takes most of the time here


def of(library: str, machine: Machine, **options: int) -> Availability:
    return verdict("dispatcher", library, transport="library", machine=machine, **options)


@pytest.fixture
def on(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that checks a config as if on another machine."""

    def check_there(machine: Machine, *overrides: str, **world: int) -> None:
        monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))
        if overrides not in COMPOSED:
            COMPOSED[overrides] = compose(*FITS, *overrides)
        check(COMPOSED[overrides], device_count=machine.gpus, **world)

    return check_there


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("machine", [machines.LAPTOP, machines.MAC, machines.A100])
def test_no_library_runs_without_a_hopper_gpu(library: str, machine: Machine):
    found = of(library, machine)
    assert not found.ok
    assert LIBRARIES[library].name in found.why
    assert (
        "on the CPU" if machine.gpus == 0 else "compute capability 9.0 or newer, these have 8.0"
    ) in found.why
    assert found.fix == "set dispatcher.transport=torch"


@pytest.mark.parametrize(
    ("library", "machine", "why", "fix"),
    [
        ("nccl_ep", "h100", "", ""),
        ("deep_ep", "h100", "", ""),
        ("hybrid_ep", "h100_hybrid", "", ""),
        ("nccl_ep", "unknown_gpu", "", ""),
        (
            "hybrid_ep",
            "h100",
            "deep_ep is DeepEP v2 and has no HybridEPBuffer",
            "run pip uninstall deep_ep && git",
        ),
        (
            "deep_ep",
            "h100_hybrid",
            "deep_ep is HybridEP and has no ElasticBuffer",
            "run pip uninstall deep_ep && ",
        ),
        ("deep_ep", "h100_placeholder", "is neither (the one on PyPI is a placeholder)", "./install.sh"),
        ("hybrid_ep", "h100_placeholder", "is neither (the one on PyPI is a placeholder)", "-b hybrid-ep"),
        (
            "nccl_ep",
            "h100_bare",
            "no module nccl.ep",
            'install nccl-extensions nccl4py && pip install --no-deps "',
        ),
        (
            "deep_ep",
            "h100_bare",
            "no module deep_ep",
            '"nvidia-nccl-cu13>=2.30.4" && git clone https://github.com',
        ),
        ("hybrid_ep", "h100_bare", "no module deep_ep", "git checkout 94a9f8f && TORCH_CUDA_ARCH_LIST="),
        (
            "nccl_ep",
            "h100_old_nccl",
            "needs NCCL 2.30.7 or newer, below 2.31, and nvidia-nccl-cu13 is 2.29.7",
            "2.30.7",
        ),
        (
            "nccl_ep",
            "h100_new_nccl",
            "and nvidia-nccl-cu13 is 2.31.0",
            '--no-deps "nvidia-nccl-cu13==2.30.7"',
        ),
        (
            "deep_ep",
            "h100_old_nccl",
            "needs NCCL 2.30.4 or newer, and",
            '--no-deps "nvidia-nccl-cu13>=2.30.4"',
        ),
        ("deep_ep", "h100_new_nccl", "", ""),
        ("hybrid_ep", "h100_old_nccl", "deep_ep is DeepEP v2", ""),
        (
            "nccl_ep",
            "h100_without_nvcc",
            "there is no nvcc",
            "set CUDA_HOME to a CUDA toolkit, or set dispatcher.",
        ),
        ("deep_ep", "h100_without_nvcc", "there is no nvcc", "set CUDA_HOME"),
        (
            "hybrid_ep",
            "one_h100",
            "needs 2 or more expert-parallel ranks, there is 1",
            "set dispatcher.transport",
        ),
    ],
)
def test_what_is_missing_is_named_with_what_helps(library: str, machine: str, why: str, fix: str):
    found = of(library, MACHINES[machine])
    assert found.ok == (why == "")
    assert why in found.why
    assert fix in found.fix
    # A double is not the library; the words must not sound like more than was tried.
    assert found.ok == ("only against a double" in found.why)
    assert found.ok or found.fix.endswith("set dispatcher.transport=torch")


def test_install_lines_name_the_cuda_version_that_is_here():
    found = of("nccl_ep", replace(machines.H100_BARE, nccl_wheel="nvidia-nccl-cu12"))
    assert "nvidia-nccl-cu12==2.30.7" in found.fix
    assert "cu13" not in found.fix


def test_a_compiler_may_be_named_in_a_variable_of_the_library():
    there = replace(machines.H100_WITHOUT_NVCC, nvcc_variables=frozenset({"EP_JIT_NVCC_COMPILER"}))
    assert of("deep_ep", there).ok
    assert not of("nccl_ep", there).ok


def test_the_group_counts_not_the_gpus_of_one_machine():
    assert of("hybrid_ep", machines.ONE_H100, ranks=2).ok
    assert not of("hybrid_ep", machines.H100_HYBRID, ranks=1).ok


@pytest.mark.parametrize("machine", MACHINES)
def test_everything_else_runs_everywhere(machine: str):
    for group in ("overlap", "fusion", "graph", "link", "strategy"):
        for path in (CONF / group).glob("*.yaml"):
            assert verdict(group, path.stem, machine=MACHINES[machine]).ok
    for path in (CONF / "dispatcher").glob("*.yaml"):
        assert verdict("dispatcher", path.stem, transport="torch", machine=MACHINES[machine]).ok


def test_grouped_products_that_read_on_the_host_say_so():
    assert verdict("fusion", "grouped", machine=machines.LAPTOP) == Availability(True)
    assert "compute capability 8.0" in verdict("fusion", "grouped", machine=machines.A100).why
    assert verdict("fusion", "grouped", machine=H100).fix == "set trainer.precision=bf16-mixed"


@pytest.mark.parametrize(
    ("wanted", "machine", "ranks", "takes"),
    [
        ("library", "laptop", 2, True),
        ("torch", "h100", 8, False),
        ("auto", "h100", 8, True),
        ("auto", "h100", 1, False),
        ("auto", "h100_bare", 8, False),
        ("auto", "a100", 8, True),  # and is then refused
        ("auto", "laptop", 2, False),
    ],
)
def test_auto_takes_what_can_be_imported(wanted: str, machine: str, ranks: int, takes: bool):
    assert takes_library(wanted, "nccl_ep", machine=MACHINES[machine], ranks=ranks) == takes


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_check_refuses_in_the_words_of_the_verdict(on: Callable[..., None], library: str, machine: str):
    there = MACHINES[machine]
    ranks = there.gpus or 2
    found = of(library, there, ranks=ranks)
    overrides = (f"dispatcher={library}", "dispatcher.transport=library")
    if found.ok:
        on(there, *overrides)
        return
    with pytest.raises(ConfigError) as refused:
        on(there, *overrides)
    assert str(refused.value).startswith(f"dispatcher.transport=library: {found.why}; expected ")
    assert str(refused.value).endswith(f"; {found.fix}")
    on(there, f"dispatcher={library}", "dispatcher.transport=torch")


def test_auto_is_refused_where_it_would_take_what_does_not_run(on: Callable[..., None]):
    for machine in (machines.A100, machines.H100_WITHOUT_NVCC, machines.H100_HYBRID):
        with pytest.raises(ConfigError, match=r"^dispatcher\.transport=auto: .*expected torch here; "):
            on(machine, "dispatcher=deep_ep")
    for machine in (machines.LAPTOP, machines.H100_BARE, H100):
        on(machine, "dispatcher=deep_ep")


def test_a_cpu_run_on_a_gpu_machine_calls_no_library(on: Callable[..., None]):
    on(H100, "dispatcher=nccl_ep", "trainer.accelerator=cpu")
    with pytest.raises(ConfigError, match="the ranks are on the CPU"):
        on(H100, "dispatcher=nccl_ep", "dispatcher.transport=library", "trainer.accelerator=cpu")


def test_a_machine_is_looked_at_only_where_it_matters(compose: Compose, monkeypatch: pytest.MonkeyPatch):
    def looked(cls: type) -> Machine:
        raise AssertionError("looked")

    monkeypatch.setattr(Machine, "here", classmethod(looked))
    check(compose("dispatcher=nccl_ep"), device_count=0)
    check(compose("dispatcher=alltoall"), device_count=4)


def test_every_class_of_the_group_declares_what_it_can(compose: Compose):
    for path in (CONF / "dispatcher").glob("*.yaml"):
        node = compose(f"dispatcher={path.stem}").dispatcher
        assert node._target_ in CAPABILITIES, path.stem
        can = capabilities(node)
        assert (can.library is not None) == ("transport" in node), path.stem
        assert can.static == ("capacity_factor" in node), path.stem
        assert can.host_reads_eager is not None
        assert can.static == (can.host_reads_static == 0)
        assert can.library in (None, path.stem)
    assert LIMITS.keys() == LIBRARIES.keys()


@pytest.mark.parametrize("target", [target for target, can in CAPABILITIES.items() if can.library])
def test_the_check_looks_for_the_module_that_the_dispatcher_calls(target: str):
    assert get_class(target).module == LIBRARIES[CAPABILITIES[target].library].module


def test_a_users_own_class_is_taken_to_do_everything():
    own = capabilities(OmegaConf.create({"_target_": "my_pkg.Mine"}))
    assert own.static and own.asynchronous and own.host_reads_eager is None


@pytest.mark.parametrize("schedule", sorted(path.stem for path in (CONF / "overlap").glob("*.yaml")))
@pytest.mark.parametrize(
    "overrides", [(), ("router.expert_capacity_factor=1.1", "router.pad_to_capacity=true")]
)
def test_tokens_are_counted_as_the_schedule_counts_them(compose: Compose, schedule: str, overrides: tuple):
    odd = ("data.global_batch_size=3", "data.seq_length=25", "trainer.devices=1")
    cfg = compose(f"overlap={schedule}", *odd, *overrides)
    layout = Layout(1, 1, 1, 1, micro_batch_size=3, accumulation=1, device_type="cpu")
    padding = build.padding_rows(cfg, 75)
    assert bool(padding) == bool(overrides)
    wanted = build.make_schedule(cfg).tokens_per_plan(3, 25, padding=padding)
    assert dispatch_check.max_tokens(cfg, layout) == wanted


@pytest.mark.parametrize("factor", [0.1, 1.1, 1.5, 2])
@pytest.mark.parametrize(("alignment", "of_experts"), [(1, "auto"), (128, "auto"), (8, 96)])
def test_the_budget_is_that_of_the_dispatchers(factor: float, alignment: int, of_experts: int | str):
    cfg = OmegaConf.create(
        {
            "dispatcher": {"capacity_factor": factor, "alignment": alignment},
            "fusion": {"alignment": of_experts},
            "router": {"top_k": 3},
        }
    )
    spec = DispatchSpec(num_experts=8, hidden_size=8, max_tokens=1000, top_k=3)
    unit = {("auto", 1): 1, ("auto", 128): 128, (96, 8): 96}[of_experts, alignment]
    assert dispatch_check.receive_budget(cfg, 1000) == receive_budget(factor, spec, alignment=unit)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Returns a function that writes a module which can be found but not imported; no other can be found."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    before = set(sys.modules)

    def write(name: str, body: str = "") -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{body}\nraise ImportError('no GPU')\n")
        importlib.invalidate_caches()

    yield write
    new = set(sys.modules) - before
    assert not {"deep_ep", "nccl.ep"} & new
    for name in new & {"nccl"}:  # the folder around, which holds no code
        del sys.modules[name]


def test_the_two_libraries_of_one_name_are_told_apart_by_their_text(packages: Callable[..., None]):
    assert availability._found() == frozenset()
    packages("deep_ep/__init__.py", "from .buffer import Buffer")
    assert availability._found() == {"deep_ep"}
    packages("deep_ep/hybrid_ep_buffer.py", "class HybridEPBuffer:  # unlike ElasticBuffer\n    pass")
    assert availability._found() == {"deep_ep", "deep_ep.HybridEPBuffer"}
    packages("deep_ep/hybrid_ep_buffer.py")
    packages("deep_ep/__init__.py", "from .buffers.elastic import ElasticBuffer, EPHandle")
    assert availability._found() == {"deep_ep", "deep_ep.ElasticBuffer"}
    packages("nccl/ep/__init__.py")
    packages("nccl/core.py")
    assert {"nccl.ep", "nccl.core"} < availability._found()


@pytest.fixture
def no_gpu_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The number of GPUs is counted anew, and again after the test; the user's variables are not there."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NVCC", "NCCL_EP_JIT_NVCC", "EP_JIT_NVCC_COMPILER"):
        monkeypatch.delenv(name, raising=False)
    devices._installed.cache_clear()
    yield
    devices._installed.cache_clear()


SMI = """#!/bin/sh
if [ "$1" = -L ]; then printf 'GPU 0: x\\nGPU 1: x\\n'; else printf '%s'; fi
"""


@pytest.mark.usefixtures("no_gpu_known")
@pytest.mark.parametrize(
    ("printed", "names", "capability"),
    [
        ("NVIDIA H100, 9.0\\nNVIDIA H100, 9.0\\n", ("NVIDIA H100",), (9, 0)),
        ("NVIDIA H100, 9.0\\nNVIDIA T400, 7.5\\n", ("NVIDIA H100", "NVIDIA T400"), None),
        ("NVIDIA GB300, 10.3\\n", ("NVIDIA GB300",), (10, 3)),
        ("NVIDIA Old, [N/A]\\n", ("NVIDIA Old",), None),
        ("", (), None),
    ],
)
def test_gpus_and_compilers_are_found(
    printed: str, names: tuple, capability: tuple | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, body in (("nvidia-smi", SMI % printed), ("toolkit/bin/nvcc", "")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(body)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    here = Machine.here()
    assert (here.device_type, here.gpus, here.gpu_names, here.capability) == ("cuda", 2, names, capability)
    assert here.nvcc is None
    monkeypatch.setenv("EP_JIT_NVCC_COMPILER", str(tmp_path / "toolkit" / "bin" / "nvcc"))
    monkeypatch.setenv("NVCC", "/not/there")
    assert Machine.here().nvcc_variables == {"EP_JIT_NVCC_COMPILER"}
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert Machine.here().nvcc == str(tmp_path / "toolkit" / "bin" / "nvcc")


def test_here_knows_torch_without_importing_it():
    code = (
        "import sys; from sidestream.config.availability import Machine; machine = Machine.here(); "
        "assert 'torch' not in sys.modules; print(machine.torch)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == torch.__version__
