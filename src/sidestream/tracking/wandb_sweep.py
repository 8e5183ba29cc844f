"""One wandb run per sweep that shows all of its jobs: a table with their pictures. No torch here."""

from __future__ import annotations

import io
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from sidestream.tracking.folder import write_text_atomic
from sidestream.tracking.sweep import group_of
from sidestream.tracking.untrusted import Unreadable, read_bytes, read_text
from sidestream.tracking.wandb_mode import mode_of, user_settings

TABLE = "sweep/jobs"
PICTURES = {"load": "expert_load.png", "timeline": "overlap.png"}


def log_table(
    folder: Path, rows: Sequence[dict[str, Any]], *, config: dict[str, Any], exit_code: int = 0
) -> None:
    """Log the table in a run of the jobs' group; a second start of the sweep continues that run.

    Args:
        folder: The sweep's.
        rows: Rows of `sweep.csv`.
        config: Resolved, of one of the jobs: project, group, tags.
        exit_code: Exit code of the sweep; another than 0 marks the run as failed.
    """
    import wandb

    logger = config["logger"]
    run = wandb.init(
        project=logger["project"],
        id=_id(folder),
        resume="allow",
        name=f"{folder.name}-table",
        group=logger["group"] or group_of(folder, str(config.get("name") or "")),
        job_type="sweep",
        tags=list(logger["tags"]),
        dir=str(folder),
        mode=mode_of(logger["offline"], user_settings()),
        reinit="finish_previous",
        settings=wandb.Settings(console="off"),
    )
    table = wandb.Table(columns=[*rows[0], *PICTURES])
    for row in rows:
        found = [_picture(folder / row["folder"], name) for name in PICTURES.values()]
        table.add_data(
            *row.values(), *(None if picture is None else wandb.Image(picture) for picture in found)
        )
    run.log({TABLE: table})
    run.finish(exit_code=exit_code)


def _picture(job: Path, name: str) -> Image.Image | None:
    """A picture of a job's own: a sweep that runs again may be anybody's, and what is behind a link is not sent."""
    try:
        picture = Image.open(io.BytesIO(read_bytes(job / name, inside=job)), formats=("PNG",))
        picture.load()
        return picture
    except (Unreadable, OSError, ValueError, Image.DecompressionBombError):
        return None


def _id(folder: Path) -> str:
    path = folder / "wandb_id"
    if not path.exists():
        write_text_atomic(path, uuid.uuid4().hex[:10] + "\n")
    return read_text(path, inside=folder, limit=100).strip()
