"""The GLM-4.5 and 4.6 architecture: attention as Llama whose heads turn in part, dense layers first, then
layers with experts, chosen by sigmoids in groups, beside one that every token runs through. Owns its names
and the numbers of its router."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from penstock.models.architecture import FileTensor, WeightSpec, stack
from penstock.models.experts import RoutedArchitecture
from penstock.models.fields import Fields, Json
from penstock.models.model import GroupedRouting, ModelConfig, Routing

S = TypeVar("S", bound=FileTensor)

_ROTARY_SHARE = 0.5  # of a head's values turn, where a config does not say it
# The layer behind the last one drafts tokens; only such a layer has this module.
_DRAFTS = re.compile(r"(model\.layers\.\d+\.)eh_proj\.")


class Glm4Moe(RoutedArchitecture):
    name = "glm4_moe"
    config_name = "Glm4MoeForCausalLM"
    in_gguf = False
    attention_biases = ("qkv_bias",)
    rotates_partly = True
    count = "n_routed_experts"
    shared = "mlp.shared_experts"
    gates_shared = False
    normalises = True

    def mlp(self, config: ModelConfig, index: int) -> Iterator[WeightSpec]:
        for weight in super().mlp(config, index):
            yield weight
            if weight.name == "router" and config.routing is not None:
                bias = stack(
                    "router_bias", (f"{self.router}.e_score_correction_bias", config.routing.num_experts)
                )
                yield bias._replace(exact=True)

    def laid_out(self, stored: Mapping[str, S]) -> Mapping[str, S]:
        drafts = _draft_layers(stored)
        return {name: tensor for name, tensor in stored.items() if not name.startswith(drafts)}

    def unread(self, names: Iterable[str]) -> Iterator[str]:
        names = list(names)
        drafts = _draft_layers(names)
        if num := sum(name.startswith(drafts) for name in names):
            yield f"{num} tensors of the head for drafts ({', '.join(f'{start}*' for start in drafts)})"

    def parse_config(self, raw: Json, where: str) -> ModelConfig:
        fields = Fields(raw, where)
        rope = fields.section("rope_parameters")
        share = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or _ROTARY_SHARE
        plain = {name: value for name, value in raw.items() if name != "use_qk_norm"}
        plain |= {"partial_rotary_factor": share}
        config = super().parse_config(plain, where)
        return dataclasses.replace(config, normed_heads=fields.flag("use_qk_norm", False))

    def routing(self, fields: Fields, config: ModelConfig) -> Routing | None:
        found = super().routing(fields, config)
        assert found is not None
        first = fields.raw.get("first_k_dense_replace", 1)
        good = isinstance(first, int) and 0 <= first < config.num_layers
        fields.need(good, f"first_k_dense_replace must be layers below {config.num_layers}, got {first!r}")
        num, groups, top_groups = found.num_experts, fields.count("n_group", 1), fields.count("topk_group", 1)
        even = num % groups == 0 and num // groups > 1
        fields.need(even, f"{num} experts do not make {groups} groups (n_group) of at least two")
        fields.need(top_groups <= groups, f"topk_group is {top_groups}, and there are {groups} groups")
        enough = found.top_k <= num // groups * top_groups
        fields.need(enough, f"num_experts_per_tok is {found.top_k}, more than {top_groups} groups have")
        stated = dataclasses.asdict(found) | {"dense_layers": tuple(range(first))}
        stated["normalised"] = fields.flag("norm_topk_prob", True)
        scale = fields.positive("routed_scaling_factor", 1.0)
        return GroupedRouting(**stated, num_groups=groups, top_groups=top_groups, scale=scale)

    def shared_width(self, fields: Fields, ffn: int) -> int:
        return fields.count("n_shared_experts", 1) * ffn


def _draft_layers(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(found[1] for name in names if (found := _DRAFTS.match(name))))
