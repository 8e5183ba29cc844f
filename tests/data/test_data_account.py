"""Every source says what it did: what was read, left out, replaced, shared; what cannot be meant is refused."""

import codecs
import json
import os
import pickle
import shlex

import numpy as np
import pytest

from sidestream.config.compatibility import check, remarks
from sidestream.config.errors import ConfigError
from sidestream.config.hydra_errors import explain
from sidestream.data.record import content_hash
from sidestream.data.tokenizer import BPETokenizer, ByteTokenizer
from tests.data.sources import texts
from tests.data.test_data_check import checked
from tests.data.test_data_huggingface import json_lines
from tests.data.test_data_huggingface import source as huggingface
from tests.data.test_data_text import contents, source
from tests.data.test_data_tokens import source as token_source
from tests.data.test_data_tokens import write


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for i, content in enumerate(texts(30)):
        (tmp_path / "in" / f"{i:02}.txt").write_text(content, encoding="utf-8")
    return tmp_path


def refusal(*overrides):
    with pytest.raises(ConfigError) as refused:
        checked(*overrides)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def text(*more):
    return ["data=text", "data.files=[in/*.txt]", *more]


# ---- the same file by other names


def test_a_file_is_read_once_whatever_leads_to_it(folder):
    (folder / "again").symlink_to("in")
    os.link(folder / "in" / "03.txt", folder / "in" / "hard.txt")
    names = ["in/*.txt", "again/*.txt", "in/../in/05.txt", "**/*.txt"]
    corpus = source(folder, names).load()
    assert sorted(contents(corpus.train_tokens) + contents(corpus.val_tokens)) == sorted(texts(30))


@pytest.mark.parametrize("kind", ["symlink", "hard link", "detour", "folder"])
def test_what_is_validated_on_is_not_trained_on_by_another_name(folder, kind):
    name = "elsewhere.txt"
    if kind == "symlink":
        (folder / name).symlink_to("in/03.txt")
    elif kind == "hard link":
        os.link(folder / "in" / "03.txt", folder / name)
    elif kind == "detour":
        name = "in/../in/03.txt"
    else:
        (folder / "again").symlink_to("in")
        name = "again/03.txt"
    corpus = source(folder, ["in/*.txt"], val_files=[name]).load()
    assert contents(corpus.val_tokens) == [texts(30)[3]]
    assert sorted(contents(corpus.train_tokens)) == sorted(texts(30)[:3] + texts(30)[4:])
    assert corpus.record.shared_documents == 0


def test_a_link_to_all_that_is_trained_on_leaves_nothing(folder):
    (folder / "link.txt").symlink_to("in/00.txt")
    line = refusal("data=text", "data.files=[in/00.txt]", "data.val_files=[link.txt]")
    assert line.startswith("data.val_files=[link.txt]: every file")


def test_copies_in_both_splits_are_counted(folder):
    (folder / "val").mkdir()
    for i in (1, 2):
        (folder / "val" / f"{i}.txt").write_text(texts(30)[i], encoding="utf-8")
    (folder / "val" / "own.txt").write_text("only here")
    record = source(folder, ["in/*.txt"], val_files=["val/*.txt"]).load().record
    assert (record.documents, record.shared_documents) == ({"train": 30, "val": 3}, 2)
    assert record.warnings() == ["2 validation documents (66.7%) are in the training split too"]


@pytest.mark.parametrize("how", ["same", "link", "copy"])
def test_tokens_are_not_validated_on_what_they_train_on(folder, how):
    train = write(folder / "train.npy", np.arange(500))
    val = folder / {"same": "train.npy", "link": "val.npy", "copy": "val.npy"}[how]
    if how == "link":
        val.symlink_to(train)
    elif how == "copy":
        val.write_bytes(train.read_bytes())
        with pytest.raises(ConfigError, match=r"^data\.val_file=.*val\.npy: a copy of"):
            token_source(train, val_file=str(val), vocab_size=500).load()
        return
    line = refusal("data=tokens", f"data.train_file={train}", f"data.val_file={val}", "data.vocab_size=500")
    assert "the file that is trained on" in line


@pytest.mark.parametrize("dtype", ["uint16", "int64"])
def test_a_copy_in_another_container_is_a_copy(folder, dtype):
    tokens = DRAWN.integers(0, 500, 3000)
    (folder / "train.bin").write_bytes(tokens.astype("<u2").tobytes())
    np.save(folder / "val.npy", tokens.astype(dtype))
    options = {"dtype": "uint16"} if dtype == "uint16" else {"dtype": None}
    train = write(folder / "train.npy", tokens) if dtype == "int64" else folder / "train.bin"
    with pytest.raises(ConfigError, match=r"^data\.val_file=.*val\.npy: a copy of"):
        token_source(train, val_file=str(folder / "val.npy"), vocab_size=500, **options).load()


