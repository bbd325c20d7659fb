"""Plain data that crosses the halves, and the protocols between them. Owns no behaviour beyond validating
itself."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Literal, NamedTuple, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ContextExceeded, InvalidRequest, InvariantBroken, PenstockError, TransferFailed

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024  # of one stop string: text that may be one is held back that long
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 512  # tokens: the device has room for so many in every row
MAX_BIAS = 100.0  # and as much below zero; OpenAI's limit
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1  # the device keeps it in 32 bits
MAX_PRIORITY = 2**31 - 1  # and as much below zero
MAX_RETAIN_S = 86_400.0
MAX_GRAMMAR_CHARS = 1 << 16

T = TypeVar("T")

# ------------------------------------------------------------------------------------------------------ order


class Mode(enum.Enum):
    READ = "read"
    WRITE = "write"


class Access(NamedTuple):
    """The bytes that one piece of work touches: `slots` of `arena`, layers `[layers[0], layers[1])`."""

    arena: str
    slots: Sequence[int] | NDArray[np.int32] | NDArray[np.int64]
    layers: tuple[int, int]
    mode: Mode


class Fence(Protocol):
    """A point on a lane. It has passed when everything submitted to that lane before it is over."""

    @property
    def lane(self) -> str: ...

    @property
    def number(self) -> int:
        """How much was submitted to the lane before it: two fences of one lane with the same number are the
        same point."""

    def passed(self) -> bool:
        """Poll; never blocks."""

    def wait_passed(self, timeout_s: float | None = None) -> None:
        """Block the calling thread; raises DeadlineExceeded after `timeout_s`."""


# ---------------------------------------------------------------------------------------------------- request


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Grammar(NamedTuple):
    """What the text of an answer has to be. Whether it can be met is found out where it is compiled."""

    kind: Literal["json_schema", "regex", "choice", "lark", "parts"]
    # a schema and a list of choices as JSON; parts as JSON, too: a rule in Lark, and by name the grammars
    # that it refers to
    text: str


THINK_MARKS = ("<think>", "</think>")  # around reasoning


class Thought(NamedTuple):
    """Reasoning before an answer, and how much of it."""

    most: int  # tokens; then it is ended
    begun: bool  # the prompt has opened it
    opens: tuple[int, ...]  # tokens that open it
    closes: tuple[int, ...]  # and that end it


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next tokens of one request, and when to stop. Checked on construction."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over generated tokens, as OpenAI defines it
    frequency_penalty: float = 0.0  # over generated tokens
    repetition_penalty: float = 1.0  # over prompt and generated tokens; 1.0: off
    seed: int | None = None  # None: drawn by the engine
    # alternatives to report beside each generated token; None: no logprobs at all
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for prompt tokens; such a request never reuses cached KV
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # looked up for every token, on the engine's thread
    ignore_eos: bool = False
    min_tokens: int = 0  # nothing but a grammar ends the answer before
    # token ids and what is added to their logits, behind penalties
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None  # only tokens that it allows are chosen, and it ends the answer
    thought: Thought | None = None  # the grammar is that of what follows it

    def __post_init__(self) -> None:
        _range("max_tokens", self.max_tokens, 0, None)
        _range("min_tokens", self.min_tokens, 0, None)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, and there "
                f"are "
                f"at "
                f"most "
                f"{self.max_tokens} "
                f"tokens "
                f"(max_tokens)",
                "min_tokens",
            )
        _range("temperature", self.temperature, 0.0, 100.0)
        _range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _range("top_k", self.top_k, -1, MAX_TOP_K)
        _range("min_p", self.min_p, 0.0, 1.0)
        _range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        if self.seed is not None:
            _range("seed", self.seed, -MAX_SEED, MAX_SEED)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _range(name, count, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOPS or any(not s for s in self.stop):
            raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings, none of them empty", "stop")
        if any(len(s) > MAX_STOP_CHARS for s in self.stop):
            raise InvalidRequest(f"a stop string has at most {MAX_STOP_CHARS} characters", "stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} different ids", "stop_token_ids"
            )
        if len(dict(self.logit_bias)) != len(self.logit_bias) or len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, each once", "logit_bias")
        for _, bias in self.logit_bias:
            _range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest(
                "ignore_eos cannot be combined with structured output, which says when an answer is over",
                "ignore_eos",
            )
        if self.grammar is not None and len(self.grammar.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"a schema or grammar has at most {MAX_GRAMMAR_CHARS} characters", "structured_outputs"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def masked_from(self) -> int | None:
        """Generated tokens behind which the next one waits for a mask. None: none does."""
        return 0 if self.grammar is not None else None if self.thought is None else self.thought.most


def _range(name: str, value: float, low: float, high: float | None, low_open: bool = False) -> None:
    below = value <= low if low_open else value < low
    if value != value or below or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high:g}"
        bound = f"above {low:g}" if low_open else f"at least {low:g}"
        raise InvalidRequest(f"{name} must be {bound}{upper}, got {value}", name)


class Prefix(NamedTuple):
    """What a request's KV may be shared under: its scope's digest, and the content keys of its prompt's full
    blocks."""

    scope: bytes
    keys: Sequence[bytes]


class Adapter(NamedTuple):
    """A LoRA adapter as loaded: reloaded under the same name with other content, it is another one."""

    name: str
    digest: str  # of its content


class LoadedAdapter(NamedTuple):
    """An adapter under its name."""

    adapter: Adapter
    root: str  # the directory, as it was given
    loaded_s: float  # time.time()
    replaced: bool  # the name was another's before


class Prefetched(NamedTuple):
    """What came of asking for a prefetch."""

    num_blocks: int  # found in tiers behind host memory
    started: bool


class SnapshotRequest(NamedTuple):
    """A snapshot that somebody wants to have taken: of a session, or of a prompt whose KV is cached."""

    name: str
    session: str = ""
    prompt: bytes = b""  # token ids, 32 bits each; where it is no session
    num_tokens: int | None = None  # how much of it; None: all
    ttl_s: float | None = None  # None: until it is deleted
    cache_salt: str = ""
    adapter: Adapter | None = None
    messages: str = ""  # JSON of the conversation that `prompt` was made of


class Snapshot(NamedTuple):
    """A snapshot as its owner sees it."""

    name: str
    num_tokens: int
    kept_tokens: int  # whose KV some tier has now; the others are computed again when it is continued
    num_blocks: int
    pinned: bool  # its blocks are not evicted from the last tier
    created_s: float  # time.time()
    expires_s: float | None
    adapter: str  # empty: the model as it is
    is_chat: bool  # a conversation can be continued from it
    tiers: tuple[str, ...]  # that have its manifest; empty: it ends with the process


class SnapshotList(NamedTuple):
    """Those of one tenant, and what all tenants' pin."""

    snapshots: list[Snapshot]
    tier: str
    pinned_blocks: int
    pinned_blocks_max: int
    block_bytes: int
    is_complete: bool = True  # False: a disk or a shared store did not answer, and may have more


