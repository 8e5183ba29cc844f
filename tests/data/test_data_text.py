"""`data=text`: what a document is, which split it is in, tokenizers, and the cache."""

import hashlib
import sys

import numpy as np
import pytest

from sidestream.config.errors import ConfigError
from sidestream.data import text
from sidestream.data.documents import DocumentSource
from sidestream.data.store import token_dtype
from sidestream.data.text import TextFiles
from tests.data.sources import COMMON, documents, texts

needs_tokenizers = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("tokenizers") is None, reason="needs pip install tokenizers"
)


@pytest.fixture
def folder(tmp_path):
    """60 documents in files of their own."""
    for i, content in enumerate(texts()):
        (tmp_path / "in" / f"{i % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / f"{i % 3}" / f"{i}.txt").write_text(content, encoding="utf-8")
    return tmp_path


def source(folder, files=("in/**/*.txt",), **changes):
    common = {"cache_dir": str(folder / "cache"), "val_fraction": 0.3, "val_files": [], **COMMON}
    common["val_files"] = [str(folder / name) for name in changes.pop("val_files", [])]
    return TextFiles(files=[str(folder / name) for name in files], **(common | changes))


def contents(tokens):
    return [bytes(document).decode() for document in documents(tokens, 0)]


def test_a_file_is_a_document_and_a_hash_of_it_decides_the_split(folder):
    corpus = source(folder).load()
    train, val = contents(corpus.train_tokens), contents(corpus.val_tokens)
    assert sorted(train + val) == sorted(texts())
    shares = {t: int(hashlib.sha256(t.encode()).hexdigest()[:16], 16) / 2**64 for t in texts()}
    assert set(val) == {content for content, share in shares.items() if share < 0.3}
    assert (corpus.vocab_size, corpus.eos_token, corpus.unit, corpus.name) == (256, 0, "byte", "text")
    # Where a document lies does not matter.
    (folder / "in" / "0" / "0.txt").rename(folder / "in" / "1" / "zzz.txt")
    assert set(contents(source(folder).load().val_tokens)) == set(val)


def test_named_validation_files_are_not_trained_on(folder):
    corpus = source(folder, val_files=["in/0/*.txt"]).load()
    expected = [texts()[i] for i in range(60)]
    assert sorted(contents(corpus.val_tokens)) == sorted(expected[::3])
    assert sorted(contents(corpus.train_tokens)) == sorted(expected[1::3] + expected[2::3])


@pytest.mark.parametrize("ends", [True, False])
def test_a_separator_cuts_a_file_into_documents(folder, ends):
    joined = "<|doc|>".join(texts()) + ("<|doc|>" if ends else "")
    (folder / "one.txt").write_text(joined, encoding="utf-8")
    cut = source(folder, ["one.txt"], separator="<|doc|>").load()
    whole = source(folder).load()
    assert sorted(contents(cut.train_tokens)) == sorted(contents(whole.train_tokens))
    assert contents(cut.val_tokens) == [t for t in texts() if t in set(contents(whole.val_tokens))]


@pytest.mark.parametrize("content", ["".join(texts()), "\u00fc" * 500])
def test_one_document_gives_its_end_to_validation(folder, content):
    (folder / "one.txt").write_text(content, encoding="utf-8")
    corpus = source(folder, ["one.txt"], val_fraction=0.1).load()
    (train,), (val,) = contents(corpus.train_tokens), contents(corpus.val_tokens)
    assert train + val == content
    assert 0.09 < len(val.encode()) / len(content.encode()) < 0.15
    assert train.endswith("\n") or "\n" not in content


def test_the_cache_is_used_until_a_file_or_a_setting_changes(folder, monkeypatch):
    first = source(folder).load()
    with monkeypatch.context() as patch:
        patch.setattr(TextFiles, "documents", lambda _: pytest.fail("read again"))
        assert source(folder).load().checksum == first.checksum
        with pytest.raises(pytest.fail.Exception):
            source(folder, val_fraction=0.4).load()
    (folder / "in" / "0" / "0.txt").write_text("another text\n")
    assert source(folder).load().checksum != first.checksum


def test_a_checksum_belongs_to_the_content_and_not_to_the_place(folder):
    (folder / "in").rename(folder / "elsewhere")
    moved = source(folder, ["elsewhere/**/*.txt"]).load()
    (folder / "elsewhere").rename(folder / "in")
    assert source(folder).load().checksum == moved.checksum


def test_the_dtype_follows_the_vocabulary():
    sizes = {1: "uint8", 256: "uint8", 257: "uint16", 65536: "uint16", 65537: "uint32"}
    assert {size: token_dtype(size).name for size in sizes} == sizes


@needs_tokenizers
def test_bpe_is_trained_on_the_training_split_and_decodes_to_the_text(folder):
    made = source(folder, tokenizer="bpe", vocab_size=300)
    corpus = made.load()
    assert (corpus.vocab_size, corpus.train_tokens.dtype, corpus.unit) == (300, np.uint16, "token")
    decoded = [made.decode(document) for document in documents(corpus.train_tokens, corpus.eos_token)]
    whole = source(folder).load()
    assert decoded == contents(whole.train_tokens)
    assert corpus.train_tokens.size < 0.6 * whole.train_tokens.size
    for prompt in ("", "router ", "never seen: \u00e9\u4e2d\0 <|end|>"):
        assert made.decode(made.encode(prompt)) == prompt
        assert corpus.eos_token not in made.encode(prompt)
    # Nothing of validation is in the tokenizer: other validation texts give the same one.
    names = {p.read_text(encoding="utf-8"): p for p in (folder / "in").rglob("*.txt")}
    changed = names[contents(whole.val_tokens)[0]]
    before = (corpus.folder / "tokenizer.json").read_bytes()
    train = [str(names[t].relative_to(folder)) for t in contents(whole.train_tokens)]
    for content in ("zzzz zzzz zzzz", "yyyy yyyy yyyy"):
        changed.write_text(content)
        place = str(changed.relative_to(folder))
        again = source(folder, train, val_files=[place], tokenizer="bpe", vocab_size=300).load()
        assert (again.folder / "tokenizer.json").read_bytes() == before


@needs_tokenizers
def test_a_damaged_tokenizer_is_noticed_and_made_again(folder):
    made = source(folder, tokenizer="bpe", vocab_size=300)
    first = made.load()
    path = first.folder / "tokenizer.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"<|end|>", b"<|END|>"))
    assert source(folder, tokenizer="bpe", vocab_size=300).load().checksum == first.checksum
    assert path.read_bytes() == whole


@needs_tokenizers
def test_a_text_with_fewer_pairs_has_a_smaller_vocabulary(folder):
    corpus = source(folder, tokenizer="bpe").load()
    assert 257 < corpus.vocab_size < 4096
    assert corpus.train_tokens.max() < corpus.vocab_size


def test_without_the_package_the_command_that_installs_it_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"^data\.tokenizer=bpe: .*; run pip install tokenizers$"):
        source(folder, tokenizer="bpe").load()
    assert source(folder).load().vocab_size == 256


