"""The page at GET /, its files and headers, its stream of events and the lives of requests, and who gets
which of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from penstock.config import ServerConfig
from penstock.contract import KvSource, Request, SamplingParams, Totals
from penstock.engine.stats import EngineStats
from penstock.figures import SECONDS_BOUNDS, Histogram, Traffic
from penstock.server import service as service_module
from penstock.server import view, viewers
from penstock.server.lives import MOST_CHANGED, Lives, LivesChange
from penstock.server.seats import Gate, RequestFigures
from penstock.server.viewers import MOST_ROWS, Look, Viewers
from tests.cpu.server.served import DEADLINE_S, MODEL, Served, completion, serving, until

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
KEY = {"authorization": "Bearer k"}
DATA = ("/page/events", "/page/requests/x")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow each other at once, nearly."""
    monkeypatch.setattr(viewers, "PERIOD_S", 0.01)


@contextlib.contextmanager
def watching(served: Served, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The events that one viewer gets."""
    with served.http.stream("GET", "/page/events", headers=headers) as reply:
        assert reply.status_code == 200, reply.read()
        lines = reply.iter_lines()
        yield (json.loads(line.removeprefix("data: ")) for line in lines if line)


def live(lives: Lives, name: str) -> None:
    """A request that ended."""
    now_s = time.monotonic()
    lives.request_arrived(Request(name, [1] * 40, SamplingParams(), arrival_s=now_s, route="chat"), 0.0)
    lives.request_moved(name, "running", now_s + 1)
    lives.request_answered(name, KvSource(device=32, computed=8), 0.0, now_s + 2)
    lives.request_ended(name, "stop", Totals(3), now_s + 3)


# ----------------------------------------------------------------------------------------- who gets the page


def test_a_browser_gets_the_page_and_a_program_what_it_got_before(served: Served) -> None:
    seen, told = served.http.get("/", headers=BROWSER), served.http.get("/")
    assert 'src="page/page.js"' in seen.text and "/openapi.json" not in seen.text
    assert "<script" not in told.text and "/openapi.json" in told.text
    for reply in (seen, told):
        assert reply.headers["vary"] == "accept" and reply.headers["content-type"].startswith("text/html")


def test_the_files_of_the_page_load_nothing_from_elsewhere_and_may_not(served: Served) -> None:
    for path, kind in (("/", "text/html"), *((path, file.kind) for path, file in view.FILES.items())):
        reply = served.http.get(path, headers=BROWSER)
        policy = reply.headers["content-security-policy"]
        assert reply.status_code == 200 and reply.headers["content-type"] == f"{kind}; charset=utf-8"
        assert "default-src 'none'" in policy and "script-src 'self'" in policy
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert reply.headers["x-frame-options"] == "DENY"
        assert reply.headers["x-content-type-options"] == "nosniff"
        names = set(re.findall(r"https?://[^\s\"'`)]+", reply.text)) - {"http://www.w3.org/2000/svg"}
        assert path == "/page/example.txt" or not names
    html = served.http.get("/", headers=BROWSER).text
    loaded = re.findall(r'(?:src|href)="([^"#]+)"', html)
    assert {f"/{one}" for one in loaded if not one.startswith("data:")} <= set(view.FILES)
    assert not re.search(r"<style|style=|\son\w+=|<script[^>]*>[^<]", html), "the policy forbids these"


def test_text_of_others_never_becomes_markup(served: Served) -> None:
    """Chromium tries it: tests/page."""
    script = served.http.get("/page/page.js").text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|Function\(", script)


def test_without_the_page_a_browser_gets_what_programs_get() -> None:
    with serving(has_viewers=False) as served:
        assert served.http.get("/", headers=BROWSER).text == served.http.get("/").text
        for path in ("/page/page.css", "/page/page.js", "/page/example.txt", *DATA):
            with served.http.stream("GET", path) as missing:
                assert missing.status_code == 404


def test_with_a_key_the_page_says_nothing_until_it_is_given() -> None:
    lives = Lives()
    live(lives, "mine")
    with serving(lives=lives, api_key="k", served_names=("secret-model",)) as served:
        for path in view.FILES:
            reply = served.http.get(path, headers=BROWSER)
            assert reply.status_code == 200 and "secret-model" not in reply.text
        assert served.http.get("/").status_code == 401, "a program gets figures there"
        for path, headers in itertools.product((*DATA, "/page/requests/mine"), (None, BROWSER)):
            with served.http.stream("GET", path, headers=headers) as refused:
                assert refused.status_code == 401
        assert served.http.get("/page/requests/mine", headers=KEY).json()["finish"] == "stop"
        assert served.http.options("/").status_code == 405
        with watching(served, **KEY) as events:
            assert next(events)["facts"]["models"] == ["secret-model"]
    with serving(api_key="k", has_viewers=False) as served:
        assert served.http.get("/", headers=BROWSER).status_code == 401


# ------------------------------------------------------------------------------------------------- the stream


def test_a_viewer_gets_all_and_then_what_changes() -> None:
    lives = Lives()
    live(lives, "before")
    with serving(lives=lives) as served, watching(served) as events:
        first = next(events)
        assert first["facts"]["models"] == [MODEL] and [row["id"] for row in first["all"]] == ["before"]
        live(lives, "after")
        second = next(event for event in events if event["changed"])
        assert "facts" not in second and [row["id"] for row in second["changed"]] == ["after"]
        (row,) = second["changed"]
        assert (row["state"], row["source"]["device"], row["tokens"]) == ("stop", 32, 3)
        assert next(events)["changed"] == []


def test_the_figures_are_those_of_the_metrics(served: Served) -> None:
    for prompt, num in (("p" * 40, 3), ("p" * 40, 5)):
        served.http.post("/v1/completions", json=completion(prompt, max_tokens=num))
    served.http.post("/v1/completions", json={"model": "no"})
    with watching(served) as events:
        figures = next(events)["figures"]
    assert figures["prompt_tokens"] == served.engine.stats().prompt_tokens
    assert (figures["generated_tokens"], figures["status"]) == (8, "ready")
    assert figures["finished"] == {"length": 2} and sum(figures["refused"].values()) == 1
    assert figures["tiers"]["device"]["blocks"]["free"] > 0 and figures["flows"] == []
    assert figures["failures"] is None and figures["drafts"] is None, "not zero: there is no such thing"


def test_ten_viewers_cost_one_look(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "PERIOD_S", DEADLINE_S)
    stats, calls = served.engine.stats, []
    monkeypatch.setattr(served.engine, "stats", lambda: calls.append(1) or stats())
    with contextlib.ExitStack() as stack:
        firsts = [next(stack.enter_context(watching(served))) for _ in range(10)]
    assert len(calls) == 1 and all(first["figures"] == firsts[0]["figures"] for first in firsts)


def test_without_a_viewer_nothing_is_looked_at(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    stats, calls = served.engine.stats, []
    monkeypatch.setattr(served.engine, "stats", lambda: calls.append(1) or stats())
    served.http.get("/health")
    assert not calls
    with watching(served) as events:
        next(events), next(events)
    viewing = served.service.viewers
    until(lambda: not viewing.num, "the viewer has left")
    num = len(calls) + 1  # one look may be under way
    for _ in range(100):
        served.http.get("/health")
    assert len(calls) <= num


def test_more_viewers_than_seats_are_refused_until_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MOST_VIEWERS", 2)
    with serving() as served:
        with watching(served) as one, watching(served) as other:
            next(one), next(other)
            with served.http.stream("GET", "/page/events") as refused:
                assert refused.status_code == 429 and "2 concurrent viewers" in refused.read().decode()
            assert served.http.get("/health").status_code == 200
        until(lambda: not served.service.viewers.num, "the seats are free")
        with watching(served) as events:
            assert "facts" in next(events)


def test_an_odd_query_of_the_stream_is_refused(served: Served) -> None:
    with served.http.stream("GET", "/page/events?since=3") as refused:
        assert refused.status_code == 400
    assert served.http.head("/page/events").status_code == 200


def test_a_stopping_server_ends_the_streams_at_once() -> None:
    """Were they left, the server would wait for them for an hour."""
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(serving(shutdown_s=3600.0))
        events = stack.enter_context(watching(served))
        next(events)
        served.server.should_exit = True
        assert sum(1 for _ in itertools.islice(events, 2000)) < 2000, "it ends"


def test_an_engine_that_does_not_answer_is_said_and_not_shown_as_zero(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watching(served) as events:
        assert next(events)["figures"]["status"] == "ready"
        with monkeypatch.context() as patched:
            patched.setattr(served.engine, "stats", lambda: 1 / 0)
            silent = next(
                event for event in itertools.islice(events, 1000) if "requests" not in event["figures"]
            )
            assert set(silent["figures"]) == {"at", "status"} and silent["changed"] == []
        assert next(event for event in events if "requests" in event["figures"])


def test_a_failed_engine_is_said(served: Served) -> None:
    with watching(served) as events:
        next(events)
        served.loop.fail(RuntimeError("out of order"))
        assert (
            "out of order" in next(e for e in events if "requests" not in e["figures"])["figures"]["status"]
        )


def test_the_log_is_not_flooded_by_the_page(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.access")
    for path in ("/page/page.js", "/page/page.css"):
        served.http.get(path)
    with watching(served) as events:
        next(events)
    served.http.get("/version")
    until(lambda: "path=/version" in caplog.text, "the log is written")
    assert "path=/page" not in caplog.text
    served.http.get("/page/requests/none")
    until(lambda: "path=/page/requests/none" in caplog.text, "an error is logged")


def test_the_life_of_a_request_is_found_by_its_id_and_says_nothing_else() -> None:
    lives = Lives()
    live(lives, "one")
    with serving(lives=lives) as served:
        life = served.http.get("/page/requests/one").json()
        assert [state for state, _ in life["states"]] == ["waiting", "running"]
        assert life["source"]["device"] == 32 and life["totals"][0] == 3
        missing = served.http.get("/page/requests/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")


# ----------------------------------------------------------------------------- the newest, and nothing queued


def look_at(change: LivesChange, **more: Any) -> Look:
    empty = Histogram(SECONDS_BOUNDS)
    known = {
        "requests": {},
        "prompt_tokens": {},
        "kv_blocks": {},
        "blocked_s": {},
        "sanitizer": {},
        "cache": {},
    }
    counted = {"generated_tokens": 0, "retractions": 0, "steps": 0, "load_exposed_s": 0.0, "traffic": None}
    stats = EngineStats(**known, **counted, ttft=empty, inter_token=empty, resume=empty)
    return Look(dataclasses.replace(stats, **more), RequestFigures(), change, None)


class Reader:
    """One viewer, who takes an event when the test says so."""

    def __init__(self, viewing: Viewers) -> None:
        self.taken: list[dict[str, Any]] = []
        self._may_take = asyncio.Semaphore(0)
        self._viewing = viewing
        self._news = asyncio.Event()

    async def run(self) -> None:
        with self._viewing.seat():
            await self._viewing.follow(self._take)

    async def _take(self, data: bytes) -> None:
        self.taken.append(json.loads(data.removeprefix(b"data: ")))
        self._news.set()
        await self._may_take.acquire()

    async def next(self) -> dict[str, Any]:
        await asyncio.wait_for(self._news.wait(), DEADLINE_S)
        self._news.clear()
        self._may_take.release()
        return self.taken[-1]


@contextlib.asynccontextmanager
async def reading(look: Callable[[int], Awaitable[Look]], num: int) -> AsyncIterator[list[Reader]]:
    viewing = Viewers(Gate(8, "viewers"), look, dict)
    readers = [Reader(viewing) for _ in range(num)]
    tasks = [asyncio.create_task(reader.run()) for reader in readers]
    yield readers
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_slow_viewer_gets_the_newest_and_all_of_it() -> None:
    lives = Lives()

    async def look(since: int) -> Look:
        live(lives, f"{since}")
        return look_at(lives.changed(since))

    async def run() -> None:
        async with reading(look, 2) as (quick, slow):
            assert "all" in await quick.next()
            for _ in range(5):
                assert len((await quick.next())["changed"]) == 1
            assert len(slow.taken) == 1, "nothing is sent to it while it reads"
            assert len((await slow.next())["all"]) == 1
            newest = await slow.next()
            assert len(newest["all"]) >= 6, "not the second one: the newest"

    asyncio.run(run())


def test_too_many_changes_at_once_leave_no_request_as_it_was() -> None:
    """One that ended among them would stay open on the page for ever."""
    lives = Lives()
    lives.request_arrived(Request("open", [1], SamplingParams()), 0.0)

    async def look(since: int) -> Look:
        if since:
            lives.request_ended("open", "stop", Totals(3), time.monotonic())
            for number in range(MOST_CHANGED):
                live(lives, f"{number}")
        return look_at(lives.changed(since))

    async def run() -> None:
        async with reading(look, 1) as (reader,):
            assert [row["id"] for row in (await reader.next())["all"]] == ["open"]
            rows = (await reader.next())["all"]
            assert len(rows) == MOST_ROWS and "open" not in {row["id"] for row in rows}

    asyncio.run(run())


def test_the_rows_that_are_kept_are_bounded_and_open_requests_stay() -> None:
    lives = Lives()
    lives.request_arrived(Request("open", [1], SamplingParams()), 0.0)

    async def look(since: int) -> Look:
        for number in range(MOST_ROWS // 2):
            live(lives, f"{since}-{number}")
        return look_at(lives.changed(since))

    async def run() -> None:
        async with reading(look, 2) as (quick, slow):
            for _ in range(6):
                await quick.next()
            await slow.next()
            rows = (await slow.next())["all"]
            assert len(rows) == MOST_ROWS and "open" in {row["id"] for row in rows}

    asyncio.run(run())


def test_what_moves_and_what_fails_is_shown_as_it_is_counted() -> None:
    ends = ("host", "remote")
    traffic = Traffic({ends: 7}, {}, {("remote", "host"): 2}, {("remote", "store"): 3}, {"broken": 4}, 0)
    traffic = dataclasses.replace(traffic, usable={"remote": False}, checksum_failures={"ssd": 1})
    blocks = {"device": {"free": 3, "idle": 1}, "remote": {}}
    shown = viewers.figures_of(
        look_at(LivesChange(0, [], True), traffic=traffic, kv_blocks=blocks, drafted=(4, 2), accepted=(3, 1))
    )
    assert shown["flows"] == [("host", "remote", 7, 0), ("remote", "host", 0, 2)]
    assert shown["tiers"]["remote"] == {"blocks": None, "usable": False}, "its fill is not known"
    assert shown["tiers"]["device"] == {"blocks": {"free": 3, "idle": 1}, "usable": None}
    assert (shown["failures"], shown["skipped_saves"]) == ({"remote: store": 3}, {"broken": 4})
    assert shown["checksum_failures"] == {"ssd": 1} and shown["drafts"] == [(4, 2), (3, 1)]


def test_the_sources_that_the_page_names_are_all_there_are(served: Served) -> None:
    script = served.http.get("/page/page.js").text
    (names,) = re.findall(r"const SOURCES = \[(.*)\];", script)
    assert re.findall(r'"(\w+)"', names) == list(KvSource.__slots__)
    assert f"MOST_ROWS = {MOST_ROWS};" in script


def test_the_page_is_on_by_default() -> None:
    assert ServerConfig().has_viewers and not ServerConfig(has_viewers=False).has_viewers
