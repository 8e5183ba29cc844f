"""Writes docs/configuration.md from the schemas and from conf/: the same as `make readme`.

What a key means, its type and its limits are in src/sidestream/config/schema*.py. What an option means is the first
line of its YAML file behind the command. A test compares the page with what this file makes.
"""

if __name__ == "__main__":
    from sidestream import interrupt

    interrupt.leave_at_once()

import re
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

from omegaconf import OmegaConf

from sidestream.commands import shared
from sidestream.config.errors import as_typed
from sidestream.config.help import GROUPS
from sidestream.config.schema import SCHEMAS, Root
from sidestream.report.table import Markdown, Table

REPOSITORY = Path(__file__).parents[1]
CONF = REPOSITORY / "conf"
PAGE = REPOSITORY / "docs" / "configuration.md"

TOP = """# Configuration

<!-- Written from the schemas and conf/ by `python tools/configuration_page.py` (`make readme`). -->

Every key has one place in `conf/`, one folder per group. `group=option` chooses a file, `group.key=value` changes a key:

```bash
python train.py --help                        # groups and options, your own included
python train.py --cfg job --resolve           # every key with its value, nothing is run
python train.py fusion=loop optimizer.lr=1e-3 --cfg job --resolve
```

* A wrong key, type or range, and a combination that cannot work, ends with exit code 2 and one line
  `error: key=value: why; expected ...; set X=Y` before any rank starts. A run that cannot fit into this machine's
  memory is refused in the same way, with a cut-down of it that fits. What runs but may not be meant (expert parallelism
  that is off, a warm-up that never ends) is one line `warning: ...`.
* `auto` is decided from the machine and the number of ranks; `result.json` or `.hydra/launch.json` has what it became.
* Each option that is a class also has `_target_`, the class. A class outside `sidestream` and
  `torch.optim` must be allowed with `trusted_targets`, typed ([what is trusted](../SECURITY.md)).
  Your own options may have any keys: they are the arguments of your class.
* The first option of a group is the default. "Sets" is what an option has different from another one, named in front,
  or else from the table of keys. "Only in" names the options that have a key, where others have not.

## Top level

"""  # noqa: E501 - lines of a page

SWEEP = """A run goes to `<paths.log_dir>/<name>/runs/<date>/<time>`, a sweep to `.../multiruns/...`.
`hydra.run.dir=<folder>` chooses another folder.

## Sweep

For `python train.py -m ...`, see [sweeps](sweeps.md).

| key | type | default | meaning |
|---|---|---|---|
| `resume_sweep` | str or null | null | folder of a sweep to run again without the jobs that have finished; command line only |
| `hydra.launcher.max_concurrent` | int | 1 | jobs at once, each on its own share of the cores; at most as many as cores |
"""  # noqa: E501


@dataclass
class Option:
    """A YAML file of a group.

    Attributes:
        base: The option of the same group that it starts from.
        own: Dotted key -> value that the file itself sets; `values` has those of its base too.
        keys: Dotted key -> type and meaning, of the keys that the schema has.
    """

    name: str
    meaning: str
    base: "Option | None"
    own: dict[str, Any]
    values: dict[str, Any]
    keys: dict[str, tuple[str, str]]


def page() -> str:
    """Returns docs/configuration.md."""
    own = {key: item for key, item in _keys("", Root) if key.partition(".")[0] not in SCHEMAS}
    root = Option("train", "", None, {}, dict(_flat("", _yaml(CONF / "train.yaml"))), own)
    groups = [
        _group(item.name, item.metadata.get("note", "")) for item in fields(Root) if item.name in SCHEMAS
    ]
    lines = [*_key_table([root]), SWEEP, *groups, _recipes("experiment"), _recipes("arm")]
    written = TOP + "\n".join(lines).rstrip() + "\n"
    return re.sub(r"\bdocs/((?:results/)?\w+\.md)", r"[\1](\1)", written)


def _group(group: str, note: str) -> str:
    options = {path.stem: _read(group, path) for path in sorted((CONF / group).glob("*.yaml"))}
    default, predicted = (_choices(command)[group] for command in ("train", "predict"))
    listed = sorted(options.values(), key=lambda option: option.name != default)
    # The table of keys has the values of the default; where it has none, of what predict.py starts with.
    shown = options[default if options[default].keys else predicted]
    rows = []
    for option in listed:
        name = f"`{option.name}`" + (" (default)" if option.name == default else "")
        rows.append((name, option.meaning, _sets(option, listed, shown)))
    heading = [f"## {group}", "", GROUPS[group][0].upper() + GROUPS[group][1:] + ".", ""]
    keys = _key_table(sorted(listed, key=lambda option: option is not shown))
    return "\n".join(
        [*heading, *_without_empty(("option", "meaning", "sets"), rows), *([note, ""] if note else []), *keys]
    )


def _sets(option: Option, listed: Sequence[Option], shown: Option) -> str:
    """What an option has different from its base, or from the table of keys."""
    if option.base:
        changed = {key: value for key, value in option.own.items() if option.base.values.get(key) != value}
        start = [f"`{option.base.name}` with"]
    else:
        first = {
            key: next(o for o in (shown, *listed) if o.keys.get(key) == said)
            for key, said in option.keys.items()
        }
        changed = {
            key: v for key, v in option.values.items() if key in first and first[key].values.get(key) != v
        }
        start = []
    return " ".join(
        [
            *(start if changed else []),
            *(f"`{key.partition('.')[2]}={as_typed(v)}`" for key, v in changed.items()),
        ]
    )


