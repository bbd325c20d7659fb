"""Typed access to the entries of a parsed config.json. Owns the refusal of a wrong value, which names the
field and the file."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from penstock.errors import ModelError

Json = Mapping[str, Any]  # a parsed object
Shape = tuple[int, ...]


def is_number(value: Any, kind: Any = int | float) -> bool:
    """Whether it is a finite number of this kind; true and false are none."""
    return isinstance(value, kind) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def changed_fields(of: Any) -> dict[str, Any]:
    """The fields of a dataclass that do not have their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(of)}
    return {name: value for name, value in dataclasses.asdict(of).items() if value != defaults[name]}


class Fields:
    """One object of a config. A field that is null counts as absent."""

    def __init__(self, raw: Json, where: str) -> None:
        self.raw, self.where = raw, where

    def count(self, name: str, default: int | None = None, most: int = 1 << 24) -> int:
        value: int = self._get(name, default)
        good = is_number(value, int) and value >= 1
        self.need(good, f"{name} must be a positive whole number, got {value!r}")
        self.need(value <= most, f"{name} is {value}; more than {most} cannot be right")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        self.need(is_number(value) and value > 0, f"{name} must be a positive number, got {value!r}")
        return float(value)

    def positives(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        values = self._get(name, None)
        good = isinstance(values, list) and len(values) == count
        self.need(good, f"{name} must be a list of {count} numbers, got {values!r}")
        return tuple(Fields({name: value}, self.where).positive(name) for value in values)

    def flag(self, name: str, default: bool) -> bool:
        value: bool = self._get(name, default)
        self.need(isinstance(value, bool), f"{name} must be true or false, got {value!r}")
        return value

    def section(self, name: str) -> Json:
        """An object inside; empty where there is none."""
        section: Json = self._get(name, {})
        self.need(isinstance(section, dict), f"{name} must be an object, got {section!r}")
        return section

    def need(self, condition: object, message: str) -> None:
        if not condition:
            raise ModelError(f"{self.where}: {message}")

    def is_set(self, name: str) -> bool:
        return bool(self.raw.get(name))

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{self.where} has no {name}")
        return value
