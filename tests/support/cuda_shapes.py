"""A pytest plugin: engines on the CPU capture the shapes that they have on a GPU, padding included. `make
test-padded` runs the engine's tests with it; those that say which shapes a CPU has are left out."""

from __future__ import annotations

import pytest

from penstock.config import Config
from penstock.engine import sizing
from penstock.engine.execution.batch import Shape
from penstock.engine.execution.passes import StepLimits
from penstock.engine.execution.replays import cuda_buckets


def _buckets(config: Config, limits: StepLimits, device: object) -> tuple[Shape, ...]:
    return cuda_buckets(limits.max_rows, limits.prefill_chunk) if config.engine.capture else ()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    sizing.buckets_for = _buckets
    left_out = [item for item in items if item.get_closest_marker("cpu_shapes")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
