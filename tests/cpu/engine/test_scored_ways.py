"""Every way into a scored request: whatever it finds of its prompt, and wherever, its tokens see what they
see when all is computed. All of it runs under the sanitizer.

Holds invariant 28: sources are the tiers of each way. Holds invariant 29: what every step shows is enough at
once.
"""

from __future__ import annotations

import dataclasses
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config import GIB, Config, EngineConfig, KvConfig, ModelSource, OffloadConfig
from penstock.contract import Chunk, KvSource, SnapshotRequest
from penstock.engine import sizing
from penstock.engine.engine import Engine
from penstock.engine.pace import ScoringCost
from penstock.engine.scheduling import residency
from penstock.kv import build as kv_build
from penstock.kv.tiers.store import Space
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.testing.sanitized import build_sanitized, check_silent
from penstock.testing.stores import MemoryStore
from retrieval import Retrieval, haystack, write_retrieval_model
from tests.support.driving import Collected, generate, run_all, settle_all, submit, tiny_config, wait_scanned
from tests.support.recording import recorded

MODEL = Retrieval(tries=32)
BLOCK_BYTES = 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim * 16 * 4
NUM_TOKENS = 1065  # neither whole parts nor whole blocks


@dataclasses.dataclass
class Asked:
    """One scored request that is to come by some way. `make` builds engines of the same kind, with tiers
    besides."""

    make: Callable[..., Engine]
    prompt: list[int]
    sampling: dict[str, Any]
    path: Path
    chunks: list[Chunk] = dataclasses.field(default_factory=list)  # of the request, as they were planned

    def submit(self, engine: Engine) -> Collected:
        return submit(engine, self.prompt, residency="scored", **self.sampling)

    def run(self, engine: Engine) -> Collected:
        with recorded(engine) as run:
            answer = self.submit(engine)
            while engine.has_work():
                if not engine.step():
                    engine.wait_work(0.01)
                engine.check()
        settle_all(engine)
        self.chunks = [chunk for plan in run.plans for chunk in plan.chunks]
        return answer

    def before(
        self, engine: Engine, num_tokens: int | None = None, mode: str = "exact", max_tokens: int = 1
    ) -> Engine:
        """An earlier request with the first tokens of the same prompt."""
        generate(engine, self.prompt[:num_tokens], residency=mode, max_tokens=max_tokens)
        settle_all(engine)
        return engine

    def elsewhere(self, **tiers: Any) -> Engine:
        """An engine that finds the prompt in what another has left."""
        first = self.before(self.make(**tiers))
        first.close(timeout_s=20.0)
        engine = self.make(**tiers)
        if "ssd_dir" in tiers:
            wait_scanned(engine)
        return engine


def cold(asked: Asked) -> Collected:
    return asked.run(asked.make())


def device(asked: Asked) -> Collected:
    """Nothing gets to host memory before it has begun."""
    engine = asked.make()
    copier, may_go_on = engine.cache.saves.mover.copier, threading.Event()

    def copy(*args: Any) -> None:
        may_go_on.wait(30.0)
        copier.copy(*args)

    engine.cache.saves.mover.copier = types.SimpleNamespace(copy=copy)  # type: ignore[assignment]
    generate(engine, asked.prompt[:200], max_tokens=1)
    answer = asked.submit(engine)
    for _ in range(3):
        engine.step()
    may_go_on.set()
    run_all(engine)
    return answer


def host(asked: Asked) -> Collected:
    return asked.run(asked.before(asked.make()))


def disk(asked: Asked) -> Collected:
    return asked.run(asked.elsewhere(ssd_dir=str(asked.path), ssd_gib=0.05))


def store(asked: Asked) -> Collected:
    return asked.run(asked.elsewhere(remote="memory://"))


def snapshot(asked: Asked) -> Collected:
    disk = {"ssd_dir": str(asked.path), "ssd_gib": 0.05}
    first = asked.before(asked.make(**disk))
    taken: list[BaseException | None] = []

    def take() -> None:
        first.snapshots.take(
            SnapshotRequest("talk", prompt=np.asarray(asked.prompt[:-5], np.uint32).tobytes())
        )
        taken.append(None)

    thread = threading.Thread(target=take)
    thread.start()
    while thread.is_alive():
        if not first.step():
            first.wait_work(0.01)
    assert taken
    first.close(timeout_s=20.0)
    engine = asked.make(**disk)
    wait_scanned(engine)
    kept = np.frombuffer(engine.snapshots.open("talk").tokens, np.uint32).tolist()
    asked.prompt = [*kept, *asked.prompt[len(kept) :]]
    return asked.run(engine)


