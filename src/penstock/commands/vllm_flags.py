"""vLLM's flags, and what there is for them here. Owns the table, which docs/coming-from-vllm.md shows."""

from __future__ import annotations

# Names without dashes before them; what there is here, as the page says it. Flags that are the same here are
# not listed.
FLAGS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("max-num-seqs",), "`--max-batch`"),
    (("max-num-batched-tokens",), "`--prefill-chunk` (prompt tokens of a step)"),
    (
        ("enable-chunked-prefill", "long-prefill-token-threshold"),
        "always on; `--prefill-chunk`, `--prefill-chunk-ms`",
    ),
    (
        ("gpu-memory-utilization", "kv-cache-memory-bytes"),
        "`--device-kv-gib`: GiB for KV; unset it is 90 % of what weights leave free",
    ),
    (("num-gpu-blocks-override",), "`--device-kv-blocks`"),
    (("block-size",), "`--block-tokens`"),
    (("enable-prefix-caching", "no-enable-prefix-caching"), "on; `--no-prefix-cache` turns it off"),
    (
        ("kv-offloading-size", "swap-space", "cpu-offload-gb"),
        "`--kv-offload-host-gib`: GiB of host memory for KV; for weights there is none",
    ),
    (("kv-transfer-config", "kv-offloading-backend"), "`--kv-offload-ssd-dir`, `--kv-offload-remote`"),
    (("enable-lora", "lora-modules"), "`--lora NAME=PATH`, `--lora-dir`"),
    (("allowed-origins",), "`--cors-origin`"),
    (("api-server-count",), "`--api-processes`"),
    (("scheduling-policy",), "`--scheduling`"),
    (("speculative-config",), "`--speculate`, `--speculate-tokens`"),
    (("enable-auto-tool-choice",), "always on; `--tool-call-parser` names the format"),
    (("enable-reasoning",), "always on; `--reasoning-parser` names the format"),
    (
        ("uvicorn-log-level", "disable-log-requests", "enable-log-requests", "disable-log-stats"),
        "`--log-level`",
    ),
    (("enforce-eager", "compilation-config"), "`--no-capture` for the first; nothing is compiled"),
    (("tokenizer", "hf-config-path"), "none: tokenizer and config are read from the model's own files"),
    (("chat-template",), "none: the template of the model is used"),
    (("trust-remote-code",), "none: no code of a model is executed"),
    (
        ("tensor-parallel-size", "tp", "pipeline-parallel-size", "pp", "data-parallel-size", "dp"),
        "none: one device",
    ),
    (("quantization", "q"), "none: GGUF files are read as they are; `--weights` chooses the form on a CPU"),
    (("kv-cache-dtype",), "none: KV has the type of `--dtype`"),
)


def ours(flag: str) -> str | None:
    """What to take instead of `flag`, as plain text. None: it is none of vLLM's."""
    name = flag.lstrip("-").replace("_", "-")
    return next((text.replace("`", "") for names, text in FLAGS if name in names), None)


def table() -> str:
    """As the page has it."""
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {text} |" for names, text in FLAGS]
    return "\n".join(["| vLLM | here |", "|---|---|", *rows])
