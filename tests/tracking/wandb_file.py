"""Reads the file of an offline wandb run: wandb 0.31 has no reader of its own.

A 7-byte head, then blocks of 32 KiB in the log format of LevelDB, each record a protobuf `Record`.
"""

import json
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HEAD, _BLOCK, _LAST = 7, 32768, (1, 4)  # full record, last part of one


@dataclass
class WandbRun:
    """What one start wrote."""

    id: str = ""
    group: str = ""
    name: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None

    @property
    def steps(self) -> list[int]:
        return [row["trainer/global_step"] for row in self.history if "trainer/global_step" in row]


def wandb_runs(folder: Path) -> list[WandbRun]:
    """The offline runs below a run folder in the order of their starts.

    wandb's own process writes the files, on a busy machine some time after `finish` has returned.
    """
    deadline = time.monotonic() + 20
    while True:
        found = [_read(path) for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]
        if all(run.id for run in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _read(path: Path) -> WandbRun:
    from wandb.proto import wandb_internal_pb2

    run = WandbRun()
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.id, run.group, run.name = record.run.run_id, record.run.run_group, record.run.display_name
            run.tags = list(record.run.tags)
            run.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            run.history.append(row)
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _records(data: bytes) -> list[bytes]:
    records, parts, at = [], b"", _HEAD
    while at < len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + _HEAD : at + _HEAD + length]
        at += _HEAD + length
        if kind in _LAST:
            records.append(parts)
            parts = b""
    return records
