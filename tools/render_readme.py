"""Writes the result tables of README.md and the benchmarks' pages, and their pictures, from docs/results/.

python tools/render_readme.py                                the same as `make readme`
python tools/render_readme.py --run logs/train/runs/<run>    takes a run's files into docs/results/ first
python tools/render_readme.py --overlap <sweep>              the same for a sweep of scripts/measure_overlap.py
python tools/render_readme.py --quality <sweep> <sweep>      the same for the sweeps of experiment=scmoe_quality
"""

if __name__ == "__main__":
    from sidestream import interrupt

    interrupt.leave_at_once()

import contextlib
import hashlib
import io
import json
import shlex
import shutil
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from pages import overlap_matrix, predictor, quality, resume
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sidestream.commands import shared
from sidestream.commands.plot_loss import main as plot_loss
from sidestream.measure import graph_report, report
from sidestream.measure.dispatch_report import markdown
from sidestream.profiling import picture as timeline
from sidestream.report.table import Markdown, Table, short_commit
from sidestream.tracking import latest
from sidestream.tracking.folder import write_json_atomic, write_text_atomic
from sidestream.tracking.untrusted import read_yaml

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
PICTURE = REPOSITORY / "docs" / "loss.png"
RESULTS = REPOSITORY / "docs" / "results"
RESULT = RESULTS / "default_run.json"  # result.json of the run, unchanged
METRICS = RESULTS / "default_run_metrics.jsonl"  # its metrics.jsonl, unchanged
MACHINE = RESULTS / "default_run_machine.json"  # what of its env.json the table needs, and how long it took
BEGIN, END = "<!-- default_run begin: written by `make readme` -->", "<!-- default_run end -->"
SHORTCUT_RESULT = RESULTS / "overlap_shortcut.json"  # overlap.json of scripts/measure_overlap.py, unchanged
SHORTCUT_PICTURE = REPOSITORY / "docs" / "overlap_shortcut.png"
SHORTCUT_BEGIN = "<!-- overlap_shortcut begin: written by `make readme` -->"
SHORTCUT_END = "<!-- overlap_shortcut end -->"
BENCHMARK = REPOSITORY / "docs" / "layer_benchmark.md"
BENCHMARK_RESULT = RESULTS / "bench_layer.json"  # what scripts/bench_layer.py wrote, unchanged
BENCHMARK_BEGIN = "<!-- bench_layer begin: written by `make readme` -->"
BENCHMARK_END = "<!-- bench_layer end -->"
DISPATCH = REPOSITORY / "docs" / "dispatch_benchmark.md"
TOP8_RESULT = RESULTS / "bench_layer_top8.json"  # the same script on two ranks, top-8 shapes
TOP8_BEGIN = "<!-- bench_layer_top8 begin: written by `make readme` -->"
TOP8_END = "<!-- bench_layer_top8 end -->"
FUSION = README.parent / "docs" / "fusion.md"
FUSION_RESULTS = (RESULTS / "bench_fusion_fp32.json", RESULTS / "bench_fusion_bf16.json")
FUSION_BEGIN = "<!-- bench_fusion begin: written by `make readme` -->"
FUSION_END = "<!-- bench_fusion end -->"

DISPATCH_RESULT = RESULTS / "bench_dispatch.json"  # what scripts/bench_dispatch.py wrote, unchanged
DISPATCH_BEGIN = "<!-- bench_dispatch begin: written by `make readme` -->"
DISPATCH_END = "<!-- bench_dispatch end -->"
OVERLAP = REPOSITORY / "docs" / "overlap.md"
OVERLAP_RESULT = RESULTS / "overlap_matrix.json"  # the figures of a sweep of scripts/measure_overlap.py
OVERLAP_BEGIN = "<!-- overlap_matrix begin: written by `make readme` -->"
OVERLAP_END = "<!-- overlap_matrix end -->"
GRAPH = REPOSITORY / "docs" / "step_graphs.md"
GRAPH_RESULT = RESULTS / "bench_graph.json"  # what scripts/bench_graph.py wrote, unchanged
GRAPH_BEGIN = "<!-- bench_graph begin: written by `make readme` -->"
GRAPH_END = "<!-- bench_graph end -->"
QUALITY = RESULTS / "scmoe_quality.md"
QUALITY_RESULT = RESULTS / "scmoe_quality.json"  # a line per run of experiment=scmoe_quality
QUALITY_PICTURE = RESULTS / "scmoe_quality.png"
QUALITY_BEGIN = "<!-- scmoe_quality begin: written by `make readme` -->"
QUALITY_END = "<!-- scmoe_quality end -->"
PREDICTOR = REPOSITORY / "docs" / "predictor.md"
PREDICTOR_BEGIN = "<!-- predictor begin: written by `make readme` -->"
PREDICTOR_END = "<!-- predictor end -->"
RECIPES_BEGIN = "<!-- predictor_recipes begin: written by `make readme` -->"
RECIPES_END = "<!-- predictor_recipes end -->"
RESUME = REPOSITORY / "docs" / "resume.md"
RESUME_BEGIN = "<!-- resume_contract begin: written by `make readme` -->"
RESUME_END = "<!-- resume_contract end -->"
DIGEST = "data-sha256"  # text chunk of the picture: which data it shows


