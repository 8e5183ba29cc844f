"""Evaluates a run: `python eval.py run=<folder> [checkpoint=<folder>] [num_tokens=200] [prompt=<text>]`."""

import os
import sys
from pathlib import Path

from omegaconf import DictConfig

from sidestream.config import trust
from sidestream.config.compatibility import Layout, check
from sidestream.config.errors import ConfigError
from sidestream.launch.record import Launch
from sidestream.launch.scratch import scratch
from sidestream.launch.stored import read_config, refused
from sidestream.tracking.integrity import check_given, newest_whole
from sidestream.tracking.untrusted import printable

SHOWN = "\n\t"  # of a sample; a model may also have learned what a terminal obeys
DEFAULTS = {trust.KEY: "", "run": "", "checkpoint": "", "num_tokens": "200", "prompt": None}


def main(argv: list[str]) -> None:
    options = dict(DEFAULTS)
    trusted = trust.believed(argv)
    for part in argv:
        key, equals, value = part.partition("=")
        if not equals or key not in DEFAULTS:
            raise ConfigError(key, value, "no such option", expected=", ".join(DEFAULTS), fix="run=<folder>")
        options[key] = value
    run = Path(options["run"]).expanduser().absolute()
    if not options["run"]:
        why = "no run with a checkpoint there"
        raise ConfigError("run", options["run"], why, expected="the folder of a run", fix="run=<folder>")
    checkpoint = _checkpoint(run, options["checkpoint"])
    if not (options["num_tokens"].isascii() and options["num_tokens"].isdigit()):
        raise ConfigError(
            "num_tokens", options["num_tokens"], "no count", expected="an integer", fix="num_tokens=200"
        )
    cfg = read_config(run, trusted=trusted)
    with refused(run):
        # As in the run: what an expert's capacity is a share of belongs to a micro-batch.
        cfg.data.micro_batch_size = Launch.load(run).layout.micro_batch_size
        layout = check(cfg)
    # The prompt stays out of the config, which would read ${...} in it.
    prompt, num_tokens = options["prompt"], int(options["num_tokens"])
    report(cfg, layout=layout, checkpoint=checkpoint, prompt=prompt, num_tokens=num_tokens)


def report(cfg: DictConfig, *, layout: Layout, checkpoint: Path, prompt: str | None, num_tokens: int) -> None:
    """Prints the validation loss and a sample."""
    from sidestream.evaluate import evaluate
    from sidestream.launch.worker import RankEnv

    with scratch() as shared:
        env = RankEnv(0, 0, 1, 1, f"file://{shared / 'store'}")
        result = evaluate(
            cfg, layout=layout, env=env, checkpoint=checkpoint, prompt=prompt, num_tokens=num_tokens
        )
    print(f"checkpoint {checkpoint}\nval_loss   {result['val_loss']:.4f} nats per {result['unit']}")
    text = f"{result['prompt']}{result['sample']}"
    print(f"sample     {printable(text, limit=len(text) + 1, keep=SHOWN)}")


def _checkpoint(run: Path, given: str) -> Path:
    if given:
        found = Path(given).expanduser().absolute()
        lines = check_given(found, key="checkpoint")
    else:
        choice = newest_whole(run, key="run")
        found, lines = choice.folder, choice.lines
    print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    try:
        if trust.believed(sys.argv[1:]):
            sys.path.append(os.getcwd())  # as for train.py: the user's package may lie here
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
