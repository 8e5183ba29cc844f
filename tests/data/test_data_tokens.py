"""`data=tokens`: raw and .npy files, mapped; their description, range, checksum and split."""

import json

import numpy as np
import pytest

from sidestream.config.errors import ConfigError
from sidestream.data import store
from sidestream.data.store import file_digest
from sidestream.data.token_files import TokenFiles
from tests.data.sources import COMMON

EOS = 3


def tokens(count=2000, high=1000):
    return np.random.default_rng(0).integers(0, high, count)


def write(path, values, dtype="uint16"):
    values = values.astype(dtype)
    if path.suffix == ".npy":
        np.save(path, values)
    else:
        path.write_bytes(values.tobytes())
    return path


def source(path, **changes):
    keys = {"val_file": None, "val_fraction": 0.1, "dtype": None, "vocab_size": "auto", "eos_token": None}
    keys |= {"tokenizer": None, "cache_dir": str(path.parent / "cache"), **COMMON}
    return TokenFiles(train_file=str(path), **(keys | changes))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("name", ["t.bin", "t.npy"])
def test_every_dtype_is_mapped(tmp_path, name, dtype):
    values = tokens(high=200)
    path = write(tmp_path / name, values, dtype)
    given = {} if name.endswith("npy") else {"dtype": dtype}
    corpus = source(path, vocab_size=200, **given).load()
    assert np.array_equal(np.concatenate([corpus.train_tokens, corpus.val_tokens]), values)
    assert (corpus.train_tokens.size, corpus.vocab_size, corpus.unit) == (1800, 200, "token")
    assert isinstance(corpus.train_tokens, np.memmap) and not corpus.train_tokens.flags.writeable
    assert not (tmp_path / "cache").exists()


def test_a_file_of_its_own_for_validation(tmp_path):
    train, val = write(tmp_path / "a.npy", tokens()), write(tmp_path / "b.npy", tokens(300))
    corpus = source(train, val_file=str(val), vocab_size=1000).load()
    assert (corpus.train_tokens.size, corpus.val_tokens.size) == (2000, 300)


def test_the_cut_is_at_the_end_of_a_document(tmp_path):
    values = tokens(high=100) % 90 + 10
    values[[400, 1795, 1850, 1999]] = EOS
    corpus = source(write(tmp_path / "t.npy", values), vocab_size=100, eos_token=EOS).load()
    assert corpus.train_tokens.size == 1851
    assert corpus.train_tokens[-1] == EOS
    values[1850] = 20  # then there is none before the last token
    assert (
        source(write(tmp_path / "t.npy", values), vocab_size=100, eos_token=EOS).load().val_tokens.size == 200
    )


def test_a_description_beside_the_file(tmp_path):
    path = write(tmp_path / "t.bin", tokens())
    described = {"dtype": "uint16", "vocab_size": 1000, "eos_token": EOS}
    (tmp_path / "t.bin.json").write_text(json.dumps(described))
    corpus = source(path).load()
    assert (corpus.train_tokens.dtype, corpus.vocab_size, corpus.eos_token) == (np.uint16, 1000, EOS)
    with pytest.raises(ConfigError, match=r"data\.vocab_size=500: .*says 1000.*data\.vocab_size=1000"):
        source(path, vocab_size=500).load()
    for broken in ("{", "[]", '{"dtype": "float32"}', '{"vocab_size": "many"}'):
        (tmp_path / "t.bin.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"data\.train_file=.*t\.bin\.json: not understood"):
            source(path).load()


def test_what_is_wrong_with_a_file_is_one_line(tmp_path):
    path = write(tmp_path / "t.bin", tokens())
    refusals = {
        r"data\.dtype=null: .*has no header": source(path, vocab_size=1000),
        r"data\.vocab_size=auto: ": source(path, dtype="uint16"),
        r"data\.eos_token=1000: ": source(path, dtype="uint16", vocab_size=1000, eos_token=1000),
        r"data\.vocab_size=999: the files hold the tokens 0 and 999": source(
            path, dtype="uint16", vocab_size=999
        ),
        r"an array of 2 axes": source(write(tmp_path / "two.npy", tokens().reshape(2, -1)), vocab_size=1000),
        r"float32": source(write(tmp_path / "f.npy", tokens(), "float32"), vocab_size=1000),
        r"its header says uint16": source(
            write(tmp_path / "u.npy", tokens()), dtype="uint32", vocab_size=1000
        ),
    }
    (tmp_path / "odd.bin").write_bytes(b"123")
    refusals["no multiple of 2 bytes"] = source(tmp_path / "odd.bin", dtype="uint16", vocab_size=65536)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "u.npy").read_bytes()[:-10])
    refusals["cannot be read"] = source(tmp_path / "cut.npy", vocab_size=1000)
    for message, wrong in refusals.items():
        with pytest.raises(ConfigError, match=message) as refused:
            wrong.load()
        assert "\n" not in str(refused.value), message


