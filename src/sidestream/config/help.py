"""The text of `python train.py --help`: every config group with its options."""

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial

from hydra._internal.hydra import Hydra  # the only place that lists groups for a help page
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType

from sidestream import cli
from sidestream.config.schema import Root
from sidestream.tracking.untrusted import printable

WIDTH = 100

GROUPS = {
    **{item.name: item.metadata["meaning"] for item in fields(Root) if "group" in item.metadata},
    "experiment": "recipes that set several of these; none by default",
    "arm": "one side of a comparison: what it sets; none by default",
}

HEADER = """Trains a mixture-of-experts language model with expert parallelism.

  python train.py                                   the defaults, a few minutes on a laptop
  python train.py model=small router.top_k=1        another option of a group, another value
  python train.py -m fusion=loop,grouped seed=1,2   every combination, each as a job of its own
  python train.py resume=latest                     goes on from the last checkpoint of the last run
  python train.py resume_sweep=latest               runs what the last sweep has not finished
  python train.py -cd my_conf dispatcher=mine       your own options (see trusted_targets)
"""

PREDICT_HEADER = """Predicts what a training step would take on a cluster that is not there.
How wrong that is: docs/predictor.md.

  python predict.py cluster=gb300_nvl72 model=qwen3_30b_a3b dispatcher=nccl_ep overlap=shortcut
  python predict.py expert_parallel_size=64                   GPUs that share the experts
  python predict.py -m dispatcher=alltoall,nccl_ep            each of them, in one table
  python predict.py experiment=recipe/qwen3_30b_h100          beside what was published
  python predict.py cluster.num_gpus=256 predict.skew=1.3     another size, an uneven load
"""

GROUPS_HEADER = "Groups (group=option; the option in effect is the first one):"

FOOTER = """Every key:        python train.py --cfg job --resolve      (add overrides to see their effect)
Tab completion:   eval "$(python train.py -sc install=bash)"
Hydra's options:  python train.py --hydra-help"""


def help_text(command: str = "train", choices: Mapping[str, str | None] | None = None) -> str:
    """Returns the whole help page, with the options found on the search path (the user's own included).

    Args:
        command: `train` or `predict`.
        choices: Group -> the option in effect, which is listed first.
    """
    loader = GlobalHydra.instance().config_loader()
    found = [group for group in loader.list_groups("") if group not in ("hydra", "schema")]
    groups = [*(group for group in GROUPS if group in found), *sorted(set(found) - set(GROUPS))]
    indent = max(map(len, groups)) + 4
    lines = []
    for group in groups:
        options = loader.get_group_options(group, ObjectType.CONFIG)
        options.sort(key=lambda option: option != (choices or {}).get(group))  # sorted already, and stays so
        # Folders and files of `-cd` may be anybody's.
        lines.append(f"  {printable(group):{indent - 2}}{GROUPS.get(group, '')}".rstrip())
        listed = {"initial_indent": " " * indent, "subsequent_indent": " " * indent}
        lines += textwrap.wrap(" | ".join(map(printable, options)), WIDTH, **listed, break_on_hyphens=False)  # type: ignore[arg-type]
    header = {"train": HEADER, "predict": PREDICT_HEADER}[command]
    footer = FOOTER.replace("train.py", f"{command}.py")
    page = "\n".join([header, GROUPS_HEADER, *lines, "", footer])
    return cli.spelled(page).replace("$", "$$")  # Hydra passes it through string.Template


def list_options_once() -> None:
    """Spares Hydra what it does about 300 times for a help page or a completion, and never needs.

    For every list of options it copies the store of all schemas: 4 of the 5 CPU seconds of `--help`. A store is only
    read, and copies what it gives out. And it lists all groups for every help page, whether its text has a place
    for them or not.
    """
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    listing = Hydra.format_config_groups
    if listing.__module__ != __name__:  # not done yet
        Hydra.format_config_groups = lambda *args, **kwargs: _Later(partial(listing, *args, **kwargs))  # type: ignore


class _Later:
    """A text that is made when somebody reads it."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make

    def __str__(self) -> str:
        return self._make()
