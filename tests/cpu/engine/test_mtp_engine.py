"""A multi-token-prediction head in the engine: drafts are made on the device, step after step, and never
change an answer. Random heads for random weights: whether drafts are any good is the business of training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.config import Config, SpeculationConfig
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.execution import warm
from penstock.engine.execution.ahead import DraftPass
from penstock.engine.execution.passes import StepOps
from penstock.engine.execution.target import TargetPass
from penstock.models.decoder import Decoder
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.speculation.length import StepCosts
from penstock.speculation.mtp import head_layout, write_head
from penstock.speculation.vocab import DraftVocab
from penstock.testing.sanitized import check_silent
from tests.support.driving import (
    assert_same,
    generate,
    pass_of,
    run_all,
    settle_all,
    submit,
    tiny_config,
    wait_scanned,
)
from tests.support.forced import forced

Prompts = Callable[..., list[int]]
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    {"prompt_logprobs": 1, "logprobs": 2},
)


def model_of(engine: Engine) -> Decoder:
    model = engine.parts.executor.target.model
    assert isinstance(model, Decoder)
    return model


def write_random_head(
    directory: Path, target: Decoder, seed: int = 0, vocab: DraftVocab | None = None
) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        weight.name: torch.randn(weight.shape, generator=generator) * 0.05
        for weight in head_layout(target.config)
    }
    write_head(directory, tensors, vocab, target, 3, {})
    return directory


def with_head(config: Config, head: Path, kind: str = "mtp") -> Config:
    return dataclasses.replace(config, speculation=SpeculationConfig(f"{kind}:{head}", 3))


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture
def with_random_head() -> Callable[..., Config]:
    """A config with a head as `write_random_head` writes it."""
    return lambda config, *head, **vocab: with_head(config, write_random_head(*head, **vocab))


@pytest.fixture
def pair(tmp_path: Path, device: str, with_random_head: Callable[..., Config]) -> Any:
    """An engine without, and one with a head, whose drafts are all verified."""
    made: list[tuple[Engine, Sanitizer | None]] = []

    def make(**settings: Any) -> tuple[Engine, Engine]:
        config = tiny_config(**{"device": device, **settings})
        plain = build(config)
        sanitizer = Sanitizer()
        drafting = build(with_random_head(config, tmp_path / "head", model_of(plain)), sanitizer=sanitizer)
        forced(drafting)
        made.extend([(plain, None), (drafting, sanitizer)])
        return plain, drafting

    yield make
    for engine, sanitizer in made:
        engine.close(timeout_s=20.0)
        if sanitizer is not None:
            check_silent(sanitizer)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "greedy")
def test_a_head_changes_no_answer(options: dict[str, Any], pair: Any, prompts: Prompts) -> None:
    plain, engine = pair()
    for n, length in enumerate((1, 17, 100)):
        right = generate(plain, prompts(length, seed=n), max_tokens=40, **options)
        assert_same(generate(engine, prompts(length, seed=n), max_tokens=40, **options), right)
        engine.check()
    assert sum(engine.parts.scheduler.counts.drafted_by_place) > 100


def recorded_drafts(engine: Engine, prompt: list[int], **options: Any) -> dict[int, list[int]]:
    """What the device has drafted behind every step of one request, by the position of the last token that
    was kept."""
    found: dict[int, list[int]] = {}
    ahead = pass_of(engine, DraftPass).drafts
    if ahead.pending.is_cuda:
        pytest.skip("nobody sees a captured pass run")
    run = ahead.run

    def record(*args: Any) -> None:
        run(*args)
        if len(args[2]):
            found[int(args[0].bound_inputs().positions[args[2][0]])] = ahead.pending[int(args[3][0])].tolist()

    ahead.run = record  # type: ignore[method-assign]
    generate(engine, prompt, max_tokens=24, **options)
    ahead.run = run  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}], ids=["greedy", "drawn"]
)
def test_drafts_of_a_pruned_vocabulary_are_the_targets(
    options: dict[str, Any],
    tmp_path: Path,
    device: str,
    prompts: Prompts,
    with_random_head: Callable[..., Config],
) -> None:
    config = tiny_config(device=device)
    plain = build(config)
    vocab = DraftVocab(torch.arange(7, 512, 5).flip(0), 512, "here")
    engine = build(with_random_head(config, tmp_path / "head", model_of(plain), vocab=vocab))
    forced(engine)
    found = recorded_drafts(engine, prompts(30), **options)
    drafts = {token for pending in found.values() for token in pending[1:]}
    assert len(drafts) > 5 and drafts <= set(vocab.target_ids.tolist())
    plain.close(timeout_s=20.0)
    engine.close(timeout_s=20.0)


def test_what_a_head_drafts_does_not_depend_on_where_its_kv_came_from(pair: Any, prompts: Prompts) -> None:
    """The head's rows are found again with the target's: computed, on the device, in host memory. The first
    draft of the prompt's end is the same, and so are those of all steps."""
    _, engine = pair(host_blocks=64, prefill_chunk=32)
    forced(engine, lambda most: 0)
    prompt = prompts(90)
    cold = recorded_drafts(engine, prompt)
    assert len(cold) == 24 and len({tuple(one[1:]) for one in cold.values()}) > 5
    assert recorded_drafts(engine, prompt) == cold
    settle_all(engine)
    engine.cache.reset(("device",))
    run_all(engine)
    assert recorded_drafts(engine, prompt) == cold


