"""`fusion.library=mok`: Mixture-of-Kittens, one kernel for the routed experts, the shared expert and both exchanges.

    forward    schedule = build_schedule(ids)               once per plan, no host read
               y, context = forward(schedule, x, ...)
    backward   context = recompute_forward_context(...)     where no activation is kept
               gradients = backward(schedule, context, dy, x, ...)

The library takes weights as `[L, F, H]`, `[L, F, H]` and `[L, H, F]`; ours are their transposes, so each pass writes
the experts' weights once into two buffers that all layers share. The shared expert's are taken as they lie. Gradients
are transposed into the caller's tensors by the copy that fills them.

**Nothing overflows.** A schedule that is too short for the rows of a rank traps the device: the process is lost, and
no check could come before it without a host read. So the schedule is always made for the worst case (`most_rows`).
That costs 8 bytes per row and plan, since activations follow another number (`macrobatch_size`); a capacity factor
changes nothing, and `needed` still tells how many rows came.

**Missing routes.** The library skips an id of -1, but sums K results per token all the same, and the one that nobody
wrote is old memory. They are sent to some expert with weight 0 instead; what comes back as their gradient is cleared.

The routing weight meets the rows behind the down projection, not before it as elsewhere here: the same up to rounding.

Legend: T tokens, K routes per token, H features, L local experts, F expert width, R ranks.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.config.errors import ConfigError
from sidestream.config.mok_limits import (
    UNFUSED,
    MoKSizes,
    Tuning,
    Violation,
    chunk_bytes,
    first_violation,
    schedule_factor,
    up,
)
from sidestream.dispatch.base import DispatchSpec

MODULE = "mok.functional"
INSTALLED = "github.com/cursor/mixture-of-kittens, built for this GPU (MOK_ARCH=SM100 or SM103)"
NEEDED = (
    "MoKConfig",
    "get_workspace",
    "build_schedule",
    "forward",
    "backward",
    "recompute_forward_context",
)


def gpu(device: torch.device) -> tuple[int, int] | None:
    """Compute capability; None: no NVIDIA GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


