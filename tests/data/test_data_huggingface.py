"""`data=huggingface` on local data sets: nothing here uses a network."""

import json
import sys

import pytest

from sidestream.config.errors import ConfigError
from sidestream.data.huggingface import HuggingFace
from tests.data.sources import COMMON, documents, texts


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    package = pytest.importorskip("datasets", reason="needs pip install datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", str(tmp_path / "arrow"))
    monkeypatch.setattr(package.config, "HF_HUB_OFFLINE", True)
    return package


def source(folder, dataset, **changes):
    keys = {"config_name": None, "revision": None, "data_files": None, "split": "train", "val_split": None}
    keys |= {"text_column": "text", "streaming": False, "max_documents": None, "val_fraction": 0.3, **COMMON}
    return HuggingFace(dataset=str(dataset), cache_dir=str(folder / "cache"), **(keys | changes))


def contents(tokens):
    return [bytes(document).decode() for document in documents(tokens, 0)]


def json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_saved_to_disk_with_splits(tmp_path, datasets):
    splits = {"train": texts()[:40], "test": texts()[40:]}
    made = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in splits.items()}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "set")
    corpus = source(tmp_path, tmp_path / "set", val_split="test").load()
    assert contents(corpus.train_tokens) == texts()[:40]
    assert contents(corpus.val_tokens) == texts()[40:]
    assert (corpus.name, corpus.unit, corpus.eos_token) == ("huggingface", "byte", 0)
    with pytest.raises(ConfigError, match=r"data\.dataset=.*split validation cannot be read"):
        source(tmp_path, tmp_path / "set", val_split="validation").load()


def test_saved_to_disk_without_splits(tmp_path, datasets):
    datasets.Dataset.from_dict({"text": [*texts(), None, ""]}).save_to_disk(tmp_path / "set")
    corpus = source(tmp_path, tmp_path / "set").load()
    assert sorted(contents(corpus.train_tokens) + contents(corpus.val_tokens)) == sorted(texts())
    with pytest.raises(ConfigError, match="saved without splits"):
        source(tmp_path, tmp_path / "set", val_split="test").load()


def test_streaming_reads_a_bounded_number_of_rows(tmp_path, datasets):
    file = json_lines(tmp_path / "rows.jsonl", [{"body": text} for text in texts(500)])
    keys = {"data_files": [file], "text_column": "body", "max_documents": 50}
    streamed = source(tmp_path, "json", streaming=True, **keys).load()
    assert sorted(contents(streamed.train_tokens) + contents(streamed.val_tokens)) == sorted(texts(50))
    assert source(tmp_path / "other", "json", **keys).load().checksum == streamed.checksum


def test_bpe_of_a_stream(tmp_path, datasets):
    pytest.importorskip("tokenizers", reason="needs pip install tokenizers")
    file = json_lines(tmp_path / "rows.jsonl", [{"text": text} for text in texts(200)])
    made = source(
        tmp_path, "json", data_files=[file], streaming=True, max_documents=99, tokenizer="bpe", vocab_size=280
    )
    corpus = made.load()
    found = [*documents(corpus.train_tokens, 0), *documents(corpus.val_tokens, 0)]
    assert sorted(map(made.decode, found)) == sorted(texts(99))
    assert corpus.vocab_size == 280


def test_the_cached_tokens_need_no_package_and_see_changed_files(tmp_path, datasets, monkeypatch):
    file = json_lines(tmp_path / "rows.jsonl", [{"text": text} for text in texts()])
    first = source(tmp_path, "json", data_files=[file]).load()
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert source(tmp_path, "json", data_files=[file]).load().checksum == first.checksum
    json_lines(tmp_path / "rows.jsonl", [{"text": text} for text in texts(70)])
    with pytest.raises(ConfigError, match=r"^data=huggingface: .*; run pip install datasets$"):
        source(tmp_path, "json", data_files=[file]).load()


def test_a_wrong_column_or_data_set_is_one_line(tmp_path, datasets):
    file = json_lines(tmp_path / "rows.jsonl", [{"body": text, "id": 1} for text in texts()])
    with pytest.raises(ConfigError, match=r"data\.text_column=text: the data set has the columns body, id"):
        source(tmp_path, "json", data_files=[file]).load()
    with pytest.raises(ConfigError, match=r"data\.dataset=.*cannot be read") as refused:
        source(tmp_path, tmp_path / "nowhere").load()
    assert "\n" not in str(refused.value)
