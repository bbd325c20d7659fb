"""Models by their name on the Hugging Face hub. Owns fetching; what is fetched is a directory like any other."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

from penstock.config import Config
from penstock.errors import ModelError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")  # not the same weights again in other formats


def hub_name(model: str) -> str | None:
    """ORG/NAME, where `model` is that and no path that is here."""
    return model if _NAME.fullmatch(model) and not Path(model).expanduser().exists() else None


def fetched(config: Config) -> Config:
    """`config` with a model on the hub replaced by the directory that its files are in."""
    name = hub_name(config.source.model)
    return config if name is None else replace(config, source=replace(config.source, model=str(_fetch(name))))


def _fetch(name: str) -> Path:
    by_hand = f"on a machine with a network run: hf download {name} --local-dir DIR, copy DIR here, and give --model DIR"
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        message = (
            f"no path {name!r} is here, and to fetch it from the hub the package huggingface_hub is missing: pip install huggingface_hub"
        )
        raise ModelError(f"{message}; or {by_hand}") from None
    logger.info("fetching %s from the hub, unless its files are here", name)
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # its own errors, those of three HTTP libraries, and of the disk
        said = " ".join(str(error).split())[:300]
        raise ModelError(f"no path {name!r} is here, and the hub did not give it ({type(error).__name__}: {said}); {by_hand}") from error
