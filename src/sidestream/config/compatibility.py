"""What fits what, decided before any process is started. Pure but for looking at folders and at this machine."""

import math
import os
import tempfile
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from sidestream.config.availability import Machine
from sidestream.config.capabilities import capabilities
from sidestream.config.construct import check_arguments
from sidestream.config.data_files import check_data
from sidestream.config.devices import count_gpus
from sidestream.config.dispatch_check import check_dispatch
from sidestream.config.errors import ConfigError
from sidestream.config.fusion_check import check_fusion
from sidestream.config.graph_check import check_graph
from sidestream.config.keys import check_keys
from sidestream.config.layout import Layout
from sidestream.config.measure_check import check_measure
from sidestream.config.model_check import check_model, moe_blocks
from sidestream.config.overlap_check import check_overlap
from sidestream.config.predict_check import check_for_training
from sidestream.config.routing_check import SHIPPED, check_routing
from sidestream.config.trust import check_targets
from sidestream.convert.start import check_weights
from sidestream.tracking.untrusted import printable


def check(
    cfg: DictConfig,
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
    device_count: int | None = None,
    machine: Machine | None = None,
    predicts: bool = False,
) -> Layout:
    """Checks a composed config and derives the layout of its ranks.

    Args:
        cfg: The root config.
        world_size: Ranks that exist already (torchrun); None lets the config decide.
        local_world_size: How many of these ranks are on this machine; None means world_size / num_nodes.
        device_count: GPUs of this machine; None counts them.
        machine: Where the ranks run, if not here.
        predicts: Nothing is trained, so what cannot be is allowed.

    Raises:
        ConfigError: naming the key to change.
    """
    check_keys(cfg)
    if not predicts:
        check_for_training(cfg)
    check_targets(cfg, imports=not predicts)
    if not predicts:
        check_arguments(cfg)
    check_model(cfg.model)
    _check_router(cfg)
    check_data(cfg)
    _check_folders(cfg)
    _check_precision(cfg)
    check_strategy(cfg.strategy)
    world_size, local, device_type = _world(cfg, world_size, local_world_size, device_count)
    expert_parallel_size = _expert_parallel_size(cfg, world_size)
    micro_batch_size, accumulation = _batches(cfg.data, world_size)
    check_routing(cfg, num_tokens=micro_batch_size * cfg.data.seq_length)
    layout = Layout(
        world_size=world_size,
        local_world_size=local,
        expert_parallel_size=expert_parallel_size,
        expert_data_parallel_size=world_size // expert_parallel_size,
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        device_type=device_type,
    )
    check_fusion(cfg, layout)
    check_dispatch(cfg, layout, machine=machine)
    check_overlap(cfg, layout)
    check_graph(cfg, layout)
    check_measure(cfg, layout)
    return layout


