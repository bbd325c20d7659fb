"""`--lora` on the command line: one adapter answers where one model does, a server takes several, and
everything else is refused."""

from __future__ import annotations

import io
import json
import sys

import pytest

from penstock import cli
from penstock.config import LoraConfig
from penstock.flags import config_of
from penstock.testing.tiny_models import TINY_LLAMA
from tests.support.adapters import write_random_adapter

BAD = [
    (("generate", "x", "--lora", "nopath"), "as in name=path"),
    (("generate", "x", "--lora", "name="), "names no directory"),
    (("generate", "x", "--lora", "=path"), "--lora"),
    (("generate", "x", "--lora", "a b=path"), "a name has letters"),
    (("generate", "x", "--lora", "a=p", "--lora", "b=q"), "one adapter, and 2 are given: a, b"),
    (("chat", "--lora", "a=p", "--lora", "b=q"), "one adapter, and 2 are given: a, b"),
    (("serve", "--lora", "a=p", "--lora", "a=q"), "--lora a= is given more than once"),
    (("serve", "--lora-dir", ""), "--lora-dir is empty"),
    (("generate", "x", "--lora-dir", "/tmp"), "--lora-dir"),
    (("bench", "ttft", "--lora", "a=p"), "--lora"),
    (("doctor", "--lora", "a=p"), "--lora"),
]


@pytest.mark.parametrize(("argv", "said"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_a_wrong_use_is_refused_before_anything_is_loaded(penstock, argv, said):
    ran = penstock(*argv)
    assert ran.code == 2 and ran.out == ""
    assert ran.err.count("\n") == 1 and said in ran.err


def test_adapters_and_their_directory_reach_the_config():
    argv = ["serve", "--lora", "a=one", "--lora", "org/b=two=2", "--lora-dir", "all"]
    assert config_of(cli.make_parser().parse_args(argv)).lora == LoraConfig(
        (("a", "one"), ("org/b", "two=2")), "all"
    )
    assert config_of(cli.make_parser().parse_args(["bench", "ttft"])).lora == LoraConfig()


def test_generate_answers_with_the_adapter_that_it_is_given(penstock, tiny, tmp_path):
    adapter, file = write_random_adapter(tmp_path / "adapter", TINY_LLAMA, seed=1), tmp_path / "figures.json"
    plain = penstock("generate", "hello", *tiny, "--max-tokens", "8")
    tuned = penstock(
        "generate", "hello", *tiny, "--max-tokens", "8", "--lora", f"tuned={adapter}", "--json", str(file)
    )
    assert tuned.code == 0 and tuned.out != plain.out
    figures = json.loads(file.read_text())
    assert figures["model"] == "tuned" and figures["config"]["lora"]["adapters"] == [["tuned", str(adapter)]]
    assert (
        penstock("generate", "hello", *tiny, "--max-tokens", "8", "--lora", f"tuned={adapter}").out
        == tuned.out
    )


def test_chat_answers_with_the_adapter_that_it_is_given(penstock, tiny, tmp_path, monkeypatch):
    adapter = write_random_adapter(tmp_path / "adapter", TINY_LLAMA, seed=1)
    answers = []
    for extra in ((), ("--lora", f"tuned={adapter}")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        answers.append(penstock("chat", *tiny, "--temperature", "0", "--max-tokens", "8", *extra).out)
    assert answers[0] != answers[1]


def test_an_adapter_that_cannot_be_loaded_is_one_line(penstock, tiny, tmp_path):
    ran = penstock("generate", "hello", *tiny, "--lora", f"tuned={tmp_path / 'nowhere'}")
    assert ran.code == 2
    assert "--lora tuned=" in ran.err and "is no directory" in ran.err
    ran = penstock(
        "generate",
        "hello",
        *tiny,
        "--lora",
        f"tiny-llama={write_random_adapter(tmp_path / 'a', TINY_LLAMA, 1)}",
    )
    assert ran.code == 2 and "the name of the model itself" in ran.err
