"""Evaluates a run: its validation loss, and a sample of what it writes.

python eval.py run=latest                               the run that was started last
python eval.py run=<folder> prompt='def f('             what the sample goes on from
python eval.py run=latest validate=false num_tokens=50  a shorter sample, and no loss: it takes longest
python eval.py run=<folder> checkpoint=<folder>         not the newest whole checkpoint
python eval.py run=<folder> 'trusted_targets=[my_pkg]'  a run with classes of yours
"""

import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from sidestream import cli
from sidestream.commands import shared
from sidestream.config import trust
from sidestream.config.compatibility import Layout, check
from sidestream.config.errors import ConfigError
from sidestream.convert.start import check_same_model
from sidestream.launch import status
from sidestream.launch.record import Launch
from sidestream.launch.scratch import scratch
from sidestream.launch.stored import read_config, refused
from sidestream.tracking import latest
from sidestream.tracking.integrity import check_given, newest_whole
from sidestream.tracking.untrusted import printable

SHOWN = "\n\t"  # of a sample; a model may also have learned what a terminal obeys
DEFAULTS: dict[str, Any] = {
    trust.KEY: "",
    "run": "",
    "checkpoint": "",
    "num_tokens": "200",
    "prompt": None,
    "validate": "true",
}


def main(argv: list[str]) -> None:
    if {"-h", "--help"} & set(argv):
        print(cli.spelled((__doc__ or "").strip()))
        return
    options = dict(DEFAULTS)
    trusted = trust.believed(argv)
    for part in argv:
        key, equals, value = part.partition("=")
        if not equals or key not in DEFAULTS:
            raise ConfigError(key, value, "no such option", expected=", ".join(DEFAULTS), fix="run=<folder>")
        options[key] = value
    run = latest.run(options["run"], key="run").absolute()
    if not options["run"]:
        why = "no run with a checkpoint there"
        raise ConfigError("run", options["run"], why, expected="the folder of a run", fix="run=<folder>")
    status.say("checking the checkpoint")
    checkpoint = _checkpoint(run, options["checkpoint"])
    if not re.fullmatch("[0-9]{1,9}", options["num_tokens"]):
        expected = "an integer below a billion"
        raise ConfigError(
            "num_tokens", options["num_tokens"], "no such count", expected=expected, fix="num_tokens=200"
        )
    if options["validate"] not in ("true", "false"):
        why = "neither true nor false"
        raise ConfigError("validate", options["validate"], why, expected="true or false", fix="validate=true")
    cfg = read_config(run, trusted=trusted)
    with refused(run):
        # As in the run: what an expert's capacity is a share of belongs to a micro-batch.
        cfg.data.micro_batch_size = Launch.load(run).layout.micro_batch_size
        layout = check(cfg)
        sections: Any = OmegaConf.to_container(cfg, resolve=True)
        key = "checkpoint" if options["checkpoint"] else "run"
        check_same_model(sections, checkpoint, key=key, fix="run=<the run of this checkpoint>")
    # The prompt stays out of the config, which would read ${...} in it.
    wanted = {
        "prompt": options["prompt"],
        "num_tokens": int(options["num_tokens"]),
        "validate": options["validate"] == "true",
    }
    report(cfg, layout=layout, checkpoint=checkpoint, **wanted)


def report(cfg: DictConfig, *, layout: Layout, checkpoint: Path, **wanted: Any) -> None:
    """Prints the validation loss and a sample. What takes long meanwhile is said on stderr.

    Args:
        wanted: `prompt`, `num_tokens` and `validate` of `evaluate`.
    """
    status.say("importing torch")
    from sidestream.evaluate import evaluate
    from sidestream.launch.worker import RankEnv

    with scratch() as shared:
        env = RankEnv(0, 0, 1, 1, f"file://{shared / 'store'}")
        status.follow(status.of_process)
        result = evaluate(cfg, layout=layout, env=env, checkpoint=checkpoint, **wanted)
    status.end()
    print(f"checkpoint {checkpoint}")
    if wanted["validate"]:
        print(f"val_loss   {result['val_loss']:.4f} nats per {result['unit']}")
    text = f"{result['prompt']}{result['sample']}"
    print(f"sample     {printable(text, limit=10 * len(text) + 1, keep=SHOWN)}")


def _checkpoint(run: Path, given: str) -> Path:
    if given:
        found = Path(given).expanduser().absolute()
        lines = check_given(found, key="checkpoint")
    else:
        choice = newest_whole(run, key="run")
        found, lines = choice.folder, choice.lines
    for line in lines:
        status.line(line)
    return found


def start() -> None:
    argv = sys.argv[1:]
    if trust.believed(argv):
        sys.path.append(os.getcwd())  # as for train.py: the user's package may lie here
    main(argv)


def run() -> NoReturn:
    shared.run(start, shows_status=True)
