"""A `penstock serve` process that is fuzzed: how it is asked, and what has to hold of it between rounds. Owns
the process."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, BinaryIO, Self
from urllib.parse import urlsplit

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.testing.tiny_models import TINY_LLAMA, write_tiny_model
from tests.e2e.server.fuzz_cases import (
    ADAPTER,
    MAX_BODY_BYTES,
    MAX_CONCURRENT,
    MAX_MODEL_LEN,
    MODEL,
    Bytes,
    Case,
)
from tests.e2e.server.fuzz_oracles import Answer, Choice, Finding, check_error, generated, judge, need, same
from tests.support.adapters import write_random_adapter

READY = "Penstock is ready on "
DEADLINE_S = 120.0
# after which no more answers are waited for on a connection that a request may have left waiting
SILENCE_S = 0.2
NUM_SIDE, NUM_LOADS = 32, 8  # seats of the small routes, as the server's source has them
GROWTH_BYTES = 192 << 20  # resident memory over what it was when first idle
GROWTH_FILES = 64  # connections that are kept for a while after their last request
CANARY = {
    "model": MODEL,
    "prompt": "Between the two lies an order that",
    "max_tokens": 24,
    "seed": 3,
    "temperature": 0.8,
    "logprobs": 2,
}


class Unsendable(Exception):
    """The client's library refuses to say this; the cases on bare sockets say it."""


