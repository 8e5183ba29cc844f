"""Output whose reader is gone: everything that prints goes on, in Python and below it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)

PRINTS = """
import logging, os, signal, sys
from sidestream.launch import terminal
terminal.outlive()
terminal.outlive()
sys.stdin.read()  # until the reader is gone
from rich.console import Console
logging.basicConfig(stream=sys.{stream}, level=logging.INFO)
for n in range(3):
    print("line", n, file=sys.{stream}, flush=True)
    Console(file=sys.{stream}).print("rich", n)
    logging.info("log %d", n)
os.write({number}, b"below")
if hasattr(signal, "SIGHUP"):
    os.kill(os.getpid(), signal.SIGHUP)
print("the end", file=sys.{other}, flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("stream", "number", "other"), [("stdout", 1, "stderr"), ("stderr", 2, "stdout")])
def test_a_closed_pipe_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, unbuffered: str, stream: str, number: int, other: str
):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTS.format(stream=stream, number=number, other=other)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    pipe, rest = (process.stdout, process.stderr) if number == 1 else (process.stderr, process.stdout)
    assert pipe is not None and rest is not None and process.stdin is not None
    pipe.close()
    process.stdin.close()
    assert rest.read().decode().strip() == "the end"
    assert process.wait(timeout=30) == 3


def test_what_is_read_arrives_as_it_was_printed():
    code = "from sidestream.launch import terminal; terminal.outlive(); print('ü', end='')"
    done = subprocess.run([sys.executable, "-X", "utf8", "-c", code], capture_output=True, timeout=30)
    assert (done.stdout, done.stderr, done.returncode) == ("ü".encode(), b"", 0)


def test_a_command_whose_reader_is_gone_ends_as_it_would_have_and_says_nothing():
    code = "import sys; from sidestream.commands import shared; shared.run(lambda: print('x' * 100_000) or 3)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=30)) == ("", 3)
