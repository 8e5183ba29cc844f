"""Objects -> result. One rank of a training run, from the resolved config to result.json.

    data -> model builder -> strategy, module, trainer -> fit -> result

The caller (`launch/worker.py`) has set up signals, logging and cores, and turns an exception into an exit code.
"""

from __future__ import annotations

import logging
import os
import shlex
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from sidestream import build
from sidestream.config import withheld
from sidestream.config.layout import Layout
from sidestream.config.measure_check import report_steps
from sidestream.conformance import answers
from sidestream.convert.start import described
from sidestream.data.corpus import Corpus
from sidestream.data.document_packing import PackedDataset
from sidestream.data.loaders import StatefulLoader, train_loader, val_loader
from sidestream.data.ngram import ngram_baselines
from sidestream.graph.check import LintFinished
from sidestream.graph.findings import legend
from sidestream.launch import phase, status, stopping, torchrun
from sidestream.launch.record import Launch
from sidestream.launch.worker import RankEnv
from sidestream.lightning.checkpoint import SaveCheckpoints
from sidestream.lightning.environment import RankEnvironment
from sidestream.lightning.loggers import ClosingWandbLogger, build_loggers, finish_loggers, mirror_picture
from sidestream.lightning.module import Recipe, SidestreamModule
from sidestream.lightning.overlap_callback import ReportOverlap
from sidestream.lightning.private import finish_after_fit, own_signals
from sidestream.lightning.progress import RichProgress
from sidestream.lightning.recorder import Recorder, RunSizes
from sidestream.lightning.strategy import ExpertParallelStrategy
from sidestream.model.account import Account, account
from sidestream.profiling.figures import one_line
from sidestream.profiling.picture import save
from sidestream.tracking import expert_load, names
from sidestream.tracking.folder import RunFolder, code_state, package_versions
from sidestream.tracking.integrity import resumed
from sidestream.tracking.machine import Peak, memory_reader
from sidestream.tracking.machine import peak as device_peak
from sidestream.tracking.result import Baselines, GraphResult, Metrics, Overflow, OverlapResult, RunResult

log = logging.getLogger(__name__)

LINT_STEPS = 8  # a schedule may need a few before it has decided


def train(cfg: DictConfig, *, layout: Layout, folder: Path, env: RankEnv) -> dict[str, Any]:
    """Train as one rank; return the content of result.json.

    Args:
        cfg: The resolved config.
        layout: What the launcher derived from it and the world.
        folder: The run folder; rank 0 writes in it.
        env: This rank.

    Raises:
        ConfigError: The user can fix it.
        Exception: Anything else that ends the run; the caller records it.
    """
    _quiet()
    run_folder, launch = RunFolder(folder), Launch.load(folder) if env.rank == 0 else None
    phase.enter(phase.READING)
    corpus: Corpus = answers.load(build.make(cfg, "data"))
    phase.enter(phase.BUILDING)
    counts = _account(cfg, corpus)
    start = _start_result(cfg, layout=layout, launch=launch, corpus=corpus, counts=counts)
    if env.rank == 0 and launch is not None:
        run_folder.write_env(command=shlex.split(launch.command))
        run_folder.write_result(start.as_dict())
    loggers = _loggers(cfg, launch=launch, folder=folder, layout=layout, start=start, rank=env.rank)
    progress = RichProgress(
        rank=env.rank,
        log_every_n_steps=cfg.trainer.log_every_n_steps,
        enabled=cfg.callbacks.progress.enabled,
        patience=status.AGAIN,
    )
    reporting = ReportOverlap(steps=report_steps(cfg, layout))
    failed = True
    try:
        result = _fit(cfg, layout, env, run_folder, corpus, start, loggers, progress, reporting)
        if env.rank == 0 and result.status == "finished":  # who asked to stop waits; a resume draws them
            _draw_load(run_folder, loggers, result)
            _draw_overlap(run_folder, loggers, result, reporting)
        failed = False
    finally:
        if any(isinstance(logger, ClosingWandbLogger) for logger in loggers):
            phase.enter(phase.UPLOADING)
        finish_loggers(loggers, int(failed))
    if env.rank == 0:
        run_folder.write_result(result.as_dict())
        metrics = result.metrics
        shown = Path(os.path.relpath(folder))
        progress.show_end(
            val_loss=metrics.val_loss,
            mfu=metrics.mfu,
            folder=shown,
            status=result.status,
            overlap=_overlap_line(result),
        )
    return result.as_dict()


