"""A draft head runs as it was trained, and a file that does not fit its target is refused with the reason."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from penstock.errors import ModelError
from penstock.models.model import ModelConfig
from penstock.speculation.mtp import CONFIG_FILE, TENSORS_FILE, MtpHead, read_head, write_head
from penstock.speculation.vocab import DraftVocab
from penstock.testing.tiny_models import TINY_QWEN3
from tests.support.contiguous_kv import ContiguousKv
from tests.support.tiny_target import SMALL, tiny_target
from train_mtp.training import Trainable, hidden_states

DEPTH = 3
TOKENS = torch.tensor([[5, 9, 2, 40, 7, 7, 61, 13, 0, 90]])


def saved(folder: Path, dims: ModelConfig = SMALL) -> tuple[Trainable, MtpHead]:
    """A head that is unlike its target, as it was in training and as it is read back."""
    target = tiny_target(dims)
    vocab = DraftVocab(torch.tensor([3, 9, 7, 50, 13, 90, 2]), dims.vocab, "here")
    head = Trainable(target, vocab, 0)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for tensor in head.tensors.values():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05).copy_(tensor.bfloat16())
    write_head(folder, head.stored(), vocab, target, DEPTH, {})
    return head, read_head(folder, target)


def check_same(head: Trainable, read: MtpHead, entry: int) -> None:
    """Drafts after entry `entry`: its own step with the target's hidden state, then on what the head itself
    guessed."""
    hidden = hidden_states(head.target, TOKENS)
    with torch.no_grad():
        expected = head.unrolled(hidden, TOKENS, DEPTH)
        kv = ContiguousKv(read.dims, head.target.rope)
        kv.num_tokens = 1  # entries begin with token 1
        kv.begin(torch.arange(1, entry + 2, dtype=torch.int32))
        tokens = TOKENS[0].to(torch.int32)
        state = hidden[0, : entry + 1]
        fed = tokens[1 : entry + 2]
        for s in range(1, DEPTH + 1):
            if s > 1:
                kv.begin(torch.tensor([entry + s], dtype=torch.int32))
            # Keys begin at token 1, so the reference's mask is one to the left of its positions.
            kv._positions = kv._positions - 1
            rotated_kv = _Shifted(kv)
            guess = read.step(state, fed, rotated_kv)
            torch.testing.assert_close(guess.hidden[-1], expected[s - 1][0, entry], rtol=2e-4, atol=2e-4)
            torch.testing.assert_close(
                guess.logits[-1], head.logits(expected[s - 1])[0, entry], rtol=2e-4, atol=2e-4
            )
            state, fed = guess.hidden[-1:], tokens[entry + s + 1 : entry + s + 2]


class _Shifted:
    """A cache whose first key is that of token 1: positions of rotation are one more than places among its
    keys."""

    def __init__(self, kv: ContiguousKv) -> None:
        self._kv = kv

    def rotate_and_write(self, *given: Any) -> Any:
        self._kv._positions = self._kv._positions + 1
        try:
            return self._kv.rotate_and_write(*given)
        finally:
            self._kv._positions = self._kv._positions - 1

    def attend(self, *given: Any) -> Any:
        return self._kv.attend(*given)


FAMILIES = {
    "llama": SMALL,
    "llama with biases": dataclasses.replace(SMALL, qkv_bias=True, out_bias=True, mlp_bias=True),
    "qwen3": TINY_QWEN3,
    "mistral, a window of several tokens": dataclasses.replace(
        SMALL, architecture="mistral", windows=(4,) * SMALL.num_layers
    ),
    "mistral, a window of fewer tokens than are drafted": dataclasses.replace(
        SMALL, architecture="mistral", windows=(2,) * SMALL.num_layers
    ),
    "phi3, part of each head turned": dataclasses.replace(
        SMALL, architecture="phi3", rotary_dim=SMALL.head_dim // 2
    ),
}


@pytest.mark.parametrize("dims", FAMILIES.values(), ids=FAMILIES)
def test_a_head_drafts_as_it_was_trained(dims: ModelConfig, tmp_path: Path) -> None:
    for entry in (0, 4):
        check_same(*saved(tmp_path, dims), entry)


# ------------------------------------------------------------------------------------------------------ files


def rewritten(folder: Path, change: Any) -> None:
    file = folder / CONFIG_FILE
    stated = json.loads(file.read_text())
    change(stated)
    file.write_text(json.dumps(stated))


def restored(folder: Path, change: Any) -> None:
    file = folder / TENSORS_FILE
    tensors = safetensors.torch.load(file.read_bytes())
    change(tensors)
    file.write_bytes(safetensors.torch.save(tensors))


CONFIGS = {
    "another format": (lambda c: c.update(format="eagle"), "it is no penstock-mtp head"),
    "another shape": (lambda c: c["target"].update(hidden=48), "hidden is 48, not 32"),
    "other weights": (lambda c: c.update(target_fingerprint="00"), "trained for other weights"),
    "a map of another size": (lambda c: c.update(draft_vocab=8), "d2t has 7 entries, and draft_vocab is 8"),
    "an unknown form of map": (lambda c: c.update(d2t_form="delta"), "d2t_form is 'delta'"),
}
TENSORS = {
    "no map": (lambda t: t.pop("d2t"), "draft_vocab is 7, and there is no d2t"),
    "a token outside": (
        lambda t: t["d2t"].__setitem__(2, 96),
        "d2t names token 96; the target's go from 0 to 95",
    ),
    "a token twice": (lambda t: t["d2t"].__setitem__(2, 3), "d2t names token 3 more than once"),
    "a tensor less": (lambda t: t.pop("fc"), "missing tensors: fc"),
    "another shape": (lambda t: t.update(fc=torch.zeros(32, 32)), "fc is [32, 32], expected [32, 64]"),
    "no number": (lambda t: t["norm"].__setitem__(0, torch.nan), "not finite: norm"),
}


def test_a_config_or_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    config, tensors = ((tmp_path / name).read_bytes() for name in (CONFIG_FILE, TENSORS_FILE))
    for changed, cases in ((rewritten, CONFIGS), (restored, TENSORS)):
        for change, reason in cases.values():
            (tmp_path / CONFIG_FILE).write_bytes(config)
            (tmp_path / TENSORS_FILE).write_bytes(tensors)
            changed(tmp_path, change)
            with pytest.raises(ModelError) as refused:
                read_head(tmp_path, tiny_target())
            assert reason in str(refused.value)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / TENSORS_FILE).write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="damaged"):
        read_head(tmp_path, tiny_target())


def test_a_map_of_offsets_is_made_absolute(tmp_path: Path) -> None:
    """As EAGLE's checkpoints store it: what is added to each draft id."""
    saved(tmp_path)
    restored(tmp_path, lambda t: t.update(d2t=t["d2t"] - torch.arange(7, dtype=torch.int32)))
    rewritten(tmp_path, lambda c: c.update(d2t_form="offset"))
    read = read_head(tmp_path, tiny_target())
    assert read.vocab is not None and read.vocab.target_ids.tolist() == [3, 9, 7, 50, 13, 90, 2]