def test_what_cannot_be_split_or_read_is_one_line(folder, monkeypatch):
    for i in range(2):
        (folder / f"same{i}.txt").write_text("equal texts have equal hashes")
    with pytest.raises(ConfigError, match=r"data\.val_fraction=0\.3: no document .* split; .*") as refused:
        source(folder, ["same*.txt"]).load()
    assert "\n" not in str(refused.value)
    assert not list((folder / "cache").rglob("*.bin"))

    def fail(path, separator):
        raise PermissionError(f"not yours: {path.name}")

    monkeypatch.setattr(text, "_cut", fail)
    with pytest.raises(ConfigError, match=r"data\.files=.*cannot be read \(not yours: 0\.txt\)"):
        source(folder).load()


def test_a_users_own_documents_need_two_methods(tmp_path):
    from dataclasses import dataclass

    from sidestream.data.documents import Document

    @dataclass(frozen=True, kw_only=True)
    class Numbers(DocumentSource):
        name = "numbers"

        def documents(self):
            yield from (Document(f"{i}".encode(), validation=i % 5 == 0) for i in range(50))

        def identity(self):
            return 50

    corpus = Numbers(cache_dir=str(tmp_path), **COMMON).load()
    assert contents(corpus.val_tokens) == [str(i) for i in range(0, 50, 5)]
