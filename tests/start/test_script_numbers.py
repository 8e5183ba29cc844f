"""Numbers that a script cannot work with are refused by its parser, before it starts a rank."""

import argparse

import pytest

from sidestream.commands import shared
from tests.docs.pages import script


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bench_graph", ["--rounds", "0"]),
        ("bench_graph", ["--ranks", "0"]),
        ("bench_graph", ["--warmup", "-1"]),
        ("overlap_cost", ["--rounds", "0"]),
        ("overlap_cost", ["--warmup", "-1"]),
        ("bench_dispatch", ["--timeout", "nan"]),
        ("bench_layer", ["--skew", "nan"]),
        ("bench_layer", ["--seed", "99999999999999999999"]),
        ("bench_dispatch", ["--seed", "-1"]),
        ("check_cluster", ["--seed", "-1"]),
        ("two_hosts", ["--gbps", "nan", "--", "python", "train.py"]),
        ("two_hosts", ["--port", "0", "--", "python", "train.py"]),
    ],
)
def test_a_number_that_cannot_be_measured_with_is_refused(
    name: str, words: list[str], capsys: pytest.CaptureFixture
):
    with pytest.raises(SystemExit) as end:
        script(name).main(words)
    assert end.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {words[0]}: {words[1]}: expected a number from " in said


def test_other_text_is_named_by_argparse(capsys: pytest.CaptureFixture):
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=shared.number(1))
    with pytest.raises(SystemExit):
        parser.parse_args(["--rounds", "many"])
    assert "invalid int value: 'many'" in capsys.readouterr().err
    assert parser.parse_args(["--rounds", "3"]).rounds == 3
