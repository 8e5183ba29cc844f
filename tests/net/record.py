"""Losses and gradient norms of ten steps of 16 combinations, exact: what a change of structure must not change.

    python -m tests.net.record            what differs from net.json; nothing if all is as it was
    python -m tests.net.record --write    record anew, after a change that is meant to change numbers

Products and elementary functions are pinned to instructions that every x86 machine has. Makers still round a few sums
in another order, so net.json has one reference for each processor that was tried, all of the same code: a run equals
one of them, bit for bit and as a whole. On a processor of another maker it only has to be near: record the commit
before yours there.
The text is made here: no file of a machine is read.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

REFERENCE = Path(__file__).with_name("net.json")
PINNED = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
}
STEPS = 10
COMMON = f"""
    data=text data.val_fraction=0.2 data.global_batch_size=8 scheduler.warmup_steps=3 optimizer.lr=0.01
    trainer.max_steps={STEPS} trainer.val_check_interval=5 callbacks.progress.enabled=false
    model.hidden_size=32 model.ffn_hidden_size=32 model.expert_hidden_size=32
"""
STATIC = "dispatcher.capacity_factor=4.0"
SHORTCUT = "overlap=shortcut overlap.slot=1"
# Name -> overrides; on two ranks, but for `one_rank`.
COMBINATIONS = {
    "default": "",
    "one_rank": "dispatcher=local fusion=loop balance=quantile optimizer=sgd",
    "flagship": f"dispatcher=nccl_ep {SHORTCUT}",
    "flagship_taped": f"dispatcher=nccl_ep {STATIC} {SHORTCUT} graph=step balance=bias",
    "chunked_bf16": "dispatcher=hybrid_ep overlap=chunked trainer.precision=bf16-mixed balance=bias",
    "two_batch_late": "dispatcher=deep_ep overlap=two_batch overlap.delay_wgrad=true router=sigmoid",
    "shared_expert_accumulated": (
        "dispatcher=allgather overlap=shared_expert data.micro_batch_size=2 model.dropout=0.1"
    ),
    "pos1_gated": f"{SHORTCUT} overlap.tap=pos1 overlap.mix=cg2",
    "pos3_sharded": "overlap=shortcut overlap.slot=2 overlap.tap=pos3 overlap.post_norm=true strategy=fully_shard",
    "double_gating": f"{SHORTCUT} overlap.double_gating=true model.num_shared_experts=0 router.top_k=1",
    "sharded_bf16": "strategy=fully_shard trainer.precision=bf16-mixed balance.scope=global fusion=loop",
    "bf16_true": "dispatcher=nccl_ep trainer.precision=bf16-true router=sqrtsoftplus balance=none",
    "mega": f"fusion=mega {SHORTCUT}",
    "mega_taped_bf16": "fusion=mega graph=step trainer.precision=bf16-mixed",
    "data_parallel_padded": (
        "strategy.expert_parallel_size=1 router.expert_capacity_factor=1.0 router.pad_to_capacity=true "
        "router.jitter=0.1 data.packing=documents model.activation_checkpointing=true"
    ),
    "resumed_taped": (
        f"dispatcher=nccl_ep {STATIC} graph=step balance=bias router.jitter=0.1 link=throttled link.gbps=1.0 "
        "scheduler=cosine callbacks.checkpoint.every_n_steps=5"
    ),
}
STOPPED = ("resumed_taped",)  # after half of the steps, and resumed
ROUNDING = 0.1  # gradient norms in bf16 differ by 5 % between two makers after ten steps
KEPT = ("train/loss", "train/grad_norm", "val/loss")


def measure(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Name of the combination -> name of the metric -> its values in the order of steps."""
    from sidestream.tracking.folder import RunFolder
    from tests.train.fit import fit

    text = folder / "text.txt"
    text.write_text(
        "\n\n".join(
            f"{i} times {i + 3} is {i * (i + 3)}, and half of that {i * (i + 3) / 2}." for i in range(900)
        )
    )
    found = {}
    for name, overrides in COMBINATIONS.items():
        run, world = folder / name, 1 if name == "one_rank" else 2
        given = f"{COMMON} data.files=[{text}] paths.cache_dir={folder / 'cache'} {overrides}".split()
        if name in STOPPED:
            fit(run, *given, stop=(1, STEPS // 2), world=world)
            given.append(f"resume={run}")
        fit(run, *given, world=world)
        records = RunFolder(run).read_metrics()
        found[name] = {key: [record[key] for record in records if key in record] for key in KEPT}
        assert len(found[name]["train/loss"]) == STEPS, f"{name}: {len(found[name]['train/loss'])} steps"
    return found


def differences(found: dict, expected: dict, *, within: float = 0.0) -> list[str]:
    """One line for each combination and metric with other values: other bits, or further off than this share."""
    lines = []
    for name in sorted({*found, *expected}):
        for key in KEPT:
            ours, theirs = (values.get(name, {}).get(key, []) for values in (found, expected))
            same = [abs(a - b) <= within * abs(b) for a, b in zip(ours, theirs)]
            if len(ours) != len(theirs) or not all(same):
                step = same.index(False) if False in same else len(same)
                lines.append(f"{name} {key} from step {step + 1}: {ours[step:][:1]}, was {theirs[step:][:1]}")
    return lines


def processor() -> str:
    """What Linux calls this one."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, "unknown")


def main(arguments: list[str]) -> int:
    os.environ.update(PINNED)  # before torch is imported
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    references = json.loads(REFERENCE.read_text())
    if "--write" in arguments:
        # The others are of older numbers then, and have to be recorded anew on their machines.
        REFERENCE.write_text(json.dumps([{"processor": processor(), "combinations": found}], indent=1) + "\n")
        return 0
    known = any(reference["processor"].split()[0] == processor().split()[0] for reference in references)
    every = [
        differences(found, reference["combinations"], within=0.0 if known else ROUNDING)
        for reference in references
    ]
    fewest = min(every, key=len)
    same = "as they were" if known else f"within {ROUNDING:g} of what they were on other processors"
    print("\n".join(fewest) if fewest else f"{len(found)} combinations are {same}")
    return int(bool(fewest))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
