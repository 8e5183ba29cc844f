"""Keys of how a model is trained: from graph, link and strategy over optimizer and data to logger and paths."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from sidestream.config.schema_key import Component, key, one_of

# ruff: noqa: RUF009 - `key()` and `one_of()` are dataclasses.field() with our limits in it


@dataclass
class Graph(Component):
    """Whether a whole step is recorded."""

    lint: bool = key(
        "report what in a step a graph could not repeat, with file, line and override, and end; exit code 1 if there "
        "is anything",
        default=False,
    )


@dataclass
class StepGraph(Graph):
    """The attempt of a whole step is captured and replayed."""

    backend: str = one_of(
        ("auto", "cuda", "tape"), "`cuda`; `tape`, its twin on a CPU; `auto`: by the ranks' device"
    )
    warmup_steps: int = key("steps that run as they are written before one is captured; at least 2", low=2)
    include_optimizer: bool = key(
        "also clipping and the optimizer's step; needs `optimizer=adamw optimizer.fused=true`"
    )


@dataclass
class ThrottledLink(Component):
    """Emulates a slower link."""

    gbps: float = key(
        "gigabits per second, each way", low=1e-6, high=1e6
    )  # a slower one needs longer than a time may be
    latency_us: float = key("microseconds added to every transfer", low=0.0, high=1e8)


@dataclass
class Strategy(Component):
    """Process groups and gradient reduction."""

    expert_parallel_size: int | str = key(  # its limit depends on the number of ranks: compatibility.py
        "ranks that share one copy of the experts; `auto` = the largest divisor of the number of ranks that divides "
        "`model.num_experts` (1 for `dispatcher=local` and dense models)",
        auto=True,
    )
    timeout_seconds: int = key(
        "a rank that waits longer for the others fails: docs/ends.md", low=1, high=1_000_000
    )


@dataclass
class Replicate(Strategy):
    """Dense weights on every rank, experts shared out."""

    bucket_mb: float = key("MiB of gradients per reduction", above=0.0, high=1e6)


@dataclass
class FullyShard(Strategy):
    """Weights, gradients and optimizer in pieces over all ranks."""

    reshard_after_forward: bool = key(
        "free a block's gathered weights until backward: less memory, one more gather"
    )


@dataclass
class AdamW(Component):
    """torch.optim.AdamW."""

    lr: float = key("largest learning rate", low=0.0)
    betas: list[float] = key("decay of both moments", low=0.0, below=1.0, length=2)
    eps: float = key("added to the denominator", above=0.0, high=1.0)
    weight_decay: float = key("decoupled: weights shrink by `lr x weight_decay` of themselves", low=0.0)
    fused: bool = key("one kernel for all parameters; `graph.include_optimizer` needs it")


@dataclass
class SGD(Component):
    """torch.optim.SGD."""

    lr: float = key("largest learning rate", low=0.0)
    momentum: float = key("share of the last update that is kept", low=0.0, below=1.0)
    weight_decay: float = key("share of a weight that is added to its gradient", low=0.0)


@dataclass
class Constant(Component):
    """The learning rate over the steps."""

    warmup_steps: int | str = key(
        "steps of linear growth up to `optimizer.lr`; `auto`: a tenth of the run, at most 50",
        low=0,
        auto=True,
    )


@dataclass
class Cosine(Constant):
    """Warm-up, then half a cosine."""

    min_ratio: float = key("share of `optimizer.lr` that the last step has", low=0.0, high=1.0)


@dataclass
class WSD(Cosine):
    """Warm-up, stable, decay."""

    decay_fraction: float = key("share of `trainer.max_steps`, at the end, that decays", low=0.0, high=1.0)


@dataclass
class PythonSource(Component):
    """What every data set has."""

    cache_dir: str = key("folder of token files, shared by all runs")
    val_fraction: float = key(
        "share kept for validation: of `tokens` the end of the file; else by a hash, of a file's path for "
        "`python_source`, of a document's text for others",
        above=0.0,
        high=0.5,
    )
    packing: str = one_of(
        ("concat", "documents"),
        "rows cut from one long text, or rows of whole documents with attention and positions of their own",
    )
    seq_length: int = key("tokens per sequence", low=1)
    global_batch_size: int = key(
        "sequences per optimizer step, over all ranks; a multiple of the number of ranks", low=1
    )
    micro_batch_size: int | str = key(
        "sequences per rank and forward pass; gradient accumulation follows from it; `auto` = no accumulation",
        low=1,
        auto=True,
    )
    shuffle: bool = key("a new order every epoch; false: the order of the corpus")


@dataclass
class Documents(PythonSource):
    """Texts that a tokenizer turns into tokens."""

    tokenizer: str = one_of(
        ("bytes", "bpe"), "`bpe` is trained on the training split; needs the package `tokenizers`"
    )
    vocab_size: int | str = key(  # its limit depends on the tokenizer: data_files.py
        "tokens of bpe, at most; `auto` = 4096", auto=True
    )


@dataclass
class TextFiles(Documents):
    """Your own text files."""

    files: list[str] = key("paths and globs, from the current folder")
    val_files: list[str] = key("the same for validation; empty: by `val_fraction`")
    separator: str | None = key("text that ends a document within a file; null: each file is a document")
    encoding: str = key("of the files: any that Python knows, such as latin-1, cp1252, utf-16")


@dataclass
class HuggingFace(Documents):
    """Data sets of the package `datasets`."""

    dataset: str = key("name on the hub, a folder, or a format (json, parquet, csv, text) of `data_files`")
    config_name: str | None = key("configuration of a data set that has several")
    revision: str | None = key("branch, tag or commit on the hub")
    data_files: list[str] | None = key("local paths, globs, URLs")
    split: str = key("training rows")
    val_split: str | None = key("validation rows; null: by `val_fraction`")
    text_column: str = key("column with the text; each row is a document")
    streaming: bool = key("read rows as they are needed instead of downloading everything first")
    max_documents: int | None = key("at most so many rows of each split; needed with `streaming`", low=1)


@dataclass
class TokenFiles(PythonSource):
    """Files of tokens that exist already."""

    train_file: str = key("`.npy` of one axis, or raw little-endian integers")
    val_file: str | None = key("null: the end of `train_file`, by `val_fraction`")
    dtype: str | None = one_of(
        (None, "uint8", "uint16", "uint32", "int32", "int64"),
        "of raw files; null: the header or `<train_file>.json` says",
    )
    vocab_size: int | str = key(
        "number of different tokens; `auto`: `<train_file>.json` says, 256 with `dtype=uint8`",
        low=1,
        auto=True,
    )
    eos_token: int | None = key("last token of each document; `packing=documents` needs it", low=0)
    tokenizer: str | None = key("for `eval.py`: `bytes` or a `tokenizer.json`; null: numbers")


@dataclass
class Trainer:
    """Devices, steps, precision."""

    accelerator: str = one_of(("auto", "cpu", "gpu"), "`auto`: GPUs if there are any")
    devices: int | str = key(
        "ranks on this machine; `auto` = every GPU, else 2 CPU ranks", low=1, high=1024, auto=True
    )
    num_nodes: int = key("machines; more than 1 only under torchrun", low=1)
    max_steps: int = key("optimizer steps", low=1)
    precision: str = one_of(
        ("32-true", "bf16-mixed", "bf16-true"),
        "of the forward pass (`mixed`) or of the weights too (`true`); gate and selection bias are always fp32",
    )
    gradient_clip_val: float | None = key("largest global gradient norm; null is off", above=0.0)
    log_every_n_steps: int = key("steps between records in `metrics.jsonl`", low=1)
    val_check_interval: int = key(
        "steps between validations; there is one after the last step in any case", low=1
    )
    limit_val_batches: int = key(
        "batches of `data.global_batch_size` sequences per validation; 0 is off", low=0
    )
    threads_per_rank: int | str = key(
        "CPU threads; `auto` = an equal share of the cores, unless OMP_NUM_THREADS is set",
        low=1,
        high=4096,
        auto=True,
    )
    pin_cpu: bool = key("bind each rank to its own cores (Linux)")
    peak_tflops: Any = key(
        "dense TFLOP/s of one device, what MFU is measured against; `auto` = a table of known GPUs, or on a CPU a "
        "matrix product of 0.2 s in the run's type and threads; null = no MFU",
        above=0.0,
        auto=True,
        real=True,
    )


@dataclass
class Progress:
    """The progress display."""

    enabled: bool = key("the progress display")


@dataclass
class Checkpoint:
    """When checkpoints are written."""

    every_n_steps: int = key(
        "steps between checkpoints; there is one after the last step too, and when a run is stopped", low=1
    )
    keep_last: int = key("checkpoints that are kept; older ones are deleted", low=1)


@dataclass
class OverlapReport:
    """Measuring overlap in a training run."""

    every_n_steps: Any = key(
        "steps between measurements of how much of the exchanges is hidden (docs/overlap.md); the run stays "
        "bit-identical; `auto`: once, half way, if `overlap` is not `none`",
        low=1,
        auto=True,
    )


@dataclass
class Callbacks:
    """Progress display and checkpoints."""

    progress: Progress = field(default_factory=Progress)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    overlap_report: OverlapReport = field(default_factory=OverlapReport)


@dataclass
class Logger:
    """Where metrics are mirrored beside metrics.jsonl. Without a `_target_`: nowhere."""


@dataclass
class CSVLogger(Logger):
    """Lightning's CSV logger."""

    _target_: str = MISSING


@dataclass
class TensorBoardLogger(Logger):
    """Lightning's TensorBoard logger."""

    _target_: str = MISSING


@dataclass
class WandbLogger(Logger):
    """Lightning's logger of Weights & Biases."""

    _target_: str = MISSING
    project: str = key("wandb project")
    group: str | None = key("wandb group; null: the sweep's folder, or else the experiment")
    tags: list[str] = key("added to one tag per choice")
    offline: bool | str = one_of(
        ("auto", True, False), "`auto` is offline without an API key; an existing WANDB_MODE counts"
    )


@dataclass
class Paths:
    """Folders."""

    log_dir: str = key("of all runs, relative to where the command is typed")
    cache_dir: str = key("of prepared data")
