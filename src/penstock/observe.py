"""The observer protocols: what lanes, pools, steps, requests and the engine's loop report. Owns no state;
without an observer it costs one `is None` test.

An observer is passed to what it observes at construction; observed code never imports its observer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from penstock.contract import Access, Fence, KvSource, Request, StepPlan, StepResult, Totals

T = TypeVar("T")


class LaneObserver(Protocol):
    """Sees the order in which work is given to lanes, from the submitting thread, before the work can run."""

    def submitted(self, lane: str, ticket: int, label: str, accesses: Sequence[Access]) -> None:
        """Work `ticket` was put on `lane`."""

    def waited(self, lane: str, on_lane: str, fence: int) -> None:
        """Work submitted to `lane` from now on runs after that fence of `on_lane`, which covers everything
        submitted there before it. The wait takes a number on `lane`, as work does."""

    def host_waited(self, on_lane: str, fence: int, seconds: float) -> None:
        """The calling thread knows that this fence has passed: it blocked for `seconds`, or polled (0)."""

    def touched(self, label: str, accesses: Sequence[Access]) -> None:
        """The calling thread itself touches these bytes, outside any lane."""

    def started(self, lane: str, ticket: int) -> None:
        """The work begins, on the calling thread. Work that it submits happens after all that its lane knew
        (CPU lanes only)."""

    def finished(self, lane: str, ticket: int, error: BaseException | None) -> None:
        """The work has run (CPU, from the lane's own thread) or has been launched (CUDA, from the submitting
        thread)."""


class PoolObserver(Protocol):
    """Sees slots change state, from the thread that owns the pool, or under the pool's lock where several
    share it. Either way what one call sees happens after what the calls before it saw."""

    def opened(self, pool: str, num_slots: int) -> None:
        """A pool was made; all its slots are free. Accesses name its arena by the same name."""

    def moved(self, pool: str, slots: Sequence[int], old: str, new: str, owner: str) -> None:
        """`slots` went from state `old` to state `new` on behalf of `owner`."""

    def lent(self, pool: str, slots: Sequence[int], owner: str) -> None:
        """`owner` got a handle over `slots` that other handles may share, so their state need not change."""

    def returned(self, pool: str, slots: Sequence[int], owner: str, fence: Fence | None) -> None:
        """A handle over `slots` ends. Any state change comes after this call. `fence` covers its use of them;
        None: that use is over."""

    def sealed(self, pool: str, slot: int, key: bytes) -> None:
        """`slot` became immutable under `key`."""

    def evicted(self, pool: str, slot: int, key: bytes) -> None:
        """The copy of `key` in `slot` was forgotten."""

    def closed(self, pool: str, left: Sequence[str]) -> None:
        """The pool is closed, unless handles are `left`: then it stays open."""


class EngineObserver(Protocol):
    """Sees the turns of the engine's loop, from its thread."""

    def turn(self) -> AbstractContextManager[None]:
        """Around one turn. Inside it the thread must not wait, except inside `may_wait`."""

    def may_wait(self, where: str) -> AbstractContextManager[None]:
        """Around an allowed wait, such as that for a step's result."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """Around a part of a turn: `plan`, `launch`, `read`, `settle`, `save`. One may be inside another."""

    def balanced(self, pool: str, counts: Mapping[str, int]) -> None:
        """Between two turns: the pool's own count of slots by state. Under the pool's lock if several threads
        share it."""


class Unwatched:
    """An `EngineObserver` that does nothing."""

    _NOTHING = nullcontext()

    def turn(self) -> AbstractContextManager[None]:
        return self._NOTHING

    def may_wait(self, where: str) -> AbstractContextManager[None]:
        return self._NOTHING

    def part(self, name: str) -> AbstractContextManager[None]:
        return self._NOTHING

    def balanced(self, pool: str, counts: Mapping[str, int]) -> None:
        """Does nothing."""


class RequestObserver(Protocol):
    """Sees the lives of requests, from the engine thread: a few calls per request, none per token. Times are
    of `time.monotonic()`. A call must take microseconds, not wait and not raise: steps wait for it."""

    def request_arrived(self, request: Request, matched_s: float) -> None:
        """It is in line, `waiting`. It came at `request.arrival_s`; of the time since, `matched_s` went into
        hashing its prompt and looking it up in colder tiers."""

    def request_moved(self, request_id: str, state: str, at_s: float) -> None:
        """Its state is `loading`, `running` or `retracted` from now on, or `waiting` again."""

    def request_answered(self, request_id: str, source: KvSource, loaded_s: float, at_s: float) -> None:
        """Its first token was read; at `max_tokens` 0, its prompt is computed. `source`: where the KV of its
        prompt came from. `loaded_s`: the time from the start of its load to its first step."""

    def request_ended(self, request_id: str, finish: str, totals: Totals, at_s: float) -> None:
        """`finish`: the value of a FinishReason. The last call for this request; each that arrived gets
        it."""


class StepObserver(Protocol):
    """Sees steps, from the engine thread: two calls per step. The same rules."""

    def step_launched(self, plan: StepPlan, at_s: float) -> None:
        """It is on the compute lane. `plan.chunks` say which requests compute what in it."""

    def step_read(self, result: StepResult, at_s: float) -> None:
        """Its result was read; its events are not delivered yet."""


class TransferObserver(Protocol):
    """Sees blocks move between two tiers, from any thread. The same rules."""

    def transfer_submitted(self, transfer: object, ends: tuple[str, str], label: str) -> None:
        """From the first of `ends` to the second. `transfer` stands for it in the next call."""

    def transfer_over(self, transfer: object, num_blocks: int, error: BaseException | None) -> None:
        """Its end was seen. `num_blocks` were moved, unless there was an error."""


@dataclass(frozen=True, slots=True)
class Observers:
    """All who watch an engine, by what they see. Several of a kind hear in order."""

    requests: tuple[RequestObserver, ...] = ()
    steps: tuple[StepObserver, ...] = ()
    lanes: tuple[LaneObserver, ...] = ()
    pools: tuple[PoolObserver, ...] = ()
    transfers: tuple[TransferObserver, ...] = ()
    turns: tuple[EngineObserver, ...] = ()
    contents: tuple[ContentObserver, ...] = ()

    def __add__(self, other: Observers) -> Observers:
        names = [field.name for field in fields(self)]
        return Observers(**{name: getattr(self, name) + getattr(other, name) for name in names})


def all_of(observers: Sequence[T]) -> T | None:
    """One observer whose calls go to all of them in order; None if there are none."""
    if len(observers) < 2:
        return observers[0] if observers else None
    return cast(T, _AllOf(observers))


class _AllOf:
    """For any of the protocols. A call that returns a context returns one that enters all."""

    def __init__(self, observers: Sequence[object]) -> None:
        self._observers = tuple(observers)

    def __getattr__(self, name: str) -> Any:
        calls = tuple(getattr(one, name) for one in self._observers)

        def tell(*args: Any) -> Any:
            told = [call(*args) for call in calls]
            return None if told[0] is None else _entered(told)

        setattr(self, name, tell)
        return tell


@contextmanager
def _entered(contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        yield


class ContentObserver(Protocol):
    """Checked mode: sees the content of blocks that leave the device and that come back, from any thread."""

    def demoted(self, tier: str, slot: int, key: bytes, digest: int) -> None:
        """A block with these bytes on the device was copied to `slot` of `tier`. Called before it can be
        found there."""

    def promoted(self, tier: str, slot: int, key: bytes, digest: int) -> None:
        """The copy of `key` in `slot` of `tier` was copied to the device, and these bytes landed there."""


class ByteGuard(Protocol):
    """Checked mode: poisons and reads bytes. Called inside ops, which have declared the access to `slots` of
    `arena`."""

    def poison(self, arena: str, slots: Sequence[int]) -> None:
        """Fill with values that spoil any computation. An op of the slots' new owner, on the lane that will
        write them, after its waits."""

    def digests(self, arena: str, slots: Sequence[int]) -> list[int]:
        """A number per block that differs if the bytes differ."""