@pytest.mark.parametrize("eos", [None, 0])
@pytest.mark.parametrize(
    ("begin", "end", "said"), [(0, 500, "15 of 15"), (1234, 1734, "15 of 15"), (2900, 3400, "2 of 15")]
)
def test_a_part_of_what_is_trained_on_is_found_wherever_it_lies(folder, eos, begin, end, said):
    tokens = DRAWN.integers(1, 500, 3400)
    tokens[begin + 32 : begin + 64] = tokens[begin : begin + 32]  # a text may repeat itself
    train = write(folder / "train.npy", tokens[:3000])
    val = write(folder / "val.npy", tokens[begin:end])
    record = token_source(train, val_file=str(val), vocab_size=500, eos_token=eos).load().record
    (note,) = [line for line in record.warnings() if "blocks" in line]
    if said != "2 of 15":
        assert note.startswith(f"{said} blocks of 32 validation tokens (100.0%) are in the training tokens")
    else:
        assert note.startswith("3 of 15")


def test_other_tokens_and_padding_are_no_copy(folder):
    train = write(folder / "train.npy", np.concatenate([DRAWN.integers(1, 500, 3000), np.zeros(500, int)]))
    val = write(folder / "val.npy", np.concatenate([DRAWN.integers(1, 500, 500), np.zeros(500, int)]))
    assert token_source(train, val_file=str(val), vocab_size=500).load().record.warnings() == []


def test_a_split_is_not_its_own_validation(folder):
    line = refusal("data=huggingface", "data.dataset=some/thing", "data.val_split=train")
    assert line.startswith("data.val_split=train: the rows that are trained on")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("key", ["data.files", "data.val_files"])
def test_what_is_no_regular_file_is_not_opened(folder, key):
    os.mkfifo(folder / "pipe")
    os.symlink("/dev/zero", folder / "zeros")
    for name in ("pipe", "zeros"):
        more = [] if key == "data.files" else ["data.files=[in/*.txt]"]
        assert f"{key}={name}: not a regular file" in refusal("data=text", f"{key}=[{name}]", *more)


# ---- encodings


ACCENTS = "Grüße, où est le café? " * 200


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.sample(3)
def test_text_of_another_encoding_is_refused_with_the_key_that_reads_it(folder, encoding):
    (folder / "one.txt").write_bytes(ACCENTS.encode(encoding))
    line = refusal("data=text", "data.files=[one.txt]", "data.tokenizer=bpe")
    assert line.startswith("data.encoding=utf-8: ") and "one.txt" in line
    advised = line.rpartition("set ")[2]
    if encoding != "cp1252":
        assert advised == f"data.encoding={encoding}"
    checked("data=text", "data.files=[one.txt]", "data.tokenizer=bpe", advised)
    corpus = source(folder, ["one.txt"], encoding=encoding, separator="?").load()
    read = contents(corpus.train_tokens) + contents(corpus.val_tokens)
    assert "".join(read).replace(" ", "") == ACCENTS.replace("?", "").replace(" ", "")
    assert corpus.record.replaced_characters == 0


def test_a_few_broken_bytes_are_counted_and_many_are_refused_also_behind_the_beginning(folder):
    pytest.importorskip("tokenizers", reason="needs pip install tokenizers")
    good = "plain words and more of them\n" * 5000
    (folder / "a.txt").write_bytes(good.encode() + b"caf\xe9 \xff\n")
    (folder / "b.txt").write_text("something else\n" * 10)
    options = {"tokenizer": "bpe", "vocab_size": 300, "val_files": ["b.txt"]}
    record = source(folder, ["a.txt"], **options).load().record
    assert record.replaced_characters == 2 and "2 characters were no UTF-8" in record.warnings()
    (folder / "a.txt").write_bytes(good.encode() + ACCENTS.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"^data\.encoding=utf-8: .*no UTF-8.*set data\.encoding=latin-1$"):
        source(folder, ["a.txt"], **options).load()


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "iso-8859-15", "shift_jis", "utf-16-le", "utf-16"])
def test_utf8_is_not_read_as_another_encoding(folder, encoding):
    """Behind the beginning of a file, too, where nobody looks before the ranks start."""
    (folder / "one.txt").write_text(ACCENTS, encoding="utf-8")
    line = refusal("data=text", "data.files=[one.txt]", f"data.encoding={encoding}")
    assert line.startswith(f"data.encoding={encoding}: ") and line.endswith("set data.encoding=utf-8")
    (folder / "one.txt").write_text("plain words\n" * 9000 + ACCENTS, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"one\.txt: .*UTF-8.*set data\.encoding=utf-8$"):
        source(folder, ["one.txt"], encoding=encoding).load()


