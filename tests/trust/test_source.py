"""Nothing in the code reads what somebody else wrote in a way that could run it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    [
        *ROOT.glob("*.py"),
        *(path for folder in ("scripts", "src", "tools") for path in (ROOT / folder).rglob("*.py")),
    ]
)

FORBIDDEN = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "marshal.load",
    "marshal.loads",
    "shelve.open",
    "joblib.load",
    "dill.load",
    "cloudpickle.load",
    "pandas.read_pickle",
    "hydra.utils.instantiate",
    "hydra.utils.call",
    "instantiate",
    "dist.broadcast_object_list",
    "dist.scatter_object_list",
}
# Where one of these is what makes it safe, or reads nothing of others.
ALLOWED = {
    ("data/tokenizer.py", "__import__"),  # of two names in the code
}
# Configs of this repository, or of a folder that the user typed with -cd: read by Hydra in any case.
CONFIGS = {
    "config/meant.py",
    "measure/cluster.py",
    "predict/here.py",
    "predict/read.py",
    "commands/doctor.py",
    "configuration_page.py",
}


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def faults(path: Path, text: str) -> list[str]:
    short = "/".join(path.parts[-2:]) if "sidestream" in path.parts else path.name
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name, options = name_of(node.func), {word.arg: word.value for word in node.keywords}
        true = [
            key for key, value in options.items() if isinstance(value, ast.Constant) and value.value is True
        ]
        wrong = name in FORBIDDEN and (short, name) not in ALLOWED
        wrong |= name == "torch.load" and "weights_only" not in true
        wrong |= "allow_pickle" in true
        wrong |= name == "OmegaConf.load" and short not in CONFIGS
        wrong |= name.startswith("subprocess.") and "shell" in true
        wrong |= name in ("os.system", "os.popen")
        if wrong:
            found.append(f"{short}:{node.lineno}: {name}")
    return found


def test_nothing_is_loaded_that_could_run() -> None:
    assert len(FILES) > 300
    assert [fault for path in FILES for fault in faults(path, path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "line",
    [
        "pickle.load(f)",
        "eval(text)",
        "yaml.load(f, Loader=yaml.Loader)",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "np.load(p, allow_pickle=True)",
        "OmegaConf.load(folder / 'resolved.yaml')",
        "subprocess.run(text, shell=True)",
        "hydra.utils.instantiate(node)",
    ],
)
def test_the_search_finds_such_a_line(line: str) -> None:
    assert faults(ROOT / "eval.py", line)


def test_no_class_of_ours_unpickles_by_name_without_a_list() -> None:
    """The one unpickler decides by itself what a name becomes."""
    unpicklers = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any("Unpickler" in name_of(base) for base in node.bases):
                assert any(
                    isinstance(part, ast.FunctionDef) and part.name == "find_class" for part in node.body
                )
                unpicklers.append(path.name)
    assert len(unpicklers) <= 1
