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
from tests.support.adapters import write_random_adapter

# what the machine with the GPU does not have
ABSENT = ("gguf", "msgspec", "starlette", "uvicorn", "transformers", "httpx")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def generate(penstock, tiny, tmp_path):
    """Its text, and what it wrote into its file."""

    def run(prompt: str, flags: str = "--max-tokens 8") -> tuple[str, dict]:
        file = tmp_path / "figures.json"
        ran = penstock("generate", prompt, *tiny, *flags.split(" "), "--json", str(file))
        assert ran.code == 0, ran.err
        return ran.out, {**json.loads(file.read_text()), "err": ran.err}

    return run


def test_text_goes_to_stdout_and_figures_to_stderr_and_into_the_file(generate):
    text, figures = generate("hello")
    assert text == figures["text"] + "\n"
    assert "8 tokens" in figures["err"] and "first after" in figures["err"]
    assert (figures["generated_tokens"], figures["finish"], figures["model"]) == (8, "length", "tiny-llama")
    computed = {"device": 0, "host": 0, "ssd": 0, "remote": 0, "computed": figures["prompt_tokens"]}
    assert figures["kv_source"] == computed
    assert 0 < figures["first_token_s"] <= figures["total_s"]
    assert figures["config"]["source"]["load_format"] == "dummy"


def test_the_chat_template_is_used_unless_raw_is_asked_for(generate):
    assert generate("hello")[1]["prompt_tokens"] == len("user: hello\nassistant: ")
    assert generate("hello", "--raw --max-tokens 1")[1]["prompt_tokens"] == len("hello")


def test_a_default_length_yields_to_any_room_that_is_left(generate):
    """What was asked for does not."""
    for room in (1, 8):
        length = len("user: hello\nassistant: ") + room
        assert generate("hello", f"--max-model-len {length}")[1]["generated_tokens"] == room


