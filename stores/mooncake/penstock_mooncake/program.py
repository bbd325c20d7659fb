"""The program in which Mooncake's library runs, for one engine: takes calls from sockets, answers with the
library's codes. Owns the library's client and nothing else; what codes mean is the engine's business. Values
lie in memory that both processes have.

It is a process of its own because the library cannot be trusted with the engine's: it keeps the interpreter's
lock while it connects and disconnects, for a minute and more where the master does not answer; its calls
outlast any deadline, and its transfers may touch a buffer after the call that named it has failed; it ends
the process when it finds itself broken. A process can be killed, and touches nothing then.

Arguments are descriptors: the memory, the socket for the settings, and one socket for each concurrent call.
One line of JSON is one message: settings, or `[what, names, offsets]`; each has one answer, `[codes, why]`,
where `why` is empty unless there was an error beside the codes. It ends when the engine closes the first
socket, or ends.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

LIBRARY = "mooncake.store"
# A call waits by spinning. On few cores it must yield to the threads it waits for, and to the engine's.
SPINNING_NICE = 10
LIBRARY_ENDS_S = 3  # to disconnect from the master; then the process ends anyway


class Program:
    """The client and the shared memory."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._value_bytes = 0
        self._client: Any = None

    def connect(self, settings: dict[str, Any]) -> str:
        """The error; empty: connected."""
        self._value_bytes = settings["value_bytes"]
        try:
            self._client = importlib.import_module(LIBRARY).MooncakeDistributedStore()
            code = self._client.setup(*settings["setup"]) or self._client.register_buffer(
                self._address, len(self._memory)
            )
            return f"the master does not take it in, or memory cannot be registered ({code})" if code else ""
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def serve(self, link: socket.socket) -> None:
        """One call after the other, until the engine closes the socket."""
        os.nice(SPINNING_NICE)  # of this thread alone
        for line in link.makefile("rb"):
            try:
                answer = [self._codes(*json.loads(line)), ""]
            except Exception as error:
                answer = [[], f"{type(error).__name__}: {error}"]
            send(link, answer)

    def close(self) -> None:
        signal.alarm(LIBRARY_ENDS_S)  # kills, even while the library keeps the interpreter's lock
        self._client.close()

    def _codes(self, what: str, names: list[str], offsets: Sequence[int]) -> list[int]:
        addresses = [self._address + offset for offset in offsets]
        sizes = [self._value_bytes] * len(offsets)
        match what:
            case "exist":
                return list(self._client.batch_is_exist(names))
            case "read":
                return list(self._client.batch_get_into(names, addresses, sizes))
            case "write":
                return list(self._client.batch_put_from(names, addresses, sizes))
            case "size":
                return [self._client.get_size(name) for name in names]
            case "remove":
                # also values that were read a moment ago
                return list(self._client.batch_remove(names, True))
            case "clear":
                return [self._client.remove_by_regex(name, True) for name in names]
        raise ValueError(f"there is no {what}")


def send(link: socket.socket, message: object) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def main(arguments: Sequence[str]) -> None:
    descriptor, first, *others = map(int, arguments)
    program = Program(mmap.mmap(descriptor, 0))
    link = socket.socket(fileno=first)
    lines = link.makefile("rb")
    why = program.connect(json.loads(lines.readline()))
    if not why:
        for other in others:
            threading.Thread(target=program.serve, args=(socket.socket(fileno=other),), daemon=True).start()
    send(link, [[], why])
    if not why:
        lines.read()  # until the engine closes it
        program.close()
    os._exit(0)  # calls in flight, and anything the library left behind, end here


if __name__ == "__main__":
    main(sys.argv[1:])
