"""Compiled grammars of structured output. Owns the vocabulary for llguidance, the compiling threads and the
compiled grammars.

The package llguidance is optional: without it, only requests with a grammar fail.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Grammar
from penstock.engine.execution.closed_schema import closed
from penstock.engine.execution.schema_limits import check_keywords, costliest
from penstock.engine.execution.trials import TRIAL_CPU_S, TRIAL_MIB, Trial, Trials
from penstock.errors import EngineClosed, InvalidRequest, Overloaded
from penstock.models.tokenizer import TextCodec

MOST_COMPILING = 16  # each has a thread that waits for its trial
_KEPT = 64  # compiled grammars kept without a request
# Limits of work, not of time. One unit of fuel is some 20 ns of compiling, or 70 ns of computing a mask.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
_FORCED_BYTES = 1024  # bytes of forced text that are tokenized for one mask
_PARAM = "structured_outputs"
_BLANKS = r"[\x20\x0A]{1,24}"  # between JSON tokens; bounded, since a weak model may write blanks without end


class Matcher:
    """The position of one answer in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: Any, vocab: int, ends: NDArray[np.int32]) -> None:
        """`ends`: the bits of a mask that end an answer."""
        self._matcher = matcher
        self._vocab = vocab
        self._ends = ends

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._vocab, self._ends)

    def consume(self, tokens: Sequence[int]) -> None:
        """Failures show in `error`."""
        if tokens and not self._matcher.is_error():
            self._matcher.consume_tokens(list(tokens))

    @property
    def is_over(self) -> bool:
        """No token but the end can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def is_accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def error(self) -> str | None:
        return str(self._matcher.get_error()).split("\n<state>")[0] if self._matcher.is_error() else None

    @staticmethod
    def fill(matchers: Sequence[tuple[Matcher, int]], words: NDArray[np.int32]) -> None:
        """Set a bit for each allowed next token, for each matcher in its row of `words`. One call for all,
        since it releases the GIL, and getting it back may take longer than a mask."""
        if matchers:
            _pool().unsafe_compute_mask_ptr(
                [(one._matcher, row) for one, row in matchers], words.ctypes.data, words[0].nbytes, len(words)
            )
            vocab = matchers[0][0]._vocab
            # the extra end token, which the model does not have
            words.view(np.uint8)[[row for _, row in matchers], vocab // 8] &= 0xFF ^ (1 << vocab % 8)

    def fill_drafted(self, row: int, drafts: Sequence[int], words: NDArray[np.int32]) -> int | None:
        """The same for the next token in `row`, and for the token after each of `drafts` in the rows behind
        it; after one that is not allowed, all are. Returns the number of drafts after which no token but the
        end can follow, if there is one. The position stays where it is."""
        rows = words[row : row + 1 + len(drafts)]
        rows[:] = -1
        _pool().unsafe_compute_mask_ptr_with_draft_token(
            [(self._matcher, row, list(drafts))], words.ctypes.data, words[0].nbytes, len(words)
        )
        rows.view(np.uint8)[:, self._vocab // 8] &= 0xFF ^ (1 << self._vocab % 8)
        is_over = ~(rows[1:] & ~self._ends).any(axis=1)
        return int(is_over.argmax()) + 1 if is_over.any() else None


@functools.cache
def _pool() -> Any:
    """The library's thread pool, which computes the masks of one step in parallel."""
    return importlib.import_module("llguidance").LLExecutor(max(1, min(8, (os.cpu_count() or 2) // 2)))


class _Compiling:
    """One grammar being compiled, and the futures that wait for it."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.waiting: list[Future[Matcher]] = []
        self.trial: Trial | None = None
        self.is_given_up = False

    def give_up(self) -> None:
        self.is_given_up = True
        if self.trial is not None:
            self.trial.kill()


class Grammars:
    """Compiles for one vocabulary; from any thread. A compiled grammar is a matcher at its start, to be
    copied for each use. It is found again as long as a caller holds it."""

    def __init__(self, tokenizer: TextCodec, vocab: int, eos_ids: Sequence[int]) -> None:
        self.token_bytes = tokenizer.token_bytes
        # words of a mask; the last bit is an extra end token, for models without one
        self.num_words = -(-(vocab + 1) // 32)
        self._vocabulary = _Vocabulary(tokenizer, vocab, eos_ids)
        self._lock = threading.Lock()
        self._compiled: WeakValueDictionary[Grammar, Matcher] = WeakValueDictionary()
        self._recent: deque[Matcher] = deque(maxlen=_KEPT)
        self._compiling: dict[Grammar, _Compiling] = {}
        self._num_compiling = 0  # including abandoned ones that still run
        self._threads = ThreadPoolExecutor(MOST_COMPILING, "grammar")

    def begin(self, grammar: Grammar) -> Future[Matcher]:
        """Compile it, or find it. InvalidRequest in the future: no answer can match it, or it is too large.
        Never blocks for long. Each caller gets a future of its own. Cancelling it stops the compilation,
        unless another caller waits for the same grammar."""
        future: Future[Matcher] = Future()
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                future.set_result(known)
                return future
            if (one := self._compiling.get(grammar)) is None:
                if self._num_compiling >= MOST_COMPILING:
                    raise Overloaded(f"{MOST_COMPILING} schemas and grammars are being compiled already")
                one = _Compiling(grammar)
                self._threads.submit(self._compile, one)
                self._compiling[grammar] = one
                self._num_compiling += 1
            one.waiting.append(future)
        future.add_done_callback(functools.partial(self._leave, one))
        return future

    def wait_compiled(self, grammar: Grammar) -> Matcher:
        """Block until it is compiled or refused: at most a trial and the same work again."""
        return self.begin(grammar).result()

    def close(self) -> None:
        """Abandons trials and waits for the rest, whose work is bounded. Idempotent."""
        with self._lock:
            under_way = list(self._compiling.values())
        for one in under_way:
            one.give_up()
        self._threads.shutdown(wait=True)
        self._vocabulary.close()

    def _leave(self, one: _Compiling, future: Future[Matcher]) -> None:
        if not future.cancelled():
            return
        with self._lock:
            one.waiting.remove(future)
            if one.waiting or self._compiling.get(one.grammar) is not one:
                return
            del self._compiling[one.grammar]  # the next request for it starts again
        one.give_up()

    def _compile(self, one: _Compiling) -> None:
        made, error = None, None
        try:
            made = self._compiled_one(one)
        except BaseException as failed:
            error = failed
        with self._lock:
            self._num_compiling -= 1
            if self._compiling.get(one.grammar) is one:
                del self._compiling[one.grammar]
            if made is not None:
                self._compiled[one.grammar] = made
                self._recent.append(made)
            waiting = list(one.waiting)
        for future in waiting:
            if future.set_running_or_notify_cancel():
                if made is not None:
                    future.set_result(made)
                else:
                    future.set_exception(error)

    def _compiled_one(self, one: _Compiling) -> Matcher:
        grammar = one.grammar
        source = self._vocabulary.source(grammar)
        one.trial = trial = self._vocabulary.begin_trial()
        if one.is_given_up:
            trial.kill()
        if not trial.wait_fits(source):
            if one.is_given_up:
                raise EngineClosed("the engine is closed")
            raise _too_complex(grammar)
        made = self._vocabulary.matcher(source)
        words = np.zeros((1, self.num_words), np.int32)
        if made.error is None:
            Matcher.fill([(made, 0)], words)  # the first mask is the most expensive: compute it here
        if made.error is not None or not (words.any() or made.is_accepting):
            raise InvalidRequest(
                f"the {_NAMES[grammar.kind]} cannot be met: {made.error or 'no token can begin it'}", _PARAM
            )
        return made


class _Vocabulary:
    """The tokens as bytes. Made for the first grammar: it takes some tenths of a second, and memory."""

    def __init__(self, tokenizer: TextCodec, vocab: int, eos_ids: Sequence[int]) -> None:
        self.eos_token_id = min(eos_ids, default=vocab)
        self.bos_token_id = None
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        self._eos_ids = sorted(eos_ids) or [vocab]
        self._vocab = vocab
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._seen: Any = None
        self._trials: Trials | None = None
        self._longest = 1
        self._ids: dict[bytes, int] = {}

    def source(self, grammar: Grammar) -> str:
        """The source in llguidance's format. InvalidRequest: it cannot be parsed, or a keyword exceeds its
        limit."""
        try:
            library: Any = importlib.import_module("llguidance")
        except ImportError:
            raise InvalidRequest(
                "structured output needs the package llguidance, which this server does not have", _PARAM
            ) from None
        try:
            return _source(library.LLMatcher, grammar)
        except ValueError as error:
            raise InvalidRequest(f"the {_NAMES[grammar.kind]} cannot be compiled: {error}", _PARAM) from None

    def matcher(self, source: str) -> Matcher:
        library: Any = importlib.import_module("llguidance")
        limits = library.LLParserLimits(**_LIMITS, verbose_errors=False)
        ends = np.zeros(-(-(self._vocab + 1) // 32), np.int32)
        for id in (*self._eos_ids, self._vocab):
            ends.view(np.uint32)[id // 32] |= np.uint32(1 << id % 32)
        made = library.LLMatcher(self._seen_by(library), source, log_level=0, limits=limits)
        return Matcher(made, self._vocab, ends)

    def begin_trial(self) -> Trial:
        """Start a trial in the process with this vocabulary, which is started if needed."""
        self._seen_by(importlib.import_module("llguidance"))
        with self._lock:
            if self._trials is not None and not self._trials.is_alive:
                self._trials.close()
                self._trials = None
            if self._trials is None:
                self._trials = Trials(self.tokens, self.special_token_ids, self._eos_ids, _LIMITS)
            return self._trials.begin()

    def close(self) -> None:
        with self._lock:
            if self._trials is not None:
                self._trials.close()

    def _seen_by(self, library: Any) -> Any:
        with self._lock:
            if self._seen is None:
                tokenizer = self._tokenizer
                special = {id for id in range(self._vocab) if tokenizer.is_special(id)} | set(self._eos_ids)
                self.tokens = [tokenizer.token_bytes(id) or b"" for id in range(self._vocab)] + [b"<end>"]
                for id in special:  # a placeholder: a special token is never text
                    self.tokens[id] = self.tokens[id] or f"<special {id}>".encode()
                self.special_token_ids = sorted(special | {self._vocab})
                self._ids = {
                    text: id
                    for id, text in enumerate(self.tokens)
                    if text and id not in special and id < self._vocab
                }
                self._longest = max(map(len, self._ids), default=1)
                self._seen = library.LLTokenizer(
                    library.TokenizerWrapper(self), n_vocab=self._vocab + 1, eos_token=self._eos_ids
                )
            return self._seen

    def __call__(self, data: bytes | str) -> list[int]:
        """Tokens for forced text: as the tokenizer encodes it, or longest tokens first if that does not give
        the same text. The beginning is enough: a mask uses only the first token, and this is called again for
        every mask."""
        data = data.encode() if isinstance(data, str) else data
        data = data if len(data) <= _FORCED_BYTES else data[:_FORCED_BYTES].decode(errors="ignore").encode()
        try:
            ids = self._tokenizer.encode(data.decode(), add_special=False)
            if b"".join(map(self._tokenizer.token_bytes, ids)) == data and not any(
                map(self._tokenizer.is_special, ids)
            ):
                return ids
        except ValueError:
            pass  # half a character
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            size = next(
                (
                    n
                    for n in range(min(self._longest, len(data) - at), 0, -1)
                    if data[at : at + n] in self._ids
                ),
                None,
            )
            if size is None:
                break  # no token spells it
            ids.append(self._ids[data[at : at + size]])
            at += size
        return ids


_NAMES = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "lark": "grammar",
    "parts": "schema of the answer or of a tool",
}


def _too_complex(grammar: Grammar) -> InvalidRequest:
    keyword = costliest(grammar.text) if grammar.kind == "json_schema" else None
    reason = "" if keyword is None else f"; most of the work is for {keyword}"
    message = (
        f"the {_NAMES[grammar.kind]} is too complex: it does not compile within {TRIAL_CPU_S} s and "
        f"{TRIAL_MIB} MiB{reason}"
    )
    return InvalidRequest(message, _PARAM)


def _source(matcher: Any, grammar: Grammar) -> str:
    """The source in llguidance's format."""
    if grammar.kind == "json_schema":
        check_keywords(grammar.text)
        return str(
            matcher.grammar_from_json_schema(closed(grammar.text), overrides={"whitespace_pattern": _BLANKS})
        )
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        return str(matcher.grammar_from_lark(grammar.text))
    if grammar.kind == "parts":
        rule, parts = json.loads(grammar.text)
        return json.dumps(
            {
                "grammars": [
                    {"name": "rule", "lark_grammar": rule},
                    *(_named(matcher, name, parts[name]) for name in parts),
                ]
            }
        )
    choices = json.loads(grammar.text)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise ValueError("it needs at least one string, and only strings")
    # One lexer terminal: as alternatives of a rule, more than some thousand would compile but fail at the
    # first token.
    start = 'start: ""' if not any(choices) else "start: CHOICE" if all(choices) else "start: CHOICE?"
    word = "\nCHOICE: " + " | ".join(json.dumps(one) for one in choices if one)
    return str(matcher.grammar_from_lark(start + (word if any(choices) else "")))


def _named(matcher: Any, name: str, part: list[Any]) -> dict[str, Any]:
    """A grammar that other grammars refer to as `@name`."""
    source = _source(matcher, Grammar(*part))
    made: dict[str, Any] = (
        json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
    )
    return {**made, "name": name}
