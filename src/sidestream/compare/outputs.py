"""Writes a comparison: compare.md, compare.csv, compare.png, compare.html."""

from __future__ import annotations

from pathlib import Path

from sidestream.compare import picture, table
from sidestream.compare.arms import Comparison
from sidestream.compare.figures import figures
from sidestream.compare.page import page
from sidestream.tracking.folder import write_bytes_atomic


def write(comparison: Comparison, out: Path) -> list[Path]:
    """Writes the four files to a folder, which is made if it is missing; returns their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    all_figures = figures(comparison)
    # Everything is drawn before anything is written: the four files belong together.
    maps = {arm.name: picture.load_map(arm.runs[0].load) for arm in comparison.arms if arm.runs[0].load}
    contents: dict[str, bytes] = {
        "compare.md": table.markdown(comparison, all_figures).encode(),
        "compare.csv": table.as_csv(comparison, all_figures).encode(),
        "compare.png": picture.png(picture.draw(comparison, all_figures)),
        "compare.html": page(comparison, all_figures, load_maps=maps).encode(),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_bytes_atomic(out / name, content)
    return [out / name for name in contents]