def test_a_checksum_of_a_small_file_sees_every_byte(tmp_path):
    path = write(tmp_path / "t.npy", tokens())
    first = source(path, vocab_size=1000).load().checksum
    assert source(path, vocab_size=1000).load().checksum == first
    changed = tokens()
    changed[777] ^= 1
    assert source(write(path, changed), vocab_size=1000).load().checksum != first
    assert len({first, source(path, vocab_size=1001).load().checksum}) == 2


def test_a_checksum_of_a_big_file_reads_samples_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "WHOLE_BYTES", 2**20)
    path = tmp_path / "big.bin"
    size = 2**33  # 8 GiB, a hole: takes no space on the disk
    with path.open("wb") as file:
        file.truncate(size)
    read = []
    real = open

    class Counting:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *args):
            self.file.close()

        def read(self, count):
            read.append(count)
            return self.file.read(count)

    monkeypatch.setattr(type(path), "open", lambda self, mode: Counting(real(self, mode)))
    first = file_digest(path)
    assert first.startswith("sampled:")
    assert sum(read) == 256 * 64 * 1024
    for place in (0, size - 1):
        with real(path, "r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert file_digest(path) != first
        first = file_digest(path)
    with real(path, "r+b") as file:
        file.truncate(size - 2)
    assert file_digest(path) != first
    checksum = source(path, dtype="uint16", vocab_size=65536).load().checksum
    assert checksum.startswith("sampled:")


def test_our_own_big_files_are_verified_by_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "WHOLE_BYTES", 2**17)
    content = store.Content(70000, [("train", np.arange(70000)), ("val", np.arange(50))])
    store.write_corpus(tmp_path, content, name="x")
    assert json.loads((tmp_path / "corpus.json").read_text())["train"]["sampled"].startswith("sampled:")
    assert store.read_corpus(tmp_path).train_tokens[-1] == 69999
    raw = (tmp_path / "train.bin").read_bytes()
    (tmp_path / "train.bin").write_bytes(raw[:-4] + b"abcd")
    assert store.read_corpus(tmp_path) is None


def test_text_through_bytes_or_plain_numbers(tmp_path):
    path = write(tmp_path / "t.npy", tokens(high=256), "uint8")
    assert (
        source(path, tokenizer="bytes", dtype="uint8").decode(
            source(path, tokenizer="bytes", dtype="uint8").encode("h\u00e9")
        )
        == "h\u00e9"
    )
    assert source(path, tokenizer="bytes", dtype="uint8").load().unit == "byte"
    numbers = source(path, dtype="uint8")
    assert numbers.encode(" 1 22") == [1, 22]
    assert numbers.encode(numbers.example_prompt) == []
    assert numbers.decode([3, 4]) == " 3 4"
    with pytest.raises(ConfigError, match=r"prompt=hello: .*numbers from 0 to 255"):
        numbers.encode("hello")
    with pytest.raises(ConfigError, match="prompt=256"):
        numbers.encode("256")
