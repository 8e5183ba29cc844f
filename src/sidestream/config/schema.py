"""The whole config: its groups, and the schema of each of their options. Values live in conf/.

Stored under `schema/<group>/<name>`, which keeps them out of the lists of options a user sees. The fields of `Root`
that are `Any` also take a user's own YAML, which has no schema here.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

from hydra.core.config_store import ConfigStore

from sidestream.config.schema_key import Component, key, part
from sidestream.config.schema_model import (
    AuxLoss,
    Balance,
    ChunkedOverlap,
    Dispatcher,
    ExpertBias,
    Experts,
    LibraryDispatcher,
    MegaExperts,
    Model,
    NoOverlap,
    Overlap,
    QuantileBalance,
    ShortcutOverlap,
    TopKRouter,
)
from sidestream.config.schema_predict import Cluster, Measure, NoCluster, Predict
from sidestream.config.schema_training import (
    SGD,
    WSD,
    AdamW,
    Callbacks,
    Constant,
    Cosine,
    CSVLogger,
    FullyShard,
    Graph,
    HuggingFace,
    Logger,
    Paths,
    PythonSource,
    Replicate,
    StepGraph,
    TensorBoardLogger,
    TextFiles,
    ThrottledLink,
    TokenFiles,
    Trainer,
    WandbLogger,
)

# ruff: noqa: RUF009 - `key()` and `part()` are dataclasses.field() with our limits in it


@dataclass
class Root:
    """The whole config. Groups whose options users may write outside the repository are `Any`."""

    name: str = key("folder below `paths.log_dir`")
    seed: int = key("of the initial weights, the order of the data and dropout", low=0, high=2**63 - 1)
    debug: bool = key("tracebacks for configuration errors too", default=False)
    resume: str | None = key(
        "folder of a run to go on with (docs/resume.md); command line only", default=None
    )
    initial_weights: str | None = key(
        "folder of weights to start from: a Hugging Face checkpoint (`scripts/convert_hf.py`) or one of a run",
        default=None,
    )
    trusted_targets: list[str] = key(
        "your own packages whose classes may be created; only the command line and "
        "`~/.config/sidestream/settings.yaml` are believed",
        default=list,
    )
    model: Model = part(
        "the transformer and where its experts are",
        Model,
        note="Presets of published models have the published shapes, for measuring and for cutting down; none was "
        "trained at full size here. The first line of each file is a command that trains a cut-down one on a CPU. "
        "Their routing is in `model/routing`, which `experiment` and `predict.py` take it from.",
    )
    router: Any = part(
        "which experts a token goes to", note="Scores are fp32, and ties go to the lower index."
    )
    balance: Any = part("what keeps the experts equally busy")
    dispatcher: Any = part(
        "how token rows travel to the ranks of their experts",
        note="docs/dispatchers.md compares them and says what the libraries need; `python scripts/doctor.py` says "
        "which run here.",
    )
    fusion: Any = part("how the experts of a rank are computed")
    overlap: Any = part(
        "what is computed while rows travel",
        note="A checkpoint is resumed only under a schedule that computes the same model.",
    )
    graph: Any = part("recording and replaying a whole step")
    link: Any = part("the wire that exchanges see")
    strategy: Any = part("process groups and gradient reduction")
    optimizer: Any = part("the update", note="Only matrices get weight decay.")
    scheduler: Any = part("the learning rate over the steps")
    data: Any = part("what is trained on, batch sizes")
    trainer: Trainer = part("devices, steps, precision", Trainer)
    callbacks: Callbacks = part("progress display and checkpoints", Callbacks)
    # What remains with `logger=null`, which leaves no option.
    logger: Logger = part(
        "where metrics are mirrored",
        Logger,
        note="`metrics.jsonl` is written in any case; docs/tracking.md lists all metrics.",
    )
    paths: Paths = part("folders", Paths)
    cluster: Any = part(
        "a machine that predict.py knows",
        default=None,
        note="For `predict.py` (docs/predictor.md), which starts with `gb300_nvl72`; `train.py` refuses all but "
        "`none`. Where numbers come from, and where sources disagree, is in the files.",
    )
    predict: Predict = part(
        "what predict.py takes beside the other groups",
        Predict,
        note="`train.py` refuses other values than these.",
    )
    trainable: bool = key(
        "false: a recipe or preset that `predict.py` knows and `train.py` refuses", default=True
    )


SCHEMAS: dict[str, dict[str, type]] = {
    "model": {"transformer": Model},
    "router": {"softmax": TopKRouter},
    "balance": {"aux_loss": AuxLoss, "bias": ExpertBias, "quantile": QuantileBalance, "none": Balance},
    "dispatcher": {
        "none": Component,
        "local": Component,
        "alltoall": Dispatcher,
        "allgather": Dispatcher,
        "nccl_ep": LibraryDispatcher,
        "deep_ep": LibraryDispatcher,
        "hybrid_ep": LibraryDispatcher,
    },
    "fusion": {"loop": Experts, "grouped": Experts, "mega": MegaExperts},
    "overlap": {
        "none": NoOverlap,
        "shared_expert": Overlap,
        "shortcut": ShortcutOverlap,
        "chunked": ChunkedOverlap,
        "two_batch": Overlap,
    },
    "graph": {"none": Graph, "step": StepGraph},
    "link": {"native": Component, "throttled": ThrottledLink},
    "strategy": {"replicate": Replicate, "fully_shard": FullyShard},
    "optimizer": {"adamw": AdamW, "sgd": SGD},
    "scheduler": {"wsd": WSD, "cosine": Cosine, "constant": Constant},
    "data": {
        "python_source": PythonSource,
        "text": TextFiles,
        "tokens": TokenFiles,
        "huggingface": HuggingFace,
    },
    "trainer": {"default": Trainer},
    "callbacks": {"default": Callbacks},
    "logger": {"none": Logger, "csv": CSVLogger, "tensorboard": TensorBoardLogger, "wandb": WandbLogger},
    "paths": {"default": Paths},
    "measure": {"overlap": Measure},
    "cluster": {"none": NoCluster, "machine": Cluster},
    "predict": {"default": Predict},
}


def register() -> None:
    """Makes the schemas known to Hydra. May be called twice."""
    store = ConfigStore.instance()
    store.store(group="schema", name="root", node=Root)
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=schema)


def known_keys() -> list[str]:
    """Returns every key of every shipped option, dotted, without duplicates."""
    keys = dict.fromkeys(name for name in Root.__dataclass_fields__ if name not in SCHEMAS)
    for group, schemas in SCHEMAS.items():
        for schema in schemas.values():
            keys.update(dict.fromkeys(_dotted(group, schema)))
    return list(keys)


def options_with(key: str) -> list[str]:
    """Returns the options of a group that have a key; nothing of a key that none has."""
    group = key.partition(".")[0]
    return [name for name, schema in SCHEMAS.get(group, {}).items() if key in _dotted(group, schema)]


def optional_parts() -> list[str]:
    """Returns the keys that take null or a group of keys."""
    return [
        f"{group}.{item.name}"
        for group, schemas in SCHEMAS.items()
        for schema in schemas.values()
        for item in fields(cast(Any, schema))
        if any(map(is_dataclass, getattr(item.type, "__args__", ())))
    ]


def _dotted(prefix: str, schema: Any) -> list[str]:
    keys = []
    for name, item in schema.__dataclass_fields__.items():
        inner = getattr(item.type, "__dataclass_fields__", None)
        keys += _dotted(f"{prefix}.{name}", item.type) if inner else [f"{prefix}.{name}"]
    return [key for key in keys if not key.endswith("_target_")]
