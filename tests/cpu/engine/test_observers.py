"""What observers hear of requests and steps, compared with what the requests' listeners got."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from penstock.contract import KvSource, Request, SamplingParams, StepPlan, StepResult, Totals
from penstock.engine.engine import Engine
from penstock.engine.outbox import Outbox
from penstock.observe import Observers
from tests.cpu.engine.test_speculation import answered, scripted
from tests.cpu.engine.test_tiers import forget, until
from tests.support.driving import Collected, generate, run_all, submit

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


@dataclass
class Heard:
    """Of one request."""

    request: Request
    matched_s: float
    states: list[str] = field(default_factory=lambda: ["waiting"])
    times: list[float] = field(default_factory=list)
    source: KvSource | None = None
    loaded_s: float = 0.0
    end: tuple[str, Totals] | None = None


class Book:
    """Implements `RequestObserver` and `StepObserver`. A call after a request's end, or out of order, is a
    KeyError or fails an assertion."""

    def __init__(self) -> None:
        self.open: dict[str, Heard] = {}
        self.ended: dict[str, Heard] = {}
        self.plans: list[StepPlan] = []
        self.read: list[int] = []

    def request_arrived(self, request: Request, matched_s: float) -> None:
        assert request.id not in self.open
        self.open[request.id] = Heard(request, matched_s, times=[request.arrival_s + matched_s])

    def request_moved(self, request_id: str, state: str, at_s: float) -> None:
        self.open[request_id].states.append(state)
        self.open[request_id].times.append(at_s)

    def request_answered(self, request_id: str, source: KvSource, loaded_s: float, at_s: float) -> None:
        heard = self.open[request_id]
        assert heard.source is None and heard.states[-1] == "running"
        heard.source, heard.loaded_s = source, loaded_s
        heard.times.append(at_s)

    def request_ended(self, request_id: str, finish: str, totals: Totals, at_s: float) -> None:
        heard = self.ended[request_id] = self.open.pop(request_id)
        heard.end = finish, totals
        heard.times.append(at_s)

    def step_launched(self, plan: StepPlan, at_s: float) -> None:
        assert all(chunk.request_id in self.open for chunk in plan.chunks)
        self.plans.append(plan)

    def step_read(self, result: StepResult, at_s: float) -> None:
        self.read.append(result.number)

    def prompt_tokens(self) -> Counter[str]:
        """By request, as its chunks say: those that it computed."""
        num = Counter[str]()
        for plan in self.plans:
            for chunk in plan.chunks[plan.num_decodes :]:
                num[chunk.request_id] += chunk.num_tokens
        return num

    def of(self, asked: Collected) -> Heard:
        return self.ended[asked.request_id]


@pytest.fixture
def book() -> Book:
    return Book()


def seen_by(*books: Book) -> Observers:
    return Observers(requests=books, steps=books)


def test_a_life_is_seen_from_the_arrival_to_the_end(
    make_engine: MakeEngine, prompts: Prompts, book: Book
) -> None:
    engine = make_engine(host_blocks=32, observers=seen_by(book))
    cold = generate(engine, prompts(40))
    forget(engine)
    warm = generate(engine, prompts(40))
    scored = generate(engine, prompts(20, seed=1), max_tokens=0)
    left = submit(engine, prompts(20, seed=2), max_tokens=100)
    until(engine, lambda: bool(left.tokens))
    engine.cancel(left.request_id)
    run_all(engine)
    assert not book.open and book.read == [plan.number for plan in book.plans]
    assert book.of(cold).states == ["waiting", "running"]
    assert book.of(warm).states == ["waiting", "loading", "running"] and book.of(warm).loaded_s > 0
    assert book.of(warm).source == warm.source == KvSource(host=32, computed=8)
    for one in (cold, warm, scored, left):
        heard = book.of(one)
        assert heard.end == (one.finish, Totals(len(one.tokens))) and heard.source == one.source
        assert heard.request.arrival_s <= heard.times[0] and heard.matched_s > 0
        assert all(before <= after for before, after in pairwise(heard.times))
        assert one.source is not None and book.prompt_tokens()[one.request_id] == one.source.computed


def test_a_retraction_and_the_return_are_seen(make_engine: MakeEngine, prompts: Prompts, book: Book) -> None:
    engine = make_engine(blocks=6, overcommit=4.0, block_tokens=8, observers=seen_by(book))
    found = [submit(engine, prompts(6, seed=i), max_tokens=30) for i in range(2)]
    run_all(engine)
    states = [state for one in found for state in book.of(one).states]
    assert states.count("retracted") == engine.stats().retractions > 0
    assert states.count("running") == len(found) + states.count("retracted")
    assert sum(engine.stats().resume.counts) == states.count("retracted"), "first starts are no resumes"


def test_the_end_says_how_many_drafts_were_kept(
    make_engine: MakeEngine, prompts: Prompts, book: Book
) -> None:
    right = generate(make_engine(), prompts(20), max_tokens=40)
    engine, script = scripted(make_engine, ahead=False, observers=seen_by(book))
    found = answered(engine, script, prompts(20), right, max_tokens=40)
    run_all(engine)
    drafted = sum(event.drafted for event in found.events)
    kept = sum(event.accepted for event in found.events)
    assert 0 < kept < drafted and book.of(found).end == ("length", Totals(len(found.tokens), drafted, kept))


def test_an_engine_that_fails_ends_every_life(book: Book) -> None:
    outbox = Outbox(book)
    for name in ("one", "other"):
        outbox.open(Request(name, [1], SamplingParams()), lambda event: None)
    outbox.end_all("the device is gone")
    assert not book.open and [one.end for one in book.ended.values()] == [("error", Totals())] * 2


def test_several_observers_hear_the_same(make_engine: MakeEngine, prompts: Prompts) -> None:
    books = Book(), Book()
    engine = make_engine(observers=seen_by(*books))
    generate(engine, prompts(20))
    assert books[0].ended == books[1].ended != {} and books[0].read == books[1].read != []
