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
from penstock.bench.agents_replay import Agenda, EngineReplay, Record, ServerAddress, UrlReplay, source_of
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
from penstock.contract import FinishReason, SamplingParams, StepFailure, TokenEvent
from penstock.engine.build import build
from penstock.engine.execution.running_step import RunningStep
from penstock.engine.loop import EngineLoop
from penstock.errors import ConfigError, InvalidRequest, StepFailed
from penstock.models.progress import silent
from penstock.server.run import server_here

EXCERPT = Path(__file__).resolve().parents[2] / "data" / "agentic-coding-excerpt.jsonl"
USERS = 8
NUM_REQUESTS = 46  # of those users, six each at most
# Blocks of host memory: everything fits; less than half of the 304 different ones that the users ask for; a
# fifteenth of them.
ROOMY, TIGHT, SCARCE = 2000, 140, 20
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


def try_next(agenda: Agenda) -> tuple[int, int] | None:
    """As `wait_next`, without waiting; None: nothing is due."""
    while not agenda._answered.empty():
        agenda._schedule(agenda._answered.get())
    return agenda._take() if agenda._due and agenda._due[0][0] <= agenda._clock() else None


def run_by_hand(replay: EngineReplay) -> None:
    """This thread both submits and steps."""
    while replay._num_open:
        while (due := try_next(replay._agenda)) is not None:
            replay._submit(*due)
        replay.step()
        if replay._error is not None:
            raise replay._error


class OpenReplay(EngineReplay):
    """Agents that allow answers up to the end of the context. Each ends as recorded, as by a stop string."""

    def _submit(self, user: int, number: int) -> None:
        ask = self._users[user].asks[number]
        record = Record(self._users[user].conversation, number + 1, ask, self.now_s())
        self.records.append(record)
        listen, own_id = self._listener(user, record), f"{user} {number}"

        def hear(event: TokenEvent) -> None:
            is_over = event.finish is FinishReason.CANCELLED
            listen(event._replace(finish=FinishReason.LENGTH) if is_over else event)
            if event.finish is None and record.generated >= ask.max_tokens:
                self._engine.cancel(own_id)

        room = self._engine.max_model_len - len(ask.prompt)
        sampling = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True, stop=("never",))
        self._engine.submit(ask.prompt, sampling, hear, cache_salt=self._salt, request_id=own_id)


@cache
def replayed(
    host_blocks: int, scheduling: SchedulingName = "cost", replays: type[EngineReplay] = EngineReplay
) -> list[Record]:
    """From one thread alone, so that who is asked when depends on nothing but steps."""
    engine = build(config_of(host_blocks, scheduling))
    chosen = select(read_conversations(EXCERPT), ASKING.users, ASKING.context, ASKING.requests)
    replay = replays(ASKING.users_of(chosen, engine.tokenizer.vocab_size), engine, "salt")
    run_by_hand(replay)
    engine.close(timeout_s=20.0)
    return replay.records


@pytest.mark.parametrize("host_blocks", [ROOMY, TIGHT])
def test_every_conversation_keeps_its_order_and_all_its_recorded_prompts_are_answered(host_blocks):
    records = replayed(host_blocks)
    chosen = select(read_conversations(EXCERPT), USERS, 65536, 6)
    assert len(records) == NUM_REQUESTS and all(record.done for record in records)
    for conversation in chosen:
        mine = [record for record in records if record.conversation == conversation.id]
        assert [record.number for record in mine] == list(range(1, 1 + len(conversation.requests)))
        assert [len(record.ask.prompt) for record in mine] == [
            one.num_tokens // 64 for one in conversation.requests
        ]
        for before, after in pairwise(mine):
            assert before.submit_s < before.first_s <= before.end_s <= after.submit_s
    for record in records:
        assert sum(record.source.values()) == len(record.ask.prompt)
        assert record.generated == record.ask.max_tokens
        assert 0 <= record.waited_s <= record.first_s - record.submit_s, "it waits before its first token"