class SnapshotContent(NamedTuple):
    """What a request continues from."""

    tokens: bytes  # ids, 32 bits each
    messages: str  # JSON; empty: it was not taken of messages


class Weight(enum.IntEnum):
    """How much a session's KV matters among those that are retained: the lightest are given up first."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclass(frozen=True, slots=True)
class CacheHint:
    """What a client says about the KV of its session. None: as it was before."""

    retain_s: float | None = None  # it is wanted for so long after the session's last request; 0: no longer
    weight: Weight | None = None
    release: bool = False  # it is wanted no more once this request has ended

    def __post_init__(self) -> None:
        if self.retain_s is not None:
            _range("cache_hint.retain_s", self.retain_s, 0.0, MAX_RETAIN_S)
        if self.release and self.retain_s:
            raise InvalidRequest("cache_hint says both release and retain_s: give one of them", "cache_hint")


class Residency(NamedTuple):
    """That a request which does not fit may decode over a part of its context: what is on the device, chosen
    by scores."""

    pins: tuple[tuple[int, int], ...] = ()  # [first, end) of tokens that are always in that part


@dataclass(frozen=True, slots=True)
class Request:
    """One user generation."""

    id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    # None: reuse is off for this request; its KV is neither looked up nor given a key
    prefix: Prefix | None = None
    arrival_s: float = 0.0  # time.monotonic()
    adapter: Adapter | None = None  # None: the model as it is
    # set ahead of `distinct`, which says what it is
    distinct_prompt: NDArray[np.int32] | None = field(default=None, compare=False)
    priority: int = 0  # lower ones run first, whatever else is in line
    session: str = ""  # whose conversation it belongs to, as its client says; empty: it does not say
    # None: where it does not fit, it attends to all of its context all the same
    residency: Residency | None = None
    route: str = ""  # by which it came, such as "chat": requests of one route write about as much

    def distinct(self) -> NDArray[np.int32]:
        """The prompt's tokens, each once. The caller of `submit` works it out where a penalty needs it: long
        prompts take milliseconds."""
        return (
            np.unique(np.asarray(self.prompt, np.int32))
            if self.distinct_prompt is None
            else self.distinct_prompt
        )

    @property
    def may_match(self) -> bool:
        """Echo with prompt logprobs needs every prompt token computed, so restored KV is of no use to it."""
        return self.prefix is not None and self.sampling.prompt_logprobs is None


class PromptLimits(NamedTuple):
    """What any prompt of an engine has to keep to: known wherever requests come in, so that a refusal needs
    no engine."""

    max_model_len: int
    vocab: int
    kv_tokens: int  # that fit into device memory, or into host memory where a sequence is paged out

    def checked(
        self, prompt: Sequence[int], sampling: SamplingParams
    ) -> tuple[list[int], NDArray[np.uint32]]:
        """Its tokens as a list of our own, and the same in an array."""
        if len(prompt) == 0:
            raise InvalidRequest("the prompt is empty; it needs at least one token", "prompt")
        total = len(prompt) + sampling.max_tokens
        if total > self.max_model_len:
            asked = (
                f"you requested {total} tokens ({len(prompt)} "
                f"in "
                f"the "
                f"prompt, "
                f"{sampling.max_tokens} "
                f"in "
                f"the completion)"
            )
            raise ContextExceeded(
                self.max_model_len, asked, "prompt" if len(prompt) >= self.max_model_len else "max_tokens"
            )
        tokens: list[int] = prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
        try:
            # a third of the time that numpy takes for a list
            known = np.frombuffer(array("I", tokens), np.uint32)
        except TypeError as error:
            raise InvalidRequest(f"the prompt must be a list of token ids: {error}", "prompt") from None
        except OverflowError:  # below zero, or above all that fits
            known = None
        if known is None or int(known.max()) >= self.vocab:
            raise InvalidRequest(f"token ids must lie between 0 and {self.vocab - 1}", "prompt")
        if any(not 0 <= token < self.vocab for token, _ in sampling.logit_bias):
            raise InvalidRequest(
                f"token ids of logit_bias must lie between 0 and {self.vocab - 1}", "logit_bias"
            )
        if total > self.kv_tokens:
            raise InvalidRequest(
                f"{total} tokens do not fit into the {self.kv_tokens} of KV memory", "max_tokens"
            )
        return tokens, known


class TokenLogprob(NamedTuple):
    """Log-probability of the chosen token and of the likeliest alternatives, likeliest first."""

    token: int
    logprob: float
    rank: int  # 1: the likeliest
    top: tuple[tuple[int, float], ...]


def _same(one: tuple[object, ...], other: object) -> bool:
    """Equality of named tuples that hold arrays, which do not say by themselves whether they are equal."""
    if type(one) is not type(other) or not isinstance(other, tuple):
        return False
    pairs = zip(one, other, strict=True)
    return all(
        np.array_equal(a, b)  # type: ignore[arg-type]
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray)
        else a == b
        for a, b in pairs
    )


def _compares_arrays(cls: type[T]) -> type[T]:
    """For named tuples that hold arrays."""
    cls.__eq__ = _same  # type: ignore[method-assign, assignment]
    cls.__ne__ = lambda self, other: not _same(self, other)  # type: ignore[method-assign, arg-type]
    return cls


@_compares_arrays
class TokenScores(NamedTuple):
    """Logprobs of N consecutive tokens, with n alternatives to each, as arrays: what a step gives. Whoever
    reads them makes the entries."""

    tokens: NDArray[np.int32]  # [N]
    logprobs: NDArray[np.float32]  # [N]
    ranks: NDArray[np.int32]  # [N]; 1: the likeliest
    top_tokens: NDArray[np.int32]  # [N, n], likeliest first
    top_logprobs: NDArray[np.float32]  # [N, n]

    def from_number(self, first: int) -> TokenScores:
        """Without the first `first` of them."""
        tops = self.top_tokens[first:], self.top_logprobs[first:]
        return TokenScores(self.tokens[first:], self.logprobs[first:], self.ranks[first:], *tops)

    def entries(self) -> list[TokenLogprob]:
        ids, values = self.top_tokens.tolist(), self.top_logprobs.tolist()
        tops = [tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        rows = zip(self.tokens.tolist(), self.logprobs.tolist(), self.ranks.tolist(), tops, strict=True)
        return [TokenLogprob(*row) for row in rows]


class PromptLogprobs(Sequence["TokenLogprob | None"]):
    """Logprobs of consecutive prompt tokens. The entries are made when the first of them is read, by the
    reader's thread: for a long prompt they are hundreds of thousands of numbers, and the engine thread only
    passes them on."""

    __slots__ = ("_made", "_num", "_parts")

    def __init__(self, parts: Sequence[TokenScores | None]) -> None:
        """None is one token of which nothing is known."""
        self._parts = parts
        self._num = sum(1 if part is None else len(part.tokens) for part in parts)
        self._made: tuple[TokenLogprob | None, ...] | None = None

    @property
    def parts(self) -> Sequence[TokenScores | None]:
        """As the steps gave them."""
        return self._parts

    def followed_by(self, scores: TokenScores, first: int = 0) -> PromptLogprobs:
        """These and then `scores` from number `first` on."""
        return PromptLogprobs((*self._parts, scores.from_number(first)))

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        return iter(self._all())

    @overload
    def __getitem__(self, at: int) -> TokenLogprob | None: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[TokenLogprob | None]: ...

    def __getitem__(self, at: int | slice) -> TokenLogprob | Sequence[TokenLogprob | None] | None:
        return self._all()[at]

    def __eq__(self, other: object) -> bool:
        return self._all() == tuple(other) if isinstance(other, tuple | PromptLogprobs) else NotImplemented

    def __repr__(self) -> str:
        return f"PromptLogprobs({self._all()})"

    def _all(self) -> tuple[TokenLogprob | None, ...]:
        if self._made is None:
            self._made = tuple(
                chain.from_iterable((None,) if part is None else part.entries() for part in self._parts)
            )
        return self._made


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where the prompt's KV came from, in tokens; the fields sum to the prompt."""

    device: int = 0
    host: int = 0
    ssd: int = 0
    remote: int = 0
    computed: int = 0


