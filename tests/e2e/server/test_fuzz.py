"""Random requests to every route of a real server: no answer that the API does not promise, and nothing is
left behind.

`PENSTOCK_FUZZ_S` seconds instead of a few rounds, `PENSTOCK_FUZZ_SEED` for other ones: see `make fuzz`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from penstock.server import view
from penstock.server.routes import OPEN_PATHS
from tests.e2e.server import fuzz_cases as cases
from tests.e2e.server.fuzz_cases import Bytes, Case
from tests.e2e.server.fuzz_oracles import Finding, generated, need, same
from tests.e2e.server.fuzz_target import Target, Unsendable

SECONDS = float(os.environ.get("PENSTOCK_FUZZ_S", "0"))
SEED = int(os.environ.get("PENSTOCK_FUZZ_SEED", "0"))
FIRST = int(os.environ.get("PENSTOCK_FUZZ_ROUND", "0"))
PHASES = (Phase.generate, Phase.shrink)
NUM_ROUNDS = 1  # in `make test`


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("fuzz")) as started:
        yield started


# ------------------------------------------------------------------------------------------- one of each kind


def ask(target: Target, case: Case) -> None:
    note(case.curl(target.url))
    target.judged(case)


def ask_twice(target: Target, case: Case) -> None:
    """A legal request, then the same one streamed where it was whole and whole where it was streamed: one
    answer."""
    note(case.curl(target.url))
    fields = {name: value for name, value in (case.fields or {}).items() if name != "stream_options"}
    other = cases.legal_case(case.path, {**fields, "stream": not fields.get("stream")})
    first, second = target.judged(case), target.judged(other)
    if (first.status, second.status) == (200, 200):  # 429: somebody who hung up still has the seats
        same(generated(case, first).choices, generated(other, second).choices)


def ask_together(target: Target, crowd: list[Case]) -> None:
    for case in crowd:
        note(case.curl(target.url))
    with ThreadPoolExecutor(len(crowd)) as pool:
        for answer in [pool.submit(target.judged, case) for case in crowd]:
            with contextlib.suppress(Unsendable):
                answer.result()


def write(target: Target, raw: Bytes) -> None:
    note(raw.shell(*target.address))
    target.write(raw)


class Kind(NamedTuple):
    """One kind of trial."""

    strategy: st.SearchStrategy[Any]
    act: Callable[[Target, Any], None]
    num_examples: int  # in one round
    # statuses that the rounds of `make test` get: a kind that only meets refusals finds little
    reached: set[int]


KINDS = {
    "field": Kind(cases.one_field(), ask, 150, {200, 400, 404}),
    "unknown": Kind(cases.absent_or_unknown(), ask, 40, {400}),
    "body": Kind(cases.wild_body(), ask, 150, {200, 400, 413, 415}),
    "route": Kind(cases.any_route(), ask, 150, {200, 400, 404, 405}),
    "legal": Kind(cases.legal, ask_twice, 15, {200}),
    "together": Kind(cases.crowd, ask_together, 10, {200, 400}),
    "tcp": Kind(cases.tcp(), write, 40, {200, 400}),
}


def fuzz(target: Target, kind: str, number: int) -> None:
    """One round of one kind. What fails is tried again in smaller forms, and the smallest is shown as a
    command for a shell."""
    strategy, act, num_examples, _ = KINDS[kind]

    @seeded(f"{SEED} {number} {kind}")
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=PHASES,
    )
    @given(strategy)
    def trial(case: Any) -> None:
        try:
            act(target, case)
            target.rest.check_log()
        except Unsendable:
            return
        except Finding:
            target.recover()
            raise

    trial()


@pytest.mark.parametrize("kind", KINDS)
def test_no_request_gets_an_answer_that_it_should_not(target: Target, kind: str) -> None:
    print(f"seed {SEED}")
    target.seen.clear()
    began_s = time.monotonic()
    number = FIRST
    while number < FIRST + NUM_ROUNDS if not SECONDS else time.monotonic() - began_s < SECONDS / len(KINDS):
        try:
            fuzz(target, kind, number)
            target.rest.check()
        except BaseException:
            print(f"again: make fuzz FUZZ_SEED={SEED} FUZZ_ROUND={number} ARGS='-k {kind}'")
            target.start()
            raise
        number += 1
    print(f"{kind}: {number - FIRST} rounds, {sum(target.seen.values())} answers: {dict(target.seen)}")
    need(SECONDS or KINDS[kind].reached <= set(target.seen), f"only {set(target.seen)} are reached")


def test_nothing_but_the_probes_answers_without_the_key(tmp_path: Path) -> None:
    key = "the-right-key"
    with Target(tmp_path, key) as target:

        @seeded(SEED)
        @settings(
            max_examples=50,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=PHASES,
        )
        @given(
            cases.any_route() | cases.wild_body(),
            st.sampled_from(["", "Bearer", f"Bearer {key}x", f"Basic {key}", "Bearer \xa0", key]),
        )
        def trial(case: Case, said: str) -> None:
            headers = [(name, value) for name, value in case.headers if name != "Authorization"]
            wrong = dataclasses.replace(case, headers=(*headers, ("Authorization", said)))
            note(wrong.curl(target.url))
            with contextlib.suppress(Unsendable):
                answer = target.ask(wrong)
                is_browser = any(name == "Accept" and "text/html" in value for name, value in headers)
                files = set(view.FILES) if is_browser else set(view.FILES) - {"/"}
                open_to_all = case.path in OPEN_PATHS | files or case.method == "OPTIONS"
                need((answer.status == 401) == (not open_to_all), f"status {answer.status} without the key")
                need(key.encode() not in answer.body, "an answer has the key")

        trial()
        need(key not in target.log.read_text(), "the log has the key")
        target.rest.wait_idle()


def test_every_route_and_every_body_is_fuzzed() -> None:
    from penstock.server import messages, responses, schema

    posted = {path for path, methods in cases.ROUTES.items() if "POST" in methods}
    assert posted == set(cases.BODIES)
    for module in (schema, messages, responses):
        kinds = {kind for name, kind in vars(module).items() if name.endswith("Body") and name != "Body"}
        assert kinds <= set(cases.BODIES.values())
    assert set(cases.BASES) == set(cases.BODIES)
