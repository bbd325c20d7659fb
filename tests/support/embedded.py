"""The embedded model's real tokenizer without its weights. Owns nothing; for tests that need real text and no
forward pass."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from penstock.models.embedded import embedded_file
from penstock.models.gguf_file import GgufFile
from penstock.models.hashed_file import WeightFile
from penstock.models.llama import SMOLLM2_135M
from penstock.models.tokenizer import Tokenizer
from penstock.models.tokenizer_files import load_tokenizer, tokenizer_files


@functools.cache
def embedded_tokenizer() -> Tokenizer:
    """SmolLM2's tokenizer, from the metadata of its GGUF file; made once per process."""
    path = embedded_file()
    with tempfile.TemporaryDirectory() as folder, WeightFile(path) as file:
        for name, data in tokenizer_files(GgufFile(file).metadata, str(path)).items():
            (Path(folder) / name).write_bytes(data)
        return load_tokenizer(Path(folder), SMOLLM2_135M)
