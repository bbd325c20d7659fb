"""Snapshots over HTTP, before a real engine with tiers, under the sanitizer: taken, listed, continued,
deleted; what they pin, whose they are, and what is refused."""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.contract import SnapshotContent
from penstock.kv.blocks.key import tenant_of
from penstock.kv.tiers import manifest as format_
from penstock.models.tokenizer import ByteTokenizer
from penstock.server import schema
from penstock.server.generate import prompts_of
from penstock.server.service import Generations, Rules
from tests.cpu.server.apis import APIS, CHAT
from tests.cpu.server.served import until
from tests.cpu.server.tiered_server import MODEL, PROMPT, Tiered, error_of, tiered
from tests.store_servers import valkey_or_skip

OTHER = [9 + 7 * i % 450 for i in range(70)]
MORE = [3, 5, 8, 13]
TURN = [{"role": "user", "content": "open the gate, and tell me how far it is open by now"}]


@pytest.fixture
def server() -> Iterator[Tiered]:
    with tiered() as running:
        yield running


def take(server: Tiered, status: int = 200, **fields: Any) -> dict[str, Any]:
    reply = server.http.post("/v1/snapshots", json=fields)
    assert reply.status_code == status, reply.text
    found: dict[str, Any] = reply.json() if status == 200 else error_of(reply)
    return found


