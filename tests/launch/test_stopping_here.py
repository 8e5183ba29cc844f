"""A run of one rank, in the process that was started: it answers while its main thread is in a library."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)

DEAF = """
import hashlib, os, sys
from sidestream.launch import phase, stopping

def give_up(number, why):
    print(why, flush=True)
    os._exit(128 + number)

phase.enter(phase.TRAINING, step=3)
stopping.install()
stopping.watch(give_up, again_after=0.0)
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"a", b"b", 1 << 30)  # minutes without a handler
"""


def test_ctrl_c_is_answered_at_once_and_a_second_one_ends(request: pytest.FixtureRequest):
    process = subprocess.Popen(
        [sys.executable, "-c", DEAF], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    request.addfinalizer(process.kill)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == "stopping after this step (once more: at once)\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "stopped at once, in: training step 3\n"
    assert process.wait(timeout=30) == 130
