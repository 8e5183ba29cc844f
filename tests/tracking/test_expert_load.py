import ast
import re
from pathlib import Path

import numpy as np
from PIL import Image

from sidestream.tracking import expert_load
from sidestream.tracking.folder import RunFolder
from tests.docs.pages import script


def record(step, counts, steps=10):
    return {"step": step, "steps": steps, "counts": counts}


def test_a_run_has_a_bounded_number_of_records():
    assert expert_load.window(every=10, max_steps=500) == 10
    assert expert_load.window(every=1, max_steps=400) == 1
    assert expert_load.window(every=10, max_steps=100_000) == 250
    for steps in (1, 399, 401, 12_345):
        assert steps / expert_load.window(every=7, max_steps=steps) <= expert_load.COLUMNS


def test_the_picture_shows_the_recorded_numbers_with_one_as_the_middle():
    figure = expert_load.draw([record(10, [[4, 4], [8, 0]]), record(30, [[2, 6], [4, 4]])])
    image = figure.axes[0].images[0]
    # Columns: steps 0-10, 10-20 unknown, 20-30. Rows: layer 0, a strip, layer 1.
    assert image.get_array().filled(-1).tolist() == [
        [1, -1, 0.5],
        [1, -1, 1.5],
        [-1, -1, -1],
        [2, -1, 1],
        [0, -1, 1],
    ]
    assert [image.norm(value) for value in (0.0, 1.0, expert_load.HIGHEST)] == [0.0, 0.5, 1.0]
    assert figure.axes[0].get_xlim() == (0, 30)


def test_a_collapse_is_seen_in_the_pixels(tmp_path):
    folder = RunFolder(tmp_path)
    for step in range(10, 210, 10):
        folder.append_expert_load(record(step, [[80, 80, 80, 80] if step <= 100 else [320, 0, 0, 0]]))
    picture = expert_load.write_picture(tmp_path)
    assert picture == tmp_path / "expert_load.png"
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    height, width, _ = pixels.shape
    left, right = pixels[height // 4, width // 4], pixels[height // 8, 2 * width // 3]
    assert left.min() > 235  # even: white
    assert right[0] > right[2] + 50  # four times the mean: red
    below = pixels[height // 2, 2 * width // 3]
    assert below[2] > below[0] + 50  # dead: blue


def test_no_picture_without_moe_layers_or_records(tmp_path):
    assert expert_load.write_picture(tmp_path) is None
    RunFolder(tmp_path).append_expert_load(record(10, []))
    assert expert_load.write_picture(tmp_path) is None


def test_a_resume_cuts_the_records_too(tmp_path):
    folder = RunFolder(tmp_path)
    for step in (10, 20, 30):
        folder.append_expert_load(record(step, [[1, 1]]))
    folder.expert_load_path.open("a").write('{"step": 40, "st')
    folder.cut_metrics(20)
    assert [r["step"] for r in folder.read_expert_load()] == [10, 20]


def test_the_script_draws_and_refuses_other_folders(tmp_path, capsys):
    plot_load = script("scripts/plot_load.py")
    assert plot_load.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: folder={tmp_path}: no expert load")
    RunFolder(tmp_path).append_expert_load(record(10, [[1, 3]]))
    out = tmp_path / "pictures" / "load.png"
    assert plot_load.main([str(tmp_path), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_nothing_of_ours_imports_matplotlib_before_a_picture_is_drawn():
    source = Path(expert_load.__file__).parents[1]
    for path in source.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert re.search(r"\bmatplotlib\b", ast.unparse(node)) is None, path