def test_ascii_has_many_names_and_a_sign_of_two_bytes_is_no_proof(folder):
    (folder / "one.txt").write_bytes(b"plain words\n" * 30)
    (folder / "two.txt").write_bytes(("plain \u30c8\n" * 1).encode("shift_jis") * 9 + b"plain words\n")
    for encoding in ("latin-1", "cp1252", "utf-8-sig", "shift_jis", "iso2022_jp"):
        checked("data=text", "data.files=[one.txt]", f"data.encoding={encoding}")
    checked("data=text", "data.files=[two.txt]", "data.encoding=shift_jis")


JAPANESE = "\u5438\u529b\u306e\u5f37\u3044\u6383\u9664\u6a5f\u3067\u3059\u3002" * 60
RUSSIAN = "\u0431\u044b\u0441\u0442\u0440\u044b\u0439 \u043f\u043e\u0438\u0441\u043a " * 60
QUOTES = "She said \u201cit\u2019s a caf\u00e9\u201d \u2013 and left.\n" * 60


@pytest.mark.parametrize(
    ("content", "advised"),
    [
        (JAPANESE.encode("shift_jis"), "<its encoding>"),
        (JAPANESE.encode("utf-16-le"), "<its encoding>"),
        (JAPANESE.encode("euc_jp"), "<its encoding>"),
        (RUSSIAN.encode("cp1251"), "<its encoding>"),
        (RUSSIAN.encode("koi8-r"), "<its encoding>"),
        (RUSSIAN.encode("cp866"), "<its encoding>"),
        (QUOTES.encode("cp1252"), "cp1252"),
        (ACCENTS.encode("latin-1"), "latin-1"),
    ],
)
def test_an_encoding_is_advised_only_where_the_text_may_be_in_it(folder, content, advised):
    (folder / "one.txt").write_bytes(content)
    line = refusal("data=text", "data.files=[one.txt]", "data.tokenizer=bpe")
    assert line.endswith(f"set data.encoding={advised}")
    if advised == "<its encoding>":  # and who reads it as Western text is told
        (folder / "two.txt").write_text("plain words\n" * 9)
        read = source(folder, ["one.txt"], encoding="latin-1", val_files=["two.txt"]).load()
        notes = read.record.warnings()
        assert any("one.txt: read as latin-1, but it does not look like" in note for note in notes)


def test_lines_of_json_are_said(folder):
    (folder / "rows.jsonl").write_text('{"text": "a"}\n' * 5)
    (note,) = source(folder, ["in/*.txt", "rows.jsonl"]).load().record.warnings()
    assert "lines of JSON" in note and "data=huggingface data.dataset=json" in note


def test_a_replacement_character_that_was_in_the_text_is_text(folder):
    (folder / "a.txt").write_text("\ufffd" * 50)
    assert source(folder, ["in/*.txt"], val_files=["a.txt"]).load().record.replaced_characters == 0


def test_bytes_keep_what_is_no_utf8_and_count_zeros(folder):
    (folder / "a.txt").write_bytes(b"caf\xe9 and a zero \0 inside\n" * 3)
    record = source(folder, ["in/*.txt"], val_files=["a.txt"]).load().record
    assert (record.replaced_characters, record.zero_bytes) == (3, 3)


@pytest.mark.parametrize(
    ("begin", "kind"),
    [
        (b"\x1f\x8b\x08", "gzip"),
        (b"\x28\xb5\x2f\xfd", "zstd"),
        (b"PK\x03\x04", "zip"),
        (b"PAR1", "Parquet"),
        (b"\x04\x22\x4d\x18", "lz4"),
        (b"name".ljust(257, b"\0") + b"ustar", "tar"),
        (pickle.dumps(list(range(30)), protocol=2), "pickle"),
        (pickle.dumps({"a": 1}, protocol=3), "pickle"),
        ((60).to_bytes(8, "little") + b'{"a": 1}', "safetensors"),
    ],
)
def test_a_container_is_no_text(folder, begin, kind):
    (folder / "in" / "x.txt").write_bytes(begin + b"rest")
    assert f"a {kind} file, not text" in refusal(*text())