def behind_scored(asked: Asked) -> Collected:
    """A turn with all but the last tokens of the prompt, of which it leaves whole parts."""
    return asked.run(
        asked.before(asked.make(), (len(asked.prompt) - 30) // 64 * 64 + 2, "scored", max_tokens=2)
    )


def resumed(asked: Asked, engine: Engine | None = None) -> Collected:
    engine = asked.make() if engine is None else engine
    answer = asked.submit(engine)
    for _ in range(5000):
        if len(answer.tokens) >= 3:
            break
        if not engine.step():
            engine.wait_work(0.01)
    scheduler = engine.parts.scheduler
    scheduler.retract(scheduler.running.requests[answer.request_id])
    run_all(engine)
    return answer


def resumed_behind_scored(asked: Asked) -> Collected:
    num = (len(asked.prompt) - 30) // 64 * 64 + 2
    return resumed(asked, asked.before(asked.make(), num, "scored", max_tokens=2))


WAYS = {
    cold: "computed",
    device: "device",
    host: "host",
    disk: "ssd",
    store: "remote",
    snapshot: "ssd",
    behind_scored: "host",
    resumed: "computed",
    resumed_behind_scored: "host",
}
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def came_from(answer: Collected, tier: str, num_tokens: int) -> bool:
    """Whether all that was found came from `tier`, and all tokens are accounted for."""
    source = answer.source or KvSource()
    sizes = dataclasses.asdict(source)
    named = sizes[tier] > 0 and all(num == 0 for name, num in sizes.items() if name not in (tier, "computed"))
    return named and sum(sizes.values()) == num_tokens


@pytest.fixture(autouse=True)
def _figures_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither how long steps take here, nor steps that measure recall: those see all of the context."""
    monkeypatch.setattr(ScoringCost, "tau", 16)
    monkeypatch.setattr(residency, "FIRST_RECALL", -1)
    spaces: dict[Space, MemoryStore] = {}

    def open_remote(url: str, space: Space, timeout_s: float) -> MemoryStore:
        return spaces.setdefault(space, MemoryStore("remote", local=False))

    monkeypatch.setattr(kv_build, "open_remote", open_remote)


@pytest.fixture
def build() -> Iterator[Callable[[Config], Engine]]:
    made: list[tuple[Engine, Sanitizer]] = []

    def build(config: Config) -> Engine:
        made.append(build_sanitized(config))
        return made[-1][0]

    yield build
    for engine, sanitizer in made:
        engine.close(timeout_s=20.0)
        check_silent(sanitizer)


@pytest.mark.parametrize("model", ["tiny-qwen3", "tiny-qwen3.5"])
@every_way
def test_with_room_for_all_of_it_it_gives_what_the_full_cache_gives(
    way: Callable[[Asked], Collected],
    model: str,
    build: Callable[[Config], Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From its first token on: all of its context is in the trailing window."""
    prompt = np.random.default_rng(0).integers(1, 500, NUM_TOKENS).tolist()
    states = {"states_gib": 0.002} if model == "tiny-qwen3.5" else {}
    alone = tiny_config(model, blocks=120, host_blocks=120, max_model_len=1200, **states)
    full = generate(build(alone), prompt, max_tokens=40, logprobs=2)
    with_deep = sizing.with_deep
    room = {"deep_blocks": 32, "resident_blocks": 480}
    monkeypatch.setattr(sizing, "with_deep", lambda *args: dataclasses.replace(with_deep(*args), **room))

    def make(**settings: Any) -> Engine:
        sizes = {
            "blocks": 500,
            "host_blocks": 600,
            "max_model_len": 8000,
            "positions": 8192,
            "resident_tokens": 512,
        }
        return build(tiny_config(model, **sizes, **states, **settings))

    answer = way(Asked(make, prompt, {"max_tokens": 40, "logprobs": 2}, tmp_path))
    assert answer.error is None and answer.tokens == full.tokens
    ours, theirs = ([entry.logprob for entry in one.logprobs] for one in (answer, full))
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert answer.events[0].scored and came_from(answer, WAYS[way], NUM_TOKENS), answer.source


@pytest.fixture(scope="module")
def retrieval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_retrieval_model(tmp_path_factory.mktemp("retrieval"), MODEL)


@every_way
def test_with_room_for_a_quarter_of_it_what_stands_at_its_end_is_found_at_once(
    way: Callable[[Asked], Collected], build: Callable[[Config], Engine], retrieval: Path, tmp_path: Path
) -> None:
    """A model that recalls by construction is asked for needles in the last tokens of its prompt, and needs
    no second question for any. It decodes over what is on the device alone."""
    stack = haystack(2061, 8, (0.985,), 0, MODEL)

    def make(**tiers: Any) -> Engine:
        return build(
            Config(
                source=ModelSource(model=str(retrieval), device="cpu", dtype="float32"),
                kv=KvConfig(device_blocks=40, resident_tokens=512),
                engine=EngineConfig(max_model_len=2400, max_batch=2, prefill_chunk=512),
                offload=OffloadConfig(host_gib=400 * BLOCK_BYTES / GIB, load_always=True, **tiers),
            )
        )

    sampling = {"max_tokens": stack.most_tokens, "stop_token_ids": frozenset({stack.stop})}
    asked = Asked(make, stack.all_questions(), sampling, tmp_path)
    answer = way(asked)
    assert answer.error is None and stack.found(answer.tokens) == 8
    assert stack.asked(answer.tokens) == 8, "a question was asked again"
    decodes = [chunk for chunk in asked.chunks if chunk.start >= 2061]
    assert all(chunk.num_left_out and not chunk.num_paged and len(chunk.slots) <= 32 for chunk in decodes)
    assert came_from(answer, WAYS[way], 2061), answer.source
