"""`.metadata` of a checkpoint as data: what a few bytes of it can make a reader do."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
from pathlib import Path

import pytest

from sidestream.tracking import stored
from sidestream.tracking.untrusted import Unreadable


@pytest.mark.parametrize("code", [pickle.BYTEARRAY8, pickle.BINBYTES8, pickle.BINUNICODE8, pickle.FRAME])
def test_a_number_in_the_file_makes_no_room(tmp_path: Path, code: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x05" + code + struct.pack("<Q", 1 << 30) + b"abc.")
    tracemalloc.start()
    try:
        with pytest.raises(Unreadable, match=r"\.metadata: \w"):
            stored.read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 29  # what may be read of the file is half of it
    finally:
        tracemalloc.stop()
