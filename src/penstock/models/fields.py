"""Typed access to the entries of a parsed config.json. Owns the refusal of a wrong value, which names the
field and the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.errors import ModelError


class Fields:
    """One object of a config. A field that is null counts as absent."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw, self._where = raw, where

    def count(self, name: str, default: int | None = None, most: int = 1 << 24) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self._where}: {name} must be a positive whole number, got {value!r}")
        if value > most:
            raise ModelError(f"{self._where}: {name} is {value}; more than {most} cannot be right")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise ModelError(f"{self._where}: {name} must be a positive number, got {value!r}")
        return float(value)

    def positives(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        values = self._get(name, None)
        if not isinstance(values, list) or len(values) != count:
            raise ModelError(f"{self._where}: {name} must be a list of {count} numbers, got {values!r}")
        return tuple(Fields({name: value}, self._where).positive(name) for value in values)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self._where}: {name} must be true or false, got {value!r}")
        return value

    def section(self, name: str) -> Mapping[str, Any]:
        """An object inside; empty where there is none."""
        section = self._get(name, {})
        if not isinstance(section, dict):
            raise ModelError(f"{self._where}: {name} must be an object, got {section!r}")
        return section

    def need(self, condition: bool, message: str) -> None:
        if not condition:
            raise ModelError(f"{self._where}: {message}")

    def is_set(self, name: str) -> bool:
        return bool(self._raw.get(name))

    def _get(self, name: str, default: Any) -> Any:
        value = self._raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self._where} has no {name}")
        return value