def _fit(
    cfg: DictConfig,
    layout: Layout,
    env: RankEnv,
    run_folder: RunFolder,
    corpus: Corpus,
    start: RunResult,
    loggers: list[Logger],
    progress: RichProgress,
    reporting: ReportOverlap,
) -> RunResult:
    strategy = ExpertParallelStrategy(
        env=env,
        expert_parallel_size=layout.expert_parallel_size,
        reduction=build.reduction(cfg),
        timeout_seconds=cfg.strategy.timeout_seconds,
        graph=build.make(cfg, "graph"),
        store=torchrun.store,
    )
    common: dict[str, Any] = {
        "seq_length": cfg.data.seq_length,
        "global_batch_size": cfg.data.global_batch_size,
        "packing": cfg.data.get("packing", "concat"),
    }
    ranks: dict[str, Any] = {"rank": env.rank, "world_size": env.world_size}
    batches = train_loader(corpus, shuffle=cfg.data.shuffle, seed=cfg.seed, **common, **ranks)
    device = _device(layout, env)
    weights, autocast = build.PRECISIONS[cfg.trainer.precision]
    peak = device_peak(cfg.trainer.peak_tflops, device=device, dtype=autocast or weights)
    recorder = Recorder(
        rank=env.rank,
        folder=run_folder,
        loggers=loggers,
        progress=progress,
        sizes=RunSizes(
            tokens_per_step=cfg.data.global_batch_size * cfg.data.seq_length,
            flops_per_token=start.flops_per_token or 0.0,
            expert_parallel_size=layout.expert_parallel_size,
            max_steps=cfg.trainer.max_steps,
            every=cfg.trainer.log_every_n_steps,
        ),
        peak=peak,
        memory=memory_reader(device),
    )
    module = _module(cfg, layout, corpus, start, recorder, batches, device)
    if env.rank == 0:
        _show_start(progress, start, corpus, batches, run_folder.path)
        if cfg.router.get("force_balance"):
            log.warning(
                "router.force_balance=true: experts are dealt out evenly, not chosen; for benchmarks only"
            )
    trainer = _trainer(cfg, layout, env, strategy, loggers, [progress, reporting], run_folder.path)
    finish_after_fit(trainer, module.finish)
    validation = None
    if cfg.trainer.limit_val_batches:
        limit = cfg.trainer.limit_val_batches
        validation = val_loader(corpus, num_batches=limit, **common, **ranks)
    try:
        trainer.fit(
            module, batches, validation, ckpt_path=None if cfg.resume is None else resumed(cfg.resume)
        )
    except LintFinished as done:
        if env.rank == 0:
            told = [*done.lines, *legend(done.lines)] or ["clean: a graph can repeat this step"]
            print("graph.lint:", *told, sep="\n  ", flush=True)
        if done.lines:
            raise
        result = replace(start, status="finished", graph=GraphResult(lint=[]))
    else:
        result = _end_result(start, module, recorder, strategy, peak)
    phase.enter(phase.FINISHING)
    # Only at a regular end: after an error the other ranks may not come to a collective tear-down.
    module.model.parts.dispatcher.close()
    strategy.leave_world()
    return result


def _module(
    cfg: DictConfig,
    layout: Layout,
    corpus: Corpus,
    start: RunResult,
    recorder: Recorder,
    batches: StatefulLoader,
    device: torch.device,
) -> SidestreamModule:
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    stored = withheld.names(config, withheld.published())
    return SidestreamModule(
        build_model=build.model_builder(
            cfg,
            vocab_size=corpus.vocab_size,
            tokenizer=corpus.tokenizer,
            device=device,
            num_sequences=layout.micro_batch_size,
        ),
        build_optimizer=build.optimizer_builder(cfg),
        factor=answers.factor_of(build.make(cfg, "scheduler", max_steps=cfg.trainer.max_steps)),
        recipe=Recipe(
            seed=cfg.seed,
            global_batch_size=cfg.data.global_batch_size,
            micro_batch_size=layout.micro_batch_size,
            seq_length=cfg.data.seq_length,
            max_norm=cfg.trainer.gradient_clip_val,
            autocast=build.PRECISIONS[cfg.trainer.precision][1] is not None,
            data_checksum=corpus.checksum,
            changes_model=bool(start.changes_model),
            function=build.make_schedule(cfg).function,
            initial_weights=build.initial_weights(cfg),
            model=described(stored, vocab_size=corpus.vocab_size, tokenizer=corpus.tokenizer),
        ),
        recorder=recorder,
        stop_requested=lambda: stopping.requested() is not None,
        train_loader=batches,
    )