def test_an_answer_in_a_chat_begins_a_text_and_a_raw_one_goes_on_with_its_prompt(penstock, tmp_path):
    """A real model whose every token is the first one: its last norm leaves nothing of what it computed."""
    names = ["▁the", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocabulary = tokenizers.Tokenizer(
        models.BPE(vocab={name: id for id, name in enumerate(names)}, merges=[], byte_fallback=True)
    )
    vocabulary.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    vocabulary.decoder = decoders.Sequence(steps)
    tensors = {**tiny_tensors(TINY_LLAMA), "model.norm.weight": torch.zeros(TINY_LLAMA.hidden)}
    directory = write_tiny_model(tmp_path / "model", tensors=tensors)
    vocabulary.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    given = f"generate hello --model {directory} --device cpu --device-kv-blocks 64 --max-tokens 3"
    assert penstock(given).out == "the the the\n"
    assert penstock(f"{given} --raw").out == " the the the\n"


@pytest.mark.parametrize("command", ["generate x", "bench decode --batch 1 --prompt-tokens 4 --repeat 1"])
def test_a_store_that_is_down_costs_no_answer_and_its_password_is_nowhere(
    penstock, tiny, tmp_path, caplog, command
):
    caplog.set_level("DEBUG")
    report = tmp_path / "report.json"
    length = "--tokens 4" if "bench" in command else "--max-tokens 2"
    store = ("--kv-offload-remote", "valkey://me:pa55word@127.0.0.1:1/0")
    ran = penstock(f"{command} {length}", *tiny, *store, "--json", str(report))
    assert ran.code == 0, ran.err
    assert json.loads(report.read_text())["config"]["offload"]["remote"] == "valkey://127.0.0.1:1"
    assert "pa55" not in ran.out + ran.err + caplog.text + report.read_text()


def test_a_dash_reads_the_prompt_from_stdin(generate, monkeypatch):
    given = generate("one two")[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one two"))
    assert generate("-")[0] == given


def test_a_default_length_yields_to_the_context_but_a_given_one_is_refused(generate, penstock, tiny):
    for room in (1, 20, 255):
        length = len("twelve bytes") + room
        assert generate("twelve bytes", f"--max-model-len {length} --raw")[1]["generated_tokens"] == room
    assert generate("twelve bytes", "--max-model-len 269 --raw")[1]["generated_tokens"] == 256
    ran = penstock(
        "generate", "twelve bytes", *tiny, *["--raw", "--max-model-len", "32", "--max-tokens", "21"]
    )
    assert ran.code == 2 and "context length is 32" in ran.err


def test_an_adapter_answers_if_one_is_given(generate, penstock, tiny, tmp_path):
    adapter = write_random_adapter(tmp_path / "adapter", TINY_LLAMA, seed=1)
    plain, (tuned, figures) = generate("hello"), generate("hello", f"--max-tokens 8 --lora tuned={adapter}")
    assert tuned != plain[0] and figures["model"] == "tuned"
    assert figures["config"]["lora"]["adapters"] == [["tuned", str(adapter)]]
    assert generate("hello", f"--max-tokens 8 --lora tuned={adapter}")[0] == tuned
    for named, said in (
        ("tuned=/no/where", "is no directory"),
        (f"tiny-llama={adapter}", "the model itself"),
    ):
        ran = penstock("generate x", *tiny, "--lora", named)
        assert ran.code == 2 and f"--lora {named.partition('=')[0]}=" in ran.err and said in ran.err


DUMMY = ("--model", "tiny-llama", "--load-format", "dummy")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("",), "PROMPT is empty"),
        (("x" * 5000, *DUMMY), "maximum context length"),
        (("x", "--model", "/no/such/model"), "/no/such/model"),
        (("x", *DUMMY, "--kv-offload-host-gib", "1e6"), "lower --kv-offload-host-gib"),
        (("x", *DUMMY, "--kv-offload-host-gib", "1e-7"), "holds no KV block"),
        (("x", "--model", "qwen3-4b"), "--load-format dummy"),
        (("x", *DUMMY, "--speculate", "eagle:/no/head"), "/no/head/config.json cannot be read"),
        (("\udcff", *DUMMY), "Unicode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_generated_is_refused_in_one_line(penstock, argv, said):
    ran = penstock("generate", *argv, "--device", "cpu", "--device-kv-gib", "0.01")
    assert ran.code == 2 and said in ran.err and ran.err.count("\n") == 1


def test_a_model_without_a_draft_head_says_how_to_get_one(penstock, monkeypatch):
    other = penstock("generate x --speculate mtp", *DUMMY)
    train = "there is no head for this model; train one (docs/speculation.md, Train a head)"
    assert other.code == 2 and train in other.err
    monkeypatch.setattr("penstock.speculation.mtp.installed_heads", list)
    none = penstock("generate x --speculate mtp", *DUMMY)
    assert none.code == 2 and "none is installed: run `pip install ./heads`" in none.err
    assert none.err.count("\n") == 1


# -------------------------------------------------------------------------------------------------- processes


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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("end", "code", "said"), [("interrupt", 130, b"penstock: interrupted\n"), ("reader", 1, b"")]
)
def test_an_interrupt_or_a_reader_that_leaves_ends_it_without_a_traceback(tiny, end, code, said):
    argv = (
        sys.executable,
        "-m",
        "penstock",
        "generate",
        "hello",
        *tiny,
        "--max-tokens",
        "1800",
        "--ignore-eos",
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # a test run in the background is started with the interrupt ignored, and its children inherit that
    handled = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    with subprocess.Popen(argv, **pipes, env=ENVIRONMENT, **handled) as running:
        assert running.stdout.read(1)  # it writes, so it is under way
        if end == "interrupt":
            running.send_signal(signal.SIGINT)
        else:
            running.stdout.close()
        err = running.stderr.read()
        running.wait(timeout=120)
    assert (running.returncode, err) == (code, said)
