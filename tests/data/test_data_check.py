"""Mistakes in the data group are refused before a rank exists, in one line."""

import os
import shlex
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir

from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError
from sidestream.launch import entry
from tests.train.fit import CONF


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b[1].txt", "t.bin", "t.npy", "sub/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"12345678")
    return tmp_path


def checked(*overrides):
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", list(overrides))
    check(cfg, device_count=0)
    return cfg


@pytest.mark.parametrize(
    "command",
    [
        "data=text data.files=[a.txt]",
        "data=text data.files=[**/*.txt] data.val_files=[a.txt] data.packing=documents",
        "data=text 'data.files=[\"b[1].txt\"]'",
        "data=text data.files=[a.txt] data.tokenizer=bpe data.vocab_size=300 model.vocab_size=300",
        "data=tokens data.train_file=t.npy data.vocab_size=300 data.tokenizer=a.txt",
        "data=tokens data.train_file=t.bin data.dtype=uint8 data.eos_token=0 data.packing=documents",
        "data=huggingface data.dataset=some/thing data.streaming=true data.max_documents=10",
        "data=huggingface data.dataset=json data.data_files=[a.txt,hf://x/y.json]",
        "data.packing=documents model.vocab_size=256",
    ],
)
def test_what_fits_passes(folder, command):
    checked(*shlex.split(command))


@pytest.mark.parametrize(
    ("command", "begin", "end"),
    [
        ("data=text data.files=[]", "data.files=[]: names no file", "data.files=[my/**/*.txt]"),
        ("data=text data.files=[no/*.txt]", "data.files=no/*.txt: no such file", "<existing files>]"),
        ("data=text data.files=[sub]", "data.files=sub: a folder", "set data.files=[sub/**/*]"),
        ("data=text data.files=[a.txt] data.val_files=[no]", "data.val_files=no: no such file", "]"),
        ("data=text data.files=[a.txt] data.val_files=[a.txt]", "data.val_files=[a.txt]: every file", "=[]"),
        (
            "data=text data.files=[a.txt] data.vocab_size=300",
            "data.vocab_size=300: data.tokenizer=bytes has 256 tokens",
            "set data.tokenizer=bpe",
        ),
        (
            "data=text data.files=[a.txt] data.tokenizer=bpe data.vocab_size=256",
            "data.vocab_size=256: data.tokenizer=bpe begins with 256 bytes",
            "set data.vocab_size=auto",
        ),
        (
            "data=text data.files=[a.txt] model.vocab_size=100",
            "model.vocab_size=100: the data has 256 different tokens",
            "set model.vocab_size=null",
        ),
        ("data=text data.files=[a.txt] data.packing=dense", "data.packing=dense: not a choice", "=concat"),
        ("data=tokens data.train_file=no.bin", "data.train_file=no.bin: no such file", "<existing file>"),
        ("data=tokens data.train_file=sub", "data.train_file=sub: no such file", "<existing file>"),
        (
            "data=tokens data.train_file=t.npy data.vocab_size=9 data.val_file=no.npy",
            "data.val_file=no.npy: no such file",
            "<existing file>",
        ),
        ("data=tokens data.train_file=t.bin", "data.dtype=null: t.bin has no header", "data.dtype=uint16"),
        ("data=tokens data.train_file=t.bin data.dtype=float32", "data.dtype=float32: not a choice", ""),
        ("data=tokens data.train_file=t.npy", "data.vocab_size=auto: ", "different tokens>"),
        (
            "data=tokens data.train_file=t.npy data.vocab_size=9 data.packing=documents",
            "data.packing=documents: data.eos_token=null",
            "set data.packing=concat",
        ),
        (
            "data=tokens data.train_file=t.npy data.vocab_size=300 data.tokenizer=bytes",
            "data.tokenizer=bytes: the files have 300 different tokens",
            "set data.tokenizer=null",
        ),
        (
            "data=tokens data.train_file=t.npy data.vocab_size=9 data.tokenizer=no.json",
            "data.tokenizer=no.json: no such file",
            "]",
        ),
        (
            "data=tokens data.train_file=t.npy data.vocab_size=50257 model.vocab_size=50000",
            "model.vocab_size=50000: the data has 50257 different tokens",
            "set model.vocab_size=null",
        ),
        (
            "data=huggingface data.dataset=some/thing data.streaming=true",
            "data.max_documents=null: data.streaming=true",
            "set data.max_documents=100000",
        ),
        (
            "data=huggingface data.dataset=json data.data_files=[no.json]",
            "data.data_files=no.json: no such file",
            "]",
        ),
        ("data=huggingface", "data.dataset=???: has no value", ""),
        ("model.vocab_size=100", "model.vocab_size=100: the data has 256 different tokens", "=null"),
    ],
)
def test_a_mistake_is_one_line(folder, command, begin, end):
    with pytest.raises(ConfigError) as refused:
        checked(*shlex.split(command))
    line = str(refused.value)
    assert line.startswith(begin), line
    assert line.endswith(end) and "\n" not in line, line


def test_unreadable_files_are_named(folder, monkeypatch):
    # Root may read everything, so permissions are pretended.
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "a.txt" not in str(path) and real(path, mode))
    for command in ("data=text data.files=[a.txt]", "data=tokens data.train_file=a.txt data.dtype=uint8"):
        with pytest.raises(ConfigError, match=r"a\.txt: cannot be read; expected a readable file"):
            checked(*command.split())


def test_the_check_imports_nothing_heavy():
    heavy = {"torch", "numpy", "datasets", "tokenizers"}
    code = f"import sys, sidestream.config.compatibility\nprint({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"
