"""Whole runs on each source: packed, resumed bit-identically, equal for every world size, evaluated."""

import json

import numpy as np
import pytest

from sidestream.config.compatibility import check
from sidestream.launch.worker import RankEnv
from sidestream.lightning.checkpoint import checkpoints
from tests.data.sources import texts
from tests.rank_pool import ranks
from tests.train.fit import compose_run, fit, losses, tensors

PACKED = ["data.packing=documents", "balance=bias"]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("SIDESTREAM_CACHE", str(tmp_path / "cache"))
    for i, content in enumerate(texts(120)):
        (tmp_path / f"{i}.txt").write_text(content, encoding="utf-8")
    tokens = np.random.default_rng(0).integers(0, 300, 8000).astype(np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)


def text(folder, *more):
    return ["data=text", f"data.files=[{folder}/*.txt]", "data.val_fraction=0.3", *more]


def evaluated(rank, world, *, overrides, checkpoint, prompt=None):
    from omegaconf import OmegaConf

    from sidestream.evaluate import evaluate

    cfg = OmegaConf.create(overrides)
    layout = check(cfg, world_size=1, device_count=0)
    env = RankEnv(0, 0, 1, 1, "file:///not-used")
    return evaluate(cfg, layout=layout, env=env, checkpoint=checkpoint, prompt=prompt, num_tokens=8)


def evaluate_run(folder, *overrides, prompt=None):
    cfg, _ = compose_run(list(overrides), world=1)
    return ranks(1).run(evaluated, overrides=cfg, checkpoint=checkpoints(folder)[-1], prompt=prompt)[0]


@pytest.mark.full
def test_packed_runs_do_not_depend_on_the_world_size_or_accumulation(tmp_path):
    options = text(tmp_path, *PACKED)
    fit(tmp_path / "one", *options, world=1)
    one = losses(tmp_path / "one")
    assert len(one) == 6
    for name, world, more in [
        ("two", 2, []),
        ("accumulated", 2, ["data.micro_batch_size=2"]),
        ("four", 4, ["strategy.expert_parallel_size=2"]),
    ]:
        fit(tmp_path / name, *options, *more, world=world)
        assert losses(tmp_path / name) == pytest.approx(one, abs=2e-6), name


def test_a_packed_run_resumes_bit_identically(tmp_path):
    options = text(
        tmp_path, *PACKED, "callbacks.checkpoint.every_n_steps=3", "callbacks.checkpoint.keep_last=5"
    )
    fit(tmp_path / "run", *options)
    (first, last), before = checkpoints(tmp_path / "run"), losses(tmp_path / "run")
    expected = tensors(last)
    last.rename(tmp_path / "aside")
    fit(tmp_path / "run", *options, f"resume={tmp_path / 'run'}")
    assert losses(tmp_path / "run") == before
    again = tensors(checkpoints(tmp_path / "run")[-1])
    assert first.exists() and again.keys() == expected.keys()
    assert all((again[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize(
    ("options", "unit", "vocab_size"),
    [
        (["data=text", "data.files=[{}/*.txt]", "data.val_fraction=0.3"], "byte", 256),
        (["data=tokens", "data.train_file={}/tokens.npy", "data.vocab_size=300"], "token", 300),
    ],
)
def test_a_run_is_evaluated_to_the_same_loss_with_a_sample(tmp_path, options, unit, vocab_size):
    options = [option.format(tmp_path) for option in options]
    (result,) = fit(tmp_path / "run", *options, world=1)
    prompt = "x${seed}y${HOME}" if unit == "byte" else None
    found = evaluate_run(tmp_path / "run", *options, prompt=prompt)
    assert found["val_loss"] == pytest.approx(result["metrics"]["val_loss"], rel=1e-6)
    assert found["unit"] == unit and found["sample"] and found["prompt"] == (prompt or "")
    account = result["data"]
    assert account["documents"] == {"train": None, "val": None} or sum(account["documents"].values()) == 120
    assert all(account["tokens"].values())
    counts = result["metrics"]["baselines"]
    assert (counts["bigram"] is None) == (counts["trigram"] is None) == (vocab_size > 256)
    said = json.loads((checkpoints(tmp_path / "run")[-1] / "model.json").read_text())
    assert said["model"]["vocab_size"] == vocab_size and said["router"]["top_k"] == 2
    assert said["tokenizer"] == ("bytes" if unit == "byte" else None)
    embedding = tensors(checkpoints(tmp_path / "run")[-1])["state_dict.model.embedding.weight"]
    assert embedding.shape[0] == vocab_size
    assert json.loads((tmp_path / "run" / "result.json").read_text())["data_checksum"]


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_a_run_with_a_trained_tokenizer(tmp_path, packing):
    pytest.importorskip("tokenizers", reason="needs pip install tokenizers")
    options = text(tmp_path, "data.tokenizer=bpe", "data.vocab_size=280", f"data.packing={packing}")
    (result,) = fit(tmp_path / "run", *options, "model.vocab_size=320", world=1)
    found = evaluate_run(tmp_path / "run", *options, "model.vocab_size=320")
    assert found["val_loss"] == pytest.approx(result["metrics"]["val_loss"], rel=1e-6)
    assert found["unit"] == "token" and found["prompt"] == "The "
    assert result["metrics"]["baselines"] == {"bigram": None, "trigram": None}


def test_data_that_changed_since_is_not_evaluated(tmp_path):
    options = text(tmp_path)
    fit(tmp_path / "run", *options, "trainer.max_steps=1", world=1)
    (tmp_path / "0.txt").write_text("other text\n")
    with pytest.raises(AssertionError, match=r"ConfigError: run=.*trained on data with checksum"):
        evaluate_run(tmp_path / "run", *options)


def test_a_model_too_small_for_a_trained_vocabulary_is_refused(tmp_path):
    pytest.importorskip("tokenizers", reason="needs pip install tokenizers")
    options = text(tmp_path, "data.tokenizer=bpe", "data.vocab_size=280", "model.vocab_size=270")
    with pytest.raises(AssertionError, match=r"ConfigError: model\.vocab_size=270: .*280"):
        fit(tmp_path / "run", *options, world=1)
