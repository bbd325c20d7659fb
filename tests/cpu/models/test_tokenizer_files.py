"""What of a model directory's tokenizer files is taken, as `transformers` takes it, and vocabularies from
GGUF metadata."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, models

from penstock.config import ModelSource
from penstock.errors import ModelError
from penstock.models.layers import TorchLayerOps
from penstock.models.llama import TINY_LLAMA
from penstock.models.loader import load_model
from penstock.models.progress import silent
from penstock.models.tokenizer import Tokenizer
from penstock.models.tokenizer_files import load_tokenizer, tokenizer_files
from tests.support import tiny_gguf
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
FRAMES: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    "nothing said": ({}, [], []),
    "no bos": ({"add_bos_token": False}, [], []),
    "bos": ({"add_bos_token": True}, [1], []),
    "bos and eos": ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    "eos": ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
    "null": ({"add_bos_token": None, "add_eos_token": None}, [], []),
}


@pytest.mark.parametrize(("settings", "before", "behind"), FRAMES.values(), ids=FRAMES)
def test_texts_begin_and_end_as_the_vocabulary_says_else_the_settings(
    tmp_path: Path, settings: dict[str, Any], before: list[int], behind: list[int]
) -> None:
    path = directory(tmp_path / "model", {**ROLES, **settings})
    tokenizer = load_tokenizer(path, LARGE)
    ids = tokenizer.encode(TEXT, add_special=False)
    assert tokenizer.encode(TEXT) == [1, *ids] == theirs(path).encode(TEXT), (
        "its post-processor puts <s> before a text"
    )
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


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"917": {"content": "<tool>"}}, "token '<tool>' is declared as 917, but is 915"),
        ({"x": {"content": "<tool>"}}, "added_tokens_decoder cannot be read"),
        ({"915": "<tool>"}, "added_tokens_decoder cannot be read"),
        ({"915": {"content": 5}}, "added_tokens_decoder cannot be read"),
        (["<tool>"], "added_tokens_decoder cannot be read"),
    ],
    ids=repr,
)
def test_declared_tokens_that_cannot_be_had_are_refused(tmp_path: Path, declared: Any, message: str) -> None:
    path = directory(tmp_path / "model", {**ROLES, "added_tokens_decoder": declared})
    with pytest.raises(ModelError, match=message):
        load_tokenizer(path, LARGE)


# ------------------------------------------------------------------------------------- templates, other files


def test_a_template_is_taken_from_the_first_file_that_has_one(tmp_path: Path) -> None:
    path = directory(tmp_path / "model", chat_template={"chat_template": "from chat_template.json"})
    assert rendered(load_tokenizer(path, LARGE), []) == "from chat_template.json"
    directory(
        path,
        {
            **ROLES,
            "chat_template": [
                {"name": "rag", "template": "x"},
                {"name": "default", "template": "from the settings"},
            ],
        },
    )
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
    roles = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "sep_token": "<|end|>",
        "cls_token": "<|user|>",
        "mask_token": "a",
    }
    template = (
        "{{ bos_token }}{{ eos_token }}{{ sep_token }}{{ cls_token }}{{ mask_token }}{{ pad_token is "
        "defined }}"
    )
    path = directory(tmp_path / "model", {**roles, "chat_template": template})
    assert rendered(load_tokenizer(path, LARGE), []) == "<s></s><|end|><|user|>aFalse"


@pytest.mark.parametrize(
    ("other", "needed"),
    [
        ("tokenizer.model", "transformers sentencepiece protobuf,"),
        ("spiece.model", "transformers sentencepiece protobuf,"),
        ("tekken.json", "transformers mistral-common,"),
        ("vocab.json", "transformers,"),
        ("vocab.txt", "transformers,"),
    ],
)
def test_a_directory_with_another_kind_of_vocabulary_says_how_to_convert_it(
    tmp_path: Path, other: str, needed: str
) -> None:
    path = directory(tmp_path / "model")
    (path / other).write_bytes(b"x")
    load_tokenizer(path, LARGE)
    (path / "tokenizer.json").unlink()
    with pytest.raises(
        ModelError,
        match=rf"has {other} "
        rf"but "
        rf"no "
        rf"tokenizer.json.* "
        rf"install "
        rf"{needed} "
        rf".*from_pretrained.*save_pretrained",
    ):
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
        loaded = load_model(
            ModelSource(str(path)), torch.device("cpu"), torch.float32, TorchLayerOps(), silent
        )
        tokenizer = loaded.tokenizer
        for text in (TEXT, "", " ", "a" + " " * 40 + "b", "x\0y", "<s>the</s> blocks<|user|>the"):
            assert tokenizer.encode(text) == library.encode(text).ids, text
            assert tokenizer.decode(tokenizer.encode(text)) == library.decode(library.encode(text).ids)
        assert tokenizer.eos_ids == {2, 4} == set(loaded.model.config.eos_ids)
        assert [id for id in range(9) if tokenizer.is_special(id)] == [0, 1, 2, 3, 4]
        the = library.token_to_id("▁the")
        assert tokenizer.encode_chat([{"role": "user", "content": "the</s>"}]) == [
            1,
            3,
            the,
            *plain("</s>"),
            4,
        ]


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
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "c",
        "ab",
        "bc",
        "▁▁",
        "▁▁▁",
        "▁a",
    ]
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0]}, "915 tokens, but 1 scores"),
        ({"scores": None}, "has no usable tokenizer.ggml.scores"),
        ({"token_type": [1]}, "915 tokens, but 1 token types"),
        ({"precompiled_charsmap": [1]}, "precompiled_charsmap is not supported"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces is not supported"),
        ({"model": "t5"}, "tokenizer model 't5' is not supported; supported are gpt2 and llama"),
        ({"model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"model": None}, "tokenizer model None is not supported"),
        ({"bos_token_id": 915}, "outside the vocabulary of 915"),
    ],
    ids=repr,
)
def test_gguf_vocabularies_that_cannot_be_used_are_refused_by_name(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"x.gguf.*{message}"):
        tokenizer_files(sentencepiece_metadata(**changes), "x.gguf")


def ends(names: list[str], kinds: list[int], **ids: int) -> list[int]:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", *names],
        "tokenizer.ggml.token_type": [1, 1, 1, *kinds],
        "tokenizer.ggml.merges": ["a b"],
        **{f"tokenizer.ggml.{name}_token_id": id for name, id in ids.items()},
    }
    return json.loads(tokenizer_files(metadata, "x")["generation_config.json"])["eos_token_id"]


def test_every_token_that_ends_a_turn_ends_a_text() -> None:
    names = ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|start|>", "<mine>"]
    assert ends(names, [3] * 7) == [3, 4, 5, 6, 7]
    assert ends(names, [1] * 7, eos=8, eom=9, eot=0) == [0, 8, 9], (
        "a word is no control token, whatever it is called"
    )


# Words of each pre-tokenizer; "|" stands between them.
SPLITS = {
    "gpt-2": "it|'s| 1234|  | x|!!|\n\n",
    "llama-bpe": "it|'s| |123|4| | x|!!\n\n",
    "qwen2": "it|'s| |1|2|3|4| | x|!!\n\n",
    "tekken": "it|'s| |1|2|3|4| | x|!!\n\n",
    "smollm": "it|'s| |1|2|3|4|  | x|!!|\n\n",
}


@pytest.mark.parametrize(
    ("name", "words"),
    [*SPLITS.items(), ("tekken", "camel|Case| x|://\n|a"), ("llama-bpe", "camelCase| x|://\n|a")],
)
def test_words_are_cut_as_the_vocabularies_were_trained(name: str, words: str) -> None:
    """With a vocabulary of bytes: its own words are what the pre-tokenizer has cut."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [*sorted(alphabet), "aa"],
        "tokenizer.ggml.token_type": [1] * 257,
        "tokenizer.ggml.merges": ["a a"],
    }
    backend = tokenizers.Tokenizer.from_str(tokenizer_files(metadata, "x")["tokenizer.json"].decode())
    text = words.replace("|", "")
    found = [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert found == words.split("|")


def test_vocabularies_that_take_words_whole_and_begin_texts_do_so_in_gguf_files(tmp_path: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*alphabet, "whole", "wh", "<s>"],
        "tokenizer.ggml.token_type": [*[1] * 258, 3],
        "tokenizer.ggml.merges": ["w h"],
        "tokenizer.ggml.bos_token_id": 258,
    }
    for name in ("llama-bpe", "tekken"):
        assert from_metadata(tmp_path / "model", {**metadata, "tokenizer.ggml.pre": name}).encode(
            "whole"
        ) == [258, 256]
    for name in ("qwen2", "gpt-2", "smollm"):
        ids = from_metadata(tmp_path / "model", {**metadata, "tokenizer.ggml.pre": name}).encode("whole")
        assert ids[0] == 257 and len(ids) == 4


