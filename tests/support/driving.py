"""Driving an engine by hand in tests: submit, step until done, look at what came out. Owns no engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.config import (
    GIB,
    Config,
    EngineConfig,
    KvConfig,
    ModelSource,
    OffloadConfig,
    SpeculationConfig,
    TraceConfig,
)
from penstock.contract import (
    Adapter,
    FinishReason,
    KvSource,
    SamplingParams,
    Submission,
    TokenEvent,
    TokenLogprob,
)
from penstock.engine.engine import Engine
from penstock.models.registry import BUILT_IN

_PassKind = TypeVar("_PassKind")
_KV = ("prefix_cache", "block_tokens", "resident_tokens", "residency", "pin_spans", "scorer")
_OFFLOAD = (
    "state_every",
    "states_gib",
    "eviction",
    "lease_s",
    "load_always",
    "load_deadline_s",
    "ssd_dir",
    "ssd_gib",
    "ssd_admission",
    "remote",
    "remote_timeout_s",
)


def tiny_config(
    model: str = "tiny-qwen3", *, device: str = "cpu", blocks: int = 256, host_blocks: int = 0, **engine: Any
) -> Config:
    """Random weights, small arenas, float32: for exactness, not for speed. `host_blocks` 0: no tier behind
    the device. Settings of `_KV` go to the KV side, `speculate` names a proposer."""
    kv = {name: engine.pop(name) for name in _KV if name in engine}
    offload = {name: engine.pop(name) for name in _OFFLOAD if name in engine}
    positions, speculate = engine.pop("positions", None), engine.pop("speculate", None)
    trace = engine.pop("trace", None)
    host_gib = (
        (host_blocks + 0.5) * block_bytes(model, kv.get("block_tokens", 16)) / GIB if host_blocks else None
    )
    return Config(
        source=ModelSource(
            model=model,
            load_format="dummy",
            device=device,  # type: ignore[arg-type]
            dtype="float32",
            positions=positions,
        ),
        kv=KvConfig(device_blocks=blocks, **kv),
        engine=EngineConfig(**{"max_batch": 16, "prefill_chunk": 64, **engine}),
        offload=OffloadConfig(enabled=host_blocks > 0, host_gib=host_gib, **{"load_always": True, **offload}),
        speculation=SpeculationConfig(speculate),
        trace=TraceConfig(None if trace is None else str(trace)),
    )


def block_bytes(model: str, block_tokens: int) -> int:
    """Of a built-in model, in float32."""
    dims = BUILT_IN[model]
    return 2 * dims.num_kv_layers * dims.num_kv_heads * dims.head_dim * block_tokens * 4


_ASKED = ("id", "residency", "pins", "session", "hint", "priority", "route")  # fields of a Submission
_WAIT_S = 0.01  # for a transfer or another thread; not all that is waited for wakes the engine


@dataclass(slots=True)
class Collected:
    """Everything that one request's listener got."""

    request_id: str = ""
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.tokens]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for event in self.events for entry in event.logprobs or ()]

    @property
    def finish(self) -> FinishReason | None:
        return self.events[-1].finish if self.events else None

    @property
    def error(self) -> str | None:
        return self.events[-1].error if self.events else None

    @property
    def source(self) -> KvSource | None:
        return next((event.source for event in self.events if event.source is not None), None)

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob | None] | None:
        return next(
            (event.prompt_logprobs for event in self.events if event.prompt_logprobs is not None), None
        )


def submit(
    engine: Engine, prompt: Sequence[int], *, salt: str = "", adapter: Adapter | None = None, **sampling: Any
) -> Collected:
    """Greedy, eight tokens, no stopping at end-of-text, unless said otherwise. `_ASKED` are no sampling's."""
    collected = Collected()
    part = {name: sampling.pop(name) for name in _ASKED if name in sampling}
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **sampling})
    collected.request_id = engine.submit(
        Submission(prompt, params, cache_salt=salt, adapter=adapter, **part), collected.events.append
    )
    return collected


def wait_scanned(engine: Engine) -> None:
    """All that an earlier process has left on disk can be found."""
    stores: list[Any] = [engine.cache.cold_tiers["ssd"].calls.store]
    if engine.cache.states is not None:
        stores.append(engine.cache.states.cold.tiers["ssd states"].calls.store.wrapped)  # type: ignore[attr-defined]
    assert all(store.wait_scanned(60.0) for store in stores)


def run_all(engine: Engine, max_steps: int = 10_000) -> int:
    """Step until nothing is left to do; returns the number of turns. Raises where the engine does not come to
    rest."""
    for turn in range(max_steps):
        if not engine.has_work():
            return turn
        if not engine.step():
            engine.wait_work(_WAIT_S)
    raise AssertionError(f"the engine still has work after {max_steps} turns")


def settle_all(engine: Engine, timeout_s: float = 30.0) -> None:
    """Until nothing is on its way between tiers."""
    deadline_s = time.monotonic() + timeout_s
    while engine.is_transferring():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"transfers are still in flight after {timeout_s} s")
        if not engine.step():
            engine.wait_work(_WAIT_S)


def generate(
    engine: Engine, prompt: Sequence[int], *, salt: str = "", adapter: Adapter | None = None, **sampling: Any
) -> Collected:
    collected = submit(engine, prompt, salt=salt, adapter=adapter, **sampling)
    run_all(engine)
    return collected


def pass_of(engine: Engine, kind: type[_PassKind]) -> _PassKind:
    """The pass of this kind in every step of `engine`."""
    return next(one for one in engine.parts.executor.passes if isinstance(one, kind))


def assert_same(found: Collected, right: Collected) -> None:
    """The same tokens and scores, and the same end unless it was cancelled."""
    assert found.error is None and found.tokens == right.tokens
    assert found.finish in (right.finish, FinishReason.CANCELLED)
    for ours, theirs in zip(found.logprobs, right.logprobs, strict=True):
        assert ours.token == theirs.token and abs(ours.logprob - theirs.logprob) <= 1e-4
