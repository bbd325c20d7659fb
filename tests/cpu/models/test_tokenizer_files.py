"""What of a model directory's tokenizer files is taken, as `transformers` takes it, and vocabularies from
GGUF metadata."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from penstock.errors import ModelError
from penstock.models.llama import TINY_LLAMA
from penstock.models.tokenizer import Tokenizer
from penstock.models.tokenizer_files import load_tokenizer, tokenizer_files
from tests.support import tiny_gguf
from tests.support.loading import load_on_cpu
from tests.support.vocabularies import SPECIAL, rendered, sentencepiece_metadata, vocabulary

LARGE = dataclasses.replace(TINY_LLAMA, vocab=1000)
TEXT = "the blocks  of 東京 🙂\n\tand </s> more"
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def directory(
    path: Path,
    settings: dict[str, Any] | None = None,
    backend: tokenizers.Tokenizer | None = None,
    **files: Any,
) -> Path:
    """`files` are JSON under names without their ending."""
    path.mkdir(exist_ok=True)
    (backend or vocabulary("SentencePiece BPE")).save(str(path / "tokenizer.json"))
    for name, content in {"tokenizer_config": ROLES if settings is None else settings, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def theirs(path: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(path)


# ---------------------------------------------------------------------------------- where texts begin and end

# settings, ids before a text and behind it
FRAMES: list[tuple[dict[str, Any], list[int], list[int]]] = [
    ({}, [], []),
    ({"add_bos_token": False}, [], []),
    ({"add_bos_token": True}, [1], []),
    ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
    ({"add_bos_token": None, "add_eos_token": None}, [], []),
]


def test_texts_begin_and_end_as_the_vocabulary_says_else_the_settings(tmp_path: Path) -> None:
    for settings, before, behind in FRAMES:
        path = directory(tmp_path / "model", {**ROLES, **settings})
        tokenizer = load_tokenizer(path, LARGE)
        ids = tokenizer.encode(TEXT, add_special=False)
        assert tokenizer.encode(TEXT) == [1, *ids] == theirs(path).encode(TEXT), "as its post-processor says"
        silent = load_tokenizer(directory(tmp_path / "silent", {**ROLES, **settings}, bare(*SPECIAL)), LARGE)
        assert silent.encode(TEXT) == [*before, *ids, *behind]


def test_a_text_cannot_begin_with_a_token_that_is_not_there(tmp_path: Path) -> None:
    path = directory(tmp_path / "model", {"bos_token": "<nowhere>", "add_bos_token": True}, bare())
    with pytest.raises(ModelError, match=r"tokenizer_config.json: the vocabulary has no '<nowhere>'"):
        load_tokenizer(path, LARGE)
    unnamed = directory(tmp_path / "unnamed", {"add_bos_token": True}, bare())
    assert load_tokenizer(unnamed, LARGE).encode("the")[0] != 1, "as transformers has it: no token is named"


# ----------------------------------------------------------------------------------------------- added tokens


def bare(*special: str) -> tokenizers.Tokenizer:
    """The vocabulary with these special tokens and no others; the rest are words like any other."""
    state = json.loads(vocabulary("SentencePiece BPE").to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    state["post_processor"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def test_tokens_that_have_a_role_are_special_though_the_vocabulary_does_not_say_so(tmp_path: Path) -> None:
    settings = {
        **ROLES,
        "additional_special_tokens": ["<|user|>", {"content": "<|end|>"}, "<absent>"],
        "pad_token": "a",
    }
    path = directory(tmp_path / "model", settings, bare())
    tokenizer = load_tokenizer(path, LARGE)
    assert [id for id in range(8) if tokenizer.is_special(id)] == [0, 1, 2, 3, 4]
    assert (
        tokenizer.encode("a</s>b<|user|><absent>", add_special=False).count(2) == 1
        and tokenizer.vocab_size == 915
    )
    assert tokenizer.eos_ids == {2} and tokenizer.decode(tokenizer.encode("a")) == "a", (
        "padding may be any word"
    )


def test_roles_come_from_the_special_tokens_map_where_the_settings_name_none(tmp_path: Path) -> None:
    path = directory(tmp_path / "model", {"eos_token": "<|end|>"}, bare(), special_tokens_map=ROLES)
    tokenizer = load_tokenizer(path, LARGE)
    assert (
        tokenizer.is_special(1)
        and tokenizer.is_special(4)
        and not tokenizer.is_special(2)
        and tokenizer.eos_ids == {4}
    )


def test_declared_tokens_are_added_with_their_flags(tmp_path: Path) -> None:
    declared = {
        "4": {"content": "<|end|>", "special": True, "rstrip": True, "normalized": False},
        "915": {"content": "<tool>", "special": False, "normalized": False},
        "916": {"content": "<think>", "special": True, "normalized": False},
        "1000": {"content": "<pad>", "special": True},  # the model has no row for it
    }
    path = directory(tmp_path / "model", {**ROLES, "added_tokens_decoder": declared})
    tokenizer = load_tokenizer(path, LARGE)
    text = "a<|end|> \n b<tool><think>c"
    ids = tokenizer.encode(text, add_special=False)
    assert ids == theirs(path).encode(text, add_special_tokens=False)
    assert [id for id in ids if id in (4, 915, 916)] == [4, 915, 916]
    assert not tokenizer.is_special(915) and tokenizer.is_special(916) and tokenizer.vocab_size == 917
    assert tokenizer.decode([915, 916, 915]) == "<tool><tool>" and tokenizer.token_bytes(4) == b"<|end|>"


def test_declared_tokens_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    declared: Any
    for declared, message in (
        ({"917": {"content": "<tool>"}}, "token '<tool>' is declared as 917, but is 915"),
        ({"x": {"content": "<tool>"}}, "added_tokens_decoder cannot be read"),
        ({"915": "<tool>"}, "added_tokens_decoder cannot be read"),
        ({"915": {"content": 5}}, "added_tokens_decoder cannot be read"),
        (["<tool>"], "added_tokens_decoder cannot be read"),
    ):
        path = directory(tmp_path / "model", {**ROLES, "added_tokens_decoder": declared})
        with pytest.raises(ModelError, match=message):
            load_tokenizer(path, LARGE)


# ------------------------------------------------------------------------------------- templates, other files


def test_a_template_is_taken_from_the_first_file_that_has_one(tmp_path: Path) -> None:
    path = directory(tmp_path / "model", chat_template={"chat_template": "from chat_template.json"})
    assert rendered(load_tokenizer(path, LARGE), []) == "from chat_template.json"
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": "from the settings"}]
    directory(path, {**ROLES, "chat_template": named})
    assert rendered(load_tokenizer(path, LARGE), []) == "from the settings"
    (path / "chat_template.jinja").write_text("from chat_template.jinja")
    assert rendered(load_tokenizer(path, LARGE), []) == "from chat_template.jinja"


@pytest.mark.parametrize("in_files", [False, True], ids=["in the settings", "in files"])
def test_requests_with_tools_have_a_template_of_their_own_where_the_model_has_one(
    tmp_path: Path, in_files: bool
) -> None:
    """As in `transformers`, with and without tools."""
    templates = {
        "default": "no tools: {{ messages[0].content }}",
        "tool_use": "{{ tools | tojson }} {{ messages[0].content }}",
    }
    path, named = tmp_path / "model", [{"name": name, "template": text} for name, text in templates.items()]
    directory(path, ROLES if in_files else {**ROLES, "chat_template": named})
    if in_files:
        (path / "chat_template.jinja").write_text(templates["default"])
        (path / "additional_chat_templates").mkdir()
        (path / "additional_chat_templates" / "tool_use.jinja").write_text(templates["tool_use"])
    tools, messages = (
        [{"type": "function", "function": {"name": "now"}}],
        [{"role": "user", "content": "when"}],
    )
    ours, reference = load_tokenizer(path, LARGE).chat_template, theirs(path)
    assert ours is not None
    for given in (tools, None):
        expected = reference.apply_chat_template(
            messages, tools=given, tokenize=False, add_generation_prompt=True
        )
        assert (
            ours.render(messages, True, tools=given)
            == ours.render_apart(messages, True, SPECIAL, given).text
            == expected
        )


def test_every_role_is_known_to_templates(tmp_path: Path) -> None:
    roles = {**ROLES, "eos_token": {"content": "</s>"}, "sep_token": "<|end|>", "cls_token": "<|user|>"}
    template = "{{ bos_token }}{{ eos_token }}{{ sep_token }}{{ cls_token }}{{ pad_token is defined }}"
    path = directory(tmp_path / "model", {**roles, "chat_template": template})
    assert rendered(load_tokenizer(path, LARGE), []) == "<s></s><|end|><|user|>False"


def test_a_directory_with_another_kind_of_vocabulary_says_how_to_convert_it(tmp_path: Path) -> None:
    for other, needed in (
        ("tokenizer.model", "transformers sentencepiece protobuf,"),
        ("spiece.model", "transformers sentencepiece protobuf,"),
        ("tekken.json", "transformers mistral-common,"),
        ("vocab.json", "transformers,"),
        ("vocab.txt", "transformers,"),
    ):
        path = directory(tmp_path / other)
        (path / other).write_bytes(b"x")
        load_tokenizer(path, LARGE)
        (path / "tokenizer.json").unlink()
        said = rf"has {other} but no tokenizer.json.* install {needed} .*from_pretrained.*save_pretrained"
        with pytest.raises(ModelError, match=said):
            load_tokenizer(path, LARGE)


# ------------------------------------------------------------------------------------------------------- GGUF


def from_metadata(path: Path, metadata: dict[str, Any]) -> Tokenizer:
    path.mkdir(exist_ok=True)
    for name, data in tokenizer_files(metadata, "x.gguf").items():
        (path / name).write_bytes(data)
    return load_tokenizer(path, LARGE)


def add_sentencepiece(writer: Any, texts: object) -> None:
    metadata = sentencepiece_metadata()
    writer.add_tokenizer_model("llama")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_scores(metadata["tokenizer.ggml.scores"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(
        "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    )


def test_a_gguf_file_with_a_sentencepiece_vocabulary_loads_and_cuts_text_as_a_directory_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tiny_gguf, "_add_gguf_tokenizer", add_sentencepiece)
    path = tiny_gguf.write_tiny_gguf(tmp_path / "x.gguf", dataclasses.replace(TINY_LLAMA, vocab=915))
    library = vocabulary("SentencePiece BPE")
    for _ in range(2):  # converted, and from the converted copy
        loaded = load_on_cpu(path)
        tokenizer = loaded.tokenizer
        for text in (TEXT, "", " ", "a" + " " * 40 + "b", "x\0y", "<s>the</s> blocks<|user|>the"):
            assert tokenizer.encode(text) == library.encode(text).ids, text
            assert tokenizer.decode(tokenizer.encode(text)) == library.decode(library.encode(text).ids)
        assert tokenizer.eos_ids == {2, 4} == set(loaded.model.config.eos_ids)
        assert [id for id in range(9) if tokenizer.is_special(id)] == [0, 1, 2, 3, 4]
        the = library.token_to_id("▁the")
        ids = tokenizer.encode_chat([{"role": "user", "content": "the</s>"}])
        assert ids == [1, 3, the, *plain("</s>"), 4]


def plain(text: str) -> list[int]:
    """Of text that goes on; what it spells is no special token."""
    ids: list[int] = bare().encode(f"a{text}").ids
    return ids[len(bare().encode("a").ids) :]


def test_settings_of_a_sentencepiece_vocabulary_in_gguf_metadata(tmp_path: Path) -> None:
    def ids(text: str, **changes: Any) -> list[int]:
        return from_metadata(tmp_path / "model", sentencepiece_metadata(**changes)).encode(text)

    the, bare_the = (vocabulary("SentencePiece BPE").token_to_id(token) for token in ("▁the", "the"))
    assert ids("the") == [1, the]
    assert ids("the", add_bos_token=False) == [the]
    assert ids("the", add_eos_token=True) == [1, the, 2]
    assert ids("the", add_bos_token=False, add_eos_token=True) == [the, 2]
    assert ids("the", add_space_prefix=False) == [1, bare_the]
    assert ids("<s>the</s>the", add_bos_token=False) == [1, the, 2, the], (
        "a blank behind every special token, too"
    )
    unprefixed = from_metadata(tmp_path / "model", sentencepiece_metadata(add_space_prefix=False))
    assert (
        unprefixed.decode([the, the]) == (" the the")
        and unprefixed.decode(unprefixed.encode(" the")) == " the"
    )


def test_the_unknown_token_is_special_also_where_no_role_names_it(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    del metadata["tokenizer.ggml.unknown_token_id"]
    assert from_metadata(tmp_path / "model", metadata).decode([0, 2, 0]) == ""


def test_the_best_score_is_merged_first_and_blanks_go_to_the_longest_run(tmp_path: Path) -> None:
    words = ["▁", "a", "b", "c", "ab", "bc", "▁▁", "▁▁▁", "▁a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = {"ab": -5.0, "bc": -4.0, "▁a": -3.0, "▁▁": -1e9, "▁▁▁": -1e9}
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [scores.get(token, -1e6) for token in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 9],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = from_metadata(tmp_path / "model", metadata)

    def cut(text: str) -> list[str]:
        return [tokens[id] for id in tokenizer.encode(text)]

    assert cut("abc") == ["▁a", "bc"]
    assert cut("xab") == ["▁", "<0x78>", "ab"]
    assert cut(" " * 7) == ["▁▁▁", "▁▁▁", "▁▁"] and cut("  a") == ["▁▁", "▁a"]


def test_tokens_of_phi3_swallow_blanks_behind_them(tmp_path: Path) -> None:
    the = vocabulary("SentencePiece BPE").token_to_id("▁the")
    metadata = sentencepiece_metadata(add_bos_token=False)
    swallowing = from_metadata(tmp_path / "model", {**metadata, "general.architecture": "phi3"})
    assert swallowing.encode("<|user|>\n the<s> the") == [
        3,
        the,
        1,
        *from_metadata(tmp_path / "model", metadata).encode(" the"),
    ]


def test_gguf_vocabularies_that_cannot_be_used_are_refused_by_name() -> None:
    changes: dict[str, Any]
    for changes, message in (
        ({"scores": [0.0]}, "915 tokens, but 1 scores"),
        ({"scores": None}, "has no usable tokenizer.ggml.scores"),
        ({"token_type": [1]}, "915 tokens, but 1 token types"),
        ({"precompiled_charsmap": [1]}, "precompiled_charsmap is not supported"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is not supported"),
        ({"model": "t5"}, "tokenizer model 't5' is not supported; supported are gpt2 and llama"),
        ({"model": None}, "tokenizer model None is not supported"),
        ({"bos_token_id": 915}, "outside the vocabulary of 915"),
    ):
        with pytest.raises(ModelError, match=f"x.gguf.*{message}"):
            tokenizer_files(sentencepiece_metadata(**changes), "x.gguf")


def of_bytes(name: str, *words: str, **more: Any) -> dict[str, Any]:
    """GGUF metadata: the bytes, the word "aa", and special `words` from id 257 on."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"tokens": [*alphabet, "aa", *words], "token_type": [*[1] * 257, *[3] * len(words)]}
    stated = {"model": "gpt2", "pre": name, "merges": ["a a"], **vocabulary, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in stated.items()}


