"""A draft head in parts computes what the whole one does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.config import ModelSource
from penstock.errors import ModelError
from penstock.models.model import Split
from penstock.speculation.eagle import read_eagle
from penstock.speculation.head import DraftHead
from penstock.speculation.mtp import head_layout, read_head, write_head
from penstock.speculation.shipped import shipped_head
from penstock.speculation.vocab import DraftVocab
from penstock.testing.tiny_models import TINY_QWEN3, TINY_QWEN3_5, tiny_tensors, write_tiny_model
from tests.cpu.models.test_split import WHOLE, Attends, Ranks, loaded
from tests.support.eagle import eagle_config, eagle_tensors, write_eagle
from tests.support.shipped import shipped_tensors

IDS = torch.arange(3, 500, 3)  # not a multiple of the ranks
NUM = 7


def write(kind: str, directory: Path) -> ModelSource:
    """A model in `directory`/model, and its head beside it."""
    generator = torch.Generator().manual_seed(4)
    dims = replace(TINY_QWEN3_5 if kind == "shipped" else TINY_QWEN3, num_layers=4)
    tensors = tiny_tensors(dims)
    if kind == "shipped":
        tensors |= shipped_tensors(dims)
    write_tiny_model(directory / "model", dims, tensors=tensors)
    source = ModelSource(model=str(directory / "model"), weights="float32")
    if kind == "eagle":
        write_eagle(directory / "head", eagle_tensors(dims, IDS), eagle_config(dims, (1, 2, 3), len(IDS)))
    if kind == "mtp":
        made = {
            weight.name: torch.randn(weight.shape, generator=generator) * 0.1 for weight in head_layout(dims)
        }
        vocab, target = DraftVocab(IDS, dims.vocab, "ids"), loaded(source, None, WHOLE).model
        write_head(directory / "head", made, vocab, target, 3, {})
    return source


def logits(kind: str, source: ModelSource, ranks: Ranks | None = None, split: Split = WHOLE) -> Tensor:
    found, beside = loaded(source, ranks, split), Path(source.model).parent / "head"
    head: DraftHead
    if kind == "shipped":
        head = shipped_head(found, None)
    else:
        read = read_head if kind == "mtp" else read_eagle
        head = read(beside, found.model, found.dims)
    generator = torch.Generator().manual_seed(5)
    states = [torch.randn(NUM, head.dims.hidden, generator=generator) for _ in head.taps]
    with torch.inference_mode():
        tokens = torch.arange(NUM, dtype=torch.int32) * 9
        guess = head.step(head.fused(states), tokens, Attends(head.dims))
        further = head.step(guess.hidden, tokens + 1, Attends(head.dims))
    return torch.cat((guess.logits, further.logits))


@pytest.mark.parametrize(
    ("kind", "size"), [("mtp", 2), ("mtp", 4), ("eagle", 3), ("shipped", 2), ("shipped", 4)]
)
def test_parts_of_a_head_together_guess_as_the_whole(kind: str, size: int, tmp_path: Path) -> None:
    source, ranks = write(kind, tmp_path), Ranks(size)
    whole = logits(kind, source)
    with ThreadPoolExecutor(size) as pool:
        parts = [pool.submit(logits, kind, source, ranks, Split(rank, size)) for rank in range(size)]
        for part in parts:
            torch.testing.assert_close(part.result(), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "size"), [("mtp", 3), ("eagle", 2)])
def test_a_rank_without_heads_of_its_own_is_refused(kind: str, size: int, tmp_path: Path) -> None:
    """Its keys would be zeros, which are masked: nothing would be left to attend to."""
    source = write(kind, tmp_path)
    with pytest.raises(ModelError, match=f"--tensor-parallel {size} must divide the heads"):
        logits(kind, source, Ranks(size), Split(0, size))
