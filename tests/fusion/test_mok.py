"""The adapter of MoK on its double: parity, plans in flight, what it refuses, and a violation of each rule.

No test here says anything of the real library beyond what the double's sources say; it needs a Blackwell GPU.

Legend: T tokens, K routes per token, H features, E experts, L local experts, F expert width.
"""

import functools
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

from sidestream.config import mok_limits as limits
from sidestream.config.errors import ConfigError
from sidestream.config.mok_limits import MoKSizes, Tuning, first_violation, most_rows, schedule_factor
from sidestream.dispatch.base import DispatchSpec
from sidestream.fusion.mega import mok
from sidestream.fusion.mega.mok import MoKLibrary
from tests.dispatch.broken import Proxy, with_arguments
from tests.doubles.mok import MoK
from tests.doubles.rules import Corruption, Disagreement, InvalidArgument, TeardownOrder, Trap, garbage
from tests.rank_pool import ranks

T, H, F, E = 512, 256, 256, 4
NAMES = ("y", "x", "weights", "w_gate_up", "w_down", "shared gate_up", "shared down")


@contextmanager
def blackwell():
    """Play a machine on which MoK runs, and let two ranks be enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mok, "gpu", lambda device: (10, 3))
        patch.setattr(limits, "RANKS", (1, 2, 4))
        yield patch


@dataclass
class Setup:
    """What a test varies.

    Attributes:
        kind: Subclass of the adapter to use instead.
        crowd: All routes go to the last rank, and all but one token's to its last expert.
        double: Arguments of the double.
    """

    kind: Any = MoKLibrary
    top_k: int = 2
    tokens: int = T
    crowd: bool = False
    recompute: bool = False
    layers: int = 1
    factor: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    double: dict[str, Any] = field(default_factory=dict)


def make(setup: Setup, *, group: Any = "world") -> MoKLibrary:
    """A wired adapter; its double is `.library`."""
    library = setup.kind(library=MoK(ep_sizes=(1, 2, 4), **setup.double), **setup.options)
    wire(library, setup, group=group)
    return library


def wire(library: MoKLibrary, setup: Setup, *, group: Any = "world", **changes: Any) -> None:
    sizes = {"num_experts": E, "hidden_size": H, "max_tokens": setup.tokens, "top_k": setup.top_k}
    spec = DispatchSpec(**(sizes | {"num_layers": setup.layers, "dtype": torch.bfloat16} | changes))
    library.wire(
        group=dist.group.WORLD if group == "world" else group, spec=spec, capacity_factor=setup.factor
    )


@functools.lru_cache(maxsize=4)
def problem(world: int, seed: int, top_k: int, tokens: int, crowd: bool) -> SimpleNamespace:
    """Data of all ranks. A weight without a route is NaN: nobody may read it."""
    g = torch.Generator().manual_seed(7 + seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).bfloat16()

    ids = torch.rand(world, tokens, E, generator=g).argsort(-1)[..., :top_k].contiguous()
    if crowd:
        ids[:] = E - 1
        ids[:, 0] = E - 2
    else:
        ids[:, ::5, -1] = -1
        ids[:, 3::7] = -1
    weights = torch.rand(world, tokens, top_k, generator=g).masked_fill(ids < 0, torch.nan)
    return SimpleNamespace(
        x=draw(world, tokens, H),
        grad=draw(world, tokens, H),
        ids=ids,
        weights=weights,
        experts=(draw(E, H, 2 * F, scale=H**-0.5), draw(E, F, H, scale=F**-0.5)),
        shared=(draw(2 * F, H, scale=H**-0.5), draw(H, F, scale=F**-0.5)),
        arguments=(world, seed, top_k, tokens, crowd),
    )


@functools.lru_cache(maxsize=4)
def _dense(*arguments: Any) -> tuple[Tensor, ...]:
    p = problem(*arguments)
    world = len(p.x)
    leaves = [p.x, p.weights.nan_to_num(), *p.experts, *p.shared]
    x, weights, w_gate_up, w_down, gate_up, down = (leaf.float().requires_grad_() for leaf in leaves)
    silu, flat = torch.nn.functional.silu, x.view(-1, H)
    outs = []
    # The native rule: the weight before the down projection.
    scale = torch.zeros(flat.shape[0], E).index_put(
        (torch.arange(flat.shape[0])[:, None], p.ids.view(flat.shape[0], -1).clamp(min=0)),
        weights.view(flat.shape[0], -1) * (p.ids >= 0).view(flat.shape[0], -1),
        accumulate=True,
    )
    for expert in range(E):
        gate, up = (flat @ w_gate_up[expert]).chunk(2, -1)
        outs.append((silu(gate) * up * scale[:, expert : expert + 1]) @ w_down[expert])
    # Each rank has a shared expert of its own: its gradient is of its own tokens.
    shared_leaves = [
        (gate_up.detach().requires_grad_(), down.detach().requires_grad_()) for _ in range(world)
    ]
    shared = [
        (silu(a[:F] @ x[r].t()) * (a[F:] @ x[r].t())).t() @ b.t() for r, (a, b) in enumerate(shared_leaves)
    ]
    y = sum(outs).view(x.shape) + torch.stack(shared)
    y.backward(p.grad.float())
    grads = [torch.stack([leaves[i].grad for leaves in shared_leaves]) for i in (0, 1)]
    return (y.detach(), x.grad, weights.grad, w_gate_up.grad, w_down.grad, *grads)


def dense(p: SimpleNamespace, rank: int) -> list[Tensor]:
    """Output and gradients of a rank, in fp32 on one process."""
    y, x, weights, w_gate_up, w_down, gate_up, down = _dense(*p.arguments)
    share = E // len(p.x)
    local = slice(rank * share, (rank + 1) * share)
    return [y[rank], x[rank], weights[rank], w_gate_up[local], w_down[local], gate_up[rank], down[rank]]


def inputs(p: SimpleNamespace, rank: int) -> list[Tensor]:
    share = E // len(p.x)
    local = [w[rank * share : (rank + 1) * share] for w in p.experts]
    return [t.clone() for t in (p.x[rank], p.weights[rank], *local, *p.shared, p.ids[rank])]


def forward(library: MoKLibrary, plan: Any, p: SimpleNamespace, rank: int, counters: list[Tensor]) -> Tensor:
    ins = inputs(p, rank)
    y = garbage(*ins[0].shape, dtype=torch.bfloat16)
    plan.forward([y, *counters], ins)
    for tensor in ins:  # none may be kept
        tensor.fill_(torch.nan if tensor.is_floating_point() else 10**6)
    return y


def backward(library: MoKLibrary, plan: Any, p: SimpleNamespace, rank: int) -> list[Tensor]:
    ins = inputs(p, rank)
    outs = [garbage(*tensor.shape, dtype=tensor.dtype) for tensor in ins[:-1]]
    plan.backward(outs, [p.grad[rank].clone(), *(ins[i] for i in library.again)])
    return outs


def compare(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Raises on every rank if a tensor differs on one. Several roundings to bf16 (2 ** -9 each) are allowed for."""
    wrong = []
    for name, a, b in zip(NAMES, found, wanted):
        assert a.shape == b.shape
        error, size = (a.float() - b).norm(dim=-1).max(), b.norm(dim=-1).mean()
        if not error <= 0.05 * size:
            wrong.append(f"{name}: {error} of {size}")
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, wrong)
    assert not any(heard), f"differs from the dense computation: {heard}"


