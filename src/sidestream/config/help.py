"""The text of `python train.py --help`: one line per config group."""

from collections.abc import Iterable

from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType

GROUPS = {
    "model": "the transformer and where its experts are",
    "router": "which experts a token goes to",
    "balance": "what keeps the experts equally busy",
    "dispatcher": "how token rows travel to the ranks of their experts",
    "fusion": "how the experts of a rank are computed",
    "overlap": "what is computed while rows travel",
    "graph": "recording and replaying a whole step",
    "link": "the wire that exchanges see",
    "strategy": "process groups and gradient reduction",
    "optimizer": "the update",
    "scheduler": "the learning rate over the steps",
    "data": "what is trained on, batch sizes",
    "trainer": "devices, steps, precision",
    "callbacks": "progress display and checkpoints",
    "logger": "where metrics are mirrored",
    "paths": "folders",
    "cluster": "a machine that predict.py knows",
    "predict": "what predict.py takes beside the other groups",
    "experiment": "recipes that set several of these",
    "arm": "one side of a comparison: what it sets",
}

HEADER = """Trains a mixture-of-experts language model with expert parallelism.

  python train.py                                   the defaults, a few minutes on a laptop
  python train.py model=small router.top_k=1        another option of a group, another value of a key
  python train.py -m fusion=loop,grouped seed=1,2   every combination, each as a job of its own
  python train.py resume=logs/train/runs/...        goes on from the last checkpoint of a run
  python train.py resume_sweep=logs/...             runs what a sweep has not finished, in its folder
  python train.py -cd my_conf dispatcher=mine       your own options (see trusted_targets)

Groups (group=option):"""

PREDICT_HEADER = """Predicts what a training step would take on a cluster that is not there.
How wrong that is: docs/predictor.md.

  python predict.py cluster=gb300_nvl72 model=qwen3_30b_a3b expert_parallel_size=64 dispatcher=nccl_ep overlap=shortcut
  python predict.py -m dispatcher=alltoall,nccl_ep overlap=none,shortcut     every combination, one table
  python predict.py experiment=recipe/qwen3_30b_h100                        beside what was published
  python predict.py cluster.num_gpus=256 predict.skew=1.3                   another size, an uneven load

Groups (group=option), those of train.py and cluster:"""

FOOTER = """Every key:        python train.py --cfg job --resolve      (add overrides to see their effect)
Tab completion:   eval "$(python train.py -sc install=bash)"
Hydra's options:  python train.py --hydra-help"""


def help_text(command: str = "train") -> str:
    """Returns the whole help page, with the options found on the search path (the user's own included).

    Args:
        command: `train` or `predict`.
    """
    loader = GlobalHydra.instance().config_loader()
    found = [group for group in loader.list_groups("") if group not in ("hydra", "schema")]
    groups = [*(group for group in GROUPS if group in found), *sorted(set(found) - set(GROUPS))]
    width = max(map(len, groups))
    rows = [(group, loader.get_group_options(group, ObjectType.CONFIG)) for group in groups]
    header = {"train": HEADER, "predict": PREDICT_HEADER}[command]
    page = f"{header}\n{_lines(rows, width)}\n\n{FOOTER.replace('train.py', f'{command}.py')}"
    return page.replace("$", "$$")  # Hydra passes it through string.Template


def _lines(rows: Iterable[tuple[str, list[str]]], width: int) -> str:
    listed = [(group, " | ".join(options)) for group, options in rows]
    options_width = max(len(options) for _, options in listed)
    return "\n".join(
        f"  {group:{width}}  {options:{options_width}}  {GROUPS.get(group, '')}".rstrip()
        for group, options in listed
    )
