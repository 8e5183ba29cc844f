"""Whether wandb runs are online, and whose settings count."""

from __future__ import annotations

import configparser
import os
from pathlib import Path
from typing import Any, Literal

from sidestream.config.errors import ConfigError
from sidestream.tracking.untrusted import Unreadable, read_text

_OF_A_FOLDER = {"entity", "project", "mode", "disabled", "silent", "quiet", "console"}
_SERVER = "https://api.wandb.ai"  # `wandb init` writes it


def user_settings() -> Any:
    """wandb's settings of this process, see `check_folder`."""
    check_folder()
    import wandb

    return wandb.setup().settings


def check_folder() -> None:
    """Looks at what the current folder says to wandb, which believes it more than the user's own settings.

    Raises:
        ConfigError: it says more than whom and what runs are for. Another server would be sent the user's key.
    """
    for path in (Path("wandb/settings"), Path(".wandb/settings")):
        if not os.path.lexists(path):
            continue
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read_string(read_text(path, limit=2**20))
            said = dict(parser["default"]) if "default" in parser else {}
        except (Unreadable, configparser.Error) as error:
            why = f"{path} of the current folder cannot be read ({error})"
            raise ConfigError("logger", "wandb", why, expected="settings", fix=f"remove {path}") from None
        # The variable counts more than any file.
        if said.get("base_url", _SERVER).rstrip("/") == _SERVER or os.environ.get("WANDB_BASE_URL"):
            said.pop("base_url", None)
        if more := sorted(said.keys() - _OF_A_FOLDER):
            why = f"{path} of the current folder sets {', '.join(more)}, and a folder may be anybody's"
            expected, fix = "this in ~/.config/wandb/settings or in variables", f"remove it from {path}"
            raise ConfigError("logger", "wandb", why, expected=expected, fix=fix)


def mode_of(offline: bool | str, settings: Any) -> Literal["online", "offline"] | None:
    """The `mode` of wandb.init; None leaves the decision to WANDB_MODE."""
    if offline != "auto":
        return "offline" if offline else "online"
    if os.environ.get("WANDB_MODE"):
        return None
    return "online" if _has_credentials(settings) else "offline"


def _has_credentials(settings: Any) -> bool:
    """Whether wandb would find a key without asking: environment and settings files, then netrc."""
    # Private, but `wandb.login(prompt=False)` asks the server; which hosts of netrc count changes with wandb.
    from wandb.sdk.lib.wbauth import read_netrc_auth

    return bool(settings.api_key or settings.identity_token_file or read_netrc_auth(host=settings.base_url))
