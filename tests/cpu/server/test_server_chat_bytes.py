"""Scores of tokens that are parts of a character: their text cannot be shown, their bytes can."""

from __future__ import annotations

from tests.cpu.server.served import MODEL, serving
from tests.support.scripted_engine import ScriptedEngine

TEXT = "é東🙂"


def test_the_bytes_of_all_tokens_are_those_of_the_text() -> None:
    """A client puts characters together from them."""
    with serving(ScriptedEngine(script=lambda prompt, sampling: iter(TEXT.encode()))) as served:
        asked = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": len(TEXT.encode()),
            "logprobs": True,
        }
        choice = served.http.post("/v1/chat/completions", json=asked).json()["choices"][0]
    assert choice["message"]["content"] == TEXT
    entries = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in TEXT.encode()]