def test_drafts_are_made_alike_whether_the_ones_before_were_kept_or_not(pair: Any, prompts: Prompts) -> None:
    """The head's KV of rejected tokens is written over: behind the same tokens the same is drafted."""
    _, engine = pair()
    forced(engine, lambda most: 0)
    right = recorded_drafts(engine, prompts(40))
    forced(engine)
    verified = recorded_drafts(engine, prompts(40))
    assert len(verified) > 10 and all(right[at] == drafts for at, drafts in verified.items())
    assert sum(engine.parts.scheduler.counts.drafted_by_place) > 20


# ----------------------------------------------------------------------------------- while nothing is drafted


def test_what_is_decoded_while_nothing_is_drafted_is_left_out(pair: Any, prompts: Prompts) -> None:
    """The head's KV of it is blank, that of the prompt is not, and drafts that begin later change no
    answer."""
    plain, engine = pair()
    right = generate(plain, prompts(20), max_tokens=60)
    lane, arena = engine.parts.lanes[0], engine.parts.arena.tensor
    lane.submit(lambda: arena.fill_(0.5), label="others").wait_done()  # as if others had used it before
    speculation = forced(engine, is_on=False)
    found = submit(engine, prompts(20), max_tokens=60)
    while len(found.tokens) < 30:
        engine.step()
    engine.parts.lanes[0].drain()
    table = engine.parts.scheduler.running.requests[found.request_id].table
    slots = torch.from_numpy(table.slots(48).astype("int64"))
    own = pass_of(engine, DraftPass).drafts.guesser.attention.arena[:, -1][slots]
    rows = own.permute(0, 2, 1, 3, 4).flatten(0, 1).flatten(1)  # by token
    assert rows[:20].any(dim=1).all() and not rows[20:48].any()
    speculation.is_on = True
    run_all(engine)
    assert_same(found, right)


