"""Host reads, and the number of operators, of an MoE layer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sidestream.dispatch.base import DispatchSpec
from sidestream.exchange.link import NativeLink
from sidestream.exchange.ops import Channel
from sidestream.exchange.transfer import Transfer
from sidestream.graph.lint import HostRead, HostReadLint, summarize
from sidestream.graph.none import NoGraph
from sidestream.model.moe import Ledger, MoE, MoEParts
from sidestream.routing.balance import AuxLoss
from sidestream.routing.router import SoftmaxRouter
from tests.core.build_tiny import (
    DISPATCHERS,
    FUSIONS,
    SHAPE,
    Setup,
    local_batch,
    make_balance,
    make_model,
    make_step,
    parallel_for,
)
from tests.rank_pool import ranks

Read = Callable[[Tensor], object]

READS: dict[str, Read] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "__array__": lambda x: np.asarray(x),
    "__dlpack__": lambda x: np.from_dlpack(x),
    "__bool__": lambda x: "yes" if (x > 1).any() else "no",
    "__int__": lambda x: int(x[0]),
    "__float__": lambda x: torch.tensor([x[0], 1.0]),
    "__index__": lambda x: range(x.argmax()),
    "__complex__": lambda x: complex(x[0]),
    "__repr__": lambda x: f"{x}",
    "_local_scalar_dense": lambda x: x[x.argmax()],
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: torch.where(x > 1),
    "masked_select": lambda x: x.masked_select(x > 1),
    "_unique2": lambda x: x.unique(),
    "bincount": lambda x: x.long().bincount(),
    "index": lambda x: x[x > 1],
    "index_put_": lambda x: x.clone().__setitem__(x > 1, torch.ones(2)),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
}

NO_READS: dict[str, Read] = {
    "same device": lambda x: x.to("cpu"),
    "masked fill": lambda x: x.clone().__setitem__(x > 1, 0.0),
    "index by ids": lambda x: x[torch.tensor([0, 2])],
    "known size": lambda x: x.repeat_interleave(x.long(), output_size=6),
    "shape": lambda x: (len(x), [row.shape for row in x]),
    "clip": lambda x: torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(x)], 1.0),
}


class InPhase(torch.autograd.Function):
    """Identity that reads in one of its passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, read: Read, phase: str) -> Tensor:
        ctx.read, ctx.phase = read, phase
        if phase == "forward":
            read(x.detach())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.phase == "backward":
            ctx.read(grad)
        return grad, None, None


def lint(read: Read, phase: str) -> list[HostRead]:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with HostReadLint() as found:
        InPhase.apply(x, read, phase).backward(x.detach())
    return found.reads


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", READS)
def test_reports_each_kind_once_with_its_line(kind: str, phase: str) -> None:
    read = READS[kind]
    line = read.__code__.co_firstlineno
    assert lint(read, phase) == [HostRead(kind, __file__, line, "<lambda>", phase, "cpu")]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("name", NO_READS)
def test_leaves_out_what_does_not_read(name: str, phase: str) -> None:
    assert lint(NO_READS[name], phase) == []


def test_operators_that_autograd_runs_are_seen_at_the_line_of_backward() -> None:
    x = torch.ones(4, requires_grad=True)
    picked = x[torch.tensor([True, False, True, True])].sum()
    with HostReadLint() as found:
        picked.backward()
    (read,) = found.reads
    assert (read.kind, read.phase, read.file) == ("index_put", "backward", __file__)


def test_nothing_stays_patched() -> None:
    before = dict(vars(Tensor))
    with HostReadLint() as found:
        assert dict(vars(Tensor)) != before
    assert dict(vars(Tensor)) == before
    with pytest.raises(ZeroDivisionError), HostReadLint():
        raise ZeroDivisionError
    assert dict(vars(Tensor)) == before
    assert Tensor.tolist is torch._C.TensorBase.tolist
    torch.ones(2).tolist()
    assert found.reads == []


def test_other_threads_do_not_count() -> None:
    thread = threading.Thread(target=lambda: torch.ones(2).tolist())  # looked up while methods are watched
    with HostReadLint() as found:
        thread.start()
        thread.join()
    assert found.reads == []


