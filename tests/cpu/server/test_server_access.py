"""Each exchange has an id, a line in the log that says how it ended and why, and its place in the figures."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.config import ServerConfig
from penstock.engine.adapters import AdapterStore
from penstock.engine.stats import EngineStats
from penstock.errors import ConfigError
from penstock.models.adapters import AdapterFiles
from penstock.models.lora import AdapterWeights
from penstock.server.run import server_here
from tests.cpu.server.served import MODEL, Served, completion, read_until, serving, until
from tests.support.scripted_engine import ScriptedEngine, ScriptedLoop

HI = [{"role": "user", "content": "hi"}]


class Lines(logging.Handler):
    """The access log as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def last(self, num: int = 1) -> dict[str, Any]:
        """The fields of the newest line, once there are `num`: it comes after the answer."""
        until(lambda: len(self.records) >= num, f"{num} lines")
        return self.records[-1].fields  # type: ignore[attr-defined]


@pytest.fixture
def lines() -> Any:
    logger, handler = logging.getLogger("penstock.access"), Lines()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def sample(served: Served, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(served.http.get("/metrics").text)
    found = [
        s.value for f in families for s in f.samples if s.name == name and labels.items() <= s.labels.items()
    ]
    return sum(found) if found else 0.0


# -------------------------------------------------------------------------------------------------------- ids


def test_a_clients_own_id_comes_back_and_is_in_the_log(served: Served, lines: Lines) -> None:
    for path, body in (
        ("/v1/completions", completion(max_tokens=1)),
        ("/v1/chat/completions", {"model": MODEL, "messages": HI}),
    ):
        for stream in (False, True):
            sent = {**body, "max_tokens": 1, "stream": stream}
            reply = served.http.post(path, json=sent, headers={"x-request-id": "my-id/7"})
            assert reply.headers.get_list("x-request-id") == ["my-id/7"]
            assert "my-id" not in reply.text  # an id of a reply is unique, and clients may send one twice
    until(lambda: len(lines.records) == 4, "four lines")
    assert {record.fields["id"] for record in lines.records} == {"my-id/7"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        (b"a b\tc", "abc"),
        (b'a"b\\c<script>', "abcscript"),
        (b"\xff\xfe", None),
        (b"", None),
        (b"x" * 5000, "x" * 128),
        (b"{}", None),
    ],
)
def test_a_wild_id_is_cleaned_or_replaced(served: Served, sent: bytes, kept: str | None) -> None:
    given = served.http.get("/version", headers=[(b"x-request-id", sent)]).headers["x-request-id"]
    assert given == kept if kept is not None else len(given) == 32 and given.isalnum()


# -------------------------------------------------------------------------------------------------------- log


def test_a_line_says_who_asked_for_what_and_how_it_went(served: Served, lines: Lines) -> None:
    served.http.post("/v1/completions", json=completion("x" * 40, max_tokens=5, n=2))
    fields = lines.last()
    assert (fields["method"], fields["path"], fields["status"], fields["model"]) == (
        "POST",
        "/v1/completions",
        200,
        MODEL,
    )
    assert (fields["prompt_tokens"], fields["output_tokens"], fields["finish"], fields["stream"]) == (
        40,
        10,
        "length",
        False,
    )
    assert fields["from_computed"] + fields.get("from_device", 0) == 40
    assert 0 <= fields["ttft_s"] <= fields["total_s"] and "error" not in fields
    text = lines.records[-1].getMessage()
    assert f"id={fields['id']}" in text and "prompt_tokens=40" in text and "\n" not in text


def test_a_refusal_says_why(served: Served, lines: Lines) -> None:
    asked = [
        ("/v1/completions", completion(temperature=-1), 400, "temperature must be at least 0"),
        ("/v1/completions", {"model": "other", "prompt": "x"}, 404, "there is no model 'other'"),
        ("/nowhere", {}, 404, "there is no such path"),
    ]
    for num, (path, body, status, why) in enumerate(asked, 1):
        served.http.post(path, json=body)
        fields = lines.last(num)
        assert fields["status"] == status and why in fields["error"]


