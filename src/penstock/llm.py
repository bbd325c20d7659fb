"""The Python interface: a model in this process, asked directly. Owns an engine and its thread; requests are
the callers'.

from penstock import LLM, SamplingParams

with LLM("smollm2-135m") as llm:
    print(llm.chat([{"role": "user", "content": "What is a penstock?"}]).text)
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack, cast, overload

import numpy as np

from penstock.answer import Answer
from penstock.contract import (
    Adapter,
    KvSource,
    SamplingParams,
    Snapshot,
    SnapshotRequest,
    TokenLogprob,
)
from penstock.engine.build import build
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.errors import EngineClosed, InvalidRequest, Overloaded
from penstock.flags import config_from
from penstock.models.hub import fetched
from penstock.models.progress import Progress, silent
from penstock.progress import ProgressBar

Message = Mapping[str, Any]  # "role" and "content"
Prompt = str | Sequence[int]  # text, or token ids
Messages = Sequence[Message]
Sampling = SamplingParams | None  # None: the model's defaults, up to the length of the context

_RETRY_S = 0.005  # between two tries while the engine is full of other callers' requests


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer."""

    text: str
    # without the token that ended the answer, and without tokens after a stop string
    tokens: list[int]
    finish: str  # "stop", "length" or "cancelled"
    prompt_tokens: int
    kv_source: KvSource  # where the prompt's KV came from, in tokens
    logprobs: list[TokenLogprob] | None  # of each token, if SamplingParams.logprobs is set
    # of each prompt token but the first, if SamplingParams.prompt_logprobs is set
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None


class AnswerOptions(TypedDict, total=False):
    """Options of an answer."""

    adapter: str | None
    snapshot: str | None
    truncate_prompt_tokens: int | None  # keep that many tokens of the prompt, the last; -1: what fits