def _trainer(
    cfg: DictConfig,
    layout: Layout,
    env: RankEnv,
    strategy: ExpertParallelStrategy,
    loggers: list[Logger],
    callbacks: list[Any],
    folder: Path,
) -> Trainer:
    saving = SaveCheckpoints(
        run_folder=folder,
        every_n_steps=cfg.callbacks.checkpoint.every_n_steps,
        keep_last=cfg.callbacks.checkpoint.keep_last,
    )
    trainer = Trainer(
        accelerator="gpu" if layout.device_type == "cuda" else "cpu",
        devices=layout.local_world_size,
        num_nodes=layout.world_size // layout.local_world_size,
        strategy=strategy,
        plugins=[RankEnvironment(env)],
        # The lint ends a run by itself, once it has seen what it needs.
        max_steps=max(cfg.trainer.max_steps, LINT_STEPS) if cfg.graph.get("lint") else cfg.trainer.max_steps,
        max_epochs=-1,
        val_check_interval=cfg.trainer.val_check_interval,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=loggers or False,
        callbacks=[*callbacks, saving],
        inference_mode=False,  # fully_shard gathers into tensors that training uses again
        default_root_dir=folder,
    )
    own_signals(trainer)
    return trainer


def _device(layout: Layout, env: RankEnv) -> torch.device:
    if layout.device_type == "cuda":
        torch.cuda.set_device(env.local_rank)
        return torch.device("cuda", env.local_rank)
    return torch.device("cpu")


def _account(cfg: DictConfig, corpus: Corpus) -> Account:
    shape = build.model_shape(cfg, vocab_size=corpus.vocab_size)
    top_k = build.make(cfg, "router").top_k  # a user's own router may fix it
    schedule = build.make_schedule(cfg)
    with torch.device("meta"):
        added = schedule.extra(shape).values()
        extra = sum(p.numel() for module in added for p in module.parameters())
    gates = 2 if schedule.double_gating else 1
    return account(shape, top_k=gates * top_k, seq_length=cfg.data.seq_length, extra_per_unit=extra)


def _start_result(
    cfg: DictConfig, *, layout: Layout, launch: Launch | None, corpus: Corpus, counts: Account
) -> RunResult:
    """What is known before the first step."""
    commit, dirty = code_state()
    return RunResult(
        status="running",
        command=launch.command if launch else None,
        choices=launch.choices if launch else {},
        device=layout.device_type,
        world_size=layout.world_size,
        expert_parallel_size=layout.expert_parallel_size,
        # What `transport=auto` decides on a GPU is known once the ranks have met.
        transport="torch" if layout.expert_parallel_size > 1 and layout.device_type == "cpu" else None,
        link=launch.choices.get("link") if launch else None,
        seed=cfg.seed,
        precision=cfg.trainer.precision,
        data_checksum=corpus.checksum,
        eos_token=corpus.eos_token,
        data=corpus.record,
        params_total=counts.params_total,
        params_active=counts.params_active,
        flops_per_token=counts.flops_per_token,
        changes_model=bool(build.make_schedule(cfg).changes_model or cfg.router.get("force_balance")),
        metrics=Metrics(baselines=Baselines(**ngram_baselines(corpus)) if launch else Baselines()),
        versions=package_versions(),
        commit=f"{commit}-dirty" if commit and dirty else commit,
    )


def _end_result(
    start: RunResult,
    module: SidestreamModule,
    recorder: Recorder,
    strategy: ExpertParallelStrategy,
    peak: Peak,
) -> RunResult:
    summary = recorder.summary()
    metrics = replace(
        start.metrics,
        train_loss=summary.train_loss,
        val_loss=summary.val_loss,
        tokens=summary.tokens,
        tokens_per_second=summary.tokens_per_second,
        step_ms=summary.step_ms,
        waited_share=summary.waited_share,
        mfu=summary.mfu,
        peak_tflops=summary.peak_tflops,
        peak_source=peak.source,
        peak_memory_bytes=_peak_memory(strategy),
        bytes_on_wire=summary.bytes_on_wire,
    )
    return replace(
        start,
        status="interrupted" if module.stopping else "finished",
        metrics=metrics,
        transport=_transport(module, strategy),
        overflow=Overflow(**strategy.budget.result()),
        overlap=_measured_overlap(module) or start.overlap,
        graph=GraphResult(**vars(counts)) if (counts := strategy.graph.counts()) is not None else start.graph,
    )


