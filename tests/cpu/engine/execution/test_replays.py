"""Replays on the CPU: what they keep between steps."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from penstock.engine.build import build
from penstock.models.registry import BUILT_IN
from tests.support.driving import run_all, submit, tiny_config


def activations(width: int, known: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """Living tensors with rows of this width, besides known ones."""
    gc.collect()
    found = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.dim() == 2]
    return [one for one in found if one.shape[1] == width and not any(one is old for old in known)]


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.7, "seed": 1}, {"logprobs": 2}])
def test_no_activations_stay_when_requests_of_every_batch_size_have_ended(asked: dict[str, Any]) -> None:
    """With a vocabulary of 150,000 the logits of all sizes up to 256 would be 20 GB."""
    dims = BUILT_IN["tiny-qwen3"]
    engine = build(tiny_config())
    known = [*activations(dims.vocab), *activations(dims.hidden)]
    found = [submit(engine, [3 + n], max_tokens=4 * n, **asked) for n in range(1, 9)]
    run_all(engine)
    assert [len(one.tokens) for one in found] == [4 * n for n in range(1, 9)]
    assert [one.shape for one in activations(dims.vocab, known)] == []
    assert [one.shape for one in activations(dims.hidden, known)] == []
    engine.close(timeout_s=20.0)


def test_none_stay_after_a_step_that_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dims = BUILT_IN["tiny-qwen3"]
    engine = build(tiny_config())
    known = activations(dims.vocab)

    def fail(*_: object) -> None:
        raise RuntimeError("no tokens")

    monkeypatch.setattr("penstock.engine.execution.sampling.SamplePass.hand_on", fail)
    failed = submit(engine, [6], max_tokens=4)
    run_all(engine)
    assert failed.error is not None
    caplog.clear()  # it has the frames of what failed
    assert [one.shape for one in activations(dims.vocab, known)] == []
    engine.close(timeout_s=20.0)
