"""Adapters over HTTP: chosen by `model`, listed, loaded and unloaded; off unless a directory is given, and
then only from inside it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from penstock.config import LoraConfig, ModelSource, ServerConfig
from penstock.engine.adapters import AdapterStore
from penstock.engine.build import build
from penstock.engine.loop import EngineLoop
from penstock.models.adapters import AdapterFiles, read_adapter
from penstock.models.decoder import Decoder
from penstock.models.layers import TorchLayerOps
from penstock.models.loader import load_model
from penstock.models.progress import silent
from penstock.server.run import server_here
from penstock.testing.tiny_models import TINY_LLAMA, TINY_QWEN3
from tests.cpu.server.served import DEADLINE_S, MODEL, Served, completion, serving, until
from tests.cpu.server.tiered_server import error_of
from tests.support.adapters import write_random_adapter
from tests.support.driving import tiny_config
from tests.support.scripted_engine import ScriptedEngine

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def model() -> Decoder:
    source = ModelSource("tiny-llama", load_format="dummy")
    return load_model(source, torch.device("cpu"), torch.float32, TorchLayerOps(), silent).model


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    """The directory that clients may load from, with two adapters in it; a third lies beside it."""
    for seed, name in enumerate(("allowed/one", "allowed/group/two", "outside")):
        write_random_adapter(tmp_path / name, TINY_LLAMA, seed)
    return tmp_path / "allowed"


@pytest.fixture
def served(model: Decoder, allowed: Path) -> Iterator[Served]:
    """A scripted engine with a real store."""
    store = AdapterStore(MODEL, lambda directory: read_adapter(directory, model), allowed.resolve())
    with serving(ScriptedEngine(adapters=store)) as running:
        yield running
        running.engine.release()
        running.assert_idle()
        until(lambda: store._num_holds.total() == 0, "nothing is held")


def load(served: Served, name: str, path: object) -> httpx.Response:
    return served.http.post(LOAD, json={"lora_name": name, "lora_path": str(path)})


# -------------------------------------------------------------------------------------------- load and choose


def test_a_loaded_adapter_is_listed_and_chosen_by_name(served: Served) -> None:
    reply = load(served, "org/tuned", "group/two")
    assert reply.status_code == 200
    card = reply.json()
    assert card.pop("replaced") is False
    assert (card["id"], card["object"], card["parent"], card["root"]) == (
        "org/tuned",
        "model",
        MODEL,
        "group/two",
    )
    client = served.client()
    assert [m.id for m in client.models.list()] == [MODEL, "org/tuned"]
    assert served.http.get("/v1/models/org/tuned").json() == card
    base = served.http.get(f"/v1/models/{MODEL}").json()
    assert (base["root"], base["parent"]) == (MODEL, None)
    answer = client.completions.create(model="org/tuned", prompt="hello", n=2)
    assert answer.model == "org/tuned"
    chat = client.chat.completions.create(
        model="org/tuned", messages=[{"role": "user", "content": "hi"}], max_tokens=2
    )
    assert chat.model == "org/tuned"
    chunks = list(client.completions.create(model="org/tuned", prompt="hello", max_tokens=2, stream=True))
    assert {chunk.model for chunk in chunks} == {"org/tuned"}
    assert client.completions.create(model=MODEL, prompt="hello").model == MODEL
    adapter = served.engine.adapters.find("org/tuned").adapter
    assert served.engine.adapted == [adapter, adapter, adapter, adapter, None]


def test_an_unloaded_adapter_is_gone_and_its_name_free(served: Served) -> None:
    load(served, "tuned", "one")
    assert served.http.post(UNLOAD, json={"lora_name": "tuned"}).json() == {
        "id": "tuned",
        "object": "model",
        "deleted": True,
    }
    reply = served.http.post("/v1/completions", json=completion(model="tuned"))
    assert reply.status_code == 404 and error_of(reply)["code"] == "model_not_found"
    assert served.http.get("/v1/models/tuned").status_code == 404
    reply = served.http.post(UNLOAD, json={"lora_name": "tuned"})
    assert reply.status_code == 404
    assert error_of(reply)["param"] == "lora_name"
    assert [load(served, "tuned", path).json()["replaced"] for path in ("group/two", "one")] == [False, True]


def test_a_stream_goes_on_while_its_adapter_is_unloaded(served: Served) -> None:
    load(served, "tuned", "one")
    old = served.engine.adapters.find("tuned").adapter
    served.engine.hold()
    stream = served.client().completions.create(model="tuned", prompt="hello", max_tokens=5, stream=True)
    until(lambda: served.engine.num_open == 1, "the engine has the request")
    assert served.http.post(UNLOAD, json={"lora_name": "tuned"}).status_code == 200
    assert set(served.engine.adapters._weights) == {old.digest}
    served.engine.release()
    assert "".join(chunk.choices[0].text for chunk in stream) == "choic"
    until(lambda: not served.engine.adapters._weights, "the weights are gone")


def test_an_adapter_that_is_reloaded_while_a_request_comes_in_serves_all_its_choices_with_one_content(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(served, "tuned", "one")
    submit = served.service.engine.submit

    def reloading(*args: Any, **named: Any) -> None:
        load(served, "tuned", "group/two" if len(served.engine.submitted) % 2 == 0 else "one")
        submit(*args, **named)

    monkeypatch.setattr(served.service.engine, "submit", reloading)
    # Large enough for a thread of its own, so that the event loop can answer the reloads meanwhile.
    reply = served.http.post(
        "/v1/completions", json=completion("x" * 20_000, model="tuned", n=4, max_tokens=1)
    )
    assert reply.status_code == 200
    assert len(served.engine.adapted) == 4 and len(set(served.engine.adapted)) == 1


# ---------------------------------------------------------------------------------------------------- refused


def test_without_a_directory_both_routes_are_off() -> None:
    with serving() as served:
        for path, body in ((LOAD, {"lora_name": "a", "lora_path": "/tmp"}), (UNLOAD, {"lora_name": "a"})):
            reply = served.http.post(path, json=body)
            assert reply.status_code == 403
            assert (
                "--lora-dir" in error_of(reply)["message"] and error_of(reply)["code"] == "lora_loading_off"
            )


def test_nothing_outside_the_directory_can_be_loaded(served: Served, allowed: Path) -> None:
    (allowed / "link").symlink_to(allowed.parent / "outside")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        borrowed = write_random_adapter(allowed / f"borrowed-{name}", TINY_LLAMA, 3)
        (borrowed / name).unlink()
        (borrowed / name).symlink_to(allowed.parent / "outside" / name)
    paths = [
        "../outside",
        allowed.parent / "outside",
        "one/../../outside",
        "link",
        "borrowed-adapter_config.json",
        "/etc",
        "/",
        "a\0b",
    ]
    for path in [*paths, "borrowed-adapter_model.safetensors", "/no/such/path"]:
        reply = load(served, "tuned", path)
        assert reply.status_code == 400, path
        assert error_of(reply)["param"] == "lora_path"
        assert error_of(reply)["message"] == (
            "lora_path must lie inside the directory that the server was given as --lora-dir"
        )
    assert served.engine.adapters.all() == ()


BAD: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"lora_path": "one"}, "lora_name", "required"),
    ({"lora_name": "a"}, "lora_path", "required"),
    ({"lora_name": "a", "lora_path": ""}, "lora_path", "length"),
    ({"lora_name": "a", "lora_path": "x" * 5000}, "lora_path", "length"),
    ({"lora_name": "a", "lora_path": "x" * 300}, "lora_path", "cannot be read"),
    ({"lora_name": "a", "lora_path": "one", "load_inplace": True}, "load_inplace", "not a field"),
    ({"lora_name": MODEL, "lora_path": "one"}, "lora_name", "name of the model itself"),
    ({"lora_name": "a b", "lora_path": "one"}, "lora_name", "a valid adapter name"),
    ({"lora_name": "a", "lora_path": "three"}, "lora_path", "three is no directory"),
    ({"lora_name": "a", "lora_path": "group"}, "lora_path", "group has no adapter_config.json"),
    ({"lora_name": "a", "lora_path": "qwen"}, "lora_path", "do not fit the model"),
    ({"lora_name": "a", "lora_path": "dora"}, "lora_path", "DoRA is not supported"),
)


def test_a_bad_load_is_refused_by_field_and_changes_nothing(served: Served, allowed: Path) -> None:
    write_random_adapter(allowed / "qwen", TINY_QWEN3, 1)
    write_random_adapter(allowed / "dora", TINY_LLAMA, 1, use_dora=True)
    load(served, "kept", "one")
    before = served.engine.adapters.all()
    for body, param, said in BAD:
        reply = served.http.post(LOAD, json=body)
        assert reply.status_code == 400
        assert error_of(reply)["param"] == param and said in error_of(reply)["message"]
        assert str(allowed) not in reply.text
        assert served.engine.adapters.all() == before


def test_loads_are_read_one_after_another_and_off_the_event_loop(model: Decoder, allowed: Path) -> None:
    """While a load is stuck in a file, everybody else is served; more loads than seats are told to come
    back."""
    gate, started = threading.Event(), threading.Semaphore(0)
    num_reading = []

    def read(directory: Path) -> AdapterFiles:
        num_reading.append(1)
        started.release()
        assert gate.wait(DEADLINE_S) and len(num_reading) == 1
        num_reading.pop()
        return read_adapter(directory, model)

    with serving(ScriptedEngine(adapters=AdapterStore(MODEL, read, allowed.resolve()))) as served:
        replies: list[int] = []
        client = httpx.Client(base_url=served.url, timeout=DEADLINE_S)

        def ask(name: str) -> None:
            replies.append(client.post(LOAD, json={"lora_name": name, "lora_path": "one"}).status_code)

        asking = [threading.Thread(target=ask, args=(f"a{i}",)) for i in range(8)]
        for thread in asking:
            thread.start()
        assert started.acquire(timeout=DEADLINE_S)
        assert served.client().completions.create(model=MODEL, prompt="x", max_tokens=1).model == MODEL
        until(
            lambda: served.http.post(LOAD, json={"lora_name": "b", "lora_path": "one"}).status_code == 429,
            "the seats are taken",
        )
        gate.set()
        for thread in asking:
            thread.join(DEADLINE_S)
        client.close()
        assert replies == [200] * 8
        assert len(served.engine.adapters.all()) == 8 and len(served.engine.adapters._weights) == 1


# ----------------------------------------------------------------------------------------- with a real engine


@contextlib.contextmanager
def real_server(lora: LoraConfig) -> Iterator[tuple[str, openai.OpenAI]]:
    config = dataclasses.replace(tiny_config("tiny-llama", blocks=256), lora=lora)
    engine = build(config)
    server = server_here(engine, EngineLoop(engine), ServerConfig(port=0, shutdown_s=5.0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, "the server is up")
    try:
        yield (
            server.url,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S),
        )
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive() and engine.adapters._num_holds.total() == 0


def test_salts_and_adapter_names_do_not_collide_end_to_end_and_a_reload_finds_nothing(allowed: Path) -> None:
    lora = LoraConfig(
        adapters=(("x", str(allowed / "one")), ("twin", str(allowed / "one"))), dir=str(allowed)
    )
    with real_server(lora) as (url, client):

        def ask(model: str, salt: str | None) -> tuple[list[str], int]:
            extra = {} if salt is None else {"cache_salt": salt}
            reply = client.completions.create(
                model=model,
                prompt=list(range(3, 43)),
                max_tokens=6,
                temperature=0,
                logprobs=0,
                extra_body={**extra, "ignore_eos": True},
            )
            assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
            return reply.choices[0].logprobs.tokens, reply.usage.prompt_tokens_details.cached_tokens

        scopes = [("tiny-llama", None), ("tiny-llama", "x"), ("x", None), ("x", "x"), ("x", "tiny-llama")]
        cold = [ask(*scope) for scope in scopes]
        warm = [ask(*scope) for scope in scopes]
        assert [cached for _, cached in cold] == [0] * 5 and [cached for _, cached in warm] == [32] * 5
        assert [tokens for tokens, _ in cold] == [tokens for tokens, _ in warm]
        base, tuned = cold[0][0], cold[2][0]
        assert [tokens for tokens, _ in cold] == [base, base, tuned, tuned, tuned] and base != tuned
        assert ask("twin", None) == (tuned, 32), "the same content under another name"
        assert (
            httpx.post(f"{url}{LOAD}", json={"lora_name": "x", "lora_path": "group/two"}).json()["replaced"]
            is True
        )
        reloaded, cached = ask("x", None)
        assert cached == 0 and reloaded not in (base, tuned)
        assert ask("twin", None) == (tuned, 32)
