"""Covering arrays: few cases in which every two values of every two options meet. Owns no option and no
value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]
_Pair = tuple[str, int, str, int]  # option, index of its value, another option, index of its value


def all_pairs(options: Mapping[str, Sequence[Any]]) -> set[_Pair]:
    return {
        (one, i, other, j)
        for one, other in combinations(sorted(options), 2)
        for i in range(len(options[one]))
        for j in range(len(options[other]))
    }


def pairwise(options: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Cases that cover every pair. Greedy and the same each time: a case begins with a pair that is still
    missing, and each further option takes the value that covers most missing ones."""
    names = sorted(options, key=lambda name: (-len(options[name]), name))
    missing = all_pairs(options)
    cases: list[dict[str, int]] = []
    while missing:
        one, i, other, j = min(missing)
        case = {one: i, other: j}
        for name in names:
            if name not in case:
                gains = [
                    sum(_pair(name, value, have, at) in missing for have, at in case.items())
                    for value in range(len(options[name]))
                ]
                # Ties go round by the number of the case, so that values without a gain alternate too.
                best = max(gains)
                ties = [value for value, gain in enumerate(gains) if gain == best]
                case[name] = ties[len(cases) % len(ties)]
        missing -= {_pair(a, case[a], b, case[b]) for a, b in combinations(case, 2)}
        cases.append(case)
    return [{name: options[name][at] for name, at in case.items()} for case in cases]


def _pair(one: str, i: int, other: str, j: int) -> _Pair:
    return (one, i, other, j) if one < other else (other, j, one, i)
