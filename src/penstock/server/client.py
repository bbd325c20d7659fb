"""The engine as its front sees it, whichever process it is in: the one client of the one service (`links`).
Owns the unanswered calls and the last received list of adapters; the requests themselves belong to the
engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from penstock.contract import (
    Adapter,
    FinishReason,
    Listener,
    LoadedAdapter,
    Prefetched,
    SamplingParams,
    Submission,
    TokenEvent,
)
from penstock.errors import EngineClosed
from penstock.models.tokenizer import TextCodec, tokenizer_of
from penstock.server import boundary
from penstock.server.boundary import Batch, FromEngine, Hello, ProtocolBroken
from penstock.server.channel import FrontEnd
from penstock.server.seats import RequestFigures

logger = logging.getLogger("penstock.server")


class _Asked(NamedTuple):
    request_id: str
    listener: Listener


def greeted(channel: FrontEnd) -> Hello:
    """Block until the engine has introduced itself. Raises EngineClosed if it never does, ProtocolBroken if
    it has another version."""
    hello = channel.greeting()
    if hello is None:
        raise EngineClosed("the engine's process ended before it was ready")
    if not isinstance(hello, Hello):
        raise ProtocolBroken(f"the engine began with {type(hello).__name__}")
    if hello.version != boundary.VERSION:
        raise ProtocolBroken(
            f"the engine speaks version {hello.version} of the protocol, and this process {boundary.VERSION}"
        )
    return hello


class EngineClient:
    """Messages are taken on the event loop, from `start` on; listeners are called there. Any thread may ask,
    and no call blocks."""

    def __init__(self, channel: FrontEnd, tokenizer: TextCodec | None = None) -> None:
        """Blocks until the engine has introduced itself, see `greeted`."""
        self.facts = hello = greeted(channel)
        if tokenizer is None:
            assert hello.tokenizer is not None
            tokenizer = tokenizer_of(hello.tokenizer)
        self.tokenizer = tokenizer
        self.max_model_len = hello.limits.max_model_len
        self.adapters = {one.adapter.name: one for one in hello.adapters}
        self.figures = RequestFigures()  # of this front
        self.new_number = itertools.count(1).__next__  # of requests and calls
        self.error: EngineClosed | None = None  # why the engine is gone
        self.over = asyncio.Event()  # nothing more will come
        self._channel = channel
        self._heard = boundary.Awake(is_warm=hello.is_warm, figures=self.figures)
        self._beat_s, self._beat_age_s = time.monotonic(), 0.0
        self._asked: dict[int, _Asked] = {}
        self._calls: dict[int, tuple[Future[Any], str]] = {}  # with the name of the call

    # --------------------------------------------------------------------------------------------------- life

    def start(self) -> None:
        """On the event loop."""
        self._beat_s = time.monotonic()
        self._channel.start(self._take, lambda why: self._end(EngineClosed(why)))

    @property
    def is_warm(self) -> bool:
        return self._heard.is_warm

    @property
    def num_open(self) -> int:
        """Requests that have not had their last event."""
        return len(self._asked)

    def beat_age_s(self) -> float:
        """Time since the engine's loop last turned, or since its process was last heard."""
        return time.monotonic() - self._beat_s + self._beat_age_s

    def give_up(self) -> None:
        """Cancel all requests, and end all waits now."""
        for number in list(self._asked):
            self.cancel(number)
        self._end(None)

    # ----------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        number: int,
        asked: Submission,
        listener: Listener,
    ) -> None:
        """Invalid requests are refused here. If the engine refuses one anyway, the refusal is its only
        event."""
        self._check_alive()
        tokens, _ = self.facts.limits.checked(asked.prompt, asked.sampling)
        if asked.residency is not None or asked.pins is not None:
            num_more = max(0, asked.sampling.max_tokens - 1)
            self.facts.residency.for_request(asked.residency, asked.pins, len(tokens), num_more)
        self._asked[number] = _Asked(asked.id, listener)
        self._channel.send(boundary.Submit(number, replace(asked, prompt=tokens)))
        # the engine has ended meanwhile, and its end has missed this one
        if self.over.is_set() and self._asked.pop(number, None) is not None:
            self._check_alive()

    def cancel(self, number: int) -> None:
        if number in self._asked:
            self._channel.send(boundary.Cancel(number))

    def hold_adapter(self, name: str) -> AbstractContextManager[Adapter] | None:
        """The adapter that has the name now. Until the hold ends, requests can be submitted to that
        content."""
        found = self.adapters.get(name)
        return None if found is None else self._hold(found)

    @contextmanager
    def _hold(self, loaded: LoadedAdapter) -> Iterator[Adapter]:
        """Requests sent meanwhile find the adapter as it was: the engine reads messages in order."""
        number = self.new_number()
        self._channel.send(boundary.HoldAdapter(number, loaded.adapter))
        try:
            yield loaded.adapter
        finally:
            self.let_go(number)

    # -------------------------------------------------------------------------------------------------- calls

    def prefetch(
        self,
        prompt: Sequence[int] | None = None,
        session: str = "",
        cache_salt: str = "",
        adapter: Adapter | None = None,
    ) -> Future[Prefetched | None]:
        nothing = SamplingParams(max_tokens=0)
        tokens = None if prompt is None else self.facts.limits.checked(prompt, nothing)[1].tobytes()
        return self.call("kv.prefetch", tokens, session, cache_salt, adapter)

    def call(self, name: str, *arguments: Any) -> Future[Any]:
        """One of `boundary.CALLS`. Ends with the answer, or when the engine is gone. Its owner may cancel it:
        the engine is notified, and the answer is dropped."""
        self._check_alive()
        number, future = self.new_number(), Future[Any]()
        self._calls[number] = future, name
        future.add_done_callback(lambda over: self._abandon(number) if over.cancelled() else None)
        self._channel.send(boundary.Call(number, name, msgspec.msgpack.encode(arguments)))
        if self.over.is_set():  # it has ended meanwhile, and its end may have missed this one
            self._end_calls()
        return future

    def _abandon(self, number: int) -> None:
        if self._calls.pop(number, None) is not None:
            self.let_go(number)

    def let_go(self, number: int) -> None:
        """Of a compiled grammar: the result of its call."""
        self._channel.send(boundary.LetGo(number))

    def _check_alive(self) -> None:
        if self.over.is_set():
            raise EngineClosed(str(self.error or "the server is shutting down"))

    # ------------------------------------------------------------------------------------------------ reading

    def _take(self, message: Batch | FromEngine) -> None:
        match message:
            case list():  # in this process
                for number, event in message:
                    self._deliver(number, event)
            case boundary.Tokens():
                self._deliver_all(message)
            case boundary.Returned():
                self._settle(message)
            case boundary.Beat():
                self._beat_s, self._beat_age_s = time.monotonic(), message.age_s
                self._heard.beat, self._heard.is_warm = message.number, message.is_warm
                self._channel.send(msgspec.structs.replace(self._heard))
            case boundary.AdapterList():
                self.adapters = {one.adapter.name: one for one in message.loaded}
                self._heard.adapters = message.version
                self._channel.send(msgspec.structs.replace(self._heard))
            case boundary.Bye(""):
                self._end(None)
            case boundary.Bye():
                self._end(EngineClosed(f"the engine has failed: {message.why}"))
            case _:
                raise ProtocolBroken(f"{type(message).__name__} is no message for now")

    def _deliver(self, number: int, event: TokenEvent) -> None:
        asked = self._asked
        if (one := asked.get(number) if event.finish is None else asked.pop(number, None)) is not None:
            one.listener(event)

    def _deliver_all(self, message: boundary.Tokens) -> None:
        if len(message.plain) % 2:
            raise ProtocolBroken(f"{len(message.plain)} numbers and tokens are no pairs")
        pairs = iter(message.plain)
        for number, token in zip(pairs, pairs, strict=True):
            if (one := self._asked.get(number)) is not None:
                one.listener(TokenEvent(one.request_id, (token,)))
        for sent in message.rest:
            if (one := self._asked.get(sent.number)) is not None:
                self._deliver(sent.number, sent.made(one.request_id))

    def _settle(self, reply: boundary.Returned) -> None:
        future, name = self._calls.pop(reply.call, (None, ""))
        if future is None or not future.set_running_or_notify_cancel():
            return
        if reply.fault is not None:
            future.set_exception(boundary.error_from(reply.fault))
            return
        try:
            value = msgspec.msgpack.decode(reply.value, type=boundary.CALLS[name].gives)
            future.set_result(reply.call if name == "grammars.begin" else value)
        except msgspec.MsgspecError as error:
            future.set_exception(ProtocolBroken(f"the engine's process answered what cannot be: {error}"))

    # --------------------------------------------------------------------------------------------------- ends

    def _end(self, error: EngineClosed | None) -> None:
        """Nothing more will come: end every wait at once. `error`: the engine has failed."""
        if self.over.is_set():
            return
        if error is not None:
            logger.error("the engine loop failed: %s", error)
        self.error = error
        self.over.set()
        self._channel.stop()
        failure = error or EngineClosed("the server is shutting down and gave this request up")
        for number in list(self._asked):
            if (asked := self._asked.pop(number, None)) is not None:
                asked.listener(
                    TokenEvent(
                        asked.request_id, finish=FinishReason.ERROR, error=str(failure), failure=failure
                    )
                )
        self._end_calls()

    def _end_calls(self) -> None:
        why = str(self.error or "the server is shutting down")
        for call in list(self._calls):
            future, _ = self._calls.pop(call, (None, ""))
            if future is not None and future.set_running_or_notify_cancel():
                future.set_exception(EngineClosed(why))
