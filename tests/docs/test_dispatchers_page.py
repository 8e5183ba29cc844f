"""docs/dispatchers.md: every option, and the numbers and install lines that the check of a config has."""

import re

import pytest

from sidestream.config.availability import HOPPER, LIBRARIES
from sidestream.config.capabilities import CAPABILITIES
from sidestream.config.dispatch_check import LIMITS
from tests.docs.pages import REPOSITORY, blocks, rows, text

PAGE = REPOSITORY / "docs" / "dispatchers.md"
NAMES = ("nccl_ep", "deep_ep", "hybrid_ep")  # columns of the table of needs


def table(first: str) -> dict[str, list[str]]:
    """Returns first cell -> other cells of the table that has a row `first`."""
    for body in re.findall(r"(?:^\|.*\n)+", text(PAGE), re.MULTILINE):
        found = {row[0]: row[1:] for row in rows(body)}
        if first in found:
            return found
    raise AssertionError(f"no table with a row {first!r}")


def test_every_option_has_a_row():
    assert {name.strip("`") for name in table("`alltoall`")} == {
        path.stem for path in (REPOSITORY / "conf" / "dispatcher").glob("*.yaml")
    }


def test_the_install_lines_are_those_of_the_refusals():
    shown = [block.strip() for block in blocks(PAGE, "text")]
    assert shown == [LIBRARIES[name].install.format(nccl="nvidia-nccl-cu13") for name in NAMES]


def test_host_reads():
    found = table("NCCL EP")
    for name in NAMES:
        assert found[LIBRARIES[name].name] == [str(LIBRARIES[name].host_reads_eager), "0"]
    ours = {target: can for target, can in CAPABILITIES.items() if ".dispatch." in target}
    local = ours.pop("sidestream.dispatch.local.LocalDispatcher")
    del ours["sidestream.dispatch.none.NoDispatcher"]  # has no rows to move
    assert found["`local`"] == [str(local.host_reads_eager), "no such mode"]
    (cells,) = [cells for name, cells in found.items() if name.startswith("`alltoall`")]
    for can in ours.values():
        assert cells == [str(can.host_reads_eager), str(can.host_reads_static)]


def numbers(limit: int | None) -> list[str]:
    return [] if limit is None else [str(limit)]


@pytest.mark.parametrize(("column", "name"), list(enumerate(NAMES)))
def test_needs(column: int, name: str):
    cells = {row: re.findall(r"\d[\d.]*", cells[column]) for row, cells in table("module").items()}
    library, limits = LIBRARIES[name], LIMITS[name]
    versions = [version for version in (library.nccl, library.nccl_below) if version]
    assert cells["NCCL"] == [".".join(map(str, version)) for version in versions]
    ranks = limits.ranks or (library.min_ranks if library.min_ranks > 1 else None)
    assert cells["ranks that share experts"] == numbers(ranks)
    width = limits.row_bytes if 4 in limits.value_bytes else limits.row_bytes // 2
    assert cells["values in a row"] == [str(width), *numbers(limits.hidden)]
    assert ("fp32" in table("module")["type of a value"][column]) == (4 in limits.value_bytes)
    assert cells["tokens per rank"] == numbers(limits.tokens or limits.tokens_across)
    assert cells["experts per rank"] == numbers(limits.local_experts)
    assert cells["experts"] == numbers(limits.experts)
    assert cells["experts per token"] == numbers(limits.top_k)
    multiple = limits.experts_of_machine if limits.experts_of_machine > 1 else None
    assert cells["experts, all ranks on one machine"] == numbers(multiple)
    assert bool(table("module")["static buffer"][column]) == limits.budget_holds_tokens
    words = [f"`{module}`" for module in library.modules] + (
        [f"`{library.symbol}`"] if library.symbol else []
    )
    assert re.findall(r"`[\w.]+`", table("module")["module"][column]) == words


def test_the_oldest_gpu():
    assert f"compute capability {HOPPER[0]}.{HOPPER[1]} or newer" in text(PAGE)