def test_a_missing_key_and_a_defect_say_why(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(api_key="k") as served:
        served.http.get("/v1/models")
        assert lines.last()["status"] == 401 and "API key" in lines.last()["error"]
        monkeypatch.setattr(served.engine, "stats", lambda: 1 / 0)
        served.http.get("/cache/stats", headers={"authorization": "Bearer k"})
        assert lines.last(2)["status"] == 500 and "internal error" in lines.last(2)["error"]


def test_a_path_cannot_forge_a_line(served: Served, lines: Lines) -> None:
    served.http.get("/x%0astatus=200%20id=forged%1b[31m" + "y" * 3000)
    fields, text = lines.last(), lines.records[-1].getMessage()
    assert "\n" not in text and "\x1b" not in text and len(fields["path"]) < 700


def test_a_client_that_hangs_up_is_in_the_log_and_in_the_figures(served: Served, lines: Lines) -> None:
    served.engine.hold()
    served.send("/v1/completions", completion(max_tokens=50)).close()
    fields = lines.last()
    assert (fields["status"], fields["path"]) == (499, "/v1/completions")
    stream = served.send("/v1/completions", completion(max_tokens=50, stream=True))
    read_until(stream, b"\r\n\r\n")
    stream.close()
    fields = lines.last(2)
    assert (fields["status"], fields["finish"]) == (200, "cancelled")
    served.engine.release()
    assert sample(served, "penstock_finished_total", reason="cancelled") >= 1


def test_probes_are_not_in_the_log_unless_they_fail(served: Served, lines: Lines) -> None:
    for path in ("/health", "/live", "/metrics"):
        assert served.http.get(path).status_code == 200
    served.loop.age_s = 99.0
    until(lambda: served.service.trouble(), "it is known")
    served.http.get("/live")
    lines.last()
    assert [record.fields["path"] for record in lines.records] == ["/live"]  # type: ignore[attr-defined]
    served.loop.age_s = None


# ---------------------------------------------------------------------------------------------------- figures


def test_requests_are_counted_by_path_status_and_finish(served: Served) -> None:
    for _ in range(3):
        served.http.post("/v1/completions", json=completion("x" * 40, max_tokens=5, n=2))
    served.http.post("/v1/completions", json=completion(temperature=-1))
    served.http.get(f"/v1/models/{MODEL}")
    for i in range(5):
        served.http.get(f"/made/up/{i}")
    count = "penstock_http_requests_total"
    assert sample(served, count, path="/v1/completions", status="200", model=MODEL) == 3
    assert sample(served, count, path="/v1/completions", status="400") == 1
    assert sample(served, count, path="/v1/models/{model}", status="200") == 1
    assert sample(served, count, path="other", status="404") == 5
    assert sample(served, "penstock_finished_total", reason="length", model=MODEL) == 6
    assert sample(served, "penstock_e2e_seconds_count") == 3
    assert sample(served, "penstock_prompt_length_tokens_sum") == 120
    assert sample(served, "penstock_output_length_tokens_sum") == 30
    assert sample(served, "penstock_output_length_tokens_bucket", le="4.0") == 0
    assert sample(served, "penstock_output_length_tokens_bucket", le="16.0") == 3


def test_dashboards_of_vllm_find_their_figures(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.http.post("/v1/completions", json=completion("x" * 40, max_tokens=5))
    stats: EngineStats = served.engine.stats()
    shown = EngineStats(
        **{
            **{name: getattr(stats, name) for name in EngineStats.__dataclass_fields__},
            "requests": {"waiting": 3, "loading": 1, "running": 4, "retracted": 2},
            "kv_blocks": {
                "device": {"free": 10, "idle": 15, "active": 60, "reserved": 15},
                "host": {"free": 1},
            },
            "prompt_tokens": {"device": 30, "host": 20, "computed": 50},
            "retractions": 9,
        }
    )
    monkeypatch.setattr(served.engine, "stats", lambda: shown)
    expected = {
        "num_requests_running": 5,
        "num_requests_waiting": 5,
        "kv_cache_usage_perc": 0.75,
        "prompt_tokens_total": 100,
        "generation_tokens_total": stats.generated_tokens,
        "num_preemptions_total": 9,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 50,
        "time_to_first_token_seconds_count": sum(stats.ttft.counts),
        "e2e_request_latency_seconds_count": 1,
        "request_prompt_tokens_sum": 40,
        "request_generation_tokens_sum": 5,
    }
    for name, value in expected.items():
        assert sample(served, f"vllm:{name}", model_name=MODEL, engine="0") == pytest.approx(value), name
    assert sample(served, "vllm:request_success_total", finished_reason="length") == 1


# ------------------------------------------------------------------------------------------- the small routes


def test_the_key_does_not_guard_metrics_where_that_was_asked_for() -> None:
    with serving(api_key="k", public_metrics=True) as served:
        assert [
            served.http.get(path).status_code for path in ("/metrics", "/v1/models", "/", "/version")
        ] == [200, 401, 401, 401]
    with serving(api_key="k") as served:
        assert served.http.get("/metrics").status_code == 401
    with pytest.raises(ConfigError, match="--public-metrics needs --api-key"):
        ServerConfig(public_metrics=True)


def test_several_names_are_one_model() -> None:
    with serving(served_names=("gpt-4o", "org/other")) as served:
        assert [card["id"] for card in served.http.get("/v1/models").json()["data"]] == [
            "gpt-4o",
            "org/other",
        ]
        for name in ("gpt-4o", "org/other"):
            assert (
                served.http.post("/v1/completions", json=completion(max_tokens=1) | {"model": name}).json()[
                    "model"
                ]
                == name
            )
            assert served.http.get(f"/v1/models/{name}").json()["root"] == MODEL
        refused = served.http.post("/v1/completions", json=completion(max_tokens=1))
        assert refused.status_code == 404 and "'gpt-4o'" in refused.text
        assert served.http.post("/tokenize", json={"model": "gpt-4o", "prompt": "x"}).status_code == 200
        assert sample(served, "penstock_build_info", model="gpt-4o") == 1


def test_an_adapter_cannot_have_a_name_of_the_model(tmp_path: Path) -> None:
    store = AdapterStore("scripted", lambda directory: AdapterFiles("", AdapterWeights(())), root=tmp_path)
    store.load("mine", tmp_path)
    with serving(ScriptedEngine(adapters=store), served_names=("gpt-4o",)) as served:
        reply = served.http.post("/v1/load_lora_adapter", json={"lora_name": "gpt-4o", "lora_path": "x"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "lora_name") and (
            "the model itself"
        ) in reply.text
        assert served.http.get("/v1/models/mine").json()["parent"] == "gpt-4o"
    engine = ScriptedEngine(adapters=store)
    with pytest.raises(ConfigError, match="an adapter has that name"):
        server_here(engine, ScriptedLoop(engine), ServerConfig(port=0, served_names=("mine",)))


@pytest.mark.parametrize("names", [("",), ("a b",), ("x" * 129,), ("a", "a"), ("\n",)])
def test_names_that_no_client_could_use_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--served-model-name"):
        ServerConfig(served_names=names)
