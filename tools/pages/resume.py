"""The tables of docs/resume.md, from the contract."""

from sidestream.config.resume_contract import CASES, KINDS, OWN_KEYS, RULES, Rule
from sidestream.report.table import Markdown, Table

_COLUMNS = ("key", "on resume", "")


def markdown() -> str:
    """Returns what the kinds mean, and a table with a row for all keys of a group that have one rule."""
    groups = dict.fromkeys([*(key.partition(".")[0] for key in RULES if "." in key), *OWN_KEYS])
    lines = [f"* **{kind}**: {meaning}" for kind, meaning in KINDS.items()]
    alone = {key: rule for key, rule in RULES.items() if "." not in key}
    lines += ["", "### without a group", "", Table(_COLUMNS, _rows(alone)).markdown()]
    for group in groups:
        keys = {key: rule for key, rule in RULES.items() if key.startswith(f"{group}.")}
        own = OWN_KEYS.get(group)
        rows = _rows(keys)
        if own is not None:
            rows.append(("any key of an option of your own", own.kind, Markdown(own.why)))
        lines += ["", f"### {group}", "", Table(_COLUMNS, rows).markdown()]
    return "\n".join(lines)


def _rows(rules: dict[str, Rule]) -> list[tuple[str, ...]]:
    together: dict[tuple[Rule, tuple[str, ...]], list[str]] = {}
    for key, rule in rules.items():
        cases = tuple(f"{case.rule.kind} {case.when}: {case.rule.why}" for case in CASES.get(key, ()))
        together.setdefault((rule, cases), []).append(key)
    rows: list[tuple[str, ...]] = []
    for (rule, cases), keys in together.items():
        names = ", ".join(f"`{_shown(key)}`" for key in keys)
        why = "; ".join([rule.why, *([rule.said] if rule.said else []), *cases])
        rows.append((Markdown(names), rule.kind, Markdown(why)))
    return rows


def _shown(key: str) -> str:
    """`optimizer._target_` is what `optimizer=` chooses."""
    return key.replace("._target_", "=")
