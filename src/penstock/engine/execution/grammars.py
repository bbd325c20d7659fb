"""Grammars of structured output, compiled. Owns the vocabulary as llguidance sees it, the threads that compile and what they have compiled.

The package is an extra: without it nothing here fails before somebody asks for a grammar.
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
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from penstock.contract import Grammar
from penstock.engine.execution.closed_schema import closed
from penstock.errors import InvalidRequest, Overloaded
from penstock.models.tokenizer import TextCodec

COMPILE_S = 5.0  # for one grammar; a schema that people write takes milliseconds
_NUM_THREADS = 2
_MOST_COMPILING = 32  # in line for a thread
_KEPT = 64  # compiled grammars that are kept though no request has them
# Of work, not of time. One unit of fuel is some 20 nanoseconds when a grammar is compiled, and 70 when a mask is computed.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
}
_PARAM = "structured_outputs"
_BLANKS = r"[\x20\x0A]{1,24}"  # between two words of JSON: a weak model would go on with blanks for ever


class Matcher:
    """Where in its grammar one answer is. Used by one thread at a time."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab

    def copy(self) -> Matcher:
        return Matcher(self._matcher.deep_copy(), self._vocab)

    def consume(self, tokens: Sequence[int]) -> None:
        """What goes wrong shows in `error`."""
        if tokens and not self._matcher.is_error():
            self._matcher.consume_tokens(list(tokens))

    @property
    def is_over(self) -> bool:
        """No token can follow, but for the end."""
        return bool(self._matcher.is_stopped())

    @property
    def is_accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def error(self) -> str | None:
        return str(self._matcher.get_error()).split("\n<state>")[0] if self._matcher.is_error() else None

    @staticmethod
    def fill(matchers: Sequence[tuple[Matcher, int]], words: NDArray[np.int32]) -> None:
        """A bit for each token that may come next, of each matcher in its row of `words`. All of them in one call, since it gives up the
        interpreter, and to get it back may take longer than a mask."""
        if matchers:
            _pool().unsafe_compute_mask_ptr([(one._matcher, row) for one, row in matchers], words.ctypes.data, words[0].nbytes, len(words))
            vocab = matchers[0][0]._vocab
            words.view(np.uint8)[[row for _, row in matchers], vocab // 8] &= 0xFF ^ (1 << vocab % 8)  # an end that the model does not have


@functools.cache
def _pool() -> Any:
    """The library's threads that compute masks of one step side by side."""
    return importlib.import_module("llguidance").LLExecutor(max(1, min(8, (os.cpu_count() or 2) // 2)))


class Grammars:
    """Compiles for one vocabulary; from any thread. A compiled grammar is a matcher at its start: whoever uses it takes a copy, and it is
    found again for as long as somebody holds it."""

    def __init__(self, tokenizer: TextCodec, vocab: int, eos_ids: Sequence[int]) -> None:
        self.token_bytes = tokenizer.token_bytes
        self.num_words = -(-(vocab + 1) // 32)  # of a mask; the last bit is an end that models without one do not have
        self._vocabulary = _Vocabulary(tokenizer, vocab, eos_ids)
        self._lock = threading.Lock()
        self._compiled: WeakValueDictionary[Grammar, Matcher] = WeakValueDictionary()
        self._recent: deque[Matcher] = deque(maxlen=_KEPT)
        self._compiling: dict[Grammar, Future[Matcher]] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "grammar")

    def begin(self, grammar: Grammar) -> Future[Matcher]:
        """Have it compiled, or find it. InvalidRequest in the future: it cannot be met, or is too large. Never blocks for long."""
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                done: Future[Matcher] = Future()
                done.set_result(known)
                return done
            if (future := self._compiling.get(grammar)) is None:
                if len(self._compiling) >= _MOST_COMPILING:
                    raise Overloaded(f"{_MOST_COMPILING} schemas and grammars are being compiled already")
                future = self._compiling[grammar] = self._threads.submit(self._compile, grammar)
            return future

    def wait_compiled(self, grammar: Grammar, timeout_s: float = COMPILE_S) -> Matcher:
        """Block until it is compiled; what takes longer goes on, and is refused."""
        future = self.begin(grammar)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            raise self.late(future, timeout_s) from None

    @staticmethod
    def late(future: Future[Matcher], timeout_s: float = COMPILE_S) -> Exception:
        """Whose fault it is that it is not compiled by now."""
        if not future.running():
            return Overloaded("other schemas and grammars are being compiled; this one was not begun in time")
        return InvalidRequest(f"the schema or grammar is too complex: it was not compiled within {timeout_s:g} s", _PARAM)

    def close(self) -> None:
        """Waits for what is under way, whose work is bounded. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> Matcher:
        try:
            made = self._vocabulary.matcher(grammar)
            words = np.zeros((1, self.num_words), np.int32)
            if made.error is None:
                Matcher.fill([(made, 0)], words)  # the first mask of all is the dearest: it is paid for here
            if made.error is not None or not (words.any() or made.is_accepting):
                raise InvalidRequest(f"the {_NAMES[grammar.kind]} cannot be met: {made.error or 'no token can begin it'}", _PARAM)
            with self._lock:
                self._compiled[grammar] = made
                self._recent.append(made)
            return made
        finally:
            with self._lock:
                del self._compiling[grammar]


class _Vocabulary:
    """The tokens as bytes. Made when the first grammar comes: it takes some tenths of a second, and memory."""

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
        self._longest = 1
        self._ids: dict[bytes, int] = {}

    def matcher(self, grammar: Grammar) -> Matcher:
        try:
            library: Any = importlib.import_module("llguidance")
        except ImportError:
            raise InvalidRequest("structured output needs the package llguidance, which this server does not have", _PARAM) from None
        seen = self._seen_by(library)
        limits = library.LLParserLimits(**_LIMITS, verbose_errors=False)
        try:
            source = _source(library.LLMatcher, grammar)
        except ValueError as error:
            raise InvalidRequest(f"the {_NAMES[grammar.kind]} cannot be read: {error}", _PARAM) from None
        return Matcher(library.LLMatcher(seen, source, log_level=0, limits=limits), self._vocab)

    def _seen_by(self, library: Any) -> Any:
        with self._lock:
            if self._seen is None:
                tokenizer = self._tokenizer
                special = {id for id in range(self._vocab) if tokenizer.is_special(id)} | set(self._eos_ids)
                self.tokens = [tokenizer.token_bytes(id) or b"" for id in range(self._vocab)] + [b"<end>"]
                for id in special:  # their text is not theirs: a special token is never text
                    self.tokens[id] = self.tokens[id] or f"<special {id}>".encode()
                self.special_token_ids = sorted(special | {self._vocab})
                self._ids = {text: id for id, text in enumerate(self.tokens) if text and id not in special and id < self._vocab}
                self._longest = max(map(len, self._ids), default=1)
                self._seen = library.LLTokenizer(library.TokenizerWrapper(self), n_vocab=self._vocab + 1, eos_token=self._eos_ids)
            return self._seen

    def __call__(self, data: bytes | str) -> list[int]:
        """How the model would write text that has to come: as its tokenizer does, or the longest tokens first where that is other text."""
        data = data.encode() if isinstance(data, str) else data
        try:
            ids = self._tokenizer.encode(data.decode(), add_special=False)
            if b"".join(map(self._tokenizer.token_bytes, ids)) == data and not any(map(self._tokenizer.is_special, ids)):
                return ids
        except ValueError:
            pass  # half a character
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            size = next((n for n in range(min(self._longest, len(data) - at), 0, -1) if data[at : at + n] in self._ids), None)
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


def _source(matcher: Any, grammar: Grammar) -> str:
    """As llguidance takes it."""
    if grammar.kind == "json_schema":
        return str(matcher.grammar_from_json_schema(closed(grammar.text), overrides={"whitespace_pattern": _BLANKS}))
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        return str(matcher.grammar_from_lark(grammar.text))
    if grammar.kind == "parts":
        rule, parts = json.loads(grammar.text)
        return json.dumps({"grammars": [{"name": "rule", "lark_grammar": rule}, *(_named(matcher, name, parts[name]) for name in parts)]})
    choices = json.loads(grammar.text)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise ValueError("it takes strings, one at least")
    # One word of the lexer: as alternatives of a rule, more than some thousand would compile, and fail with the first token.
    start = 'start: ""' if not any(choices) else "start: CHOICE" if all(choices) else "start: CHOICE?"
    word = "\nCHOICE: " + " | ".join(json.dumps(one) for one in choices if one)
    return str(matcher.grammar_from_lark(start + (word if any(choices) else "")))


def _named(matcher: Any, name: str, part: list[Any]) -> dict[str, Any]:
    """A grammar that others refer to as `@name`."""
    source = _source(matcher, Grammar(*part))
    made: dict[str, Any] = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
    return {**made, "name": name}
