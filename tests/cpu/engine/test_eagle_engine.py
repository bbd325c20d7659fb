"""An EAGLE-3 head in the engine. What holds of other heads holds of it, it drafts what a plain reference
drafts, and all is kept of a head that computes what its target computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config import Config, SpeculationConfig
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.models.decoder import Decoder
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.speculation.eagle import EagleHead
from penstock.speculation.vocab import DraftVocab
from penstock.testing.sanitized import check_silent
from penstock.testing.tiny_models import TINY_LLAMA, TINY_QWEN3, tiny_tensors, write_tiny_model
from tests.cpu.engine import test_mtp_engine as heads
from tests.cpu.engine.test_draft_engine import DRAWN, assert_all_kept, drafted
from tests.cpu.engine.test_mtp_engine import Prompts, model_of, recorded_drafts, with_head
from tests.support.adapters import write_random_adapter
from tests.support.driving import assert_same, generate, run_all, settle_all, submit, tiny_config
from tests.support.eagle import Reference, eagle_config, eagle_tensors, maps, tapped_states, write_eagle
from tests.support.forced import forced

# The suite of heads, which finds the fixtures of this file.
pair = heads.pair
test_a_head_changes_no_answer = heads.test_a_head_changes_no_answer
test_drafts_of_a_pruned_vocabulary_are_the_targets = heads.test_drafts_of_a_pruned_vocabulary_are_the_targets
test_what_a_head_drafts_does_not_depend_on_where_its_kv_came_from = (
    heads.test_what_a_head_drafts_does_not_depend_on_where_its_kv_came_from
)
test_drafts_are_made_alike_whether_the_ones_before_were_kept_or_not = (
    heads.test_drafts_are_made_alike_whether_the_ones_before_were_kept_or_not
)
test_blocks_of_another_head_are_not_found = heads.test_blocks_of_another_head_are_not_found
test_what_is_decoded_while_nothing_is_drafted_is_left_out = (
    heads.test_what_is_decoded_while_nothing_is_drafted_is_left_out
)

TAPS = (0, 2, 3)  # of three layers: the embedding, an inner state, and the last output


@pytest.fixture
def device() -> str:
    return "cpu"


def write_random_eagle(
    directory: Path, target: Decoder, seed: int = 0, vocab: DraftVocab | None = None
) -> Path:
    ids = None if vocab is None else vocab.target_ids
    tensors = eagle_tensors(target.config, ids, seed)
    return write_eagle(
        directory, tensors, eagle_config(target.config, TAPS, None if ids is None else len(ids))
    )


@pytest.fixture
def with_random_head() -> Callable[..., Config]:
    return lambda config, *head, **vocab: with_head(config, write_random_eagle(*head, **vocab), "eagle")


@pytest.mark.parametrize("is_pruned", [False, True], ids=["all tokens", "some tokens"])
def test_it_drafts_what_a_plain_reference_drafts(
    is_pruned: bool, tmp_path: Path, device: str, prompts: Prompts
) -> None:
    """Each entry takes the target's states of one token and the embedding of the next, at the place of the
    first; drafts are chained from there."""
    ids = torch.arange(5, 505, 2).flip(0) if is_pruned else None
    tensors = eagle_tensors(TINY_QWEN3, ids)
    config = tiny_config(device=device, prefill_chunk=16)
    head = write_eagle(tmp_path, tensors, eagle_config(TINY_QWEN3, TAPS, None if ids is None else len(ids)))
    engine = build(with_head(config, head, "eagle"))
    forced(engine, lambda most: 0)
    prompt = prompts(40)
    found = recorded_drafts(engine, prompt)
    model = model_of(engine)
    reference, text = Reference(tensors, model.embedding), [*prompt, *(found[at][0] for at in sorted(found))]
    tapped = tapped_states(model, text, TAPS)
    assert len(found) == 24
    for at, (token, *drafts) in found.items():
        nexts = torch.tensor([*text[1 : at + 1], token])
        assert reference.drafts(tapped[: at + 1], nexts, len(drafts)) == drafts
    engine.close(timeout_s=20.0)


# ------------------------------------------------------------------------------ a head that equals its target

DIMS = TINY_LLAMA
FIRST = "model.layers.0.self_attn"


def seen_by_a_head() -> dict[str, Tensor]:
    """A target whose next token depends only on what an EAGLE-3 head can see: on its first layer's attention
    over embeddings, which are so small that nothing else of them reaches the output.

    A head has no entry for the first token of a prompt. So that is token 0, and no token looks at it: all
    others share a value. It is in the slowest pair of each head, and gives them a score that is 25
    higher."""
    tensors = tiny_tensors(DIMS)
    embedding = tensors["model.embed_tokens.weight"].mul_(1e-3)
    embedding[0], embedding[1:, 0] = 0, 1e-3
    tensors["model.layers.0.input_layernorm.weight"][0] = 1
    for name in "qk":
        rows = tensors[f"{FIRST}.{name}_proj.weight"].mul_(25).unflatten(0, (-1, DIMS.head_dim))
        rows[:, DIMS.head_dim // 2 - 1] = 0
        rows[:, DIMS.head_dim // 2 - 1, 0] = 33
    tensors[f"{FIRST}.v_proj.weight"][:, 0] = 0
    tensors[f"{FIRST}.o_proj.weight"] *= 1e6
    tensors["lm_head.weight"][0] = 0  # it is hardly ever said
    tensors["model.layers.1.self_attn.o_proj.weight"].zero_()
    for index in range(2):
        tensors[f"model.layers.{index}.mlp.down_proj.weight"].zero_()
    return tensors


def equal_head(directory: Path, target: dict[str, Tensor]) -> Path:
    """The same attention. Its own states are multiplied with zero; draft ids run backwards."""
    ids = torch.arange(DIMS.vocab).flip(0)
    tensors = eagle_tensors(DIMS) | maps(DIMS, ids)
    own = "midlayer.self_attn"
    for name in "qkv":
        seen = target[f"{FIRST}.{name}_proj.weight"]
        tensors[f"{own}.{name}_proj.weight"] = torch.cat((seen, torch.randn_like(seen)), dim=1)
    tensors[f"{own}.o_proj.weight"] = target[f"{FIRST}.o_proj.weight"]
    tensors["midlayer.input_layernorm.weight"] = target["model.layers.0.input_layernorm.weight"]
    for name in ("midlayer.hidden_norm", "midlayer.mlp.down_proj"):
        tensors[f"{name}.weight"].zero_()
    tensors["norm.weight"], tensors["lm_head.weight"] = (
        target["model.norm.weight"],
        target["lm_head.weight"][ids],
    )
    shape = {"num_attention_heads": DIMS.num_heads, "num_key_value_heads": DIMS.num_kv_heads}
    numbers = {"head_dim": DIMS.head_dim, "rms_norm_eps": DIMS.norm_eps, "rope_theta": DIMS.rope_theta}
    stated = {**eagle_config(DIMS, (0, 1, 2)), **shape, **numbers, "norm_before_residual": True}
    return write_eagle(directory, tensors, stated)


@pytest.fixture
def equal(tmp_path: Path, device: str) -> Any:
    """Engines with such a target and such a head, whose drafts are all verified."""
    made: list[tuple[Engine, Sanitizer]] = []
    target = seen_by_a_head()
    directory = write_tiny_model(tmp_path / "target", DIMS, tensors=target)
    head = equal_head(tmp_path / "head", target)

    def make(drafts: int = 4, **settings: Any) -> Engine:
        config = tiny_config("tiny-llama", **{"device": device, **settings})
        source = dataclasses.replace(
            config.source,
            model=str(directory),
            load_format="auto",
            weights="float32" if device == "cpu" else "auto",
        )
        speculation = SpeculationConfig(f"eagle:{head}" if drafts else None, drafts or None)
        sanitizer = Sanitizer()
        engine = build(
            dataclasses.replace(config, source=source, speculation=speculation), sanitizer=sanitizer
        )
        if drafts:
            forced(engine)
        made.append((engine, sanitizer))
        return engine

    yield make
    for engine, sanitizer in made:
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)


@pytest.mark.parametrize("drafts", [1, 4, 16])
def test_of_a_head_that_equals_its_target_all_is_kept(drafts: int, equal: Any, prompts: Prompts) -> None:
    """Over the ends of blocks, whatever the prompt's length."""
    engine = equal(drafts)
    for length in (1, 15, 16, 17, 100):
        found = generate(engine, [0, *prompts(length, seed=length)], max_tokens=40)
        assert_all_kept(found)
        assert len(set(found.tokens)) > 5, "the tokens differ"
        engine.check()


