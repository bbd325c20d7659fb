"""Spans of requests: what a collector gets over OTLP, whose trace they belong to, and that nothing is
imported without the flag."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from penstock import cli
from penstock.config import ServerConfig
from penstock.errors import ConfigError
from tests.cpu.server.served import completion, serving
from tests.cpu.server.tiered_server import MODEL as REAL_MODEL
from tests.cpu.server.tiered_server import PROMPT, tiered

otlp = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="OpenTelemetry is an extra"
)
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry is an extra")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A real receiver of OTLP over HTTP. Its spans are complete once the server has closed."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        collector = self

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                request = otlp.ExportTraceServiceRequest.FromString(data)
                collector.paths.add(self.path)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *words: Any) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Receiver)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, name: str) -> Any:
        (found,) = [span for span in self.spans if span.name == name]
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def fields(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_request_is_a_span_with_its_parts_in_the_trace_of_its_client(collector: Collector) -> None:
    with tiered(server={"otlp_endpoint": collector.url}, host_blocks=0) as server:
        traced = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        asked = {"model": REAL_MODEL, "prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
        assert server.http.post("/v1/completions", json=asked, headers=traced).status_code == 200
        assert server.http.get("/health").status_code == 200  # asked every few seconds: no span
    span = collector.of("POST /v1/completions")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT) and collector.paths == {
        "/v1/traces"
    }
    found = fields(span)
    assert found["gen_ai.request.model"] == REAL_MODEL and found["penstock.request_id"] == "mine"
    assert (found["gen_ai.usage.output_tokens"], found["http.response.status_code"]) == (3, 200)
    children = [one for one in collector.spans if one.parent_span_id == span.span_id]
    assert [child.name for child in children] == ["match", "queue", "prefill", "decode"] and len(
        collector.spans
    ) == 5
    assert {child.trace_id.hex() for child in children} == {TRACE}
    for before, after in itertools.pairwise(children):
        assert before.start_time_unix_nano <= before.end_time_unix_nano <= after.end_time_unix_nano
    assert (
        span.start_time_unix_nano <= children[0].start_time_unix_nano
        and children[-1].end_time_unix_nano <= span.end_time_unix_nano
    )


def test_loads_from_colder_tiers_are_a_part(collector: Collector) -> None:
    with tiered(server={"otlp_endpoint": collector.url}) as server:
        for _ in range(2):
            reply = server.http.post(
                "/v1/completions", json={"model": REAL_MODEL, "prompt": PROMPT, "max_tokens": 2}
            )
            server.forget_the_device()
        assert reply.json()["usage"]["prompt_tokens_details"]["kv_source"]["host"] > 0
    roots = [span for span in collector.spans if span.name == "POST /v1/completions"]
    names = [[one.name for one in collector.spans if one.parent_span_id == root.span_id] for root in roots]
    assert names == [["match", "queue", "prefill", "decode"], ["match", "queue", "load", "prefill", "decode"]]
    assert (
        fields(roots[1])["penstock.prompt_tokens.host"]
        == reply.json()["usage"]["prompt_tokens_details"]["kv_source"]["host"]
    )


def test_a_collector_that_is_not_there_keeps_nobody_waiting() -> None:
    with serving(otlp_endpoint="http://127.0.0.1:9") as served:
        assert served.http.post("/v1/completions", json=completion(max_tokens=3)).status_code == 200


def test_nothing_of_it_is_imported_without_the_flag() -> None:
    """In a process of its own: the client of these tests has it imported already."""
    program = (
        "import sys; from penstock.config import ServerConfig; from penstock.server.run import server_here; "
        "import penstock.cli\nfrom tests.support.scripted_engine import ScriptedEngine, ScriptedLoop\n"
        "engine = ScriptedEngine(); server_here(engine, ScriptedLoop(engine), ServerConfig(port=0))\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert made.stdout.strip() == "[]", made.stderr


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:4318", "grpc://x:4317", "http://", "http://x?a=b"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        ServerConfig(otlp_endpoint=endpoint)


def test_a_missing_extra_is_said_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.commands.serve._has_opentelemetry", lambda: False)
    assert cli.main(["serve", "--otlp-endpoint", "http://127.0.0.1:4318"]) != 0
    assert "pip install 'penstock[otel]'" in capsys.readouterr().err
