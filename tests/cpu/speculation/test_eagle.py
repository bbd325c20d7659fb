"""An EAGLE-3 head computes what its authors describe, from files in both public layouts. One that does not
fit its target is refused with the reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import ModelError
from penstock.speculation.eagle import EagleHead, read_eagle
from penstock.testing.tiny_models import TINY_LLAMA
from tests.support.contiguous_kv import ContiguousKv
from tests.support.eagle import (
    Reference,
    as_speculators,
    eagle_config,
    eagle_tensors,
    maps,
    renamed,
    tapped_states,
    write_eagle,
)
from tests.support.tiny_target import tiny_target

DIMS = dataclasses.replace(TINY_LLAMA, num_layers=7, hidden=48, vocab=96, head_dim=8, max_position=256)
USUAL = (2, 3, 4)  # of seven layers
DRAFT_IDS = torch.arange(3, 93, 2).flip(0)
TOKENS = [5, 9, 2, 40, 7, 7, 61, 13, 0, 90]
NUM_AHEAD = 3


def check_parity(head: EagleHead, reference: Reference, taps: tuple[int, ...] = USUAL) -> None:
    """Entries of a whole text, and then on what the head itself guessed, some places further."""
    model = tiny_target(DIMS)
    assert head.taps == taps and head.dims.max_position == DIMS.max_position
    tapped = tapped_states(model, TOKENS, taps)
    nexts = torch.tensor([*TOKENS[1:], 17])
    kv = ContiguousKv(head.dims, head.rope)
    with torch.inference_mode():
        ours = head.fused(tapped.chunk(len(taps), dim=-1))
        right = reference.fused(tapped)
        for place in range(NUM_AHEAD):
            kv.begin(torch.arange(kv.num_tokens, kv.num_tokens + len(ours), dtype=torch.int32))
            guess = head.step(ours, nexts.int(), kv)
            right, logits = reference.step(right, nexts)
            torch.testing.assert_close(guess.hidden, right, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(guess.logits, logits, rtol=1e-4, atol=1e-4)
            ours, right, nexts = guess.hidden[-1:], right[-1:], torch.tensor([11 + place])


VARIANTS: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "as EAGLE has it": (False, False, {}),
    "norm_before_residual": (True, False, {"norm_before_residual": True}),
    "norm_before_fc": (False, True, {"norm_before_fc": True}),
}


@pytest.mark.parametrize(("is_normed", "has_input_norm", "stated"), VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_a_head_computes_what_its_authors_describe(
    layout: str, is_normed: bool, has_input_norm: bool, stated: dict[str, Any], tmp_path: Path
) -> None:
    tensors, config = eagle_tensors(DIMS, DRAFT_IDS), eagle_config(DIMS, USUAL, len(DRAFT_IDS))
    if has_input_norm:
        tensors["input_norm.weight"] = torch.linspace(0.5, 1.5, 3 * DIMS.hidden)
    embedding = tiny_target(DIMS).embedding
    if layout == "eagle":
        write_eagle(tmp_path, tensors, {**config, **stated})
    else:
        embedding = torch.randn(DIMS.vocab, DIMS.hidden, generator=torch.Generator().manual_seed(5))
        own = {**renamed(tensors), "embed_tokens.weight": embedding}
        write_eagle(tmp_path, own, as_speculators(config, **stated))
    head = read_eagle(tmp_path, tiny_target(DIMS))
    assert head.vocab is not None and head.vocab.target_ids.tolist() == DRAFT_IDS.tolist()
    check_parity(head, Reference(tensors, embedding, is_normed))


def test_layers_that_no_config_names_are_the_usual_ones(tmp_path: Path) -> None:
    config = eagle_config(DIMS, USUAL)
    del config["eagle_config"], config["draft_vocab_size"]
    tensors = eagle_tensors(DIMS)
    head = read_eagle(write_eagle(tmp_path, tensors, config), tiny_target(DIMS))
    check_parity(head, Reference(tensors, tiny_target(DIMS).embedding))


@pytest.mark.parametrize(
    ("ids", "taps"),
    [([1, 2, 3], (2, 3, 4)), ([2, 3, 4], (2, 3, 4)), ([0, 3, 7], (0, 3, 7)), ([1, 3, 6], (2, 4, 7))],
)
def test_layers_are_named_by_their_output_if_the_first_is_1(
    ids: list[int], taps: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = eagle_tensors(DIMS)
    head = read_eagle(write_eagle(tmp_path, tensors, eagle_config(DIMS, ids)), tiny_target(DIMS))
    check_parity(head, Reference(tensors, tiny_target(DIMS).embedding), taps)


def test_the_targets_embedding_and_output_serve_where_the_file_has_none(tmp_path: Path) -> None:
    target, tensors = tiny_target(DIMS), eagle_tensors(DIMS)
    same = {**tensors, "embed_tokens.weight": target.embedding.clone()}
    head = read_eagle(write_eagle(tmp_path / "same", same, eagle_config(DIMS, USUAL)), target)
    assert head._block.embedding is target.embedding
    del tensors["lm_head.weight"]
    config = eagle_config(DIMS, USUAL)
    for is_tied, output in ((False, target.output), (True, target.embedding)):
        head = read_eagle(
            write_eagle(tmp_path / str(is_tied), tensors, {**config, "tie_word_embeddings": is_tied}), target
        )
        check_parity(head, Reference({**tensors, "lm_head.weight": output}, target.embedding))


def test_a_head_of_half_precision_in_several_files_is_read(tmp_path: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in eagle_tensors(DIMS).items()}
    write_eagle(tmp_path, tensors, eagle_config(DIMS, USUAL))
    (tmp_path / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + (name == 'lm_head.weight')}-of-00002.safetensors" for name in tensors}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    check_parity(read_eagle(tmp_path, tiny_target(DIMS)), Reference(wide, tiny_target(DIMS).embedding))


def test_the_identity_of_a_head_is_that_of_its_tensors_and_its_config(tmp_path: Path) -> None:
    target, config, tensors = tiny_target(DIMS), eagle_config(DIMS, USUAL), eagle_tensors(DIMS)

    def digest(name: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> bytes:
        return read_eagle(write_eagle(tmp_path / name, tensors, config), target).digest

    one = digest("one", tensors, config)
    assert one == digest("same", tensors, config)
    others = [
        digest("other", eagle_tensors(DIMS, seed=1), config),
        digest("normed", tensors, {**config, "norm_before_residual": True}),
        digest("turned", tensors, {**config, "rope_theta": 1e4}),
        digest("tapped", tensors, eagle_config(DIMS, (2, 3, 5))),
    ]
    assert len({one, *others}) == 5


# -------------------------------------------------------------------------------------------- what is refused

Change = Callable[[dict[str, Any]], Any]
CONFIGS: dict[str, tuple[Change, str]] = {
    "no head": (
        lambda c: c.update(architectures=["LlamaForCausalLM"]),
        "it is no EAGLE-3 head: architectures is",
    ),
    "EAGLE 1": (lambda c: c.update(architectures=["LlamaForCausalLMEagle"]), "it is no EAGLE-3 head"),
    "another hidden size": (lambda c: c.update(hidden_size=64, head_dim=8), "hidden_size is 64, not 48"),
    "another target's": (lambda c: c.update(target_hidden_size=64), "target_hidden_size is 64, not 48"),
    "another vocabulary": (
        lambda c: c.update(vocab_size=95, draft_vocab_size=45),
        "vocab_size is 95, not 96",
    ),
    "a larger draft vocabulary": (lambda c: c.update(draft_vocab_size=97), "draft_vocab_size is 97"),
    "two layers": (lambda c: c.update(num_hidden_layers=2), "num_hidden_layers is 2, not 1"),
    "another family": (lambda c: c.update(model_type="qwen3"), "model_type is 'qwen3', not 'llama'"),
    "a layer too many": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 3, 8]),
        "must be three ascending layers of the model, which has 7; got [2, 3, 8]",
    ),
    "an output too many": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 3, 7]),
        "got [1, 3, 7]",
    ),
    "two states": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 3]),
        "must be three ascending layers",
    ),
    "layers in another order": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[4, 3, 2]),
        "must be three ascending layers",
    ),
    "no numbers": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids="2,3,4"),
        "must be three ascending layers",
    ),
    "two opinions": (
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
        "eagle_config says something else about eagle_aux_hidden_state_layer_ids",
    ),
    "one state": (
        lambda c: c["eagle_config"].update(use_aux_hidden_state=False),
        "no hidden states of inner",
    ),
    "a norm for each": (lambda c: c.update(fc_norm=True), "fc_norm is True, which is not supported"),
    "a norm behind": (lambda c: c["eagle_config"].update(norm_output=True), "norm_output is True"),
    "quantized": (lambda c: c.update(quantization_config={"bits": 4}), "quantized weights"),
}
TENSORS: dict[str, tuple[Change, str]] = {
    "no map": (lambda t: t.pop("d2t"), "draft_vocab is 45, and there is no d2t"),
    "another map": (
        lambda t: t.update(d2t=t["d2t"][:40].clone()),
        "d2t has 40 entries, and draft_vocab is 45",
    ),
    "a token outside": (
        lambda t: t["d2t"].__setitem__(44, 60),
        "d2t names token 104; the target's go from 0 to 95",
    ),
    "a token twice": (lambda t: t["d2t"].__setitem__(1, 90), "d2t names token 91 more than once"),
    "maps that do not agree": (lambda t: t["t2d"].__setitem__(0, True), "t2d does not name the tokens"),
    "a tensor less": (lambda t: t.pop("fc.weight"), "missing tensors: fc.weight"),
    "a layer's tensor less": (
        lambda t: t.pop("midlayer.hidden_norm.weight"),
        "missing tensors: layers.0.hidden_norm.weight",
    ),
    "no output": (lambda t: t.pop("lm_head.weight"), "missing tensors: lm_head.weight"),
    "a tensor twice": (
        lambda t: t.update({"layers.0.hidden_norm.weight": torch.zeros(48)}),
        "model.safetensors repeats ",
    ),
    "a tensor more": (lambda t: t.update(mask_hidden=torch.zeros(3)), "unexpected tensors: mask_hidden"),
    "one state": (
        lambda t: t.update({"fc.weight": torch.zeros(48, 96)}),
        "fc.weight is [48, 96], expected [48, 144]",
    ),
    "no number": (lambda t: t["norm.weight"].__setitem__(0, torch.nan), "not finite: norm.weight"),
}


@pytest.mark.parametrize(
    ("changed", "cases"), [("config", CONFIGS), ("tensors", TENSORS)], ids=["configs", "tensors"]
)
def test_what_does_not_fit_is_refused_by_name(
    changed: str, cases: dict[str, tuple[Change, str]], tmp_path: Path
) -> None:
    target = tiny_target(DIMS)
    for name, (change, reason) in cases.items():
        tensors, config = eagle_tensors(DIMS, DRAFT_IDS), eagle_config(DIMS, USUAL, len(DRAFT_IDS))
        change(config if changed == "config" else tensors)
        write_eagle(tmp_path, tensors, config)
        with pytest.raises(ModelError) as refused:
            read_eagle(tmp_path, target)
        assert reason in str(refused.value), name
        assert "\n" not in str(refused.value)


def test_a_head_of_speculators_says_where_its_residual_starts(tmp_path: Path) -> None:
    config = as_speculators(eagle_config(DIMS, USUAL))
    del config["norm_before_residual"]
    write_eagle(tmp_path, renamed(eagle_tensors(DIMS)), config)
    with pytest.raises(ModelError, match="it has no norm_before_residual"):
        read_eagle(tmp_path, tiny_target(DIMS))


def test_a_target_with_too_few_layers_is_named(tmp_path: Path) -> None:
    config = eagle_config(DIMS, USUAL)
    del config["eagle_config"]
    few = dataclasses.replace(DIMS, num_layers=5)
    with pytest.raises(
        ModelError, match=r"three ascending layers of the model, which has 5; got \[2, 2, 2\]"
    ):
        read_eagle(write_eagle(tmp_path, eagle_tensors(DIMS), config), tiny_target(few))


def test_a_checkpoint_that_could_run_code_is_not_read(tmp_path: Path) -> None:
    write_eagle(tmp_path, eagle_tensors(DIMS), eagle_config(DIMS, USUAL))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=r"pytorch_model.bin: such files can run code.*convert it to safetensors"
    ):
        read_eagle(tmp_path, tiny_target(DIMS))
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"must hold model.safetensors"):
        read_eagle(tmp_path, tiny_target(DIMS))


def test_a_full_vocabulary_may_have_a_map_too(tmp_path: Path) -> None:
    ids = torch.arange(DIMS.vocab).flip(0)
    tensors = eagle_tensors(DIMS) | maps(DIMS, ids)
    head = read_eagle(write_eagle(tmp_path, tensors, eagle_config(DIMS, USUAL)), tiny_target(DIMS))
    assert head.vocab is not None and head.vocab.target_ids.tolist() == ids.tolist()
