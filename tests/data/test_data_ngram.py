"""Count models, against numbers computed by hand."""

import json
from math import log

import numpy as np
import pytest

from sidestream.data import ngram
from sidestream.data.corpus import Corpus
from sidestream.data.store import Content, read_corpus, write_corpus


def _losses(train, val, vocab_size=2):
    return ngram.count_losses(np.array(train, np.uint8), np.array(val, np.uint8), vocab_size)


def test_by_hand():
    # Train 0101. Unigram p(0) = (2 + 1) / (4 + 2) = 1/2.
    # After 1: one pair, one kind: p(0|1) = (1 + 1 * 1/2) / (1 + 1) = 3/4.
    # After 01: one triple, one kind: p(0|01) = (1 + 1 * 3/4) / (1 + 1) = 7/8.
    assert _losses([0, 1, 0, 1], [0, 1, 0]) == pytest.approx({"bigram": -log(3 / 4), "trigram": -log(7 / 8)})


def test_an_unseen_context_takes_the_shorter_one():
    assert _losses([0, 1, 0, 1], [1, 1, 0]) == pytest.approx({"bigram": -log(3 / 4), "trigram": -log(3 / 4)})


def test_the_mean_is_over_tokens_with_two_before_them():
    # Also predicts the second 1: p(1) = 1/2; p(1|0) = (2 + 1/2) / (2 + 1) = 5/6; p(1|10) = (1 + 5/6) / 2.
    losses = _losses([0, 1, 0, 1], [0, 1, 0, 1])
    assert losses["bigram"] == pytest.approx(-(log(3 / 4) + log(5 / 6)) / 2)
    assert losses["trigram"] == pytest.approx(-(log(7 / 8) + log(11 / 12)) / 2)


@pytest.mark.parametrize("name", ["bigram", "trigram"])
def test_probabilities_sum_to_one(name):
    train = np.random.default_rng(0).integers(0, 5, 40)
    for first, second in np.ndindex(6, 6):  # token 5 never occurs
        total = sum(np.exp(-_losses(train, [first, second, c], 6)[name]) for c in range(6))
        assert total == pytest.approx(1)


def test_more_context_is_better_on_text_that_has_it():
    text = b"the quick brown fox jumps over the lazy dog. " * 50
    losses = _losses(list(text), list(text[:200]), 256)
    assert losses["trigram"] < losses["bigram"] < log(28)


def test_kept_beside_the_tokens_and_not_trusted_for_others(tmp_path, monkeypatch):
    parts = [("train", b"abracadabra" * 9), ("val", b"abracadabra")]
    write_corpus(tmp_path, Content(256, parts), name="x")
    corpus = read_corpus(tmp_path)
    losses = ngram.ngram_baselines(corpus)
    assert set(losses) == {"bigram", "trigram"}
    with monkeypatch.context() as patch:
        patch.setattr(ngram, "count_losses", lambda *_: pytest.fail("counted again"))
        assert ngram.ngram_baselines(corpus) == losses
    kept = json.loads((tmp_path / "ngram.json").read_text())
    (tmp_path / "ngram.json").write_text(json.dumps(kept | {"checksum": "other", "bigram": 0}))
    assert ngram.ngram_baselines(corpus) == losses


def test_a_corpus_in_memory_is_counted_too():
    tokens = np.frombuffer(b"abracadabra", np.uint8)
    assert ngram.ngram_baselines(Corpus("x", 256, tokens, tokens, "sum"))["bigram"] > 0


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="vocab_size=300"):
        _losses([0, 1, 0], [0, 1, 0], 300)
    with pytest.raises(ValueError, match="at least 3"):
        _losses([0, 1], [0, 1, 0])


def test_vocabularies_and_splits_without_a_sensible_count_have_none(monkeypatch):
    tokens = np.frombuffer(b"abracadabra", np.uint8)
    assert (
        ngram.ngram_baselines(Corpus("x", 257, tokens.astype(np.uint16), tokens.astype(np.uint16), "s")) == {}
    )
    assert ngram.ngram_baselines(Corpus("x", 256, tokens, tokens[:2], "s")) == {}
    monkeypatch.setattr(ngram, "_MAX_TOKENS", 10)
    assert ngram.ngram_baselines(Corpus("x", 256, tokens, tokens, "s")) == {}