def test_an_encoding_is_one_that_python_knows(folder):
    for name in ("utf-9", "base64", "''"):
        assert refusal(*text(f"data.encoding={name}")).endswith("set data.encoding=utf-8")
    (folder / "in" / "00.txt").write_bytes(codecs.BOM_UTF16_LE + "ab".encode("utf-16-le"))
    assert refusal(*text("data.encoding=latin-1")).endswith("set data.encoding=utf-16")


# ---- separators


@pytest.mark.parametrize(
    ("content", "typed", "advice"),
    [
        ("a\r\n---\r\nb\r\n---\r\nc", "\n---\n", "set $'data.separator=\"\\r\\n---\\r\\n\"'"),
        ("a\n\nb\n\nc", "\\n\\n", "set $'data.separator=\"\\n\\n\"'"),
        ("a<|END|>b<|END|>c", "<|end|>", "set 'data.separator=\"<|END|>\"'"),
        ("a b c", "<|end|>", "set data.separator=null"),
    ],
)
def test_a_separator_that_never_occurs_is_refused_with_the_one_that_does(folder, content, typed, advice):
    (folder / "one.txt").write_bytes(content.encode())
    with pytest.raises(ConfigError) as refused:
        source(folder, ["one.txt"], separator=typed).load()
    assert str(refused.value).endswith(advice) and "\n" not in str(refused.value)
    assert refusal("data=text", "data.files=[one.txt]", f"data.separator='{typed}'").endswith(advice)
    if "null" not in advice:  # as a shell would pass it on
        (override,) = shlex.split(advice.removeprefix("set ").removeprefix("$"))
        checked("data=text", "data.files=[one.txt]", override.encode().decode("unicode_escape"))


@pytest.mark.parametrize("typed", ["'${END}'", "'<${no.such}>'", "${what:ever}"])
def test_a_separator_that_looks_like_a_reference_is_refused_with_what_means_the_text(folder, typed):
    (folder / "one.txt").write_text(f"a{typed}b")
    options = ["data=text", "data.files=[one.txt]"]
    with pytest.raises(Exception) as refused:
        checked(*options, f"data.separator={typed}")
    line = explain(refused.value, [f"data.separator={typed}"])
    assert line.startswith(f"data.separator={typed}: ") and "\n" not in line
    (override,) = shlex.split(line.rpartition("; set ")[2])
    text = typed.strip("'")
    (folder / "one.txt").write_text(f"a{text}b")
    assert checked(*options, override).data.separator == text


def test_a_separator_that_is_a_reference_is_said(folder):
    (folder / "one.txt").write_text("a<1234>b<${seed}>c")
    options = ["data=text", "data.files=[one.txt]"]
    cfg = checked(*options, "data.separator='<${seed}>'")
    (line,) = remarks(cfg, check(cfg, device_count=0))
    assert line.startswith("data.separator=<1234> is what <${seed}> stands for; for the text itself, set ")
    (override,) = shlex.split(line.rpartition(", set ")[2])
    cfg = checked(*options, override)
    assert cfg.data.separator == "<${seed}>" and remarks(cfg, check(cfg, device_count=0)) == []


def test_an_empty_separator_is_refused(folder):
    assert "data.separator=''" in refusal(*text("data.separator=''"))


def test_separators_are_counted(folder):
    (folder / "one.txt").write_text("a|b||c|")
    record = source(folder, ["in/*.txt", "one.txt"], separator="|").load().record
    assert (record.separators, record.dropped) == (4, {"empty": 2})
    assert record.line().endswith("; 4 separators; 2 left out: empty") and not record.warnings()
    assert sum(record.documents.values()) == 33


# ---- rows


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    package = pytest.importorskip("datasets", reason="needs pip install datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", str(tmp_path / "arrow"))
    monkeypatch.setattr(package.config, "HF_HUB_OFFLINE", True)
    return package


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_without_text_are_counted(tmp_path, datasets, streaming):
    rows = [{"text": t} if i % 2 else {"other": 1} for i, t in enumerate(texts(60))]
    file = json_lines(tmp_path / "rows.jsonl", [{"text": "first"}, *rows, {"text": ""}])
    more = {"streaming": True, "max_documents": 100} if streaming else {}
    record = huggingface(tmp_path, "json", data_files=[file], **more).load().record
    assert record.dropped == {"no text": 30, "empty": 1}
    assert record.warnings() == ["30 documents left out: no text"]
    assert sum(record.documents.values()) == 31