class TokenEvent(NamedTuple):
    """What a request's listener gets, in order; the last one has `finish` set, and nothing follows it."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None  # on the first event; entry 0 is None
    finish: FinishReason | None = None
    stop_token: int | None = None  # the token that ended it, where one did (it is not among `tokens`)
    source: KvSource | None = None  # on the first event
    error: str | None = None
    # on the first event: from its arrival to the first step that it took part in
    waited_s: float | None = None
    # on the first event: of that, what it took to key its prompt and look it up in colder tiers
    matched_s: float | None = None
    loaded_s: float | None = None  # on the first event: of that, how long it waited for KV from colder tiers
    # what the error is, where no step has failed: the request was refused, or its engine is gone
    failure: PenstockError | None = None
    drafted: int = 0  # drafts that the step verified for it
    accepted: int = 0  # and those of them that were kept
    # on the first event: some of its tokens attend to a part of its context, or to KV that was computed so
    scored: bool = False


Listener = Callable[[TokenEvent], None]

# ---------------------------------------------------------------------------------------- promotion under way


class Arrival(NamedTuple):
    """Some layers of a promotion: they have landed when `fence` has passed."""

    layers: tuple[int, int]  # [first, end)
    fence: Fence


class Load(Protocol):
    """Blocks on their way from a colder tier to the device: into the slots of a table, or ahead of one. Asked
    from the engine thread; never blocks."""

    @property
    def arrivals(self) -> tuple[Arrival, ...] | None:
        """By layers, in order; None until all copies are on their lane (a fence that does not exist cannot be
        waited for)."""

    @property
    def settled(self) -> bool:
        """Seen to be over, landed or failed."""

    @property
    def overdue(self) -> bool:
        """It has taken longer than anybody should wait for it. Its slots stay with it all the same."""

    def error(self) -> BaseException | None:
        """Why nothing of it may be used; known at the latest when all arrivals have passed."""

    @property
    def layered(self) -> bool:
        """It comes in small groups of layers, so that a step can compute the first while the others are on
        their way."""

    def nearly_landed(self) -> bool:
        """At most its last arrival is still on its way."""

    @property
    def num_landed(self) -> int:
        """How many of its blocks, from the first on, have come: what may be used even where the rest has
        failed."""


class Prefetch(Protocol):
    """Blocks on their way from tiers behind host memory into it, before anybody has a table for them. Asked
    from the engine thread; never blocks."""

    @property
    def settled(self) -> bool:
        """Nothing of it is to come any more: what has come is in host memory, like any other block there."""

    @property
    def overdue(self) -> bool:
        """It takes longer than anybody should wait for it."""

    @property
    def ended(self) -> bool:
        """Nothing more of it is read, whether it is there or not: by `end`, by a reset, or since somebody
        else needs its room."""

    @property
    def origins(self) -> Mapping[int, str]:
        """By the number of a block: the tier that it is read from, by this or by another read that is under
        way."""

    def end(self) -> None:
        """Nobody wants more of it. What is being read still lands. Idempotent."""


class Lease(Protocol):
    """Copies of a request's blocks in colder tiers. They are wanted until it ends, that is forgotten last,
    and stay from `claim` on. It is promoted from, or given up: it ends exactly once; its time-to-live is a
    backstop, after which it covers nothing."""

    @property
    def ready(self) -> bool:
        """Whether it is known what it covers: a retraction's copies are saved first, and a store far away
        takes time to answer."""

    @property
    def num_tokens(self) -> int:
        """Tokens in its blocks at most: less than a multiple of the block size where a retracted request's
        unfinished block was saved."""

    @property
    def expired(self) -> bool:
        """Its time-to-live is over, and it covers nothing any more."""

    def num_from(self, block: int) -> int:
        """How many consecutive blocks it has from number `block` on."""

    def runs_from(self, block: int) -> Sequence[tuple[str, int]]:
        """The same by tier: whose they are, and how many, in order."""

    def set_rank(self, rank: float) -> None:
        """How late its request is going to run: where room is short, the blocks of whoever runs last are
        forgotten first."""

    def claim(self, first: int, num_blocks: int) -> bool:
        """What it has of these blocks stays from now on. False: some of it has gone since the last match."""

    def end(self) -> None:
        """Give it up."""


# ------------------------------------------------------------------------------------------------- step: plan

# In a plan, tokens that the host does not know yet: the last one that the previous step emits for the
# request, and behind it what was drafted on the device: -2 is the first draft, -3 the second.
TOKEN_IN_FLIGHT = -1


class FenceId(NamedTuple):
    """The name of a fence: its lane, and its number there."""

    lane: str
    number: int


class Echo(NamedTuple):
    """Prompt tokens whose logprobs a chunk gives: its first position that of `tokens[0]`, and so on."""

    tokens: tuple[int, ...]
    num_top: int  # alternatives to report beside each


class KeptSums(NamedTuple):
    """What is known of the keys of a context, in the room that there is for parts of all that were kept."""

    first: int
    end: int
    num_used: int  # the first so many parts of it


@_compares_arrays
class Scoring(NamedTuple):
    """What a step does for the choice of what a scored request has on the device. Parts of a sequence are
    numbered in units of `part_blocks` blocks."""

    part_blocks: int
    most_parts: int  # of the whole life of the request
    first: int  # the block that `slots` begin with
    slots: NDArray[np.int32]  # of the device: blocks whose keys are summed up now
    paged: bool  # so are the blocks that stream in from host memory, which are the first of the sequence
    num_parts: int  # the first so many are scored against the queries of the chunk's last token; 0: none
    # all of the context is read, and it is told how much of the attention is on what is on the device
    recall: bool = False
    kept: KeptSums | None = None  # by the turn before: what is known of its first parts


@_compares_arrays
class Chunk(NamedTuple):
    """One request's share of a step: `num_tokens` tokens from position `start` on."""

    request_id: str
    row: int  # fixed while the request runs; device state of the request lives under it
    start: int
    # len(tokens) == num_tokens; of a decode: the request's last token, or TOKEN_IN_FLIGHT, and drafts behind
    # it
    tokens: tuple[int, ...]
    # Of its first ceil((start + num_tokens + room) / block_tokens) blocks, without `num_elsewhere`, in token
    # order.
    slots: NDArray[np.int32]
    writes: bool  # False: the KV of these tokens is cached already and shared (a full match); do not write it
    # of its last tokens so many have their logits computed, and a token sampled from each; of a decode all
    num_logits: int
    # whose weights it is computed with; looked up by its digest where the step is launched
    adapter: Adapter | None = None
    echo: Echo | None = None  # None: no logprobs of its prompt are wanted
    # slots of host memory that have the blocks which `slots` lack; None: there are none
    paged: NDArray[np.int32] | None = None
    # it starts up to so many tokens earlier: so many drafts of the step before may turn out to be rejected
    num_unsure: int = 0
    next_token: int = 0  # the prompt's behind its last one, where it samples none
    # blocks before its own that are neither in `slots` nor in `paged`: its tokens do not attend to them
    num_left_out: int = 0
    scoring: Scoring | None = None
    room: int = 0  # places behind its tokens that it has slots for: of drafts that are made behind the step

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_paged(self) -> int:
        """Blocks."""
        return 0 if self.paged is None else len(self.paged)

    @property
    def num_elsewhere(self) -> int:
        """Blocks before its own that are not in `slots`."""
        return self.num_paged + self.num_left_out

    @property
    def kv_len(self) -> int:
        return self.start + len(self.tokens)