def main(argv: list[str] | None = None) -> int:
    parser = shared.parser(__doc__)
    parser.add_argument(
        "--run", type=Path, metavar="FOLDER", help="take the files of this finished run first"
    )
    parser.add_argument("--overlap", type=Path, metavar="FOLDER", help="take the figures of this sweep first")
    parser.add_argument(
        "--quality", type=Path, nargs="+", metavar="FOLDER", help="take the figures of these sweeps first"
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.quality is not None:
            take_quality([latest.sweep(folder) for folder in arguments.quality])
        if arguments.run is not None:
            take(latest.run(arguments.run))
        if arguments.overlap is not None:
            take_overlap(latest.sweep(arguments.overlap))
        write_text_atomic(README, render(README.read_text(encoding="utf-8")))
        write_text_atomic(BENCHMARK, render_benchmark(BENCHMARK.read_text(encoding="utf-8")))
        write_text_atomic(OVERLAP, render_overlap(OVERLAP.read_text(encoding="utf-8")))
        if QUALITY_RESULT.exists():
            write_text_atomic(QUALITY, render_quality(QUALITY.read_text(encoding="utf-8")))
        write_text_atomic(FUSION, render_fusion(FUSION.read_text(encoding="utf-8")))
        write_text_atomic(GRAPH, render_graph(GRAPH.read_text(encoding="utf-8")))
        write_text_atomic(PREDICTOR, render_predictor(PREDICTOR.read_text(encoding="utf-8")))
        write_text_atomic(RESUME, render_resume(RESUME.read_text(encoding="utf-8")))
        page = DISPATCH.read_text(encoding="utf-8")
        if (rendered := render_dispatch(page)) != page:
            write_text_atomic(DISPATCH, rendered)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    draw(PICTURE)
    draw_overlap(SHORTCUT_PICTURE)
    print(README, PICTURE, SHORTCUT_PICTURE, sep="\n")
    return 0


def take(run: Path) -> None:
    """Copies the files of a run to docs/results/.

    Raises:
        ValueError: the folder holds no run, or not one that finished at its first start.
    """
    if not (run / "result.json").exists() or not (run / "env.json").exists():
        raise ValueError(f"run={run}: no result.json and env.json in it; expected the folder of a run")
    result, env = (
        json.loads((run / name).read_text(encoding="utf-8")) for name in ("result.json", "env.json")
    )
    if result["status"] != "finished" or env["previous"]:
        raise ValueError(
            f"run={run}: status {result['status']}, {len(env['previous'])} resumes; expected one whole run"
        )
    kept: dict[str, Any] = {name: env[name] for name in ("started", "python", "cpu", "cpu_count")}
    # Written last by the run: from the start of rank 0 to the result, with data, validation and checkpoints.
    ended = (run / "result.json").stat().st_mtime
    kept["seconds"] = round(ended - datetime.fromisoformat(env["started"]).timestamp())
    RESULTS.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run / "result.json", RESULT)
    shutil.copyfile(run / "metrics.jsonl", METRICS)
    write_json_atomic(MACHINE, kept)


def take_overlap(sweep: Path) -> None:
    """Copies the figures of a sweep to docs/results/.

    Raises:
        ValueError: there are none in it, or of more than one sweep.
    """
    folders = sorted(
        (p.parent for p in sweep.glob("*/overlap.json")), key=lambda p: int(p.name.split("-")[0])
    )
    if not folders:
        raise ValueError(f"overlap={sweep}: no */overlap.json in it; expected the folder of a sweep")
    overrides = read_yaml(sweep / "multirun.yaml")["hydra"]["overrides"]["task"]
    command = shlex.join(["python", "scripts/measure_overlap.py", "-m", *overrides])
    record = overlap_matrix.collect([folder / "overlap.json" for folder in folders], command=command)
    write_json_atomic(OVERLAP_RESULT, record)


