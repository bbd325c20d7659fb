"""guidellm: a short benchmark of streamed chats."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, URL, check

folder = Path(tempfile.mkdtemp())
(folder / "prompts.jsonl").write_text(
    '{"prompt": "What is the capital of France?", "output_tokens_count": 16}\n' * 3
)
with check("stream"):
    command = [
        str(Path(sys.executable).parent / "guidellm"),
        "run",
        "--profile",
        "kind=synchronous",
        "--disable-console-interactive",
    ]
    command += [
        "--backend",
        f"kind=openai_http,target={URL},model={MODEL}",
        "--constraint",
        "kind=max_requests,count=3",
    ]
    command += [
        "--data",
        f"kind=json_file,path={folder}/prompts.jsonl",
        "--output",
        f"kind=json,path={folder}/made.json",
    ]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stdout[-600:] + made.stderr[-600:]
    (benchmark,) = json.loads((folder / "made.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 3 and not totals["errored"], totals
