"""Whether wandb runs are online."""

from __future__ import annotations

import os
from typing import Any, Literal


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
