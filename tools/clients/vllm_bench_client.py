"""vllm bench serve: the load generator of vLLM, with streamed completions and chats. Of the CPU build nothing
but that is used."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import MODEL, URL, check

NUM = 6
# The console script of the CPU build does not start, and packages that it brings for pictures and sound do
# not fit its torch.
RUN = """
import argparse, sys
for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[name] = None
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

folder = Path(tempfile.mkdtemp())
for name, backend, endpoint in [
    ("completions, streamed", "openai", "/v1/completions"),
    ("chats, streamed", "openai-chat", "/v1/chat/completions"),
]:
    with check(name):
        command = [
            sys.executable,
            "-c",
            RUN,
            "--backend",
            backend,
            "--base-url",
            URL,
            "--endpoint",
            endpoint,
            "--model",
            MODEL,
        ]
        command += [
            "--tokenizer",
            os.environ["PENSTOCK_TOKENIZER"],
            "--dataset-name",
            "random",
            "--random-input-len",
            "32",
        ]
        command += [
            "--random-output-len",
            "12",
            "--ignore-eos",
            "--num-prompts",
            str(NUM),
            "--max-concurrency",
            "2",
        ]
        command += ["--save-result", "--result-dir", str(folder), "--result-filename", f"{backend}.json"]
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        assert made.returncode == 0, made.stdout[-600:] + made.stderr[-600:]
        totals = json.loads((folder / f"{backend}.json").read_text())
        assert totals["completed"] == NUM and totals["total_output_tokens"] == 12 * NUM, totals
        assert totals["median_ttft_ms"] > 0 and totals["median_tpot_ms"] > 0, totals