def ask(server: Tiered, prompt: list[int], status: int = 200, **fields: Any) -> Any:
    """Tokens and where the prompt's KV came from, or the error."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": True,
        **fields,
    }
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == status, reply.text
    if status != 200:
        return error_of(reply)
    answer = reply.json()
    return answer["choices"][0]["logprobs"]["tokens"], answer["usage"]["prompt_tokens_details"]["kv_source"]


def all_of(server: Tiered, **query: str) -> dict[str, Any]:
    reply = server.http.get("/v1/snapshots", params=query)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def stats(server: Tiered) -> dict[str, int]:
    found: dict[str, int] = server.http.get("/cache/stats").json()["snapshots"]
    return found


def forget(server: Tiered, *tiers: str) -> None:
    assert server.http.post("/cache/flush").status_code == 200
    for tier in tiers:
        assert server.http.post(f"/cache/reset?tier={tier}").status_code == 200


# ---------------------------------------------------------------------------------------------- a life of one


def test_a_prompt_is_taken_continued_and_deleted(server: Tiered) -> None:
    ask(server, PROMPT)
    card = take(server, prompt=PROMPT, name="talk", ttl_s=3600)
    assert card["id"] == "talk" and card["object"] == "snapshot" and card["pinned"] is True
    assert (card["tokens"], card["cached_tokens"], card["blocks"]) == (70, 64, 4)
    assert (
        card["expires_at"] - card["created"] in (3600, 3601)
        and card["chat"] is False
        and card["stored_in"] == []
    )
    assert server.http.get("/v1/snapshots/talk").json() == card
    listed = all_of(server)
    assert listed["data"] == [card]
    assert (
        listed["pinned"]["blocks"] == 4
        and listed["pinned"]["tier"] == "host"
        and listed["pinned"]["max_blocks"] == 32
    )
    assert listed["pinned"]["bytes"] == 4 * server.engine.parts.arena.layout.block_bytes
    forget(server, "device")
    tokens, source = ask(server, MORE, snapshot="talk")
    assert source["host"] == 64 and source["computed"] == len(PROMPT) + len(MORE) - 64
    assert tokens == ask(server, [*PROMPT, *MORE])[0], "the answer is the one to the whole prompt"
    assert server.http.delete("/v1/snapshots/talk").json() == {
        "id": "talk",
        "object": "snapshot",
        "deleted": True,
    }
    assert server.http.get("/v1/snapshots/talk").status_code == 404
    assert all_of(server)["data"] == [] and stats(server)["pinned_blocks"] == 0
    assert error_of(server.http.delete("/v1/snapshots/talk"))["code"] == "snapshot_not_found"
    assert ask(server, MORE, 404, snapshot="talk")["param"] == "snapshot"


def test_a_session_is_taken_with_what_it_has_generated(server: Tiered) -> None:
    tokens, _ = ask(server, PROMPT, max_tokens=30, session_id="agent")
    card = take(server, session_id="agent", name="turn-1")
    assert (card["tokens"], card["blocks"]) == (100, 6)
    forget(server, "device")
    continued, source = ask(server, MORE, snapshot="turn-1", max_tokens=6)
    assert source["host"] == 96, source
    ids = server.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True},
    )
    assert ids.status_code == 200 and len(tokens) == 30 and len(continued) == 6


def hold_readers(monkeypatch: pytest.MonkeyPatch, server: Tiered) -> None:
    """Readers get nothing before the engine has run to the end of every request."""
    inner = Generations.next_events

    async def late(self: Generations) -> Any:
        await asyncio.to_thread(
            until, lambda: sum(server.engine.stats().requests.values()) == 0, "the engine has run ahead"
        )
        return await inner(self)

    monkeypatch.setattr(Generations, "next_events", late)


def content_of(server: Tiered, name: str) -> list[int]:
    return np.frombuffer(server.engine.snapshots.open(name).tokens, np.uint32).tolist()


SAID = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def said_by(server: Tiered) -> tuple[list[int], str]:
    """All tokens that follow PROMPT, and their text."""
    reply = server.http.post("/v1/completions", json={**SAID, "session_id": "whole"}).json()
    take(server, session_id="whole", name="whole")
    return content_of(server, "whole")[70:], reply["choices"][0]["text"]


def num_whole(server: Tiered, tokens: list[int], num_characters: int) -> int:
    """The first tokens that have no more characters than that, and leave none unfinished."""
    tokenizer, num = server.engine.tokenizer, 0
    decoder = codecs.getincrementaldecoder("utf-8")(tokenizer.errors)
    for count, token in enumerate(tokens, 1):
        num_characters -= len(
            decoder.decode(b"" if tokenizer.is_special(token) else tokenizer.token_bytes(token))
        )
        if num_characters >= 0 and not decoder.getstate()[0]:
            num = count
    return num


@pytest.mark.parametrize(("stream", "speculate"), [(False, None), (True, "ngram")])
def test_a_session_that_ended_at_a_stop_string_is_what_its_client_was_given(
    monkeypatch: pytest.MonkeyPatch, stream: bool, speculate: str | None
) -> None:
    """However far the engine has run ahead when the stop string is found."""
    with tiered(speculate=speculate) as server:
        tokens, text = said_by(server)
        middle = len(text) // 2
        for number, stop in enumerate(
            [text[middle : middle + 4], text[middle - 1 : middle + 1], text[middle - 1 : middle + 3]]
        ):
            shown = text[: text.index(stop)]
            num = num_whole(server, tokens, len(shown))
            found = []
            for ahead in (False, True):
                with monkeypatch.context() as patch:
                    if ahead:
                        hold_readers(patch, server)
                    name = f"{number}-{ahead}"
                    reply = server.http.post(
                        "/v1/completions", json={**SAID, "stop": stop, "session_id": name, "stream": stream}
                    )
                assert reply.status_code == 200
                assert stream or reply.json()["choices"][0]["text"] == shown
                assert take(server, session_id=name, name=name)["tokens"] == 70 + num
                assert content_of(server, name) == [*PROMPT, *tokens[:num]]
                found.append(ask(server, MORE, snapshot=name)[0])
            assert found[0] == found[1], "what follows does not depend on when the stop string was found"


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_whose_client_hung_up_is_what_it_was_sent(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Nothing of an answer that is sent as a whole; of a stream what was written to it."""
    with tiered() as server:
        tokens, _ = said_by(server)
        sent, gone = asyncio.Event(), threading.Event()
        inner = Generations.next_events
        calls, came = 0, list[Any]()

        async def some(self: Generations) -> Any:
            """Two events, one at a time, then none: the client goes meanwhile."""
            nonlocal calls
            calls += 1
            if calls == 3:
                await asyncio.to_thread(
                    until, lambda: sum(server.engine.stats().requests.values()) == 0, "the engine ran ahead"
                )
                gone.set()
                await sent.wait()
            if not came:
                came.extend((await inner(self))[0])
            return {0: [came.pop(0)]}

        monkeypatch.setattr(Generations, "next_events", some)
        data, url = (
            json.dumps({**SAID, "stream": stream, "session_id": "gone"}).encode(),
            server.http.base_url,
        )
        with socket.create_connection((url.host, url.port)) as client:
            client.sendall(
                (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n") % len(data) + data
            )
            assert gone.wait(60.0)
            received = client.recv(1 << 20, socket.MSG_DONTWAIT) if stream else b""
        until(lambda: num_over(server, "/v1/completions") == 2, "the hang-up was seen")
        take(server, session_id="gone", name="gone")
        shown = "".join(
            json.loads(data)["choices"][0]["text"] for data in re.findall(rb"data: " rb"(\{.*\})", received)
        )
        assert content_of(server, "gone") == [*PROMPT, *tokens[: num_whole(server, tokens, len(shown))]]
        assert bool(shown) is stream


def test_a_boundary_may_be_chosen_and_what_is_behind_the_last_block_is_computed(server: Tiered) -> None:
    ask(server, PROMPT)
    card = take(server, prompt=PROMPT, tokens=40)
    assert card["id"].startswith("snapshot-") and (card["tokens"], card["cached_tokens"], card["blocks"]) == (
        40,
        32,
        2,
    )
    tokens, source = ask(server, MORE, snapshot=card["id"])
    assert tokens == ask(server, [*PROMPT[:40], *MORE])[0]
    assert source["device"] + source["host"] == 32 and source["computed"] == 8 + len(MORE)


def source_of(usage: dict[str, Any]) -> dict[str, int]:
    """Each API has it elsewhere."""
    within = [usage, *(one for one in usage.values() if isinstance(one, dict))]
    return next(one["kv_source"] for one in within if "kv_source" in one)


def test_a_conversation_goes_on_with_its_messages_in_every_api(server: Tiered) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0}
    first = CHAT.ask(server, **asked, messages=TURN, max_tokens=12)
    so_far = [*TURN, {"role": "assistant", "content": first.text}]
    card = take(server, messages=so_far, name="chat")
    assert card["chat"] is True and card["cached_tokens"] >= 48
    whole = CHAT.ask(server, **asked, messages=[*so_far, *CHAT.body()["messages"]], max_tokens=12)
    for api in APIS:
        forget(server, "device", "host")
        part = api.ask(server, **asked, snapshot="chat", **{api.most: 12})
        assert part.text == whole.text
        assert source_of(part.raw["usage"])["host"] >= 48, "what is pinned is not reset"
        missing = api.refusal(server, 404, model=MODEL, snapshot="another")
        assert missing["param"] == "snapshot"


