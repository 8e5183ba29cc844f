"""What is measured: one unit, forward and backward, or the attempt of a whole training step.

Both repeat exactly: inputs, weights and random numbers are the same in every run, so routing is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from sidestream.data.batch import Batch
from sidestream.exchange.ops import Channel
from sidestream.model.block import DenseBlock, MoEUnit
from sidestream.model.context import TokenContext
from sidestream.model.transformer import MoETransformer
from sidestream.parallel.step import TrainingStep

Precision = Callable[[], AbstractContextManager[object]]


class Work(Protocol):
    """Something that can be run again and again, pass by pass.

    Attributes:
        model: Whose schedule and dispatcher it uses.
        passes: Names; `run` is called with each, in this order.
        blocks: Whose parts are recorded.
    """

    model: MoETransformer
    passes: tuple[str, ...]
    blocks: list[MoEUnit | DenseBlock]

    def run(self, name: str) -> None:
        """One pass. Collective."""
        ...


class UnitWork:
    """Forward and backward of one unit, in the mode of evaluation: no dropout, no jitter, no load statistics.

    Gradients are computed and thrown away, so a model in training is left as it is.

    Args:
        unit: A unit of the model.
        h: `[B, S, H]`, its input.
        context: Documents and padding of its tokens.
        precision: Context of a forward pass.
    """

    passes: tuple[str, ...] = ("forward", "backward")

    def __init__(
        self,
        model: MoETransformer,
        unit: MoEUnit,
        h: Tensor,
        context: TokenContext,
        *,
        precision: Precision = nullcontext,
    ) -> None:
        self.model = model
        self.blocks: list[MoEUnit | DenseBlock] = [unit]
        self._unit, self._context, self._precision = unit, context, precision
        self._h = h.detach().requires_grad_()
        owners = [unit] if unit.before is None else [unit, unit.before]
        self._params = [p for owner in owners for p in owner.parameters() if p.requires_grad]
        generator = torch.Generator().manual_seed(0)
        self._gradient = torch.randn(h.shape, generator=generator).to(h)
        self._output: Tensor | None = None
        set_training(self.blocks, False)

    def run(self, name: str) -> None:
        if name == "forward":
            with self._precision():
                self._output = self._unit(self._h, self._context)
            return
        output, self._output = self._output, None
        assert output is not None, "backward before forward"
        # Not `backward()`: that would add to the gradients of the parameters and call their hooks.
        torch.autograd.grad(
            output, [self._h, *self._params], self._gradient.to(output.dtype), allow_unused=True
        )


class StepWork:
    """The attempt of a training step: forward, backward and reduction of all its micro-batches.

    Args:
        step: Attached. Its model stays in the mode it has.
        batch: This rank's share of the global batch.
    """

    passes: tuple[str, ...] = ("step",)

    def __init__(self, step: TrainingStep, batch: Batch) -> None:
        self.model, self._step, self._batch = step.model, step, batch
        blocks: list[Any] = list(step.model.blocks)
        self.blocks: list[MoEUnit | DenseBlock] = [b for b in blocks if not step.model.runs_in_parts(b)]
        self._random = torch.get_rng_state()

    def run(self, name: str) -> None:
        torch.set_rng_state(self._random)
        self._step.attempt(self._batch)


def set_training(blocks: list[Any], training: bool) -> None:
    """Set the mode of blocks, and of those that they run."""
    for block in blocks:
        block.train(training)
        if isinstance(block, MoEUnit) and block.before is not None:
            block.before.train(training)


class _Reached(Exception):
    pass


def unit_input(
    model: MoETransformer, batch: Batch, *, layer: int = 0, precision: Precision = nullcontext
) -> tuple[MoEUnit, Tensor, TokenContext]:
    """The unit of an MoE layer with what it is given when the model reads `batch`. Collective for `layer` > 0."""
    unit = [block for block in model.blocks if isinstance(block, MoEUnit)][layer]
    given: list[Any] = []

    def keep(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        given.extend(args)
        raise _Reached

    handle = unit.register_forward_pre_hook(keep)
    try:
        with torch.no_grad(), precision():
            model(batch.inputs, TokenContext.of(batch.segments))
    except _Reached:
        pass
    finally:
        handle.remove()
    h, context = given
    return unit, h, context


@contextmanager
def preserved(model: MoETransformer, channel: Channel) -> Iterator[None]:
    """What a measurement touches in a model that trains is at the end what it was at the beginning.

    Modes of modules, random numbers, counters of rows and bytes, hooks and link of the channel, the schedule's switch.
    """
    dispatcher, schedule = model.parts.dispatcher, model.schedule
    modes = [(module, module.training) for module in model.modules()]
    random = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    counters = [counter for counter in (dispatcher.needed(), dispatcher.dropped()) if counter is not None]
    counted = [counter.clone() for counter in counters]
    names = ("bytes_sent", "metadata_bytes_sent", "spans", "deliver", "link", "on_start", "on_wait")
    kept = {name: getattr(channel, name) for name in names}
    enabled = schedule.enabled
    try:
        yield
    finally:
        schedule.enabled = enabled
        for name, value in kept.items():
            setattr(channel, name, value)
        for counter, value in zip(counters, counted):
            counter.copy_(value)
        torch.set_rng_state(random)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        for module, training in modes:
            module.training = training
