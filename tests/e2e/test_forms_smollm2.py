"""What few bits and bfloat16 cost the embedded model, on real text against float32: bounds that fail the
build, and no copy on disk."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.commands import doctor
from penstock.config import Config, ModelSource, WeightsName
from penstock.models import form_choice
from penstock.models.form_choice import fastest_forms
from penstock.models.forms import Matrix
from penstock.models.loader import LoadedModel, inspect_model
from penstock.models.progress import silent
from tests.support.contiguous_kv import ContiguousKv, forward
from tests.support.loading import load_on_cpu

TEXT = (Path(__file__).parents[1] / "data" / "prose.txt").read_text()[:6000]
TOKENS = 384
# Largest mean error of a row of logits, relative to its norm; least share of equal greedy tokens; largest
# difference of perplexity. Seen on this text: see docs/models.md.
BOUNDS: dict[WeightsName, tuple[float, float, float]] = {
    "bfloat16": (0.012, 0.92, 0.01),
    "int8": (0.04, 0.88, 0.02),
    "int4": (0.02, 0.9, 0.015),
}


@functools.cache
def loaded(weights: WeightsName) -> LoadedModel:
    return load_on_cpu(ModelSource(weights=weights))


@functools.cache
def tokens() -> list[int]:
    return loaded("float32").tokenizer.encode(TEXT)[:TOKENS]


@functools.cache
def logits(weights: WeightsName, rows: int) -> Tensor:
    """Of every token of the text, so many rows at a time."""
    model = loaded(weights).model
    kv = ContiguousKv(model.config, model.rope)
    return torch.cat([forward(model, kv, tokens()[at : at + rows]) for at in range(0, TOKENS, rows)])


@pytest.fixture(autouse=True, scope="module")
def _forgotten() -> Iterator[None]:
    """Four models take gigabytes, and no other file wants them."""
    yield
    for cached in (loaded, tokens, logits):
        cached.cache_clear()


@pytest.mark.parametrize("rows", [8, 192])
@pytest.mark.parametrize("weights", list(BOUNDS))
def test_the_error_of_a_form_is_bounded(weights: WeightsName, rows: int) -> None:
    found, reference = logits(weights, rows), logits("float32", 192)
    error = ((found - reference).norm(dim=1) / reference.norm(dim=1)).mean().item()
    agreeing = (found.argmax(1) == reference.argmax(1)).float().mean().item()
    truth = torch.tensor(tokens()[1:])
    perplexity, expected = (F.cross_entropy(x[:-1], truth).exp().item() for x in (found, reference))
    difference = abs(perplexity / expected - 1)
    print(
        f"{weights}, {rows} rows: error {error:.4f}, greedy {agreeing:.3f}, perplexity {perplexity:.3f} for "
        f"{expected:.3f}"
    )
    most, least, most_difference = BOUNDS[weights]
    assert error < most and agreeing >= least and difference < most_difference, (error, agreeing, difference)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_few_and_many_rows_compute_the_same_function(weights: WeightsName) -> None:
    """No further from each other than bfloat16 alone is from float32: both read the values of few bits."""
    few, many = logits(weights, 8), logits(weights, 192)
    assert ((few - many).norm(dim=1) / many.norm(dim=1)).mean() < BOUNDS["bfloat16"][0]


def test_the_file_is_read_straight_into_its_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    model = load_on_cpu(ModelSource(weights="int8")).model
    assert list(tmp_path.iterdir()) == []
    held = [
        tensor
        for layer in model.layers
        for matrix in vars(layer).values()
        if isinstance(matrix, Matrix)
        for tensor in matrix.tensors
    ]  # type: ignore[attr-defined]
    assert {tensor.dtype for tensor in held} == {torch.int8, torch.bfloat16}
    assert model.digest == loaded("int8").model.digest != loaded("float32").model.digest


def test_the_first_start_measures_and_the_next_reads_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_WEIGHTS")
    # never free of others, so that it is measured once
    monkeypatch.setattr(form_choice, "used_by_others", lambda: 64.0)
    stages: list[str] = []

    def start() -> LoadedModel:
        stages.clear()
        return load_on_cpu(ModelSource(), progress=lambda stage, done, total: stages.append(stage))

    first = start()
    assert any("measuring" in stage for stage in stages)
    again = start()
    assert not any("measuring" in stage for stage in stages)
    assert first.model.digest == again.model.digest
    assert doctor._forms(Config(), inspect_model(ModelSource("smollm2-135m")), "float32", "cpu")[
        1
    ] == fastest_forms(first.model.config, silent)
