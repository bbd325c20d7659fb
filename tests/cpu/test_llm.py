"""The Python interface over a real engine with a tiny model: batches, chats, streams, asyncio, errors, and
the end of it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import LLM, SamplingParams
from penstock.errors import (
    ConfigError,
    ContextExceeded,
    EngineClosed,
    InvalidRequest,
    SnapshotMissing,
    SnapshotRefused,
)

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def tiny(**options: Any) -> LLM:
    return LLM("tiny-llama", load_format="dummy", device="cpu", show_progress=False, **options)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with tiny(device_kv_blocks=256, kv_offload=False, max_batch=4) as llm:
        yield llm


def is_empty(llm: LLM) -> bool:
    blocks = llm._engine.stats().kv_blocks["device"]
    return blocks["active"] == blocks["reserved"] == 0


def test_one_prompt_gives_one_answer_and_several_give_as_many_in_their_order(llm: LLM) -> None:
    prompts = ["hello", "a longer prompt", "x"]
    alone = [llm.generate(prompt, GREEDY) for prompt in prompts]
    together = llm.generate(prompts, GREEDY)
    assert [one.text for one in together] == [one.text for one in alone]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [(len(one.tokens), one.finish) for one in together] == [(8, "length")] * 3
    assert [one.prompt_tokens for one in alone] == [len(llm.encode(prompt)) for prompt in prompts]
    assert llm.generate([], GREEDY) == []


def test_token_ids_are_a_prompt(llm: LLM) -> None:
    ids = llm.encode("hello")
    assert llm.generate(ids, GREEDY).text == llm.generate("hello", GREEDY).text
    assert [one.text for one in llm.generate([ids, tuple(ids)], GREEDY)] == [
        llm.generate("hello", GREEDY).text
    ] * 2
    assert llm.decode(ids) == "hello"


def test_a_conversation_is_answered_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    one = llm.chat(messages, GREEDY)
    assert one.prompt_tokens == len(llm._engine.tokenizer.encode_chat(messages)) > len(llm.encode("hello"))
    assert [other.text for other in llm.chat([messages, messages], GREEDY)] == [one.text] * 2
    assert "".join(llm.stream_chat(messages, GREEDY)) == one.text


def test_more_prompts_than_the_engine_takes_at_once_are_all_answered(llm: LLM) -> None:
    most = llm._engine.parts.max_open
    some = llm.generate(
        [[1 + number % 90] for number in range(most + 40)],
        SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
    )
    assert len(some) == most + 40 and some[0].tokens == some[90].tokens
    assert is_empty(llm)


def test_a_stream_is_the_answer_in_pieces_and_ends_with_its_reader(llm: LLM) -> None:
    pieces = list(llm.stream("hello", GREEDY))
    assert "".join(pieces) == llm.generate("hello", GREEDY).text and len(pieces) > 1
    stream = llm.stream("hello", SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True))
    assert next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llm.generate("hello", GREEDY).text == "".join(pieces)
    assert is_empty(llm)


def test_logprobs_belong_to_the_tokens_also_before_a_stop_string(llm: LLM) -> None:
    whole = llm.generate("hello", SamplingParams(max_tokens=40, temperature=0.0, logprobs=2, ignore_eos=True))
    assert whole.logprobs is not None and [one.token for one in whole.logprobs] == whole.tokens
    stop = whole.text[5:8]
    cut = llm.generate(
        "hello", SamplingParams(max_tokens=40, temperature=0.0, logprobs=2, ignore_eos=True, stop=(stop,))
    )
    assert cut.finish == "stop" and cut.text == whole.text[: whole.text.index(stop)]
    assert cut.logprobs is not None and len(cut.logprobs) == len(cut.tokens) < 40
    assert llm.generate("hello", GREEDY).logprobs is None


def test_scores_of_the_prompt_come_with_the_answer(llm: LLM) -> None:
    ids = llm.encode("hello")
    answer = llm.generate("hello", SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2))
    first, *scores = answer.prompt_logprobs or ()
    assert first is None and [one.token for one in scores if one] == ids[1:]
    assert all(one is not None and len(one.top) == 2 for one in scores)
    assert llm.generate("hello", GREEDY).prompt_logprobs is None


def test_only_allowed_tokens_come_and_bad_words_never_do(llm: LLM) -> None:
    some = SamplingParams(max_tokens=12, temperature=0.0, allowed_token_ids=frozenset(b"abcd"))
    free = llm.generate("hello", some)
    assert set(free.text) <= set("abcd") and free.finish == "length"
    word = free.text[2:4]
    found = llm.generate("hello", dataclasses.replace(some, bad_words=(word,)))
    assert word in free.text and word not in found.text and len(found.text) == 12
    assert "".join(llm.stream("hello", dataclasses.replace(some, bad_words=(word,)))) == found.text


def test_the_last_tokens_of_a_prompt_are_kept(llm: LLM) -> None:
    ids, long = llm.encode("hello"), llm.encode("x" * (llm.max_model_len + 9))
    assert llm.generate(ids, GREEDY, truncate_prompt_tokens=3) == llm.generate(ids[-3:], GREEDY)
    assert llm.generate(ids, GREEDY, truncate_prompt_tokens=-1) == llm.generate(ids, GREEDY)
    assert llm.generate(long, GREEDY, truncate_prompt_tokens=-1).prompt_tokens == llm.max_model_len - 8
    say = [{"role": "user", "content": "x" * (llm.max_model_len + 9)}]
    assert llm.chat(say, GREEDY, truncate_prompt_tokens=20).prompt_tokens == 20
    for most in (0, -2):
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
            llm.generate(ids, GREEDY, truncate_prompt_tokens=most)


def test_without_parameters_an_answer_fits_the_context(llm: LLM) -> None:
    room = llm.max_model_len - 3
    assert 1 <= len(llm.generate([5] * room).tokens) <= 3
    for too_many in (0, 1):
        with pytest.raises(ContextExceeded):
            llm.generate([5] * (llm.max_model_len + too_many))


def test_asyncio_has_answers_and_streams(llm: LLM) -> None:
    async def ask() -> tuple[str, str, list[str]]:
        whole, chat = await asyncio.gather(
            llm.agenerate("hello", GREEDY), llm.achat([{"role": "user", "content": "hello"}], GREEDY)
        )
        return whole.text, chat.text, [piece async for piece in llm.astream("hello", GREEDY)]

    whole, chat, pieces = asyncio.run(ask())
    assert whole == "".join(pieces) == llm.generate("hello", GREEDY).text
    assert chat == llm.chat([{"role": "user", "content": "hello"}], GREEDY).text


def test_of_several_prompts_a_wrong_one_ends_all_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([[1, 2], [3], [10**6]], SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True))
    assert llm.generate("hello", GREEDY).finish == "length"
    assert is_empty(llm)


def test_an_adapter_that_is_not_loaded_is_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="no adapter 'french'; loaded are: none"):
        llm.generate("hello", GREEDY, adapter="french")


def test_options_are_checked_as_on_the_command_line() -> None:
    wrong = {"max_modellen": "did you mean --max-model-len", "max_model_len": "many", "max_batch": "0"}
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}.*{value}"):
            tiny(**{name: value})
    with pytest.raises(ConfigError, match="vLLM's; here: --device-kv-gib"):
        tiny(gpu_memory_utilization=0.9)


def test_after_its_end_nothing_is_answered_and_closing_again_is_nothing() -> None:
    llm = tiny(device_kv_blocks=64, no_prefix_cache=True)
    stream = llm.stream("hello", SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True))
    next(stream)
    llm.close()
    llm.close()
    assert len("".join(stream)) < 500, "a reader that is in the middle comes to an end"
    with pytest.raises(EngineClosed):
        llm.generate("hello", GREEDY)


def test_one_that_is_dropped_gives_back_what_it_has() -> None:
    """A notebook's cell that is run again makes another model in the same process."""
    llm = tiny(device_kv_blocks=64)
    llm.generate("One", SamplingParams(max_tokens=2))
    thread, engine = llm._loop._thread, weakref.ref(llm._engine)
    del llm
    thread.join(30.0)
    assert not thread.is_alive()
    del thread
    gc.collect()  # as the next model does
    assert engine() is None


