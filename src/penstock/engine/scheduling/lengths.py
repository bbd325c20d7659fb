"""How many tokens a request is likely to write. Owns the lengths of earlier answers by model and route;
admission uses them elsewhere. `max_tokens` is only an upper bound and says little about the actual length."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from math import ceil

from penstock.contract import FinishReason, Request

# Quantile of answer lengths to expect. Of many running requests some end early and leave room for others: a
# higher quantile leaves memory unused. The higher one is for engines without host memory, where a retracted
# request is computed again.
SAVED_QUANTILE = 0.7
LOST_QUANTILE = 0.8
# Used before answers were seen: seven in ten have up to 384 tokens. Real lengths displace these one by one.
PRIOR = (32, 64, 96, 128, 192, 256, 384, 512, 512, 1024)
LEAST = 64  # least expected tokens of a request: smaller promises would have to grow too often
_REMEMBERED = 256  # answers of one route
_LEAST_LONGER = 8  # with fewer longer answers than this, a request is expected to write as much again
_MOST_ROUTES = 64  # the least recently used is forgotten


class Lengths:
    """Expects every request to write up to its limit. Called by the engine thread."""

    def expected(self, request: Request, num_written: int) -> int:
        """Expected total tokens of a request that has written `num_written`: more than that, at most its
        limit."""
        return request.sampling.max_tokens

    def saw(self, request: Request, num_written: int, finish: FinishReason) -> None:
        """The request has ended."""

    def by_route(self) -> dict[str, int]:
        """Tokens expected of a request that has written nothing; the route is `adapter:route` where there is
        an adapter. Any thread."""
        return {}


class WrittenLengths(Lengths):
    """Expects a quantile of the latest answer lengths of the same model and route."""

    def __init__(self, quantile: float = SAVED_QUANTILE) -> None:
        self._quantile = quantile
        self._prior = _Answers()
        self._routes: OrderedDict[str, _Answers] = OrderedDict()

    def expected(self, request: Request, num_written: int) -> int:
        most = request.sampling.max_tokens
        if _is_certain(request):
            return most
        return min(most, self._of(request).expected(num_written, self._quantile))

    def saw(self, request: Request, num_written: int, finish: FinishReason) -> None:
        """Answers that a client or a stop string ended count in full. An answer cut by `max_tokens` would
        have been longer: it counts only if it is already longer than expected."""
        if num_written == 0 or finish is FinishReason.ERROR or _is_certain(request):
            return
        if finish is FinishReason.LENGTH and num_written < self._of(request).expected(0, self._quantile):
            return
        route = _route(request)
        self._routes.setdefault(route, _Answers()).add(num_written)
        self._routes.move_to_end(route)
        if len(self._routes) > _MOST_ROUTES:
            self._routes.popitem(last=False)

    def by_route(self) -> dict[str, int]:
        return {route: answers.expected(0, self._quantile) for route, answers in self._routes.copy().items()}

    def _of(self, request: Request) -> _Answers:
        return self._routes.get(_route(request), self._prior)


class _Answers:
    """Lengths of the last answers of one route."""

    def __init__(self) -> None:
        self._latest = deque(PRIOR)  # oldest first
        self._sorted = sorted(PRIOR)

    def add(self, num_tokens: int) -> None:
        self._latest.append(num_tokens)
        insort(self._sorted, num_tokens)
        if len(self._latest) > _REMEMBERED:
            self._sorted.remove(self._latest.popleft())

    def expected(self, num_written: int, quantile: float) -> int:
        longer = self._sorted
        if num_written:
            longer = longer[bisect_right(longer, num_written) :]
        if len(longer) < _LEAST_LONGER:
            return num_written + max(num_written, LEAST)
        return max(longer[ceil(quantile * len(longer)) - 1], num_written + LEAST)


def _is_certain(request: Request) -> bool:
    """True if only `max_tokens` can end it."""
    sampling = request.sampling
    ends = sampling.stop or sampling.stop_token_ids or sampling.grammar or sampling.rules_out
    return sampling.ignore_eos and not ends


def _route(request: Request) -> str:
    return request.route if request.adapter is None else f"{request.adapter.name}:{request.route}"
