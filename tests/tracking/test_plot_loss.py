from sidestream.commands import plot_loss
from sidestream.tracking.folder import RunFolder
from sidestream.tracking.result import Baselines, Metrics, RunResult


def make_run(path, *, dispatcher, checksum="a"):
    run = RunFolder(path)
    for step in range(10, 101, 10):
        run.append_metrics({"step": step, "progress/tokens": 2048 * step, "train/loss": 5 - step / 30})
    run.append_metrics({"step": 100, "progress/tokens": 204800, "val/loss": 2.0})
    metrics = Metrics(baselines=Baselines(bigram=2.49, trigram=1.89))
    result = RunResult(
        status="finished", choices={"dispatcher": dispatcher}, data_checksum=checksum, metrics=metrics
    )
    run.write_result(result.as_dict())
    return path


def test_draws_two_runs_and_the_baselines(tmp_path):
    folders = [make_run(tmp_path / name, dispatcher=name) for name in ("local", "alltoall")]
    runs = [plot_loss.read_run(folder) for folder in folders]
    names = plot_loss.labels(folders, runs)
    figure = plot_loss.draw([records for records, _ in runs], [result for _, result in runs], names)
    assert [line.get_label() for line in figure.axes[0].lines] == [
        "dispatcher=local, train",
        "dispatcher=local, validation (2.000)",
        "dispatcher=alltoall, train",
        "dispatcher=alltoall, validation (2.000)",
        "bigram counts (2.490)",
        "trigram counts (1.890)",
    ]
    assert list(figure.axes[0].lines[0].get_xdata())[-1] == 204800
    out = tmp_path / "docs" / "loss.png"
    assert plot_loss.main([*map(str, folders), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_still_trains_can_be_drawn(tmp_path):
    RunFolder(tmp_path / "run").append_metrics({"step": 1, "progress/tokens": 8, "train/loss": 5.0})
    assert plot_loss.main([str(tmp_path / "run"), "--out", str(tmp_path / "loss.png")]) == 0


def test_runs_on_different_data_and_folders_without_a_run_are_refused(tmp_path, capsys):
    one = make_run(tmp_path / "one", dispatcher="local")
    two = make_run(tmp_path / "two", dispatcher="local", checksum="b")
    for folders in ([one, two], [tmp_path / "absent"]):
        assert plot_loss.main([*map(str, folders), "--out", str(tmp_path / "x.png")]) == 2
        assert capsys.readouterr().err.startswith(f"error: folder={folders[-1]}: ")
    assert not (tmp_path / "x.png").exists()
    assert not (tmp_path / "absent").exists()