def test_a_process_that_ends_in_the_middle_of_an_answer_ends_well() -> None:
    program = """
import atexit
from penstock import LLM, SamplingParams

atexit.register(lambda: print(llm._loop._thread.is_alive()))  # behind what is registered later
llm = LLM("tiny-llama", load_format="dummy", device="cpu", device_kv_blocks=64, show_progress=False)
stream = llm.stream("One", SamplingParams(max_tokens=900, ignore_eos=True))
print(isinstance(next(stream), str))
"""
    env = {**os.environ, "PYTHONPATH": str(Path(penstock.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False, env=env
    )
    assert (done.returncode, done.stdout) == (0, "True\nFalse\n"), done.stderr


def test_importing_the_package_loads_no_torch() -> None:
    code = (
        "import sys, penstock; print('torch' in sys.modules, penstock.SamplingParams().max_tokens, "
        "hasattr(penstock, 'nothing'))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "256", "False"]
    assert set(penstock.__all__) == {"LLM", "Completion", "SamplingParams", "__version__"}


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "python.md"


@pytest.mark.parametrize("number", range(3))
def test_the_examples_of_the_documentation_run(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(examples) == 3
    tiny = 'LLM("tiny-llama", load_format="dummy", device_kv_blocks=256, show_progress=False)'
    code = examples[number].replace('LLM("smollm2-135m")', tiny)
    assert tiny in code
    exec(compile(code, f"{DOCUMENT.name} {number}", "exec"), {"__name__": "example"})
    assert len(capsys.readouterr().out) > 4


# -------------------------------------------------------------------------------------------------- snapshots


def with_disk(directory: Path) -> LLM:
    sizes = {"device_kv_blocks": 64, "kv_offload_host_gib": 0.01, "kv_offload_ssd_gib": 0.01}
    return tiny(kv_offload_ssd_dir=directory, **sizes)


def test_a_snapshot_is_taken_listed_and_continued_by_another_process_of_the_same_model(
    tmp_path: Path,
) -> None:
    prompt, messages = (
        ("the water behind the dam is eighty metres deep, "),
        [{"role": "user", "content": "how deep is the water behind it?"}],
    )
    with with_disk(tmp_path / "kv") as llm:
        whole = llm.generate(prompt + "and cold", GREEDY)
        said = llm.chat(messages, GREEDY)
        so_far = [*messages, {"role": "assistant", "content": said.text}]
        answered = llm.chat([*so_far, *messages], GREEDY)
        taken = llm.take_snapshot(prompt, "dam", ttl_s=3600)
        assert (taken.name, taken.num_tokens, taken.kept_tokens, taken.tiers) == ("dam", 48, 48, ("ssd",))
        assert llm.take_snapshot(so_far, "talk").is_chat
        assert [one.name for one in llm.snapshots()] == ["dam", "talk"]
    with with_disk(tmp_path / "kv") as llm:
        assert [one.name for one in llm.snapshots()] == ["dam", "talk"]
        again = llm.generate("and cold", GREEDY, snapshot="dam")
        assert (again.text, again.prompt_tokens) == (whole.text, whole.prompt_tokens)
        assert "".join(llm.stream("and cold", GREEDY, snapshot="dam")) == whole.text
        assert llm.chat(messages, GREEDY, snapshot="talk").text == answered.text
        with pytest.raises(InvalidRequest, match="not taken of messages"):
            llm.chat(messages, GREEDY, snapshot="dam")
        llm.delete_snapshot("dam")
        with pytest.raises(SnapshotMissing):
            llm.generate("and cold", GREEDY, snapshot="dam")


def test_without_a_tier_behind_the_device_there_are_no_snapshots(llm: LLM) -> None:
    with pytest.raises(SnapshotRefused, match="--kv-offload"):
        llm.take_snapshot(list(range(40)))