@_compares_arrays
class Start(NamedTuple):
    """A request takes a row: its device state is set up before the step's own work."""

    row: int
    request_id: str
    sampling: SamplingParams
    output: tuple[int, ...] = ()  # generated before a retraction
    prompt_tokens: NDArray[np.int32] | None = None  # the prompt's, each once, where a penalty looks at them
    num_prompt: int = 0  # tokens

    @classmethod
    def of(cls, row: int, request: Request, output: Sequence[int] = ()) -> Start:
        """What the device has to know of `request`."""
        penalised = request.sampling.repetition_penalty != 1.0  # the only penalty that looks at the prompt
        return cls(
            row,
            request.id,
            request.sampling,
            tuple(output),
            request.distinct() if penalised else None,
            len(request.prompt),
        )


# of hundreds: at the speed of C
_TOKENS_OF, _ECHO_OF, _SCORING_OF = attrgetter("tokens"), attrgetter("echo"), attrgetter("scoring")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward pass shall do. Plain data: it can be compared, printed, written down and sent to
    another process. What its ids stand for is in `Waits`, and adapters are known by their digests."""

    number: int
    chunks: tuple[Chunk, ...]
    # the first so many chunks are decodes: one token and its drafts; the others have several tokens of a
    # prompt
    num_decodes: int
    starts: tuple[Start, ...] = ()
    # the step's lane waits for these first: earlier users of slots that it writes
    after: tuple[FenceId, ...] = ()
    # requests whose KV is still on its way into slots of this step: each layer waits for its share of it
    loads: tuple[str, ...] = ()
    # drafts that the device makes for each request behind what it samples, for the next step
    num_ahead: int = 0
    is_followed: bool = True  # what makes drafts passes over its tokens, where there is such a thing
    missed: tuple[Chunk, ...] = ()  # tokens of earlier steps that were not passed over: this comes first

    @property
    def num_tokens(self) -> int:
        return sum(map(len, map(_TOKENS_OF, self.chunks)))

    @property
    def num_rows(self) -> int:
        """What kernels see: every token of a decode is a row of its own, and so is every other chunk."""
        return (
            sum(map(len, map(_TOKENS_OF, self.chunks[: self.num_decodes])))
            + len(self.chunks)
            - self.num_decodes
        )

    @property
    def is_decode(self) -> bool:
        """No prompts: the shape that captured replays serve best."""
        return self.num_decodes == len(self.chunks)

    @property
    def reads_host(self) -> bool:
        """Whether KV streams in from host memory for it."""
        return any(c.paged is not None and len(c.paged) for c in self.chunks)

    @property
    def scores(self) -> bool:
        """Whether something is done for the choice of what a request has on the device."""
        return any(map(_SCORING_OF, self.chunks))

    @property
    def echoes(self) -> bool:
        """Whether logprobs of prompts are wanted: they take the logits of every position."""
        return any(map(_ECHO_OF, self.chunks))


@dataclass(frozen=True, slots=True)
class Waits:
    """What the ids of one plan stand for where it is launched. It goes beside the plan, never inside it."""

    fences: Mapping[FenceId, Fence] = field(default_factory=dict)
    loads: Mapping[str, Load] = field(default_factory=dict)  # by request

    def of(self, plan: StepPlan) -> tuple[tuple[Fence, ...], tuple[Load, ...]]:
        """What `plan` is to wait for; raises InvariantBroken where some of it is not here."""
        try:
            return tuple(self.fences[one] for one in plan.after), tuple(self.loads[one] for one in plan.loads)
        except KeyError as error:
            raise InvariantBroken(
                f"step {plan.number} is to wait for {error.args[0]}, and nothing here has that name"
            ) from None


class Sampled(NamedTuple):
    """What a step chose for one chunk: one token now, several with speculation; fewer may be kept than were
    computed."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@_compares_arrays
