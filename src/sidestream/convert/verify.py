"""After a conversion: what was written computes the logits of what was read. One model in memory at a time, in fp32."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from sidestream import build
from sidestream.config.errors import ConfigError
from sidestream.launch.worker import RankEnv
from sidestream.model.transformer import MoETransformer
from sidestream.parallel.mesh import Parallel, build_parallel
from sidestream.parallel.world import join_world, leave_world
from sidestream.tracking.untrusted import printable

TOLERANCE = 1e-4  # of the largest logit, or absolute where all are below 1
_LENGTH = 64


@contextmanager
def alone() -> Iterator[Parallel]:
    """A world of one rank on the CPU, unless this process is in one already."""
    cpu, timeout = torch.device("cpu"), timedelta(minutes=10)
    with tempfile.TemporaryDirectory(prefix="sidestream-") as scratch:
        owns_world = join_world(RankEnv(0, 0, 1, 1, f"file://{scratch}/store"), cpu, timeout=timeout)
        try:
            yield build_parallel(expert_parallel_size=1, device_type="cpu", timeout=timeout)
        finally:
            if owns_world:
                leave_world()


def example_tokens(vocab_size: int, window: int | None) -> Tensor:
    """Random tokens `[2, S]` int64; S is larger than a window that is not large itself."""
    length = min(_LENGTH, 2 * window) if window is not None else _LENGTH
    return torch.randint(0, vocab_size, (2, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def our_logits(
    cfg: DictConfig, parallel: Parallel, tokens: Tensor, load: Callable[[MoETransformer], None]
) -> Tensor:
    """Logits `[2, S, V]` fp32 of the model of a config.

    Args:
        cfg: The root config of train.py. Its own router, balance and schedule are used.
        parallel: One rank.
        tokens: From `example_tokens`.
        load: Fills the weights, which are fp32.
    """
    cfg = cfg.copy()
    cfg.initial_weights, cfg.trainer.precision = None, "32-true"
    cpu = torch.device("cpu")
    model = build.model_builder(cfg, vocab_size=cfg.model.vocab_size, device=cpu, exact=True)(parallel)
    load(model)
    model.eval()
    try:
        return model(tokens).float()
    finally:
        model.parts.dispatcher.close()


@torch.no_grad()
def their_logits(folder: Path, tokens: Tensor) -> Tensor | None:
    """Logits `[2, S, V]` fp32 of a Hugging Face folder by transformers; None if no version from 5 is installed.

    Raises:
        ConfigError: transformers does not read the folder, or not all of it.
    """
    try:
        import transformers
    except ModuleNotFoundError:
        return None
    if int(transformers.__version__.partition(".")[0]) < 5:
        return None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            experts_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        model, info = loaded
        told = {name: keys for name, keys in info.items() if keys and name != "error_msgs"}
        if told:
            raise ValueError(f"it reports {told}")
        return model.eval()(tokens).logits.float()
    except Exception as error:
        raise ConfigError(
            "folder",
            printable(folder),
            f"transformers {transformers.__version__} does not read it: {printable(' '.join(str(error).split()))}",
            expected="a folder for from_pretrained",
            fix="another version of transformers, or uninstall it to convert without this comparison",
        ) from error


def compare(expected: Tensor, found: Tensor, *, read_by: str, source: Path) -> float:
    """Returns the largest difference of two sets of logits.

    Raises:
        ConfigError: It is larger than rounding.
    """
    if expected.shape == found.shape:
        difference = float((expected - found).abs().max())
        if difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
            return difference
        why = f"logits differ by {difference:.3g}"
    else:
        why = f"logits are {list(found.shape)} instead of {list(expected.shape)}"
    raise ConfigError(
        "source",
        printable(source),
        f"what was written is another model, read by {read_by}: {why}; it is removed",
        expected="equal logits",
        fix="report this with the config of the model",
    )


def compare_all(expected: Tensor, readers: dict[str, Callable[[], Tensor | None]], *, source: Path) -> str:
    """Compare with every reader that is there, and return what to tell of it.

    Args:
        expected: Logits `[2, S, V]` of what was converted.
        readers: Who reads what was written -> its logits; None: it is not installed.
        source: What was converted.
    """
    told = []
    for name, read in readers.items():
        logits = read()
        if logits is None:
            told.append(f"not compared with {name}, which is not installed")
        else:
            told.append(f"{name} to {compare(expected, logits, read_by=name, source=source):.1e}")
    return f"same logits: {', '.join(told)}"
