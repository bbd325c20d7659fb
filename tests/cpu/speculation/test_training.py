"""Training a draft head: the loss falls, what is drafted is kept more often, a run can be continued, and the
command leaves a head."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from penstock.models.progress import silent
from penstock.speculation.mtp import CONFIG_FILE, TENSORS_FILE, read_head
from penstock.speculation.vocab import DraftVocab
from penstock.testing.tiny_models import write_tiny_model
from tests.support.contiguous_kv import ContiguousKv, logits_of
from tests.support.tiny_target import tiny_target, written
from train_mtp.__main__ import main
from train_mtp.training import (
    Batch,
    Trainable,
    Training,
    TrainingConfig,
    batches,
    by_clock,
    by_steps,
    hidden_states,
    measured_acceptance,
    train,
)

CONFIG = TrainingConfig(depth=2, batch_tokens=512, learning_rate=3e-3)


def learned(
    num_steps: int, stop_at: int | None = None, state: dict | None = None
) -> tuple[Training, list[float]]:  # type: ignore[type-arg]
    target = tiny_target()
    training = Training(
        Trainable(target, None, 0),
        batches(written(target, 40, 24, 1), target, CONFIG, silent),
        CONFIG,
        by_steps(num_steps),
    )
    if state is not None:
        training.restore(state)
    losses = train(training, silent, None if stop_at is None else lambda now: now.step == stop_at)
    return training, losses


def held_out(head: Trainable) -> list[Batch]:
    return batches(written(head.target, 16, 24, 2), head.target, CONFIG, silent)


def test_the_loss_falls_and_more_drafts_are_kept_of_text_that_was_not_trained_on() -> None:
    training, losses = learned(60)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    head, texts = training.head, held_out(training.head)
    trained = measured_acceptance(head, texts, 2, {"full": None})["full"]
    untrained = measured_acceptance(Trainable(head.target, None, 0), texts, 2, {"full": None})["full"]
    assert trained.rates[0] > untrained.rates[0] + 0.1
    assert trained.kept > untrained.kept


def test_a_run_that_was_ended_goes_on_where_it_was() -> None:
    whole, _ = learned(8)
    half, _ = learned(8, stop_at=4)
    rest, losses = learned(8, state=half.state())
    assert len(losses) == 4
    assert all(torch.equal(whole.head.tensors[name], tensor) for name, tensor in rest.head.tensors.items())


@pytest.mark.parametrize(
    "times", [[50.0, 20.0, *[1.0] * 99], [1.0] * 60 + [40.0] * 9], ids=["slow at first", "slow later"]
)
def test_a_run_by_the_clock_ends_in_time_with_the_rate_of_its_end(times: list[float]) -> None:
    """Whatever its first steps take: neither does it end early, nor is it cut off while it still learns
    fast."""
    target, now_s, rates = tiny_target(), [0.0], []
    done = by_clock(100.0, clock=lambda: now_s[0])
    training = Training(
        Trainable(target, None, 0), batches(written(target, 8, 24, 1), target, CONFIG, silent), CONFIG, done
    )

    def each(training: Training) -> bool:
        rates.append(training.rate(training.share))
        now_s[0] += times[training.step - 1]
        return False

    train(training, silent, each)
    assert 100.0 <= now_s[0] <= 100.0 + max(times[training.step - 1], 1.0)
    assert max(rates) > 0.5 * CONFIG.learning_rate and training.rate(training.share) == pytest.approx(
        0.02 * CONFIG.learning_rate
    )
    assert all(rate <= CONFIG.learning_rate for rate in rates)


def test_hidden_states_are_those_of_the_forward_pass() -> None:
    """Of every text of a batch, whatever its neighbours and its padding are."""
    target = tiny_target()
    texts = [text.tokens for text in written(target, 3, 12, 5)]
    hidden = hidden_states(target, torch.tensor(texts))
    logits = Trainable(target, None, 0).target_logits(hidden)
    for row, text in zip(logits, texts, strict=True):
        torch.testing.assert_close(row, logits_of(target, text), rtol=1e-4, atol=1e-4)


def test_a_head_that_guesses_as_the_target_does_is_kept_whole_and_a_pruned_one_as_far_as_it_covers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target()
    head, texts = Trainable(target, None, 0), held_out(Trainable(target, None, 0))
    head.tensors["norm"] = target.norm
    monkeypatch.setattr(
        head,
        "unrolled",
        lambda hidden, tokens, depth: [hidden[:, s : s + tokens.shape[1] - depth] for s in (1, 2)],
    )
    half = DraftVocab(torch.arange(0, 96, 2), 96, "here")
    found = measured_acceptance(head, texts, 2, {"full": None, "half": half})
    assert found["full"].rates == [1.0, 1.0] and found["full"].kept == 2.0
    chosen = [head.target_logits(batch.hidden).argmax(dim=-1) for batch in texts]
    # A chain starts at each written token that has two behind it; its first place is the target's choice
    # behind that token.
    firsts = torch.cat([choice[:, 2:23].flatten() for choice in chosen])
    assert found["half"].rates[0] == pytest.approx(float((firsts % 2 == 0).double().mean()))


# ------------------------------------------------------------------------------------------------ the command


def words(**flags: object) -> list[str]:
    """As they stand in a command."""
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_the_command_writes_a_head_that_loads_and_says_what_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text by the engine, a few steps, a measurement; then once more with what was kept of it."""
    model, out, work = write_tiny_model(tmp_path / "model"), tmp_path / "head", tmp_path / "work"
    flags = words(model=model, device="cpu", out=out, work=work, max_batch=16, text_len=200, tokens=5000)
    flags += words(minutes=10, steps=3, batch_tokens=1024, draft_vocab=100, depth=2)
    assert main(flags) == 0
    said = capsys.readouterr().out
    assert (
        re.search(r"draft vocabulary +100 +[\d.]+% +[\d.]+% +[\d.]+% +[\d.]+%", said)
        and "draft vocabulary   full" in said
    )
    stated = json.loads((out / CONFIG_FILE).read_text())
    assert stated["draft_vocab"] == 100 and stated["depth"] == 2 and stated["notes"]["steps"] == 3
    assert sorted(file.name for file in out.iterdir()) == [CONFIG_FILE, TENSORS_FILE]
    texts = (work / "texts.pt").read_bytes()
    assert main([*flags, "--steps", "5"]) == 0
    assert "going on behind step 3" in capsys.readouterr().out
    assert (work / "texts.pt").read_bytes() == texts, "text that is there is not written again"
    other = write_tiny_model(tmp_path / "other")
    assert main([*flags, "--model", str(other)]) == 2
    assert f"of a run with --model {model}: remove it, or give another directory" in capsys.readouterr().err
    assert main([*flags, "--depth", "1"]) == 2
    assert "of a run with --depth 2: remove it" in capsys.readouterr().err