@pytest.mark.parametrize("options", DRAWN, ids=lambda options: ",".join(options))
def test_of_a_head_that_equals_its_target_all_is_kept_where_tokens_are_drawn(
    options: dict[str, Any], equal: Any, prompts: Prompts
) -> None:
    plain, engine = equal(0), equal()
    for length in (1, 100):
        prompt = [0, *prompts(length, seed=length)]
        found = generate(engine, prompt, max_tokens=40, **options)
        assert_same(found, generate(plain, prompt, max_tokens=40, **options))
        assert_all_kept(found)


def test_its_kv_is_found_again_on_the_device_and_in_host_memory(equal: Any, prompts: Prompts) -> None:
    engine = equal(host_blocks=200, prefill_chunk=32)
    prompt = [0, *prompts(90)]
    history = [*prompt, *generate(engine, prompt, max_tokens=40).tokens, 3]
    again = generate(engine, history, max_tokens=30)
    assert again.source is not None and again.source.device >= 112
    assert_all_kept(again)
    settle_all(engine)
    engine.cache.reset(("device",))
    run_all(engine)
    third = generate(engine, history, max_tokens=30)
    assert third.source is not None and third.source.host >= 112
    assert_all_kept(third)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a prompt without KV": lambda patch: patch.setattr(EagleHead, "fill", lambda *_: None),
    "no map of ids": lambda patch: patch.setattr(
        "penstock.speculation.eagle.read_vocab", lambda *_, **__: None
    ),
    "the embedding of the token before": lambda patch: patch.setattr(
        EagleHead, "_joined", lambda head, hidden, tokens: (head._block.embed(tokens.roll(1)), hidden)
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_head_that_is_run_or_read_wrongly_would_be_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], equal: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    engine = equal(prefill_chunk=32)
    found = [generate(engine, [0, *prompts(length, seed=length)], max_tokens=40) for length in (15, 100)]
    assert any(kept < num for num, kept in map(drafted, found))


def test_an_adapter_of_the_target_is_in_what_the_head_sees(
    pair: Any, prompts: Prompts, tmp_path: Path
) -> None:
    """Its steps run op by op, beside those of other requests."""
    answers = []
    for engine in pair():
        adapter = engine.adapters.load("a", write_random_adapter(tmp_path / "a", TINY_QWEN3, 1)).adapter
        found = [
            submit(engine, prompts(30 + n, seed=n), max_tokens=30, adapter=adapter if n % 2 else None)
            for n in range(4)
        ]
        run_all(engine)
        answers.append([one.tokens for one in found])
    assert answers[0] == answers[1]
    assert sum(engine.parts.scheduler.counts.drafted_by_place) > 50
