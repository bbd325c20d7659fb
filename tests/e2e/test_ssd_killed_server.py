"""A server with an SSD cache that is killed in the middle of its work: what was persisted is there for the
next one, with the same tokens."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx

DEADLINE_S = 120.0
FLAGS = (
    *("--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--max-model-len", "1024"),
    *("--device-kv-blocks", "256", "--kv-offload-host-gib", "0.1"),
)
PROMPT = "Once upon a time, in a village by the sea, there lived a clockmaker who had never been late. " * 4
OTHERS = [
    f"{number} ships came in on the morning of the feast, and each of them carried a different kind of wood."
    for number in range(4)
]

StartServer = Callable[..., tuple["subprocess.Popen[str]", str]]


def ask(http: httpx.Client) -> tuple[list[str], dict[str, int]]:
    """Tokens, and where the prompt's KV came from."""
    question = {"model": "tiny-llama", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "logprobs": 0}
    reply = http.post("/v1/completions", json=question).raise_for_status().json()
    return reply["choices"][0]["logprobs"]["tokens"], reply["usage"]["prompt_tokens_details"]["kv_source"]


def kill_in_the_middle(http: httpx.Client, process: subprocess.Popen[str]) -> None:
    """While others are being answered: each has begun, none gets an end."""
    question = {"model": "tiny-llama", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        replies = [
            stack.enter_context(http.stream("POST", "/v1/completions", json={**question, "prompt": other}))
            for other in OTHERS
        ]
        streams = [reply.iter_lines() for reply in replies]
        for lines in streams:
            assert next(line for line in lines if line).startswith("data: ")
        process.kill()
        assert process.wait(DEADLINE_S) == -9
        for lines in streams:
            with contextlib.suppress(httpx.HTTPError):
                assert not any("[DONE]" in line for line in lines)


def wait_found(http: httpx.Client, num_blocks: int) -> None:
    """The directory is read in the background."""
    by_s = time.monotonic() + DEADLINE_S
    while http.get("/cache/stats").json()["kv_blocks"]["ssd"]["used"] < num_blocks:
        assert time.monotonic() < by_s, "what was persisted is not found"
        time.sleep(0.02)


def test_what_was_persisted_before_a_kill_answers_the_same_prompt_after_it(
    start_server: StartServer, tmp_path: Path
) -> None:
    disk = ("--kv-offload-ssd-dir", str(tmp_path / "ssd"), "--kv-offload-ssd-gib", "0.2")
    process, url = start_server(*FLAGS, *disk)
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        cold, source = ask(http)
        num_tokens = sum(source.values())
        assert source["computed"] == num_tokens
        assert http.post("/cache/flush?level=persisted").json() == {"level": "persisted"}
        num_blocks = http.get("/cache/stats").json()["kv_blocks"]["ssd"]["used"]
        assert num_blocks >= num_tokens // 16
        kill_in_the_middle(http, process)
    _, url = start_server(*FLAGS, *disk)
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as http:
        wait_found(http, num_blocks)
        warm, source = ask(http)
        assert warm == cold
        full_blocks = num_tokens // 16 * 16
        assert source == {
            "device": 0,
            "host": 0,
            "ssd": full_blocks,
            "remote": 0,
            "computed": num_tokens - full_blocks,
        }
