"""Reads README.md and docs/: fenced blocks, the commands in them, tables; loads scripts as modules."""

import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"
PAGES = [README, REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """Returns the fenced blocks of a language."""
    return [body for kind, body in _FENCE.findall(text(page)) if kind == language]


def prose(page: Path) -> str:
    """Returns a page without its fenced blocks."""
    return _FENCE.sub("", text(page))


def commands(block: str) -> list[list[str]]:
    """Splits a bash block into commands, each a list of words; comments and assignments are left out."""
    lines = block.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line and not re.match(r"[A-Z]+=", line[0])]


def rows(body: str) -> Iterator[list[str]]:
    """Yields the cells of each row of the Markdown tables in a text, without their heads."""
    for table in re.findall(r"(?:^\|.*\n)+", body, re.MULTILINE):
        for line in table.splitlines()[2:]:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def script(name: str) -> ModuleType:
    """Imports what a file of the repository runs, such as `scripts/check_gpu.py` or `tools/chaos.py`, once."""
    path = REPOSITORY / name
    if path.parent.name != "tools":
        return importlib.import_module(f"sidestream.commands.{path.stem}")
    module = sys.modules.get(path.stem)
    if module is None or getattr(module, "__file__", None) != str(path):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses and pickle look a class's module up here
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.parent))
    return module
