"""The LightningModule: what happens at each step of `trainer.fit`, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from sidestream.convert.initial import load_after_sharding
from sidestream.convert.start import MODEL
from sidestream.data.batch import Batch
from sidestream.data.loaders import StatefulLoader
from sidestream.launch import phase
from sidestream.lightning.fits import name_of
from sidestream.lightning.options import ConfiguredOptions
from sidestream.lightning.recorder import Recorder
from sidestream.lightning.strategy import ExpertParallelStrategy
from sidestream.model.initialize import seed_of
from sidestream.model.transformer import MoETransformer
from sidestream.parallel.agree import check_replicas
from sidestream.parallel.mesh import Parallel

CHECKPOINT_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train, in plain values.

    Attributes:
        seed: Decides everything random; the initial weights' values draw from it by name.
        global_batch_size: Sequences per step over all ranks.
        micro_batch_size: Sequences per rank and micro-batch.
        seq_length: Tokens per sequence.
        max_norm: Gradient clipping; None is off.
        autocast: bf16 autocast of the forward pass.
        data_checksum: Checksum of the corpus.
        changes_model: The schedule or `router.force_balance` computes another function than the plain model.
        function: Name of the function that the schedule computes.
        initial_weights: Folder of weights to start from; None: from the seed.
        model: What a checkpoint says of its model, see `convert/start.described`.
    """

    seed: int
    global_batch_size: int
    micro_batch_size: int
    seq_length: int
    max_norm: float | None
    autocast: bool
    data_checksum: str
    changes_model: bool
    function: str = "plain"
    initial_weights: Path | None = None
    model: Mapping[str, Any] = field(default_factory=dict)


