"""`bench agents`: recorded conversations keep their order, come back from where they were kept, and the
figures add up."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.agents import ALL, FIRST, LATER, AgentsBench, overtaken, percentiles
from penstock.bench.agents_replay import Record, ServerAddress, UserReplay
from penstock.bench.run import Driver
from penstock.bench.trace_files import Asking, Question, User, read_conversations, reusable, select
from penstock.cli import main
from penstock.config import (
    Config,
    EngineConfig,
    KvConfig,
    ModelSource,
    OffloadConfig,
    SchedulingName,
    ServerConfig,
)
from penstock.contract import FinishReason, KvSource, SamplingParams, Submission, TokenEvent
from penstock.engine.build import build
from penstock.engine.loop import EngineLoop
from penstock.errors import ConfigError, InvalidRequest
from penstock.models.progress import silent
from penstock.server.run import server_here

EXCERPT = Path(__file__).resolve().parents[2] / "data" / "agentic-coding-excerpt.jsonl"
USERS = 8
NUM_REQUESTS = 46  # of those users, six each at most
# Blocks of host memory: everything fits; less than half of the 304 different ones that the users ask for.
ROOMY, TIGHT = 2000, 140
ASKING = Asking("excerpt", users=USERS, requests=6, scale=64)
BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # of tiny-llama: tokens, layers, K and V, heads, width, float32


def bench(**changes) -> AgentsBench:
    asking = dataclasses.replace(ASKING, **changes)
    return AgentsBench(
        asking, select(read_conversations(EXCERPT), asking.users, asking.context, asking.requests)
    )


def config_of(host_blocks: int, scheduling: SchedulingName = "cost") -> Config:
    return Config(
        ModelSource("tiny-llama", "dummy", "cpu"),
        KvConfig(device_blocks=80),
        EngineConfig(max_batch=8, prefill_chunk=128, max_model_len=1100, scheduling=scheduling),
        OffloadConfig(host_gib=host_blocks * BLOCK_BYTES / 2**30, load_always=True),
    )


@pytest.fixture
def roomy():
    config = config_of(ROOMY)
    engine = build(config)
    yield engine, config
    engine.close(timeout_s=20.0)


# -------------------------------------------------------------------------------------------- order and reuse


@cache
def replayed(host_blocks: int, scheduling: SchedulingName = "cost", generous: bool = False) -> list[Record]:
    """From one thread alone, so that who is asked when depends on nothing but steps. `generous`: agents allow
    answers up to the end of the context, and each ends as recorded, as by a stop string."""
    engine = build(config_of(host_blocks, scheduling))
    due = [(user, 0) for user in users_of(engine.tokenizer.vocab_size)]
    records: list[Record] = []

    def submit(user: User, number: int) -> None:
        ask, own_id = user.asks[number], f"{user.conversation} {number}"
        records.append(record := Record(user.conversation, number + 1, ask, time.perf_counter()))

        def listen(event: TokenEvent) -> None:
            if event.tokens:
                record.came(time.perf_counter(), len(event.tokens))
            if event.source is not None:
                record.source, record.waited_s = dataclasses.asdict(event.source), event.waited_s
            if event.finish is not None:
                assert event.finish is (FinishReason.CANCELLED if generous else FinishReason.LENGTH)
                record.end_s = time.perf_counter()
                due.extend([(user, number + 1)] if number + 1 < len(user.asks) else [])
            elif generous and record.generated >= ask.max_tokens:
                engine.cancel(own_id)

        most = engine.max_model_len - len(ask.prompt) if generous else ask.max_tokens
        stop = ("never",) if generous else ()
        sampling = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True, stop=stop)
        engine.submit(Submission(ask.prompt, sampling, cache_salt="salt", id=own_id), listen)

    while due or not all(record.done for record in records):
        while due:
            submit(*due.pop(0))
        if not engine.step():
            engine.wait_work(0.01)
    engine.close(timeout_s=20.0)
    return records


def users_of(vocab: int, **changes) -> list[User]:
    asking = dataclasses.replace(ASKING, **changes)
    chosen = select(read_conversations(EXCERPT), asking.users, asking.context, asking.requests)
    return asking.users_of(chosen, vocab)


def shares(records: list[Record]) -> tuple[float, float]:
    """Of all prompt tokens: how many were reused, and how many could have been."""
    prompts = [record.ask.prompt for record in records]
    reused = [len(record.ask.prompt) - record.source["computed"] for record in records]
    possible, num_tokens = reusable(prompts, 16), sum(map(len, prompts))
    assert all(had <= could for had, could in zip(reused, possible, strict=True)), "never there, and reused"
    return sum(reused) / num_tokens, sum(possible) / num_tokens


def test_with_too_little_room_nearly_all_is_still_reused_because_of_who_runs_next():
    reused, possible = shares(replayed(TIGHT))
    assert reused > 0.9 * possible
    in_order, _ = shares(replayed(TIGHT, "fifo"))
    assert in_order < 0.6 * possible, "in order of arrival there is room enough, too: this shows nothing"


@pytest.mark.parametrize("generous", [False, True])
def test_with_room_for_everything_all_that_an_infinite_cache_has_is_reused(generous):
    """Also by agents that allow far more than they write."""
    reused, possible = shares(replayed(ROOMY, generous=generous))
    assert possible > 0.75 and reused > (0.99 if generous else 0.9999) * possible


# ---------------------------------------------------------------------------------------------------- figures


def check_order(records: list[dict]) -> None:
    """Every conversation has all its recorded prompts, one after the other."""
    for conversation in select(read_conversations(EXCERPT), USERS, 65536, 6):
        mine = [record for record in records if record["conversation"] == conversation.id]
        assert [record["number"] for record in mine] == list(range(1, 1 + len(conversation.requests)))
        lengths = [one.num_tokens // 64 for one in conversation.requests]
        assert [record["prompt_tokens"] for record in mine] == lengths
        assert all(before["end_s"] <= after["submit_s"] for before, after in pairwise(mine))


def test_a_measurement_reports_first_and_later_turns_apart_and_both_together(roomy):
    results = bench().measure(Driver(*roomy))
    assert results.skipped == []
    first, later, whole = results.rows
    assert [row["turns"] for row in results.rows] == [FIRST, LATER, ALL]
    assert [row["done"] for row in results.rows] == [USERS, NUM_REQUESTS - USERS, NUM_REQUESTS]
    assert [row["requests"] for row in results.rows] == [USERS, NUM_REQUESTS - USERS, NUM_REQUESTS]
    assert first["reused"] == 0.0 and first["of_reusable"] is None
    assert whole["of_reusable"] == later["of_reusable"] == 1.0
    prompts = whole["prompt_tokens"]
    assert prompts == first["prompt_tokens"] + later["prompt_tokens"] == sum(whole["source"].values())
    assert whole["reused"] == pytest.approx(1 - whole["source"]["computed"] / prompts)
    assert whole["output_tokens"] == sum(record["output_tokens"] for record in whole["records"])
    assert whole["overtaken_s"] == max(first["overtaken_s"], later["overtaken_s"])
    assert whole["engine"]["steps"] > 0 and len(whole["records"]) == NUM_REQUESTS
    check_order(whole["records"])
    for record in whole["records"]:
        assert record["submit_s"] <= record["start_s"]
        assert record["first_s"] <= record["end_s"] <= whole["seconds"]
        assert sum(record["source"].values()) == record["prompt_tokens"]
    possible = sum(record["reusable_tokens"] for record in whole["records"])
    assert possible == round(whole["reusable"] * prompts)


def test_how_far_each_was_overtaken_is_worked_out_by_hand():
    for requests, expected in (
        ([(0.0, 1.0), (0.5, 2.0)], [0.0, 0.0]),
        ([(0.0, 3.0), (0.5, 2.0)], [0.5, 0.0]),
        # The latest that came in between counts, not the last that was answered.
        ([(0.0, 9.0), (5.0, 6.0), (4.0, 8.0)], [5.0, 0.0, 1.0]),
        # Requests of the same step do not overtake each other.
        ([(0.0, 2.0), (1.0, 2.0)], [0.0, 0.0]),
        ([(1.0, 2.0), (0.0, 2.0)], [0.0, 0.0]),
        # A request without a token when the time is over was overtaken by all that have one.
        ([(0.0, None), (7.0, 8.0), (9.0, None)], [7.0, 0.0, 0.0]),
    ):
        ask = Question(np.zeros(4, np.int32), 1, 0.0)
        records = [Record("a", 1, ask, submit_s, first_s=first_s) for submit_s, first_s in requests]
        found = overtaken(records)
        assert [found[record] for record in records] == expected
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0, "max": 3.0}


def test_a_limit_ends_the_replay_and_a_prompt_that_does_not_fit_is_refused_before_it(roomy):
    assert bench(limit_s=0.0).measure(Driver(*roomy)).rows == []
    with pytest.raises(ConfigError, match="the context holds 1100; lower --context"):
        bench(scale=32).measure(Driver(*roomy))


def test_a_request_that_fails_ends_the_replay(roomy, monkeypatch):
    engine, config = roomy

    def fail(*_, **__):
        raise InvalidRequest("no more")

    monkeypatch.setattr(engine, "submit", fail)
    with pytest.raises(InvalidRequest, match="no more"):
        bench().measure(Driver(engine, config))


class Instant(UserReplay):
    """Answers at once."""

    def ask(self, record: Record) -> None:
        record.end_s = self.now_s()


class Skipping(threading.Event):
    """Notes waits, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return self.is_set()


