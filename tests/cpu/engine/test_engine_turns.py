"""What an engine says of its turns: how long it was kept by what, whether there is more to do, and what it
hands on to whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.contract import Adapter, CacheHint, FinishReason, Prefix, SamplingParams, Submission, TokenEvent
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.engine.sessions import Sessions
from penstock.errors import InvalidRequest
from tests.support.driving import run_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]

# ------------------------------------------------------------------------------------------------------ turns


def test_a_turn_in_which_anything_was_done_is_followed_by_another_at_once(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    assert not engine.step(), "nothing is there"
    for part, name in ((engine.cache, "settle"), (engine.kv.sessions, "step")):
        with monkeypatch.context() as patched:
            patched.setattr(part, name, lambda: True)
            assert engine.step(), name
        assert not engine.step()
    one = submit(engine, prompts(20), max_tokens=1)
    assert engine.step() and one.finish is None, "a step was launched"
    assert engine.step() and one.finish is FinishReason.LENGTH, "and read"
    assert not engine.step()


# -------------------------------------------------------------------------------------------------- handed on


def test_everything_about_a_request_reaches_the_scheduler_and_the_sessions(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    followed: list[tuple[Any, ...]] = []
    follow = Sessions.follow
    monkeypatch.setattr(Sessions, "follow", lambda self, *args: followed.append(args) or follow(self, *args))
    hint, heard = CacheHint(retain_s=5.0), list[TokenEvent]()
    params = SamplingParams(max_tokens=3, seed=11, repetition_penalty=1.5)
    prompt = [*prompts(20), *prompts(20)]
    name = engine.submit(
        Submission(prompt, params, cache_salt="salt", id="mine", priority=-7, session="chat", hint=hint),
        heard.append,
    )
    engine._inbox.run_some()
    request = engine.parts.scheduler.lives["mine"].request
    assert (name, request.id, request.prompt, request.sampling) == ("mine", "mine", prompt, params)
    assert (request.priority, request.session, request.adapter) == (-7, "chat", None)
    assert request.prefix == engine.cache.prefix_of(prompt, "salt") != engine.cache.prefix_of(prompt)
    assert sorted(request.distinct().tolist()) == sorted(set(prompt)) and request.distinct_prompt is not None
    assert [args[:3] for args in followed] == [(request, "salt", hint)]
    run_all(engine)
    assert heard[-1].finish is not None


def test_a_prefetch_of_a_prompt_is_that_of_its_salt_and_adapter(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompt, adapter = make_engine(), prompts(40), Adapter("tuned", "d" * 64)
    asked: list[tuple[str, str | Prefix]] = []
    monkeypatch.setattr(engine.kv.sessions, "prefetch", lambda salt, what: asked.append((salt, what)))
    for salt, which in (("", None), ("a", None), ("", adapter), ("a", adapter)):
        engine.kv.prefetch(prompt, cache_salt=salt, adapter=which)
        engine.step()
        assert asked.pop() == (salt, engine.cache.prefix_of(prompt, salt, which))
    engine.kv.prefetch(session="chat", cache_salt="a")
    engine.step()
    assert asked == [("a", "chat")]
    for bad in ([], [10**6]):
        with pytest.raises(InvalidRequest):
            engine.kv.prefetch(bad)


# --------------------------------------------------------------------------------------------------- the loop


def test_a_loop_that_failed_says_so_before_anybody_is_told(
    make_engine: MakeEngine, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever hears of the end asks at once whether the engine lives."""
    engine = make_engine()
    loop = EngineLoop(engine)
    seen: list[BaseException | None] = []

    def burst(*_: Any, **__: Any) -> None:
        raise RuntimeError("the plan is void")

    with monkeypatch.context() as patched:
        patched.setattr(engine.parts.scheduler, "plan", burst)
        engine.submit(
            Submission(prompts(10), SamplingParams(max_tokens=1)), lambda event: seen.append(loop.failed())
        )
        loop.start()
        loop.close(20.0)
    assert len(seen) == 1 and isinstance(seen[0], RuntimeError)