def test_a_head_that_the_command_wrote_runs_on_its_model(tmp_path: Path) -> None:
    from penstock.config import Config, ModelSource
    from train_mtp.command import load_target

    model, out = write_tiny_model(tmp_path / "model"), tmp_path / "head"
    text = tmp_path / "text.txt"
    text.write_text("A penstock lets water through. " * 200)
    flags = words(model=model, device="cpu", out=out, text=text, text_len=64, steps=2)
    assert main([*flags, "--draft-vocab", "0"]) == 0
    assert not (out / "work").exists()
    target = load_target(Config(ModelSource(str(model), device="cpu")), silent)
    head = read_head(out, target)
    kv = ContiguousKv(head.dims, target.rope)
    kv.begin(torch.arange(3, dtype=torch.int32))
    guess = head.step(torch.zeros((3, target.config.hidden)), torch.tensor([1, 2, 3], dtype=torch.int32), kv)
    assert guess.logits.shape == (3, target.config.vocab) and guess.hidden.shape == (3, target.config.hidden)


@pytest.mark.parametrize(
    "flags", [("--draft-vocab", "-1"), ("--minutes", "0"), ("--learning-rate", "nan"), ("--steps", "0")]
)
def test_numbers_that_cannot_be_are_refused(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "head"), *flags]) == 2
    assert flags[0] in capsys.readouterr().err
    assert not (tmp_path / "head").exists()


def test_short_texts_are_long_enough_for_questions_that_the_model_makes_up(tmp_path: Path) -> None:
    sizes = words(steps=1, minutes=10, tokens=200, text_len=64, batch_tokens=256, max_batch=8)
    model = words(model="tiny-llama", load_format="dummy", device="cpu")
    assert main(["--out", str(tmp_path / "head"), *sizes, *model]) == 0
