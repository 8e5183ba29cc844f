"""What README and docs say is there: files, names, options, keys, types, defaults, the code they quote."""

import ast
import importlib
import inspect
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from omegaconf import OmegaConf

import sidestream
from sidestream.config import schema
from sidestream.config.errors import as_typed
from sidestream.config.help import GROUPS
from sidestream.overlap.none import NoOverlap
from tests.docs.pages import PAGES, README, REPOSITORY, blocks, prose, rows, text

CONF = REPOSITORY / "conf"
SOURCE = REPOSITORY / "src" / "sidestream"
CONFIGURATION = REPOSITORY / "docs" / "configuration.md"
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
# Files of a run or of the README's example, not of the repository.
ELSEWHERE = re.compile(
    r"logs/.*|(result|env|launch|tokenizer|manifest)\.json|sweep\.csv|stdout\.log|multirun\.yaml|(metrics|expert_load)\.jsonl|expert_load\.png|overlap\.(json|png|svg)|prediction\.(json|png)|compare\.(md|csv|png|html)|trace_rank\d\.json|<train_file>\.json|metrics\.csv|rank\d\.log|checkpoints|(<run>/)?\.hydra/.*|.*version_N.*"
)
OPTIONS = sorted(
    (path.parent.name, path.stem)
    for path in CONF.glob("*/*.yaml")
    if path.parent.name not in ("experiment", "arm")
)


def section(page: Path, title: str) -> str:
    """Returns what stands under a heading, its subsections included."""
    found = re.search(
        rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |\Z)", text(page), re.MULTILINE | re.DOTALL
    )
    assert found, f"{page.name}: no heading {title!r}"
    return found.group(2)


def test_the_readme_is_short_and_begins_with_the_two_commands():
    lines = text(README).splitlines()
    assert len(lines) <= 250
    first = blocks(README, "bash")[0].split("\n")
    assert [line.partition("#")[0].strip() for line in first if line] == ["make train", "make test"]
    assert lines.index("```bash") < 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", text(linked), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings], target
    for name in re.findall(r"`([\w./<>-]+\.(?:py|ya?ml|jsonl?|md|png|svg|log|csv|toml))`", prose(page)):
        places = [page.parent / name, REPOSITORY / name, SOURCE / name]
        assert ELSEWHERE.fullmatch(name) or any(place.exists() for place in places), name


def test_the_version_is_the_same_everywhere_and_hosted_ci_runs_the_two_commands():
    project = tomllib.loads(text(REPOSITORY / "pyproject.toml"))["project"]
    citation = OmegaConf.load(REPOSITORY / "CITATION.cff")
    assert project["version"] == citation.version == sidestream.__version__
    assert f"\n## {sidestream.__version__}" in text(REPOSITORY / "CHANGELOG.md")
    assert project["license"] == citation.license == "Apache-2.0"
    workflow = OmegaConf.load(REPOSITORY / ".github" / "workflows" / "ci.yml")
    assert [step.run for step in workflow.jobs.test.steps if "run" in step] == ["make check", "make test"]


def test_the_walk_of_a_batch_names_what_is_in_the_code():
    walk = list(rows(section(ARCHITECTURE, "The walk of a batch")))
    assert len(walk) > 20
    for _, file, names, _ in walk:
        module = importlib.import_module(
            "sidestream." + file.strip("`").removesuffix(".py").replace("/", ".")
        )
        for name in names.split(", "):
            found = module
            for part in name.strip("`").split("."):
                found = getattr(found, part)


def test_the_protocols_are_where_the_page_says():
    for row in rows(section(ARCHITECTURE, "Which file for which change")):
        group, protocol = row[1].strip("`"), re.fullmatch(r"`(\w+)` in `(.+)\.py`", row[2])
        assert not group or (CONF / group).is_dir(), row
        if protocol:
            name, module = protocol.groups()
            assert hasattr(importlib.import_module("sidestream." + module.replace("/", ".")), name), row


def test_the_schedule_is_quoted_as_it_is_in_the_code():
    quoted = blocks(ARCHITECTURE, "python")
    assert textwrap.dedent(inspect.getsource(NoOverlap.__call__)) in quoted


def test_imports_point_the_way_the_page_says():
    layers = [
        {"lightning"},
        {"parallel"},
        {"model"},
        {"overlap", "fusion", "routing"},
        {"dispatch"},
        {"exchange"},
    ]
    level = {folder: number for number, folders in enumerate(layers) for folder in folders}
    level |= {"data": len(layers), "config": len(layers)}
    for path in SOURCE.rglob("*.py"):
        folder = path.relative_to(SOURCE).parts[0]
        for imported in imports(ast.parse(text(path))):
            if imported == "lightning":
                assert folder in ("lightning", "run.py"), path
            elif folder in level and imported in level and imported != folder:
                assert level[folder] <= level[imported], f"{path} imports {imported}"