def test_every_token_that_ends_a_turn_ends_a_text() -> None:
    names = ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|start|>", "<mine>"]

    def ends(**more: Any) -> list[int]:
        files = tokenizer_files(of_bytes("gpt-2", *names, **more), "x")
        found: list[int] = json.loads(files["generation_config.json"])["eos_token_id"]
        return found

    assert ends() == [257, 258, 259, 260, 261]
    no_controls = {"token_type": [1] * 264}
    stated = ends(**no_controls, eos_token_id=262, eom_token_id=263, eot_token_id=0)
    assert stated == [0, 262, 263], "a word is no control token, whatever it is called"


# Words of each pre-tokenizer; "|" stands between them.
SPLITS = [
    ("gpt-2", "it|'s| 1234|  | x|!!|\n\n"),
    ("llama-bpe", "it|'s| |123|4| | x|!!\n\n"),
    ("qwen2", "it|'s| |1|2|3|4| | x|!!\n\n"),
    ("tekken", "it|'s| |1|2|3|4| | x|!!\n\n"),
    ("smollm", "it|'s| |1|2|3|4|  | x|!!|\n\n"),
    ("tekken", "camel|Case| x|://\n|a"),
    ("llama-bpe", "camelCase| x|://\n|a"),
]


def test_words_are_cut_as_the_vocabularies_were_trained() -> None:
    for name, words in SPLITS:
        files, text = tokenizer_files(of_bytes(name), "x"), words.replace("|", "")
        cutter = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode()).pre_tokenizer
        found = [text[begin:end] for _, (begin, end) in cutter.pre_tokenize_str(text)]
        assert found == words.split("|"), name