def test_with_room_for_everything_all_that_an_infinite_cache_has_is_reused():
    records = replayed(ROOMY)
    reused = [len(record.ask.prompt) - record.source["computed"] for record in records]
    assert reused == reusable([record.ask.prompt for record in records], 16)
    assert sum(reused) > 0.75 * sum(len(record.ask.prompt) for record in records)


def shares(records: list[Record]) -> tuple[float, float]:
    """Of all prompt tokens: how many were reused, and how many could have been."""
    reused = [len(record.ask.prompt) - record.source["computed"] for record in records]
    possible = reusable([record.ask.prompt for record in records], 16)
    assert all(had <= could for had, could in zip(reused, possible, strict=True)), (
        "reused what was never there"
    )
    num_tokens = sum(len(record.ask.prompt) for record in records)
    return sum(reused) / num_tokens, sum(possible) / num_tokens


@pytest.mark.parametrize("host_blocks", [SCARCE, TIGHT])
def test_with_too_little_room_nearly_all_is_still_reused_because_of_who_runs_next(host_blocks):
    reused, possible = shares(replayed(host_blocks))
    assert reused > 0.9 * possible
    in_order, _ = shares(replayed(host_blocks, "fifo"))
    assert in_order < 0.6 * possible, "in order of arrival there is room enough, too: this shows nothing"


def test_agents_that_allow_far_more_than_they_write_reuse_all_as_well():
    """With room in host memory: with less, what is kept depends on when copies end."""
    reused, possible = shares(replayed(ROOMY, replays=OpenReplay))
    assert reused > 0.99 * possible


# ---------------------------------------------------------------------------------------------------- figures


def test_a_measurement_reports_first_and_later_turns_apart_and_both_together(roomy):
    results = bench().measure(*roomy, silent)
    assert results.skipped == []
    first, later, whole = results.rows
    assert [row["turns"] for row in results.rows] == [FIRST, LATER, ALL]
    assert (first["done"], later["done"], whole["done"], whole["requests"]) == (
        USERS,
        NUM_REQUESTS - USERS,
        NUM_REQUESTS,
        NUM_REQUESTS,
    )
    assert (
        first["reused"] == 0.0
        and first["of_reusable"] is None
        and whole["of_reusable"] == later["of_reusable"] == 1.0
    )
    assert (
        whole["prompt_tokens"]
        == first["prompt_tokens"] + later["prompt_tokens"]
        == sum(whole["source"].values())
    )
    assert whole["reused"] == pytest.approx(1 - whole["source"]["computed"] / whole["prompt_tokens"])
    assert whole["output_tokens"] == sum(record["output_tokens"] for record in whole["records"])
    assert whole["overtaken_s"] == max(first["overtaken_s"], later["overtaken_s"])
    assert len(whole["records"]) == NUM_REQUESTS
    for record in whole["records"]:
        assert (
            record["submit_s"] <= record["start_s"]
            and record["first_s"] <= record["end_s"] <= whole["seconds"]
        )
        assert sum(record["source"].values()) == record["prompt_tokens"]
    assert sum(record["reusable_tokens"] for record in whole["records"]) == round(
        whole["reusable"] * whole["prompt_tokens"]
    )


def record_of(submit_s: float, first_s: float | None) -> Record:
    return Record("a", 1, Question(np.zeros(4, np.int32), 1, 0.0), submit_s, first_s=first_s)


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([(0.0, 1.0), (0.5, 2.0)], [0.0, 0.0]),
        ([(0.0, 3.0), (0.5, 2.0)], [0.5, 0.0]),
        # The latest that came in between counts, not the last that was answered.
        ([(0.0, 9.0), (5.0, 6.0), (4.0, 8.0)], [5.0, 0.0, 1.0]),
        # In the same step nobody is overtaken.
        ([(0.0, 2.0), (1.0, 2.0)], [0.0, 0.0]),
        ([(1.0, 2.0), (0.0, 2.0)], [0.0, 0.0]),
        # Who has no token when the time is over was overtaken by all that have one.
        ([(0.0, None), (7.0, 8.0), (9.0, None)], [7.0, 0.0, 0.0]),
    ],
)
def test_how_far_each_was_overtaken_is_worked_out_by_hand(requests, expected):
    records = [record_of(*one) for one in requests]
    found = overtaken(records)
    assert [found[record] for record in records] == expected


