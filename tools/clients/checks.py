"""What the scripts of clients share: where the server is, the tool and the schema that they ask for, and how
they say what came of it.

Owns no client. Runs in the clients' own environments, so it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

URL = os.environ["PENSTOCK_URL"]  # without /v1
V1 = f"{URL}/v1"
MODEL = os.environ["PENSTOCK_MODEL"]
KEY = "none"
QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Bern"]},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
DESCRIPTION = "The weather in a city"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": DESCRIPTION, "parameters": PARAMETERS},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "weather", "schema": PARAMETERS, "strict": True}}


@contextlib.contextmanager
def check(name: str) -> Iterator[None]:
    """One thing that was tried; an exception is what is wrong with it."""
    try:
        yield
        result = {"check": name, "ok": True}
    except Exception as error:
        traceback.print_exc()
        result = {"check": name, "ok": False, "why": f"{type(error).__name__}: {error}"[:300]}
    print("RESULT " + json.dumps(result), flush=True)


def fits(arguments: Any) -> None:
    """Arguments or an answer that the schema allows, as text or as an object."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert value["city"] in ("Paris", "Bern") and value["unit"] in ("C", "F"), value


def said(text: Any) -> None:
    assert isinstance(text, str) and text.strip(), f"no text: {text!r}"


def skip(name: str, why: str) -> None:
    print("RESULT " + json.dumps({"check": name, "ok": None, "why": why}), flush=True)


def done() -> None:
    sys.exit(0)
