"""Options that several ranks do not support are refused by name, before any process is started."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config import (
    Config,
    ExpertsConfig,
    KvConfig,
    LoraConfig,
    OffloadConfig,
    RanksConfig,
    SpeculationConfig,
)
from penstock.errors import ConfigError
from penstock.ranks.launched import check_supported

DISK = OffloadConfig(enabled=True, ssd_dir="/somewhere")


@pytest.mark.parametrize(
    ("flag", "parts"),
    [
        ("--kv-residency", {"kv": KvConfig(residency="scored")}),
        ("--experts-on-device", {"experts": ExpertsConfig(on_device="auto")}),
        ("--speculate draft", {"speculation": SpeculationConfig("draft:m"), "offload": DISK}),
        ("--speculate eagle", {"speculation": SpeculationConfig("eagle:m"), "offload": DISK}),
    ],
)
def test_an_option_is_refused_by_its_flag(flag: str, parts: dict[str, Any]) -> None:
    check_supported(Config(**parts))  # one rank
    with pytest.raises(ConfigError, match=flag):
        check_supported(Config(**parts, ranks=RanksConfig(2)))


@pytest.mark.parametrize(
    "parts",
    [
        {"lora": LoraConfig((("name", "/path"),))},
        {"speculation": SpeculationConfig("draft:m")},
        {"speculation": SpeculationConfig("mtp"), "offload": DISK},
    ],
)
def test_the_rest_is_not_refused(parts: dict[str, Any]) -> None:
    check_supported(Config(**parts, ranks=RanksConfig(2)))
