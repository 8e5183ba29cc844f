"""`fusion.library=triton` under Triton's interpreter, over shared memory, against the layer in plain torch.

The interpreter runs the programs of a kernel one after another, so these tests say nothing about races inside one
rank; between ranks they are as real as processes are. That kernels compile for GPUs is checked without one.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sidestream.dispatch.base import DispatchSpec
from sidestream.fusion.mega.symmetric import DeviceMemory
from sidestream.fusion.mega.triton_library import TritonLibrary
from sidestream.fusion.mega.window_memory import PeerLost
from tests.fusion.triton_layer import Case, Run, close_pools, interpreted, reference

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(120),
]
LIMIT_S = 110.0  # several times what any needs alone: waiting ranks share cores with whoever else is there
# fp32: another order of the sums. bf16: gate and up, activation, row and result are cut to 8 bits one after another,
# and the interpreter truncates where a GPU rounds: each is up to 2^-7 too small.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.fixture(scope="module", autouse=True)
def _pools() -> Iterator[None]:
    yield
    close_pools()


def _library(case: Case, *, factor: float | None = None, alignment: int = 1) -> Any:
    library = TritonLibrary()
    group = dist.group.WORLD
    library.wire(group=group, spec=case.spec(alignment=alignment), capacity_factor=factor)
    return library


def _counters() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)


def _worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest error of each result, over the largest number in it; NaN counts as infinite."""
    errors = {}
    for name, value in found.items():
        off = (value.double() - expected[name]).abs().nan_to_num(nan=torch.inf)
        scale = expected[name].abs().max().clamp(min=1e-3) if value.numel() else 1.0
        errors[name] = float(off.max() / scale) if value.numel() else 0.0
    return errors


def _poison(library: Any) -> None:
    """What was never written must not be read."""
    at, item = library.layout, library.spec.dtype.itemsize
    library.memory.local(at.x, (at.size - at.x) // item, library.spec.dtype).fill_(torch.nan)
    for name, width in (("x", library.spec.hidden_size), ("dy", library.spec.hidden_size), ("act", 24)):
        library.buffer(name, library.slots, width).fill_(torch.nan)
    library.buffer("d_gate_up", library.slots, 48).fill_(torch.nan)
    dist.barrier()


def parity(rank: int, world: int, kinds: list[str], dtype: torch.dtype, recompute: bool) -> list[Any]:
    found = []
    library = None
    for kind in kinds:
        case = Case.of(kind, world, dtype=dtype)
        if library is None:
            library = _library(case, alignment=4)
            _poison(library)
        run = Run(library, case, rank, world, layer=1, recompute=recompute)
        results = {**run.forward(*_counters()), **run.backward()}
        found.append((kind, _worst(results, reference(case, rank, world))))
    library.close()
    return found


@pytest.mark.parametrize(
    ("world", "kinds", "dtype", "recompute"),
    [
        (1, ["skewed+missing", "starved"], torch.float32, False),
        (2, ["uniform", "starved", "skewed+missing+unequal"], torch.float32, False),
        (2, ["missing"], torch.float32, True),
        (2, ["skewed"], torch.bfloat16, False),
        (4, ["skewed+unequal"], torch.float32, False),
        pytest.param(2, ["skewed", "missing", "unequal"], torch.float32, False, marks=pytest.mark.full),
        pytest.param(4, ["uniform", "starved", "missing"], torch.bfloat16, True, marks=pytest.mark.full),
        pytest.param(4, ["uniform", "starved", "missing"], torch.float32, False, marks=pytest.mark.full),
        pytest.param(1, ["uniform"], torch.bfloat16, True, marks=pytest.mark.full),
    ],
)
def test_result_and_gradients(world: int, kinds: list[str], dtype: torch.dtype, recompute: bool) -> None:
    for rank, found in enumerate(
        interpreted(world).run(parity, limit_s=LIMIT_S, kinds=kinds, dtype=dtype, recompute=recompute)
    ):
        for kind, errors in found:
            assert all(error < TOLERANCE[dtype] for error in errors.values()), (rank, kind, errors)


def with_delays(rank: int, world: int) -> list[list[Tensor]]:
    """Three rounds of two plans in flight, each rank late at other places; other tokens in the steps between."""
    cases = [Case.of("uniform", world, seed=seed, tokens=16) for seed in (0, 1)]
    library = _library(cases[0])
    runs, launch = [], library.launch
    for round_ in range(3):
        late = random.Random(10 * rank + round_)

        def slow(*args: Any, late: random.Random = late, **sizes: Any) -> None:
            time.sleep(late.choice([0.0, 0.0, 0.02, 0.06]))
            launch(*args, **sizes)

        library.launch = slow
        first, second = (Run(library, case, rank, world, layer=0, recompute=round_ == 2) for case in cases)
        results = first.forward(*_counters()), second.forward(*_counters())
        results = *results, second.backward(), first.backward()
        runs.append([value for part in results for value in part.values()])
    library.close()
    return runs


def test_the_same_bits_whoever_is_late() -> None:
    """And with two plans in flight, and with a recomputation: step and area belong to nobody for long."""
    for first, *others in interpreted(2).run(with_delays, limit_s=LIMIT_S):
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other))


