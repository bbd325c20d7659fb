"""An engine for one command, and one generation as shown on a terminal: pieces of text, then figures. Owns
the engine's thread and one request at a time."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from penstock.config import Config
from penstock.contract import (
    Adapter,
    FinishReason,
    KvSource,
    SamplingParams,
    Submission,
    TokenEvent,
    TokenLogprob,
)
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.errors import StepFailed
from penstock.models.hub import fetched
from penstock.observe import Observers
from penstock.progress import ProgressBar
from penstock.text.answer import StopString, TextStream

LOOK_S = 1.0  # between two checks whether the engine is alive
CANCEL_S = 30.0  # for the engine to end a cancelled request; a step takes seconds at most

COLDER = {"host": "host memory", "ssd": "disk", "remote": "the shared store"}


def load_engine(config: Config, observers: Observers | None = None, synthetic: bool = False) -> Engine:
    """Downloads a model from the hub first, unless its files are here. `synthetic`: only for measurements of
    drafts, see `build`."""
    with ProgressBar() as bar:
        return build(fetched(config, bar), bar, observers=observers or Observers(), synthetic=synthetic)


@contextmanager
def running_engine(config: Config) -> Iterator[Engine]:
    """Running requests are cancelled when the block is left."""
    engine = load_engine(config)
    loop = EngineLoop(engine)
    start_loop(loop)
    try:
        yield engine
    finally:
        loop.close(deadline_s=0.0)


def start_loop(loop: EngineLoop) -> None:
    with ProgressBar() as bar:
        loop.start(bar)


def given_adapter(engine: Engine) -> Adapter | None:
    """The adapter that a command was given; None: the plain model."""
    loaded = engine.adapters.all()
    return loaded[0].adapter if loaded else None


@dataclass(slots=True)
class Figures:
    """The cost of one answer."""

    prompt_tokens: int
    kv_source: KvSource  # where the prompt's KV came from
    generated_tokens: int = 0  # includes a token that ended the answer, though it has no text
    first_token_s: float = 0.0  # from submit; 0 if no token came
    total_s: float = 0.0
    expert_wait_s: float | None = None  # of its steps; None: they never wait for experts
    finish: str = ""

    @property
    def decode_tokens_per_s(self) -> float:
        """After the first token, whose time counts for the prompt."""
        decode_s = self.total_s - self.first_token_s
        return (self.generated_tokens - 1) / decode_s if self.generated_tokens > 1 and decode_s > 0 else 0.0

    def line(self) -> str:
        """For people."""
        speed = f" at {self.decode_tokens_per_s:.1f} tok/s" if self.decode_tokens_per_s else ""
        plural = "" if self.generated_tokens == 1 else "s"
        colder = "".join(
            f", {count} from {place}"
            for tier, place in COLDER.items()
            if (count := getattr(self.kv_source, tier))
        )
        wait_s = self.expert_wait_s
        waited = "" if wait_s is None else f", waited {1000 * wait_s:.0f} ms for experts"
        return (
            f"{self.generated_tokens} token{plural}{speed}, first after {self.first_token_s * 1000:.0f} ms"
            f"{waited}; prompt {self.prompt_tokens} tokens, {self.kv_source.device} from the device "
            f"cache{colder} ({self.finish})"
        )


class Answer:
    """`begin` submits it, `pieces` reads it to its end. `interrupt` may be called at any time, from a signal
    handler or another thread."""

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        sampling: SamplingParams,
        adapter: Adapter | None = None,
        begins: bool = True,
    ) -> None:
        """`begins`: it starts a text, as in a chat; otherwise it continues the prompt's."""
        self._engine = engine
        self._asked = Submission(prompt, sampling, adapter=adapter)
        stops = tuple(map(StopString, sampling.stop))
        self._stream = TextStream(engine.tokenizer, stops, begins, sampling.min_tokens)
        self._events: queue.Queue[TokenEvent | None] = queue.Queue()  # None: the reader has stopped
        self.text = ""  # as far as it was read
        self.tokens: list[int] = []  # of the text
        self.logprobs: list[TokenLogprob] | None = None if sampling.logprobs is None else []
        self.prompt_logprobs: Sequence[TokenLogprob | None] | None = None
        self._figures = Figures(len(prompt), KvSource(computed=len(prompt)))
        self._request_id = ""
        self._submitted_s = 0.0
        self._cancel_by_s = float("inf")  # set when it is cancelled

    def interrupt(self) -> None:
        self._events.put(None)

    def begin(self) -> None:
        """Raises if the engine refuses it; then `begin` may be called again."""
        self._submitted_s = time.monotonic()
        self._request_id = self._engine.submit(self._asked, self._events.put)

    def cancel(self) -> None:
        """The reader has stopped."""
        if self._request_id and not self._figures.total_s:
            self._engine.cancel(self._request_id)

    def figures(self) -> Figures:
        return replace(self._figures, finish=self._figures.finish or "cancelled")

    def pieces(self) -> Iterator[str]:
        """Text as it becomes certain. Ends when the engine has released the request. Raises StepFailed if the
        engine gave it up, or can no longer answer."""
        if not self._request_id:
            self.begin()
        while True:
            event = self._wait_event()
            if event is None:
                self._end("cancelled")
                continue
            if text := self._take(event):
                self.text += text
                yield text
            if event.finish is not None:
                self._figures.total_s = time.monotonic() - self._submitted_s
                return

    def _wait_event(self) -> TokenEvent | None:
        while True:
            try:
                return self._events.get(timeout=LOOK_S)
            except queue.Empty:
                why = self._engine.ended
                if why is None and time.monotonic() > self._cancel_by_s:
                    why = f"the engine did not end the request within {CANCEL_S:g} s"
                if why is not None and self._events.empty():  # events from before its end count
                    raise StepFailed(why) from None

    def _take(self, event: TokenEvent) -> str:
        figures = self._figures
        if event.source is not None:
            figures.kv_source = event.source
        if event.expert_wait_s is not None:
            figures.expert_wait_s = (figures.expert_wait_s or 0.0) + event.expert_wait_s
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.finish is FinishReason.ERROR:
            raise StepFailed(event.error or "the generation failed")
        if figures.finish:
            return ""
        if (event.tokens or event.stop_token is not None) and not figures.first_token_s:
            figures.first_token_s = time.monotonic() - self._submitted_s
        delta = self._stream.push(event.tokens)
        num = len(delta.offsets)
        figures.generated_tokens += num + (event.stop_token is not None)
        self.tokens += event.tokens[:num]
        if self.logprobs is not None:
            self.logprobs += (event.logprobs or ())[:num]
        if delta.stopped:
            self._end("stop")
        elif event.finish is not None:
            figures.finish = str(event.finish)
            return delta.text + self._stream.finish()
        return delta.text

    def _end(self, finish: str) -> None:
        """No more text is needed: ask the engine to end the request, and wait for the event that confirms
        it."""
        if not self._figures.finish:
            self._figures.finish = finish
            self._cancel_by_s = time.monotonic() + CANCEL_S
            self._engine.cancel(self._request_id)
