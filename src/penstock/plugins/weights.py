"""The identity of a model's weights by the content of its files. Owns which files count; a name, a size or a
time is no identity."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.errors import ConfigError

log = logging.getLogger(__name__)

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".py", ".index.json")
_CONFIGS = ("config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
_PIECE_BYTES = 16 << 20
_MAX_THREADS = 16
_TOLD_BYTES = 1 << 30  # above this the log says that it takes a while


def weights_digest(path: Path) -> str:
    """Of a folder of weights, or of one file. Reads all of it. Raises ConfigError."""
    try:
        files = [path] if path.is_file() else sorted(filter(_counts, path.iterdir()))
        sizes = {file: file.stat().st_size for file in files}
        if not any(file.suffix not in (".json", ".py") for file in files):
            raise ConfigError(f"penstock finds no weights in {path}: give the option weights_id")
        if sum(sizes.values()) >= _TOLD_BYTES:
            log.info("penstock reads the weights in %s to identify them", path)
        state = hashlib.blake2b(digest_size=32, person=b"penstock-plugin")
        with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))), "weights") as pool:
            for file, size in sizes.items():
                name = b"" if file == path else file.name.encode()  # a file alone may be renamed
                state.update(len(name).to_bytes(8, "little") + name + size.to_bytes(8, "little"))
                for digest in pool.map(_piece_digest, *zip(*_pieces(file, size), strict=True)):
                    state.update(digest)
    except OSError as error:
        raise ConfigError(f"penstock cannot read the weights in {path}: {error.strerror or error}") from None
    return state.hexdigest()


def _counts(file: Path) -> bool:
    return file.is_file() and (file.name.endswith(_SUFFIXES) or file.name in _CONFIGS)


def _pieces(file: Path, size: int) -> Iterator[tuple[Path, int, int]]:
    for start in range(0, max(size, 1), _PIECE_BYTES):
        yield file, start, min(_PIECE_BYTES, size - start)


def _piece_digest(file: Path, start: int, num_bytes: int) -> bytes:
    with file.open("rb", buffering=0) as opened:
        data = os.pread(opened.fileno(), num_bytes, start)
    if len(data) != num_bytes:
        raise ConfigError(f"{file} was cut short while it was read")
    return hashlib.sha256(data).digest()