def _key_table(options: Sequence[Option]) -> list[str]:
    """A row for each key; where options differ in its type or meaning, a row for each of these."""
    with_keys = [option for option in options if option.keys]
    having: dict[tuple[str, tuple[str, str]], list[Option]] = {}
    for option in with_keys:
        for key, said in option.keys.items():
            having.setdefault((key, said), []).append(option)
    rows = []
    for (key, (kind, meaning)), those in having.items():
        value = those[0].values.get(key, "")
        default = "required" if value == "???" else as_typed(value)
        only = "" if len(those) == len(with_keys) else ", ".join(f"`{option.name}`" for option in those)
        rows.append((f"`{key}`", kind, default, only, meaning))
    return _without_empty(("key", "type", "default", "only in", "meaning"), rows) if rows else []


def _recipes(group: str) -> str:
    """Options that choose in other groups."""
    rows = []
    for path in sorted((CONF / group).rglob("*.yaml")):
        option = _read(group, path)
        sets = " ".join(f"`{key}={as_typed(value)}`" for key, value in option.own.items())
        rows.append((f"`{option.name}`", option.meaning, sets))
    sentence = GROUPS[group][0].upper() + GROUPS[group][1:] + "."
    return "\n".join([f"## {group}", "", sentence, "", *_without_empty(("option", "meaning", "sets"), rows)])


def _read(group: str, path: Path) -> Option:
    text = path.read_text(encoding="utf-8")
    meaning = re.search(r"^# python .*\n# (.+)", text, re.MULTILINE)
    assert meaning, f"{path}: no line behind the command says what this option is"
    plain = _yaml(path)
    base, keys, chosen = None, {}, {}
    for entry in plain.pop("defaults", []):
        if isinstance(entry, dict):
            ((name, option),) = entry.items()
            chosen |= {name.removeprefix("override /"): option}
        elif found := re.match(r"/schema/(\w+)/(\w+)@", entry):
            keys = dict(_keys(f"{group}.", SCHEMAS[found[1]][found[2]]))
        elif entry != "_self_" and not entry.startswith("/"):
            base = _read(group, path.parent / f"{entry}.yaml")
    whole = "@package _global_" in text
    own = dict(_flat("" if whole else f"{group}.", plain))
    name = path.relative_to(CONF / group).with_suffix("").as_posix()
    if group in ("experiment", "arm"):
        own = chosen | {
            key: v for key, v in own.items() if not key.startswith(("hydra.", "predict.published.", "name"))
        }
    replaced = {key.rpartition(".")[0] for key in own}  # a map that was null in the base
    values = {key: value for key, value in (base.values if base else {}).items() if key not in replaced} | own
    return Option(name, meaning[1].rstrip("."), base, own, values, keys or (base.keys if base else {}))


def _choices(command: str) -> dict[str, str]:
    """Returns group -> the option that a command starts with."""
    entries = _yaml(CONF / f"{command}.yaml")["defaults"]
    return {group: option for entry in entries if isinstance(entry, dict) for group, option in entry.items()}


def _yaml(path: Path) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(path), resolve=False) or {}  # type: ignore[return-value]


def _flat(prefix: str, values: Any) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        elif name not in ("_target_", "defaults"):
            yield f"{prefix}{name}", value


def _keys(prefix: str, schema: type) -> Iterator[tuple[str, tuple[str, str]]]:
    for item in fields(schema):
        inner = next((kind for kind in (item.type, *get_args(item.type)) if is_dataclass(kind)), None)
        if "meaning" in item.metadata and "group" not in item.metadata:
            yield f"{prefix}{item.name}", (_type(item, optional=inner is not None), item.metadata["meaning"])
        if inner:
            yield from _keys(f"{prefix}{item.name}.", inner)


def _type(item: Field, *, optional: bool) -> str:
    """The type in words, with the limits of numbers."""
    said = item.metadata
    if "choices" in said:
        return " / ".join(map(as_typed, said["choices"]))
    if optional:
        return "map or null"
    low, above, high, below = (said.get(name) for name in ("low", "above", "high", "below"))
    limits = [f"≥ {low:g}"] if low is not None else [f"> {above:g}"] if above is not None else []
    limits += [f"< {below:g}"] if below is not None else []
    limits += [f"≤ {high:g}"] if high is not None and high < 1e5 else []  # beyond, nobody gets near it
    if said.get("auto"):
        kind = "float" if said.get("real") else "int"
        alternatives = ["auto", "null"] if item.type is Any else ["auto"]
    elif item.type is Any:
        kind, alternatives = "int", ["list of int"]
    else:
        name = item.type.__name__ if type(item.type) is type else str(item.type)
        kind, *alternatives = (
            re.sub(r"list\[(\w+)\]", r"list of \1", name).replace("None", "null").split(" | ")
        )
    return " or ".join([" ".join([kind, ", ".join(limits)]).rstrip(), *alternatives])


def _without_empty(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table without the columns in which no row has anything, and an empty line."""
    kept = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    shown = Table([columns[i] for i in kept], [[Markdown(row[i]) for i in kept] for row in rows])
    return [shown.markdown(), ""]


def main(argv: list[str] | None = None) -> int:
    shared.parser(__doc__).parse_args(argv)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    shared.run(main)
