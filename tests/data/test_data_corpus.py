"""Token files: atomic, verified, repaired, built by two processes at once; the split of the sources."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sidestream.config.errors import ConfigError
from sidestream.data import python_source
from sidestream.data.python_source import PythonSource, is_validation, source_paths
from sidestream.data.store import Content, open_or_build, read_corpus, write_corpus

TRAIN, VAL = bytes(range(200)) * 50, b"validation" * 30


def _content(train=TRAIN, val=VAL):
    return Content(256, [("train", train), ("val", val)])


def _write(folder):
    write_corpus(folder, _content(), name="x")


def _tree(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text)
    return root


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A PythonSource over a fake library of 40 small files."""
    root = _tree(tmp_path / "lib", {f"pkg/m{i}.py": f"x = {i}\n".encode() for i in range(40)})
    monkeypatch.setattr(python_source, "library_folder", lambda: root)
    return _source(tmp_path / "cache", val_fraction=0.3)


def _source(cache, **changes):
    common = {"seq_length": 4, "global_batch_size": 2, "micro_batch_size": "auto", "shuffle": True}
    return PythonSource(cache_dir=str(cache), **(common | changes))


def test_written_tokens_are_read_back_mapped_and_read_only(tmp_path):
    _write(tmp_path / "c")
    corpus = read_corpus(tmp_path / "c")
    assert (corpus.train_tokens.tobytes(), corpus.val_tokens.tobytes()) == (TRAIN, VAL)
    assert not corpus.train_tokens.flags.writeable
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "corpus.json",
        "record.json",
        "train.bin",
        "val.bin",
    ]


def test_checksum_tells_corpora_apart(tmp_path):
    _write(tmp_path / "a")
    _write(tmp_path / "b")
    write_corpus(tmp_path / "c", _content(TRAIN[:-1] + b"!"), name="x")
    a, b, c = (read_corpus(tmp_path / name).checksum for name in "abc")
    assert a == b != c


def _truncate(folder):
    (folder / "val.bin").write_bytes(VAL[:-1])


def _flip(folder):
    (folder / "train.bin").write_bytes(TRAIN[:-1] + b"!")


def _empty(folder):
    (folder / "train.bin").write_bytes(b"")


def _cut_index(folder):
    (folder / "corpus.json").write_text('{"name": "x", "train"')


def _lose_file(folder):
    (folder / "train.bin").unlink()


@pytest.mark.parametrize("damage", [_truncate, _flip, _empty, _cut_index, _lose_file])
def test_a_damaged_cache_is_noticed_and_rebuilt(tmp_path, damage):
    _write(tmp_path)
    good = read_corpus(tmp_path).checksum
    damage(tmp_path)
    assert read_corpus(tmp_path) is None
    assert open_or_build(tmp_path, _content, name="x").checksum == good


def test_a_write_that_stops_half_way_leaves_no_valid_corpus(tmp_path, monkeypatch):
    real, calls = os.replace, []

    def stop_at_the_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("disk full")
        real(*args)

    monkeypatch.setattr(os, "replace", stop_at_the_second)
    with pytest.raises(OSError, match="disk full"):
        _write(tmp_path)
    assert read_corpus(tmp_path) is None
    assert [p.name for p in tmp_path.iterdir()] == ["train.bin"]  # no temporary file stays


def test_a_good_cache_is_not_built_again(tmp_path):
    _write(tmp_path)
    open_or_build(tmp_path, lambda: pytest.fail("built again"), name="x")


_BUILDER = """
import sys, time
from pathlib import Path
from sidestream.data.store import Content, open_or_build
root = Path(sys.argv[1])
(root / f"ready{sys.argv[2]}").touch()
while not (root / "go").exists():
    time.sleep(0.001)
for i in range(10):
    parts = [("train", bytes(range(200)) * 5000), ("val", b"validation" * 30)]
    corpus = open_or_build(root / str(i), lambda: Content(256, parts), name="x")
    assert corpus.train_tokens.size == 1_000_000 and corpus.val_tokens[0] == ord("v")
"""