@pytest.mark.parametrize("values", [[0, 0, 0], [1, 2, 3], [1.5, 2.5, 0.0], [["a"], ["b"], ["c"]]])
def test_a_column_that_is_no_text_is_refused(tmp_path, datasets, values):
    file = json_lines(tmp_path / "rows.jsonl", [{"text": value} for value in values])
    with pytest.raises(ConfigError, match=r"^data\.text_column=text: it holds (int|float|list|dict)"):
        huggingface(tmp_path, "json", data_files=[file]).load()


# ---- files of tokens


DRAWN = np.random.default_rng(0)
TOKENS = (DRAWN.zipf(1.2, 40_000) % 50_000)[:5000]  # as of language: most are among the first
NORMAL = DRAWN.normal(size=5000)


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        np.arange(5000),
        DRAWN.integers(0, 300, 5000),
        DRAWN.integers(0, 65_536, 5000),
        DRAWN.integers(46_000, 52_000, 5000),  # of pictures, behind those of text
        DRAWN.integers(13_000, 19_000, 5000),
        np.stack([DRAWN.integers(0, 1024, 3000), DRAWN.integers(1024, 2048, 3000)], axis=1).reshape(-1),
        np.full(5000, 640),  # begins like a pickle
        np.zeros(5000, int),
    ],
)
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_tokens_are_tokens_whatever_they_look_like(folder, tokens, dtype):
    path = folder / "t.bin"
    path.write_bytes(tokens.astype(dtype).tobytes())
    checked("data=tokens", f"data.train_file={path}", f"data.dtype={dtype}", "data.vocab_size=65536")


@pytest.mark.parametrize(
    ("content", "dtype", "why"),
    [
        (np.arange(5000, dtype=np.uint32) % 500 + 1, "uint16", "set data.dtype=uint32"),
        (np.arange(5000, dtype=np.int64) % 500 + 1, "uint16", "set data.dtype=int64"),
        (np.arange(5000, dtype=np.int64) % 500 + 1, "int32", "set data.dtype=int64"),
        (np.arange(5000, dtype=np.uint16) % 200 + 1, "uint8", "set data.dtype=uint16"),
        (b"this is a text and no array of tokens\n" * 100, "uint16", "text, not tokens"),
        ("Ein schöner Tag, ça va très bien.\n".encode() * 100, "uint16", "text, not tokens"),
        ("Ein schöner Tag, ça va très bien.\n".encode("latin-1") * 100, "uint16", "text, not tokens"),
        (b"\x1f\x8b\x08\x00" + bytes(100), "uint16", "a gzip file"),
        (pickle.dumps(list(range(3000))), "uint16", "a pickle file"),
        (pickle.dumps(list(range(3000)), protocol=2), "uint16", "a pickle file"),
        (pickle.dumps(np.arange(3000), protocol=2), "uint16", "a pickle file"),
        ((60).to_bytes(8, "little") + b'{"a": 1}' + bytes(200), "uint16", "a safetensors file"),
        ((60).to_bytes(8, "little") + b'{"a": 1}' + bytes(200), "uint8", "a safetensors file"),
        (b"\x04\x22\x4d\x18" + bytes(200), "uint16", "a lz4 file"),
        (TOKENS.astype(">u2"), "uint16", "it is big-endian"),
        (NORMAL.astype(np.float32), "uint16", "floating-point numbers"),
        (NORMAL.astype(np.float64), "uint16", "floating-point numbers"),
        (TOKENS.astype(np.float32), "uint16", "floating-point numbers"),
        (b"MMIDIDX\x00\x00" + bytes(101), "uint16", "a Megatron index"),
        ((20240520).to_bytes(4, "little") + bytes(2000), "uint16", "llm.c"),
    ],
)
@pytest.mark.sample(4)
def test_a_dtype_or_header_that_does_not_fit_is_refused(folder, content, dtype, why):
    path = folder / "t.bin"
    path.write_bytes(content if isinstance(content, bytes) else content.tobytes())
    line = refusal("data=tokens", f"data.train_file={path}", f"data.dtype={dtype}", "data.vocab_size=60000")
    assert why in line
    with pytest.raises(ConfigError):
        token_source(path, dtype=dtype, vocab_size=60000).load()


