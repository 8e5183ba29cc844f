"""Count models of the same split, to print beside a loss: what one or two tokens of context predict."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np

from sidestream.data.corpus import Corpus
from sidestream.data.store import write_atomic
from sidestream.tracking.untrusted import read_json

_CACHE = "ngram.json"
_SMOOTHING = "witten-bell"
_MAX_TOKENS = 2**26  # of a split; more take minutes and gigabytes to count


def ngram_baselines(corpus: Corpus) -> dict[str, float]:
    """Validation loss of the bigram and the trigram count model, in nats per token.

    Counted on the train split alone. Smoothing is Witten-Bell interpolation, which has nothing to tune:
    p(c | h) = (n(hc) + T(h) p(c | shorter h)) / (n(h) + T(h)), T(h) = number of different tokens seen after
    h; the unigram model is add-one. An unseen h gives the shorter context's p. The mean is over all tokens of
    the validation split that have two before them, across the ends of documents, whatever `data.packing` is.
    The result is kept beside the token files.

    Returns:
        {"bigram": nats, "trigram": nats}; empty for more than 256 different tokens (the trigram table has
        vocab_size ** 3 cells), and for splits too long or too short to count.
    """
    sizes = (corpus.train_tokens.size, corpus.val_tokens.size)
    if corpus.vocab_size > 256 or min(sizes) < 3 or max(sizes) > _MAX_TOKENS:
        return {}
    cache = corpus.folder / _CACHE if corpus.folder else None
    losses = _read(cache, corpus.checksum) if cache else None
    if losses is None:
        losses = count_losses(corpus.train_tokens, corpus.val_tokens, corpus.vocab_size)
        if cache:
            _write(cache, corpus.checksum, losses)
    return losses


def count_losses(train: np.ndarray, val: np.ndarray, vocab_size: int) -> dict[str, float]:
    """The losses of `ngram_baselines`, computed: about a second for 10 M tokens.

    Args:
        train: Integers [N], counted.
        val: Integers [M], predicted.
        vocab_size: Number of different tokens.

    Raises:
        ValueError: The vocabulary is above 256, or a split is shorter than three tokens.
    """
    if vocab_size > 256:
        raise ValueError(f"vocab_size={vocab_size}: expected at most 256 for a table of trigrams")
    if min(train.size, val.size) < 3:
        raise ValueError(f"train and val have {train.size} and {val.size} tokens: expected at least 3 each")
    last = val[2:].astype(np.int64)
    ones = np.bincount(train, minlength=vocab_size)
    p = (ones[last] + 1) / (train.size + vocab_size)
    losses = {}
    for name, order in (("bigram", 2), ("trigram", 3)):
        table = np.bincount(_keys(train, order, vocab_size), minlength=vocab_size**order)
        table = table.reshape(-1, vocab_size)
        context, token = np.divmod(_keys(val, order, vocab_size)[3 - order :], vocab_size)
        seen = np.count_nonzero(table, axis=1)[context]
        total = table.sum(axis=1)[context]
        smoothed = (table[context, token] + seen * p) / np.maximum(total + seen, 1)
        p = np.where(total > 0, smoothed, p)
        losses[name] = float(-np.log(p).mean())
    return losses


def _keys(tokens: np.ndarray, order: int, vocab_size: int) -> np.ndarray:
    """Every run of `order` tokens as one number, first token most significant: int32 [N - order + 1]."""
    count = tokens.size - order + 1
    keys = np.zeros(count, np.int32)
    for place in range(order):
        keys *= vocab_size
        keys += tokens[place : place + count]
    return keys


def _read(cache: Path, checksum: str) -> dict[str, float] | None:
    try:
        kept = read_json(cache)
        if (kept["checksum"], kept["smoothing"]) != (checksum, _SMOOTHING):
            return None
        return {name: float(kept[name]) for name in ("bigram", "trigram")}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(cache: Path, checksum: str, losses: dict[str, float]) -> None:
    # A shared cache may be read-only for this user; the numbers are cheap to compute again.
    with suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        kept = {"checksum": checksum, "smoothing": _SMOOTHING, **losses}
        write_atomic(cache, json.dumps(kept, indent=2).encode())
