"""A finished run -> validation loss and a generated sample, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from sidestream import build
from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.conformance import answers
from sidestream.convert.start import trained_as
from sidestream.data.corpus import Corpus, DataSource
from sidestream.data.loaders import val_loader
from sidestream.launch import phase
from sidestream.launch.worker import RankEnv
from sidestream.model.transformer import MoETransformer
from sidestream.parallel.checkpoint_reader import load_meta
from sidestream.parallel.mesh import build_parallel
from sidestream.parallel.weights import load_weights
from sidestream.parallel.world import join_world, leave_world
from sidestream.tracking.untrusted import printable

TEMPERATURE = 0.8


def evaluate(
    cfg: DictConfig,
    *,
    layout: Layout,
    env: RankEnv,
    checkpoint: Path,
    prompt: str | None = None,
    num_tokens: int = 200,
    validate: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint on one rank and measure it.

    Args:
        cfg: The run's resolved config for one rank.
        layout: One rank.
        env: One rank.
        checkpoint: A checkpoint folder.
        prompt: What is continued, taken as it is; None: the data's example.
        num_tokens: Tokens that are generated.
        validate: Compute the validation loss, which takes longest.

    Returns:
        `val_loss` in nats per `unit` (byte or token), over the same sequences as in training, None where it was not
        asked for; `prompt` and `sample`, the generated text after it.
    """
    device = torch.device("cuda", 0) if layout.device_type == "cuda" else torch.device("cpu")
    timeout = timedelta(seconds=cfg.strategy.timeout_seconds)
    owns_world = join_world(env, device, timeout=timeout)
    try:
        phase.enter(phase.READING)
        source: DataSource = build.make(cfg, "data")
        text = getattr(source, "example_prompt", DataSource.example_prompt) if prompt is None else prompt
        corpus = answers.load(source)
        # A model needs something to continue: at least the end of another document.
        begin = encode(source, text, vocab_size=corpus.vocab_size) or [corpus.eos_token or 0]
        _read(lambda: check_corpus(corpus, checkpoint), checkpoint)
        _read(lambda: check_schedule(build.make_schedule(cfg), checkpoint), checkpoint)
        phase.enter(phase.BUILDING)
        parallel = build_parallel(expert_parallel_size=1, device_type=device.type, timeout=timeout)
        build_model = build.model_builder(cfg, vocab_size=corpus.vocab_size, device=device, exact=True)
        model = build_model(parallel)
        phase.enter(phase.LOADING)
        _read(lambda: load_weights(model, checkpoint), checkpoint)
        model.eval()
        autocast = build.PRECISIONS[cfg.trainer.precision][1] is not None
        with torch.inference_mode(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = None
            if validate:
                phase.enter(phase.VALIDATING)
                loss = validation_loss(model, cfg, corpus, device, micro_batch_size=layout.micro_batch_size)
            phase.enter(phase.SAMPLING)
            tokens = generate(
                model,
                torch.tensor([begin], device=device),
                vocab_size=corpus.vocab_size,
                num_tokens=num_tokens,
                context=cfg.data.seq_length,
                generator=torch.Generator(device).manual_seed(cfg.seed),
            )
        model.parts.dispatcher.close()
    finally:
        if owns_world:
            leave_world()
    return {"val_loss": loss, "unit": corpus.unit, "prompt": text, "sample": source.decode(tokens)}


def _read(read: Callable[[], None], checkpoint: Path) -> None:
    try:
        read()
    except ConfigError:
        raise
    except ValueError as error:  # damaged, or of another model
        expected = "a whole checkpoint of this run"
        raise ConfigError(
            "checkpoint", checkpoint, str(error), expected=expected, fix="name another one"
        ) from error


def check_corpus(corpus: Corpus, checkpoint: Path) -> None:
    """Raises ConfigError if the data, or its tokenizer, is not what the checkpoint was trained on.

    Text that changed since is split, and with bpe also numbered, in another way: the loss would mean nothing. A
    prompt in the tokens of another tokenizer would be another text.
    """
    trained = str(load_meta(checkpoint)["sidestream"].get("data_checksum"))
    if corpus.checksum != trained:
        raise ConfigError(
            "run",
            str(checkpoint),
            f"trained on data with checksum {trained[:16]}, but the data is now {corpus.checksum[:16]}",
            expected="the files, or the interpreter, of the run",
            fix="restore the data of the run, or train again",
        )
    tokenizer = (trained_as(checkpoint, key="checkpoint") or {}).get("tokenizer")
    if tokenizer is not None and tokenizer != corpus.tokenizer:
        why = f"trained on the tokens of {printable(tokenizer, limit=20)}, but data.tokenizer is now {corpus.tokenizer}"
        fix = "restore the tokenizer of the run"
        raise ConfigError("run", str(checkpoint), why, expected="the tokenizer of the run", fix=fix)


def check_schedule(schedule: Any, checkpoint: Path) -> None:
    """Raises ConfigError if the checkpoint was trained under a schedule of another function, also a user's own."""
    here = getattr(schedule, "function", "plain")
    trained = load_meta(checkpoint)["sidestream"].get("function", here)
    if trained != here:
        why = f"trained under an overlap that computes {printable(trained)}, and the run has one that computes {here}"
        raise ConfigError(
            "run", str(checkpoint), why, expected="the overlap of the run", fix="checkpoint=<one of this run>"
        )


def validation_loss(
    model: MoETransformer,
    cfg: DictConfig,
    corpus: Corpus,
    device: torch.device,
    *,
    micro_batch_size: int,
) -> float:
    """Mean loss in nats per token over the validation sequences that training uses, in its micro-batches."""
    batches = val_loader(
        corpus,
        seq_length=cfg.data.seq_length,
        global_batch_size=cfg.data.global_batch_size,
        rank=0,
        world_size=1,
        num_batches=cfg.trainer.limit_val_batches or None,
        packing=cfg.data.get("packing", "concat"),
    )
    nll, tokens = 0.0, 0
    for number, batch in enumerate(batches, 1):
        phase.beat(f"validating batch {number} of {len(batches)}")
        for micro_batch in batch.to(device).split(micro_batch_size):
            nll += float(model.loss_sums(micro_batch).nll)
        tokens += int(batch.num_targets())
    return nll / tokens


def encode(source: DataSource, text: str, *, vocab_size: int) -> list[int]:
    """Tokens of a prompt.

    Raises:
        ConfigError: It is no Unicode text, or has a token that the data, and so the model, does not know.
    """
    try:
        tokens = source.encode(text)
    except UnicodeEncodeError as error:  # bytes that the terminal's encoding does not have
        why, expected = printable(error), "text in UTF-8"
        raise ConfigError("prompt", printable(text), why, expected=expected, fix="prompt=<text>") from None
    answers.check_encoded(source, tokens)
    if unknown := [token for token in tokens if token >= vocab_size]:
        why = f"token {unknown[0]} is none of the {vocab_size} of the data"
        expected = "text that the data could hold"
        raise ConfigError("prompt", printable(text), why, expected=expected, fix="prompt=<text>")
    return tokens


def generate(
    model: MoETransformer,
    prompt: Tensor,
    *,
    vocab_size: int,
    num_tokens: int,
    context: int,
    generator: torch.Generator,
) -> list[int]:
    """Sample `num_tokens` tokens below `vocab_size` (a model may know more than its data has).

    They follow `prompt` `[1, S]` int64; the model sees the last `context` tokens.
    """
    tokens = prompt
    for number in range(num_tokens):
        phase.beat(f"writing token {number + 1} of {num_tokens}")
        logits = model(tokens[:, -context:])[:, -1, :vocab_size].float() / TEMPERATURE
        chosen = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, chosen], dim=1)
    return tokens[0, prompt.shape[1] :].tolist()
