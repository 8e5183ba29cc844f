"""Hugging Face checkpoints of Mixtral, OLMoE and Qwen3-MoE, in and out.

    python scripts/convert_hf.py describe <hf folder>                 the overrides that make train.py build this model
    python scripts/convert_hf.py import <hf folder> <new folder>      a Sidestream checkpoint and a model YAML
    python scripts/convert_hf.py export <run folder> <new folder>     a folder for transformers' from_pretrained
                                        of a run with classes of yours: 'trusted_targets=[my_package]' beside

Training reads a Hugging Face folder without conversion, each rank its own experts:

    python train.py initial_weights=<hf folder> $(python scripts/convert_hf.py describe <hf folder>)
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from sidestream.config import trust
from sidestream.config.errors import ConfigError
from sidestream.convert.families import config_json, model_options

CONF = Path(__file__).parents[1] / "conf"


def overrides(options: dict[str, dict[str, Any]]) -> list[str]:
    """Config sections -> `group.key=value` words for the command line, without spaces."""
    words = []
    for group, values in options.items():
        for key, value in values.items():
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            words.append(f"{group}.{key}={text.replace(' ', '')}")
    return words


def read_options(source: Path) -> dict[str, dict[str, Any]]:
    """Our options for the model in a Hugging Face folder."""
    from sidestream.convert.huggingface import read_config

    return model_options(read_config(source))


def describe(source: Path) -> None:
    """Print the overrides."""
    print(*overrides(read_options(source)))


def compose_model(options: dict[str, dict[str, Any]]) -> Any:
    """The whole config of train.py with these options."""
    from hydra import compose, initialize_config_dir

    from sidestream.launch import entry

    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", ["dispatcher=local", "balance=none", *overrides(options)])


def import_(source: Path, out: Path) -> None:
    """Write a Sidestream checkpoint (one rank holds the model; training can read the folder in pieces instead)."""
    import torch
    import torch.distributed.checkpoint as dcp

    from sidestream import build
    from sidestream.convert.huggingface import load_huggingface
    from sidestream.launch.worker import RankEnv
    from sidestream.parallel.mesh import build_parallel
    from sidestream.parallel.world import join_world, leave_world
    from sidestream.tracking.integrity import digests, seal

    options = read_options(source)
    if out.exists():
        raise ConfigError("out", out, "it exists", expected="a new folder", fix="another name")
    cpu, timeout = torch.device("cpu"), timedelta(minutes=10)
    with tempfile.TemporaryDirectory() as scratch:
        owns_world = join_world(RankEnv(0, 0, 1, 1, f"file://{scratch}/store"), cpu, timeout=timeout)
        parallel = build_parallel(expert_parallel_size=1, device_type="cpu", timeout=timeout)
        cfg = compose_model(options)
        model = build.model_builder(cfg, vocab_size=options["model"]["vocab_size"], device=cpu)(parallel)
        load_huggingface(model, source)
        out.mkdir(parents=True)
        state = {f"model.{name}": value for name, value in model.state_dict().items()}
        dcp.save({"state_dict": state}, checkpoint_id=out / "checkpoint")
        files = digests((out / "checkpoint").iterdir())
        seal(out / "checkpoint", step=0, files=files)
        if owns_world:
            leave_world()
    (out / "model").mkdir()
    yaml = OmegaConf.to_yaml(OmegaConf.create({"defaults": ["tiny", "_self_"], **options["model"]}))
    (out / "model" / "imported.yaml").write_text(yaml, encoding="utf-8")
    router = " ".join(overrides({"router": options["router"]}))
    print(f"python train.py -cd {out} model=imported {router} initial_weights={out / 'checkpoint'}")


def export(run: Path, out: Path, *, dtype: str | None, trusted: list[str] | None = None) -> None:
    """Write the newest checkpoint of a run for transformers, one tensor at a time."""
    import torch

    from sidestream import build
    from sidestream.convert.huggingface import write_huggingface
    from sidestream.launch.stored import read_config
    from sidestream.parallel.checkpoint_reader import CheckpointReader, load_state
    from sidestream.parallel.weights import PREFIX
    from sidestream.tracking.integrity import newest_whole

    choice = newest_whole(run.absolute(), key="run")
    print(*choice.lines, sep="\n", end="\n" if choice.lines else "", file=sys.stderr)
    cfg = read_config(run, trusted=trusted or [])
    schedule = build.make(cfg, "overlap")
    if schedule.changes_model:
        why = f"trained with overlap={getattr(schedule, 'name', '?')}, whose model transformers has not"
        raise ConfigError(
            "run", run, why, expected="a run whose schedule computes the plain model", fix="another run"
        )
    reader = CheckpointReader(choice.folder)
    metadata = reader.read_metadata().state_dict_metadata
    entries = {n.removeprefix(PREFIX): e for n, e in metadata.items() if n.startswith(PREFIX)}
    names = [name for name in entries if not name.endswith("selection_bias")]
    vocab_size = entries["embedding.weight"].size[0]
    model = {**OmegaConf.to_container(cfg.model), "vocab_size": vocab_size}
    saved = entries["embedding.weight"].properties.dtype
    target = getattr(torch, dtype) if dtype else saved
    config = config_json(model, cfg.router, dtype=str(target).removeprefix("torch."))

    def tensor(name: str) -> torch.Tensor:
        value = torch.empty(entries[name].size, dtype=entries[name].properties.dtype)
        load_state({PREFIX + name: value}, reader, alone=True)
        return value

    shape = build.model_shape(cfg, vocab_size=vocab_size)
    write_huggingface(out, names=names, tensor=tensor, shape=shape, config=config, dtype=target)
    print(f"{out}: {config['architectures'][0]} from {choice.folder}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("direction", choices=["describe", "import", "export"])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the exported weights")
    typed = f"{trust.KEY}="
    arguments = parser.parse_args([word for word in sys.argv[1:] if not word.startswith(typed)])
    if arguments.direction != "describe" and arguments.out is None:
        parser.error(f"{arguments.direction} needs a folder to write")
    try:
        if arguments.direction == "describe":
            describe(arguments.source)
        elif arguments.direction == "import":
            import_(arguments.source, arguments.out)
        else:
            trusted = trust.believed(sys.argv[1:])
            if trusted:
                sys.path.append(os.getcwd())  # as for train.py: the user's package may lie here
            export(arguments.source, arguments.out, dtype=arguments.dtype, trusted=trusted)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
