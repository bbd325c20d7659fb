"""The program of a process that tries out grammars. It forks a child for each grammar, which compiles it
within limits.

It imports nothing of Penstock's, so that it starts fast and stays small. `trials.py` starts it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from typing import Any

MESSAGE = struct.Struct("<cQ")  # TRY with a socket, or KILL; the number of the trial
TRY, KILL, DONE, READY = b"t", b"k", b"+", b"!"


class _TrialTokens:
    """The tokenizer interface of llguidance. Forced text is not tokenized here."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: list[int]) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos[0]

    def __call__(self, _: bytes) -> list[int]:
        return []


def _compile(control: socket.socket, asked: socket.socket, tokenizer: Any, settings: dict[str, Any]) -> None:
    control.close()
    os.nice(settings["nice"])
    with contextlib.suppress(OSError):  # no /proc
        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + settings["bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (settings["cpu_s"], settings["cpu_s"] + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source = b""
    while more := asked.recv(1 << 16):
        source += more
    import llguidance

    limits = llguidance.LLParserLimits(**settings["limits"], verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, source.decode(), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    asked.sendall(DONE)


def main(control: socket.socket) -> None:
    """Serve until the other end of `control` is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends with the engine
        signal.signal(number, signal.SIG_IGN)
    import llguidance

    tokens, special, eos, settings = pickle.load(sys.stdin.buffer)
    vocabulary = _TrialTokens(tokens, special, eos)
    wrapped = llguidance.TokenizerWrapper(vocabulary)
    tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=len(tokens), eos_token=eos)
    control.sendall(READY)
    children: dict[int, int] = {}  # by trial number; a process keeps its id until it is waited for
    while True:
        message, fds, _, _ = socket.recv_fds(control, MESSAGE.size, 1)
        if len(message) < MESSAGE.size:
            break
        for trial, pid in list(children.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del children[trial]
        kind, trial = MESSAGE.unpack(message)
        if kind == KILL and trial in children:
            os.kill(children[trial], signal.SIGKILL)
            os.waitpid(children.pop(trial), 0)
        elif kind == TRY:
            with socket.socket(fileno=fds[0]) as asked:
                if (pid := os.fork()) == 0:
                    try:
                        _compile(control, asked, tokenizer, settings)
                    finally:
                        os._exit(0)
                children[trial] = pid
    for pid in children.values():
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
