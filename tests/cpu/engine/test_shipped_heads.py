"""The draft head of a checkpoint, `mtp.*`: it drafts what a plain reference drafts, it changes no answer, and
all is kept of a head that computes what its target computes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config import Config, ModelSource, SpeculationConfig
from penstock.engine.build import build, check_ahead
from penstock.engine.engine import Engine
from penstock.errors import ModelError
from penstock.models.delta_net import GatedLayer
from penstock.models.model import ModelConfig, Routing
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.speculation.shipped import ShippedHead
from penstock.testing.sanitized import check_silent
from penstock.testing.tiny_models import TINY_QWEN3_5, tiny_tensors, write_tiny_model
from tests.cpu.engine.test_draft_engine import DRAWN, assert_all_kept, drafted
from tests.cpu.engine.test_mtp_engine import Prompts, model_of, recorded_drafts
from tests.support.driving import assert_same, generate, run_all, settle_all, tiny_config
from tests.support.forced import forced
from tests.support.shipped import Reference, normed_states, shipped_tensors

DENSE = dataclasses.replace(TINY_QWEN3_5, tied_embeddings=False)
ROUTED = dataclasses.replace(
    DENSE,
    architecture="qwen3_5_moe",
    ffn=32,
    routing=Routing(num_experts=6, top_k=2, ffn=32, normalised=True, shared_ffn=40),
)
assert DENSE.recurrence is not None
NEXT = dataclasses.replace(
    ROUTED,
    architecture="qwen3_next",
    recurrence=dataclasses.replace(DENSE.recurrence, interleaved=True),
)
FAMILIES = {"qwen3.5": DENSE, "qwen3.5-moe": ROUTED, "qwen3-next": NEXT}


@pytest.fixture
def device() -> str:
    return "cpu"


def with_model(directory: Path, drafts: int, device: str = "cpu", **settings: Any) -> Config:
    config = tiny_config("tiny-qwen3.5", device=device, **settings)
    source = ModelSource(
        str(directory),
        device=config.source.device,
        dtype="float32",
        weights="float32" if device == "cpu" else "auto",
    )
    speculation = SpeculationConfig("mtp" if drafts else None, drafts or None)
    return dataclasses.replace(config, source=source, speculation=speculation)


Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path, device: str) -> Iterator[Make]:
    """Engines over such tensors; `drafts` 0: without speculation."""
    made: list[tuple[Engine, Sanitizer]] = []

    def make(dims: ModelConfig, tensors: dict[str, Tensor], drafts: int = 4, **settings: Any) -> Engine:
        directory = write_tiny_model(tmp_path / "model", dims, tensors=tensors)
        sanitizer = Sanitizer()
        made.append(
            (build(with_model(directory, drafts, device, **settings), sanitizer=sanitizer), sanitizer)
        )
        if drafts:
            forced(made[-1][0])
        return made[-1][0]

    yield make
    for engine, sanitizer in made:
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_drafts_what_a_plain_reference_drafts(family: str, make: Make, prompts: Prompts) -> None:
    """Each entry takes the target's state of one token behind the last norm and the embedding of the next, at
    the place of the first; drafts are chained from there."""
    dims = FAMILIES[family]
    head = shipped_tensors(dims)
    engine = make(dims, tiny_tensors(dims) | head, prefill_chunk=16)
    forced(engine, lambda most: 0)
    prompt = prompts(40)
    found = recorded_drafts(engine, prompt)
    model, text = model_of(engine), [*prompt, *(found[at][0] for at in sorted(found))]
    reference = Reference(dims, head, model.embedding, model.output)
    states = normed_states(model, text)
    assert len(found) == 24
    for at, (token, *drafts) in found.items():
        nexts = torch.tensor([*text[1 : at + 1], token])
        assert reference.drafts(states[: at + 1], nexts, len(drafts)) == drafts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_head_changes_no_answer(family: str, make: Make, prompts: Prompts) -> None:
    """Greedy and sampled, over kept states and what comes back from host memory."""
    dims = FAMILIES[family]
    tensors = tiny_tensors(dims) | shipped_tensors(dims)
    sizes = {"host_blocks": 100, "state_every": 32, "prefill_chunk": 40}
    plain, engine = make(dims, tensors, 0, **sizes), make(dims, tensors, 3, **sizes)
    num = 0
    for options in ({}, {"temperature": 0.8, "seed": 3, "top_p": 0.9, "frequency_penalty": 0.4}):
        for length in (70,):
            right = generate(plain, prompts(length, seed=length), max_tokens=40, **options)
            found = generate(engine, prompts(length, seed=length), max_tokens=40, **options)
            assert_same(found, right)
            num += drafted(found)[0]
            engine.check()
    assert num > 50


# ------------------------------------------------------------------------------ a head that equals its target


def seen_by_a_head(dims: ModelConfig) -> dict[str, Tensor]:
    """A target of which only the layer that attends does something, and a head that has this layer. All
    embeddings have length one, so the head's norm does not change them.

    A head has no entry for the first token of a prompt. So that is token 0, and no token looks at it: in one
    place of every head, which has no position, keys of all others are as the queries, and its key is the
    opposite."""
    tensors = tiny_tensors(dims)
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 1.5
    embedding[0, 0] = -1.5
    embedding *= embedding.square().mean(dim=1, keepdim=True).rsqrt()
    tensors["lm_head.weight"][0] = 0  # it is hardly ever said
    for layer in range(3):
        tensors[f"model.layers.{layer}.linear_attn.out_proj.weight"].zero_()
        for name in tensors:
            if name.startswith(f"model.layers.{layer}.mlp") and "down_proj" in name:
                tensors[name].zero_()
    for name in tensors:
        if name.endswith("norm.weight") and "linear_attn" not in name:
            tensors[name] -= 1  # what is stored is the difference from one
    own, place = "model.layers.3.self_attn", dims.head_dim - 1
    tensors["model.layers.3.input_layernorm.weight"][0] = 0
    for name, size in (("q", 2 * dims.head_dim), ("k", dims.head_dim)):
        rows = tensors[f"{own}.{name}_proj.weight"].view(-1, size, dims.hidden)
        rows[:, place] = 0
        rows[:, place, 0] = 4
        tensors[f"{own}.{name}_norm.weight"][place] = 6
    own_layer = {name: one.clone() for name, one in tensors.items() if name.startswith("model.layers.3.")}
    head = {name.replace("model.layers.3.", "mtp.layers.0."): one for name, one in own_layer.items()}
    joined = torch.cat((torch.eye(dims.hidden), torch.zeros(dims.hidden, dims.hidden)), dim=1)
    norms = {f"mtp.pre_fc_norm_{name}.weight": torch.zeros(dims.hidden) for name in ("embedding", "hidden")}
    return (
        tensors
        | head
        | norms
        | {"mtp.fc.weight": joined, "mtp.norm.weight": tensors["model.norm.weight"].clone()}
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, *DRAWN], ids=lambda options: ",".join(options) or "greedy")
def test_of_a_head_that_equals_its_target_all_is_kept(
    options: dict[str, Any], family: str, make: Make, prompts: Prompts
) -> None:
    dims = FAMILIES[family]
    tensors = seen_by_a_head(dims)
    plain, engine = make(dims, tensors, 0), make(dims, tensors)
    for length in (60,):
        prompt = [0, *prompts(length, seed=length)]
        found = generate(engine, prompt, max_tokens=40, **options)
        assert_same(found, generate(plain, prompt, max_tokens=40, **options))
        assert_all_kept(found)
        assert len(set(found.tokens)) > 3, "the tokens differ"


def test_its_kv_is_found_again_on_the_device_and_in_host_memory(make: Make, prompts: Prompts) -> None:
    engine = make(DENSE, seen_by_a_head(DENSE), host_blocks=200, prefill_chunk=32)
    prompt = [0, *prompts(90)]
    history = [*prompt, *generate(engine, prompt, max_tokens=20).tokens, 3]
    again = generate(engine, history, max_tokens=30)
    assert again.source is not None and again.source.device == 80
    assert_all_kept(again)
    settle_all(engine)
    engine.cache.reset(("device",))
    run_all(engine)
    third = generate(engine, history, max_tokens=30)
    assert third.source is not None and third.source.host == 96
    assert_all_kept(third)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a prompt without KV": lambda patch: patch.setattr(ShippedHead, "fill", lambda *_: None),
    "attention without its gate": lambda patch: patch.setattr(
        GatedLayer,
        "_gated",
        lambda own, *given: (lambda qkv, gate, residual: (qkv, gate * (own.index == 3), residual))(
            *GATED(own, *given)
        ),
    ),
    "the embedding of the token before": lambda patch: patch.setattr(
        ShippedHead, "_joined", lambda head, hidden, tokens: JOINED(head, hidden, tokens.roll(1))
    ),
}
GATED, JOINED = GatedLayer._gated, ShippedHead._joined


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_head_that_is_run_wrongly_would_be_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], make: Make, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    engine = make(DENSE, seen_by_a_head(DENSE), prefill_chunk=32)
    found = [generate(engine, [0, *prompts(length, seed=length)], max_tokens=40) for length in (15, 100)]
    assert any(kept < num for num, kept in map(drafted, found))


# ----------------------------------------------------------------------------------------- files and refusals


def test_without_speculation_its_tensors_are_not_read(
    make: Make, prompts: Prompts, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even where they do not fit."""
    tensors = tiny_tensors(DENSE)
    with caplog.at_level(logging.WARNING):
        engine = make(DENSE, tensors | {"mtp.fc.weight": torch.zeros(3, 3)}, 0)
    said = [one.getMessage() for one in caplog.records]
    assert any(
        "not read: 1 tensors of the head for drafts, which --speculate mtp uses" in one for one in said
    )
    alone = make(DENSE, tensors, 0)
    assert_same(generate(engine, prompts(30)), generate(alone, prompts(30)))