class SidestreamModule(LightningModule):
    """Trains a `MoETransformer` by steps of attempt, check, commit.

    Args:
        build_model: Builds this rank's part, given the groups. Collective.
        build_optimizer: From the model.
        factor: Step -> factor of the learning rate.
        recipe: Sizes and switches.
        recorder: Where numbers go.
        stop_requested: True once this process was asked to stop.
        train_loader: Told how many steps are committed.
    """

    # One step is one attempt over all micro-batches: forward, backward and reduction belong together.
    automatic_optimization = False

    def __init__(
        self,
        *,
        build_model: Callable[[Parallel], MoETransformer],
        build_optimizer: Callable[[MoETransformer], Optimizer],
        factor: Callable[[int], float],
        recipe: Recipe,
        recorder: Recorder,
        stop_requested: Callable[[], bool],
        train_loader: StatefulLoader | None,
    ) -> None:
        super().__init__()
        self._build_model, self._build_optimizer, self._factor = build_model, build_optimizer, factor
        self.recipe, self.recorder, self._stop_requested = recipe, recorder, stop_requested
        self._train_loader = train_loader
        self.stopping = False
        self._restored: dict[str, Any] | None = None
        self._began = False
        self.rate = 0.0  # of the last step
        self._val: Tensor | None = None

    @property
    def parallel_strategy(self) -> ExpertParallelStrategy:
        strategy = self.trainer.strategy
        assert isinstance(strategy, ExpertParallelStrategy)
        return strategy

    @override
    def configure_model(self) -> None:
        if not hasattr(self, "model"):  # called again by every trainer function
            phase.enter(phase.BUILDING)
            strategy = self.parallel_strategy
            self.model = self._build_model(strategy.parallel)
            strategy.reduction.shard(self.model, strategy.parallel)
            if self.recipe.initial_weights is not None:
                load_after_sharding(self.model, self.recipe.initial_weights)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = self._build_optimizer(self.model)
        if self.trainer.ckpt_path is not None:
            phase.enter(phase.LOADING)
        # A plain function: LambdaLR would save the attributes of an object, and a resumed run its old max_steps.
        scheduler = LambdaLR(optimizer, lambda step: self._factor(step))
        self._options = ConfiguredOptions(scheduler)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @override
    def on_train_start(self) -> None:
        recipe = self.recipe
        phase.enter(phase.TRAINING, step=self.global_step + 1)
        self.parallel_strategy.begin_training(
            self.model,
            global_batch_size=recipe.global_batch_size,
            micro_batch_size=recipe.micro_batch_size,
            autocast=recipe.autocast,
            data_checksum=recipe.data_checksum,
            overflow=None if self._restored is None else self._restored.get("overflow"),
        )
        # What a checkpoint brought of the earlier config gives way to this one.
        self._options.restore(self._factor(self.global_step))
        self._seed_rank()
        self.recorder.begin(
            step=self.global_step,
            share=self.parallel_strategy.broadcast,
            bytes_on_wire=(self._restored or {}).get("bytes_on_wire", 0),
        )
        self._began = True
        self._validate_if_owed()

    def finish(self) -> None:
        """Do what is left of a run whose checkpoint has all steps; nothing if it was trained just now."""
        if not self._began:
            self.on_train_start()
            self.on_train_end()

    def _validate_if_owed(self) -> None:
        """Validate at the step of a checkpoint, if the run ended between writing it and validating."""
        due = self._restored is not None and self.global_step % self.trainer.val_check_interval == 0
        if due and self.recorder.last_validation != self.global_step:
            self._validate()

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """One optimizer step on this rank's share of the global batch."""
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        self.rate = float(optimizer.param_groups[0]["lr"])  # type: ignore[union-attr]
        phase.enter(phase.TRAINING, step=self.global_step + 1)
        self.recorder.start_step()
        report, norm = self.parallel_strategy.run_step(
            batch,
            optimizer_step=optimizer.step,  # type: ignore[union-attr]
            max_norm=self.recipe.max_norm,
            stop_requested=self._stop_requested,
            own=self.recorder.own(),
        )
        scheduler.step()  # type: ignore[union-attr, call-arg]
        if self._train_loader is not None:
            self._train_loader.commit(self.global_step)
        self.recorder.end_step(self.global_step, report, norm, lr=self.rate)
        if report.stop:
            self._stop()

    def _stop(self) -> None:
        """End the run behind this step, on all ranks: a checkpoint, and no validation."""
        self.stopping = True
        self.trainer.should_stop = True
        self.trainer.limit_val_batches = 0  # else Lightning validates when it stops

    def _asked_to_stop(self) -> bool:
        """Whether any rank was asked; the same answer on all. Collective."""
        asked = torch.tensor(float(self._stop_requested()), device=self.device)
        if self.trainer.world_size > 1:
            phase.beat()
            dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self.parallel_strategy.parallel.control)
        return bool(asked)

    @override
    def on_validation_model_zero_grad(self) -> None:
        """Lightning would set all gradients to None here; they are views of flat storage and stay."""

    @override
    def on_validation_start(self) -> None:
        phase.enter(phase.VALIDATING, step=self.global_step)
        self._val = torch.zeros(2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add the loss of this rank's share to the sums.

        Raises:
            StopIteration: A rank was asked to stop: Lightning leaves the loop, on all ranks.
        """
        phase.beat()
        if self._asked_to_stop():
            self._stop()
            self._val = None
            raise StopIteration
        assert self._val is not None
        # As in training: memory, and what an expert's capacity is a share of, belong to a micro-batch.
        for micro_batch in batch.split(self.recipe.micro_batch_size):
            nll = self.parallel_strategy.budget.guard(partial(self._nll, micro_batch))
            self._val += torch.stack([nll.double(), micro_batch.num_targets().double()])

    def _nll(self, batch: Batch) -> Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.recipe.autocast):
            return self.model.loss_sums(batch).nll

    @override
    def on_validation_end(self) -> None:
        if self._val is None:
            return  # left early
        if self.trainer.world_size > 1:
            dist.all_reduce(self._val, group=self.parallel_strategy.parallel.control)
        nll, tokens = self._val.tolist()
        self.recorder.validation(self.global_step, nll / tokens)

    @override
    def on_train_end(self) -> None:
        """Compare the replicas once more; validate if the last step was not a validation step."""
        if self.parallel_strategy.reduction.holds_replicas:
            check_replicas(self.model, self.parallel_strategy.parallel)
        if not self.stopping and self.recorder.last_validation != self.global_step:
            self._validate()

    def _validate(self) -> None:
        loader = self.trainer.val_dataloaders
        if loader is None:
            return
        self.eval()
        with torch.no_grad():
            self.on_validation_start()
            with suppress(StopIteration):
                for index, batch in enumerate(loader):
                    self.validation_step(batch.to(self.device), index)
            self.on_validation_end()
        self.train()

    def facts(self) -> dict[str, Any]:
        """What must be the same when a checkpoint is taken up again, see `fits.check_facts`."""
        return {
            "format": CHECKPOINT_FORMAT,
            "data_checksum": self.recipe.data_checksum,
            "changes_model": self.recipe.changes_model,
            "function": self.recipe.function,
            "optimizer": name_of(self.trainer.optimizers[0]),
        }

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what is needed to go on bit-identically. Plain types and tensors only: loads with weights_only."""
        states: list[Any] = [None] * self.trainer.world_size
        generators = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self.device)
        dist.all_gather_object(states, generators, group=self.parallel_strategy.parallel.control)
        checkpoint[MODEL] = self.recipe.model
        checkpoint["sidestream"] = {
            **self.facts(),
            "step": self.global_step,
            "tokens": self.global_step * self.recipe.global_batch_size * self.recipe.seq_length,
            "rng": states,
            "seed": self.recipe.seed,
            "world_size": self.trainer.world_size,
            "expert_parallel_size": self.parallel_strategy.expert_parallel_size,
            "overflow": self.parallel_strategy.budget.state(),
            "bytes_on_wire": self.recorder.bytes_on_wire,
        }

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._restored = checkpoint["sidestream"]

    def _seed_rank(self) -> None:
        """Give this rank its random numbers: those of the checkpoint, or fresh ones that no other rank has."""
        rank, saved = self.trainer.global_rank, self._restored
        if saved is not None and saved["world_size"] == self.trainer.world_size:
            generators = saved["rng"][rank]
            torch.set_rng_state(generators["cpu"])
            if self.device.type == "cuda" and "cuda" in generators:
                torch.cuda.set_rng_state(generators["cuda"], self.device)
        else:
            torch.manual_seed(seed_of(self.recipe.seed, "rank", rank, self.global_step))