def counts(setup: Setup) -> list[Tensor]:
    return [torch.zeros(setup.layers, dtype=torch.int64) for _ in range(2)]


def close(library: MoKLibrary) -> list[str]:
    double = library.library
    library.close()
    double.check_closed()
    return double.log


def run(rank: int, world: int, setup: Setup, *, steps: int = 2, group: Any = "world") -> list[str]:
    """A few steps of one layer, and the end."""
    with blackwell():
        library = make(setup, group=group)
        counters = counts(setup)
        for seed in range(steps):
            p = problem(world, seed, setup.top_k, setup.tokens, setup.crowd)
            plan = library.plan(layer=0, keep=True, recompute=setup.recompute)
            y = forward(library, plan, p, rank, counters)
            compare([y, *backward(library, plan, p, rank)], dense(p, rank))
        return close(library)


# What works.


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.sample(1)
def test_parity(world, recompute):
    for log in ranks(world).run(run, setup=Setup(recompute=recompute)):
        calls = ["build_schedule", "forward", *["recompute_forward_context"] * recompute, "backward"]
        assert log == ["get_workspace", *calls, *calls, "clear_workspace_cache"]


def other_library(rank, world):
    """Without a group, and with what else is known of scores that are zero."""
    run(rank, world, Setup(double={"zero_scores_count": False}), steps=1, group=None)
    # Three tiny macrobatches: all but the first are computed again in backward.
    tuning = Tuning(fwd_num_comm_sms=2, bwd_num_comm_sms=4, minibatch_size=256, macrobatch_size=512)
    run(rank, world, Setup(top_k=1, tokens=768, options={"tuning": tuning}), steps=1)


