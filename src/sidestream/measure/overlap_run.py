"""scripts/measure_overlap.py on one rank: from the config to overlap.json, the picture and the table."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from sidestream import build
from sidestream.config.layout import Layout
from sidestream.data.batch import Batch
from sidestream.exchange.link import ThrottledLink
from sidestream.launch import torchrun
from sidestream.launch.record import Launch
from sidestream.launch.worker import RankEnv, available_cores
from sidestream.measure import environment as facts
from sidestream.model.transformer import MoETransformer
from sidestream.parallel.mesh import Parallel, build_parallel
from sidestream.parallel.overflow import BudgetKeeper
from sidestream.parallel.reduction import Reduction
from sidestream.parallel.step import TrainingStep
from sidestream.parallel.world import join_world, leave_world
from sidestream.profiling.bench import ARMS, BOTH, SHOWN, Bench, Measured
from sidestream.profiling.figures import ratio, remarks
from sidestream.profiling.picture import both_arms, save
from sidestream.profiling.work import StepWork, UnitWork, Work, unit_input
from sidestream.report.statistics import summarize
from sidestream.report.table import Table, numbers
from sidestream.tracking.folder import RunFolder, write_json_atomic
from sidestream.tracking.result import OverlapResult, RunResult

SCHEMA_VERSION = 1
VOCAB_SIZE = 256
EMULATED = "SIDESTREAM_EMULATED"  # what the surroundings of this process emulate, in words


@dataclass
class Built:
    """The model on this rank and what belongs to it."""

    cfg: DictConfig
    layout: Layout
    owns_world: bool
    parallel: Parallel
    reduction: Reduction
    model: MoETransformer
    device: torch.device
    batch: Batch

    def precision(self) -> AbstractContextManager[object]:
        if build.PRECISIONS[self.cfg.trainer.precision][1] is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def measure(cfg: DictConfig, *, layout: Layout, folder: Path, env: RankEnv) -> dict[str, Any]:
    """Measure as one rank; return the content of result.json. Collective.

    Args:
        cfg: The resolved config of scripts/measure_overlap.py.
        layout: What the launcher derived from it and the world.
        folder: The run folder; rank 0 writes in it, or in `measure.out`.
        env: This rank.
    """
    before = os.getloadavg()
    pinned = _pin(cfg, layout)
    built = _build(cfg, layout, env)
    work = _work(built)
    _settle_budget(built, work)
    bench = Bench(work)
    bench.record()
    options = cfg.measure
    if options.compute == "sleep":
        lengths = {name: 1e-3 * ms for name, ms in options.sleep_ms.items() if ms is not None}
        bench.fall_asleep(lengths)
    if options.comm_share is not None:
        bench.choose_rate(options.comm_share)
    bench.search_slot(built.parallel)
    measured = bench.measure(rounds=options.rounds, warmup=options.warmup, seed=cfg.seed)
    out = Path(options.out).expanduser() if options.out else folder
    if env.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    if options.trace:
        _profile(bench, out / f"trace_rank{env.rank}.json")
    ranks: list[Any] = [None] * env.world_size
    dist.all_gather_object(ranks, [measured.bars(arm) for arm in SHOWN])
    result: RunResult | None = None
    if env.rank == 0:
        launch = Launch.load(folder)
        record = _record(built, bench, measured, ranks, launch)
        record |= {"pinned": pinned, "load_average": {"before": list(before), "after": list(os.getloadavg())}}
        result = _result(record, launch)
        _write(record, result, out=out, folder=folder)
    bench.close()
    built.model.parts.dispatcher.close()
    if built.owns_world:
        dist.barrier()
        leave_world()
    return (result or RunResult(status="finished")).as_dict()


def _pin(cfg: DictConfig, layout: Layout) -> bool:
    """One core for this rank, of those that it was given."""
    if layout.device_type != "cpu" or not cfg.trainer.pin_cpu or not hasattr(os, "sched_setaffinity"):
        return False
    cores = available_cores()
    # More cores than ranks: the launcher gave every rank a share of its own. Fewer: they were left alone.
    if layout.local_world_size > 1 and len(cores) == os.cpu_count():
        return False
    os.sched_setaffinity(0, {cores[0]})
    return True


def _build(cfg: DictConfig, layout: Layout, env: RankEnv) -> Built:
    device = torch.device("cpu")
    if layout.device_type == "cuda":
        torch.cuda.set_device(env.local_rank)
        device = torch.device("cuda", env.local_rank)
    timeout = timedelta(seconds=cfg.strategy.timeout_seconds)
    owns_world = join_world(env, device, timeout=timeout, store=torchrun.store)
    parallel = build_parallel(
        expert_parallel_size=layout.expert_parallel_size, device_type=device.type, timeout=timeout
    )
    vocab_size = cfg.model.vocab_size or VOCAB_SIZE
    make = build.model_builder(
        cfg, vocab_size=vocab_size, device=device, num_sequences=layout.micro_batch_size
    )
    model, reduction = make(parallel), build.reduction(cfg)
    reduction.shard(model, parallel)
    generator = torch.Generator().manual_seed(cfg.seed + env.rank)
    size = (layout.micro_batch_size * layout.accumulation, cfg.data.seq_length + 1)
    batch = Batch.of(torch.randint(0, vocab_size, size, generator=generator)).to(device)
    return Built(cfg, layout, owns_world, parallel, reduction, model, device, batch)


def _work(built: Built) -> Work:
    cfg, model = built.cfg, built.model
    if cfg.measure.scope == "step":
        built.reduction.attach(model, built.parallel)
        step = TrainingStep(
            model,
            parallel=built.parallel,
            reduction=built.reduction,
            global_batch_size=cfg.data.global_batch_size,
            micro_batch_size=built.layout.micro_batch_size,
            autocast=build.PRECISIONS[cfg.trainer.precision][1] is not None,
        )
        return StepWork(step, built.batch)
    model.eval()
    micro_batch = built.batch.split(built.layout.micro_batch_size)[0]
    unit, h, context = unit_input(model, micro_batch, layer=cfg.measure.layer, precision=built.precision)
    return UnitWork(model, unit, h, context, precision=built.precision)


def _settle_budget(built: Built, work: Work) -> None:
    """Let a static receive buffer grow to what this routing needs, as the first step of a run would."""
    parts = built.model.parts
    keeper = BudgetKeeper(
        parts.dispatcher,
        built.parallel,
        device=built.device,
        mean_rows=max(1, parts.tokens_per_plan * parts.router.top_k),
    )

    def run() -> None:
        for name in work.passes:
            work.run(name)

    keeper.guard(run)


def _profile(bench: Bench, path: Path) -> None:
    """A Chrome trace of one serial and one overlapped run of this rank."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    bench.tracer.profiling = True
    with torch.profiler.profile(activities=activities) as profile:
        for arm in SHOWN:
            with torch.profiler.record_function(arm):
                bench.run(arm)
    bench.tracer.profiling = False
    profile.export_chrome_trace(str(path))


