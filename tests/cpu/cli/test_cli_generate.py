"""`generate`: text on stdout, figures on stderr and in a file, and a clean end however it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers

from penstock.testing.tiny_models import TINY_LLAMA, tiny_tensors, write_tiny_model

# what the machine with the GPU does not have
ABSENT = ("gguf", "msgspec", "starlette", "uvicorn", "transformers", "httpx")


def test_text_goes_to_stdout_and_figures_to_stderr_and_into_the_file(penstock, tiny, tmp_path):
    file = tmp_path / "figures.json"
    ran = penstock("generate", "hello", *tiny, "--max-tokens", "8", "--json", str(file))
    assert ran.code == 0
    figures = json.loads(file.read_text())
    assert ran.out == figures["text"] + "\n"
    assert "8 tokens" in ran.err and "first after" in ran.err
    assert (figures["generated_tokens"], figures["finish"], figures["model"]) == (8, "length", "tiny-llama")
    assert figures["kv_source"] == {
        "device": 0,
        "host": 0,
        "ssd": 0,
        "remote": 0,
        "computed": figures["prompt_tokens"],
    }
    assert 0 < figures["first_token_s"] <= figures["total_s"]
    assert figures["config"]["source"]["load_format"] == "dummy"


def test_the_chat_template_is_used_unless_raw_is_asked_for(penstock, tiny, tmp_path):
    file = tmp_path / "figures.json"
    lengths = []
    for raw in ((), ("--raw",)):
        assert penstock("generate", "hello", *tiny, "--max-tokens", "1", "--json", str(file), *raw).code == 0
        lengths.append(json.loads(file.read_text())["prompt_tokens"])
    assert lengths == [len("user: hello\nassistant: "), len("hello")]


def test_an_answer_in_a_chat_begins_a_text_and_a_raw_one_goes_on_with_its_prompt(penstock, tmp_path):
    """A real model whose every token is the first one: its last norm leaves nothing of what it computed."""
    names = ["▁the", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocabulary = tokenizers.Tokenizer(
        models.BPE(vocab={name: id for id, name in enumerate(names)}, merges=[], byte_fallback=True)
    )
    vocabulary.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    vocabulary.decoder = decoders.Sequence(steps)
    tensors = tiny_tensors(TINY_LLAMA)
    directory = write_tiny_model(
        tmp_path / "model", tensors={**tensors, "model.norm.weight": torch.zeros(TINY_LLAMA.hidden)}
    )
    vocabulary.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    given = (
        "--model",
        str(directory),
        "--device",
        "cpu",
        "--device-kv-blocks",
        "64",
        "--temperature",
        "0",
        "--max-tokens",
        "3",
    )
    assert penstock("generate", "hello", *given).out == "the the the\n"
    assert penstock("generate", "hello", *given, "--raw").out == " the the the\n"


@pytest.mark.parametrize(
    "argv",
    [
        ("generate", "x", "--max-tokens", "2"),
        ("bench", "decode", "--batch", "1", "--prompt-tokens", "4", "--tokens", "4", "--repeat", "1"),
    ],
    ids=["generate", "bench"],
)
def test_a_store_that_is_down_costs_no_answer_and_its_password_is_nowhere(
    penstock, tiny, tmp_path, caplog, argv
):
    caplog.set_level("DEBUG")
    report = tmp_path / "report.json"
    ran = penstock(
        *argv, *tiny, "--kv-offload-remote", "valkey://me:pa55word@127.0.0.1:1/0", "--json", str(report)
    )
    assert ran.code == 0, ran.err
    assert json.loads(report.read_text())["config"]["offload"]["remote"] == "valkey://127.0.0.1:1"
    assert "pa55" not in ran.out + ran.err + caplog.text + report.read_text()


def test_a_dash_reads_the_prompt_from_stdin(penstock, tiny, monkeypatch):
    given = penstock("generate", "one two", *tiny, "--max-tokens", "6")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one two"))
    assert penstock("generate", "-", *tiny, "--max-tokens", "6").out == given.out


def test_a_stop_string_ends_the_text_before_it(penstock, tiny, tmp_path):
    whole = penstock("generate", "hello", *tiny, "--max-tokens", "24", "--ignore-eos").out
    stop = whole[10:14]
    file = tmp_path / "figures.json"
    ran = penstock("generate", "hello", *tiny, "--max-tokens", "24", "--stop", stop, "--json", str(file))
    assert ran.out == whole[: whole.index(stop)] + "\n"
    assert json.loads(file.read_text())["finish"] == "stop"


def test_a_seed_decides_what_is_sampled(penstock, tiny):
    def sampled(seed: str) -> str:
        return penstock(
            "generate", "hello", *tiny, "--max-tokens", "12", "--temperature", "1.5", "--seed", seed
        ).out

    assert sampled("1") == sampled("1")
    assert sampled("1") != sampled("2")


def test_a_default_length_yields_to_the_context_but_a_given_one_is_refused(penstock, tiny, tmp_path):
    file = tmp_path / "figures.json"
    room = ("--max-model-len", "32", "--raw")
    assert penstock("generate", "twelve bytes", *tiny, *room, "--json", str(file)).code == 0
    assert json.loads(file.read_text())["generated_tokens"] == 20
    ran = penstock("generate", "twelve bytes", *tiny, *room, "--max-tokens", "21")
    assert ran.code == 2 and "context length is 32" in ran.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("generate", ""), "PROMPT is empty"),
        (
            ("generate", "x" * 5000, "--model", "tiny-llama", "--load-format", "dummy"),
            "maximum context length",
        ),
        (("generate", "x", "--model", "/no/such/model"), "/no/such/model"),
        (
            (
                "generate",
                "x",
                "--model",
                "tiny-llama",
                "--load-format",
                "dummy",
                "--kv-offload-host-gib",
                "1e6",
            ),
            "lower --kv-offload-host-gib",
        ),
        (
            (
                "generate",
                "x",
                "--model",
                "tiny-llama",
                "--load-format",
                "dummy",
                "--kv-offload-host-gib",
                "1e-7",
            ),
            "holds no KV block",
        ),
        (("generate", "x", "--model", "qwen3-4b"), "--load-format dummy"),
        (("generate", "\udcff", "--model", "tiny-llama", "--load-format", "dummy"), "Unicode"),
    ],
)
def test_what_cannot_be_generated_is_refused_in_one_line(penstock, argv, said):
    ran = penstock(*argv, "--device", "cpu", "--device-kv-gib", "0.01")
    assert ran.code == 2
    assert said in ran.err and ran.err.count("\n") == 1


def test_generate_and_bench_run_where_the_optional_packages_are_missing():
    script = f"""