class Target:
    """Starts the process, and starts it anew when a request has ended it, so that a shorter request can be
    tried."""

    def __init__(self, folder: Path, key: str | None = None) -> None:
        write_tiny_model(folder / MODEL)
        for number in range(2):
            write_random_adapter(folder / "adapters" / f"a{number}", TINY_LLAMA, number)
        self._folder = folder
        self.log = folder / "log"
        self._key = key
        self.seen: Counter[int] = Counter()  # statuses of answers
        self._stack = contextlib.ExitStack()
        self.start()

    # ---- life

    def start(self) -> None:
        self._stack.close()
        command = [sys.executable, "-m", "penstock", "serve", "--port", "0", *self._settings()]
        self.log.write_text("")
        log = self._stack.enter_context(self.log.open("a"))
        # the tree that these tests are of, whatever is installed
        source = str(Path(penstock.__file__).parents[1])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        self._stack.callback(self._end)
        assert self._process.stdout is not None
        line = next((line for line in self._process.stdout if line.startswith(READY)), None)
        if line is None:
            raise RuntimeError(f"the server did not start: {self.log.read_text()[-3000:]}")
        self.url = line.removeprefix(READY).strip()
        address = urlsplit(self.url)
        self.address = (str(address.hostname), int(address.port or 0))
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._http = self._stack.enter_context(
            httpx.Client(base_url=self.url, timeout=DEADLINE_S, headers=headers)
        )
        self.rest = Rest(self)

    def _settings(self) -> list[str]:
        """Small enough that blocks are evicted and limits are met; all tiers and the sanitizer on."""
        lora = ["--lora", f"{ADAPTER}={self._folder}/adapters/a0", "--lora-dir", f"{self._folder}/adapters"]
        memory = [
            "--device-kv-blocks",
            "48",
            "--kv-offload-host-gib",
            "0.002",
            "--max-model-len",
            str(MAX_MODEL_LEN),
        ]
        disk = ["--kv-offload-ssd-dir", f"{self._folder}/ssd", "--kv-offload-ssd-gib", "0.02"]
        limits = [
            "--max-concurrent",
            str(MAX_CONCURRENT),
            "--max-body-bytes",
            str(MAX_BODY_BYTES),
            "--max-batch",
            "16",
        ]
        limits += [] if self._key is None else ["--api-key", self._key]
        return [
            "--model",
            str(self._folder / MODEL),
            "--device",
            "cpu",
            "--sanitize=strict",
            *lora,
            *memory,
            *disk,
            *limits,
        ]

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    @property
    def usable(self) -> bool:
        """Whether it still answers: a finding may have ended it, or the sanitizer its engine."""
        if not self.runs:
            return False
        try:
            return self._http.get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def recover(self) -> None:
        """After a finding, so that the next request is judged for itself."""
        self.log.write_text("")
        if not self.usable:
            self.start()

    # ---- asking

    def ask(self, case: Case) -> Answer:
        """Raises Finding where there is no answer at all."""
        headers = [(name, value.encode("latin-1")) for name, value in case.headers]
        content = case.body if not case.pieces else _pieces(case.body or b"", case.pieces)
        try:
            request = self._http.build_request(case.method, self.url, content=content, headers=headers)
            request.url = request.url.copy_with(raw_path=case.target.encode("latin-1"))
            if ".." in case.target and request.url.raw_path != case.target.encode("latin-1"):
                raise httpx.InvalidURL("this client would ask for another path")
            reply = self._http.send(request, stream=True)
        except (httpx.LocalProtocolError, httpx.InvalidURL) as error:
            raise Unsendable from error
        except httpx.HTTPError as error:
            raise Finding(f"no answer: {error!r}") from error
        with contextlib.closing(reply):
            body = b""
            try:
                for part in reply.iter_raw():
                    body += part
                    endless = case.path == "/page/events" and reply.status_code == 200
                    if endless or (case.leave_after is not None and len(body) >= case.leave_after):
                        return Answer(reply.status_code, reply.headers, body, whole=False)
            except httpx.HTTPError as error:
                raise Finding(f"the answer breaks off: {error!r} after {body[-200:]!r}") from error
        return Answer(reply.status_code, reply.headers, body)

    def judged(self, case: Case) -> Answer:
        answer = self.ask(case)
        self.seen[answer.status] += 1
        judge(case, answer)
        return answer

    def write(self, raw: Bytes) -> list[int]:
        """The statuses that a connection gets for these bytes."""
        answers: list[Answer] = []
        with socket.create_connection(self.address, timeout=DEADLINE_S) as link, contextlib.suppress(OSError):
            # It may hang up on garbage while we write.
            for piece in raw.pieces:
                link.sendall(piece)
            if raw.end == "half":
                link.shutdown(socket.SHUT_WR)
            elif raw.end == "wait":
                link.settimeout(SILENCE_S)
            elif raw.end == "reset":
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if raw.end in ("half", "wait"):
                read_answers(link, answers)
        for answer in answers:
            self.seen[answer.status] += 1
            need(answer.status < 500, f"status {answer.status} at the level of TCP")
            if answer.status >= 400:
                check_error(answer)
        return [answer.status for answer in answers]

    @contextlib.contextmanager
    def holding(self, path: str, num_bytes: int) -> Iterator[socket.socket]:
        """A connection whose request has its seat and is waited for: the server says 100 when it begins to
        read the body."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "
            f"{num_bytes}\r\nExpect: 100-continue\r\n\r\n"
        )
        with socket.create_connection(self.address, timeout=DEADLINE_S) as link:
            link.sendall(head.encode())
            begun = link.recv(4096)
            need(
                begun.startswith(b"HTTP/1.1 100"),
                f"{path} has fewer seats than it should have: {begun[:60]!r}",
            )
            yield link

    def samples(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        for family in text_string_to_metric_families(self._http.get("/metrics").text):
            for sample in family.samples:
                yield sample.name, tuple(sample.labels.values()), sample.value

    def size(self) -> tuple[int, int]:
        """Resident bytes, and open files and connections."""
        parent = psutil.Process(self._process.pid)
        processes = [parent, *parent.children(recursive=True)]
        return sum(int(one.memory_info().rss) for one in processes), sum(
            int(one.num_fds()) for one in processes
        )


class Rest:
    """A target when nobody asks for anything: what it must be then, and how it was at first."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.first_canary = self.canary()
        self.wait_idle()
        self.totals = self._blocks_by_tier()
        self.size = target.size()

    def canary(self) -> list[Choice]:
        case = Case(
            "POST",
            "/v1/completions",
            httpx.Request("POST", self._target.url, json=CANARY).read(),
            fields=CANARY,
            legal=True,
        )
        return generated(case, self._target.judged(case)).choices

    def check(self) -> None:
        """Alive, idle, with everything given back, and still of the same opinion."""
        need(self._target.runs, f"the server has ended: {self._target.log.read_text()[-1500:]}")
        for path in ("/health", "/live"):
            self._target.judged(Case("GET", path))
        self.check_log()
        self._check_counts()
        self.wait_idle()
        need(
            self._blocks_by_tier() == self.totals,
            f"blocks were {self.totals} and are {self._blocks_by_tier()}",
        )
        self._check_seats()
        same(self.first_canary, self.canary())
        self.wait_idle()
        for what, now, first, limit in zip(
            ("bytes", "files"), self._target.size(), self.size, (GROWTH_BYTES, GROWTH_FILES), strict=True
        ):
            need(now - first < limit, f"{what} have grown from {first} to {now}")

    def check_log(self) -> None:
        text = self._target.log.read_text(errors="replace")
        bad = re.search(r"^.*( ERROR | CRITICAL |Traceback).*(\n(?!\d{4}-).*)*", text, re.M)
        need(
            bad is None,
            f"the log has an error: {bad[0][:100] if bad else ''} ... {bad[0][-1500:] if bad else ''}",
        )

    def wait_idle(self) -> None:
        """Polled: what a hang-up has cancelled ends at the engine's next step, and saves go on by
        themselves."""
        by_s = time.monotonic() + DEADLINE_S
        while busy := self.busy():
            need(time.monotonic() < by_s, f"not idle: {busy}")
            time.sleep(0.01)

    def busy(self) -> dict[str, float]:
        """What is not zero and has to be, when nobody asks for anything."""
        found = {}
        for name, labels, value in self._target.samples():
            held = name == "penstock_kv_blocks" and not {"free", "idle", "used"} & set(labels)
            open_now = name in ("penstock_requests", "penstock_leases_open", "penstock_transfers_inflight")
            if value and (held or open_now):
                found[f"{name} {' '.join(labels)}"] = value
        return found

    def _check_counts(self) -> None:
        """Of what never happens. A block may be missing: a reset has come between finding and reading it."""
        for name, labels, value in self._target.samples():
            failed = name == "penstock_transfer_failures_total" and "missing" not in labels
            wrong = failed or name in ("penstock_sanitizer_reports_total", "penstock_checksum_failures_total")
            need(not (wrong and value), f"{name} {labels} is {value}")
            need(name != "penstock_tier_usable" or value, f"the tier {labels} is fenced off")

    def _blocks_by_tier(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for name, labels, value in self._target.samples():
            if name == "penstock_kv_blocks":
                tier = next(label for label in labels if label in ("device", "host", "ssd"))
                totals[tier] = totals.get(tier, 0) + value
        return totals

    def _check_seats(self) -> None:
        """Each gate has all of its seats: one request takes all generations, and as many bodies as a gate
        admits are waited for."""
        fields = {"model": MODEL, "prompt": "x", "n": MAX_CONCURRENT, "max_tokens": 1, "seed": 1}
        body = httpx.Request("POST", self._target.url, json=fields).read()
        self._retry_busy(Case("POST", "/v1/completions", body, fields=fields, legal=True))
        self._fill("/tokenize", NUM_SIDE, b'{"prompt":"x"}')
        self._fill("/v1/load_lora_adapter", NUM_LOADS, b'{"lora_name":"passing","lora_path":"a1"}')

    def _retry_busy(self, case: Case) -> None:
        """A client that hung up keeps its seats until the engine has ended what it asked for."""
        by_s = time.monotonic() + DEADLINE_S
        while self._target.judged(case).status == 429:
            need(time.monotonic() < by_s, "seats at the gate of generations are not given back")
            time.sleep(0.01)

    def _fill(self, path: str, num: int, body: bytes) -> None:
        """`num` requests at once, each past its gate and without its body: one more is refused, and then all
        of them are answered."""
        with contextlib.ExitStack() as stack:
            links = [stack.enter_context(self._target.holding(path, len(body))) for _ in range(num)]
            need(
                self._target.ask(Case("POST", path, body)).status == 429, f"{path} has more than {num} seats"
            )
            for link in links:
                link.sendall(body)
            for link in links:
                read_answers(link, answers := [])
                need(
                    [answer.status for answer in answers] == [200],
                    f"{path} does not answer what it has admitted",
                )


def _pieces(body: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


def read_answers(link: socket.socket, answers: list[Answer]) -> None:
    """Adds those that come whole on a connection, until it ends, breaks off or is silent."""
    with link.makefile("rb") as stream:
        shared = SimpleNamespace(makefile=lambda mode: _Unclosed(stream))
        while True:
            response = HTTPResponse(shared)  # type: ignore[arg-type]
            try:
                if not stream.peek(1):
                    return
                response.begin()
                headers = {name.lower(): value for name, value in response.getheaders()}
                answers.append(Answer(response.status, headers, response.read()))
            except (IncompleteRead, TimeoutError):  # we left first: half closed is as good as gone
                return
            except (HTTPException, ValueError) as error:
                raise Finding(f"an answer that is no HTTP: {error!r}") from error


class _Unclosed:
    """One buffer for several answers, each of which closes what it has read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