def test_percentiles_of_nothing_are_not_known():
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0, "max": 3.0}


def test_after_the_limit_it_stops_and_reports_what_was_done(roomy):
    results = bench(limit_s=0.0).measure(*roomy, silent)
    assert results.rows == []


def test_a_prompt_that_does_not_fit_the_context_is_refused_before_the_replay(roomy):
    with pytest.raises(ConfigError, match="the context holds 1100; lower --context"):
        bench(scale=32).measure(*roomy, silent)


def test_a_request_that_fails_ends_the_replay(roomy, monkeypatch):
    engine, config = roomy

    def fail(*_, **__):
        raise InvalidRequest("no more")

    monkeypatch.setattr(engine, "submit", fail)
    with pytest.raises(InvalidRequest, match="no more"):
        bench().measure(engine, config, silent)


def test_a_step_that_fails_ends_the_replay(roomy, monkeypatch):
    engine, config = roomy
    failure, result = StepFailure.of(RuntimeError("the device is gone")), RunningStep.wait_result
    monkeypatch.setattr(
        RunningStep, "wait_result", lambda step: dataclasses.replace(result(step), error=failure)
    )
    with pytest.raises(StepFailed, match="the device is gone"):
        bench().measure(engine, config, silent)
    chosen = select(read_conversations(EXCERPT), 1, ASKING.context, 1)
    replay = EngineReplay(ASKING.users_of(chosen, engine.tokenizer.vocab_size), engine, "by hand")
    with pytest.raises(StepFailed, match="the device is gone"):  # and not a wait for ever
        run_by_hand(replay)


# ----------------------------------------------------------------------------------------------------- agenda


def test_the_next_request_is_due_after_the_answer_and_its_pause():
    now = [0.0]

    def user(*pauses):
        return User("a", tuple(Question(np.zeros(1, np.int32), 1, pause) for pause in pauses))

    agenda = Agenda([user(0.0, 5.0), user(0.0, 1.0, 0.0)], lambda: now[0])
    assert [try_next(agenda), try_next(agenda), try_next(agenda)] == [(0, 0), (1, 0), None]
    agenda.answered(0, 0.0)
    agenda.answered(1, 2.0)
    now[0] = 2.9
    assert try_next(agenda) is None
    now[0] = 5.5
    assert [try_next(agenda), try_next(agenda), try_next(agenda)] == [(1, 1), (0, 1), None]
    agenda.answered(0, 6.0)
    agenda.answered(1, 5.0)
    assert [agenda.wait_next(), agenda.wait_next()] == [(1, 2), None], "nobody has anything left to ask"


def test_an_agenda_that_has_ended_lets_nobody_ask():
    agenda = Agenda([User("a", (Question(np.zeros(1, np.int32), 1, 0.0),))], lambda: 0.0)
    agenda.end()
    assert agenda.wait_next() is None


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
    assert whole["of_reusable"] == 1.0 and set(whole["source"]) == {
        "device",
        "host",
        "ssd",
        "remote",
        "computed",
    }
    assert whole["waiting_s"] is None and whole["ttft_s"] is not None
    assert all(record["output_tokens"] >= 1 for record in whole["records"])
    for name in {record["conversation"] for record in whole["records"]}:
        mine = [record for record in whole["records"] if record["conversation"] == name]
        assert [record["number"] for record in mine] == list(range(1, len(mine) + 1))
        assert all(before["end_s"] <= after["submit_s"] for before, after in pairwise(mine))
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
    assert all(isinstance(token, int) for token in body["prompt"]) and len(body["prompt"]) == 15818 // 64
    assert whole["source"]["cached"] == 15 and whole["source"]["computed"] == whole["prompt_tokens"] - 15
    assert [record["output_tokens"] for record in whole["records"]] == [3, 3, 3]