def _record(
    built: Built, bench: Bench, measured: Measured, ranks: list[Any], launch: Launch
) -> dict[str, Any]:
    """The content of overlap.json but for what only the caller knows."""
    cfg, layout, link = built.cfg, built.layout, bench.channel.link
    names = [*measured.passes, *([BOTH] if len(measured.passes) > 1 else [])]
    reports = {name: measured.report(name) for name in names}
    throttled = isinstance(link, ThrottledLink)
    hidden, travelling = measured.hidden_seconds()
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "measurement": "overlap",
        "status": "finished",
        "command": launch.command,
        "choices": launch.choices,
        "device": layout.device_type,
        "world_size": layout.world_size,
        "expert_parallel_size": layout.expert_parallel_size,
        "transport": built.model.parts.dispatcher.transport,
        "link": link.name,
        "link_gbps": link.bytes_per_second * 8e-9 if isinstance(link, ThrottledLink) else None,
        "link_latency_us": 1e6 * link.latency_s if isinstance(link, ThrottledLink) else None,
        "seed": cfg.seed,
        "precision": cfg.trainer.precision,
        **{key: cfg.measure[key] for key in ("scope", "layer", "compute", "comm_share", "rounds", "warmup")},
        "schedule": _schedule(bench),
        "shape": _shape(built),
        "sleep_ms": _sleeps(bench) if bench.tracer.asleep else None,
        "sleep_ms_given": dict(cfg.measure.sleep_ms),
        "threads_per_rank": torch.get_num_threads(),
        **facts.machine(),
        **facts.code(),
        "versions": facts.versions(()),
        "passes": {
            name: {
                "ms": {arm: summarize(measured.milliseconds(arm, name)) for arm in ARMS},
                "rounds_ms": {arm: measured.milliseconds(arm, name) for arm in ARMS},
                "e_hide_rounds": summarize(e) if (e := measured.e_hide_rounds(name)) else None,
                **{k: v for k, v in asdict(reports[name]).items() if not k.startswith("t_")},
            }
            for name in names
        },
        "e_trace": hidden / travelling if travelling else None,
        "remarks": remarks(reports[names[-1]], throttled=throttled, changes=bench.overlaps),
    }
    record["emulated"] = _emulated(record)
    record["overlap"] = asdict(_overlap(record))
    arms = both_arms(measured, ranks)
    record["picture"] = {"title": _title(record), "figures": _figures(record), **arms}
    return record


