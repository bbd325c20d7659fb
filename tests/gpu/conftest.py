"""Everything in this folder needs an NVIDIA GPU. Without one it is skipped, and the summary says so. With
TRITON_INTERPRET=1 files whose kernels run on a CPU do so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU on this machine: nothing in tests/gpu was run")
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(skip)
