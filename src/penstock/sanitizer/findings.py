"""What was found so far: kept, counted, logged, written to a file. Owns the reports and what becomes of them; finds nothing itself."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

from penstock.errors import ConfigError, SanitizerStop
from penstock.sanitizer.report import Kind, Report
from penstock.sanitizer.stack import Stacks

log = logging.getLogger(__name__)

MAX_REPORTS = 1000  # kept in full; further ones are only counted


class Findings:
    """Reports in the order of discovery. `lock` is held by whoever looks for something, on any thread."""

    def __init__(self, strict: bool, json_file: Path | None) -> None:
        self.reports: list[Report] = []
        self.num_by_kind: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self.lock = threading.RLock()
        self.stacks = Stacks()
        self._strict = strict
        self._json_file = json_file
        self._told: set[tuple[object, ...]] = set()
        self._write_json()

    def tell(self, report: Report, *key: object) -> None:
        """Count `report`, and keep it unless one of its kind and `key` is kept already. Strict: raises SanitizerStop then."""
        self.num_by_kind[report.kind] += 1
        if (report.kind, *key) in self._told or len(self.reports) >= MAX_REPORTS:
            return
        self._told.add((report.kind, *key))
        self.reports.append(report)
        log.error("%s", report)
        self._write_json()
        if self._strict:
            raise SanitizerStop(f"{report.kind}: {report.sentence}")

    def _write_json(self) -> None:
        if self._json_file is None:
            return
        try:
            self._json_file.write_text(json.dumps([report.as_dict() for report in self.reports], indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"--sanitize-json {self._json_file}: {error.strerror or error}") from None
