"""From token events to answers: the text of a choice with its scores, then choices, chunks and usage in
OpenAI's shapes, and the parts that other APIs share. Owns text and shapes, not the origin of their
content."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from penstock.contract import TokenLogprob
from penstock.server.schema import StreamOptions
from penstock.text.answer import PLAIN, AnswerFormat, ChoiceDelta, ChoiceText, Prompt, ScoredToken
from penstock.text.parsers import MessageParser

if TYPE_CHECKING:
    from penstock.models.tokenizer import TextCodec
    from penstock.server.faults import Fault


Json = dict[str, Any]
BlockKind = Literal["reasoning", "text", "call"]
OBFUSCATION_BYTES = 512  # a chunk without logprobs is smaller than that
LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


@dataclass(frozen=True, slots=True)
class Heading:
    """Fields that every object of one reply repeats."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    prompts: Sequence[Prompt] = ()


class ChunkedReply:
    """One route's answer to one request: whole, or as events of a stream. `usage` is computed on demand. This
    one is for OpenAI's routes: their streams are chunks of choices, then optionally the usage, then
    `[DONE]`."""

    kind = chunk_kind = ""
    # sent as a chunk of its own before a choice's first output: clients time the first token by it
    first_delta: Json | None = None

    def __init__(
        self, tokenizer: TextCodec, body: Any, head: Heading, read_as: AnswerFormat | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._options: StreamOptions = body.stream_options or StreamOptions()
        self._head = head
        self._read_as = read_as
        self._parsers: dict[int, MessageParser] = {}  # by choice, if the text has to be parsed
        self._logprobs: int | None = body.num_logprobs
        self._prompt_logprobs: int = body.prompt_logprobs or 0
        self._with_ids = bool(body.return_token_ids)
        self._names_ids = bool(body.return_tokens_as_token_ids)
        self._num_choices: int = body.n or 1  # of each prompt
        self._opened: set[int] = set()  # choices with output
        self._scored = ChatScores(tokenizer, self._names_ids)

    def choice(self, index: int, piece: ChoiceDelta) -> Json:
        raise NotImplementedError

    def chunk_choice(self, index: int, piece: ChoiceDelta) -> Json:
        raise NotImplementedError

    def whole(self, pieces: Sequence[ChoiceDelta], usage: Json) -> Json:
        return self._object(
            self.kind, [self.choice(index, piece) for index, piece in enumerate(pieces)], usage
        )

    def scores(self, tokens: Sequence[ScoredToken]) -> Json:
        raise NotImplementedError

    def _choice(self, index: int, piece: ChoiceDelta, finish: str | None, **content: Any) -> Json:
        scores = None if self._logprobs is None else self.scores(piece.tokens)
        made = {"index": index, **content, "logprobs": scores, "finish_reason": finish}
        return {**made, "token_ids": list(piece.ids)} if self._with_ids else made

    def _prompt_ids(self, index: int) -> Json:
        """Of the prompt that a choice answers."""
        return (
            {"prompt_token_ids": list(self._head.prompts[index // self._num_choices].ids)}
            if self._with_ids
            else {}
        )

    def _prompt_scores(self, piece: ChoiceDelta) -> Json:
        """In vLLM's shape: for each token of the prompt its alternatives by id, the token itself first."""
        if piece.prompt is None:
            return {}
        return {"prompt_logprobs": [score and self._prompt_score(score) for score in piece.prompt]}

    def _prompt_score(self, score: TokenLogprob) -> Json:
        ranked = enumerate(score.top[: self._prompt_logprobs], 1)
        alternatives = {token: (logprob, rank) for rank, (token, logprob) in ranked}
        return {
            str(token): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self._tokenizer.token_bytes(token).decode(errors="replace"),
            }
            for token, (logprob, rank) in {
                score.token: (score.logprob, score.rank),
                **alternatives,
            }.items()
        }

    def events(self, pieces: Mapping[int, ChoiceDelta], usage: Callable[[], Json]) -> bytes:
        """New output of the choices."""
        so_far = usage() if self._options.continuous_usage_stats else None
        chunks = []
        for index, piece in pieces.items():
            if self.first_delta is not None and index not in self._opened:
                opening = {"index": index, "delta": self.first_delta, "logprobs": None, "finish_reason": None}
                of_prompt = self._prompt_ids(index) | self._prompt_scores(piece)
                chunks.append(self._object(self.chunk_kind, [opening], so_far) | of_prompt)
            chunks.append(self._object(self.chunk_kind, [self.chunk_choice(index, piece)], so_far))
            self._opened.add(index)
        return b"".join(
            sse(obfuscated(chunk) if self._options.include_obfuscation else chunk) for chunk in chunks
        )

    def closing(self, usage: Callable[[], Json]) -> bytes:
        """After the last of them."""
        return (
            sse(self._object(self.chunk_kind, [], usage())) if self._options.include_usage else b""
        ) + SSE_DONE

    def failed(self, fault: Fault) -> bytes:
        """In place of further output: the status line is sent."""
        return sse(fault.body())

    def _object(self, kind: str, choices: list[Json], usage: Json | None) -> Json:
        """If the client asked for usage in the stream, every other chunk has null."""
        head, options = self._head, self._options
        content = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }
        with_usage = usage is not None or options.include_usage or options.continuous_usage_stats
        return {**content, "usage": usage} if with_usage else content


class CompletionReply(ChunkedReply):
    kind = chunk_kind = "text_completion"

    def choice(self, index: int, piece: ChoiceDelta) -> Json:
        made = self._choice(index, piece, piece.finish, text=piece.text) | self._prompt_scores(piece)
        return made if index in self._opened else made | self._prompt_ids(index)

    chunk_choice = choice

    def scores(self, tokens: Sequence[ScoredToken]) -> Json:
        tops = [None if token.score is None else self._top(token.score) for token in tokens]
        return {
            "tokens": [self._label(token.token) for token in tokens],
            "token_logprobs": [
                None if token.score is None else _finite(token.score.logprob) for token in tokens
            ],
            "top_logprobs": tops if self._logprobs else None,
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, score: TokenLogprob) -> dict[str, float]:
        """The alternatives, and the chosen token even if it is not among them."""
        return {
            self._label(token): _finite(logprob)
            for token, logprob in (*score.top, (score.token, score.logprob))
        }

    def _label(self, token: int) -> str:
        """Tokens that are not whole characters must not share a key."""
        if self._names_ids:
            return f"token_id:{token}"
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatReply(ChunkedReply):
    """With `read_as`, text is split on its way out: reasoning, content, calls."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    first_delta: Json | None = {"role": "assistant", "content": ""}  # noqa: RUF012 - never changed

    def chunk_choice(self, index: int, piece: ChoiceDelta) -> Json:
        delta, finish = self._parts(index, piece)
        return self._choice(index, piece, finish, delta=delta)

    def whole(self, pieces: Sequence[ChoiceDelta], usage: Json) -> Json:
        return super().whole(pieces, usage) | self._prompt_ids(0) | self._prompt_scores(pieces[0])

    def choice(self, index: int, piece: ChoiceDelta) -> Json:
        parts, finish = self._parts(index, piece)
        message: Json = {"role": "assistant", "content": "", "refusal": None, **parts}
        if calls := parts.get("tool_calls"):
            message["content"] = parts.get("content")
            message["tool_calls"] = [
                {name: call[name] for name in ("id", "type", "function")} for call in calls
            ]
        return self._choice(index, piece, finish, message=message)

    def _parts(self, index: int, piece: ChoiceDelta) -> tuple[Json, str | None]:
        """What the piece adds to `content`, `reasoning_content` and `tool_calls`, and the finish reason. The
        first part of a call has its id and name."""
        if self._read_as is None:
            return {"content": piece.text} if piece.text else {}, piece.finish
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._read_as.parser()
        row = parser.push(piece.text, last=piece.finish is not None)
        texts = {"text": "", "reasoning": ""}
        calls: list[Json] = []
        # of the last call before this piece
        number = parser.num_calls - sum(kind == "call" for kind, _ in row) - 1
        for kind, text in row:
            if kind == "call":
                number += 1
                function = {"name": text, "arguments": ""}
                calls.append(
                    {"index": number, "id": self._read_as.call_id(), "type": "function", "function": function}
                )
            elif kind == "arguments":
                if not calls:
                    calls.append({"index": number, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text
            else:
                texts[kind] += text
        parts: Json = {"content": texts["text"], "reasoning_content": texts["reasoning"], "tool_calls": calls}
        # a client would run a call that is cut off with half of its arguments
        cut = piece.stop is not None and parser.in_call
        finish = "tool_calls" if piece.finish == "stop" and parser.num_calls and not cut else piece.finish
        return {name: value for name, value in parts.items() if value}, finish

    def scores(self, tokens: Sequence[ScoredToken]) -> Json:
        return {
            "content": [
                self._scored.of(token.score, token.first) for token in tokens if token.score is not None
            ],
            "refusal": None,
        }


class ChatScores(NamedTuple):
    """Scores of a message's tokens, as OpenAI's chats and responses have them."""

    tokenizer: TextCodec
    names_ids: bool = False

    def of(self, score: TokenLogprob, first: bool) -> Json:
        tops = [self._entry(token, logprob, first) for token, logprob in score.top]
        return {**self._entry(score.token, score.logprob, first), "top_logprobs": tops}

    def _entry(self, token: int, logprob: float, first: bool) -> Json:
        """Bytes as they are in the message: joined over its tokens they are the message."""
        raw = self.tokenizer.token_bytes(token, first)
        name = f"token_id:{token}" if self.names_ids else raw.decode(errors="replace")
        return {"token": name, "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(LOWEST_LOGPROB, logprob)


def usage_of(prompts: Sequence[Prompt], choices: Sequence[ChoiceText], num_choices: int) -> Json:
    """Each prompt counts once, by its first choice; the sources sum to the prompt tokens."""
    num_prompt = sum(len(prompt.ids) for prompt in prompts)
    num_generated = sum(choice.num_tokens for choice in choices)
    by_source: dict[str, int] = {}
    for choice in choices[::num_choices]:
        if choice.source is not None:
            for name, count in asdict(choice.source).items():
                by_source[name] = by_source.get(name, 0) + count
    # of requests that have begun
    cached = sum(count for name, count in by_source.items() if name != "computed")
    details: Json = {"cached_tokens": cached, "kv_source": by_source}
    if any(choice.scored for choice in choices):
        details["kv_residency"] = "scored"
    usage: Json = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": details,
    }
    if waits_s := [choice.expert_wait_s for choice in choices if choice.expert_wait_s is not None]:
        usage["expert_wait_ms"] = round(1e3 * max(waits_s), 3)  # choices share their steps
    if num_drafts := sum(choice.num_drafts for choice in choices):
        num_accepted = sum(choice.num_accepted for choice in choices)
        usage["completion_tokens_details"] = {
            "draft_tokens": num_drafts,
            "accepted_draft_tokens": num_accepted,
        }
    return usage


def expert_wait_of(usage: Json) -> Json:
    """Empty where no step waits for experts."""
    return {name: value for name, value in usage.items() if name == "expert_wait_ms"}


# ------------------------------------------------------------------------------------- answers made of blocks


class BlockReply:
    """An answer of consecutive blocks, whole or as events: each block is opened, extended, and closed before
    the next. There is at least one, which may be empty. Subclasses have the shapes of their API."""

    def __init__(self, read_as: AnswerFormat | None) -> None:
        self.finish: str | None = None
        self.reading = read_as or PLAIN
        self._parser = self.reading.parser()
        self._kind: BlockKind | None = None  # of the block that is open
        self._begun = False

    def begin(self, usage: Callable[[], Json]) -> list[Json]:
        """The first events."""
        raise NotImplementedError

    def opened(self, kind: BlockKind, name: str) -> Iterator[Json]:
        raise NotImplementedError

    def added(self, kind: BlockKind, text: str) -> Json:
        raise NotImplementedError

    def closed(self, kind: BlockKind) -> Iterator[Json]:
        raise NotImplementedError

    def ended(self, usage: Json) -> Json:
        """All of it."""
        raise NotImplementedError

    def whole(self, pieces: Sequence[ChoiceDelta], usage: Json) -> Json:
        deque(self.take(pieces[0]), maxlen=0)
        return self.ended(usage)

    def events(self, pieces: Mapping[int, ChoiceDelta], usage: Callable[[], Json]) -> bytes:
        made = [] if self._begun else self.begin(usage)
        self._begun = True
        made += [one for piece in pieces.values() for one in self.take(piece)]
        return b"".join(map(self.encoded, made))

    def encoded(self, event: Json) -> bytes:
        """The event with its name in front."""
        name: str = event["type"]
        return b"event: " + name.encode() + b"\n" + sse(event)

    def take(self, piece: ChoiceDelta) -> Iterator[Json]:
        """Events."""
        for kind, text in self._parser.push(piece.text, last=piece.finish is not None):
            if kind == "call":
                yield from self._open("call", text)
            elif text:
                yield from self._add("call" if kind == "arguments" else kind, text)
        if piece.finish is not None:
            self.finish = "tool_calls" if piece.finish == "stop" and self._parser.num_calls else piece.finish
            if self._kind is None:
                yield from self._open("text")
            yield from self._close()

    def _add(self, kind: BlockKind, text: str) -> Iterator[Json]:
        if self._kind != kind:
            yield from self._open(kind)
        yield self.added(kind, text)

    def _open(self, kind: BlockKind, name: str = "") -> Iterator[Json]:
        yield from self._close()
        self._kind = kind
        yield from self.opened(kind, name)

    def _close(self) -> Iterator[Json]:
        if self._kind is not None:
            yield from self.closed(self._kind)


def sse(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def obfuscated(content: Json) -> Json:
    """Padded to a multiple of `OBFUSCATION_BYTES`."""
    bare = {**content, "obfuscation": ""}
    return {**bare, "obfuscation": "0" * (-len(msgspec.json.encode(bare)) % OBFUSCATION_BYTES)}


SSE_DONE = b"data: [DONE]\n\n"