def test_without_hints_nothing_names_the_conversation(foreign):
    bench(users=1, requests=3).measure_url(ServerAddress(foreign.url, "m"), 512, 16, silent)
    assert not any({"session_id", "prompt_cache_key"} & set(body) for _, body in foreign.bodies)


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


def test_nobody_there_is_reported_as_such():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Foreign)
    server.server_close()
    results = bench(users=1).measure_url(
        ServerAddress(f"http://127.0.0.1:{server.server_port}/v1", "m"), 512, 16, silent
    )
    assert results.rows == [] and "refused" in results.skipped[0]


def test_a_limit_ends_the_wait_for_a_server(foreign):
    gate = threading.Event()

    def late(body):
        gate.wait(30.0)
        return stream_of(body)

    foreign.stream = late
    users = ASKING.users_of(select(read_conversations(EXCERPT), 2, 65536, 3), 512)
    replay = UrlReplay(users, ServerAddress(foreign.url, "m"))
    assert replay.run(0.0, silent) >= 0.0
    assert not any(record.done for record in replay.records)
    gate.set()


def test_usage_is_read_as_far_as_it_goes():
    assert source_of({}, 9) is None
    assert source_of({"prompt_tokens_details": None}, 9) is None
    assert source_of({"prompt_tokens_details": {"audio_tokens": 1}}, 9) is None
    assert source_of({"prompt_tokens_details": {"cached_tokens": 4}}, 9) == {"cached": 4, "computed": 5}
    assert source_of(
        {"prompt_tokens_details": {"cached_tokens": 4, "kv_source": {"host": 4, "computed": 5}}}, 9
    ) == {
        "host": 4,
        "computed": 5,
    }


# ---------------------------------------------------------------------------------------------------- command


TINY = (
    "--model",
    "tiny-llama",
    "--load-format",
    "dummy",
    "--device",
    "cpu",
    "--device-kv-blocks",
    "400",
    "--no-kv-offload",
)


def test_the_command_prints_a_table_and_writes_file_and_picture(tmp_path, capsys):
    """Longer prompts than the model's own config allows: random weights take them."""
    file, picture = tmp_path / "agents.json", tmp_path / "agents.png"
    sizes = ("--users", "2", "--requests", "3", "--scale", "8", "--json", str(file), "--plot", str(picture))
    assert main(["bench", "agents", str(EXCERPT), *TINY, *sizes]) == 0
    shown = capsys.readouterr().out
    assert "later" in shown and "worst overtaken s" in shown and "6 of 6" in shown
    report = json.loads(file.read_text())
    assert report["settings"] == dataclasses.asdict(Asking(EXCERPT.name, users=2, requests=3, scale=8))
    assert report["config"]["source"]["positions"] == report["config"]["engine"]["max_model_len"] > 2048
    assert [row["done"] for row in report["results"]] == [2, 4, 6]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_asks_a_server(foreign, tmp_path, capsys):
    file = tmp_path / "agents.json"
    argv = [
        "bench",
        "agents",
        str(EXCERPT),
        "--users",
        "1",
        "--requests",
        "3",
        "--url",
        foreign.url,
        "--model",
        "m",
        "--json",
        str(file),
    ]
    assert main([*argv, "--vocab", "7", "--plot", str(tmp_path / "agents.svg")]) == 0
    assert f"m at {foreign.url}" in capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["server"] == foreign.url and "config" not in report
    assert max(token for _, body in foreign.bodies for token in body["prompt"]) == 6
    foreign.stream = lambda _: b"data: [DONE]\n\n"
    assert main(argv) == 1, "what failed shows in the exit code"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
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
    ],
)
def test_a_wrong_argument_is_refused_by_name(argv, named, capsys):
    assert main(["bench", "agents", str(EXCERPT), *argv]) == 2
    shown = capsys.readouterr().err
    assert named in shown and "secret" not in shown


def test_a_bad_trace_ends_the_command_with_one_line(tmp_path, capsys):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"id": "a", "requests": []}\n')
    assert main(["bench", "agents", str(file)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "line 1: block_tokens" in shown.err