@pytest.mark.parametrize("is_eager", [False, True], ids=["replayed", "eager"])
def test_a_step_that_blanks_waits_for_all_layers_of_its_blocks(
    is_eager: bool, pair: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds invariant 3: the head's layer of a block may still be on its way when those of the target are
    there."""
    _, engine = pair()
    forced(engine, is_on=False)
    if is_eager:
        monkeypatch.setattr(TargetPass, "bucket_for", lambda *given: None)
    waited, ends = [0], dict[str, int]()
    wait, submitted, replayed = StepOps.wait_layers, StepOps.submit, StepOps.replay

    def waits(ops: StepOps, end: int) -> None:
        waited[0] = end
        wait(ops, end)

    def submits(ops: StepOps, op: Any, label: str, accesses: Any = ()) -> None:
        ends[label] = waited[0]
        submitted(ops, op, label, accesses)

    def replays(ops: StepOps, *given: Any) -> None:
        ends["blank"] = waited[0]
        replayed(ops, *given)

    monkeypatch.setattr(StepOps, "wait_layers", waits)
    monkeypatch.setattr(StepOps, "submit", submits)
    monkeypatch.setattr(StepOps, "replay", replays)
    generate(engine, prompts(20), max_tokens=3)
    assert ends["blank"] == engine.parts.arena.layout.num_layers
    assert ends["blank"] > model_of(engine).config.num_layers


@pytest.mark.parametrize("block_tokens", [8, 16])
@pytest.mark.parametrize("num_drafts", [1, 15, 16])
def test_an_engine_is_made_warm_with_any_number_of_drafts(
    num_drafts: int, block_tokens: int, tmp_path: Path
) -> None:
    """Also where drafts reach into the next block, or the one behind it."""
    config = tiny_config(blocks=64, max_batch=3, block_tokens=block_tokens)
    plain = build(config)
    head = write_random_head(tmp_path / "head", model_of(plain))
    plain.close(timeout_s=20.0)
    engine = build(dataclasses.replace(config, speculation=SpeculationConfig(f"mtp:{head}", num_drafts)))
    engine.warm()
    speculation, ahead = engine.parts.speculation, pass_of(engine, DraftPass).drafts
    assert speculation is not None and not ahead.failed
    assert speculation._costs.making_s >= 0 and all(seconds > 0 for seconds in speculation._costs.seconds)
    assert len(generate(engine, [1, 2, 3], max_tokens=20).tokens) == 20
    engine.close(timeout_s=20.0)


def test_where_steps_are_slow_the_largest_are_not_measured(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server on a CPU is to start within seconds. What was not measured is taken to grow with its rows."""
    _, engine = pair()
    executor, sizes = engine.parts.executor, list[int]()
    monkeypatch.setattr(
        warm,
        "step_s",
        lambda _, plan, is_alone=False: sizes.append(plan.num_rows) or 0.1 * plan.num_rows,
    )
    guessed = StepCosts((1, 2, 4, 8, 16, 64, 256), (1.0,) * 7)
    costs = warm.measured_costs(executor, 0, guessed)
    assert costs.sizes == (1, 2, 4) and sizes == [1, 2, 4, 1, 4, 1, 4]
    assert costs.of(4) == pytest.approx(0.4) and costs.of(256) == pytest.approx(25.6)


def test_a_busy_machine_makes_no_size_look_dear_for_good(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow step, measured when other processes ran, says nothing about larger ones: a larger one that is
    faster proves it wrong."""
    _, engine = pair()
    times = iter([8e-3, 60e-3, 9e-3, 40e-3, 11e-3, *[8e-3] * 4])
    monkeypatch.setattr(warm, "step_s", lambda executor, plan, is_alone=False: next(times))
    costs = warm.measured_costs(engine.parts.executor, 0, StepCosts((1, 2, 4, 8, 16), (1.0,) * 5))
    assert costs.seconds == (8e-3, 9e-3, 9e-3, 11e-3, 11e-3)


class Shared(TorchDispatchMode):
    """Operations of this thread that are large enough for torch to share them among threads; it makes views
    and takes memory without."""

    FREE = (
        "empty",
        "lift_fresh",
        "view",
        "slice",
        "as_strided",
        "split",
        "select",
        "unbind",
        "detach",
        "alias",
        "expand",
        "permute",
        "transpose",
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if isinstance(made, torch.Tensor) and made.numel() >= 32768 and not name.startswith(self.FREE):
            self.found.append(name)
        return made


@pytest.mark.parametrize("proposer", ["mtp", "draft", None])
def test_the_engines_thread_computes_nothing_that_torch_shares_among_threads(
    proposer: str | None, tmp_path: Path
) -> None:
    """On a CPU it would have a team of threads for good, and with more threads than cores each operation of a
    step takes twice as long."""
    config = tiny_config(blocks=600, max_batch=256, host_blocks=32)
    if proposer == "mtp":
        plain = build(config)
        config = with_head(config, write_random_head(tmp_path / "head", model_of(plain)))
        plain.close(timeout_s=20.0)
    elif proposer == "draft":
        config = dataclasses.replace(config, speculation=SpeculationConfig("draft:tiny-llama", 3))
    engine = build(config)
    with Shared() as shared:
        engine.warm()
        found = [submit(engine, list(range(1, 90 + n)), max_tokens=60, temperature=0.5 * n) for n in range(3)]
        run_all(engine)
    assert all(len(one.tokens) == 60 for one in found) and shared.found == []
    with shared:
        torch.zeros(40_000)
    assert shared.found, "it would have been seen"
    engine.close(timeout_s=20.0)


def test_blocks_of_another_head_are_not_found(
    tmp_path: Path, device: str, prompts: Prompts, with_random_head: Callable[..., Config]
) -> None:
    config = tiny_config(device=device, host_blocks=32, ssd_dir=str(tmp_path / "ssd"), ssd_gib=0.05)
    plain = build(config)
    heads = [with_random_head(config, tmp_path / f"head{seed}", model_of(plain), seed) for seed in (1, 2)]
    plain.close(timeout_s=20.0)
    sources = []
    for with_one in (heads[0], heads[0], heads[1]):
        engine = build(with_one)
        wait_scanned(engine)
        found = submit(engine, prompts(64), max_tokens=2)
        run_all(engine)
        persisting = engine.cache.persist()
        while persisting is not None and not persisting.settled:
            engine.step()
            engine.wait_work(0.01)
        assert found.source is not None
        sources.append(found.source.ssd)
        engine.close(timeout_s=20.0)
    assert sources[0] == 0 and sources[1] >= 48 and sources[2] == 0