def auto_warmup(max_steps: int) -> int:
    """Steps of `scheduler.warmup_steps=auto`: a tenth of the run, at most 50."""
    return min(50, max_steps // 10)


def remarks(cfg: DictConfig, layout: Layout) -> list[str]:
    """What a config that runs does in another way than somebody may think, a line each.

    Args:
        cfg: The root config, which `check` has passed.
        layout: What it returned.
    """
    found = []
    experts, world, size = cfg.model.num_experts, layout.world_size, layout.expert_parallel_size
    wanted = (
        cfg.strategy.expert_parallel_size == "auto"
        and not capabilities(cfg.dispatcher).max_expert_parallel_size
    )
    if (
        wanted
        and size < world
        and moe_blocks(cfg.model.num_layers, cfg.model.moe_layers, cfg.model.first_dense_layers)
    ):
        what = "is off: each rank holds all experts" if size == 1 else f"has groups of {size}"
        found.append(
            f"expert parallelism {what}, because model.num_experts={experts} is no multiple of the {world} ranks; "
            f"set model.num_experts={-(-experts // world) * world}, "
            f"or strategy.expert_parallel_size={size} if that is meant"
        )
    warmup, steps = cfg.scheduler.get("warmup_steps"), cfg.trainer.max_steps
    if isinstance(warmup, int) and warmup >= steps and warmup > 0:
        found.append(
            f"scheduler.warmup_steps={warmup} is not over within trainer.max_steps={steps}: the rate never reaches "
            f"optimizer.lr; set scheduler.warmup_steps=auto for a tenth of the run"
        )
    if isinstance(separator := cfg.data.get("separator"), str):
        typed = str(OmegaConf.to_container(cfg.data, resolve=False)["separator"])  # type: ignore[index,call-overload]
        if "${" in typed.replace("\\${", ""):
            text = typed.replace("${", "\\${")
            found.append(
                f"data.separator={printable(separator)} is what {printable(typed)} stands for; "
                f"for the text itself, set 'data.separator=\"{printable(text)}\"'"
            )
    return found


def _check_precision(cfg: DictConfig) -> None:
    if cfg.trainer.precision == "bf16-true" and not capabilities(cfg.strategy).mixed_dtypes:
        raise ConfigError(
            "trainer.precision",
            "bf16-true",
            "this strategy shards tensors of one dtype together, and the router's gate stays fp32",
            expected="32-true or bf16-mixed",
            fix="trainer.precision=bf16-mixed",
        )


def _check_router(cfg: DictConfig) -> None:
    top_k, experts = cfg.router.get("top_k"), cfg.model.num_experts
    if top_k is None:  # a user's own router without this key
        return
    if type(top_k) is not int or top_k < 1:
        raise ConfigError(
            "router.top_k",
            top_k,
            "every token goes to a whole number of experts",
            expected=f"a value from 1 to model.num_experts={experts}",
            fix="router.top_k=1",
        )
    if top_k > experts:
        raise ConfigError(
            "router.top_k",
            top_k,
            f"more than model.num_experts={experts}",
            expected=f"a value from 1 to {experts}",
            fix=f"router.top_k={experts}",
        )
    shipped = str(cfg.router.get("_target_", "")).startswith(SHIPPED)
    if shipped and top_k == 1 and cfg.router.get("normalize") is True:
        raise ConfigError(
            "router.normalize",
            True,
            "with router.top_k=1 every weight becomes 1 and the loss does not reach the router",
            expected="auto or false, or router.top_k > 1",
            fix="router.normalize=auto",
        )


def _check_folders(cfg: DictConfig) -> None:
    """A folder that is written must be creatable; anything else a data option points at must be there."""
    for key in ("paths.log_dir", "paths.cache_dir", "data.cache_dir"):
        value = OmegaConf.select(cfg, key)
        if value is None:
            continue
        missing, folder = False, Path(value).expanduser().absolute()
        while not folder.exists():
            missing, folder = True, folder.parent
        if (
            not folder.is_dir()
            or not os.access(folder, os.W_OK | os.X_OK)
            or (missing and not _can_hold(folder))
        ):
            raise ConfigError(
                key, value, f"{folder} cannot be written", expected="a writable folder", fix=f"{key}=<folder>"
            )
    # A resumed run takes its checkpoint instead.
    if (value := cfg.get("initial_weights")) is not None and cfg.get("resume") is None:
        folder = Path(value).expanduser()
        if not any((folder / name).is_file() for name in ("config.json", ".metadata")):
            key, why = "initial_weights", "no weights there"
            expected = "a Hugging Face folder (config.json) or a checkpoint folder (.metadata)"
            steps = sorted(folder.glob("checkpoints/step-*/.metadata"))
            fix = f"{key}={steps[-1].parent if steps else '<such a folder>'}"
            raise ConfigError(key, value, why, expected=expected, fix=fix)
        check_weights(OmegaConf.to_container(cfg, resolve=True), folder)  # type: ignore[arg-type]
    for name, value in cfg.data.items():
        points_at_data = name in ("path", "root") or name.endswith(("_path", "_dir", "_file"))
        if not points_at_data or name == "cache_dir" or not isinstance(value, str):
            continue
        if not os.access(Path(value).expanduser(), os.R_OK):
            key, why = f"data.{name}", "missing or unreadable"
            raise ConfigError(key, value, why, expected="existing data", fix=f"{key}=<existing path>")


def _can_hold(folder: Path) -> bool:
    """Whether folders can be made in one: in /proc, or for root on a disk that is read-only, only trying tells."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".sidestream-", dir=folder))
    except OSError:
        return False
    return True


def _world(
    cfg: DictConfig, world_size: int | None, local_world_size: int | None, device_count: int | None
) -> tuple[int, int, str]:
    """Returns (world size, ranks on this machine, device type)."""
    trainer = cfg.trainer
    gpus = 0 if trainer.accelerator == "cpu" else count_gpus() if device_count is None else device_count
    if trainer.accelerator == "gpu" and gpus == 0:
        raise ConfigError(
            "trainer.accelerator",
            "gpu",
            "no NVIDIA GPU is visible on this machine",
            expected="cpu or auto here",
            fix="trainer.accelerator=cpu",
        )
    devices, nodes = trainer.devices, trainer.num_nodes
    if world_size is None:
        if nodes > 1:
            raise ConfigError(
                "trainer.num_nodes",
                nodes,
                "this command starts ranks on one machine",
                expected="1, or one torchrun per machine",
                fix="trainer.num_nodes=1",
            )
        local = (gpus or 2) if devices == "auto" else devices
        world_size = local
    else:
        if devices != "auto" and devices * nodes != world_size:
            raise ConfigError(
                "trainer.devices",
                devices,
                f"times trainer.num_nodes={nodes} is not the world size {world_size} of torchrun",
                expected="the number of ranks that exist",
                fix="trainer.devices=auto",
            )
        local = local_world_size or world_size // nodes
    if gpus and local > gpus:
        raise ConfigError(
            "trainer.devices",
            devices,
            f"{local} ranks, but {gpus} GPUs are visible on this machine",
            expected=f"at most {gpus}",
            fix=f"trainer.devices={gpus}",
        )
    return world_size, local, "cuda" if gpus else "cpu"


def check_strategy(strategy: DictConfig) -> None:
    """Refuses a strategy without the keys that every one needs; a user's own has no schema that would."""
    size, seconds = strategy.get("expert_parallel_size"), strategy.get("timeout_seconds")
    real = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    for name, value, fits, expected, fix in (
        ("expert_parallel_size", size, size == "auto" or type(size) is int, "auto or a group size", "auto"),
        ("timeout_seconds", seconds, real and seconds > 0, "seconds, more than 0", "300"),
    ):
        if not fits:
            why = "needed by every strategy" if value is None else "not what a strategy takes"
            raise ConfigError(f"strategy.{name}", value, why, expected=expected, fix=f"strategy.{name}={fix}")


def _expert_parallel_size(cfg: DictConfig, world_size: int) -> int:
    key, value = "strategy.expert_parallel_size", cfg.strategy.expert_parallel_size
    experts = cfg.model.num_experts
    most = capabilities(cfg.dispatcher).max_expert_parallel_size or world_size
    dense = not moe_blocks(cfg.model.num_layers, cfg.model.moe_layers, cfg.model.first_dense_layers)
    possible = [n for n in range(1, world_size + 1) if world_size % n == 0 and experts % n == 0 and n <= most]
    best = 1 if dense else max(possible)
    if value == "auto":
        return best

    def refuse(why: str, expected: str) -> ConfigError:
        return ConfigError(key, value, why, expected=expected, fix=f"{key}={best}")

    if type(value) is not int or value < 1:  # the schema of a user's own strategy may allow anything
        raise refuse("not a group size", f"auto or one of {', '.join(map(str, possible))}")
    if world_size % value:
        raise refuse(f"does not divide the world size {world_size}", f"a divisor of {world_size}")
    if experts % value:
        raise refuse(f"does not divide model.num_experts={experts}", f"a divisor of {experts}")
    if value > most:
        name = cfg.dispatcher.get("_target_", "").rpartition(".")[2]
        raise ConfigError(
            key,
            value,
            f"{name} moves no rows between ranks",
            expected=f"at most {most}, or another dispatcher",
            fix="dispatcher=alltoall",
        )
    if dense and value > 1:
        raise refuse("model.moe_layers=[] has no experts to share", "1")
    return value


def _batches(data: DictConfig, world_size: int) -> tuple[int, int]:
    """Returns (sequences per rank and forward pass, forward passes per step)."""
    for name in ("seq_length", "global_batch_size"):
        if not isinstance(data.get(name), int):
            key = f"data.{name}"
            raise ConfigError(
                key,
                data.get(name),
                "needed by every data option",
                expected="an integer",
                fix=f"{key}=<integer>",
            )
    total = data.global_batch_size
    if total % world_size:
        raise ConfigError(
            "data.global_batch_size",
            total,
            f"not divisible by the world size {world_size}",
            expected=f"a multiple of {world_size}",
            fix=f"data.global_batch_size={math.ceil(total / world_size) * world_size}",
        )
    per_rank = total // world_size
    micro = data.get("micro_batch_size", "auto")
    if micro == "auto":
        return per_rank, 1
    if type(micro) is not int or micro < 1 or per_rank % micro:
        raise ConfigError(
            "data.micro_batch_size",
            micro,
            f"does not divide the {per_rank} sequences of a rank "
            f"(data.global_batch_size={total} / world size {world_size})",
            expected=f"a divisor of {per_rank}",
            fix=f"data.micro_batch_size={math.gcd(per_rank, micro) if type(micro) is int else 'auto'}",
        )
    return micro, per_rank // micro
