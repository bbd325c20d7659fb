"""The blocks of code in the documents: what they are, which are run, and how a page's are run in their order.
Owns what the comments before a fence mean:

<!-- not run: REASON -->       one of REASONS, or `run by` and the test that does
<!-- prints: TEXT -->          what a command of the block prints
<!-- answers: 429 -->          the status of its curl, if that is not 2xx
<!-- fails: TEXT -->           it ends with an error and prints this
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.servers import Valkey

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 600.0  # only so that a hang ends; nothing here is about speed
REASONS = frozenset(
    {
        "needs a GPU",
        "needs root",
        "needs a network",
        "needs your own files",  # a model, an adapter, a trace
        "needs another program",  # a client: `make clients` runs its example
        "takes minutes",
        "runs the tests",
    }
)
MARK = re.compile(r"<!-- ([a-z ]+): (.+?) -->\n")
FENCE = re.compile(
    r"(?P<marks>(?:<!-- [a-z ]+: .+? -->\n)*)^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
URL = re.compile(r"127\.0\.0\.1:(8000|9000)\b")
FOLDERS = re.compile(r"/var/(?:cache|lib)/penstock")
STORE = "valkey://kv.internal:6379"
TYPED = "What is the capital of France?\n/quit\n"


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Continued lines joined; comments left out; of `eval "$(...)"` what it evaluates."""
        text = re.sub(r'^eval "\$\((.*)\)"$', r"\1", self.text.replace("\\\n", " "), flags=re.MULTILINE)
        lines = (line.strip() for line in text.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page: str, text: str) -> list[Block]:
    found = []
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start("language")) + 1
        found.append(Block(page, line, fence["language"], fence["text"], dict(MARK.findall(fence["marks"]))))
    return found


def documents() -> dict[str, str]:
    """Every page that somebody wrote, by its path from the root."""
    patterns = ("*.md", "docs/**/*.md", "stores/*/README.md", "heads/*.md")
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def penstock_arguments(command: str) -> list[str] | None:
    """What the command gives to penstock; None: it is another command."""
    words = shlex.split(re.split(r" [<>|] ", command)[0], comments=True)
    if words[:2] in (["make", "serve"], ["make", "chat"], ["make", "demo"], ["make", "bench"]):
        given = [word.removeprefix("ARGS=") for word in words[2:]]
        return [words[1], *shlex.split(" ".join(given))]
    while words and "=" in words[0]:
        words = words[1:]
    if words[:1] and Path(words[0]).name == "penstock":
        return words[1:]
    return words[3:] if words[:3] == ["python3", "-m", "penstock"] else None


def is_known(command: str) -> bool:
    """Whether there is a way to run it."""
    if penstock_arguments(command) is not None:
        return True
    words = [word for word in shlex.split(command, comments=True) if "=" not in word.partition("/")[0]]
    return bool(words) and words[0] in ("curl", ".venv/bin/python")


# ------------------------------------------------------------------------------------------------- one page