def test_a_snapshot_without_messages_is_no_conversation(server: Tiered) -> None:
    ask(server, PROMPT)
    take(server, prompt=PROMPT, name="text")
    reply = server.http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": TURN, "snapshot": "text"}
    )
    assert reply.status_code == 400 and error_of(reply)["param"] == "snapshot"
    assert "not taken of messages" in error_of(reply)["message"]


def test_text_behind_a_snapshot_does_not_begin_a_text() -> None:
    """A tokenizer that puts a token before every text would put it in the middle of this one."""

    class Beginning(ByteTokenizer):
        def encode(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
            return [*([300] if add_special else []), *super().encode(text, add_special, most)]

    body = schema.CompletionBody(model=MODEL, prompt=["ab", "c"], snapshot="talk")
    prompts = prompts_of(
        Beginning(512), body, Rules(100), SnapshotContent(np.array([7, 8], np.uint32).tobytes(), "")
    )
    assert [list(prompt.ids) for prompt in prompts] == [[7, 8, 97, 98], [7, 8, 99]]


# ----------------------------------------------------------------------------------------------- what it pins


def fill(server: Tiered, num: int = 40) -> None:
    """More than device and host memory have room for."""
    for number in range(num):
        ask(server, [(11 + number + 13 * i) % 450 + 7 for i in range(150)], max_tokens=1)
    forget(server)


def test_what_it_pins_outlives_a_stream_of_others_and_what_it_does_not_goes(server: Tiered) -> None:
    ask(server, PROMPT)
    ask(server, OTHER)
    take(server, prompt=PROMPT, name="talk")
    fill(server)
    forget(server, "device")
    assert ask(server, MORE, snapshot="talk")[1]["host"] == 64
    assert ask(server, OTHER)[1]["computed"] == 70
    assert server.http.delete("/v1/snapshots/talk").status_code == 200
    fill(server)
    forget(server, "device")
    assert ask(server, PROMPT)[1]["computed"] == 70


def test_a_released_session_leaves_what_a_snapshot_pins(server: Tiered) -> None:
    ask(server, PROMPT, session_id="agent")
    take(server, session_id="agent", name="talk")
    ask(server, PROMPT, session_id="agent", cache_hint={"release": True})
    until(lambda: server.http.get("/cache/stats").json()["sessions"]["releases"] == 1, "it is released")
    forget(server, "device")
    assert ask(server, MORE, snapshot="talk")[1]["host"] == 64


# ---------------------------------------------------------------------------------------------------- tenants


def test_another_tenant_neither_sees_nor_deletes_nor_continues_it(server: Tiered) -> None:
    ask(server, PROMPT, cache_salt="mine")
    take(server, prompt=PROMPT, name="talk", cache_salt="mine")
    for salt in ({}, {"cache_salt": "yours"}):
        assert all_of(server, **salt)["data"] == []
        assert server.http.get("/v1/snapshots/talk", params=salt).status_code == 404
        assert server.http.delete("/v1/snapshots/talk", params=salt).status_code == 404
        assert ask(server, MORE, 404, snapshot="talk", **salt)["code"] == "snapshot_not_found"
    assert [one["id"] for one in all_of(server, cache_salt="mine")["data"]] == ["talk"]
    assert ask(server, MORE, snapshot="talk", cache_salt="mine")[1]["computed"] == 10
    ask(server, PROMPT, cache_salt="yours")
    assert take(server, prompt=PROMPT, name="talk", cache_salt="yours")["id"] == "talk", (
        "the same name is another's, too"
    )
    assert server.http.delete("/v1/snapshots/talk", params={"cache_salt": "yours"}).status_code == 200
    assert len(all_of(server, cache_salt="mine")["data"]) == 1


def test_names_and_salts_show_in_no_figures(server: Tiered) -> None:
    ask(server, PROMPT, cache_salt="hush-salt")
    take(server, prompt=PROMPT, name="hush-name", cache_salt="hush-salt")
    server.http.get("/v1/snapshots/hush-name", params={"cache_salt": "hush-salt"})
    assert "hush" not in server.http.get("/cache/stats").text + server.http.get("/metrics").text


# --------------------------------------------------------------------------------------------------- refusals


WRONG: dict[str, tuple[dict[str, Any], int, str | None, str]] = {
    "nothing to take": ({}, 400, "session_id", "give one of"),
    "two things": ({"session_id": "s", "prompt": PROMPT}, 400, "session_id", "give one of"),
    "no such session": ({"session_id": "nobody"}, 404, "session_id", "no request of this session"),
    "a name with a slash": ({"prompt": PROMPT, "name": "a/b"}, 400, "name", "matching regex"),
    "an empty name": ({"prompt": PROMPT, "name": ""}, 400, "name", "matching regex"),
    "a name with a line break": ({"prompt": PROMPT, "name": "a\n"}, 400, "name", "matching regex"),
    "too long a name": ({"prompt": PROMPT, "name": "a" * 129}, 400, "name", "matching regex"),
    "no time at all": ({"prompt": PROMPT, "ttl_s": 0}, 400, "ttl_s", "> 0"),
    "no tokens": ({"prompt": PROMPT, "tokens": 0}, 400, "tokens", ">= 1"),
    "more tokens than there are": ({"prompt": PROMPT, "tokens": 71}, 400, "tokens", "there are 70"),
    "less than a block": ({"prompt": PROMPT, "tokens": 15}, 400, "tokens", "full block of 16"),
    "a token that there is not": ({"prompt": [*PROMPT, 2**31 - 1]}, 400, "prompt", "token ids must lie"),
    "more than the context": ({"prompt": [5] * 100_000}, 400, "prompt", "maximum context length"),
    "nothing cached": ({"prompt": [3, *PROMPT]}, 409, "snapshot", "none of its 4 blocks"),
    "an unknown field": ({"prompt": PROMPT, "pin": True}, 400, "pin", "not a field"),
    "an unknown model": ({"prompt": PROMPT, "model": "other"}, 404, "model", "no model"),
}


def test_wrong_ones_are_refused_by_name_and_leave_nothing(server: Tiered) -> None:
    ask(server, PROMPT)
    for name, (fields, status, param, words) in WRONG.items():
        found = take(server, status, **fields)
        assert found["param"] == param and words in found["message"], (name, found)
    assert stats(server)["known"] == stats(server)["pinned_blocks"] == 0
    take(server, prompt=PROMPT, name="talk")
    found = take(server, 409, prompt=PROMPT, tokens=32, name="talk")
    assert found["code"] == "snapshot_exists" and all_of(server)["data"][0]["tokens"] == 70
    assert stats(server)["pinned_blocks"] == 4, "the one that was refused has pinned nothing more"


def test_fields_that_do_not_go_with_one(server: Tiered) -> None:
    ask(server, PROMPT)
    take(server, prompt=PROMPT, name="talk")
    assert ask(server, MORE, 400, snapshot="talk", echo=True)["param"] == "echo"
    assert ask(server, [5] * 8192, 400, snapshot="talk")["code"] == "context_length_exceeded"
    reply = server.http.post(
        "/v1/messages", json={"model": MODEL, "messages": TURN, "max_tokens": 2, "snapshot": "talk"}
    )
    assert reply.status_code == 400 and "snapshot" in reply.text
    assert server.http.get("/v1/snapshots?salt=x").status_code == 400
    assert server.http.get("/v1/snapshots", params={"cache_salt": "x" * 1025}).status_code == 400
    assert server.http.put("/v1/snapshots/talk").status_code == 405


def test_without_a_tier_behind_the_device_there_are_none() -> None:
    with tiered(host_blocks=0) as server:
        ask(server, PROMPT)
        assert "--kv-offload" in take(server, 409, prompt=PROMPT)["message"]
        assert server.http.get("/v1/snapshots").status_code == 409
        assert stats(server)["pinned_blocks_max"] == 0


# -------------------------------------------------------------------------------------- disks, and the middle


def restarted(tmp_path: Path, **settings: Any) -> Any:
    return tiered(ssd_dir=tmp_path / "ssd", ssd_gib=0.01, **settings)


def scanned(server: Tiered) -> None:
    until(
        lambda: server.engine.cache.cold_tiers["ssd"].calls.store.wait_scanned(0.0), "the directory is read"
    )


def test_it_is_there_after_a_restart_and_under_another_pool_size(tmp_path: Path) -> None:
    with restarted(tmp_path) as server:
        whole, _ = ask(server, [*PROMPT, *MORE])
        card = take(server, prompt=PROMPT, name="talk", ttl_s=3600)
        assert card["stored_in"] == ["ssd"] and all_of(server)["pinned"]["tier"] == "ssd"
    for settings in ({}, {"blocks": 16, "host_blocks": 9}):
        with restarted(tmp_path, **settings) as server:
            scanned(server)
            assert server.http.get("/v1/snapshots/talk").json() == card
            tokens, source = ask(server, MORE, snapshot="talk")
            assert tokens == whole and source["ssd"] == 64
            assert stats(server)["pinned_blocks"] == 4


def test_with_blocks_gone_the_longest_intact_prefix_is_restored_and_the_rest_computed(tmp_path: Path) -> None:
    with restarted(tmp_path) as server:
        whole, _ = ask(server, [*PROMPT, *MORE])
        take(server, prompt=PROMPT, name="talk")
    with restarted(tmp_path) as server:
        scanned(server)
        store: Any = server.engine.cache.cold_tiers["ssd"].calls.store
        keys = server.engine.cache.prefix_of(PROMPT).keys  # type: ignore[union-attr]
        (slot,) = store._now.index.find_each([keys[1]])
        store._now.index.forget(keys[1], slot)
        assert server.http.get("/v1/snapshots/talk").json()["cached_tokens"] == 16
        tokens, source = ask(server, MORE, snapshot="talk")
        assert tokens == whole and (source["ssd"], source["computed"]) == (16, 58)
        forget(server)
        until(
            lambda: server.http.get("/v1/snapshots/talk").json()["cached_tokens"] == 64,
            "what was computed again is there again",
        )


def of_another_model(data: bytes) -> bytes:
    made = format_.unpack(data)
    other = {**made.made_with, "weights": "ab" * 32}
    return format_.pack(dataclasses.replace(made, space=b"o" * 32, made_with=other))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:], "damaged"),
        (of_another_model, "weights is abababababab"),
    ],
    ids=["a flipped bit", "of another model"],
)
def test_a_manifest_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, damage: Callable[[bytes], bytes], words: str
) -> None:
    with restarted(tmp_path) as server:
        ask(server, PROMPT)
        take(server, prompt=PROMPT, name="talk")
    (path,) = (tmp_path / "ssd").glob("*.snapshot")
    path.write_bytes(damage(path.read_bytes()))
    with restarted(tmp_path) as server:
        found = ask(server, MORE, 409, snapshot="talk")
        assert found["code"] == "snapshot_unusable" and words in found["message"], found
        assert (
            stats(server)["damaged"] == 1
            and stats(server)["pinned_blocks"] == 0
            and all_of(server)["data"] == []
        )
        assert take(server, 409, prompt=PROMPT, name="talk")["code"] == "snapshot_exists"
        assert ask(server, PROMPT)[1]["computed"] <= 70, "requests are served as before"
        assert server.http.delete("/v1/snapshots/talk").status_code == 200
        assert not path.exists() and take(server, prompt=PROMPT, name="talk")["pinned"] is True


