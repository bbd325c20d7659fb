"""Rotary positions: the frequencies that the values of a head turn with, and the schemes that stretch them
over more tokens than a model was trained with. Owns the schemes, their numbers and how a config.json spells
them; the rotation itself is in `layers.py`.

    scheme     frequency of a pair, f = theta ** (-2 i / dim)                                     cos and sin
               are multiplied by
    linear     f / factor                                                                         1
    dynamic    f of a larger theta, which follows from the longest sequence                       1
    llama3     f / factor for long waves, f for short ones, a mean of both between                1
    yarn       the same, between pairs that are counted by their turns in the trained context     1 + 0.1
               ln(factor), or as stated
    longrope   f / a factor of its own; the list follows from the longest sequence                from the
               ratio of contexts, or as stated

`dynamic` and `longrope` follow from a length, and cached keys must all have been turned by one table. So the
length is a constant of the run (`settled`), and what it chose is part of every key.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import InvariantBroken
from penstock.models.fields import Fields, Json, changed_fields

LOCAL, GLOBAL = "sliding_attention", "full_attention"  # kinds of layers
KINDS = ("linear", "dynamic", "yarn", "llama3", "longrope")
_KNOWN = frozenset(
    [
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "partial_rotary_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "low_freq_factor",
        "high_freq_factor",
        "short_factor",
        "long_factor",
    ]
)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """One scheme, and all numbers that define its table. Unused ones have their defaults."""

    kind: str
    factor: float = 1.0
    trained_len: int = 0  # tokens of the context before it was stretched
    attention_factor: float = 1.0  # multiplies cos and sin
    beta_fast: float = 0.0  # yarn: pairs with at least this many turns in the trained context stay unchanged
    beta_slow: float = 0.0  # yarn: pairs with at most this many turns are stretched in full
    truncate: bool = True  # yarn: those bounds are whole pairs
    low_freq_factor: float = 0.0  # llama3: the same bounds, in waves per trained context
    high_freq_factor: float = 0.0
    short_factors: tuple[float, ...] = ()  # longrope, one per pair
    long_factors: tuple[float, ...] = ()
    length: int = 0  # dynamic: tokens of the longest sequence

    def settled(self, length: int) -> RopeScaling | None:
        """For a run whose sequences have at most `length` tokens. None: plain positions."""
        if self.kind == "dynamic":
            return dataclasses.replace(self, length=length) if length > self.trained_len else None
        if self.kind == "longrope":
            chosen = self.long_factors if length > self.trained_len else self.short_factors
            return dataclasses.replace(self, short_factors=chosen, long_factors=chosen)
        return self

    def frequencies(self, theta: float, dim: int) -> Tensor:
        """float32 [dim / 2], of a scheme that is settled."""
        if self.kind == "dynamic":
            if not self.length:
                raise InvariantBroken("dynamic rotary positions without the length of the run")
            stretch = self.factor * self.length / self.trained_len - (self.factor - 1)
            return plain_frequencies(theta * stretch ** (dim / (dim - 2)), dim)
        frequencies = plain_frequencies(theta, dim)
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "longrope":
            if self.short_factors != self.long_factors:
                raise InvariantBroken("longrope without the length of the run")
            return frequencies / torch.tensor(self.short_factors, dtype=torch.float32)
        stretched = self._llama3_share(frequencies) if self.kind == "llama3" else self._yarn_share(theta, dim)
        return frequencies * (1 - stretched) + frequencies / self.factor * stretched

    def _llama3_share(self, frequencies: Tensor) -> Tensor:
        """How much of each pair is stretched, from 0 to 1."""
        waves = self.trained_len * frequencies / (2 * math.pi)
        share = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return 1 - share.clamp(0, 1)

    def _yarn_share(self, theta: float, dim: int) -> Tensor:
        # the pairs that turn so often in the trained context, as fractions
        waves = (self.trained_len / (turns * 2 * math.pi) for turns in (self.beta_fast, self.beta_slow))
        first, last = (dim * math.log(wave) / (2 * math.log(theta)) for wave in waves)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        last = last + 0.001 if first == last else last
        return ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)

    def __str__(self) -> str:
        """All numbers that are not as by default."""
        return json.dumps(changed_fields(self), sort_keys=True)


def plain_frequencies(theta: float, dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return torch.as_tensor(1.0 / (theta**exponents))


# ------------------------------------------------------------------------------------------------ config.json


def parse_rope(outer: Fields, head_dim: int, most: int) -> Json:
    """A config.json's fields about positions, as fields of ModelConfig. `most`: the largest plausible number
    of positions. `rope_parameters` is the newer spelling of `rope_scaling`, with the base inside."""
    fields = _merged(outer)
    theta = fields.positive("rope_theta", outer.positive("rope_theta", 10000.0))
    share = fields.positive("partial_rotary_factor", outer.positive("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * share)
    outer.need(
        share <= 1 and rotary_dim >= 2 and rotary_dim % 2 == 0,
        f"partial_rotary_factor {share} turns {rotary_dim} of {head_dim} values, which is not possible",
    )
    stated = outer.count("max_position_embeddings", most=most)
    partial = 0 if rotary_dim == head_dim else rotary_dim
    plain = {"rope_theta": theta, "max_position": stated, "rotary_dim": partial}
    kind = fields.raw.get("rope_type") or fields.raw.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # as the first Phi-3 files call it
    if kind == "default":
        return plain
    outer.need(kind in KINDS, f"rope scaling of type {kind!r} is not supported, only {', '.join(KINDS)}")
    lists = [name for name in ("short_factor", "long_factor") if fields.is_set(name)]
    outer.need(
        not lists or kind == "longrope",
        f"rope scaling of type {kind!r} with {', '.join(lists)} is not supported, only longrope has them",
    )
    # Phi-3 has it outside, and there it counts; a scheme whose config does not say it was trained with the
    # context that it states.
    inside = fields.count("original_max_position_embeddings", stated, most)
    trained = outer.count("original_max_position_embeddings", inside, most)
    fields.need(theta > 1 or kind != "yarn", f"rope_theta {theta} must be above 1 for yarn")
    scaling = _parse_scaling(kind, fields, rotary_dim, stated, trained)
    # linear and dynamic stretch the stated number; the others state what they reach, or what yarn stretches
    stretches = kind in ("linear", "dynamic")
    stretched = {"linear": stated, "dynamic": stated, "yarn": trained}.get(kind, 0)
    reach = max(stated, int(stretched * scaling.factor))
    outer.need(reach <= most, f"rope scaling reaches {reach} positions; more than {most} cannot be right")
    context = stated if stretches and stated != reach else 0
    return {**plain, "rope_scaling": scaling, "max_position": reach, "context": context}


def rope_by_kind(fields: Fields, theta: float, local_theta: float) -> tuple[Json, float]:
    """Of a model whose layers turn by their kind: `rope_parameters` of the layers that see all tokens, as
    other models have them; and the base of those with a window, which are plain."""
    by_kind = Fields(fields.section("rope_parameters"), fields.where)
    unknown = [name for name in by_kind.raw if name not in (LOCAL, GLOBAL)]
    fields.need(not unknown, f"rope_parameters with {', '.join(unknown)} is not supported")
    whole = {"rope_theta": theta, **by_kind.section(GLOBAL), **fields.section("rope_scaling")}
    local = Fields(by_kind.section(LOCAL), fields.where)
    kind = local.raw.get("rope_type", "default")
    fields.need(kind == "default", f"rope scaling of type {kind!r} in layers with a window is not supported")
    return whole, local.positive("rope_theta", local_theta)


def _merged(outer: Fields) -> Fields:
    scaling, parameters = outer.section("rope_scaling"), outer.section("rope_parameters")
    different = [name for name in scaling if name in parameters and scaling[name] != parameters[name]]
    outer.need(not different, f"rope_scaling and rope_parameters do not agree on {', '.join(different)}")
    rope = {**parameters, **scaling}
    unknown = [name for name, value in rope.items() if name not in _KNOWN and value not in (None, False)]
    outer.need(not unknown, f"rope scaling with {', '.join(unknown)} is not supported")
    return Fields(rope, outer.where)


def _parse_scaling(kind: str, fields: Fields, dim: int, stated: int, trained: int) -> RopeScaling:
    implied = stated / trained if kind == "longrope" or (kind == "yarn" and trained != stated) else None
    factor = fields.positive("factor", implied)
    if kind == "linear":
        return RopeScaling(kind, factor)
    if kind == "dynamic":
        fields.need(dim > 2, f"rope scaling of type dynamic needs more than {dim} values that turn")
        return RopeScaling(kind, factor, stated)
    if kind == "llama3":
        low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
        fields.need(low < high, f"high_freq_factor {high} must be above low_freq_factor {low}")
        return RopeScaling(kind, factor, trained, low_freq_factor=low, high_freq_factor=high)
    if kind == "longrope":
        usual = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 and trained > 1 else 1.0
        short, long = (fields.positives(name, dim // 2) for name in ("short_factor", "long_factor"))
        attention_factor = fields.positive("attention_factor", usual)
        return RopeScaling(kind, 1.0, trained, attention_factor, short_factors=short, long_factors=long)
    fast, slow = fields.positive("beta_fast", 32.0), fields.positive("beta_slow", 1.0)
    fields.need(slow < fast, f"beta_fast {fast} must be above beta_slow {slow}")
    # As the paper has it; DeepSeek's files weigh numerator and denominator.
    usual = _yarn_scale(factor)
    if fields.is_set("mscale") and fields.is_set("mscale_all_dim"):
        above, below = (fields.positive(name) for name in ("mscale", "mscale_all_dim"))
        usual = _yarn_scale(factor, above) / _yarn_scale(factor, below)
    attention_factor = fields.positive("attention_factor", usual)
    return RopeScaling(kind, factor, trained, attention_factor, fast, slow, fields.flag("truncate", True))


def _yarn_scale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


# ----------------------------------------------------------------------------------------- from GGUF metadata

# the tensors of a GGUF file that hold a factor per pair, by their names
RopeFactors = Mapping[str, list[float]]
FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_YARN_EXTRAS = ("yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor", "alpha")


def rope_scaling_of_gguf(metadata: Json, name: str, factors: RopeFactors, where: str) -> Json | None:
    """The `rope_scaling` of a config.json that the metadata of architecture `name` and the factors amount to.
    A factor per pair is how llama.cpp stores both llama3 and longrope; with one list for all lengths it is
    the former."""
    prefix = f"{name}.rope."
    given = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    fields = Fields(given, f"{where}: {prefix}")
    odd = [f"scaling.{extra}" for extra in _YARN_EXTRAS if fields.is_set(f"scaling.{extra}")]
    fields.need(not odd, f"rope scaling with {', '.join(odd)} is not supported")
    kind = given.get("scaling.type", "none")
    stretch = fields.positive("scaling.factor", fields.positive("scale_linear", 1.0))
    attention = fields.positive("scaling.attn_factor", 1.0)
    length = "scaling.original_context_length"
    trained = {"original_max_position_embeddings": fields.count(length) if fields.is_set(length) else None}
    if factors:
        fields.need(
            kind in ("none", "longrope") and stretch == 1.0,
            f"type {kind!r} together with {', '.join(factors)} is not supported",
        )
        same, *others = FACTOR_TENSORS
        long, short = (factors.get(other, factors.get(same)) for other in others)
        lists = {"long_factor": long, "short_factor": short}
        return {"rope_type": "longrope", **lists, "attention_factor": attention, **trained}
    if kind == "none":
        return None if stretch == 1.0 else {"rope_type": "linear", "factor": stretch}
    if kind != "yarn":
        return {"rope_type": kind, "factor": stretch}
    fast = fields.positive("scaling.yarn_beta_fast", 32.0)
    slow = fields.positive("scaling.yarn_beta_slow", 1.0)
    own = None if attention == 1.0 else attention * _yarn_scale(stretch)
    scaling = {"rope_type": kind, "factor": stretch, "beta_fast": fast, "beta_slow": slow}
    return {**scaling, "attention_factor": own, **trained}
