"""Snapshots of a real server in processes of its own: killed with -9 and started again on the same
directory."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import penstock

DEADLINE_S = 120.0
TINY = ("--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--device-kv-blocks", "128")
STORY = "Once upon a time, in a village by the sea, there lived a clockmaker who had never been late. " * 6
NEXT = " One"  # with its answer it fills no block

StartServer = Callable[..., tuple["subprocess.Popen[str]", str]]


@pytest.fixture(autouse=True)
def same_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers run the tree that these tests are of, whatever is installed."""
    monkeypatch.setenv("PYTHONPATH", str(Path(penstock.__file__).parents[1]))


def ask(http: httpx.Client, prompt: str, **fields: Any) -> tuple[list[str], dict[str, Any]]:
    question = {
        "model": "tiny-llama",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": 0,
        "ignore_eos": True,
        **fields,
    }
    reply = http.post("/v1/completions", json=question).raise_for_status().json()
    return reply["choices"][0]["logprobs"]["tokens"], reply["usage"]


def chat(http: httpx.Client, messages: list[dict[str, str]], **fields: Any) -> tuple[str, dict[str, Any]]:
    question = {"model": "tiny-llama", "messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    reply = http.post("/v1/chat/completions", json=question).raise_for_status().json()
    return reply["choices"][0]["message"]["content"], reply["usage"]


def wait_cached(http: httpx.Client, name: str, num_tokens: int) -> None:
    """The directory is read in the background."""
    by_s = time.monotonic() + DEADLINE_S
    while http.get(f"/v1/snapshots/{name}").raise_for_status().json()["cached_tokens"] < num_tokens:
        assert time.monotonic() < by_s, "the snapshot's blocks are not found"
        time.sleep(0.02)


def test_a_conversation_goes_on_after_the_server_was_killed(
    start_server: StartServer, tmp_path: Path
) -> None:
    disk = ("--kv-offload-ssd-dir", str(tmp_path / "ssd"), "--kv-offload-ssd-gib", "0.2", "--sanitize=strict")
    process, url = start_server(*TINY, *disk)
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        told, usage = ask(http, STORY, session_id="story", max_tokens=26)
        text = (
            http.post("/v1/snapshots", json={"session_id": "story", "name": "story", "ttl_s": 3600})
            .raise_for_status()
            .json()
        )
        assert text["tokens"] == usage["prompt_tokens"] + 26 == usage["total_tokens"] and text[
            "stored_in"
        ] == ["ssd"]
        cold, _ = ask(http, NEXT, snapshot="story")
        messages = [
            {"role": "system", "content": STORY},
            {"role": "user", "content": "Who lived in the village?"},
        ]
        answer, _ = chat(http, messages, cache_salt="mine")
        messages.append({"role": "assistant", "content": answer})
        talk = (
            http.post("/v1/snapshots", json={"messages": messages, "name": "talk", "cache_salt": "mine"})
            .raise_for_status()
            .json()
        )
        assert talk["chat"] and talk["cached_tokens"] >= 0.9 * talk["tokens"]
        after = [{"role": "user", "content": "Was he ever late?"}]
        whole, counted = chat(http, [*messages, *after], cache_salt="mine")
        assert len(told) == 26
        process.kill()
        assert process.wait(DEADLINE_S) == -9
    _, url = start_server(*TINY, *disk)
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        assert [one["id"] for one in http.get("/v1/snapshots").json()["data"]] == ["story"]
        assert [one["id"] for one in http.get("/v1/snapshots?cache_salt=mine").json()["data"]] == ["talk"]
        wait_cached(http, "story", text["cached_tokens"])
        wait_cached(http, "talk?cache_salt=mine", talk["cached_tokens"])
        warm, usage = ask(http, NEXT, snapshot="story")
        assert warm == cold
        assert (
            usage["prompt_tokens_details"]["kv_source"]["ssd"]
            == text["cached_tokens"]
            >= 0.97 * (text["tokens"] - 16)
        )
        again, usage = chat(http, after, snapshot="talk", cache_salt="mine")
        assert again == whole and usage["prompt_tokens"] == counted["prompt_tokens"]
        assert usage["prompt_tokens_details"]["kv_source"]["ssd"] >= 0.9 * talk["tokens"]
        assert http.get("/cache/stats").json()["snapshots"]["pinned_blocks"] > 0
        assert http.delete("/v1/snapshots/talk").status_code == 404, "it is another tenant's"
        assert http.delete("/v1/snapshots/talk?cache_salt=mine").status_code == 200
        assert http.get("/v1/snapshots/talk?cache_salt=mine").status_code == 404


def test_a_server_killed_while_snapshots_are_taken_leaves_each_whole_or_not_at_all(
    start_server: StartServer, tmp_path: Path
) -> None:
    disk = ("--kv-offload-ssd-dir", str(tmp_path / "ssd"), "--kv-offload-ssd-gib", "0.2")
    process, url = start_server(*TINY, *disk)
    taken: list[str] = []
    some = threading.Event()

    def take_many() -> None:
        with httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
            for number in range(10_000):
                try:
                    reply = http.post(
                        "/v1/snapshots",
                        json={"prompt": STORY, "name": f"s{number}", "tokens": 16 + number % 100},
                    )
                except httpx.HTTPError:
                    return
                if reply.status_code == 200:
                    taken.append(f"s{number}")
                    if len(taken) >= 20:
                        some.set()

    with httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        cold, _ = ask(http, STORY)
        taking = threading.Thread(target=take_many)
        taking.start()
        assert some.wait(DEADLINE_S)
        process.kill()
        assert process.wait(DEADLINE_S) == -9
        taking.join(DEADLINE_S)
    _, url = start_server(*TINY, *disk)
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        stats = http.get("/cache/stats").json()["snapshots"]
        listed = {one["id"] for one in http.get("/v1/snapshots").json()["data"]}
        assert set(taken) <= listed and len(listed) <= len(taken) + 1, (
            "what was answered is there, and what was under way may be"
        )
        assert stats["damaged"] == 0 and stats["known"] == len(listed)
        assert not list((tmp_path / "ssd").glob("*.new"))
        assert ask(http, STORY)[0] == cold


def test_the_page_on_snapshots_is_tried(start_server: StartServer, tmp_path: Path) -> None:
    """Its commands in their order against one server, and its program."""
    page = (Path(__file__).parents[2] / "docs" / "snapshots.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    lines = [
        line
        for language, text in blocks
        if language == "sh"
        for line in text.replace("\\\n", " ").splitlines()
    ]
    found = [shlex.split(line) for line in lines if line.strip()]
    serve = next(words for words in found if words[1:2] == ["serve"])
    directory = serve.index("--kv-offload-ssd-dir") + 1
    flags = [*serve[2:directory], str(tmp_path / "ssd"), "--kv-offload-ssd-gib", "0.2", *TINY]
    _, url = start_server(*flags, "--served-model-name", "smollm2-135m")
    asked = [words for words in found if words[0] == "curl"]
    assert len(asked) == 6
    for words in asked:
        method, data = ("POST", words[words.index("-d") + 1].encode()) if "-d" in words else ("GET", None)
        method = words[words.index("-X") + 1] if "-X" in words else method
        (path,) = [word.removeprefix("http://127.0.0.1:8000") for word in words if word.startswith("http")]
        reply = httpx.request(method, url + path, content=data, timeout=DEADLINE_S)
        assert reply.status_code == 200, f"{words}: {reply.text}"
    (program,) = [text for language, text in blocks if language == "python"]
    program = program.replace(
        'LLM("smollm2-135m")', 'LLM("tiny-llama", load_format="dummy", device="cpu", show_progress=False)'
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ran.returncode == 0 and "['talk']" in ran.stdout, ran.stderr


def test_every_call_reaches_the_engine_process_with_whose_snapshot_it_is(start_server: StartServer) -> None:
    _, url = start_server(*TINY)
    prompt, mine = list(range(70)), {"cache_salt": "mine"}
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 2, **mine}
        http.post("/v1/completions", json=body).raise_for_status()
        taken = (
            http.post(
                "/v1/snapshots", json={"prompt": prompt, "name": "talk", "tokens": 40, "ttl_s": 60, **mine}
            )
            .raise_for_status()
            .json()
        )
        assert (taken["id"], taken["tokens"], taken["cached_tokens"]) == ("talk", 40, 32) and taken[
            "expires_at"
        ] is not None
        assert http.get("/v1/snapshots").json()["data"] == [] and http.get(
            "/v1/snapshots", params=mine
        ).json()["data"] == [taken]
        assert (
            http.get("/v1/snapshots/talk").status_code == 404
            and http.get("/v1/snapshots/talk", params=mine).json() == taken
        )
        for salt, status in (({}, 404), (mine, 200)):
            asked = {"model": "tiny-llama", "prompt": "x", "snapshot": "talk", "max_tokens": 1, **salt}
            assert http.post("/v1/completions", json=asked).status_code == status
            assert http.delete("/v1/snapshots/talk", params=salt).status_code == status