def test_on_an_accelerator_only_its_tensors_count() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        device, host = torch.empty(3, device="cuda"), torch.empty(3)
        with HostReadLint() as found:
            host.cpu()
            device.cpu()
            device.to("cpu")
            device.to("cpu", non_blocking=True)
            host.copy_(device)
            host.copy_(device, non_blocking=True)
            device.double()
    assert [(r.kind, r.device) for r in found.reads] == [
        ("cpu", "cuda"),
        ("_to_copy", "cuda"),
        ("copy_", "cuda"),
    ]


def test_exchange_operators_read_their_counts_unseen() -> None:
    channel, counts = Channel(None), torch.tensor([3])
    transfer = Transfer(channel, counts, counts, "rows")
    x = torch.ones(3, 2, requires_grad=True)
    with HostReadLint() as found:
        transfer.finish(transfer.start(x, num_received=3)).sum().backward()
    channel.close()
    assert found.reads == []


def test_reads_inside_an_operator_of_the_user_count() -> None:
    library = torch.library.Library("lint_test", "DEF")
    library.define("peek(Tensor x) -> Tensor")
    library.impl("peek", lambda x: x * x.tolist()[0], "CompositeExplicitAutograd")
    with HostReadLint() as found:
        torch.ops.lint_test.peek(torch.ones(2))
    assert [(r.kind, r.file) for r in found.reads] == [("tolist", __file__)]


# ---- NoGraph


def test_no_graph_runs_bare() -> None:
    graph, patched = NoGraph(), []
    before = dict(vars(Tensor))
    graph.run(lambda: patched.append(dict(vars(Tensor)) != before))
    graph.update(lambda: patched.append(True))
    assert patched == [False, True]
    assert graph.counts() is None


# ---- The core reads nothing from the device


def attempt_reads(rank: int, world: int, setup: Setup) -> list[HostRead]:
    model = make_model(setup)
    step = make_step(setup, model, world)
    batch = local_batch(setup, 0, rank, world)
    step.prepare(batch)
    with HostReadLint() as lint:
        step.run(batch)
    step.close()
    model.parts.dispatcher.close()
    return lint.reads


NUM_MOE_LAYERS = len(SHAPE.moe_blocks)
RECOMPUTE = replace(SHAPE, activation_checkpointing=True)


@pytest.mark.parametrize(
    "setup",
    [
        Setup(dispatcher="local"),
        Setup(dispatcher="local", alignment=16, accumulation=2, balance="bias"),
        Setup(dispatcher="local", autocast=True, shape=RECOMPUTE),
        Setup(dispatcher="alltoall"),
        Setup(dispatcher="nccl_ep", alignment=16),
    ],
)
def test_one_rank_reads_nothing(setup: Setup) -> None:
    assert ranks(1).run(attempt_reads, setup=setup) == [[]]


def test_loop_on_device_offsets_reads_once_per_layer_and_recompute() -> None:
    setup = Setup(dispatcher="local", fusion="loop", shape=RECOMPUTE)
    (reads,) = ranks(1).run(attempt_reads, setup=setup)
    assert Counter((r.kind, r.function, r.phase) for r in reads) == {
        ("tolist", "LoopExperts.__call__", "forward"): NUM_MOE_LAYERS,
        ("tolist", "LoopExperts.__call__", "backward"): NUM_MOE_LAYERS,
    }


@pytest.mark.parametrize(
    "setup",
    [
        Setup(ep=2),
        Setup(ep=2, alignment=16),
        Setup(ep=2, accumulation=2, fusion="loop", balance="bias"),
        Setup(ep=2, autocast=True, shape=RECOMPUTE),
        *(Setup(dispatcher=name, ep=2) for name in DISPATCHERS if name not in ("local", "alltoall")),
    ],
)
def test_eager_exchange_reads_once_per_layer_forward_and_never_backward(setup: Setup) -> None:
    for reads in ranks(2).run(attempt_reads, setup=setup):
        assert {(r.kind, Path(r.file).name, r.phase) for r in reads} == {("tolist", "packed.py", "forward")}
        assert len(reads) == NUM_MOE_LAYERS * setup.accumulation
        assert len(summarize(reads)) == 1