def test_variants():
    ranks(1).run(other_library)


def in_flight(rank, world, setup):
    with blackwell():
        library = make(setup)
        counters = counts(setup)
        steps = []
        for seed in range(setup.layers):
            p = problem(world, seed, setup.top_k, setup.tokens, setup.crowd)
            plan = library.plan(layer=seed, keep=True, recompute=setup.recompute and seed == 1)
            steps.append((p, plan, forward(library, plan, p, rank, counters)))
        once = library.plan(layer=0, keep=False, recompute=False)
        forward(library, once, steps[0][0], rank, counters)
        assert once.schedule is None and once.context is None
        for seed in (1, 0, 2):
            p, plan, y = steps[seed]
            compare([y, *backward(library, plan, p, rank)], dense(p, rank))
            assert plan.context is None
        close(library)
        return counters[0].tolist(), counters[1].tolist()


def test_several_plans_in_flight():
    for needed, dropped in ranks(2).run(in_flight, setup=Setup(layers=3, recompute=True)):
        assert dropped == [0, 0, 0] and all(512 <= rows <= 2048 + 512 and rows % 256 == 0 for rows in needed)


def crowded(rank, world):
    """More rows than R T K, because of padding, on one rank, and no trap."""
    setup = Setup(crowd=True, top_k=1, factor=1.0)
    with blackwell():
        library, counters = make(setup), counts(setup)
        p = problem(world, 0, 1, T, True)
        forward(library, library.plan(layer=0, keep=False, recompute=False), p, rank, counters)
        needed, capacity = int(counters[0]), library.capacity
        assert library.budget == capacity >= needed and library.bytes_sent() == 0
        library.resize(capacity)
        close(library)
        return needed


def test_the_worst_case_fits():
    assert ranks(2).run(crowded) == [0, 2 * T + 256]


class Empty(MoK):
    """Results without values, so that only the adapter's own work is seen."""

    def build_schedule(self, workspace, config, top_experts, *, num_local_experts):
        return SimpleNamespace(num_tokens=torch.empty(1, dtype=torch.int32))

    def forward(self, config, workspace, schedule, x, *weights):
        return torch.empty_like(x), None

    def recompute_forward_context(self, *args):
        return SimpleNamespace()

    def backward(self, config, workspace, schedule, ctx, grad_output, x, router_weights, *weights):
        shared, routed = weights[:3], weights[3:]
        return tuple(torch.empty_like(t) for t in (x, router_weights, *routed, *shared))


def without_values(rank, world):
    with blackwell():
        library = MoKLibrary(library=Empty(ep_sizes=(1,)))
        wire(library, Setup())
        p = problem(world, 0, 2, T, False)
        real = [*inputs(p, rank), p.grad[rank]]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            *ins, grad = (mode.from_tensor(tensor) for tensor in real)
            counters = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            plan = library.plan(layer=0, keep=True, recompute=True)
            plan.forward([torch.empty_like(ins[0]), *counters], ins)
            outs = [torch.empty_like(tensor) for tensor in ins[:-1]]
            plan.backward(outs, [grad, *(ins[i] for i in library.again)])


def test_the_adapter_reads_no_value():
    """A host read of a tensor without values raises."""
    ranks(1).run(without_values)


# What it refuses.