def take_quality(sweeps: list[Path]) -> None:
    """Copies the figures of the study's runs to docs/results/, and draws its picture.

    Raises:
        ValueError: they are not of one study.
    """
    commands = []
    for sweep in sweeps:
        overrides = read_yaml(sweep / "multirun.yaml")["hydra"]["overrides"]["task"]
        commands.append(shlex.join(["python", "train.py", "-m", *overrides]))
    record = quality.collect(sweeps, commands=commands)
    write_json_atomic(QUALITY_RESULT, record)
    quality.draw(record, json.loads(OVERLAP_RESULT.read_text(encoding="utf-8")), QUALITY_PICTURE)


def render_quality(page: str) -> str:
    """Returns docs/results/scmoe_quality.md with its table replaced; see `render`."""
    record = json.loads(QUALITY_RESULT.read_text(encoding="utf-8"))
    return _between(QUALITY.name, page, QUALITY_BEGIN, QUALITY_END, quality.markdown(record))


def render(readme: str) -> str:
    """Returns the README with what is between its marks replaced: the overlap's figures, the run's table.

    Raises:
        ValueError: the marks are not there.
    """
    shortcut, result, machine = (
        json.loads(path.read_text(encoding="utf-8")) for path in (SHORTCUT_RESULT, RESULT, MACHINE)
    )
    readme = _between("README.md", readme, SHORTCUT_BEGIN, SHORTCUT_END, overlap_in_short(shortcut))
    return _between("README.md", readme, BEGIN, END, table(result, machine))


def overlap_in_short(measured: dict[str, Any]) -> str:
    """Returns the picture of an overlap.json with its description, and what it shows in one sentence."""
    both = measured["passes"]["both"]
    serial, overlapped = (both["ms"][arm]["median"] for arm in ("serial", "overlapped"))
    shown = f"serial {serial:.0f} ms, overlapped {overlapped:.0f} ms"
    # Times vary, so a run may seem to gain more than the schedule can.
    share = "all" if both["reached"] >= 1 else f"{100 * both['reached']:.0f} %"
    return (
        f"![Timeline of one MoE unit on two ranks: {shown}](docs/{SHORTCUT_PICTURE.name})\n\n"
        f"`overlap=shortcut` on a wire that takes as long as attention: {serial:.0f} ms become {overlapped:.0f} ms "
        f"({serial / overlapped:.2f} x), {share} of what this schedule can gain."
    )


def render_benchmark(page: str) -> str:
    """Returns docs/layer_benchmark.md with its tables replaced; see `render`."""
    for path, begin, end in (
        (BENCHMARK_RESULT, BENCHMARK_BEGIN, BENCHMARK_END),
        (TOP8_RESULT, TOP8_BEGIN, TOP8_END),
    ):
        result = json.loads(path.read_text(encoding="utf-8"))
        page = _between(BENCHMARK.name, page, begin, end, report.markdown(result))
    return page


def render_dispatch(page: str) -> str:
    """Returns docs/dispatch_benchmark.md with its table replaced; unchanged as long as nothing was measured."""
    if not DISPATCH_RESULT.exists():
        return page
    result = json.loads(DISPATCH_RESULT.read_text(encoding="utf-8"))
    picture = f"![Dispatch and combine of every arm](results/{DISPATCH_RESULT.stem}.png)"
    content = f"{picture}\n\n{markdown(result)}"
    return _between(DISPATCH.name, page, DISPATCH_BEGIN, DISPATCH_END, content)


def render_overlap(page: str) -> str:
    """Returns docs/overlap.md with its table replaced; see `render`."""
    result = json.loads(OVERLAP_RESULT.read_text(encoding="utf-8"))
    return _between(OVERLAP.name, page, OVERLAP_BEGIN, OVERLAP_END, overlap_matrix.markdown(result))


def render_predictor(page: str) -> str:
    """Returns docs/predictor.md with its tables replaced; see `render`."""
    tables = "\n".join(predictor.markdown())
    page = _between(PREDICTOR.name, page, PREDICTOR_BEGIN, PREDICTOR_END, tables)
    return _between(PREDICTOR.name, page, RECIPES_BEGIN, RECIPES_END, predictor.recipes())