@pytest.mark.parametrize(
    "setup",
    [
        Setup(ep=2, alignment=16, accumulation=2, balance="bias"),
        Setup(ep=2, autocast=True, shape=RECOMPUTE),
        *(Setup(dispatcher=name, ep=2) for name in DISPATCHERS if name != "local"),
    ],
)
def test_static_exchange_reads_nothing(setup: Setup) -> None:
    assert ranks(2).run(attempt_reads, setup=setup.with_(capacity_factor=2.0)) == [[], []]


def global_scope_reads(rank: int, world: int) -> list[HostRead]:
    setup = Setup(ep=2)
    model = make_model(setup)
    model.parts = replace(model.parts, balance=AuxLoss(coefficient=0.01, scope="global"))
    for moe in model.moe_layers():
        moe.parts = model.parts
    with HostReadLint() as found:
        sums = model.loss_sums(local_batch(setup, 0, rank, world))
        (sums.nll + sums.aux).backward()
    model.parts.dispatcher.close()
    return found.reads


def test_global_auxiliary_loss_adds_no_read() -> None:
    for reads in ranks(2).run(global_scope_reads):
        assert len(reads) == NUM_MOE_LAYERS


# ---- The number of operators


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def layer_ops(
    rank: int,
    world: int,
    *,
    dispatcher: str,
    fusion: str,
    num_experts: int,
    top_k: int,
    alignment: int = 1,
    **options: Any,
) -> Counter[str]:
    """Operators of router, dispatch, experts and combine on this rank, forward and backward."""
    shape = replace(SHAPE, num_experts=num_experts)
    mover: Any = DISPATCHERS[dispatcher](**options)
    experts: Any = FUSIONS[fusion]()
    spec = DispatchSpec(
        num_experts=num_experts,
        hidden_size=shape.hidden_size,
        alignment=alignment,
        max_tokens=32,
        top_k=top_k,
    )
    mover.wire(group=parallel_for(world).ep_group, spec=spec, link=NativeLink())
    parts = MoEParts(
        router=SoftmaxRouter(top_k=top_k),
        balance=make_balance("aux"),
        dispatcher=mover,
        fusion=experts,
        expert_range=parallel_for(world).expert_range(num_experts),
    )
    ledger = Ledger(torch.zeros(1, num_experts, dtype=torch.int64))
    moe = MoE(shape, parts, layer=0, ledger=ledger)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 16, shape.hidden_size, requires_grad=True)
    with CountOps() as counted:
        path = moe.routed_path(x)
        path.start("dispatch")
        path.finish("dispatch")
        path.run("experts")
        path.start("combine")
        (path.finish("combine").sum() + ledger.take_aux()).backward()
    mover.close()
    return counted.ops


# Name, options, ranks.
MOVERS = [
    ("local", {}, 1),
    *((name, {}, 2) for name in DISPATCHERS if name != "local"),
    *((name, {"capacity_factor": 2.0}, 2) for name in DISPATCHERS if name != "local"),
    ("alltoall", {}, 1),
]


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize(("dispatcher", "options", "world"), MOVERS)
def test_operators_do_not_grow_with_experts_or_routes(
    dispatcher: str, options: dict[str, float], world: int, alignment: int
) -> None:
    def ops(num_experts: int, top_k: int) -> list[Counter[str]]:
        return ranks(world).run(
            layer_ops,
            dispatcher=dispatcher,
            fusion="grouped",
            num_experts=num_experts,
            top_k=top_k,
            alignment=alignment,
            **options,
        )

    few = ops(4, 2)
    assert ops(64, 2) == few
    assert ops(64, 8) == few


def test_loop_grows_with_experts() -> None:
    few, many = (
        ranks(1).run(layer_ops, dispatcher="local", fusion="loop", num_experts=e, top_k=2)[0] for e in (4, 64)
    )
    assert many.total() - few.total() >= 60