def _changed(name: str, shape: tuple[int, ...] | None) -> dict[str, Tensor]:
    """A head with one tensor of another shape; None: without it."""
    tensors = shipped_tensors(DENSE)
    tensors.pop(name, None)
    return tensors if shape is None else {**tensors, name: torch.zeros(shape)}


REFUSED: dict[str, tuple[dict[str, Tensor], str]] = {
    "none": ({}, "has no head for drafts"),
    "a hidden size": (_changed("mtp.fc.weight", (80, 160)), r"hidden size 64.*mtp.fc.weight is \[80, 160\]"),
    "a vocabulary": (
        _changed("mtp.embed_tokens.weight", (700, 64)),
        "vocabulary 512.*unexpected tensors: mtp.embed_tokens.weight",
    ),
    "a second layer": (
        _changed("mtp.layers.1.input_layernorm.weight", (64,)),
        "unexpected tensors: mtp.layers.1",
    ),
    "a missing norm": (_changed("mtp.norm.weight", None), "missing tensors: mtp.norm.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_does_not_fit_is_refused_by_name(case: str, make: Make, tmp_path: Path) -> None:
    head, why = REFUSED[case]
    with pytest.raises(ModelError, match=why):
        make(DENSE, tiny_tensors(DENSE) | head)
    with pytest.raises(ModelError, match=why):  # a server says it before it reads weights
        check_ahead(with_model(tmp_path / "model", 2))


def test_a_head_in_files_of_its_own_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(
        tiny_config("tiny-qwen3.5"), speculation=SpeculationConfig(f"mtp:{tmp_path}")
    )
    with pytest.raises(ModelError, match="a head in files of its own is not supported"):
        build(config)


@pytest.mark.parametrize("model", ["tiny-qwen3.5"])
def test_random_weights_have_a_random_head(model: str, prompts: Prompts) -> None:
    """So that a shape can be measured."""
    engine = build(dataclasses.replace(tiny_config(model), speculation=SpeculationConfig("mtp", 2)))
    plain = build(tiny_config(model))
    engine.warm()
    forced(engine)
    found = generate(engine, prompts(20), max_tokens=20)
    assert found.tokens == generate(plain, prompts(20), max_tokens=20).tokens and drafted(found)[0] > 10
    for one in (engine, plain):
        one.close(timeout_s=20.0)
