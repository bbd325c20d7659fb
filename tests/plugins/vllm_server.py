"""A vLLM server on this machine's CPU with a tiny model of random weights. Owns its processes, its port and
its shared memory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx

from penstock.testing.tiny_models import TINY_LLAMA, write_tiny_model
from tests.plugins.environments import VLLM, python_of
from tests.support.servers import LOOPBACK, free_port

INSIDE = Path(__file__).parent / "inside"
START_S = 600.0
ANSWER_S = 120.0
BLOCK_TOKENS = 32
# A prompt has 12 full blocks. The device holds three prompts and host memory five.
DEVICE_BLOCKS = 40
HOST_BYTES = 2 << 20
MODEL = dataclasses.replace(
    TINY_LLAMA, hidden=128, num_heads=2, num_kv_heads=1, head_dim=64, ffn=128, max_position=4096
)


def write_model(folder: Path, seed: int = 0) -> Path:
    write_tiny_model(folder, MODEL, seed=seed)
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class VllmServer:
    """`tier` are the options of Penstock's tier. `wait_ready` before the first request."""

    def __init__(
        self, model: Path, folder: Path, tier: dict[str, Any], environment: dict[str, str] | None = None
    ) -> None:
        self.model = model
        self.port = free_port()
        self._engine_id = f"penstock-{uuid.uuid4().hex}"
        self._log = folder / f"vllm-{self.port}.log"
        self._client = httpx.Client(base_url=f"http://{LOOPBACK}:{self.port}", timeout=ANSWER_S)
        extra = {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "penstock_test_host",
            "cpu_bytes_to_use": HOST_BYTES,
            "secondary_tiers": [{"type": "TimedTier", "module_path": "penstock_test_host", **tier}],
        }
        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": self._engine_id,
            "kv_connector_extra_config": extra,
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                # the console script of this wheel looks for a package of another name
                [python_of(VLLM), "-m", "vllm.entrypoints.openai.api_server", *self._arguments(connector)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**_environment(), **(environment or {})},
                cwd=folder,
                start_new_session=True,
            )

    def _arguments(self, connector: dict[str, Any]) -> list[str]:
        options = {
            "model": self.model,
            "served-model-name": "tiny",
            "host": LOOPBACK,
            "port": self.port,
            "dtype": "float32",
            "block-size": BLOCK_TOKENS,
            "num-gpu-blocks-override": DEVICE_BLOCKS,
            "max-model-len": 768,
            "max-num-batched-tokens": 512,
            "max-num-seqs": 4,
            "shutdown-timeout": 60,  # at 0 vLLM kills its engine
            "kv-transfer-config": json.dumps(connector),
        }
        return ["--enforce-eager", *(f"--{name}={value}" for name, value in options.items())]

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> None:
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/health").status_code == 200:
                    return
            assert self._process.poll() is None, f"vLLM ended:\n{self.log[-4000:]}"
            assert time.monotonic() < until, f"vLLM did not start:\n{self.log[-4000:]}"
            time.sleep(0.2)

    def wait_ended(self) -> str:
        """What it said before it ended by itself."""
        self._process.wait(START_S)
        return self.log

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of a greedy answer."""
        body = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self._client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    def metric(self, name: str, **labels: str) -> float:
        """The sum of its series with these labels; vLLM's names begin with `vllm:`."""
        text = self._client.get("/metrics").text
        found = 0.0
        for words, value in re.findall(rf"^vllm:{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE):
            if all(f'{label}="{wanted}"' in words for label, wanted in labels.items()):
                found += float(value)
        return found

    def stop(self) -> None:
        """As an operator does; the engine ends in order."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(START_S)
        self.close()

    def kill(self) -> None:
        """All of its processes at once, with -9."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(START_S)

    def close(self) -> None:
        """Idempotent."""
        self.kill()
        self._client.close()
        for left in Path("/dev/shm").glob(f"vllm_offload_{self._engine_id}*"):
            left.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _environment() -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    return {
        **mine,
        "PYTHONPATH": str(INSIDE),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
