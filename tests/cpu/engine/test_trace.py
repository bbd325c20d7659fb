"""What `--trace` writes of a real engine, read again and compared with the engine's own figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from penstock.engine.engine import Engine
from tests.cpu.engine.test_tiers import forget, until
from tests.support.driving import Collected, generate, run_all, settle_all, submit
from tests.support.trace_reader import read_trace

MakeEngine = Callable[..., Engine]
Prompts = Callable[..., list[int]]


def from_everywhere(engine: Engine, prompts: Prompts) -> list[Collected]:
    """Requests whose prompts are computed, or come from each tier; one is cancelled."""
    asked = [generate(engine, prompts(100))]
    forget(engine)
    asked.append(generate(engine, prompts(100)))
    settle_all(engine)
    engine.kv.begin_flush("persisted")
    settle_all(engine)
    forget(engine)
    forget(engine, "host")
    asked.append(generate(engine, prompts(100)))
    asked.append(generate(engine, prompts(100)))
    left = submit(engine, prompts(20, seed=2), max_tokens=100)
    until(engine, lambda: bool(left.tokens))
    engine.cancel(left.request_id)
    run_all(engine)
    settle_all(engine)
    return [*asked, left]


def test_all_that_begins_in_an_engine_has_an_end_in_its_trace(
    make_engine: MakeEngine, prompts: Prompts, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    engine = make_engine(host_blocks=32, ssd_dir=str(tmp_path / "ssd"), ssd_gib=0.02, trace=file)
    asked = from_everywhere(engine, prompts)
    stats = engine.stats()
    engine.close(timeout_s=20.0)
    trace = read_trace(file)
    assert not trace.open
    requests = trace.of("request")
    assert set(requests) == {one.request_id for one in asked}
    for one in asked:
        life, source = requests[one.request_id][-1], one.source
        assert source is not None and one.finish is not None
        assert (life.name, life.args["finish"]) == ("request", one.finish.value)
        assert life.args["tokens"] == len(one.tokens)
        (first,) = trace.marks(one.request_id, "first token")
        assert sum(first["prompt tokens from"].values()) == life.args["prompt tokens"]
        chunks = trace.marks(one.request_id, "prompt chunk")
        assert sum(chunk["tokens"] for chunk in chunks) == source.computed
    assert [one.source and one.source.ssd for one in asked] == [0, 0, 96, 0, 0]
    stages = [[stage.name for stage in requests[one.request_id]] for one in asked]
    assert stages[0] == ["look-up", "waiting", "running", "request"] and "loading" in stages[1]
    assert len(trace.of("step")) == stats.steps > 0
    moved = Counter[tuple[str, str]]()
    for (transfer,) in trace.of("transfer").values():
        moved[transfer.args["src"], transfer.args["dst"]] += transfer.args["bytes"]
    assert stats.traffic is not None
    assert {ends: num for ends, num in moved.items() if num} == {
        ends: num for ends, num in stats.traffic.bytes.items() if num
    }
    assert {"engine", "compute", "load", "save", "ssd-read-0"} <= set(trace.tracks)
    assert {"turn", "plan", "launch", "commit", "wait for result"} <= {
        one.name for one in trace.tracks["engine"]
    }


def test_an_engine_that_is_traced_answers_the_same(
    make_engine: MakeEngine, prompts: Prompts, tmp_path: Path
) -> None:
    traced, plain = make_engine(trace=tmp_path / "trace.json"), make_engine()
    assert generate(traced, prompts(50)).tokens == generate(plain, prompts(50)).tokens