class MoKLibrary:
    """See the module.

    Args:
        tuning: MoKSizes that the kernels are tuned by.
        width: F; None: not known before the first call, which then checks it.
        num_shared, shared_width, shared_gate: The shared expert's sizes, as `config.mok_limits.MoKSizes` has them.
        library: `mok.functional`, or what stands in for it; None imports it in `wire`, not earlier: the import makes
            a context on whatever device is current.

    Attributes:
        budget: Rows that a schedule holds, once wired with a capacity factor. Never less than the worst case.
        capacity: The same, always.
    """

    name = "mok"
    transport = "mok"
    budget: int | None = None
    again: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6)
    fuses_shared = True

    def __init__(
        self,
        *,
        tuning: Tuning | None = None,
        width: int | None = None,
        num_shared: int | None = None,
        shared_width: int | None = None,
        shared_gate: bool | None = None,
        library: Any = None,
    ) -> None:
        self.tuning = Tuning() if tuning is None else tuning
        self.width, self.num_shared = width, num_shared
        self.shared_width, self.shared_gate = shared_width, shared_gate
        self.library = library
        self.capacity = 0
        self._weights: tuple[Tensor, Tensor] | None = None
        self._checked: set[Any] = set()

    def wire(
        self, *, group: dist.ProcessGroup | None, spec: DispatchSpec, capacity_factor: float | None
    ) -> None:
        if group is None:
            if not dist.is_initialized():
                raise self._refuse("MoK needs a process group, and there is none", "a launched run")
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            assert group is not None
        self.group, self.spec, self.num_ranks = group, spec, dist.get_world_size(group)
        self._agree(self._problem())
        self.num_local = spec.num_experts // self.num_ranks
        self.config = self._config()
        try:
            self.workspace = self.library.get_workspace(
                self.config,
                group,
                device=spec.device,
                num_local_tokens=spec.max_tokens,
                hidden_size=spec.hidden_size,
                topk=spec.top_k,
            )
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except (ValueError, RuntimeError) as error:  # such as ranks in several NVLink domains
            text = str(error).partition("\n")[0]
            raise self._refuse(f"MoK refuses: {text}", "what MoK takes") from error
        self.capacity = int(self.workspace.schedule_capacity)
        routes = torch.arange(spec.max_tokens * spec.top_k, device=spec.device)
        self._spread = (routes % spec.num_experts).view(spec.max_tokens, spec.top_k)
        self.budget = None if capacity_factor is None else self.capacity

    def plan(self, *, layer: int, keep: bool, recompute: bool) -> MoKPlan:
        return MoKPlan(self, layer=layer, keep=keep, recompute=recompute)

    def resize(self, budget: int) -> None:
        """Nothing to do: no rank can need more than there is."""
        assert budget <= self.capacity, f"{budget} rows, and the worst case is {self.capacity}"

    def bytes_sent(self) -> int:
        """0: it does not say."""
        return 0

    def metadata_bytes_sent(self) -> int:
        return 0

    def close(self) -> None:
        self._weights = self.workspace = None
        self.library.clear_workspace_cache()

    # What is wrong.

    def _refuse(self, why: str, expected: str, fix: str = UNFUSED) -> ConfigError:
        return ConfigError("fusion.library", self.name, why, expected=expected, fix=fix)

    def _problem(self) -> ConfigError | None:
        """What keeps this rank from running; imports the library if nothing does."""
        spec, capability = self.spec, gpu(self.spec.device)
        violation = self._violation(
            on_gpu=capability is not None,
            capability=capability,
            num_shared=self.num_shared,
            shared_gate=self.shared_gate,
            alignment=spec.alignment,
        )
        if violation is not None:
            return _error(violation)
        if spec.device.type == "cuda" and spec.device.index not in (None, torch.cuda.current_device()):
            why = f"the rank computes on {spec.device} and cuda:{torch.cuda.current_device()} is current"
            return self._refuse(why, "one device", f"call torch.cuda.set_device({spec.device.index}) first")
        return self._import()

    def _violation(self, **changes: Any) -> Violation | None:
        spec = self.spec
        sizes = MoKSizes(
            ranks=self.num_ranks,
            tokens=spec.max_tokens,
            hidden=spec.hidden_size,
            top_k=spec.top_k,
            experts=spec.num_experts,
            width=self.width,
            shared_width=self.shared_width,
            precision=str(spec.dtype),
        )
        return first_violation(replace(sizes, **changes), self.tuning)

    def _import(self) -> ConfigError | None:
        if self.library is None:
            try:
                self.library = importlib.import_module(MODULE)
            except ImportError as error:
                text = str(error).partition("\n")[0]
                return self._refuse(f"{MODULE} does not import ({text})", INSTALLED)
        missing = [name for name in (*NEEDED, "clear_workspace_cache") if not hasattr(self.library, name)]
        if missing:
            return self._refuse(f"the installed MoK has no {missing[0]}", INSTALLED)
        return None

    def _agree(self, problem: ConfigError | None) -> None:
        """Collective: raise on every rank if one has a problem, instead of leaving the others waiting."""
        problems: list[ConfigError | None] = [None] * self.num_ranks
        dist.all_gather_object(problems, problem, group=self.group)
        for found in problems:
            if found is not None:
                raise found

    def _config(self) -> Any:
        spec, tuning = self.spec, self.tuning
        factor = schedule_factor(
            ranks=self.num_ranks, tokens=spec.max_tokens, top_k=spec.top_k, local=self.num_local
        )
        # The ring of activations need not be longer than what can come.
        most = up(factor * spec.max_tokens * spec.top_k, tuning.minibatch_size)
        return self.library.MoKConfig(
            fwd_num_comm_sms=tuning.fwd_num_comm_sms,
            bwd_num_comm_sms=tuning.bwd_num_comm_sms,
            minibatch_size=tuning.minibatch_size,
            macrobatch_size=min(tuning.macrobatch_size, most),
            # It multiplies by R and rounds up: R is a power of two, so this gives the factor back.
            schedule_capacity_multiplier=factor / self.num_ranks,
            all_gather_top_experts_chunk_bytes=chunk_bytes(tokens=spec.max_tokens, top_k=spec.top_k),
        )

    # What a plan calls.

    def check_call(self, ins: list[Tensor]) -> None:
        """Looks at shapes only.

        Raises:
            ValueError: The library would not take them.
        """
        x, _, w_gate_up, w_down, shared_gate_up, _, _ = ins
        spec = self.spec
        seen = (x.shape, w_gate_up.dtype, w_down.shape, shared_gate_up.shape)
        if seen in self._checked:
            return
        if x.shape[0] != spec.max_tokens:
            # Every rank compares with the number that all of them know, so equal counts need no exchange.
            raise ConfigError(
                "tokens per rank",
                x.shape[0],
                f"MoK's buffers are for {spec.max_tokens} in every call on every rank",
                expected="as many tokens in every call",
                fix=UNFUSED,
            )
        violation = self._violation(
            hidden=x.shape[1],
            width=w_down.shape[1],
            shared_width=shared_gate_up.shape[0] // 2,
            precision=str(w_gate_up.dtype),
        )
        if violation is not None:
            raise _error(violation)
        self._checked.add(seen)

    def routes(self, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids without missing routes; those go to all experts in turn, with weight 0."""
        missing = ids < 0
        return weights.masked_fill(missing, 0.0), torch.where(missing, self._spread, ids)

    def native(self, w_gate_up: Tensor, w_down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The experts' gate and up `[L, F, H]` and down `[L, H, F]`, valid until the next call of this."""
        local, width, hidden = w_down.shape
        if self._weights is None:
            self._weights = (
                w_down.new_empty(2, local, width, hidden),
                w_down.new_empty(local, hidden, width),
            )
        gate_up, down = self._weights
        gate_up.copy_(w_gate_up.view(local, hidden, 2, width).permute(2, 0, 3, 1))
        down.copy_(w_down.transpose(1, 2))
        return gate_up[0], gate_up[1], down


def _error(violation: Violation) -> ConfigError:
    key, value, why, expected, fix = violation
    return ConfigError(key, value, why, expected=expected, fix=fix)


class MoKPlan:
    """One routing."""

    def __init__(self, library: MoKLibrary, *, layer: int, keep: bool, recompute: bool) -> None:
        self.library, self.layer, self.keep, self.recompute = library, layer, keep, recompute
        self.schedule: Any = None
        self.context: Any = None

    @torch.no_grad()
    def forward(self, outs: list[Tensor], ins: list[Tensor]) -> None:
        """See `FusedPlan`."""
        lib, mok = self.library, self.library.library
        (y, needed, _), (x, weights, w_gate_up, w_down, shared_gate_up, shared_down, ids) = outs, ins
        lib.check_call(ins)
        scores, top_experts = lib.routes(weights, ids)
        schedule = mok.build_schedule(lib.workspace, lib.config, top_experts, num_local_experts=lib.num_local)
        seen = needed[self.layer : self.layer + 1]
        seen.copy_(torch.maximum(seen, schedule.num_tokens))
        out, context = mok.forward(
            lib.config,
            lib.workspace,
            schedule,
            x.contiguous(),
            scores,
            *shared(shared_gate_up),
            shared_down,
            *lib.native(w_gate_up, w_down),
        )
        y.copy_(out)
        self.schedule = schedule if self.keep else None
        self.context = context if self.keep and not self.recompute else None

    @torch.no_grad()
    def backward(self, outs: list[Tensor], ins: list[Tensor]) -> None:
        """See `FusedPlan`."""
        lib, mok, schedule, context = self.library, self.library.library, self.schedule, self.context
        assert schedule is not None, "backward before forward"
        dx, d_weights, dw_gate_up, dw_down, d_shared_gate_up, d_shared_down = outs
        dy, x, weights, w_gate_up, w_down, shared_gate_up, shared_down, ids = ins
        scores, _ = lib.routes(weights, ids)
        x, before = x.contiguous(), (lib.config, lib.workspace, schedule)
        gate, up, down = lib.native(w_gate_up, w_down)
        if context is None:
            context = mok.recompute_forward_context(*before, x, *shared(shared_gate_up), gate, up)
        self.schedule = self.context = None  # the call uses the context up
        found = mok.backward(
            *before,
            context,
            dy.contiguous(),
            x,
            scores,
            *shared(shared_gate_up),
            shared_down,
            gate,
            up,
            down,
        )
        d_x, d_scores, d_gate, d_up, d_down, d_shared_gate, d_shared_up, d_shared_out = found
        dx.copy_(d_x)
        d_weights.copy_(d_scores.masked_fill(ids < 0, 0.0))
        width = d_gate.shape[1]
        dw_gate_up[..., :width].copy_(d_gate.transpose(1, 2))
        dw_gate_up[..., width:].copy_(d_up.transpose(1, 2))
        dw_down.copy_(d_down.transpose(1, 2))
        d_shared_gate_up[:width].copy_(d_shared_gate)
        d_shared_gate_up[width:].copy_(d_shared_up)
        d_shared_down.copy_(d_shared_out)


def shared(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """`[2F, H]` as gate and up `[F, H]`; no copy."""
    gate, up = gate_up.chunk(2)
    return gate, up