GOOD = MoKSizes(
    ranks=8,
    tokens=8192,
    sequence=4096,
    hidden=7168,
    top_k=8,
    experts=256,
    width=2048,
    num_shared=1,
    shared_width=2048,
    shared_gate=False,
    capability=(10, 0),
)
REFUSED = {
    "no GPU": ({"on_gpu": False}, "fusion.library", "fusion=grouped"),
    "Hopper": ({"capability": (9, 0)}, "fusion.library", "fusion=grouped"),
    "two ranks": ({"ranks": 2}, "strategy.expert_parallel_size", "fusion=grouped"),
    "twelve ranks": (
        {"ranks": 12},
        "strategy.expert_parallel_size",
        "strategy.expert_parallel_size=4",
    ),
    "experts": ({"experts": 100}, "model.num_experts", "model.num_experts=104"),
    "fp32": ({"precision": "32-true"}, "trainer.precision", "trainer.precision=bf16-mixed"),
    "fp16": ({"precision": "torch.float16"}, "trainer.precision", "trainer.precision=bf16-mixed"),
    "features": ({"hidden": 896}, "model.hidden_size", "model.hidden_size=1024"),
    "width": ({"width": 1408}, "model.expert_hidden_size", "model.expert_hidden_size=1536"),
    "top-k": ({"top_k": 60}, "router.top_k", "router.top_k=2"),
    "no shared expert": (
        {"num_shared": 0, "shared_width": 0},
        "model.num_shared_experts",
        "model.num_shared_experts=1",
    ),
    "two shared experts": (
        {"num_shared": 2, "shared_width": 4096},
        "model.num_shared_experts",
        "model.num_shared_experts=1",
    ),
    "wide shared expert": (
        {"shared_width": 4096},
        "model.shared_expert_hidden_size",
        "model.shared_expert_hidden_size=2048",
    ),
    "gate": ({"shared_gate": True}, "model.shared_expert_gate", "model.shared_expert_gate=false"),
    "few tokens": ({"tokens": 256, "sequence": 64}, "data.micro_batch_size", "data.micro_batch_size=8"),
    "ragged tokens": ({"tokens": 900, "sequence": 300}, "data.micro_batch_size", "data.micro_batch_size=64"),
    "alignment": ({"alignment": 512}, "fusion.alignment", "fusion.alignment=auto"),
}
TUNING = {
    "fwd_num_comm_sms": (7, 8),
    "bwd_num_comm_sms": (0, 2),
    "minibatch_size": (300, 512),
    "macrobatch_size": (5000, 8192),
}


@pytest.mark.parametrize("name", REFUSED)
def test_limits(name):
    changes, key, fix = REFUSED[name]
    assert first_violation(GOOD) is None and first_violation(replace(GOOD, capability=None)) is None
    found = first_violation(replace(GOOD, **changes))
    assert (found.key, found.fix) == (key, fix)
    text = str(ConfigError(*found[:3], expected=found.expected, fix=found.fix))
    assert "\n" not in text and text.endswith(f"; set {fix}")


@pytest.mark.parametrize("name", TUNING)
def test_limits_of_tuning(name):
    value, better = TUNING[name]
    found = first_violation(GOOD, Tuning(**{name: value}))
    assert (found.key, found.value, found.fix) == (f"fusion.{name}", value, f"fusion.{name}={better}")
    assert first_violation(GOOD, Tuning(**{name: better})) is None