def test_the_next_request_is_sent_after_the_answer_and_its_pause():
    user = User("a", tuple(Question(np.zeros(1, np.int32), 1, pause) for pause in (0.0, 60.0, 7.0)))
    replay = Instant([user])
    replay.over = Skipping()
    replay.run(None, silent)
    assert replay.over.waits == [0.0, 60.0, 7.0] and [one.number for one in replay.records] == [1, 2, 3]
    assert Instant([user]).run(0.1, silent) < 30.0, "a pause outlives the limit"


# --------------------------------------------------------------------------------------------------- a server


@contextlib.contextmanager
def serving(engine, **settings):
    loop = EngineLoop(engine)
    loop.start()
    server = server_here(engine, loop, ServerConfig(port=0, shutdown_s=5.0, **settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.002)
    yield f"{server.url}/v1"
    server.should_exit = True
    thread.join(30.0)
    assert not thread.is_alive()


def test_our_own_server_says_where_everything_came_from():
    engine = build(config_of(ROOMY))
    with serving(engine, api_key="geheim-ключ") as url:
        results = bench().measure_url(ServerAddress(url, engine.name, "geheim-ключ"), 512, 16, silent)
        refused = bench(users=2).measure_url(ServerAddress(url, engine.name, "wrong"), 512, 16, silent)
    whole = results.rows[-1]
    assert results.skipped == [] and whole["done"] == NUM_REQUESTS
    assert whole["of_reusable"] == 1.0 and set(whole["source"]) == set(KvSource.__slots__)
    assert whole["waiting_s"] is None and whole["ttft_s"] is not None
    assert all(record["output_tokens"] >= 1 for record in whole["records"])
    check_order(whole["records"])
    assert refused.rows == [] and len(refused.skipped) == 2 and "401" in refused.skipped[0]


class Foreign(BaseHTTPRequestHandler):
    """A server of another make. It does not know `ignore_eos`, and says only how many tokens it had."""

    protocol_version = "HTTP/1.0"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))
        if "ignore_eos" in body:
            return self._answer(400, b'{"error": {"message": "unknown field ignore_eos"}}')
        return self._answer(200, self.server.stream(body))

    def _answer(self, status, content):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def stream_of(body) -> bytes:
    usage = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
    events = [{"choices": [{"text": "a", "finish_reason": None}]}] * 2
    events += [{"choices": [{"text": "", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
    return b"".join((b"data: %s\n\n") % json.dumps(event).encode() for event in events) + (
        b": a comment\n\ndata: [DONE]\n\n"
    )


@pytest.fixture
def foreign():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    server.bodies, server.stream = [], stream_of
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}/v1/"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_that_does_not_know_our_extension_is_asked_without_it(foreign):
    results = bench(users=1, requests=3).measure_url(
        ServerAddress(foreign.url, "m", hints=True), 512, 16, silent
    )
    whole = results.rows[-1]
    assert results.skipped == [] and whole["done"] == 3
    assert ["ignore_eos" in body for _, body in foreign.bodies] == [True, False, False, False]
    path, body = foreign.bodies[1]
    assert (
        path == "/v1/completions"
        and body["stream"] is True
        and body["stream_options"] == {"include_usage": True}
    )
    assert body["session_id"] == body["prompt_cache_key"] == "trace_0002"
    bench(users=1, requests=1).measure_url(ServerAddress(foreign.url, "m"), 512, 16, silent)
    assert not {"session_id", "prompt_cache_key"} & set(foreign.bodies[-1][1]), "without hints"
    assert all(isinstance(token, int) for token in body["prompt"]) and len(body["prompt"]) == 15818 // 64
    assert whole["source"]["cached"] == 15 and whole["source"]["computed"] == whole["prompt_tokens"] - 15
    assert [record["output_tokens"] for record in whole["records"]] == [3, 3, 3]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'data: {"choices": [{"text": "a"}]}\n\n', "ended before its time"),
        (b"data: nonsense\n\n", "not JSON"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        (b"data: [DONE]\n\n", "no token"),
    ],
)
def test_an_answer_that_breaks_off_ends_that_conversation_and_is_reported(foreign, content, said):
    foreign.stream = lambda body: stream_of(body) if len(body["prompt"]) < 16000 // 64 else content
    results = bench(users=1, requests=3).measure_url(ServerAddress(foreign.url, "m"), 512, 16, silent)
    assert results.rows[-1]["done"] == 1 and results.rows[-1]["failed"] == 1
    assert (
        len(results.skipped) == 1
        and ("its request 2 failed") in results.skipped[0]
        and said in results.skipped[0]
    )


# ---------------------------------------------------------------------------------------------------- command


def test_the_command_asks_a_server(foreign, tmp_path, capsys):
    file = tmp_path / "agents.json"
    sizes = f"--users 1 --requests 3 --model m --url {foreign.url} --json {file}".split()
    argv = ["bench", "agents", str(EXCERPT), *sizes]
    assert main([*argv, "--vocab", "7", "--plot", str(tmp_path / "agents.svg")]) == 0
    assert f"m at {foreign.url}" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["server"] == foreign.url and "config" not in report
    assert max(token for _, body in foreign.bodies for token in body["prompt"]) == 6
    foreign.stream = lambda _: b"data: [DONE]\n\n"
    assert main(argv) == 1, "what failed shows in the exit code"


def test_what_is_wrong_is_refused_by_name(tmp_path, capsys):
    for argv, named in (
        (("--users", "0"), "--users"),
        (("--think", "-1"), "--think"),
        (("--think", "nan"), "--think"),
        (("--limit-s", "soon"), "--limit-s"),
        (("--scale", "3"), "--scale 3 does not divide"),
        (("--context", "100"), "no conversation with 3 requests of at most 100 tokens"),
        (("--hints",), "need --url"),
        (("--api-key", "k"), "need --url"),
        (("--url", "ftp://h/v1"), "--url"),
        (("--url", "http://h:port/v1"), "--url"),
        (("--url", "http://me:secret@h/v1"), "see --api-key"),
        (("--url", "http://h/v1", "--max-batch", "3"), "--max-batch is for an engine in this process"),
        (("--url", "http://h/v1", "--no-kv-offload"), "--kv-offload is for an engine in this process"),
    ):
        assert main(["bench", "agents", str(EXCERPT), *argv]) == 2
        shown = capsys.readouterr().err
        assert named in shown and "secret" not in shown
    file = tmp_path / "trace.jsonl"
    file.write_text('{"id": "a", "requests": []}\n')
    assert main(["bench", "agents", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "line 1: block_tokens" in shown.err