def late_rank(rank: int, world: int) -> list[dict[str, float]]:
    """One rank computes late, then the other: whoever does not wait for its tiles reads those of the last step."""
    found = []
    cases = [Case.of("uniform", world, seed=seed) for seed in range(4)]
    library = _library(cases[0])
    launch = library.launch
    for turn, case in enumerate(cases):

        def slow(kernel: str, *args: Any, turn: int = turn, **sizes: Any) -> None:
            if kernel in ("forward", "backward") and rank == turn % world:
                time.sleep(0.15)
            launch(kernel, *args, **sizes)

        library.launch = slow
        run = Run(library, case, rank, world, layer=0, recompute=False)
        results = {**run.forward(*_counters()), **run.backward()}
        found.append(_worst(results, reference(case, rank, world)))
    library.close()
    return found


def test_a_rank_that_computes_late_is_waited_for() -> None:
    for found in interpreted(2).run(late_rank, limit_s=LIMIT_S):
        for errors in found:
            assert max(errors.values()) < 1e-5, errors


def far_ahead(rank: int, world: int) -> list[dict[str, float]]:
    """Rank 0 has no routes and gets none: it waits for nobody, and rank 1 is slow to read what it announces."""
    alone, shared = (Case.of("uniform", world, seed=seed) for seed in (0, 1))
    alone.ids[0].fill_(-1)
    alone.ids[1] = torch.tensor([[2, 3, -1]]).expand(16, -1).contiguous()
    library = _library(alone)
    launch = library.launch

    # In these steps rank 1 reads once rank 0 has announced that one; the second it should never do.
    announced = {1: 2, 5: 7}

    def slow(kernel: str, *args: Any, **sizes: Any) -> None:
        if rank == 1 and kernel == "fetch":
            ready = library.memory.local(library.layout.ready, world, torch.int32)
            until = time.monotonic() + 1.5
            while ready[0] < announced.get(int(library.step), 0) and time.monotonic() < until:
                time.sleep(0.01)
        launch(kernel, *args, **sizes)

    library.launch = slow
    expected = {id(case): reference(case, rank, world) for case in (alone, shared)}
    found = []

    def forward(case: Case) -> Run:
        run = Run(library, case, rank, world, layer=0, recompute=False)
        found.append(_worst(run.forward(*_counters()), expected[id(case)]))
        return run

    first = forward(alone)
    second = forward(shared)  # other routes, one step later
    for run in (second, first):
        found.append(_worst(run.backward(), expected[id(run.case)]))
    found.append(_worst(forward(alone).backward(), expected[id(alone)]))
    forward(shared)  # two steps later: not before rank 1 has read
    library.close()
    return found


def test_routes_are_not_written_while_they_are_read() -> None:
    for found in interpreted(2).run(far_ahead, limit_s=LIMIT_S):
        for errors in found:
            assert max(errors.values()) < 1e-5, errors


def order_of_k(rank: int, world: int) -> tuple[bool, bool]:
    """The rows of each token as they lie in memory, summed by hand, forwards and backwards."""
    case = Case.of("uniform", world, tokens=16)
    library = _library(case)
    run = Run(library, case, rank, world, layer=0, recompute=False)
    y = run.forward(*_counters())["y"]
    at, width = library.layout, case.x[0].shape[1]
    rows = library.memory.local(at.rows, library.slots * width, torch.float32).view(-1, width)
    first, second, third = rows[run.plan.route.place.view(-1, 3).long()].unbind(1)
    found = torch.equal(y, first + second + third), torch.equal(y, third + second + first)
    del rows
    library.close()
    return found


def test_the_sum_is_in_the_order_of_k() -> None:
    assert interpreted(1).run(order_of_k, limit_s=LIMIT_S) == [(True, False)]


