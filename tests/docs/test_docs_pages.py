"""What README and docs say is there: files, names, options, keys, types, defaults, the code they quote."""

import ast
import importlib
import inspect
import re
import textwrap
import tomllib
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import sidestream
from sidestream.config.help import GROUPS
from sidestream.overlap.none import NoOverlap
from tests.docs.pages import PAGES, README, REPOSITORY, blocks, prose, rows, script, text

CONF = REPOSITORY / "conf"
SOURCE = REPOSITORY / "src" / "sidestream"
CONFIGURATION = REPOSITORY / "docs" / "configuration.md"
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
MOE_BLOCK = REPOSITORY / "docs" / "moe_block.md"
# Files of a run or of the README's example, not of the repository.
ELSEWHERE = re.compile(
    r"logs/.*|(result|env|launch|tokenizer|manifest|model)\.json|sweep\.csv|stdout\.log|multirun\.yaml|(metrics|expert_load)\.jsonl|expert_load\.png|overlap\.(json|png|svg)|prediction\.(json|png)|compare\.(md|csv|png|html)|trace_rank\d\.json|<train_file>\.json|metrics\.csv|rank\d\.log|checkpoints|(<run>/)?\.hydra/.*|.*version_N.*"
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
    quoted = blocks(MOE_BLOCK, "python")
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


def test_the_configuration_page_is_what_the_schemas_and_conf_say():
    made = script("tools/configuration_page.py").page()
    assert text(CONFIGURATION) == made, "run `make readme`"


@pytest.mark.parametrize(("group", "option"), OPTIONS)
@pytest.mark.sample(10)
def test_the_page_reads_the_values_that_hydra_composes(compose, group: str, option: str):
    page = script("tools/configuration_page.py")
    read = page._read(group, CONF / group / f"{option}.yaml")
    node = compose(f"{group}={option}")[group]
    composed = dict(page._flat(f"{group}.", OmegaConf.to_container(node, resolve=False)))
    assert read.values == composed
    maps = {key.rpartition(".")[0] for key in composed}
    unset = {
        key for key in read.keys if composed.get(key.rpartition(".")[0], "") is None
    }  # of a map that is null
    assert set(composed) == set(read.keys) - maps - unset
