"""What is installed: the version of Penstock, what it runs on, and whether it is a wheel or a checkout. Read
from files, so that nothing large is imported."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

from penstock import __version__


def source() -> str:
    """A wheel has no project file beside it."""
    checkout = Path(__file__).resolve().parents[2]
    return f"checkout in {checkout}" if (checkout / "pyproject.toml").exists() else "wheel"


def version_of(package: str) -> str | None:
    """Of an installed package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def described() -> str:
    torch = version_of("torch") or "missing"
    return f"penstock {__version__} ({source()}), Python {platform.python_version()}, torch {torch}"
