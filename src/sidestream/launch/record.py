"""What the starting process leaves for the ranks and for a later resume, in `<run>/.hydra/`."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from sidestream.config.compatibility import Layout
from sidestream.tracking.folder import write_json_atomic

RESOLVED = ".hydra/resolved.yaml"  # the config with every interpolation evaluated, once
LAUNCH = ".hydra/launch.json"


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
        """Raises FileNotFoundError if no run ever started in `folder`."""
        content = json.loads((folder / LAUNCH).read_text(encoding="utf-8"))
        return cls(**{**content, "layout": Layout(**content["layout"])})
