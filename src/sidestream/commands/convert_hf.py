"""Hugging Face checkpoints of Mixtral, OLMoE and Qwen3-MoE, in and out.

    python scripts/convert_hf.py describe <hf folder>            the overrides that build this model
    python scripts/convert_hf.py import <hf folder> <new folder> a checkpoint and a model YAML
    python scripts/convert_hf.py export <run folder> <new folder> a folder for transformers
                                   of a run with your classes: and 'trusted_targets=[my_package]'
    python scripts/convert_hf.py fields                          what fields of config.json mean

Training reads a Hugging Face folder without conversion, each rank its own experts:

    python train.py initial_weights=<hf folder> $(python scripts/convert_hf.py describe <hf folder>)
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from sidestream import cli
from sidestream.commands import shared
from sidestream.config import trust
from sidestream.config.errors import ConfigError, as_typed
from sidestream.config.place import CONF
from sidestream.convert.families import model_options
from sidestream.convert.fields import FIELDS, markdown, markdown_common
from sidestream.convert.folder import ModelFolder
from sidestream.convert.target import config_json
from sidestream.launch import status
from sidestream.launch.record import load_resolved
from sidestream.tracking import latest
from sidestream.tracking.untrusted import Unreadable, printable, read_json

# What a shell splits or expands, and what Hydra's grammar gives a meaning, is not in it.
_WORD = re.compile(r"(model|router)\.[a-z_]+=(-?[0-9][0-9.e+-]*|[a-z_]+|\[([0-9]+(,[0-9]+)*)?\])")


def overrides(options: dict[str, dict[str, Any]]) -> list[str]:
    """Config sections -> `group.key=value` words for the command line, without spaces.

    Raises:
        ConfigError: A word would be more than a number, a name or a list of numbers.
    """
    words = [
        f"{group}.{key}={as_typed(value)}" for group, keys in options.items() for key, value in keys.items()
    ]
    for word in words:
        if not _WORD.fullmatch(word):
            why = "not a word for the command line"
            raise ConfigError(
                "describe", printable(word), why, expected="plain values", fix="another checkpoint"
            )
    return words


def read_options(source: Path) -> dict[str, dict[str, Any]]:
    """Our options for the model in a Hugging Face folder, if its weights are there as config.json says."""
    folder = ModelFolder(source)
    options = model_options(folder.config)
    folder.check_tensors()
    return options


def describe(source: Path) -> None:
    """Print the overrides."""
    print(*overrides(read_options(source)))


def fields() -> None:
    """Print the tables of docs/huggingface_fields.md."""
    for model_type in FIELDS:
        print(f"## {model_type}", "", *markdown(model_type), "", sep="\n")
    print("## Any of them", "", *markdown_common(), sep="\n")


def compose_model(options: dict[str, dict[str, Any]]) -> Any:
    """The whole config of train.py with these options."""
    from hydra import compose, initialize_config_dir

    from sidestream.launch import entry

    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", ["dispatcher=local", "balance=none", *overrides(options)])


def import_(source: Path, out: Path) -> None:
    """Write a Sidestream checkpoint (one rank holds the model; training can read the folder in pieces instead)."""
    import torch.distributed.checkpoint as dcp

    from sidestream.convert import verify
    from sidestream.convert.huggingface_folder import load_huggingface, written_aside
    from sidestream.convert.start import MODEL, described, tokenizer_of
    from sidestream.parallel.weights import load_weights
    from sidestream.tracking.folder import write_json_atomic
    from sidestream.tracking.integrity import digests, seal

    options = read_options(source)
    cfg = compose_model(options)
    tokens = verify.example_tokens(cfg.model.vocab_size, cfg.model.sliding_window)
    with written_aside(out) as aside, verify.alone() as parallel:

        def convert(model: Any) -> None:
            load_huggingface(model, source)
            state = {f"model.{name}": value for name, value in model.state_dict().items()}
            dcp.save({"state_dict": state}, checkpoint_id=aside / "checkpoint")
            written = described(options, tokenizer=tokenizer_of(source))
            write_json_atomic(aside / "checkpoint" / MODEL, written)
            seal(aside / "checkpoint", step=0, files=digests((aside / "checkpoint").iterdir()))

        def read_back(model: Any) -> None:
            load_weights(model, aside / "checkpoint")

        logits = verify.our_logits(cfg, parallel, tokens, convert)
        readers = {
            "the checkpoint": lambda: verify.our_logits(cfg, parallel, tokens, read_back),
            "transformers": lambda: verify.their_logits(source, tokens),
        }
        told = verify.compare_all(logits, readers, source=source)
        _write_yaml(aside / "model" / "imported.yaml", {"defaults": ["tiny", "_self_"], **options["model"]})
        # Beside the checkpoint, as in a run: a model that starts from it is compared with it.
        _write_yaml(aside / ".hydra" / "resolved.yaml", options)
    status.end()
    print(told, file=sys.stderr)
    router = overrides({"router": options["router"]})
    checkpoint = str(out / "checkpoint")
    if not re.fullmatch(r"[\w./-]+", checkpoint):  # Hydra's grammar has a use for most other characters
        checkpoint = "'" + checkpoint.replace("'", r"\'") + "'"
    words = ["-cd", str(out), "model=imported", *router, f"initial_weights={checkpoint}"]
    print(cli.spelled("python train.py"), shlex.join(words))


def _write_yaml(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir()
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(content)), encoding="utf-8")


def export(run: Path, out: Path, *, dtype: str | None, trusted: list[str] | None = None) -> None:
    """Write the newest checkpoint of a run for transformers, one tensor at a time, and compare the logits."""
    import torch

    from sidestream import build
    from sidestream.convert import verify
    from sidestream.convert.huggingface_folder import load_huggingface, write_huggingface
    from sidestream.convert.start import check_same_model
    from sidestream.launch.stored import read_config, refused
    from sidestream.parallel.checkpoint_reader import CheckpointReader, load_state
    from sidestream.parallel.weights import PREFIX, load_weights
    from sidestream.tracking.integrity import newest_whole

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one rank reads
    choice = newest_whole(run.absolute(), key="run")
    print(*choice.lines, sep="\n", end="\n" if choice.lines else "", file=sys.stderr)
    cfg = read_config(run, trusted=trusted or [])
    reader = CheckpointReader(choice.folder)
    metadata: dict[str, Any] = reader.read_metadata().state_dict_metadata
    entries = {n.removeprefix(PREFIX): e for n, e in metadata.items() if n.startswith(PREFIX)}
    with refused(
        run
    ):  # a folder from anybody: the config may be of another model than the checkpoint, or of none
        cfg.model.vocab_size = entries["embedding.weight"].size[0]
        saved = entries["embedding.weight"].properties.dtype
        target = getattr(torch, dtype) if dtype else saved
        sections: Any = OmegaConf.to_container(cfg, resolve=True)
        fix = "remove the checkpoint that came from elsewhere"
        check_same_model(sections, choice.folder, key="run", fix=fix)
        config = config_json(
            sections["model"],
            sections["router"],
            balance=sections["balance"],
            overlap=sections["overlap"],
            trained=trained_fields(run, sections),
            dtype=str(target).removeprefix("torch."),
        )
        shape = build.model_shape(cfg, vocab_size=cfg.model.vocab_size)
    if build.make_schedule(cfg).changes_model:
        why = "this schedule computes another model than the plain one"
        raise ConfigError(
            "overlap._target_", cfg.overlap._target_, why, expected="the plain model", fix="another run"
        )

    def tensor(name: str) -> torch.Tensor:
        value = torch.empty(entries[name].size, dtype=entries[name].properties.dtype)
        load_state({PREFIX + name: value}, reader, alone=True)
        return value

    _check_bias(cfg, {name: tensor(name) for name in entries if name.endswith("selection_bias")})
    tokens = verify.example_tokens(cfg.model.vocab_size, cfg.model.sliding_window)
    told: list[str] = []

    def of_the_run(model: Any) -> None:
        load_weights(model, choice.folder)
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data.to(target))  # rounded as it is written

    def check(folder: Path) -> None:
        written = compose_model(read_options(folder))
        with verify.alone() as parallel:
            logits = verify.our_logits(cfg, parallel, tokens, of_the_run)
            load = partial(load_huggingface, folder=folder)
            readers = {
                "Sidestream": lambda: verify.our_logits(written, parallel, tokens, load),
                "transformers": lambda: verify.their_logits(folder, tokens),
            }
            told.append(verify.compare_all(logits, readers, source=run))

    names = [name for name in entries if not name.endswith("selection_bias")]
    write_huggingface(out, names=names, tensor=tensor, shape=shape, config=config, dtype=target, check=check)
    status.end()
    print(f"{out}: {config['architectures'][0]} from {choice.folder}; {told[0]}")


def _check_bias(cfg: Any, biases: dict[str, Any]) -> None:
    """A balance of a user's own may have used the bias, too; one that is zero everywhere changes no choice."""
    used = [name for name, bias in biases.items() if bias.count_nonzero()]
    if used:
        raise ConfigError(
            "balance._target_",
            cfg.balance._target_,
            f"{used[0]} is added to what the router ranks, which no Hugging Face model of a supported family has",
            expected="balance=aux_loss",
            fix="balance=aux_loss in the run",
        )


