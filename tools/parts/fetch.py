"""Fetches programs that tests start, from the machine's own package archive, into `.parts/` of this project.
Owns the list of such programs and their unpacking; installs nothing, needs no root, and starts nothing.

python3 tools/parts/fetch.py PART      prints the folder in which PART is unpacked, or says on stderr why it
cannot be had

apt is asked with lists, a cache and sources of its own. The sources are taken from this machine's: those of
its release, and for what is newer than the release the backports of the same archive. Two runs at once wait
for each other.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".parts"
SOURCES = Path("/etc/apt")

# What to ask the archive for, best first: packages, and whether backports may have them. Libraries they need
# come along.
PARTS: dict[str, list[tuple[list[str], bool]]] = {
    "valkey": [(["valkey-server"], False), (["valkey-server"], True), (["redis-server"], False)],
    # libraries that the package from PyPI is linked with
    "mooncake": [(["libibverbs1", "libnl-3-200", "libnl-route-3-200"], False)],
    "chromium": [(["chromium", "fonts-dejavu-core", "fontconfig-config"], False)],
}
APT_S = 180  # for one call of apt; an archive that cannot be reached gives up earlier


class Unavailable(Exception):
    """The part cannot be had here; the message says why."""


def fetch(part: str) -> Path:
    """The folder with the unpacked packages of `part`."""
    folder = CACHE / part
    with locked(CACHE / f"{part}.lock"):
        if not folder.is_dir():
            fresh = CACHE / f"{part}.new"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            state = CACHE / f"{part}.apt"
            unpack(download(part, state), fresh)
            fresh.rename(folder)
            shutil.rmtree(state, ignore_errors=True)
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def download(part: str, state: Path) -> Path:
    """A folder with the packages of the first alternative that the archive has."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise Unavailable(
            "apt-get and dpkg-deb are not here: install the program in your system's way, so that it is on "
            "PATH"
        )
    reason = ""
    for packages, backports in PARTS[part]:
        shutil.rmtree(state / "archives", ignore_errors=True)
        reason = reason_against(packages, state, backports)
        if not reason:
            return state / "archives"
    raise Unavailable(reason)


def reason_against(packages: list[str], state: Path, backports: bool) -> str:
    """Downloads `packages` and what they need and this machine has not. Empty: that went well."""
    for name in ("lists/partial", "archives/partial", "sources"):
        (state / name).mkdir(parents=True, exist_ok=True)
    if not write_sources(state / "sources", backports):
        return "the sources of this machine's apt name no archive of its release"
    updated, complaints = run_apt(state, ["update"])  # an archive that cannot be reached is no error to it
    if updated:
        done, more = run_apt(
            state, ["install", "--yes", "--no-install-recommends", "--download-only", *packages]
        )
        return "" if done else more + complaints
    return complaints


def run_apt(state: Path, arguments: list[str]) -> tuple[bool, str]:
    """Whether it went well, and what it had to say against it."""
    settings = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": state / "sources",
        "Dir::State::lists": state / "lists",
        "Dir::Cache::archives": state / "archives",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Debug::NoLocking": "1",  # the state is ours alone, and so is the lock around it
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Acquire::http::Timeout": "20",
        "Acquire::https::Timeout": "20",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    command = ["apt-get", "-q", *options, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=APT_S,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"apt-get {arguments[0]} took longer than {APT_S} s. "
    complaints = [line for line in done.stderr.splitlines() if line.startswith(("E:", "W: Failed"))]
    return done.returncode == 0, (
        f"apt-get {arguments[0]}: {' '.join(complaints[:2])}. "
    ) if complaints or done.returncode else ""


def unpack(packages: Path, folder: Path) -> None:
    for package in sorted(packages.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True, capture_output=True)


# -------------------------------------------------------------------------------------- the machine's sources


def write_sources(folder: Path, backports: bool) -> bool:
    """The machine's sources of its own release, in both of apt's notations. False: there are none."""
    release = codename()
    lines = [
        line for path in one_line_files() for line in one_line_sources(path.read_text(), release, backports)
    ]
    stanzas = [
        text
        for path in sorted((SOURCES / "sources.list.d").glob("*.sources"))
        for text in stanza_sources(path.read_text(), release, backports)
    ]
    (folder / "machine.list").write_text("\n".join([*lines, ""]))
    (folder / "machine.sources").write_text("\n\n".join([*stanzas, ""]))
    return bool(lines or stanzas)


def codename() -> str:
    text = Path("/etc/os-release").read_text() if Path("/etc/os-release").exists() else ""
    found = re.search(r'^VERSION_CODENAME="?([a-z]+)', text, flags=re.MULTILINE)
    return found.group(1) if found else ""


def one_line_files() -> list[Path]:
    return [
        path
        for path in (SOURCES / "sources.list", *sorted((SOURCES / "sources.list.d").glob("*.list")))
        if path.is_file()
    ]


def one_line_sources(text: str, release: str, backports: bool) -> Iterator[str]:
    """`deb [options] address suite components`."""
    for line in text.splitlines():
        found = re.match(r"(deb\s+(?:\[[^]]*\]\s+)?\S+\s+)(\S+)(\s.*)$", line.strip())
        if found and release and found.group(2).startswith(release):
            yield line.strip()
            if backports and found.group(2) == release:
                yield f"{found.group(1)}{release}-backports{found.group(3)}"


def stanza_sources(text: str, release: str, backports: bool) -> Iterator[str]:
    """Paragraphs of fields; the one with the release itself gets its backports on top."""
    for stanza in re.split(r"\n\s*\n", text):
        fields = "\n".join(line for line in stanza.splitlines() if line.strip() and not line.startswith("#"))
        found = re.search(r"^Suites:(.*)$", fields, flags=re.MULTILINE)
        suites = (
            [suite for suite in found.group(1).split() if release and suite.startswith(release)]
            if found
            else []
        )
        if backports and release in suites and f"{release}-backports" not in suites:
            suites.append(f"{release}-backports")
        if suites:
            yield re.sub(r"^Suites:.*$", "Suites: " + " ".join(suites), fields, flags=re.MULTILINE)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0] not in PARTS:
        print(f"usage: fetch.py PART, one of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    try:
        print(fetch(arguments[0]))
    except (Unavailable, OSError, subprocess.CalledProcessError) as error:
        print(f"{arguments[0]} cannot be had: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
