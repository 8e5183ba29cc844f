"""The Lightning strategy: groups, gradient reduction, the step, checkpoints.

setup_environment   process group with a time-out, meshes                       (every group is made here)
begin_training      gradients become views of flat storage; ranks compare their copies
run_step            attempt, check, commit; attempted again after an overflow
save_checkpoint     shards beside, checksums, fsync, rename
load_checkpoint     weights and optimizer, and nothing that runs
teardown            hooks; after a regular end `run.py` closes the dispatcher, and the groups last
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from typing_extensions import override

from sidestream.config.errors import ConfigError
from sidestream.conformance.first_step import FirstStep
from sidestream.convert.start import MODEL
from sidestream.data.batch import Batch
from sidestream.graph.base import StepRunner
from sidestream.graph.check import StepLint
from sidestream.launch import phase
from sidestream.launch.worker import RankEnv
from sidestream.lightning.fits import check_facts, check_weights, one_line
from sidestream.lightning.options import plain_rates
from sidestream.model.transformer import MoETransformer
from sidestream.parallel.agree import check_equal, check_replicas
from sidestream.parallel.checkpoint_reader import CheckpointReader, load_meta, load_state, plain_errors
from sidestream.parallel.mesh import Parallel, build_parallel
from sidestream.parallel.overflow import BudgetKeeper
from sidestream.parallel.reduction import Reduction
from sidestream.parallel.step import StepReport, TrainingStep
from sidestream.parallel.world import join_world, leave_world
from sidestream.tracking import integrity
from sidestream.tracking.folder import sync_folder, write_json_atomic

log = logging.getLogger(__name__)


class ExpertParallelStrategy(ModelParallelStrategy):
    """Data and expert parallelism over one world.

    Args:
        env: This rank; its store is where ranks meet.
        expert_parallel_size: Ranks that share one copy of all experts.
        reduction: Owner of the gradients: `replicate` or `fully_shard`.
        timeout_seconds: Time-out of every group; a rank that waits longer raises.
        graph: How an attempt is run.
    """

    def __init__(
        self,
        *,
        env: RankEnv,
        expert_parallel_size: int,
        reduction: Reduction,
        timeout_seconds: int,
        graph: StepRunner,
        store: dist.Store | None = None,
    ) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        super().__init__(data_parallel_size=1, tensor_parallel_size=1, timeout=timeout)
        self.env, self.graph = env, graph
        self._lint = StepLint() if graph.lint else None
        self._max_norm: float | None = None
        self._looked = False  # at what the user's own parts return
        self.expert_parallel_size, self.reduction, self.group_timeout = (
            expert_parallel_size,
            reduction,
            timeout,
        )
        self._given_store = store
        self._owns_world = False
        self._parallel: Parallel | None = None
        self._step: TrainingStep | None = None
        self._budget: BudgetKeeper | None = None

    @property
    def budget(self) -> BudgetKeeper:
        """Keeper of the dispatcher's static budget."""
        assert self._budget is not None, "begin_training first"
        return self._budget

    @property
    def parallel(self) -> Parallel:
        """The live groups."""
        assert self._parallel is not None, "before setup_environment"
        return self._parallel

    @override
    def setup_environment(self) -> None:
        # Not the parent's: it builds a mesh of its own and insists on data x tensor parallel = world.
        ParallelStrategy.setup_environment(self)
        self.set_world_ranks()
        phase.enter(phase.MEETING)
        self._owns_world = join_world(
            self.env, self.root_device, timeout=self.group_timeout, store=self._given_store
        )
        self._parallel = build_parallel(
            expert_parallel_size=self.expert_parallel_size,
            device_type=self.root_device.type,
            timeout=self.group_timeout,
        )
        self._device_mesh = self._parallel.dense

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Every rank reads its own data, also the ranks of one expert-parallel group.
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def begin_training(
        self,
        model: MoETransformer,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        autocast: bool,
        data_checksum: str,
        overflow: dict[str, Any] | None = None,
    ) -> None:
        """Prepare the step. After a checkpoint was restored: loading needs gradients that are still None.

        Args:
            overflow: State of the static budget in the checkpoint, see `BudgetKeeper.state`.

        Raises:
            RuntimeError: Ranks hold different weights or different data.
        """
        if self.reduction.holds_replicas:
            check_replicas(model, self.parallel)
        check_equal("data checksum", data_checksum, self.parallel)
        self.graph.open(self.root_device, self.barrier)
        with self.graph.place():  # where gradients will be accumulated
            self.reduction.attach(model, self.parallel)
        parts = model.parts
        self._budget = BudgetKeeper(
            parts.dispatcher,
            self.parallel,
            device=self.root_device,
            mean_rows=parts.tokens_per_plan * parts.router.top_k,
        )
        self.budget.load(overflow)
        self._step = TrainingStep(
            model,
            parallel=self.parallel,
            reduction=self.reduction,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            autocast=autocast,
            budget=self.budget,
        )

    def run_step(
        self,
        batch: Batch,
        *,
        optimizer_step: Callable[[], object],
        max_norm: float | None,
        stop_requested: Callable[[], bool],
        own: Mapping[str, float] | None = None,
    ) -> tuple[StepReport, Tensor]:
        """One step on this rank's share of the global batch: attempt, check, commit.

        After an overflow of a static budget the same micro-batches are attempted again with a larger one.

        Args:
            own: Numbers of this rank for the report, see `TrainingStep.check`.

        Returns:
            The report, and the gradient norm before clipping (fp32, on the device).

        Raises:
            ConfigError: On every rank, in the first step: a part of the user's own breaks its protocol.
        """
        step = self._step
        assert step is not None, "begin_training first"
        slots = step.model.schedule.slots
        bound = (self._lint or self.graph).bind(batch)
        first = (
            None
            if self._looked
            else FirstStep(step, graph=self.graph, optimizer=next(iter(self.optimizers), None))
        )
        with first or nullcontext():
            while True:
                step.prepare(bound)
                self._attempt(step, bound, ready=slots is None or not slots.measuring)
                if first is not None:
                    first.attempted()
                report = step.check(stop_requested=stop_requested(), own=own)
                if self.budget.resolve(overflowed=report.overflowed, dropped=report.lost):
                    break
            self._max_norm = max_norm
            norm = step.commit(report, optimizer_step=optimizer_step)
            if first is not None:
                first.committed()
        self._looked = True
        if slots is not None:
            slots.end_step(self.parallel.control, self.root_device)
        return report, norm

    def _attempt(self, step: TrainingStep, batch: Batch, *, ready: bool) -> None:
        if self._lint is not None:
            self._lint.run(lambda: step.run(batch), ready=ready, agree=self._gather)
            return
        self.graph.run(
            lambda: step.run(batch),
            key=step.model.parts.dispatcher.budget,
            ready=ready,
            rehearsal=lambda: step.rehearsal(batch),
        )

    def _gather(self, found: list[str]) -> list[list[str]]:
        """What every rank found. Collective."""
        every: list[list[str]] = [[] for _ in range(self.world_size)]
        if self.world_size == 1:
            return [found]
        dist.all_gather_object(every, found, group=self.parallel.control)
        return every

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Clip and step, from a recording where the graph includes the optimizer. Called within a commit."""
        step = self._step
        assert step is not None, "begin_training first"
        plain = super().optimizer_step

        def update() -> None:
            if self._max_norm is not None:
                step.clip(self._max_norm)
            plain(optimizer, closure, model, **kwargs)

        self.graph.update(update)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        # A rate in memory would be a tensor of the checkpoint, which a run without one could not load.
        return plain_rates(super().optimizer_state(optimizer))

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint folder: aside, with its checksums, synced, renamed. A kill never leaves it half written.

        Collective. A checkpoint of the same step, which a resume passed over, gives way when the new one is whole.
        """
        final = Path(filepath)
        partial, replaced = (final.with_name(f".{final.name}.{what}") for what in ("partial", "old"))
        if self.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.barrier()
        # Not the parent's, which waits for the disk before a checksum could be computed.
        tensors = {"state_dict": checkpoint.pop("state_dict")}
        for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
            tensors[f"optimizer_{index}"] = state
        with plain_errors():
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial, sync_files=False))
        model = checkpoint.pop(MODEL)
        if self.is_global_zero:
            torch.save(checkpoint, partial / "meta.pt")
            write_json_atomic(partial / MODEL, model)
        files = self._digests(partial)
        if self.is_global_zero:
            integrity.seal(partial, step=integrity.step_of(final), files=files)
            shutil.rmtree(replaced, ignore_errors=True)
            if os.path.lexists(final):
                final.rename(replaced)
            partial.rename(final)
            sync_folder(final.parent)
            shutil.rmtree(replaced, ignore_errors=True)
        self.barrier()

    def _digests(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Sizes and checksums of all files, which are on the disk then. Each rank has those it wrote. Collective."""
        mine = list(folder.glob(f"__{self.global_rank}_*"))
        if self.is_global_zero:
            mine += [folder / name for name in (*integrity.OF_A_RUN, MODEL)]
        found = integrity.digests(mine, sync=True)
        if self.world_size == 1:
            return found
        every: list[Any] = [None] * self.world_size
        dist.all_gather_object(every, found, group=self.parallel.control)
        return {name: entry for part in every for name, entry in part.items()}

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read weights and optimizer in place, and return the rest. Collective.

        Not the parent's, which unpickles whatever the folder holds.

        Raises:
            ConfigError: The checkpoint is damaged, or of other text, another model or another optimizer.
        """
        folder, model = Path(checkpoint_path), self.model
        assert model is not None
        try:
            reader, meta = CheckpointReader(folder), load_meta(folder)
            check_facts(folder, meta["sidestream"], self.lightning_module.facts())  # type: ignore[union-attr,operator]
            weights = {"state_dict": get_model_state_dict(model)}
            check_weights(folder, reader.read_metadata(), weights["state_dict"])
            with one_line(folder):
                load_state(weights, reader)
                model.load_state_dict(weights["state_dict"])
                for index, optimizer in enumerate(self.optimizers):
                    name = f"optimizer_{index}"
                    state = {name: get_optimizer_state_dict(model, optimizer)}
                    load_state(state, reader)
                    options = StateDictOptions(cpu_offload=True)
                    set_optimizer_state_dict(model, optimizer, optim_state_dict=state[name], options=options)
            return meta
        except integrity.Damaged as error:
            raise ConfigError(
                "resume", folder, str(error), expected="a whole checkpoint", fix="resume=<the run's folder>"
            ) from error

    @override
    def teardown(self) -> None:
        # A recording holds what the groups work on, hooks hold gradients. The dispatcher and the groups, whose threads
        # they use, are closed by `run.py`.
        self.graph.close()
        if self._step is not None:
            self._step.close()
            self._step = None
        super().teardown()

    def leave_world(self) -> None:
        """Destroy all groups, if this strategy made the world. After the last use of the model."""
        self._parallel = None
        self._device_mesh = None
        if self._owns_world:
            leave_world()