def trained_fields(run: Path, sections: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that say how a run was trained: token ids, and the longest sequence.

    Ids are those of the data. What the data does not know is taken from the folder that the run started from, if that
    is one of Hugging Face and still there.
    """
    data, vocab_size = sections["data"], sections["model"]["vocab_size"]
    try:
        eos = read_json(run / "result.json", inside=run).get("eos_token")
    except Unreadable:
        eos = None
    if not is_token(eos, vocab_size):
        eos = data.get("eos_token")
    ids, length = {"bos_token_id": None, "eos_token_id": eos}, data["seq_length"]
    start = Path(load_resolved(run).get("initial_weights") or "/nowhere")
    if (start / "config.json").is_file():
        origin = ModelFolder(start).config
        ids = {n: origin.get(n) if value is None else value for n, value in ids.items()}
        before = origin.get("max_position_embeddings")
        length = max(length, before) if isinstance(before, int) else length
    known = {name: value if is_token(value, vocab_size) else None for name, value in ids.items()}
    return {**known, "pad_token_id": None, "max_position_embeddings": length}


def is_token(value: object, vocab_size: int) -> bool:
    """Whether this is the id of a token, or a list of them."""
    if isinstance(value, list):
        return bool(value) and all(is_token(part, vocab_size) for part in value)
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def main() -> int:
    parser = shared.parser(__doc__, whole=True)
    parser.add_argument("direction", choices=["describe", "import", "export", "fields"])
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the exported weights")
    typed = f"{trust.KEY}="
    arguments = parser.parse_args([word for word in sys.argv[1:] if not word.startswith(typed)])
    if arguments.direction != "fields" and arguments.source is None:
        parser.error(f"{arguments.direction} needs a folder to read")
    if arguments.direction in ("import", "export") and arguments.out is None:
        parser.error(f"{arguments.direction} needs a folder to write")
    try:
        if arguments.direction == "fields":
            fields()
        elif arguments.direction == "describe":
            describe(arguments.source)
        elif arguments.direction == "import":
            status.say("importing the weights")
            import_(arguments.source, arguments.out)
        else:
            trusted = trust.believed(sys.argv[1:])
            if trusted:
                sys.path.append(os.getcwd())  # as for train.py: the user's package may lie here
            status.say("exporting the weights")
            export(latest.run(arguments.source), arguments.out, dtype=arguments.dtype, trusted=trusted)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run() -> NoReturn:
    shared.run(main, shows_status=True)
