"""The table of faults fits the code: each can be planted, and names tests that are there."""

import ast
import importlib.util
import sys
from collections import Counter
from functools import cache

import pytest

from tests.docs.pages import REPOSITORY

SPEC = importlib.util.spec_from_file_location("plant_faults", REPOSITORY / "tools" / "plant_faults.py")
assert SPEC is not None and SPEC.loader is not None
plant_faults = importlib.util.module_from_spec(SPEC)
sys.modules["plant_faults"] = plant_faults
SPEC.loader.exec_module(plant_faults)
FAULTS = plant_faults.load_faults()
ROOMS = (
    *(
        "compare",
        "config",
        "convert",
        "data",
        "dispatch",
        "exchange",
        "fusion",
        "graph",
        "launch",
        "lightning",
    ),
    *("measure", "model", "overlap", "parallel", "predict", "routing", "tracking", "trust"),
)


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((REPOSITORY / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_there_are_enough_in_every_room():
    assert len(FAULTS) >= 120
    assert {fault.room for fault in FAULTS} == set(ROOMS)
    twice = [title for title, count in Counter(fault.title for fault in FAULTS).items() if count > 1]
    assert not twice


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.title)
def test_a_fault_can_be_planted_and_names_its_tests(fault):
    text = (REPOSITORY / fault.file).read_text()
    assert text.count(fault.old) == 1, f"the old text is {text.count(fault.old)} times in {fault.file}"
    planted = text.replace(fault.old, fault.new)
    assert planted != text and fault.wrong
    compile(planted, fault.file, "exec")  # a fault that somebody could commit
    assert fault.tests
    for test in fault.tests:
        path, _, name = test.partition("::")
        assert name.partition("[")[0] in names_in(path), f"{test}: there is no such test"


def test_a_room_that_does_not_exist_is_one_line(capsys):
    assert plant_faults.main(["--only", "routing", "nowhere"]) == 2
    assert capsys.readouterr().out.startswith("--only nowhere: expected one of compare, config,")
