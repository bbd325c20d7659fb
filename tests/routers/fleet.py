"""Two Penstock servers with the embedded model and one shared store, and routers from the package index in
environments of their own. Owns the processes; the tests decide what is asked.

All of it runs in a network namespace of its own (`make routers`): some routers listen on all addresses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.servers import Valkey, free_port

ENVIRONMENTS = Path(__file__).resolve().parents[2] / ".routers"
DEADLINE_S = 180.0
BLOCK = 16
MODEL = "smollm2-135m"
FLAGS = ("--device", "cpu", "--weights", "int4", "--max-model-len", "1024", "--api-processes", "1")
TIERS = ("--device-kv-blocks", "128", "--kv-offload-host-gib", "0.75")


def say(text: str) -> None:
    print(f"    {text}", flush=True)


def post(url: str, body: Any = None) -> Any:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
            return json.loads(reply.read() or b"null")
    except urllib.error.HTTPError as error:
        error.add_note(error.read().decode())
        raise


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as reply:
        found: bytes = reply.read()
        return found


def until(condition: Callable[[], object], what: str) -> None:
    by_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            if condition():
                return
        except (OSError, urllib.error.URLError):
            pass
        assert time.monotonic() < by_s, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(0.05)


class Process:
    """A program with its log; killed at the end."""

    def __init__(self, name: str, command: Sequence[str], health: str) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)
        try:
            until(lambda: self._is_up(health), f"{name} is up")
        except BaseException:
            self.kill()
            raise

    def _is_up(self, health: str) -> bool:
        assert self.process.poll() is None, f"{self.name} has ended:\n{self.log()}"
        return bool(get(health) or True)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Worker(Process):
    """A Penstock server that publishes events."""

    def __init__(self, number: int, store: Valkey) -> None:
        self.number = number
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.events, self.replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        command = [sys.executable, "-m", "penstock", "serve", "--port", str(port), *FLAGS, *TIERS]
        command += ["--kv-offload-remote", store.url()]
        command += ["--kv-events", self.events, "--kv-events-replay", self.replay]
        super().__init__(f"server {number}", command, f"{self.url}/health")

    def complete(self, prompt: str, num: int = 8) -> tuple[str, dict[str, int]]:
        """Prompt and answer, and where the prompt's KV came from."""
        return completed(self.url, prompt, num)

    def flush(self) -> None:
        post(f"{self.url}/cache/flush?level=persisted")


def completed(url: str, prompt: str, num: int = 8) -> tuple[str, dict[str, int]]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num, "temperature": 0, "ignore_eos": True}
    reply = post(f"{url}/v1/completions", body)
    return prompt + reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["kv_source"]


class Fleet:
    def __init__(self) -> None:
        self.store = Valkey()
        self.workers: list[Worker] = []
        for number in (1, 2):
            say(f"starting server {number}")
            self.workers.append(Worker(number, self.store))

    def tokens(self, text: str) -> list[int]:
        found: list[int] = post(f"{self.workers[-1].url}/tokenize", {"prompt": text})["tokens"]
        return found

    def settle(self) -> None:
        """All computed blocks are saved, and all events about them are sent."""
        for worker in self.workers:
            worker.flush()
        time.sleep(1.0)  # the routers take in what was sent

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.store.close()


def prompt_of(number: int) -> str:
    """The first turn of a conversation: some 160 tokens that no other has."""
    words = (
        "river",
        "engine",
        "lemon",
        "granite",
        "violin",
        "harbour",
        "falcon",
        "copper",
        "meadow",
        "winter",
    )
    r = number
    told = []
    for place in range(30):
        r = (r * 1103515245 + 12345 + place) % (1 << 31)
        told.append(f"{words[(r >> 8) % len(words)]} {(r >> 16) % 97}")
    return f"Conversation {number}. " + ", ".join(told) + ". Now go on:"


class Turns(NamedTuple):
    """How the turns of conversations went."""

    owners: list[int]  # number of the server that answered the turn before
    chosen: list[int]  # number of the server that answered this one
    sources: list[dict[str, int]]  # where the KV of its prompt came from

    @property
    def num_returned(self) -> int:
        """To the server that has the KV, which then had most of it in its own memory."""
        return sum(
            owner == chosen and source["device"] + source["host"] >= 8 * BLOCK
            for owner, chosen, source in zip(self.owners, self.chosen, self.sources, strict=True)
        )
