"""Where the shipped configs are: `conf/` of the repository, or the copy of it in an installed package."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parents[1] / "conf"