def imports(tree: ast.Module) -> set[str]:
    """Folders of sidestream that a module imports when it runs."""
    typing = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(node) for block in typing for node in ast.walk(block)}
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and id(n) not in skipped]
    return {n.module.split(".")[1] for n in froms if n.module and n.module.startswith("sidestream.")}


def test_the_readme_lists_the_options_that_exist():
    table = {row[0].strip("`"): row[1] for row in rows(section(README, "What you can change"))}
    assert set(table) == set(GROUPS)
    for group, options in table.items():
        there = {path.stem for path in (CONF / group).glob("*.yaml")}
        assert set(re.findall(r"`(\w+)`", options)) == there, group


def test_every_option_has_a_line_in_the_page_and_the_default_is_marked(compose):
    choices = compose(return_hydra_config=True).hydra.runtime.choices
    for group in sorted({group for group, _ in OPTIONS} | {"experiment", "arm"}):
        listed = [row[0] for row in rows(section(CONFIGURATION, group)) if len(row) == 2]
        marked = {re.match(r"`(\w+)`", cell).group(1): cell.endswith("(default)") for cell in listed}
        assert set(marked) == {path.stem for path in (CONF / group).glob("*.yaml")}, group
        assert [option for option, is_default in marked.items() if is_default] == (
            [choices[group]] if choices[group] else []
        )


BASES = {"cluster": "h100"}  # whose table has all keys, where the default option has none


@pytest.mark.parametrize(("group", "option"), OPTIONS)
@pytest.mark.sample(10)
def test_the_page_has_every_key_with_its_type_and_default(compose, group: str, option: str):
    """An option that has all keys of the default option lists what differs from it."""
    wanted, kind = keys_of(compose, group, option)
    default = BASES.get(group) or compose(return_hydra_config=True).hydra.runtime.choices[group]
    base, base_kind = keys_of(compose, group, default)
    if option != default and issubclass(kind, base_kind) and kind.__dataclass_fields__:
        wanted = {key: value for key, value in wanted.items() if base.get(key) != value}
    assert table_of(group, option) == wanted


def test_the_page_has_every_key_of_the_top_level(compose):
    plain = OmegaConf.to_container(compose(), resolve=False)
    own = {key: value for key, value in plain.items() if key not in schema.SCHEMAS}
    assert key_rows(section(CONFIGURATION, "Top level")) == described("", own, schema.Root)


def table_of(group: str, option: str) -> dict[str, tuple[str, str]]:
    """Returns key -> (type, default) from the section `### group=option`, {} without one."""
    sections = re.findall(r"^### ([^\n]+)\n(.*?)(?=^#|\Z)", text(CONFIGURATION), re.MULTILINE | re.DOTALL)
    found = [body for title, body in sections if title == f"{group}={option}"]
    return key_rows(found[0]) if found else {}


def key_rows(body: str) -> dict[str, tuple[str, str]]:
    return {row[0].strip("`"): (row[1], row[2]) for row in rows(body) if len(row) == 4}


def keys_of(compose, group: str, option: str) -> tuple[dict[str, tuple[str, str]], type]:
    """Returns key -> (type, default) as in the YAML files, and the schema of an option."""
    node = compose(f"{group}={option}")[group]
    kind = OmegaConf.get_type(node)
    return described(group, OmegaConf.to_container(node, resolve=False), kind), kind


def described(prefix: str, values: dict, kind: type) -> dict[str, tuple[str, str]]:
    """Returns dotted key -> (type in words, value as typed)."""
    found = {}
    for name, value in values.items():
        field, key = kind.__dataclass_fields__[name], f"{prefix}.{name}" if prefix else name
        if isinstance(value, dict):
            found |= described(key, value, dataclass_in(field.type))
        elif name != "_target_":
            found[key] = (in_words(field), "required" if value == "???" else as_typed(value))
    return found


def dataclass_in(kind: Any) -> Any:
    """Returns the dataclass of `Kind` or `Kind | None`; None if it is another type."""
    return next((part for part in (kind, *get_args(kind)) if hasattr(part, "__dataclass_fields__")), None)


def in_words(field) -> str:
    choices = field.metadata.get("choices")
    if choices:
        return " / ".join(as_typed(choice) for choice in choices)
    if field.metadata.get("auto"):
        number = "float" if field.metadata.get("real") else "int"
        return f"{number}, auto or null" if field.type is Any else f"{number} or auto"
    if field.type is Any:
        return "int or list"
    if dataclass_in(field.type):
        return "map or null"
    name = field.type.__name__ if type(field.type) is type else str(field.type)
    return re.sub(r"list\[(\w+)\]", r"list of \1", name).replace(" | None", " or null")