class PartScores(NamedTuple):
    """What the `Scoring` of a chunk asked for."""

    request_id: str
    scores: NDArray[np.float32]
    recall: float | None = None  # share of the attention, over all layers and heads


class StepFailure(NamedTuple):
    """Why a step failed."""

    kind: str  # the exception's class
    message: str
    # what it was to wait for did not arrive: it has computed nothing, and its requests are none the worse
    lacked_kv: bool = False

    @classmethod
    def of(cls, error: BaseException) -> StepFailure:
        return cls(type(error).__name__, str(error), isinstance(error, TransferFailed))

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one forward pass did. Plain data, as its plan is."""

    number: int
    sampled: tuple[Sampled, ...]
    prompt_logprobs: tuple[tuple[str, TokenScores], ...] = ()  # by request, this chunk's share
    error: StepFailure | None = None
    part_scores: tuple[PartScores, ...] = ()


# ------------------------------------------------------------------------------------------- scheduler <-> kv


class Table(Protocol):
    """A request's slots in token order, and what is done to them. Ends exactly once, by `release` or
    `retract`; whatever is done to it after that raises HandleEnded."""

    @property
    def num_slots(self) -> int:
        """Blocks that it has, those that were paged out included."""

    @property
    def num_paged(self) -> int:
        """How many of its first blocks are in host memory and not on the device."""

    @property
    def paged_slots(self) -> NDArray[np.int32]:
        """Where they are there."""

    @property
    def sealed_keys(self) -> Sequence[bytes]:
        """Of its first blocks, as far as they have some."""

    @property
    def num_fetched(self) -> int:
        """How many of those have a copy on the device all the same."""

    def slots(self, num_tokens: int) -> NDArray[np.int32]:
        """View of the slots of its first ceil(num_tokens / block_tokens) blocks, without those that were
        paged out."""

    def take_after(self) -> tuple[Fence, ...]:
        """Fences that whoever writes into slots drawn since the last call must wait for; handed out once."""

    def try_extend(self, num_blocks: int) -> bool:
        """Draw `num_blocks` more slots, or change nothing and say False."""

    def promote(self, lease: Lease, num_blocks: int, num_next: int) -> Load:
        """Draw slots for the next `num_blocks` blocks and have them filled from `lease`, which ends with the
        load. `num_next` tokens are computed over them first: where that takes long, it can begin with the
        first layers."""

    def seal(self, tokens: Sequence[int], num_computed: int, fence: Fence | None) -> None:
        """Every block that lies fully inside the first `num_computed` of `tokens` is computed: give it its
        key, and demote it. `fence` lies behind the step that computed it."""

    def page_out(self, num_blocks: int, fence: Fence | None, unit: int = 1) -> int:
        """Give back the slots of up to `num_blocks` of its first blocks on the device, as far as host memory
        has them, in multiples of `unit`; returns how many. `fence` lies behind all steps launched."""

    def fetch(self, firsts: Sequence[int], num_blocks: int) -> Sequence[FetchedBlocks]:
        """Have runs of its paged-out blocks, each of so many from one of `firsts` on, copied together into
        slots that are drawn for it. Nothing is where there are not enough for all of them."""

    def close_scope(self, num_tokens: int) -> None:
        """What follows its first `num_tokens` is computed over a part of its context: nobody finds it who
        does not know its keys, and it is forgotten with the table."""

    def keep_closed(self, name: bytes, first: int, end: int) -> None:
        """Of that, blocks `first` to `end`, some of which an earlier table may have kept, stay in host
        memory: somebody knows their keys. They are forgotten with the key `name`, which the last of them
        would have otherwise, and with the block before them."""

    def retract(self, num_tokens: int, fence: Fence | None) -> Lease | None:
        """End it, saving the KV of its first `num_tokens` tokens to a colder tier where there is one."""

    def release(self, fence: Fence | None) -> None:
        """End it. `fence` covers the last use of its slots and travels with them."""


class FetchedBlocks(Protocol):
    """A run of a table's paged-out blocks that was, or is being, copied back into slots of the device, beside
    those that the table has there. It ends with its table, or before it."""

    @property
    def slots(self) -> NDArray[np.int32]: ...

    @property
    def settled(self) -> bool:
        """The copy is over, landed or failed: no transfer uses the slots."""

    @property
    def failed(self) -> bool: ...

    def end(self, fence: Fence | None) -> None:
        """Give back its slots. Its copy is over; `fence` lies behind all steps launched."""


class Match(NamedTuple):
    """The longest usable prefix of a request's keys."""

    num_blocks: int  # leading keys that are on the device
    num_idle: int  # of those, blocks that nobody holds: taking them uses up evictable room
    # the first missing key is being computed by a running request or promoted for one right now
    pending: bool
    num_colder: int = 0  # blocks behind those that are worth promoting from colder tiers
    # of a deep request, whose matched blocks are either all on the device or all here: in host memory, where
    # they stay
    num_paged: int = 0


