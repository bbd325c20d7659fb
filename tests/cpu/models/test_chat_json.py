"""`tojson` in a chat template: as the model's own tokenizer would render it, whatever options the template
gives it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.models.chat import ChatTemplate

MESSAGE = {"role": "user", "content": "b < a & 'é' 東京"}


@pytest.mark.parametrize(
    "options",
    [{}, {"indent": 2}, {"sort_keys": True}, {"separators": (",", ":")}, {"ensure_ascii": True, "indent": 4}],
    ids=str,
)
def test_json_is_written_as_the_template_asks_for_it(options: dict[str, Any]) -> None:
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
    text = ChatTemplate("{{ messages[0] | tojson(" + arguments + ") }}", {}).render([MESSAGE], False)
    assert text == json.dumps(MESSAGE, **{"ensure_ascii": False, **options})
