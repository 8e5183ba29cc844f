"""What the starting process leaves for the ranks and for a later resume, in `<run>/.hydra/`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from sidestream.config.layout import Layout
from sidestream.tracking.folder import write_json_atomic, write_text_atomic
from sidestream.tracking.untrusted import Unreadable, printable, read_json, read_yaml

RESOLVED = ".hydra/resolved.yaml"  # the config with every interpolation evaluated, once
LAUNCH = ".hydra/launch.json"
_LITERAL = "sidestream_text"  # a resolver: what is text in a file stays text


def save_resolved(folder: Path, plain: dict[str, Any]) -> None:
    """Writes the resolved config of a run."""
    text = yaml.safe_dump(plain, default_flow_style=False, allow_unicode=True, sort_keys=False)
    write_text_atomic(folder / RESOLVED, text)


def load_resolved(folder: Path) -> dict[str, Any]:
    """Returns the resolved config of a run. It is data: nothing in it is evaluated, and it trusts nobody.

    Raises:
        Unreadable: there is none, or it is none.
    """
    plain = read_yaml(folder / RESOLVED, inside=folder)
    return {**plain, "trusted_targets": []}


def as_config(plain: dict[str, Any]) -> DictConfig:
    """Returns a resolved config as the rest of the code takes it; text with `${` in it comes back as it is."""
    OmegaConf.register_new_resolver(
        _LITERAL, lambda text: bytes.fromhex(text[1:]).decode("utf-8", "surrogatepass"), replace=True
    )
    return OmegaConf.create(_literal(plain))


def _literal(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, str) and "${" in value:
        return f"${{{_LITERAL}:x{value.encode('utf-8', 'surrogatepass').hex()}}}"
    return value


@dataclass(frozen=True)
class Launch:
    """How a run was started.

    Attributes:
        command: What the user typed.
        overrides: The overrides that led to this config, all resumes included; without `hydra.` ones.
        flags: Flags that choose where configs are read from.
        choices: Group -> option.
    """

    command: str
    overrides: list[str]
    flags: list[str]
    choices: dict[str, str]
    layout: Layout

    def save(self, folder: Path) -> None:
        write_json_atomic(folder / LAUNCH, dataclasses.asdict(self))

    @classmethod
    def load(cls, folder: Path) -> "Launch":
        """Reads what `save` wrote.

        Raises:
            FileNotFoundError: no run ever started in `folder`.
            Unreadable: the file is not what `save` writes.
        """
        path = folder / LAUNCH
        if not path.exists():
            raise FileNotFoundError(path)
        content = read_json(path, inside=folder)
        try:
            launch = cls(**{**content, "layout": Layout(**content["layout"])})
        except (KeyError, TypeError):
            raise Unreadable(f"{printable(path)}: other keys than a run writes") from None
        for name, kind in (("command", str), ("overrides", list), ("flags", list), ("choices", dict)):
            found = getattr(launch, name)
            values = found.values() if isinstance(found, dict) else found
            if not isinstance(found, kind) or not all(isinstance(value, str) for value in values):
                raise Unreadable(f"{printable(path)}: {name} is not what a run writes")
        sizes = dataclasses.asdict(launch.layout)
        device = sizes.pop("device_type")
        if not isinstance(device, str) or not all(type(n) is int and 0 < n < 2**31 for n in sizes.values()):
            raise Unreadable(f"{printable(path)}: layout is not what a run writes")
        return launch