class Want(Protocol):
    """That a request in line will use blocks of the device, which are forgotten last for it."""

    rank: float  # among wanted blocks those of the greatest rank go first

    @property
    def num_blocks(self) -> int: ...

    def end(self) -> None:
        """Idempotent."""


class KvLedger(Protocol):
    """What the scheduler asks of KV storage. All calls are from the engine thread and never block."""

    @property
    def block_tokens(self) -> int: ...

    @property
    def num_blocks(self) -> int:
        """Slots that requests can use in all."""

    @property
    def num_pageable(self) -> int:
        """Blocks that deep requests may have in host memory, all together."""

    @property
    def num_available(self) -> int:
        """Slots that can be drawn now: free or evictable."""

    @property
    def num_free(self) -> int:
        """Slots that can be drawn now without anything being evicted."""

    @property
    def num_settling(self) -> int:
        """Slots that nobody but a transfer holds: they become available when it is over."""

    def match(self, keys: Sequence[bytes], lease: Lease | None = None, want: Want | None = None) -> Match:
        """The longest run of leading `keys` on the device, and what of `lease` is worth promoting behind it.
        With a `want` of the same keys only what has changed since it was made is looked up."""

    def match_deep(self, keys: Sequence[bytes], most_resident: int) -> Match:
        """The same for a request that keeps at most so many blocks on the device."""

    def want(self, keys: Sequence[bytes], rank: float, earlier: Want | None = None) -> Want | None:
        """What the device has of the leading `keys` is forgotten after all that nobody wants, in place of
        `earlier`. None: nothing is kept for others here."""

    def start_s(self, num_tokens: int, match: Match) -> float | None:
        """How long a prompt of `num_tokens` takes to its first token when nothing else runs, by what was
        measured: loading what is colder, computing the rest. None: nothing was measured."""

    def make_room(self, num_blocks: int, floor: int, num_more: int = 0) -> bool:
        """Whether so many slots can be drawn without losing what only the device has. Where not, it is on its
        way to a colder tier, with `num_more` that would be next, and `floor` slots stay available
        meanwhile."""

    def free_up(self, num_blocks: int) -> None:
        """Up to so many slots are free from now on: what colder tiers have is forgotten for it, and nothing
        else."""

    def is_pending(self, keys: Sequence[bytes], want: Want | None = None) -> bool:
        """What `match` would say, for less: asked in every plan for every request that waits for others'
        blocks."""

    def lease(
        self, owner: str, prefix: Prefix, earlier: Lease | None = None, whole: bool = False
    ) -> Lease | None:
        """Find, and want, what colder tiers have of `prefix` behind what the device has, or of the `whole`;
        None where they have nothing. What a store far away has answered to an `earlier` lease of the same
        request, which has ended, it is not asked again. The caller may be any thread."""

    @property
    def may_prefetch(self) -> bool:
        """Whether `prefetch` would look: not while as much is under way as may be. Costs nothing."""

    def prefetch(self, prefix: Prefix, owner: str, lease: Lease | None = None) -> Prefetch | None:
        """Have what tiers behind host memory have of `prefix` read into it, for a request that waits under
        `lease`; None where nothing is to be read. It ends by itself, sooner or later."""

    def prefetch_deep(
        self, prefix: Prefix, owner: str, lease: Lease | None, is_next: bool
    ) -> Prefetch | None:
        """The same for a deep request, which needs all of it in host memory. One that `is_next` waits for no
        other: it is looked for whatever is under way, and what others want makes room for it, as for a
        load."""

    def extend_prefix(self, prefix: Prefix, tokens: Sequence[int]) -> Prefix:
        """The same scope, with the keys of all full blocks of `tokens`."""

    def open(self, owner: str, prefix: Prefix | None, num_blocks: int) -> Table:
        """A table that starts with the first `num_blocks` cached blocks of `prefix`; its other keys are
        announced as pending."""

    def open_deep(self, owner: str, prefix: Prefix, match: Match) -> Table | None:
        """A table whose first blocks may be paged out. It starts with what matched; None where that has gone
        meanwhile."""

    def forget_closed(self, keys: Sequence[bytes]) -> None:
        """Nobody knows these keys any more, of blocks that tables kept of a closed scope."""

    def promote_ahead(self, owner: str, prefix: Prefix, first: int, num_blocks: int) -> Load | None:
        """Have up to `num_blocks` blocks of `prefix` from number `first` on copied from host memory into free
        slots, before `owner` has a table for them; None where host memory has none of them, or nothing is
        shared on the device. Nothing is evicted for it, and no lease ends. When it has landed they are
        matched like any other block."""
