"""Where a measurement ran, for its JSON. No torch here."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sidestream.tracking.folder import code_state, cpu_model, package_versions


def machine() -> dict[str, Any]:
    """CPU, Python, platform."""
    return {
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def code() -> dict[str, Any]:
    """Commit of the source, and whether it was changed since."""
    commit, dirty = code_state()
    return {"commit": commit, "dirty": dirty}


def versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    """Versions of the packages every run records, and of these; None: not installed."""
    found: dict[str, str | None] = dict(package_versions())
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