def _measured_overlap(module: SidestreamModule) -> OverlapResult | None:
    """What `callbacks.overlap_report` measured last."""
    callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
    return next(callback for callback in callbacks if isinstance(callback, ReportOverlap)).result()


def _overlap_line(result: RunResult) -> str | None:
    """What a run with a schedule that overlaps says at its end, if it measured."""
    measured: OverlapResult = result.overlap
    if (
        measured.serial_ms is None
        or measured.overlapped_ms is None
        or result.choices.get("overlap") == "none"
    ):
        return None
    return one_line(measured.serial_ms, measured.overlapped_ms, e_hide=measured.e_hide, bound=measured.bound)


def _transport(module: SidestreamModule, strategy: ExpertParallelStrategy) -> str | None:
    """What moved the rows; a user's own dispatcher may not say."""
    named = getattr(module.model.parts.dispatcher, "transport", None)
    return named if strategy.expert_parallel_size > 1 else None


def _peak_memory(strategy: ExpertParallelStrategy) -> int:
    """Largest of all ranks: resident set of the process on CPU, allocated memory on CUDA."""
    device = strategy.root_device
    _, peak = memory_reader(device)()
    value = torch.tensor(peak, dtype=torch.int64, device=device)
    if strategy.world_size > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=strategy.parallel.control)
    return int(value)


def _draw_load(run_folder: RunFolder, loggers: list[Logger], result: RunResult) -> None:
    """expert_load.png and its mirrors. A picture is no reason for a trained run to fail."""
    try:
        picture = expert_load.write_picture(run_folder.path)
        if picture is not None:
            step = run_folder.read_expert_load()[-1][names.STEP]
            mirror_picture(loggers, names.LOAD_PICTURE, picture, step=step)
    except Exception as error:
        log.warning("no picture of the expert load: %s: %s", type(error).__name__, error)


def _draw_overlap(
    run_folder: RunFolder, loggers: list[Logger], result: RunResult, reporting: ReportOverlap
) -> None:
    """overlap.png and overlap.svg of the last report, and their mirrors; no reason to fail either."""
    try:
        choices = result.choices
        title = f"overlap={choices.get('overlap')} dispatcher={choices.get('dispatcher')} link={result.link}"
        if (picture := reporting.picture(title)) is not None:
            png = save(picture, run_folder.path)[0]
            mirror_picture(loggers, names.OVERLAP_PICTURE, png, step=reporting.last_step)
    except Exception as error:
        log.warning("no picture of the overlap: %s: %s", type(error).__name__, error)


def _loggers(
    cfg: DictConfig, *, launch: Launch | None, folder: Path, layout: Layout, start: RunResult, rank: int
) -> list[Logger]:
    identity = {
        "world_size": layout.world_size,
        "expert_parallel_size": layout.expert_parallel_size,
        "expert_data_parallel_size": layout.expert_data_parallel_size,
        "commit": start.commit,
        "torch": str(torch.__version__),
        "gpu": torch.cuda.get_device_name() if layout.device_type == "cuda" else None,
        "overrides": launch.overrides if launch else [],
        "data_checksum": start.data_checksum,
    }
    choices = launch.choices if launch else {}
    return build_loggers(cfg.logger, folder=folder, cfg=cfg, choices=choices, identity=identity, rank=rank)


def _show_start(
    progress: RichProgress, start: RunResult, corpus: Corpus, batches: StatefulLoader, folder: Path
) -> None:
    log.info("data: %s", corpus.record.line())
    for warning in corpus.record.warnings():
        log.warning("data: %s", warning)
    baselines = start.metrics.baselines
    counts = {"bigram": baselines.bigram, "trigram": baselines.trigram}
    rows = batches.rows
    fill = f", rows {rows.fill:.1%} full" if isinstance(rows, PackedDataset) else ""
    progress.show_start(
        choices=start.choices,
        world_size=start.world_size or 1,
        expert_parallel_size=start.expert_parallel_size or 1,
        transport=start.transport,
        params_total=start.params_total or 0,
        params_active=start.params_active or 0,
        data_name=f"{corpus.name}{fill}",
        baselines={name: loss for name, loss in counts.items() if loss is not None},
        unit=f"nats/{corpus.unit}",
        folder=Path(os.path.relpath(folder)),
    )


def _quiet() -> None:
    """Lightning's tips and our known, harmless warnings are not for the terminal."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning.*")
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
