"""The parts of an engine, as `engine.build` makes them. Tests and tools reach them here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.contract import PromptLimits
from penstock.cores import ThreadsByLoad
from penstock.engine.adapters import AdapterStore
from penstock.engine.execution.executor import Executor
from penstock.engine.execution.grammars import Grammars
from penstock.engine.execution.pooled import ExpertPool
from penstock.engine.pace import ScoringCost
from penstock.engine.scheduling.residency import ResidencyChoice
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.experts.routing import RoutingWriter
from penstock.kv.cache import KvCache
from penstock.kv.memory import DeviceArena
from penstock.lanes.lane import Lane
from penstock.models.tokenizer import TextCodec
from penstock.observe import Observers
from penstock.ranks.start import Alone, Ranks
from penstock.sanitizer.sanitizer import Sanitizer
from penstock.speculation.drafter import Speculation
from penstock.trace.file import TraceFile


@dataclass(slots=True)
class EngineParts:
    """All that an engine runs on."""

    name: str
    weights: str  # how matrices are stored, as text
    tokenizer: TextCodec
    scheduler: Scheduler
    executor: Executor
    adapters: AdapterStore
    cache: KvCache
    arena: DeviceArena
    lanes: Sequence[Lane]
    limits: PromptLimits
    max_open: int  # open requests; one more is refused as overload
    seed: int
    # the model's defaults for fields of SamplingParams
    sampling: Mapping[str, Any]
    grammars: Grammars
    residency: ResidencyChoice
    resident_tokens: int  # of a request on the device; one that may need more is deep
    scoring: ScoringCost
    observers: Observers
    sanitizer: Sanitizer | None = None  # observes all of the above, if enabled
    trace: TraceFile | None = None  # written by one of the observers
    experts: ExpertPool | None = None  # None: all experts are on the device
    routing: RoutingWriter | None = None  # of --record-routing
    speculation: Speculation | None = None  # proposes tokens, if enabled
    threads: ThreadsByLoad | None = None  # compute threads, on a CPU
    ranks: Ranks = field(default_factory=Alone)  # the other processes of this engine, if there are any
