"""How log lines look. Owns the format; what is logged is everybody's own."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Literal, NamedTuple

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogSettings(NamedTuple):
    level: str = "info"
    format: Literal["text", "json"] = "text"


class JsonLines(logging.Formatter):
    """One JSON object a line. A record's `fields` are fields of it, instead of text that would have to be taken apart again."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        fields: dict[str, Any] = getattr(record, "fields", None) or {"message": record.getMessage()}
        line |= {name: value for name, value in fields.items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logs(settings: LogSettings) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if settings.format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler])