def test_processes_that_build_at_once_all_get_a_good_corpus(tmp_path):
    command = [sys.executable, "-c", _BUILDER, str(tmp_path)]
    builders = [subprocess.Popen([*command, str(i)]) for i in range(2)]
    try:
        end = time.monotonic() + 30
        while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < end:
            time.sleep(0.005)
        (tmp_path / "go").touch()
        assert [builder.wait(timeout=30) for builder in builders] == [0, 0]
    finally:
        for builder in builders:
            builder.kill()
            builder.wait()
    assert all(read_corpus(tmp_path / str(i)) for i in range(10))


def test_threads_that_repair_at_once_all_get_a_good_corpus(tmp_path):
    _write(tmp_path)
    _flip(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(open_or_build, tmp_path, _content, name="x") for _ in range(8)]
        assert all(job.result(timeout=20).train_tokens.tobytes() == TRAIN for job in jobs)


def test_left_out_folders_and_other_files_are_not_read(tmp_path):
    kept = ["a.py", "email/b.py", "testing.py"]
    dropped = ["test/x.py", "a/tests/x.py", "idlelib/idle_test/x.py", "lib2to3/x.py", "encodings/x.py"]
    dropped += ["pydoc_data/x.py", "site-packages/x.py", "a/note.txt", "__pycache__/a.py"]
    _tree(tmp_path, dict.fromkeys(kept + dropped, b"x"))
    assert source_paths(tmp_path) == kept


def test_the_split_is_fixed_by_the_relative_path():
    paths = [f"pkg/module{i}.py" for i in range(2000)]
    # Frozen: another result here means that every machine's validation split has moved.
    assert [i for i, path in enumerate(paths[:60]) if is_validation(path, 0.05)] == [35, 44]
    assert sum(is_validation(path, 0.05) for path in paths) == pytest.approx(100, abs=35)
    small = {path for path in paths if is_validation(path, 0.05)}
    assert small < {path for path in paths if is_validation(path, 0.1)}


def test_documents_are_sorted_and_separated_by_a_zero(source):
    corpus = source.load()
    for tokens, val in ((corpus.train_tokens, True), (corpus.val_tokens, False)):
        documents = tokens.tobytes().split(b"\0")
        numbers = [int(document.split()[-1]) for document in documents]
        assert numbers == [i for i in sorted(range(40), key=str) if is_validation(f"pkg/m{i}.py", 0.3) != val]
    assert corpus.name == "python_source"
    assert corpus.vocab_size == 256


def test_loading_twice_reads_the_cache_and_a_changed_library_does_not(source, monkeypatch):
    first = source.load()
    with monkeypatch.context() as patch:
        patch.setattr(PythonSource, "_build", lambda *_: pytest.fail("built again"))
        assert source.load().checksum == first.checksum
    (python_source.library_folder() / "pkg/m3.py").write_text("y = 1234\n")
    assert source.load().checksum != first.checksum


def test_users_read_what_to_change(source, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data\.cache_dir=.*data\.cache_dir="):
        _source(tmp_path / "file" / "below").load()
    with pytest.raises(ConfigError, match=r"data\.val_fraction=1\.5"):
        _source(tmp_path, val_fraction=1.5).load()
    monkeypatch.setattr(python_source, "library_folder", lambda: tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"data=python_source: .*absent"):
        source.load()


def test_the_real_standard_library(tmp_path):
    corpus = _source(tmp_path, val_fraction=0.05).load()
    assert corpus.train_tokens.size > 2_000_000
    assert 0.01 < corpus.val_tokens.size / corpus.train_tokens.size < 0.15
    assert Path(os.__file__).read_bytes() in corpus.train_tokens.tobytes() + corpus.val_tokens.tobytes()


@pytest.mark.parametrize("content", ["[]", "null", "[" * 100_000, '{"files": []}', '{"dtype": []}'])
def test_an_index_that_is_none_is_built_again(tmp_path, content):
    write_corpus(tmp_path, Content(256, [("train", b"abc"), ("val", b"d")]), name="x")
    (tmp_path / "corpus.json").write_text(content)
    assert read_corpus(tmp_path) is None