def budgets(rank: int, world: int) -> Any:
    case = Case.of("skewed", world, tokens=48)
    library = _library(case, factor=0.4, alignment=16)
    _poison(library)
    needed, dropped = _counters()
    fits, needs, drops = case.kept(world, budget=library.budget, alignment=16)
    assert all(need > int((torch.cat(case.ids) // 2 == owner).sum()) for owner, need in enumerate(needs)), (
        "padding"
    )
    run = Run(library, case, rank, world, layer=1, recompute=False)
    errors = [_worst({**run.forward(needed, dropped), **run.backward()}, reference(case, rank, world, fits))]
    counts = [(needed.tolist(), dropped.tolist(), [0, needs[rank]], [0, drops[rank]])]
    budget = library.budget

    library.resize(max(needs))
    needed.zero_()
    dropped.zero_()
    run = Run(library, case, rank, world, layer=1, recompute=False)
    errors.append(_worst({**run.forward(needed, dropped), **run.backward()}, reference(case, rank, world)))
    counts.append((needed.tolist(), dropped.tolist(), [0, needs[rank]], [0, 0]))
    moved = library.bytes_sent(), library.metadata_bytes_sent()
    library.close()
    return errors, counts, budget, sum(drops), moved


def test_past_the_budget_routes_are_dropped_and_counted() -> None:
    """Then the budget grows, as a replay does it, and none is."""
    for errors, counts, budget, drops, (moved, metadata) in interpreted(2).run(budgets, limit_s=LIMIT_S):
        assert budget == 64 and drops > 0
        for found in errors:
            assert max(found.values()) < 1e-5, errors
        for needed, dropped, needs, drops_ in counts:
            assert (needed, dropped) == (needs, drops_)
        assert 0 < metadata < moved


class NoHostRead(TorchDispatchMode):
    """Nothing that reads a value on the host or has a size that depends on one: a CUDA graph could hold the rest."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in (
            "_local_scalar_dense",
            "item",
            "nonzero",
            "masked_select",
            "_unique2",
            "bincount",
        ), name
        return func(*args, **(kwargs or {}))


def captured(rank: int, world: int) -> None:
    case = Case.of("skewed+missing", world)
    library = _library(case, factor=1.0)
    run = Run(library, case, rank, world, layer=0, recompute=False)
    counters = _counters()
    with NoHostRead():
        run.forward(*counters)
        run.backward()
    library.close()


def test_nothing_is_read_on_the_host() -> None:
    interpreted(1).run(captured, limit_s=LIMIT_S)


def no_link(rank: int, world: int) -> str:
    """PyTorch's symmetric memory, of which one rank gets none."""

    class Handle:
        def get_remote_tensor(self, peer: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(sizes, dtype=dtype)

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if rank == 1:
            raise RuntimeError("no access to peers")
        return torch.empty(size, dtype=dtype)

    with mock.patch.multiple(symmetric_memory, empty=empty, rendezvous=lambda buffer, group: Handle()):
        try:
            DeviceMemory(dist.group.WORLD, size=256, device=torch.device("cpu"))
        except ValueError as error:
            return str(error)
    return "nothing was raised"


def test_every_rank_hears_that_one_has_no_link() -> None:
    for text in interpreted(2).run(no_link, limit_s=LIMIT_S):
        assert "no access to peers" in text and text.endswith("set fusion=grouped dispatcher=alltoall"), text


def dies(rank: int, world: int) -> str:
    case = Case.of("uniform", world, tokens=16)
    library = _library(case)
    if rank == 1:
        library.memory.fail()
        return ""
    try:
        Run(library, case, rank, world, layer=0, recompute=False).forward(*_counters())
    except PeerLost as error:
        return str(error)
    return "nothing was raised"


def test_a_rank_that_fails_is_not_waited_for() -> None:
    first, _ = interpreted(2).run(dies, limit_s=LIMIT_S)
    assert "rank 1 of the expert-parallel group has failed" in first


def test_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DispatchSpec(num_experts=2, hidden_size=16, max_tokens=4)
    with pytest.raises(ValueError, match=r"needs CUDA devices.*set fusion.library=auto$"):
        TritonLibrary().wire(group=None, spec=spec, capacity_factor=None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"triton is not installed; .*set fusion=grouped$"):
        TritonLibrary().wire(group=None, spec=spec, capacity_factor=None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["90", "bf16"],
        pytest.param(["90", "fp32"], marks=pytest.mark.full),
        pytest.param(["100", "bf16", "all"], marks=pytest.mark.full),
        pytest.param(["100", "fp32"], marks=pytest.mark.full),
        pytest.param(["90", "bf16", "all"], marks=pytest.mark.full),
    ],
    ids="-".join,
)
def test_kernels_compile_without_a_gpu(arguments: list[str], tmp_path: Path) -> None:
    """To PTX and machine code, in a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.fusion.triton_compile", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert names == {"publish", "announce", "fetch", "forward", "backward"}, done.stdout