def test_vocabularies_that_take_words_whole_and_begin_texts_do_so_in_gguf_files(tmp_path: Path) -> None:
    kinds = {"token_type": [*[1] * 258, 3], "bos_token_id": 258}
    for name in ("llama-bpe", "tekken", "qwen2", "gpt-2", "smollm"):
        ids = from_metadata(tmp_path / "model", of_bytes(name, "whole", "<s>", **kinds)).encode("whole")
        assert ids == [258, 257] if name in ("llama-bpe", "tekken") else len(ids) == len("whole")
    template = {"tokenizer.chat_template": "<s>{{ messages[0].content }}<s>"}
    chat = from_metadata(tmp_path / "model", {**of_bytes("llama-bpe", "stop", "<s>"), **template})
    ids = chat.encode_chat([{"role": "user", "content": "stop <s>"}])
    assert [id for id in ids if id > 256] == [258, 258] and len(ids) == 2 + len("stop <s>"), "text stays text"


def test_requests_with_tools_have_the_template_that_a_gguf_file_has_for_them(tmp_path: Path) -> None:
    plain = {"tokenizer.chat_template": "no tools: {{ messages[0].content }}"}
    own = {"tokenizer.chat_template.tool_use": "{{ tools | length }} tools"}
    tools = [{"type": "function", "function": {"name": "now"}}]
    messages = [{"role": "user", "content": "when"}]
    for more, with_tools in ((plain, "no tools: when"), ({**plain, **own}, "1 tools")):
        chat = from_metadata(tmp_path / "model", {**of_bytes("gpt-2"), **more}).chat_template
        assert chat is not None and chat.render(messages, True) == "no tools: when"
        assert chat.render(messages, True, tools=tools) == with_tools
    only = from_metadata(tmp_path / "other", {**of_bytes("gpt-2"), **own})
    assert not only.has_chat_template, "it is not for chats without tools"