def test_text_that_is_a_special_token_to_a_vocabulary_that_takes_words_whole_stays_text(
    tmp_path: Path,
) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [*alphabet, "aa", "stop", "<s>"],
        "tokenizer.ggml.token_type": [*[1] * 257, 3, 3],
        "tokenizer.ggml.merges": ["a a"],
        "tokenizer.chat_template": "<s>{{ messages[0].content }}<s>",
    }
    ids = from_metadata(tmp_path / "model", metadata).encode_chat([{"role": "user", "content": "stop <s>"}])
    assert [id for id in ids if id > 256] == [258, 258] and len(ids) == 2 + len("stop <s>")


@pytest.mark.parametrize("has_own", [False, True])
def test_requests_with_tools_have_the_template_that_a_gguf_file_has_for_them(
    has_own: bool, tmp_path: Path
) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "aa"],
        "tokenizer.ggml.token_type": [1] * 257,
        "tokenizer.ggml.merges": ["a a"],
        "tokenizer.chat_template": "no tools: {{ messages[0].content }}",
        **(
            {
                "tokenizer.chat_templates": ["tool_use"],
                "tokenizer.chat_template.tool_use": "{{ tools | length }} tools",
            }
            if has_own
            else {}
        ),
    }
    chat = from_metadata(tmp_path / "model", metadata).chat_template
    assert chat is not None
    tools, messages = (
        [{"type": "function", "function": {"name": "now"}}],
        [{"role": "user", "content": "when"}],
    )
    assert chat.render(messages, True) == "no tools: when"
    assert chat.render(messages, True, tools=tools) == ("1 tools" if has_own else "no tools: when")
    del metadata["tokenizer.chat_template"]
    assert not from_metadata(tmp_path / "other", metadata).has_chat_template, (
        "it is not for chats without tools"
    )


def test_a_bpe_that_merges_to_a_special_token_does_not_make_it_of_text() -> None:
    from penstock.models.chat import ChatTemplate

    vocab = {token: id for id, token in enumerate(["e", "n", "d", "en", "end", "<"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("e", "n"), ("en", "d")]))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([AddedToken("end", normalized=False)])
    tokenizer = Tokenizer(backend, (), ChatTemplate("<end{{ messages[0].content }}end", {}))
    assert tokenizer.encode_chat([{"role": "user", "content": "endend"}]) == [5, 4, 3, 2, 3, 2, 4]


def test_special_tokens_of_the_tests_are_what_they_are_taken_for() -> None:
    assert [vocabulary("SentencePiece BPE").token_to_id(token) for token in SPECIAL] == [0, 1, 2, 3, 4]