def _ms(seconds: list[float]) -> list[float]:
    return [round(1e3 * value, 4) for value in seconds]


def _schedule(bench: Bench) -> dict[str, Any]:
    """The schedule's choices, with what `auto` came to."""
    schedule = bench.schedule
    slots = schedule.slots
    told: dict[str, Any] = {"name": schedule.name}
    for key in ("tap", "num_chunks", "delay_wgrad"):
        if hasattr(schedule, key):
            told[key] = getattr(schedule, key)
    if slots is not None:
        told["slot"] = slots.fixed if slots.fixed is not None else dict(slots.found)
    return told


def _shape(built: Built) -> dict[str, Any]:
    cfg, layout = built.cfg, built.layout
    tokens = layout.micro_batch_size * cfg.data.seq_length
    return {
        "tokens_per_rank": tokens if cfg.measure.scope == "unit" else tokens * layout.accumulation,
        "seq_length": cfg.data.seq_length,
        "hidden_size": cfg.model.hidden_size,
        "num_experts": cfg.model.num_experts,
        "expert_hidden_size": cfg.model.expert_hidden_size,
        "top_k": built.model.parts.router.top_k,
        "shared_width": built.model.shape.shared_width,
        "ffn_hidden_size": cfg.model.ffn_hidden_size,
    }


def _sleeps(bench: Bench) -> dict[str, Any]:
    """Part -> milliseconds, forward and backward, of each time it is called."""
    found: dict[str, list[list[float]]] = {}
    for (_, name, _), recorded in sorted(bench.tracer.recorded.items()):
        if name != "router":
            found.setdefault(name, []).append(_ms(list(recorded.seconds)))
    return found


def _emulated(record: dict[str, Any]) -> list[str]:
    told = []
    if record["link"] == "throttled":
        told.append(f"the wire: {record['link_gbps']:.3g} Gbit/s, {record['link_latency_us']:.0f} us latency")
    if record["compute"] == "sleep":
        given = {part: ms for part, ms in record["sleep_ms_given"].items() if ms is not None}
        lengths = ", ".join(f"{part} {ms:g} ms" for part, ms in given.items())
        why = f"as long as asked for ({lengths})" if lengths else "as long as they took"
        told.append(f"compute: parts sleep {why}, so that they share no core with the exchange")
    if surroundings := os.environ.get(EMULATED):
        told.append(surroundings)
    elif record["device"] == "cpu":
        told.append("ranks are processes of one machine, gloo over the loopback")
    return told


def _overlap(record: dict[str, Any]) -> OverlapResult:
    last = list(record["passes"].values())[-1]
    medians = {arm: last["ms"][arm]["median"] for arm in ARMS}
    return OverlapResult(
        compute_ms=medians["compute"],
        comm_ms=medians["communication"],
        serial_ms=medians["serial"],
        overlapped_ms=medians["overlapped"],
        e_hide=last["e_hide"],
        e_comm=last["e_comm"],
        bound=last["bound"],
    )