def test_a_manifest_under_another_ones_name_is_refused(tmp_path: Path) -> None:
    """Whoever can rename a file must not give one tenant's conversation to another."""
    with restarted(tmp_path) as server:
        ask(server, PROMPT, cache_salt="mine")
        take(server, prompt=PROMPT, name="talk", cache_salt="mine")
    (path,) = (tmp_path / "ssd").glob("*.snapshot")
    path.rename(path.with_name(f"penstock-{format_.snapshot_id(tenant_of('yours'), 'talk')}.snapshot"))
    with restarted(tmp_path) as server:
        found = ask(server, MORE, 409, snapshot="talk", cache_salt="yours")
        assert "another snapshot's name" in found["message"]


def hang_up_on(server: Tiered, path: str, body: dict[str, Any]) -> None:
    """A request whose client goes as soon as it is sent."""
    data, url = json.dumps(body).encode(), server.http.base_url
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(
            (b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n") % (path.encode(), len(data)) + data
        )


def num_over(server: Tiered, *paths: str) -> float:
    """HTTP requests to `paths` that are over."""
    found = server.scrape().items()
    return sum(
        num
        for (name, labels), num in found
        if name.endswith("http_requests_total") and dict(labels)["path"] in paths
    )


# Holds invariant 20: a cancel where a snapshot is waited for.
def test_clients_that_hang_up_before_a_slow_store_leave_the_line_and_no_thread() -> None:
    """The store stands still until all have gone."""
    there, go_on, reads = threading.Event(), threading.Event(), list[str]()
    with valkey_or_skip() as store:
        remote = {"remote": store.url(), "remote_timeout_s": 60.0}
        with tiered(**remote) as one:
            ask(one, PROMPT)
            take(one, prompt=PROMPT, name="talk")
        with tiered(**remote) as two:
            shared: Any = two.engine.cache.cold_tiers["remote"].calls.store
            inner = shared.read_manifest

            def held(id: str) -> Any:
                reads.append(id)
                there.set()
                assert go_on.wait(60.0)
                return inner(id)

            shared.read_manifest = held
            ask(two, OTHER)
            with ThreadPoolExecutor(1) as threads:
                patient = threads.submit(going_on, two, "talk")
                assert there.wait(60.0)
                num_threads = threading.active_count()
                for number in range(100):
                    body = {"model": MODEL, "prompt": MORE, "max_tokens": 1, "snapshot": f"other-{number}"}
                    hang_up_on(two, "/v1/completions", body)
                    hang_up_on(two, "/v1/snapshots", {"prompt": PROMPT, "name": f"new-{number}"})
                until(
                    lambda: num_over(two, "/v1/completions", "/v1/snapshots") == 201,
                    "all of them are over, and the first",
                )
                # and those of /cache/stats
                assert stats(two)["waiting"] == 0 and threading.active_count() <= num_threads + 2
                go_on.set()
                assert patient.result().status_code == 200
            assert ask(two, MORE, snapshot="talk")[1]["computed"] == 10
            assert len(set(reads)) == 1, "the store is asked for nothing that no client waits for"
            assert stats(two)["pinned_blocks"] == 0 and stats(two)["continued"] == 2


def going_on(server: Tiered, name: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": MORE, "max_tokens": 1, "snapshot": name}
    return httpx.post(f"{server.http.base_url}/v1/completions", json=body, timeout=60.0)


# --------------------------------------------------------------------------------------------- a shared store


def test_another_engine_continues_from_the_shared_store() -> None:
    with valkey_or_skip() as store:
        remote = {"remote": store.url(), "remote_timeout_s": 5.0}
        with tiered(**remote) as one:
            whole, _ = ask(one, [*PROMPT, *MORE], cache_salt="mine")
            card = take(one, prompt=PROMPT, name="talk", ttl_s=1000, cache_salt="mine")
            assert (
                card["stored_in"] == ["remote"] and all_of(one, cache_salt="mine")["pinned"]["tier"] == "host"
            )
        with tiered(**remote) as two:
            assert (
                all_of(two)["data"] == []
                and ask(two, MORE, 404, snapshot="talk")["code"] == "snapshot_not_found"
            )
            (found,) = all_of(two, cache_salt="mine")["data"]
            assert found == {**card, "pinned": False}, "an engine pins what it has itself"
            tokens, source = ask(two, MORE, snapshot="talk", cache_salt="mine")
            assert tokens == whole and source["remote"] == 64
            assert take(two, 409, prompt=PROMPT, name="talk", cache_salt="mine")["code"] == "snapshot_exists"
            assert two.http.delete("/v1/snapshots/talk", params={"cache_salt": "mine"}).status_code == 200
            assert ask(two, MORE, 404, snapshot="talk", cache_salt="mine")["code"] == "snapshot_not_found"
            assert not two.engine.snapshots.figures().known


def test_in_a_smaller_tier_the_oldest_stay_pinned_and_the_others_may_go(tmp_path: Path) -> None:
    with restarted(tmp_path) as server:
        for name, prompt in (("first", PROMPT), ("second", OTHER)):
            ask(server, prompt)
            take(server, prompt=prompt, name=name)
    with tiered(ssd_dir=tmp_path / "ssd", ssd_gib=0.00045) as server:
        scanned(server)
        assert [(one["id"], one["pinned"]) for one in all_of(server)["data"]] == [
            ("first", True),
            ("second", False),
        ]
        for name in ("second", "first"):
            ask(server, MORE, snapshot=name)
        fill(server)
        server.http.post("/cache/flush?level=persisted")
        assert [one["cached_tokens"] for one in all_of(server)["data"]] == [64, 0]