@pytest.mark.parametrize(
    ("prompt", "why"), [("\u00e9", "token 195 is none of the 100"), ("a\udcff", "surrogates")]
)
def test_a_prompt_that_the_data_cannot_hold_is_refused(prompt, why):
    from sidestream.evaluate import encode

    assert encode(ByteTokenizer(), "ab", vocab_size=100) == [97, 98]
    with pytest.raises(ConfigError, match=why):
        encode(ByteTokenizer(), prompt, vocab_size=100)


def test_an_array_without_its_suffix_is_refused(folder):
    path = write(folder / "t.npy", np.arange(500)).rename(folder / "t.bin")
    for dtype in ("uint8", "uint16"):
        line = refusal("data=tokens", f"data.train_file={path}", f"data.dtype={dtype}", "data.vocab_size=500")
        assert "NumPy (.npy)" in line


def test_documents_of_tokens_are_counted_where_their_end_is_known(folder):
    train = write(folder / "a.npy", np.array([5, 6, 1, 7, 1, 8, 1]))
    val = write(folder / "b.npy", np.array([7, 1, 9, 1]))
    record = token_source(train, val_file=str(val), vocab_size=10, eos_token=1).load().record
    assert (record.documents, record.tokens) == ({"train": 3, "val": 2}, {"train": 7, "val": 4})
    assert record.shared_documents == 1
    record = token_source(train, val_file=str(val), vocab_size=10).load().record
    assert record.documents == {"train": None, "val": None} and record.shared_documents is None


# ---- extremes


@pytest.mark.parametrize("size", ["9223372036854775808", "9223372036854775807", "16777217", "-1"])
def test_a_vocabulary_has_limits(folder, size):
    assert "data.vocab_size=" in refusal(*text("data.tokenizer=bpe", f"data.vocab_size={size}"))
    if size != "true":
        write(folder / "t.npy", np.arange(500))
        assert "data.vocab_size=" in refusal(
            "data=tokens", "data.train_file=t.npy", f"data.vocab_size={size}"
        )


def test_training_a_tokenizer_sees_no_long_word(monkeypatch):
    from sidestream.data import tokenizer

    for long in ("x" * 5000, " " * 5000, "\u4e13" * 5000):
        pieces = list(tokenizer._pieces(f"before {long} after"))
        assert "".join(pieces) == f"before {long} after"
        assert max(len(piece) for piece in pieces) <= 1100
    ordinary = "words of a language, " * 1000
    assert list(tokenizer._pieces(ordinary)) == [ordinary]


def test_a_record_survives_the_cache_and_changes_no_checksum(folder):
    made = source(folder, ["in/*.txt"]).load()
    again = source(folder, ["in/*.txt"]).load()
    assert again.record == made.record and again.checksum == made.checksum
    assert json.loads((made.folder / "record.json").read_text())["documents"] == made.record.documents
    (made.folder / "record.json").unlink()  # of an earlier version
    built = source(folder, ["in/*.txt"]).load()
    assert built.record == made.record and built.checksum == made.checksum


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": None},
        {"documents": {"train": 1}},
        {"documents": {"train": "many", "val": 1}},
        {"dropped": {"empty": [1]}},
        {"replaced_characters": "0"},
        {"notes": "one"},
        {"notes": [1]},
        {"more": 1},
    ],
)
def test_a_record_that_somebody_changed_is_counted_anew(folder, wrong):
    made = source(folder, ["in/*.txt"]).load()
    place = made.folder / "record.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | wrong))
    again = source(folder, ["in/*.txt"]).load().record
    assert again == made.record and again.line() == made.record.line()


@pytest.mark.parametrize("dtype", ["O", "object", "<U4", "float32", "V8"])
def test_a_cached_index_maps_numbers_only(folder, dtype):
    made = source(folder, ["in/*.txt"]).load()
    index = json.loads((made.folder / "corpus.json").read_text())
    (made.folder / "corpus.json").write_text(json.dumps(index | {"dtype": dtype}))
    assert source(folder, ["in/*.txt"]).load().train_tokens.dtype == np.uint8


def test_the_hash_that_splits_is_the_one_it_always_was():
    assert content_hash(b"abc") == 0xBA7816BF8F01CFEA


def test_long_words_decode_to_themselves(folder):
    pytest.importorskip("tokenizers", reason="needs pip install tokenizers")
    long = "abcdefghij" * 300 + " " * 2000 + "end"
    BPETokenizer.train([long.encode()] * 2, vocab_size=300, path=folder / "t.json")
    made = BPETokenizer(folder / "t.json")
    assert made.decode(made.encode(long)) == long
