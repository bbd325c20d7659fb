"""A smaller model that proposes tokens. Owns its pass over tokens, the checks against the target, and the
place of its KV.

Its KV is in further layers of every block, after the target's. Its layers may have another size than the
target's: they are packed into as many layers of the target's size as they need.
"""

from __future__ import annotations

from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.decoder import Decoder
from penstock.models.model import ModelConfig, PagedKv
from penstock.models.tokenizer import TextCodec

_NAMED = 3  # differing tokens that a message names


class DraftModel:
    """A model on the device of its target."""

    def __init__(self, model: Decoder, vocab: int) -> None:
        """`vocab`: size of the target's. Both models may have unused rows after the last real token."""
        self.model = model
        self.vocab = vocab

    @property
    def own_dims(self) -> ModelConfig:
        return self.model.config

    @property
    def rope(self) -> Tensor:
        return self.model.rope

    @property
    def digest(self) -> bytes:
        return self.model.digest + self.model.config.positions.encode()

    def step(self, tokens: Tensor, kv: PagedKv, at: slice) -> Tensor | None:
        """Compute KV of all `tokens` int32 [T]; returns logits [n, vocab] of the tokens `at`, None if there
        are none."""
        model = self.model
        own = model.config.vocab
        hidden, residual = model.embed(tokens if own >= self.vocab else tokens.clamp(max=own - 1)), None
        for index in range(model.config.num_layers):
            hidden, residual = model.layer(index, hidden, residual, kv)
        if len(range(*at.indices(len(tokens)))) == 0:
            return None
        assert residual is not None
        return model.head(hidden[..., at, :], residual[at])[:, : self.vocab]


def check_draft(
    draft: Decoder, codec: TextCodec, target: Decoder, target_codec: TextCodec, max_model_len: int
) -> None:
    """Raises ConfigError if the models have different tokens, or the draft model has too few positions."""
    vocab = max(draft.config.vocab, target.config.vocab)
    differing = [id for id in range(vocab) if _text(codec, draft, id) != _text(target_codec, target, id)]
    if differing:
        named = (
            f"{id} is {_text(codec, draft, id)!r}, not {_text(target_codec, target, id)!r}"
            for id in differing[:_NAMED]
        )
        more = f", and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
        raise ConfigError(
            f"--speculate draft: the draft model has other tokens than the target: {'; '.join(named)}{more}"
        )
    if draft.config.recurrence is not None:
        raise ConfigError(
            "--speculate draft: a draft model with recurrent layers is not supported: its states would have "
            "to go back"
        )
    if draft.config.max_position < max_model_len:
        size = (
            f"it has {draft.config.max_position} positions, and sequences have up to {max_model_len} tokens"
        )
        raise ConfigError(f"--speculate draft: {size}; lower --max-model-len")


def _text(codec: TextCodec, model: Decoder, id: int) -> bytes:
    """b"": there is no such token."""
    return codec.token_bytes(id) if id < min(model.config.vocab, codec.vocab_size) else b""


def num_draft_layers(target: ModelConfig, draft: ModelConfig) -> int:
    """Layers of the target's size that hold the draft model's KV. Rounded up until a slot is a whole number
    of draft blocks, since the CPU backend reads an arena as one array of blocks."""
    width, draft_width = (dims.num_kv_heads * dims.head_dim for dims in (target, draft))
    num = -(-draft.num_layers * draft_width // width)
    while 2 * (target.num_kv_layers + num) * width % draft_width:
        num += 1
    return num


def draft_arena(arena: Tensor, target: ModelConfig, draft: ModelConfig) -> Tensor:
    """[slots, layers, 2, block_tokens, kv_heads, head_dim] view for the draft model, over the layers of
    `arena` after the target's."""
    num_slots, block_tokens = arena.shape[0], arena.shape[3]
    width = draft.num_kv_heads * draft.head_dim
    part = block_tokens * width
    first = 2 * target.num_kv_layers * block_tokens * target.num_kv_heads * target.head_dim
    shape = (num_slots, draft.num_layers, 2, block_tokens, draft.num_kv_heads, draft.head_dim)
    return arena.as_strided(
        shape, (arena.stride(0), 2 * part, part, width, draft.head_dim, 1), arena.storage_offset() + first
    )