class Page:
    """The blocks of one page, run in their order in a folder that looks like the repository. One server is up
    at a time: that of the last command that started one, or the default one from the first question on."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._server = ExitStack()
        self._url = ""
        for path in ROOT.iterdir():
            if path.name not in (".git", "build", "dist", "site"):
                (folder / path.name).symlink_to(path)
        (folder / "prompt.txt").write_text("Once upon a time")
        outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS")  # of `make docs-check`
        self._environment = {
            **{name: value for name, value in os.environ.items() if name not in outer},
            "PATH": f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
        }
        stack.callback(lambda: self._server.close())

    def run(self, block: Block) -> None:
        if block.language == "python":
            printed = self._done([sys.executable, "-c", self._here(block.text)])
        else:
            printed = "".join(self._command(command, block) for command in block.commands)
        expected = block.marks.get("prints", "")
        assert expected in printed, f"{block.where} does not print {expected!r}:\n{printed}"

    def _command(self, command: str, block: Block) -> str:
        if (said := block.marks.get("fails")) is not None:
            printed = self._done(["bash", "-c", self._here(command)], fails=True)
            assert said in printed, f"{block.where} does not say {said!r}:\n{printed}"
            return printed
        arguments = penstock_arguments(command)
        if arguments is not None and arguments[:1] == ["serve"]:
            return self._serve(command)
        if arguments is not None and arguments[:1] == ["chat"]:
            return self._done(["bash", "-c", self._here(command)], TYPED)
        if command.startswith("curl ") and " | " not in command:
            return self._ask(self._here(command), block.marks.get("answers", "2"))
        return self._done(["bash", "-o", "pipefail", "-c", self._here(command)])

    def _here(self, text: str) -> str:
        """The text with the addresses and folders of this run. Starts the default server if it asks one."""
        if URL.search(text) and not self._url:
            self._serve(".venv/bin/penstock serve")
        text = FOLDERS.sub(lambda found: str(self._folder / found[0].replace("/", "_")), text)
        if STORE in text:
            store = self._stack.enter_context(Valkey())
            text = text.replace(STORE, store.url())
        text = re.sub(r"(--kv-offload-host-gib) \d+(?![.\d])", r"\1 1", text)
        return URL.sub(self._url.removeprefix("http://"), text)

    def _serve(self, command: str) -> str:
        self._server.close()
        self._server, self._url = ExitStack(), "http://nowhere"
        command = re.sub(r" --port \d+", "", self._here(command.partition(" #")[0].strip()))
        if command.startswith("make"):
            command = command if "ARGS=" in command else f"{command} ARGS=''"
            command = re.sub(r"ARGS='(?:--port \d+ ?)?", "ARGS='--port 0 ", command)
        else:
            command += " --port 0"
        self._url = self._server.enter_context(started(shlex.split(command), self._folder, self._environment))
        return self._url

    def _ask(self, command: str, status: str) -> str:
        if shutil.which("curl") is None:
            body, code = as_curl(shlex.split(command))
        else:
            printed = self._done(["bash", "-c", f"{command} -w '\\n%{{http_code}}'"])
            body, _, code = printed.rpartition("\n")
        assert code.startswith(status), f"{command} was answered {code}:\n{body}"
        return body

    def _done(self, words: list[str], typed: str = "", fails: bool = False) -> str:
        done = subprocess.run(
            words,
            cwd=self._folder,
            env=self._environment,
            input=typed,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        printed = done.stdout + done.stderr
        assert (done.returncode != 0) is fails, (
            f"{shlex.join(words)} ended with {done.returncode}:\n{printed}"
        )
        assert printed.strip(), f"{shlex.join(words)} printed nothing"
        return printed


def as_curl(words: list[str]) -> tuple[str, str]:
    """Body and status of what curl would ask, where there is none. Other options than these raise."""
    asked = argparse.ArgumentParser(exit_on_error=False)
    asked.add_argument("-s", action="store_true")
    asked.add_argument("-X")
    asked.add_argument("-H", action="append", default=[])
    asked.add_argument("-d")
    asked.add_argument("url")
    options = asked.parse_args(words[1:])
    headers = dict(header.split(": ", 1) for header in options.H)
    body = None if options.d is None else options.d.encode()
    request = urllib.request.Request(options.url, body, headers, method=options.X)
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as reply:
            return reply.read().decode(), str(reply.status)
    except urllib.error.HTTPError as refused:
        return refused.read().decode(), str(refused.code)


@contextmanager
def started(words: list[str], folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """The address of a server that was started by these words; it is ended as Ctrl-C does."""
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    rest: list[str] = []
    # what it logs must not fill the pipe
    reader = threading.Thread(target=lambda: rest.extend(process.stdout or ()), daemon=True)
    try:
        with _killed_after_a_while(process):
            ready = _ready_url(process, words)
        reader.start()
        yield ready
    finally:
        with _killed_after_a_while(process):
            os.killpg(process.pid, signal.SIGINT)
            process.wait()
            if reader.ident is not None:
                reader.join()
    assert "Traceback" not in "".join(rest), "".join(rest)


@contextmanager
def _killed_after_a_while(process: subprocess.Popen[str]) -> Iterator[None]:
    watchdog = threading.Timer(HANG_S, lambda: os.killpg(process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def _ready_url(process: subprocess.Popen[str], words: list[str]) -> str:
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"is ready on (http://\S+)", line):
            return found[1]
    raise AssertionError(f"{shlex.join(words)} ended before it was ready:\n" + "".join(said))
