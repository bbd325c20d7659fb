"""Plain data that crosses the halves, and the protocols between them. Owns no behaviour beyond validating
itself."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from typing import Literal, NamedTuple, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from penstock.config import ResidencyName
from penstock.errors import ContextExceeded, InvalidRequest, InvariantBroken, PenstockError, TransferFailed

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024  # of one stop string; text that may begin one is held back up to this length
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 512  # tokens; the device allocates this many in every row
MAX_BIAS = 100.0  # magnitude; OpenAI's limit
MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1  # the device keeps it in 32 bits
MAX_PRIORITY = 2**31 - 1  # magnitude
MAX_RETAIN_S = 86_400.0
MAX_GRAMMAR_CHARS = 1 << 16
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS = 256  # each becomes up to two sequences of tokens
MAX_BAD_WORD_CHARS = 256

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
        """Number of submissions to the lane before it. Two fences of one lane with the same number are the
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
    """A constraint on the text of an answer. The compiler checks whether it can be satisfied."""

    kind: Literal["json_schema", "regex", "choice", "lark", "parts"]
    # schema, choices and parts are JSON; parts hold a rule in Lark and, by name, the grammars it refers to
    text: str


THINK_MARKS = ("<think>", "</think>")  # around reasoning


class Thought(NamedTuple):
    """Reasoning before an answer, and its limit."""

    most: int  # tokens; reasoning is closed after this many
    begun: bool  # the prompt already opens it
    opens: tuple[int, ...]  # tokens that open it
    closes: tuple[int, ...]  # tokens that close it


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
    is_free: bool = False  # its seed was drawn by the engine
    # alternatives to report beside each generated token; None: no logprobs at all
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for prompt tokens; disables reuse of cached KV
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # the engine thread looks up every token here
    ignore_eos: bool = False
    min_tokens: int = 0  # only a grammar ends the answer earlier
    # (token id, value added to its logit after penalties)
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] | None = None  # all others are masked; None: no token is
    bad_words: tuple[str, ...] = ()  # never written; the engine makes `bad_token_ids` of them
    # sequences whose last token is masked after the others
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None  # masks the tokens that it forbids, and ends the answer
    thought: Thought | None = None  # the grammar applies to the text after the reasoning

    def __post_init__(self) -> None:
        _range("max_tokens", self.max_tokens, 0, None)
        _range("min_tokens", self.min_tokens, 0, None)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, and there are at most "
                f"{self.max_tokens} tokens (max_tokens)",
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
        self._check_rules()
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest(
                "ignore_eos cannot be combined with structured output, which says when an answer is over",
                "ignore_eos",
            )
        if self.grammar is not None and len(self.grammar.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"a schema or grammar has at most {MAX_GRAMMAR_CHARS} characters", "structured_outputs"
            )

    def _check_rules(self) -> None:
        allowed, words = self.allowed_token_ids, self.bad_words
        if allowed is not None and not 0 < len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
            raise InvalidRequest(
                f"allowed_token_ids takes 1 to {MAX_ALLOWED_TOKEN_IDS} different ids, got {len(allowed)}",
                "allowed_token_ids",
            )
        if len(words) > MAX_BAD_WORDS or not all(0 < len(word) <= MAX_BAD_WORD_CHARS for word in words):
            raise InvalidRequest(
                f"bad_words takes at most {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_CHARS} characters",
                "bad_words",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def rules_out(self) -> bool:
        """True if tokens are masked by their ids."""
        return self.allowed_token_ids is not None or bool(self.bad_token_ids)

    @property
    def masked_from(self) -> int | None:
        """Number of generated tokens after which sampling waits for a mask. None: it never waits."""
        if self.grammar is not None or self.rules_out:
            return 0
        return None if self.thought is None else self.thought.most

    def spelled(
        self, bad_token_ids: Callable[[tuple[str, ...]], tuple[tuple[int, ...], ...]]
    ) -> SamplingParams:
        """With the tokens of its bad words, unless it has them."""
        if not self.bad_words or self.bad_token_ids:
            return self
        return replace(self, bad_token_ids=bad_token_ids(self.bad_words))

    def check_ids(self, vocab: int) -> None:
        """Refuses token ids that a model of `vocab` tokens does not have, and rules that leave no token."""
        allowed = self.allowed_token_ids
        for name, ids in (("logit_bias", dict(self.logit_bias)), ("allowed_token_ids", allowed)):
            if ids and not 0 <= min(ids) <= max(ids) < vocab:
                raise InvalidRequest(f"token ids of {name} must lie between 0 and {vocab - 1}", name)
        never = {some[0] for some in self.bad_token_ids if len(some) == 1}
        if allowed is not None and never.issuperset(allowed):
            raise InvalidRequest("bad_words rules out every token of allowed_token_ids", "bad_words")


def _range(name: str, value: float, low: float, high: float | None, low_open: bool = False) -> None:
    below = value <= low if low_open else value < low
    if value != value or below or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high:g}"
        bound = f"above {low:g}" if low_open else f"at least {low:g}"
        raise InvalidRequest(f"{name} must be {bound}{upper}, got {value}", name)


