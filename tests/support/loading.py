"""Models for tests that run them without an engine: loaded on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.config import ModelSource
from penstock.models.layers import TorchLayerOps
from penstock.models.loader import LoadedModel, load_model
from penstock.models.progress import Progress, silent


def load_on_cpu(
    source: ModelSource | Path | str,
    dtype: torch.dtype = torch.float32,
    progress: Progress = silent,
    max_model_len: int | None = None,
) -> LoadedModel:
    chosen = source if isinstance(source, ModelSource) else ModelSource(str(source))
    return load_model(chosen, torch.device("cpu"), dtype, TorchLayerOps(), progress, max_model_len)