class LLM:
    """A loaded model. Every method may be called from any thread. `close`, or leaving the block, ends running
    requests."""

    def __init__(self, model: str = "", *, show_progress: bool = True, **options: Any) -> None:
        """`options` are the flags of `penstock serve` that concern the engine, with underscores:
        `max_model_len=4096`, `kv_offload_ssd_dir="/var/cache/penstock"`, `no_prefix_cache=True`,
        `lora=["name=DIR"]`. Raises ConfigError."""
        config = config_from({"model": model or None, **options})
        self._show_progress = show_progress
        with self._progress() as progress:
            self._engine = build(fetched(config, progress), progress)
            self._prompts = _Prompts(self._engine)
            self._loop = EngineLoop(self._engine)
            self._lock = threading.Lock()
            self._closed = False
            self._loop.start(progress)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):  # else it was never made
            self.close()

    def close(self) -> None:
        """Cancels running requests. Idempotent."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._loop.close(deadline_s=0.0)
            gc.unfreeze()  # the model's objects can be collected

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def encode(self, text: str) -> list[int]:
        return self._engine.tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._engine.tokenizer.decode(tokens)

    # ------------------------------------------------------------------------------------------ whole answers

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, sampling: Sampling = None, **options: Unpack[AnswerOptions]
    ) -> Completion: ...
    @overload  # a str is a sequence of str, too, but one prompt
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling = None, **options: Unpack[AnswerOptions]
    ) -> list[Completion]: ...

    def generate(self, prompts: Any, sampling: Sampling = None, **options: Unpack[AnswerOptions]) -> Any:
        """Text, or token ids, that go on after each prompt, in their order. One prompt gives one answer, a
        list of them a list. `adapter=` names an adapter; the tokens of `snapshot=` come before each
        prompt."""
        single = isinstance(prompts, str) or _begins_with(prompts, int)
        return self._whole(False, prompts, single, sampling, **options)

    @overload
    def chat(
        self, messages: Messages, sampling: Sampling = None, **options: Unpack[AnswerOptions]
    ) -> Completion: ...
    @overload
    def chat(
        self, messages: Sequence[Messages], sampling: Sampling = None, **options: Unpack[AnswerOptions]
    ) -> list[Completion]: ...

    def chat(self, messages: Any, sampling: Sampling = None, **options: Unpack[AnswerOptions]) -> Any:
        """The answer to a conversation; with several conversations, their answers in order. `adapter=` names
        an adapter; the messages of `snapshot=` come before each conversation."""
        return self._whole(True, messages, _begins_with(messages, Mapping), sampling, **options)

    async def agenerate(
        self, prompts: Any, sampling: Sampling = None, **options: Unpack[AnswerOptions]
    ) -> Any:
        """As `generate`, for asyncio."""
        return await asyncio.to_thread(lambda: self.generate(prompts, sampling, **options))

    async def achat(self, messages: Any, sampling: Sampling = None, **options: Unpack[AnswerOptions]) -> Any:
        """As `chat`, for asyncio."""
        return await asyncio.to_thread(lambda: self.chat(messages, sampling, **options))

    # ------------------------------------------------------------------------------------------------ streams

    def stream(
        self, prompt: Prompt, sampling: Sampling = None, **options: Unpack[AnswerOptions]
    ) -> Iterator[str]:
        """Text as it becomes certain. Closing the iterator cancels the rest."""
        return _pieces(self._ask(False, prompt, sampling, **options))

    def stream_chat(
        self, messages: Messages, sampling: Sampling = None, **options: Unpack[AnswerOptions]
    ) -> Iterator[str]:
        """The same for a conversation."""
        return _pieces(self._ask(True, messages, sampling, **options))

    def astream(
        self, prompt: Prompt, sampling: Sampling = None, **options: Unpack[AnswerOptions]
    ) -> AsyncIterator[str]:
        """As `stream`, for asyncio."""
        return _async_pieces(self._ask(False, prompt, sampling, **options))

    def astream_chat(
        self, messages: Messages, sampling: Sampling = None, **options: Unpack[AnswerOptions]
    ) -> AsyncIterator[str]:
        """As `stream_chat`, for asyncio."""
        return _async_pieces(self._ask(True, messages, sampling, **options))

    # ---------------------------------------------------------------------------------------------- snapshots

    def take_snapshot(
        self,
        prompt: Prompt | Messages,
        name: str = "",
        *,
        tokens: int | None = None,
        ttl_s: float | None = None,
        adapter: str | None = None,
    ) -> Snapshot:
        """Keep the computed KV of a prompt or conversation, or of its first `tokens`, until it is deleted or
        `ttl_s` are over. `generate` and `chat` continue it by name. Blocks until it is saved."""
        is_chat = _begins_with(prompt, Mapping)
        messages = json.dumps([dict(one) for one in cast(Messages, prompt)]) if is_chat else ""
        data = np.asarray(self._prompts.tokens(is_chat, prompt), np.uint32).tobytes()
        return self._engine.snapshots.take(
            SnapshotRequest(name, "", data, tokens, ttl_s, "", self._prompts.adapter(adapter), messages)
        )

    def snapshots(self) -> list[Snapshot]:
        return self._engine.snapshots.all().snapshots

    def delete_snapshot(self, name: str) -> None:
        """Raises SnapshotMissing."""
        self._engine.snapshots.delete(name)

    # ------------------------------------------------------------------------------------------------- inside

    def _progress(self, several: bool = True) -> contextlib.AbstractContextManager[Progress]:
        return ProgressBar() if self._show_progress and several else contextlib.nullcontext(silent)

    def _ask(
        self, is_chat: bool, prompt: Any, sampling: Sampling, **options: Unpack[AnswerOptions]
    ) -> Answer:
        if self._closed:
            raise EngineClosed("this LLM is closed")
        return self._prompts.answer(is_chat, prompt, sampling, **options)

    def _whole(self, is_chat: bool, given: Any, single: bool, sampling: Sampling, **options: Any) -> Any:
        """One completion, or a list."""
        asked = [given] if single else given
        made = self._answers(self._ask(is_chat, one, sampling, **options) for one in asked)
        return made[0] if single else made

    def _answers(self, asked: Iterable[Answer]) -> list[Completion]:
        """All at once, as far as the engine accepts them; the rest as others end. If one fails, the others
        are cancelled."""
        made: list[Completion] = []
        waiting, open_ = deque(asked), deque[Answer]()
        total = len(waiting)
        with self._progress(several=total > 1) as progress:
            try:
                while waiting or open_:
                    while waiting and _try_begin(waiting[0], alone=not open_):
                        open_.append(waiting.popleft())
                    made.append(_completion(open_[0]))
                    open_.popleft()
                    progress("answering", len(made), total)
            finally:
                for answer in open_:
                    answer.cancel()
        return made


class _Prompts:
    """Makes requests of texts, messages and names."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def tokens(self, is_chat: bool, prompt: Any, add_special: bool = True) -> list[int]:
        if is_chat:
            return self._engine.tokenizer.encode_chat(prompt)
        if isinstance(prompt, str):
            return self._engine.tokenizer.encode(prompt, add_special=add_special)
        return list(prompt)

    def answer(
        self,
        is_chat: bool,
        prompt: Any,
        sampling: Sampling,
        adapter: str | None = None,
        snapshot: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> Answer:
        loaded, before = self.adapter(adapter), []
        if snapshot is not None:
            content = self._engine.snapshots.open(snapshot, "", loaded)
            if not is_chat:
                before = np.frombuffer(content.tokens, np.uint32).tolist()
            elif content.messages:
                prompt = [*json.loads(content.messages), *prompt]
            else:
                raise InvalidRequest(
                    f"snapshot {snapshot!r} was not taken of messages: continue it with generate", "snapshot"
                )
        tokens = before + self.tokens(is_chat, prompt, add_special=snapshot is None)
        if truncate_prompt_tokens is not None:
            tokens = self._truncated(tokens, truncate_prompt_tokens, sampling, snapshot)
        if sampling is None:  # as far as the context goes
            sampling = SamplingParams(**self._engine.sampling)
            room = self._engine.max_model_len - len(tokens)
            sampling = replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room)))
        return Answer(self._engine, tokens, sampling, loaded, begins=is_chat)

    def _truncated(self, tokens: list[int], most: int, sampling: Sampling, snapshot: str | None) -> list[int]:
        name, limits = "truncate_prompt_tokens", self._engine.limits
        if snapshot is not None:
            message = f"{name} and snapshot cannot be combined: the snapshot comes first"
            raise InvalidRequest(message, name)
        if most < -1 or most == 0:
            raise InvalidRequest(f"{name} must be at least 1, or -1 for what fits, got {most}", name)
        if most == -1:
            half = limits.num_fitting // 2
            room = min(SamplingParams().max_tokens, half) if sampling is None else sampling.max_tokens
            most = max(1, limits.num_fitting - room)
        return tokens[-most:]

    def adapter(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        loaded = {one.adapter.name: one.adapter for one in self._engine.adapters.all()}
        if name not in loaded:
            raise InvalidRequest(f"there is no adapter {name!r}; loaded are: {', '.join(loaded) or 'none'}")
        return loaded[name]


def _begins_with(values: Any, kind: type) -> bool:
    return len(values) > 0 and isinstance(values[0], kind)


def _try_begin(answer: Answer, alone: bool) -> bool:
    """False: the engine is full, and some of its requests are ours. Raises any other error."""
    while True:
        try:
            answer.begin()
            return True
        except Overloaded:
            if not alone:
                return False
            time.sleep(_RETRY_S)


def _completion(answer: Answer) -> Completion:
    text, of = "".join(answer.pieces()), answer.figures()
    scores = answer.logprobs, answer.prompt_logprobs
    return Completion(text, answer.tokens, of.finish, of.prompt_tokens, of.kv_source, *scores)


def _pieces(answer: Answer) -> Iterator[str]:
    try:
        yield from answer.pieces()
    finally:
        answer.cancel()


async def _async_pieces(answer: Answer) -> AsyncIterator[str]:
    """Reads on its own thread, at most one piece ahead of the consumer."""
    pieces = answer.pieces()
    try:
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece
    finally:
        answer.cancel()