class Prefix(NamedTuple):
    """Identity of a request's shareable KV: the digest of its scope, and the keys of the prompt's full
    blocks."""

    scope: bytes
    keys: Sequence[bytes]


class Adapter(NamedTuple):
    """A LoRA adapter as loaded. Other content under the same name is another adapter."""

    name: str
    digest: str  # of its content


class LoadedAdapter(NamedTuple):
    """An adapter under its name."""

    adapter: Adapter
    root: str  # the directory, as it was given
    loaded_s: float  # time.time()
    replaced: bool  # the name belonged to another adapter before


class Prefetched(NamedTuple):
    """Outcome of a prefetch call."""

    num_blocks: int  # found in cold tiers
    started: bool


class SnapshotRequest(NamedTuple):
    """Arguments for taking a snapshot of a session, or of a prompt whose KV is cached."""

    name: str
    session: str = ""
    prompt: bytes = b""  # token ids, 32 bits each; empty if a session is given
    num_tokens: int | None = None  # length of the prefix to take; None: all
    ttl_s: float | None = None  # None: until it is deleted
    cache_salt: str = ""
    adapter: Adapter | None = None
    messages: str = ""  # JSON of the conversation that `prompt` was made of


class Snapshot(NamedTuple):
    """A snapshot as its owner sees it."""

    name: str
    num_tokens: int
    kept_tokens: int  # tokens whose KV some tier has now; the others are recomputed on continuation
    num_blocks: int
    pinned: bool  # its blocks are not evicted from the last tier
    created_s: float  # time.time()
    expires_s: float | None
    adapter: str  # empty: the model as it is
    is_chat: bool  # a conversation can be continued from it
    tiers: tuple[str, ...]  # tiers that have its manifest; empty: it ends with the process


class SnapshotList(NamedTuple):
    """The snapshots of one tenant, and the blocks that snapshots of all tenants pin."""

    snapshots: list[Snapshot]
    tier: str
    pinned_blocks: int
    pinned_blocks_max: int
    block_bytes: int
    is_complete: bool = True  # False: a disk or shared store did not answer; it may have more snapshots


class SnapshotContent(NamedTuple):
    """The content that a request continues from."""

    tokens: bytes  # ids, 32 bits each
    messages: str  # JSON; empty: the snapshot was not made from messages


class Weight(enum.IntEnum):
    """Importance of a retained session's KV. The lightest sessions are given up first."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


@dataclass(frozen=True, slots=True)
class CacheHint:
    """A client's hint about the KV of its session. None leaves the earlier value."""

    retain_s: float | None = None  # keep the KV wanted this long after the last request; 0: do not keep it
    weight: Weight | None = None
    release: bool = False  # stop wanting the KV once this request has ended

    def __post_init__(self) -> None:
        if self.retain_s is not None:
            _range("cache_hint.retain_s", self.retain_s, 0.0, MAX_RETAIN_S)
        if self.release and self.retain_s:
            raise InvalidRequest("cache_hint says both release and retain_s: give one of them", "cache_hint")


class Residency(NamedTuple):
    """Lets a request that does not fit decode over a part of its context. Scores choose the part that is on
    the device."""

    pins: tuple[tuple[int, int], ...] = ()  # [first, end) of tokens that are always in that part


@dataclass(frozen=True, slots=True)
class Submission:
    """What a caller asks of an engine: one generation."""

    prompt: Sequence[int]
    sampling: SamplingParams
    id: str = ""  # empty: the engine makes one
    cache_salt: str = ""
    adapter: Adapter | None = None  # None: the model as it is
    priority: int = 0  # lower values run first, before any other criterion
    session: str = ""  # the client's name for the conversation; empty: none given
    hint: CacheHint | None = None  # about the KV of its session
    # what it attends to if it does not fit, and the tokens that always stay; None: as configured
    residency: ResidencyName | None = None
    pins: Sequence[tuple[int, int]] | None = None
    route: str = ""  # such as "chat"; requests of one route produce similar numbers of tokens


