"""Checkpoint folders without a training, and without torch."""

from pathlib import Path

from sidestream.tracking import integrity

# What torch pickles for a checkpoint without a tensor.
EMPTY = (
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}"
    b"(S'state_dict_metadata'\n}S'storage_data'\n}S'planner_data'\n}ub."
)


def make_checkpoint(folder: Path, *, sealed: bool = True) -> Path:
    """Writes a whole checkpoint; `sealed=False`: as versions before the manifest did."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").write_bytes(EMPTY)
    (folder / "meta.pt").write_bytes(b"meta")
    (folder / "__0_0.distcp").write_bytes(b"weights")
    if sealed:
        seal(folder)
    return folder


def seal(folder: Path) -> None:
    """Writes the manifest of what the folder holds now."""
    (folder / integrity.MANIFEST).unlink(missing_ok=True)
    integrity.seal(folder, step=integrity.step_of(folder), files=integrity.digests(folder.iterdir()))