def test_schedules_hold_the_worst_case():
    for n in (1, 4, 64):
        for tokens, top_k, local in ((512, 1, 1), (768, 3, 7), (8192, 8, 32), (512, 1, 64)):
            sizes = {"ranks": n, "tokens": tokens, "top_k": top_k, "local": local}
            factor, most = schedule_factor(**sizes), most_rows(**sizes)
            assert factor * tokens * top_k >= most > n * tokens * top_k - 1
            # As the library computes it from what it is given.
            assert max(2, -(-n * (factor / n) // 1)) == factor
            # One expert gets everything but a route for each of the others.
            assert most >= -(-(n * tokens * top_k - local + 1) // 256) * 256 + (local - 1) * 256


def refused(rank, world, message, *, patch=(), setup=None, cpu=False, **changes):
    with blackwell() as play:
        for target, name, value in patch:
            play.setattr(target, name, value)
        setup = setup or Setup()
        library = setup.kind(library=MoK(ep_sizes=(1, 4)), **setup.options)
        with pytest.raises(ValueError, match=message) as caught:
            wire(library, setup, **changes)
        assert "\n" not in str(caught.value)


WIRED = {
    "a CPU": (
        {"patch": [(mok, "gpu", lambda device: None)]},
        "fusion.library=mok: the ranks have no NVIDIA GPU.*set fusion=grouped",
    ),
    "ranks": ({"patch": [(limits, "RANKS", (4, 8))]}, "for 1 ranks.*one of 4 or 8.*set fusion=grouped"),
    "tokens": ({"max_tokens": 700}, "tokens per rank=700.*% 256|multiple of 256.*set data.micro_batch_size"),
    "features": ({"hidden_size": 300}, "model.hidden_size=300.*set model.hidden_size=512"),
    "fp32": ({"dtype": torch.float32}, "trainer.precision=torch.float32.*bf16-mixed"),
    "alignment": ({"alignment": 48}, "fusion.alignment=48.*set fusion.alignment=auto"),
    "gate": ({"setup": Setup(options={"shared_gate": True})}, "set model.shared_expert_gate=false"),
    "width": ({"setup": Setup(options={"width": 300})}, "set model.expert_hidden_size=512"),
    "tuning": ({"setup": Setup(options={"tuning": Tuning(minibatch_size=100)})}, "fusion.minibatch_size=256"),
    "device": (
        {
            "device": torch.device("cuda", 1),
            "patch": [(torch.cuda, "current_device", lambda: 0)],
        },
        r"cuda:1 and cuda:0 is current.*torch.cuda.set_device\(1\)",
    ),
    "old library": ({"patch": [(MoK, "recompute_forward_context", property())]}, "has no recompute_forward"),
    "the library": (
        {"patch": [(MoK, "get_workspace", lambda *_, **__: (_ for _ in ()).throw(ValueError("EP 1\nno")))]},
        "MoK refuses: EP 1; ",
    ),
}


def all_refused(rank, world):
    for what, message in WIRED.values():
        refused(rank, world, message, **what)
    for shape, message in (
        ({"tokens": 256}, "tokens per rank=256: MoK's buffers are for 512"),
        ({"width": 128}, "model.expert_hidden_size=128"),
        ({"shared": 512}, "model.shared_expert_hidden_size=512"),
    ):
        with blackwell():
            setup = Setup()
            library, counters = make(setup), counts(setup)
            x, weights, w_gate_up, w_down, gate_up, down, ids = inputs(problem(1, 0, 2, T, False), 0)
            if "width" in shape:
                w_gate_up, w_down = w_gate_up[..., :256], w_down[:, :128]
            if "shared" in shape:
                gate_up, down = gate_up.repeat(2, 1), down.repeat(1, 2)
            x = x[: shape.get("tokens", T)]
            before = len(library.library.log)
            with pytest.raises(ValueError, match=message):
                library.plan(layer=0, keep=False, recompute=False).forward(
                    [x.clone(), *counters], [x, weights, w_gate_up, w_down, gate_up, down, ids]
                )
            assert len(library.library.log) == before, "the library was called"
            close(library)


def test_wire_and_calls_refuse():
    ranks(1).run(all_refused)


def imported(rank, world):
    """`mok` is imported by `wire`, last of all checks."""
    assert "mok" not in sys.modules
    setup, library = Setup(), MoKLibrary()
    asked = []

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name.partition(".")[0] == "mok":
                asked.append(name)

    with blackwell() as patch:
        patch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
        patch.setattr(mok, "gpu", lambda device: (9, 0))
        with pytest.raises(ValueError, match=r"capability 9\.0"):
            wire(library, setup)
        assert not asked
        patch.setattr(mok, "gpu", lambda device: (10, 0))
        with pytest.raises(ValueError, match=r"mok.functional does not import \(No module named 'mok'\)"):
            wire(library, setup)
        assert asked
        package, double = ModuleType("mok"), MoK(ep_sizes=(1,))
        patch.setitem(sys.modules, "mok", package)
        patch.setitem(sys.modules, "mok.functional", double)
        wire(library, setup)
        assert library.library is double
        close(library)


def test_import_comes_last():
    ranks(1).run(imported)


def one_has_a_problem(rank, world):
    with blackwell() as patch:
        if rank == 1:
            patch.setattr(mok, "gpu", lambda device: (9, 0))
        library = MoKLibrary(library=MoK(ep_sizes=(2,)))
        with pytest.raises(ValueError, match=r"capability 9\.0"):
            wire(library, Setup())
        assert library.library.log == []


def test_a_problem_of_one_rank_is_everybodys():
    ranks(2).run(one_has_a_problem)


# Adapters that break one rule each. The check that passes for the adapter must fail for them.


class With(MoKLibrary):
    """Changes calls of the library."""

    changes: dict[str, Any] = {}

    def __init__(self, **options):
        super().__init__(**options)
        self.library = Proxy(self.library, **self.changes)


def config(**changes):
    return type("Config", (With,), {"changes": {"MoKConfig": with_arguments(**changes)}})


class PassesIds(MoKLibrary):
    def routes(self, weights, ids):
        return super().routes(weights, ids)[0], ids


class PassesWeights(MoKLibrary):
    def routes(self, weights, ids):
        return weights, super().routes(weights, ids)[1]


class ShortIds(MoKLibrary):
    def routes(self, weights, ids):
        weights, ids = super().routes(weights, ids)
        return weights, ids.int()


class LowScores(MoKLibrary):
    def routes(self, weights, ids):
        weights, ids = super().routes(weights, ids)
        return weights.bfloat16(), ids


class WeightsAsTheyAre(MoKLibrary):
    def native(self, w_gate_up, w_down):
        gate, up = w_gate_up.transpose(1, 2).chunk(2, 1)
        return gate, up, w_down.transpose(1, 2)


class NotTransposed(MoKLibrary):
    def native(self, w_gate_up, w_down):
        gate, up = w_gate_up.chunk(2, -1)
        return gate.contiguous(), up.contiguous(), w_down


class Swapped(MoKLibrary):
    def native(self, w_gate_up, w_down):
        gate, up, down = super().native(w_gate_up, w_down)
        return up, gate, down


class ConvertsOnce(MoKLibrary):
    kept = None

    def native(self, w_gate_up, w_down):
        if self.kept is None:
            self.kept = super().native(w_gate_up, w_down)
        return self.kept


class NeverCloses(MoKLibrary):
    def close(self):
        pass


class ClosesEarly(MoKLibrary):
    def plan(self, **options):
        self.library.clear_workspace_cache()
        return super().plan(**options)


class TokensDiffer(MoKLibrary):
    def _config(self):
        rank = dist.get_rank()
        self.library = Proxy(self.library, get_workspace=with_arguments(num_local_tokens=T + 256 * rank))
        return super()._config()


class OneContext(With):
    """All plans share what the first one saved."""

    def __init__(self, **options):
        self.first = None

        def forward(own, *args):
            out, context = own(*args)
            self.first = self.first or context
            return out, self.first

        self.changes = {"forward": forward}
        super().__init__(**options)


class OneSchedule(With):
    def __init__(self, **options):
        self.first = None

        def build(own, *args, **kwargs):
            self.first = self.first or own(*args, **kwargs)
            return self.first

        self.changes = {"build_schedule": build}
        super().__init__(**options)


class KeepsInputs(MoKLibrary):
    """Backward reads the tensors of forward."""

    def plan(self, **options):
        plan = super().plan(**options)
        forward, backward, kept = plan.forward, plan.backward, []

        def keeping(outs, ins):
            kept[:] = ins
            forward(outs, ins)

        plan.forward = keeping
        plan.backward = lambda outs, ins: backward(outs, [ins[0], *kept])
        return plan


class RecomputesAlone(MoKLibrary):
    def plan(self, *, layer, keep, recompute):
        return super().plan(layer=layer, keep=keep, recompute=dist.get_rank() == 0)


class KeepsZeroScores(With):
    """Does not clear what comes back for missing routes."""

    def plan(self, **options):
        plan = super().plan(**options)
        backward = plan.backward

        def not_clearing(outs, ins):
            ids = ins[-1].clone()
            ins[-1] = torch.where(ids < 0, self._spread, ids)
            ins[2] = ins[2].masked_fill(ids < 0, 0.0)
            backward(outs, ins)

        plan.backward = not_clearing
        return plan


CROWD = {"crowd": True, "top_k": 1}
ODD = {"top_k": 1, "tokens": 768}
BROKEN = {
    "ids of -1": (1, Setup(PassesIds), AssertionError, "y: nan"),
    "weights of missing routes": (1, Setup(PassesWeights), AssertionError, "y: nan"),
    "gradients of missing routes": (1, Setup(KeepsZeroScores), AssertionError, "weights: "),
    "short ids": (1, Setup(ShortIds), InvalidArgument, "int64"),
    "scores in bf16": (1, Setup(LowScores), InvalidArgument, "router_weights: torch.float32"),
    "default capacity": (
        2,
        Setup(config(schedule_capacity_multiplier=0.5), **CROWD),
        Trap,
        "1280 rows needed, the schedule holds 1024",
    ),
    "capacity without padding": (
        2,
        Setup(config(schedule_capacity_multiplier=1.0), **CROWD),
        Trap,
        "1280 rows needed, the schedule holds 1024",
    ),
    "chunks": (
        1,
        Setup(config(all_gather_top_experts_chunk_bytes=2048), **ODD),
        InvalidArgument,
        "chunks of 2048",
    ),
    "odd SMs": (1, Setup(config(fwd_num_comm_sms=41)), InvalidArgument, "fwd_num_comm_sms=41"),
    "minibatch": (1, Setup(config(minibatch_size=100)), InvalidArgument, "minibatch_size=100"),
    "macrobatch": (1, Setup(config(macrobatch_size=5000)), InvalidArgument, "macrobatch_size=5000"),
    "views as weights": (1, Setup(WeightsAsTheyAre), InvalidArgument, "contiguous"),
    "not transposed": (1, Setup(NotTransposed), AssertionError, "y: "),
    "gate and up swapped": (1, Setup(Swapped), AssertionError, "y: "),
    "stale weights": (1, Setup(ConvertsOnce), AssertionError, "y: "),
    "nothing released": (1, Setup(NeverCloses), TeardownOrder, "workspaces left"),
    "released early": (1, Setup(ClosesEarly), TeardownOrder, "is gone"),
    "unequal tokens": (2, Setup(TokensDiffer), ValueError, "shapes differ between ranks"),
    "one context": (1, Setup(OneContext), Corruption, "has been used"),
    "one schedule": (1, Setup(OneSchedule), AssertionError, "y: "),
    "inputs kept": (1, Setup(KeepsInputs), AssertionError, "x: nan"),
    "recompute on one rank": (2, Setup(RecomputesAlone), Disagreement, "different calls"),
}


def breaks(rank, world, name):
    _, setup, error, message = BROKEN[name]
    with pytest.raises(error, match=message):
        run(rank, world, setup)


@pytest.mark.parametrize("name", BROKEN)
def test_violation_is_noticed(name):
    ranks(BROKEN[name][0]).run(breaks, name=name)


def harmless(rank, world):
    run(rank, world, Setup(config()), steps=1)


def test_the_means_alone_break_nothing():
    ranks(1).run(harmless)


# The double's own limits.


def own_limits(rank, world):
    good = {"device": torch.device("cpu"), "num_local_tokens": T, "hidden_size": H, "topk": 2}
    double = MoK(ep_sizes=(1,))
    for bad in ({"num_local_tokens": 256}, {"num_local_tokens": 700}, {"hidden_size": 128}, {"topk": 56}):
        with pytest.raises(InvalidArgument):
            double.get_workspace(MoK.MoKConfig(), dist.group.WORLD, **(good | bad))
    with pytest.raises(InvalidArgument, match=r"EP size 1, one of \(4, 8"):
        MoK().get_workspace(MoK.MoKConfig(), dist.group.WORLD, **good)
    default = double.get_workspace(MoK.MoKConfig(), dist.group.WORLD, **good)
    assert default.schedule_capacity == 2 * T * 2
    assert double.get_workspace(MoK.MoKConfig(), dist.group.WORLD, **good) is default
    # Padding alone: two routes per token, one row too many for each expert.
    ids = torch.tensor([[0, 1]] * T)
    ids[0], ids[1] = torch.tensor([2, 3]), torch.tensor([4, 5])
    assert int(double.build_schedule(default, MoK.MoKConfig(), ids, num_local_experts=6).num_tokens) == 2048
    ids[2] = torch.tensor([6, 7])
    with pytest.raises(Trap, match="2560 rows needed, the schedule holds 2048"):
        double.build_schedule(default, MoK.MoKConfig(), ids, num_local_experts=8)


def test_the_double_has_limits():
    ranks(1).run(own_limits)
