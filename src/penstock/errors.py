"""The exception tree: the type says whose fault it was, so that every caller knows what to answer."""

from __future__ import annotations


class PenstockError(Exception):
    """Root of everything that Penstock raises on purpose."""


class UserError(PenstockError):
    """The user or caller asked for something impossible; the message says what, and how to fix it."""


class ConfigError(UserError):
    """A flag, file or combination that cannot work; raised before anything is started."""


class ModelError(UserError):
    """A model that is missing, damaged or of an unknown architecture."""


class InvalidRequest(UserError):
    """A request that can never be served as written. `param` names the offending field, if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    """A prompt of more tokens than a caller said it would take; `what` says how many, as far as they were
    counted."""

    def __init__(self, what: str, most: int, param: str = "prompt") -> None:
        super().__init__(
            f"{param if param != 'prompt' else 'the prompt'} has {what}; {most} is the most that is taken",
            param,
        )
        self.what = what
        self.most = most


class ContextExceeded(InvalidRequest):
    """Prompt and answer do not fit the context. In OpenAI's words: clients look for them before they shorten
    a conversation."""

    def __init__(self, limit: int, asked: str, param: str = "prompt") -> None:
        reduce = "the prompt" if param == "prompt" else "the prompt or of the completion"
        message = (
            f"This model's maximum context length is {limit} tokens. However, {asked}. Please reduce the "
            f"length of {reduce}."
        )
        super().__init__(message, param)


class SessionMissing(UserError):
    """The caller has no session of that name."""

    param = "session_id"


class ResponseMissing(UserError):
    """No answer with that id is kept for the caller."""

    param: str | None = None


class SnapshotMissing(UserError):
    """The caller has no snapshot of that name."""

    param = "snapshot"


class SnapshotTaken(UserError):
    """Another snapshot has the name."""

    param = "name"


class SnapshotRefused(UserError):
    """A snapshot that cannot be made of this, or a manifest that cannot be used: damaged, or of another
    model. The message says why."""

    param = "snapshot"


class SnapshotSpace(UserError):
    """The snapshot's blocks do not fit beside those already pinned; the message has the numbers."""


class Overloaded(PenstockError):
    """Too many requests at once; the same request may succeed later. `retry_after_s` is a guess at when."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineClosed(PenstockError):
    """The engine no longer takes or finishes requests."""


class StepFailed(PenstockError):
    """A forward pass raised on the compute lane; its requests end with this error."""


class RankLost(PenstockError):
    """A rank of this engine has ended, failed or does not answer; the others cannot go on without it."""


class TransferFailed(PenstockError):
    """A copy between tiers did not arrive; the request computes instead."""


class StoreFailed(PenstockError):
    """A disk or shared store as a whole did not answer, or cannot be used now; everything in it counts as
    missing meanwhile."""


class LaneClosed(PenstockError):
    """Work was submitted to a lane after `close`."""


class DeadlineExceeded(PenstockError):
    """A wait timed out; the work goes on and keeps its resources."""


class InvariantBroken(PenstockError):
    """A defect in Penstock itself: a state that the design rules out. Never caught to carry on."""


class SanitizerStop(InvariantBroken):
    """The race sanitizer found something, and its mode is strict."""


class IllegalTransition(InvariantBroken):
    """A state machine met an event that its table does not allow."""

    def __init__(self, what: str, state: object, event: object) -> None:
        super().__init__(f"{what}: {event} is not legal in state {state}")


class HandleEnded(InvariantBroken):
    """A handle was used or ended after it had ended."""


class Leaked(InvariantBroken):
    """Something was still held when its owner closed."""
