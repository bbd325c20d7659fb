"""Writes a model with a long context that says one sentence and ends, whatever it is asked: agents have
prompts of 20,000 tokens and more, and wait for an answer that ends. Owns nothing but the files.

Layers add nothing: the last token alone decides what follows it, and most are followed by the end.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

SAID = "Hello from Penstock"
CONTEXT = 131_072
_WIDTH, _HEADS, _LAYERS = 128, 2, 1


def write(folder: Path, tokenizer: Path) -> None:
    """A model directory with the embedded model's tokenizer."""
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids, vocab = words.encode(SAID, add_special_tokens=False).ids, words.get_vocab_size()
    start, end = words.encode("\n", add_special_tokens=False).ids[-1], words.token_to_id("<|im_end|>")
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randint(0, 2, (vocab, _WIDTH), generator=generator).float() * 2 - 1
    embedding[:, 0] = 1.0  # what all tokens have in common: it makes the end likely
    head = torch.zeros(vocab, _WIDTH)
    head[end, 0] = 60.0
    for before, after in zip([start, *ids], [*ids, end], strict=True):
        head[after] += embedding[before]
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(_WIDTH),
    }
    shapes = {f"self_attn.{name}_proj": (_WIDTH, _WIDTH) for name in "qkvo"}
    shapes |= {
        "mlp.gate_proj": (_WIDTH, _WIDTH),
        "mlp.up_proj": (_WIDTH, _WIDTH),
        "mlp.down_proj": (_WIDTH, _WIDTH),
    }
    for name, shape in shapes.items():
        tensors[f"model.layers.0.{name}.weight"] = torch.zeros(shape)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.0.{name}.weight"] = torch.ones(_WIDTH)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _WIDTH,
        "intermediate_size": _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "vocab_size": vocab,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": words.token_to_id("<|im_start|>"),
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