def render_resume(page: str) -> str:
    """Returns docs/resume.md with the tables of the contract replaced; see `render`."""
    return _between(RESUME.name, page, RESUME_BEGIN, RESUME_END, resume.markdown())


def render_graph(page: str) -> str:
    """Returns docs/step_graphs.md with its table replaced; see `render`."""
    result = json.loads(GRAPH_RESULT.read_text(encoding="utf-8"))
    return _between(GRAPH.name, page, GRAPH_BEGIN, GRAPH_END, graph_report.markdown(result))


def render_fusion(page: str) -> str:
    """Returns the page with the tables of the fused layer's benchmarks between its markers.

    Raises:
        ValueError: the markers are not there.
    """
    tables = [report.markdown(json.loads(path.read_text(encoding="utf-8"))) for path in FUSION_RESULTS]
    return _between(FUSION.name, page, FUSION_BEGIN, FUSION_END, "\n\n".join(tables))


def _between(name: str, page: str, begin: str, end: str, content: str) -> str:
    before, found_begin, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{name}: no '{begin}' followed by '{end}'; expected both, on lines of their own")
    return f"{before}{begin}\n{content}\n{end}{after}"


def table(result: dict[str, Any], machine: dict[str, Any]) -> str:
    """Returns the Markdown table of a run."""
    metrics, on_gpu = result["metrics"], result["device"] == "cuda"
    baselines = metrics["baselines"]
    backend = {"torch": "torch.distributed, NCCL" if on_gpu else "torch.distributed, gloo"}
    emulated = "nothing" if result["link"] == "native" else f"the wire (link={result['link']})"
    versions = f"torch {result['versions']['torch']}, Python {machine['python']}"
    rows = {
        "command": f"`{result['command']}`",
        "hardware": f"{machine['cpu']}, {machine['cpu_count']} CPU cores{'' if on_gpu else ', no GPU used'}",
        "software": f"commit `{short_commit(result['commit'])}`, {versions}, {result['precision']}",
        "ranks": f"{result['world_size']} on one machine, expert parallel {result['expert_parallel_size']}",
        "transport": backend.get(result["transport"], str(result["transport"])),
        "emulated": emulated,
        "validation loss": f"**{metrics['val_loss']:.3f}** nats per byte after {metrics['tokens']:,} tokens",
        "count models": f"bigram {baselines['bigram']:.3f}, trigram {baselines['trigram']:.3f} nats per byte",
        "speed": f"{metrics['tokens_per_second']:,.0f} tokens/s, {metrics['step_ms']:.0f} ms per step (median)",
        "time": f"{machine['seconds']} s from start to result",
    }
    return Table(("default run", ""), [(name, Markdown(text)) for name, text in rows.items()]).markdown()


def draw(picture: Path) -> None:
    """Draws the committed run with scripts/plot_loss.py and notes in the file which data it shows."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shutil.copyfile(RESULT, folder / "result.json")
        shutil.copyfile(METRICS, folder / "metrics.jsonl")
        with contextlib.redirect_stdout(io.StringIO()):  # the name of a file that is gone in a moment
            assert plot_loss([str(folder), "--out", str(folder / "loss.png")]) == 0
        _save_with_digest(folder / "loss.png", picture, data_digest())


def draw_overlap(picture: Path) -> None:
    """Draws the timeline of the committed overlap.json and notes in the file which data it shows."""
    buffer = io.BytesIO()
    timeline.draw(json.loads(SHORTCUT_RESULT.read_text(encoding="utf-8"))["picture"]).savefig(buffer)
    _save_with_digest(buffer, picture, data_digest(SHORTCUT_RESULT))


def _save_with_digest(drawn: Path | io.BytesIO, picture: Path, digest: str) -> None:
    info = PngInfo()
    info.add_text(DIGEST, digest)
    Image.open(drawn).save(picture, pnginfo=info, optimize=True)


def data_digest(*files: Path) -> str:
    """Returns the sha256 (hex) of the data behind a picture: of the default run's, if no files are named."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in files or (RESULT, METRICS))).hexdigest()


def drawn_digest(picture: Path) -> str | None:
    """Returns the digest that `draw` left in a picture, None if there is none."""
    with Image.open(picture) as image:
        image.load()  # text chunks may follow the pixels
        return image.info.get(DIGEST)


if __name__ == "__main__":
    shared.run(main)