@dataclass(frozen=True, slots=True)
class Request:
    """A `Submission` that an engine has accepted."""

    id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    # None: reuse is off for this request; its KV is neither looked up nor given a key
    prefix: Prefix | None = None
    arrival_s: float = 0.0  # time.monotonic()
    adapter: Adapter | None = None  # None: the model as it is
    # precomputed result of `distinct`
    distinct_prompt: NDArray[np.int32] | None = field(default=None, compare=False)
    priority: int = 0
    session: str = ""
    # None: it attends to all of its context, even if that does not fit
    residency: Residency | None = None
    route: str = ""

    def distinct(self) -> NDArray[np.int32]:
        """The prompt's tokens, each once. If a penalty needs it, the caller of `submit` computes it: a long
        prompt takes milliseconds."""
        return (
            np.unique(np.asarray(self.prompt, np.int32))
            if self.distinct_prompt is None
            else self.distinct_prompt
        )

    @property
    def may_match(self) -> bool:
        """False with prompt logprobs: they need every prompt token computed, so cached KV does not help."""
        return self.prefix is not None and self.sampling.prompt_logprobs is None


class PromptLimits(NamedTuple):
    """Limits on the prompts of an engine. Front processes have them, too, and refuse by themselves."""

    max_model_len: int
    vocab: int
    kv_tokens: int  # that fit into device memory, or into host memory if sequences may be paged out

    @property
    def num_fitting(self) -> int:
        """Tokens of a prompt and its answer that there is room for."""
        return min(self.max_model_len, self.kv_tokens)

    def checked(
        self, prompt: Sequence[int], sampling: SamplingParams
    ) -> tuple[list[int], NDArray[np.uint32]]:
        """The prompt's tokens as a new list, and the same as an array."""
        if len(prompt) == 0:
            raise InvalidRequest("the prompt is empty; it needs at least one token", "prompt")
        total = len(prompt) + sampling.max_tokens
        if total > self.max_model_len:
            asked = (
                f"you requested {total} tokens "
                f"({len(prompt)} in the prompt, {sampling.max_tokens} in the completion)"
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
        except OverflowError:  # negative, or over 32 bits
            known = None
        if known is None or int(known.max()) >= self.vocab:
            raise InvalidRequest(f"token ids must lie between 0 and {self.vocab - 1}", "prompt")
        sampling.check_ids(self.vocab)
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

    def with_top(self, num: int) -> TokenLogprob:
        """With that many alternatives at most."""
        return self if len(self.top) <= num else self._replace(top=self.top[:num])


def _same(one: tuple[object, ...], other: object) -> bool:
    """Equality of named tuples that hold arrays: `==` of two arrays is an array, not a bool."""
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
    """Logprobs of N consecutive tokens, with n alternatives to each, as a step returns them: arrays. The
    reader calls `entries`."""

    tokens: NDArray[np.int32]  # [N]
    logprobs: NDArray[np.float32]  # [N]
    ranks: NDArray[np.int32]  # [N]; 1: the likeliest
    top_tokens: NDArray[np.int32]  # [N, n], likeliest first
    top_logprobs: NDArray[np.float32]  # [N, n]

    def from_number(self, first: int) -> TokenScores:
        """All but the first `first` tokens."""
        tops = self.top_tokens[first:], self.top_logprobs[first:]
        return TokenScores(self.tokens[first:], self.logprobs[first:], self.ranks[first:], *tops)

    def entries(self) -> list[TokenLogprob]:
        ids, values = self.top_tokens.tolist(), self.top_logprobs.tolist()
        tops = [tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        rows = zip(self.tokens.tolist(), self.logprobs.tolist(), self.ranks.tolist(), tops, strict=True)
        return [TokenLogprob(*row) for row in rows]


class PromptLogprobs(Sequence["TokenLogprob | None"]):
    """Logprobs of consecutive prompt tokens. The reader's thread makes all entries at the first read: a long
    prompt has hundreds of thousands of numbers, too many for the engine thread to convert."""

    __slots__ = ("_made", "_num", "_parts")

    def __init__(self, parts: Sequence[TokenScores | None]) -> None:
        """A part that is None stands for one token without logprobs."""
        self._parts = parts
        self._num = sum(1 if part is None else len(part.tokens) for part in parts)
        self._made: tuple[TokenLogprob | None, ...] | None = None

    @property
    def parts(self) -> Sequence[TokenScores | None]:
        """As the steps returned them."""
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


class Totals(NamedTuple):
    """Of a whole request."""

    written: int = 0  # tokens of its answer
    drafted: int = 0  # drafts that steps verified for it
    accepted: int = 0  # drafts of these that were kept


class TokenEvent(NamedTuple):
    """One event for a request's listener. Events come in order, and the last one has `finish` set."""

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None  # on the first event; entry 0 is None
    finish: FinishReason | None = None
    stop_token: int | None = None  # the token that ended the answer, if any; not among `tokens`
    source: KvSource | None = None  # on the first event
    error: str | None = None
    # on the first event: time from arrival to the request's first step
    waited_s: float | None = None
    # on the first event: the part of `waited_s` for hashing the prompt and looking it up in colder tiers
    matched_s: float | None = None
    loaded_s: float | None = None  # on the first event: the part of `waited_s` for loading KV
    # the error if no step failed: the request was refused, or its engine is gone
    failure: PenstockError | None = None
    drafted: int = 0  # drafts that the step verified for the request
    accepted: int = 0  # drafts of these that were kept
    # on the first event: some tokens attend to a part of the context only, or to KV computed that way
    scored: bool = False
    totals: Totals | None = None  # on the last event, unless the engine failed
    # time that steps waited for experts since the event before, or since the request's first step. On the
    # first event of an engine whose experts come and go, and on later ones if there was any
    expert_wait_s: float | None = None


Listener = Callable[[TokenEvent], None]

# ---------------------------------------------------------------------------------------- promotion under way


class Arrival(NamedTuple):
    """Some layers of a promotion: they have landed when `fence` has passed."""

    layers: tuple[int, int]  # [first, end)
    fence: Fence


class Load(Protocol):
    """Blocks on their way from a colder tier to the device, for a table that is open or not open yet. For the
    engine thread; never blocks."""

    @property
    def arrivals(self) -> tuple[Arrival, ...] | None:
        """By layers, in order. None until all copies are submitted: their fences do not exist before."""

    @property
    def settled(self) -> bool:
        """The end was seen: it has landed or failed."""

    @property
    def overdue(self) -> bool:
        """The load takes longer than a request should wait. It keeps its slots."""

    def error(self) -> BaseException | None:
        """Why no block of the load may be used. Known at the latest when all arrivals have passed."""

    @property
    def layered(self) -> bool:
        """It arrives in small groups of layers. A step can compute the first while the others arrive."""

    def nearly_landed(self) -> bool:
        """At most the last arrival is missing."""

    @property
    def num_landed(self) -> int:
        """Number of leading blocks that have landed. They may be used even if the rest failed."""


class Prefetch(Protocol):
    """Blocks on their way from cold tiers into host memory, before a table exists for them. For the engine
    thread; never blocks."""

    @property
    def settled(self) -> bool:
        """No more blocks will arrive. Those that arrived are ordinary blocks in host memory."""

    @property
    def overdue(self) -> bool:
        """The prefetch takes longer than a request should wait."""

    @property
    def ended(self) -> bool:
        """No further block is read: `end` was called, the cache was reset, or another request needs the
        room."""

    @property
    def origins(self) -> Mapping[int, str]:
        """By block number: the tier that the block is read from, by this or by another read in flight."""

    def end(self) -> None:
        """Stop reading ahead. Reads in flight still land. Idempotent."""


class Lease(Protocol):
    """Copies of a request's blocks in colder tiers. Until the lease ends the blocks are wanted, that is,
    evicted last. `claim` pins them. A lease ends exactly once, by a promotion or by `end`. Its time-to-live
    is a backstop: an expired lease covers nothing."""

    @property
    def ready(self) -> bool:
        """Whether its blocks are known. The save of a retraction, or a remote lookup, may be in flight."""

    @property
    def num_tokens(self) -> int:
        """Covered tokens. Not block-aligned after a retraction, which also saves the unfinished block."""

    @property
    def expired(self) -> bool:
        """The time-to-live is over; the lease covers nothing."""

    def num_from(self, block: int) -> int:
        """Number of consecutive blocks that it has from number `block` on."""

    def runs_from(self, block: int) -> Sequence[tuple[str, int]]:
        """The same blocks as (tier, number of blocks), in order."""

    def set_rank(self, rank: float) -> None:
        """How late the request will run. If memory is short, blocks of the latest are evicted first."""

    def claim(self, first: int, num_blocks: int) -> bool:
        """Pin its copies of these blocks. False: some were evicted since the last match."""

    def end(self) -> None:
        """Give up the copies."""


# ------------------------------------------------------------------------------------------------- step: plan

# Placeholders in a plan for tokens that the host does not know yet. -1 is the last token that the previous
# step samples for the request; -2 is the first draft made on the device after it, -3 the second.
TOKEN_IN_FLIGHT = -1


class FenceId(NamedTuple):
    """The name of a fence: its lane, and its number there."""

    lane: str
    number: int


class Echo(NamedTuple):
    """Prompt tokens whose logprobs a chunk returns: position i of the chunk scores `tokens[i]`."""

    tokens: tuple[int, ...]
    num_top: int  # alternatives to report beside each


class KeptSums(NamedTuple):
    """Key bounds of a kept context: rows [first, end) of the memory for the parts of all kept contexts."""

    first: int
    end: int
    num_used: int  # number of leading parts to use


@_compares_arrays
class Scoring(NamedTuple):
    """Work of a step to choose which parts of a scored request stay on the device. A part is `part_blocks`
    blocks."""

    part_blocks: int
    most_parts: int  # over the request's whole life
    first: int  # number of the block in `slots[0]`
    slots: NDArray[np.int32]  # device slots of the blocks whose keys are summarised in this step
    paged: bool  # also summarise the blocks streamed from host memory, the first ones of the sequence
    num_parts: int  # leading parts to score against the queries of the chunk's last token; 0: none
    # read the whole context, and report the share of attention that falls on the resident part
    recall: bool = False
    kept: KeptSums | None = None  # key bounds of the first parts, kept by the turn before


@_compares_arrays
class Chunk(NamedTuple):
    """One request's share of a step: `num_tokens` tokens from position `start` on."""

    request_id: str
    row: int  # index of the request's state on the device; fixed while the request runs
    start: int
    # len(tokens) == num_tokens. A decode has the request's last token (or TOKEN_IN_FLIGHT), then drafts.
    tokens: tuple[int, ...]
    # In token order: the first ceil((start + num_tokens + room) / block_tokens) blocks, without the first
    # `num_elsewhere`.
    slots: NDArray[np.int32]
    writes: bool  # False: the KV of these tokens is cached and shared (a full match); do not write it
    # trailing tokens whose logits are computed, with a token sampled from each; all tokens of a decode
    num_logits: int
    # None: the plain model. The launch looks up the weights by the adapter's digest.
    adapter: Adapter | None = None
    echo: Echo | None = None  # None: no prompt logprobs
    # host slots of the paged-out blocks; None: none
    paged: NDArray[np.int32] | None = None
    # drafts of the previous step still being verified; the real start may be this many tokens earlier
    num_unsure: int = 0
    next_token: int = 0  # the prompt token that follows the chunk, if the chunk samples none
    # earlier blocks that are neither in `slots` nor in `paged`; the tokens do not attend to them
    num_left_out: int = 0
    scoring: Scoring | None = None
    room: int = 0  # positions after the tokens that `slots` also covers, for drafts made after the step
    state: StateMove | None = None  # None: nothing moves

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_paged(self) -> int:
        """Blocks."""
        return 0 if self.paged is None else len(self.paged)

    @property
    def num_elsewhere(self) -> int:
        """Leading blocks that are not in `slots`."""
        return self.num_paged + self.num_left_out

    @property
    def kv_len(self) -> int:
        return self.start + len(self.tokens)


class StateMove(NamedTuple):
    """Slots of kept states that a chunk reads or writes. The state is in the chunk's row."""

    begins: int | None = None  # its row begins with this one
    ends: int | None = None  # this one gets the state after its last token


@_compares_arrays
class Start(NamedTuple):
    """A request takes a row: its device state is set up before the step's own work."""

    row: int
    request_id: str
    sampling: SamplingParams
    output: tuple[int, ...] = ()  # generated before a retraction
    prompt_tokens: NDArray[np.int32] | None = None  # the prompt's tokens, each once, if a penalty needs them
    num_prompt: int = 0  # tokens

    @classmethod
    def of(cls, row: int, request: Request, output: Sequence[int] = ()) -> Start:
        """The state of `request` that the device needs."""
        penalised = request.sampling.repetition_penalty != 1.0  # the only penalty that reads the prompt
        return cls(
            row,
            request.id,
            request.sampling,
            tuple(output),
            request.distinct() if penalised else None,
            len(request.prompt),
        )


# with `map`, faster than a loop over hundreds of chunks
_TOKENS_OF, _ECHO_OF, _SCORING_OF = attrgetter("tokens"), attrgetter("echo"), attrgetter("scoring")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one forward pass. Plain data: it can be compared, printed, recorded and sent to another
    process. `Waits` maps its ids to fences and loads; adapters go by their digests."""

    number: int
    chunks: tuple[Chunk, ...]
    # the first `num_decodes` chunks are decodes: one token and its drafts; the others are prompt chunks
    num_decodes: int
    starts: tuple[Start, ...] = ()
    # fences of the earlier uses of the slots that the step writes; its lane waits for them first
    after: tuple[FenceId, ...] = ()
    # requests whose KV is still being loaded into slots of this step; each layer waits for its own part
    loads: tuple[str, ...] = ()
    # drafts per request that the device makes after sampling, for the next step; 0: the draft model runs only
    # over a step with prompts
    num_ahead: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, map(_TOKENS_OF, self.chunks)))

    @property
    def num_rows(self) -> int:
        """Rows as kernels count them: one per token of a decode, one per other chunk."""
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
        """Whether the step streams KV from host memory."""
        return any(c.paged is not None and len(c.paged) for c in self.chunks)

    @property
    def scores(self) -> bool:
        """Whether a chunk has `scoring`."""
        return any(map(_SCORING_OF, self.chunks))

    @property
    def echoes(self) -> bool:
        """Whether a chunk returns prompt logprobs, which need the logits of every position."""
        return any(map(_ECHO_OF, self.chunks))


@dataclass(frozen=True, slots=True)
class Waits:
    """The fences and loads that the ids of one plan name. Passed beside the plan, never inside it."""

    fences: Mapping[FenceId, Fence] = field(default_factory=dict)
    loads: Mapping[str, Load] = field(default_factory=dict)  # by request

    def of(self, plan: StepPlan) -> tuple[tuple[Fence, ...], tuple[Load, ...]]:
        """The fences and loads that `plan` waits for. Raises InvariantBroken if one is missing."""
        try:
            return tuple(self.fences[one] for one in plan.after), tuple(self.loads[one] for one in plan.loads)
        except KeyError as error:
            raise InvariantBroken(
                f"step {plan.number} is to wait for {error.args[0]}, and nothing here has that name"
            ) from None


class Sampled(NamedTuple):
    """The tokens that a step sampled for one chunk: one, or several with speculation. Fewer may be kept."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None


@_compares_arrays
class PartScores(NamedTuple):
    """Result of the `Scoring` of a chunk."""

    request_id: str
    scores: NDArray[np.float32]
    recall: float | None = None  # share of attention on the resident part, over all layers and heads


class StepFailure(NamedTuple):
    """Why a step failed."""

    kind: str  # the exception's class
    message: str
    # KV that the step waits for did not arrive. The step computed nothing, and its requests can go on.
    lacked_kv: bool = False

    @classmethod
    def of(cls, error: BaseException) -> StepFailure:
        return cls(type(error).__name__, str(error), isinstance(error, TransferFailed))

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one forward pass. Plain data, like its plan."""

    number: int
    sampled: tuple[Sampled, ...]
    prompt_logprobs: tuple[tuple[str, TokenScores], ...] = ()  # (request id, scores of its chunk)
    error: StepFailure | None = None
    part_scores: tuple[PartScores, ...] = ()


# ------------------------------------------------------------------------------------------- scheduler <-> kv


class Table(Protocol):
    """A request's slots in token order, and the operations on them. Ends exactly once, by `release` or
    `retract`; every later call raises HandleEnded."""

    @property
    def num_slots(self) -> int:
        """Number of its blocks, including paged-out ones."""

    @property
    def num_paged(self) -> int:
        """Number of its leading blocks that are paged out."""

    @property
    def num_gone(self) -> int:
        """Number of its leading blocks that no later token needs, and that it does not hold: `let_go` gave
        them back, or its match began after them."""

    @property
    def paged_slots(self) -> NDArray[np.int32]:
        """Host slots of the paged-out blocks."""

    @property
    def sealed_keys(self) -> Sequence[bytes]:
        """Keys of its leading blocks that are sealed."""

    @property
    def num_fetched(self) -> int:
        """Number of paged-out blocks that also have a copy on the device."""

    def slots(self, num_tokens: int) -> NDArray[np.int32]:
        """View of the slots of its first ceil(num_tokens / block_tokens) blocks, without those that are paged
        out or gone."""

    def take_after(self) -> tuple[Fence, ...]:
        """Fences to wait for before a write into slots drawn since the last call. Each is returned once."""

    def try_extend(self, num_blocks: int) -> bool:
        """Draw `num_blocks` more slots, or change nothing and return False."""

    def let_go(self, num_tokens: int, fence: Fence | None) -> int:
        """Give back the slots of sealed leading blocks that a request with KV of `num_tokens` tokens does not
        need. Returns how many. `fence` lies behind all launched steps."""

    def promote(self, lease: Lease, num_blocks: int, num_next: int) -> Load:
        """Draw slots for the next `num_blocks` blocks and fill them from `lease`, which ends with the load.
        `num_next` tokens will be computed first over these blocks. If that takes long, the load comes by
        layers, so that the step can begin early."""

    def seal(self, tokens: Sequence[int], num_computed: int, fence: Fence | None) -> None:
        """Seal and demote every block that lies fully inside the first `num_computed` of `tokens`. `fence`
        lies behind the step that computed them."""

    def page_out(self, num_blocks: int, fence: Fence | None, unit: int = 1) -> int:
        """Give back the device slots of up to `num_blocks` leading blocks that host memory has, in multiples
        of `unit`. Returns how many. `fence` lies behind all launched steps."""

    def fetch(self, firsts: Sequence[int], num_blocks: int) -> Sequence[FetchedBlocks]:
        """Copy runs of paged-out blocks back into newly drawn slots: `num_blocks` from each of `firsts` on.
        Copies nothing if there are not enough slots for all runs."""

    def close_scope(self, num_tokens: int) -> None:
        """Blocks after the first `num_tokens` tokens are computed over a part of the context. They get keys
        that no other request computes, and are forgotten when the table ends."""

    def keep_closed(self, name: bytes, first: int, end: int) -> None:
        """Keep blocks [first, end) of the closed scope in host memory after the table ends: the caller
        records their keys. An earlier table may have kept some of them. They are forgotten together with the
        block before them, or with key `name`, the last block's key in the open scope."""

    def retract(self, num_tokens: int, fence: Fence | None) -> Lease | None:
        """End the table. Save the KV of its first `num_tokens` tokens to a colder tier, if there is one."""

    def release(self, fence: Fence | None) -> None:
        """End the table. `fence` covers the last use of its slots and travels with them."""


class FetchedBlocks(Protocol):
    """A run of a table's paged-out blocks, copied back into extra device slots. The copy may be in flight. It
    ends with its table or before."""

    @property
    def slots(self) -> NDArray[np.int32]: ...

    @property
    def settled(self) -> bool:
        """The copy has landed or failed; no transfer uses the slots."""

    @property
    def failed(self) -> bool: ...

    def end(self, fence: Fence | None) -> None:
        """Give back its slots. Only after the copy is over. `fence` lies behind all launched steps."""


class Match(NamedTuple):
    """The longest usable prefix of a request's keys."""

    num_blocks: int  # leading blocks that are on the device, as far as they are needed
    num_idle: int  # by how many slots `num_available` falls when a table holds these
    # a running request is computing the first missing key, or it is being promoted
    pending: bool
    num_colder: int = 0  # blocks after these that are worth promoting from colder tiers
    # Blocks in host memory, which stay there. Only for a deep request: its match is all device or all host.
    num_paged: int = 0
    num_gone: int = 0  # leading blocks that are not needed; a table begins after them
    # with recurrent layers: leading blocks that are on the device, and in any tier, of use or not
    num_here: int = 0
    num_known: int = 0

    @property
    def num_held(self) -> int:
        """Slots of a table that begins with it, before anything is loaded."""
        return self.num_blocks - self.num_gone


class Want(Protocol):
    """Marks device blocks that a request in line will use; they are evicted last."""

    rank: float  # of wanted blocks, the greatest rank is evicted first

    @property
    def num_blocks(self) -> int: ...

    def end(self) -> None:
        """Idempotent."""


class StateSearch(Protocol):
    """What cold tiers have of the states of one waiting request's prompt."""

    @property
    def ready(self) -> bool:
        """They have answered, or took too long. Never blocks."""

    def reads_first(self, key: bytes | None, num_known: int) -> bool:
        """Whether the request waits: the state of the boundary with this key (None: it begins with none) is
        being read into host memory, or an earlier one is asked for, since cached blocks end after `num_known`
        of them."""


class StateLedger(Protocol):
    """The scheduler's interface to states that are kept at block boundaries, by the keys of the blocks before
    them. Slots are touched by steps only."""

    def pin(self, owner: str, key: bytes) -> SlotHandle | None:
        """Protect the state of this boundary until the handle ends. None: there is none."""

    def search(self, keys: Sequence[bytes]) -> StateSearch | None:
        """Ask cold tiers for the last boundary of `keys` that has a state. None: there are none."""

    def expect(self, key: bytes, depth: int, change: int) -> None:
        """So many more running requests will keep a state of this boundary, after `depth` blocks: others may
        wait for it."""

    def try_reserve(self, owner: str, key: bytes | None) -> SlotHandle | None:
        """A slot for a state of this boundary; None: its key is not known yet. Returns None if there is one
        already, or no room."""

    def publish(
        self, handle: SlotHandle, key: bytes, depth: int, fence: Fence | None, is_shared: bool = True
    ) -> None:
        """The step that wrote the slot is over; `fence` follows it. Ends the handle. From now on the state is
        found. Not `is_shared`: the key is of a closed scope, and no cold tier gets the state."""


class SlotHandle(Protocol):
    """Slots that are out. Ends exactly once."""

    @property
    def slots(self) -> Sequence[int]: ...

    def end(self, fence: Fence | None = None) -> None:
        """`fence` follows the last use."""


class KvLedger(Protocol):
    """The scheduler's interface to KV storage. For the engine thread; never blocks."""

    @property
    def block_tokens(self) -> int: ...

    @property
    def num_blocks(self) -> int:
        """Total slots for requests."""

    @property
    def states(self) -> StateLedger | None:
        """None: the model has no recurrent layers, or none of their states are kept."""

    @property
    def keeps_all(self) -> bool:
        """Whether a request needs every block before its next token. If not, its table lets go of leading
        ones."""

    def most_slots(self, num_tokens: int, step_tokens: int) -> int:
        """Slots that a request has at one time until it has `num_tokens` tokens, in steps of at most
        `step_tokens`."""

    @property
    def num_leaving(self) -> int:
        """Slots that tables let go of while a transfer uses them: promised, but not available before it
        ends."""

    @property
    def num_pageable(self) -> int:
        """Blocks that all deep requests together may have in host memory."""

    @property
    def num_available(self) -> int:
        """Slots that can be drawn now: free or evictable. If tables let go of blocks, less the slots that
        sharing saves: those who share a block part later."""

    @property
    def num_free(self) -> int:
        """Slots that can be drawn now without an eviction."""

    @property
    def num_settling(self) -> int:
        """Slots that will be free soon: only a transfer holds them."""

    def match(
        self,
        keys: Sequence[bytes],
        lease: Lease | None = None,
        want: Want | None = None,
        most_resident: int | None = None,
    ) -> Match:
        """The longest run of leading `keys` on the device, and the blocks of `lease` worth promoting after
        it. With a `want` for the same keys, only changes since it was made are looked up. `most_resident`:
        the request is deep and has at most that many blocks on the device. It matches its leading blocks in
        host memory, or on the device if that has more of them."""

    def want(self, keys: Sequence[bytes], rank: float, earlier: Want | None = None) -> Want | None:
        """Mark the device blocks of the leading `keys` as wanted: they are evicted after all unwanted ones.
        Replaces `earlier`. None: this device keeps no blocks for later requests."""

    def start_s(self, num_tokens: int, match: Match) -> float | None:
        """Estimated time to first token of a prompt of `num_tokens` on an idle engine: loading the colder
        blocks, computing the rest. None: nothing was measured."""

    def make_room(self, num_blocks: int, floor: int, num_more: int = 0) -> bool:
        """Whether `num_blocks` slots can be drawn without losing blocks that only the device has. If not,
        such blocks are now being demoted, and up to `num_more` further ones that no request wants; `floor`
        slots stay available meanwhile."""

    def free_up(self, num_blocks: int) -> None:
        """Make up to `num_blocks` slots free by evicting blocks that colder tiers have. Evicts nothing
        else."""

    def is_pending(self, keys: Sequence[bytes], want: Want | None = None) -> bool:
        """`match(...).pending`, but cheaper: every plan asks it for every request that waits for another
        request's blocks."""

    def lease(
        self, owner: str, prefix: Prefix, earlier: Lease | None = None, whole: bool = False
    ) -> Lease | None:
        """Find and want the blocks of `prefix` in colder tiers, after those on the device, or all of them if
        `whole`. None: there are none. The answers of a remote store to an `earlier`, ended lease of the same
        request are reused. Callable from any thread."""

    @property
    def may_prefetch(self) -> bool:
        """Whether `prefetch` would look: False while prefetches are at their limit. Costs nothing."""

    def prefetch(
        self,
        prefix: Prefix,
        owner: str,
        lease: Lease | None = None,
        whole: bool = False,
        is_next: bool = False,
    ) -> Prefetch | None:
        """Read blocks of `prefix` from cold tiers into host memory, for a request that waits under `lease`:
        those after the blocks on the device, or all of them if `whole`. None: there is nothing to read. A
        prefetch ends by itself. If the request `is_next`, the limit on prefetches does not apply, and blocks
        that other requests want may be evicted for it, as for a load."""

    def extend_prefix(self, prefix: Prefix, tokens: Sequence[int]) -> Prefix:
        """The same scope, with the keys of all full blocks of `tokens`."""

    def open(
        self,
        owner: str,
        prefix: Prefix | None,
        num_blocks: int,
        num_paged: int | None = None,
        num_gone: int = 0,
    ) -> Table | None:
        """A table that starts with the first `num_blocks` cached blocks of `prefix`, without the first
        `num_gone`. Announces its other keys as pending. `num_paged`: the table is deep, so its first blocks
        may be paged out. It starts with that many blocks in host memory, if it starts with none on the
        device; None if some were evicted meanwhile."""

    def forget_closed(self, keys: Sequence[bytes]) -> None:
        """Forget these blocks, which tables kept of a closed scope: their keys are no longer recorded."""
