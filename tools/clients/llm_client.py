"""Simon Willison's `llm`, by its command and a model of extra-openai-models.yaml."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import KEY, MODEL, PARAMETERS, QUESTION, V1, check, fits, said

folder = Path(tempfile.mkdtemp())
entry = (
    f"- model_id: penstock\n  model_name: {MODEL}\n  api_base: {V1}\n  api_key_name: penstock\n"
    "  supports_schema: true\n  supports_tools: true\n"
)
(folder / "extra-openai-models.yaml").write_text(entry)
(folder / "keys.json").write_text(json.dumps({"penstock": KEY}))


def llm(*words: str) -> str:
    command = [
        str(Path(sys.executable).parent / "llm"),
        "-m",
        "penstock",
        "-o",
        "max_tokens",
        "48",
        "-o",
        "temperature",
        "0",
        *words,
    ]
    made = subprocess.run(
        command, env={**os.environ, "LLM_USER_PATH": str(folder)}, capture_output=True, text=True, timeout=120
    )
    assert made.returncode == 0, made.stderr[-500:]
    return made.stdout


with check("chat"):
    said(llm(QUESTION, "--no-stream"))
with check("stream"):
    said(llm(QUESTION))
with check("json_schema"):
    fits(llm(QUESTION, "--schema", json.dumps(PARAMETERS), "--no-stream"))
with check("tools offered"):
    try:
        said(
            llm(
                "Say hello.",
                "--functions",
                "def weather(city: str) -> str:\n    'weather'\n    return '21'",
                "--no-stream",
            )
        )
    except AssertionError as error:  # a model this small may call for ever
        if "Chain limit" not in str(error):
            raise
