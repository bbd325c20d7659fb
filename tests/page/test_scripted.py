"""The page in Chromium before a scripted engine: a thousand requests, bad names, a key, a lost server."""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

from penstock.contract import KvSource, Request, SamplingParams, Totals
from penstock.figures import ExpertFigures, Traffic
from penstock.server import viewers
from penstock.server.lives import Lives
from penstock.server.viewers import MOST_ROWS
from tests.cpu.server.served import completion, serving
from tests.page.conftest import OpenPage, expect
from tests.page.environment import HOME
from tests.support.scripted_engine import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]


def live(lives: Lives, name: str, is_open: bool = False, route: str = "chat") -> None:
    now_s = time.monotonic()
    lives.request_arrived(Request(name, [1] * 40, SamplingParams(), arrival_s=now_s - 9, route=route), 0.5)
    lives.request_moved(name, "loading", now_s - 7)
    lives.request_moved(name, "running", now_s - 6)
    lives.request_answered(name, KvSource(device=16, host=16, computed=8), 1.0, now_s - 4)
    if not is_open:
        lives.request_ended(name, "stop", Totals(30, 10, 8), now_s - 2)


def test_the_types_of_the_script_are_right() -> None:
    options = [
        "--noEmit",
        "--allowJs",
        "--checkJs",
        "--strict",
        "--target",
        "es2022",
        "--lib",
        "es2022,dom,dom.iterable",
    ]
    script = ROOT / "src" / "penstock" / "server" / "page" / "page.js"
    ran = subprocess.run([HOME / "node_modules/.bin/tsc", *options, script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_a_request_that_is_chosen_shows_its_life(open_page: OpenPage) -> None:
    lives = Lives()
    live(lives, "first")
    live(lives, "second", is_open=True)
    with serving(lives=lives) as served:
        page = open_page(served.url)
        expect(page.locator("#rows tr")).to_have_count(2)
        expect(page.locator("#rows tr").first).to_contain_text("running")  # open ones come first
        page.locator("#rows button").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(page.locator("#life h3")).to_contain_text("first")
        expect(page.locator("#rows tr").nth(1).locator("button")).to_have_attribute("aria-pressed", "true")
        told = page.locator("#life p")
        for words in (
            "Waited 1.5 s.",
            "Of 40 prompt tokens matched: 16 in device memory, 16 in host memory.",
            "Loaded 16 tokens in 1 s.",
            "Computed 8 in 2 s.",
            "First token after 5 s.",
            "Decoded 30 tokens in 2 s.",
            "Of 10 drafts 8 were kept.",
            "Ended: stop.",
        ):
            expect(told).to_contain_text(words)
        assert page.locator(".phases li").all_inner_texts() == [
            "matched\n500 ms",
            "waiting\n1.5 s",
            "loading\n1 s",
            "computing\n2 s",
            "decoding\n2 s",
        ]
        live(lives, "third", is_open=True)  # its row comes first
        expect(page.locator("#rows tr")).to_have_count(3)
        expect(page.locator("#rows button:focus")).to_have_attribute("data-id", "first")
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        expect(told).to_contain_text("It still runs.")
        expect(page.locator("#rows tr").first).to_contain_text("–")  # its length is not known, and not 0


def test_a_thousand_requests_leave_the_page_as_large_as_it_was(
    open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "PERIOD_S", 0.05)
    lives = Lives()
    with serving(lives=lives) as served:
        page = open_page(served.url)
        sizes = []
        for number in range(1500):
            live(lives, f"request {number}")
            if number % 100 == 99:  # few enough that only these are sent
                newest = page.locator(f'#rows button[data-id="request {number}"]')
                expect(newest).to_have_count(1)
                sizes.append(page.evaluate("document.getElementsByTagName('*').length"))
        assert page.locator("#rows tr").count() == MOST_ROWS
        assert sizes[1] == sizes[-1]


def test_names_of_others_are_text(open_page: OpenPage) -> None:
    bad = "<img src=x onerror=\"document.title='taken'\">"
    lives = Lives()
    live(lives, bad, route=bad)
    engine = ScriptedEngine(name=bad)
    with serving(engine, lives=lives) as served:
        page = open_page(served.url)
        expect(page.locator("#model")).to_have_text(bad)
        page.locator("#rows button").first.click()
        expect(page.locator("#life h3")).to_contain_text(bad)
        page.fill("#question", bad)
        page.click("#send")
        expect(page.locator("#said .asked")).to_have_text(bad)
        expect(page.locator("#said .from b")).to_have_count(1)
        assert page.locator("img").count() == 0 and page.title() == "Penstock"


def test_a_key_is_asked_for_and_kept_in_this_tab_only(open_page: OpenPage) -> None:
    with serving(api_key="right", served_names=("secret-model",)) as served:
        page = open_page(served.url, expected="401")
        expect(page.locator("#key")).to_be_visible()
        assert "secret-model" not in page.content()
        page.fill("#key-input", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#link-text")).to_have_text("The server refused that key")
        page.fill("#key-input", "right")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("secret-model")
        page.fill("#question", "hello")
        page.click("#send")
        expect(page.locator("#said .from")).to_contain_text("prompt tokens")
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        assert served.url + "/" == page.url, "it is in no address"
        page.click("#forget")
        expect(page.locator("#key")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0


def test_a_lost_server_is_said_and_found_again(open_page: OpenPage) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with serving(port=port) as served:
        served.http.post("/v1/completions", json=completion("p" * 40, max_tokens=3))
        page = open_page(served.url, expected="Failed to load resource")
        expect(page.locator("body")).to_have_class("live")
        expect(page.locator("#ends")).to_contain_text("ended: length")
    expect(page.locator("body")).to_have_class("lost")
    expect(page.locator("#link-text")).to_contain_text(
        re.compile("Connection lost, showing figures of ..:..:..")
    )
    expect(page.locator("#retry")).to_contain_text(re.compile(r"retrying in \d+ s"))
    expect(page.locator("#ends")).to_contain_text("ended: length")  # the last figures stay
    with serving(port=port):
        expect(page.locator("body")).to_have_class("live")
        expect(page.locator("#ends")).not_to_contain_text("ended: length")


def test_a_paused_page_stands_still(open_page: OpenPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "PERIOD_S", 0.05)
    with serving() as served:
        page = open_page(served.url)
        expect(page.locator("body")).to_have_class("live")
        page.click("#pause")
        served.http.post("/v1/completions", json=completion("p" * 40, max_tokens=3))
        num = page.evaluate("performance.getEntriesByType('resource').length")
        expect(page.locator("#link-text")).to_contain_text("Paused")
        with page.expect_response("**/page/example.txt"):
            page.click("#try")  # events came meanwhile
        assert num and page.locator("#ends div").count() == 1
        page.click("#pause")
        expect(page.locator("#ends")).to_contain_text("ended: length")


def test_tiers_states_drafts_and_experts_are_shown_as_they_are(
    open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine()
    traffic = Traffic(
        {}, {}, {("device", "host"): 2}, {("remote", "store"): 3}, {}, 0, usable={"remote": False}
    )
    blocks = {"device": {"free": 50, "active": 50}, "host": {"free": 100, "idle": 0}, "remote": {}}
    kept = {"states": {"free": 3, "idle": 1}}
    experts = ExpertFigures(num_slots=8, num_experts=32, hit=60, missed=20, copied_bytes=5_000_000)
    shown = dataclasses.replace(
        engine.stats(),
        kv_blocks=blocks | kept,
        traffic=traffic,
        drafted=(4, 0),
        accepted=(3, 0),
        experts=experts,
    )
    monkeypatch.setattr(engine, "stats", lambda: shown)
    monkeypatch.setattr(ScriptedEngine, "tiers", ("device", "host", "remote"))
    with serving(engine) as served:
        page = open_page(served.url)
        expect(page.locator(".tier .level")).to_have_text(
            ["50 % full", "0 % full", "fenced off", "25 % full"]
        )
        expect(page.locator(".host .flow.there")).to_contain_text("2 in flight")
        expect(page.locator(".states")).to_contain_text("of 4 states: 3 free, 1 idle")
        assert page.locator(".states .pipe").is_hidden() and page.locator(".device .pipe").is_hidden()
        expect(page.locator("#failures")).to_contain_text("failed transfers: remote: store")
        expect(page.locator("#failures")).to_contain_text("open: fenced off")
        expect(page.locator("#failures")).not_to_contain_text("breaker of states")
        expect(page.locator("#drafts")).to_contain_text("75 % of 4 kept")
        expect(page.locator("#drafts")).to_contain_text("none yet")
        expect(page.locator("#experts")).to_contain_text("8 of 32")
        expect(page.locator("#experts")).to_contain_text("75 % of 80 wanted")
        expect(page.locator("#experts")).to_contain_text("5.0 MB")


def test_an_engine_that_does_not_answer_is_not_shown_as_one_that_does_nothing(
    open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as served:
        page = open_page(served.url)
        expect(page.locator("body")).to_have_class("live")
        served.loop.fail(RuntimeError("out of order"))
        expect(page.locator("#link-text")).to_contain_text("The engine does not answer")
        expect(page.locator("body")).to_have_class("lost")