import sys
for name in {ABSENT!r}: sys.modules[name] = None
from penstock.cli import main
tiny = ["--model", "tiny-qwen3", "--load-format", "dummy", "--device-kv-blocks", "64", "--device", "cpu"]
codes = [main(["generate", "x", "--max-tokens", "2", *tiny])]
codes.append(main(["bench", "decode", "--batch", "2", "--prompt-tokens", "8", "--tokens", "8", *tiny]))
codes.append(main(["bench", "ttft", "--tokens", "32", "--repeat", "1", *tiny]))
assert codes == [0, 0, 0], codes
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


def _interruptible() -> None:
    """A test run in the background is started with the interrupt ignored, and its children would inherit
    that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_interrupt_ends_it_with_130_and_without_a_traceback(tiny):
    argv = [
        sys.executable,
        "-m",
        "penstock",
        "generate",
        "hello",
        *tiny,
        "--max-tokens",
        "1800",
        "--ignore-eos",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        argv, **pipes, env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=_interruptible
    ) as running:
        assert running.stdout.read(1)  # it writes, so it is under way
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=120)
    assert running.returncode == 130
    assert err == b"penstock: interrupted\n"


def test_a_reader_that_leaves_ends_it_quietly(tiny):
    argv = [
        sys.executable,
        "-m",
        "penstock",
        "generate",
        "hello",
        *tiny,
        "--max-tokens",
        "1800",
        "--ignore-eos",
    ]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as running:
        assert running.stdout.read(1)
        running.stdout.close()
        err = running.stderr.read()
        running.wait(timeout=120)
    assert running.returncode == 1
    assert err == b""


def test_a_model_without_a_draft_head_says_how_to_get_one(penstock, monkeypatch):
    command = ("generate", "x", "--model", "tiny-llama", "--load-format", "dummy", "--speculate", "mtp")
    other = penstock(*command)
    assert (
        other.code == 2
        and ("there is no head for this model; train one (docs/speculation.md, Train a head)") in other.err
    )
    monkeypatch.setattr("penstock.speculation.mtp.installed_heads", list)
    none = penstock(*command)
    assert (
        none.code == 2
        and ("none is installed: run `pip install ./heads`") in none.err
        and none.err.strip().count("\n") <= 1
    )
