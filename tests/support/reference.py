"""The embedded model, or another GGUF file, as `transformers` runs it: the reference of parity tests. Owns
its loading in bearable time; changes no number."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from penstock.models.embedded import embedded_file


@functools.cache
def reference_model(path: Path | None = None) -> Any:
    """SmolLM2, or another GGUF file, in float32; loaded once per process."""
    path = path or embedded_file()
    with _read_once():
        loader = _transformers().AutoModelForCausalLM
        return loader.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@functools.cache
def reference_tokenizer(path: Path | None = None) -> Any:
    path = path or embedded_file()
    with _read_once():
        return _transformers().AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def _transformers() -> Any:
    # read at its import; the file is here, and a test asks no server
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextmanager
def _read_once() -> Iterator[None]:
    """It parses the file's header for each of its parts and builds the same map of names per module: both
    once are enough. The header is cut into a million pieces, which takes a third of the time if the file is
    no mapping."""
    import gguf

    numpy = SimpleNamespace(**{**vars(np), "memmap": lambda path, mode: np.fromfile(path, np.uint8)})
    reader, names = functools.cache(gguf.GGUFReader), functools.cache(gguf.get_tensor_name_map)
    with (
        mock.patch.object(gguf, "GGUFReader", reader),
        mock.patch.object(gguf, "get_tensor_name_map", names),
        mock.patch.object(gguf.gguf_reader, "np", numpy),
    ):
        yield