def _title(record: dict[str, Any]) -> list[str]:
    """The lines above the picture: everything needed to know what it shows."""
    schedule, shape = dict(record["schedule"]), record["shape"]
    name, slot = schedule.pop("name"), schedule.pop("slot", None)
    shown_values = {key: value for key, value in schedule.items() if value not in (False, "auto")}
    details = [key if value is True else f"{key} {value}" for key, value in shown_values.items()]
    if isinstance(slot, dict):
        details += [f"{tap}, slot {number}" for tap, number in slot.items()]
    elif slot is not None:
        details.append(f"slot {slot}")
    shown = f" ({', '.join(details)})" if details else ""
    what = "one MoE unit" if record["scope"] == "unit" else "one training step"
    link = f"link={record['link']}"
    if record["link_gbps"] is not None:
        link += f" {record['link_gbps']:.3g} Gbit/s"
    shared = f", shared expert of width {shape['shared_width']}" if shape["shared_width"] else ""
    return [
        f"overlap={name}{shown}: {what}",
        f"dispatcher={record['choices'].get('dispatcher')}, transport {record['transport']}, {link}, "
        f"{record['world_size']} ranks on {record['device']}, {record['precision']}",
        f"{shape['tokens_per_rank']} tokens x {shape['hidden_size']} features per rank, sequences of "
        f"{shape['seq_length']}, {shape['num_experts']} experts of width {shape['expert_hidden_size']}, "
        f"top-{shape['top_k']}{shared}",
        f"emulated: {'; '.join(record['emulated']) or 'nothing'}",
    ]


def _figures(record: dict[str, Any]) -> str:
    last = record["overlap"]
    return f"E_hide {ratio(last['e_hide'])}, at most {ratio(last['bound'])} with this schedule"


def _result(record: dict[str, Any], launch: Launch) -> RunResult:
    dirty = "-dirty" if record["dirty"] else ""
    kept = ("device", "world_size", "expert_parallel_size", "transport", "link", "seed", "precision")
    return RunResult(
        status="finished",
        command=launch.command,
        choices=launch.choices,
        **{key: record[key] for key in kept},
        overlap=OverlapResult(**record["overlap"]),
        versions=record["versions"],
        commit=f"{record['commit']}{dirty}" if record["commit"] else None,
    )


def _write(record: dict[str, Any], result: RunResult, *, out: Path, folder: Path) -> None:
    write_json_atomic(out / "overlap.json", record)
    paths = [out / "overlap.json"]
    # On a GPU spans are the host's: they say when work was issued, not when it ran.
    if record["device"] == "cpu":
        paths += save(record["picture"], out)
    RunFolder(folder).write_result(result.as_dict())
    say: Callable[..., None] = partial(print, flush=True)
    for line in table(record):
        say(line)
    for line in record["remarks"]:
        say(f"note: {line}")
    say(*(os.path.relpath(path) for path in paths), sep="\n")


def table(record: dict[str, Any]) -> list[str]:
    """The figures as lines of text."""
    lines = [*record["picture"]["title"], ""]
    shares = {
        "x": "speedup",
        "E_hide": "e_hide",
        "at most": "bound",
        "E_comm": "e_comm",
        "exposed": "exposed",
    }
    shown = Table(["", *numbers("compute", "comm", "serial", "overlapped", *shares)])
    for name, figures in record["passes"].items():
        times = [f"{figures['ms'][arm]['median']:.1f} ms" for arm in ARMS]
        shown.add(name, *times, *(ratio(figures[key]) for key in shares.values()))
    lines += shown.plain().splitlines()
    last = list(record["passes"].values())[-1]
    spread = last["e_hide_rounds"]
    if spread is not None:
        lines.append(
            f"E_hide of single rounds: quartiles {spread['q1']:.2f} to {spread['q3']:.2f} of {record['rounds']}; "
            f"reached {ratio(last['reached'])} of what this schedule can hide; E_trace {ratio(record['e_trace'])}; "
            f"load average {record['load_average']['before'][0]:.1f} before, "
            f"{record['load_average']['after'][0]:.1f} after"
        )
    return lines


__all__ = ["measure", "table"]
