"""What the sanitizer keeps does not grow with the time it has run."""

from __future__ import annotations

import gc
import json
from pathlib import Path

from penstock.contract import Access, Mode
from penstock.kv.blocks.pool import BlockPool
from penstock.sanitizer.report import MAX_REPORTS, Deed, Kind
from penstock.sanitizer.sanitizer import Sanitizer

LAYERS = 4
NUM_SLOTS = 64


class Days:
    """Steps, promotions and demotions by the thousand, told straight to the sanitizer, in an order that is
    right."""

    def __init__(self) -> None:
        self.sanitizer = Sanitizer()
        self.pool = BlockPool(NUM_SLOTS, "device", self.sanitizer)
        self.numbers = dict.fromkeys(("compute", "load", "save"), 0)
        self.num_submitted = 0

    def live(self, num_requests: int) -> None:
        for request in range(num_requests):
            reservation = self.pool.try_reserve(8, f"r{request}")
            assert reservation is not None
            hold = self.pool.hold(f"r{request}")
            reservation.commit(hold)
            slots = hold.slots
            self.submit("load", f"promote of r{request}", Access("device", slots, (0, LAYERS), Mode.WRITE))
            self.wait("compute", "load")
            for layer in range(LAYERS):
                read = Access("device", slots, (layer, layer + 1), Mode.READ)
                self.submit(
                    "compute", f"layer {layer}", read, read._replace(slots=slots[-1:], mode=Mode.WRITE)
                )
            read = Access("device", slots, (0, LAYERS), Mode.READ)
            for _ in range(12):
                self.submit("compute", "upload")
                self.submit("compute", "step", read, read._replace(slots=slots[-1:], mode=Mode.WRITE))
                self.submit("compute", "sample")
            self.wait("save", "compute")
            self.submit("save", f"demote of r{request}", Access("device", slots, (0, LAYERS), Mode.READ))
            self.sanitizer.host_waited("save", self.numbers["save"], 0.0)
            self.pool.seal(slots, [request.to_bytes(8, "big") + bytes([slot]) for slot in slots])
            hold.end()

    def submit(self, lane: str, label: str, *accesses: Access) -> None:
        self.numbers[lane] += 1
        self.num_submitted += 1
        self.sanitizer.submitted(lane, self.numbers[lane], label, accesses)

    def wait(self, lane: str, on_lane: str) -> None:
        self.numbers[lane] += 1
        self.sanitizer.waited(lane, on_lane, self.numbers[on_lane])

    def sizes(self) -> dict[str, int]:
        gc.collect()
        sanitizer, clocks = self.sanitizer, self.sanitizer._clocks
        histories, pool = sanitizer._arenas["device"].histories, sanitizer._arenas["device"].pool
        assert pool is not None
        return {
            "deeds": sum(type(thing) is Deed for thing in gc.get_objects()),
            "slots": len(histories.writes) + len(histories.reads),
            "standings": len({id(standing) for standing in pool.each(range(NUM_SLOTS))}),
            "keys": len(pool.key_of),
            "changes": sum(map(len, (*clocks._changes.values(), *clocks._seen.values()))),
            "clocks": sum(map(len, clocks._lanes.values())) + len(clocks.actor.clock),
            "stacks": len(sanitizer._findings.stacks),
            "told": len(sanitizer._findings._told),
        }


def test_what_is_kept_after_a_hundred_thousand_submissions_is_what_was_kept_after_ten_thousand() -> None:
    days = Days()
    sizes = []
    for num_requests in (240, 2200):
        days.live(num_requests)
        sizes.append(days.sizes())
    early, late = sizes
    assert days.num_submitted > 100_000
    assert days.sanitizer.reports == []
    assert early.pop("changes") < late.pop("changes") <= 3 * 4096, (
        "these are kept up to a number, others as long as they are needed"
    )
    assert late == early


def test_findings_are_kept_up_to_a_number_and_counted_beyond() -> None:
    sanitizer = Sanitizer()
    for number in range(MAX_REPORTS + 50):
        slot = [number]
        sanitizer.submitted(
            "load", number + 1, f"promote {number}", [Access("device", slot, (0, 1), Mode.WRITE)]
        )
        sanitizer.submitted("compute", number + 1, "layer", [Access("device", slot, (0, 1), Mode.READ)])
    assert len(sanitizer.reports) == MAX_REPORTS == len(sanitizer._findings._told)
    assert sanitizer.num_by_kind[Kind.RACE] == MAX_REPORTS + 50


def test_what_is_found_again_is_counted_and_kept_once() -> None:
    sanitizer = Sanitizer()
    for number in range(1, 4):
        slots = [number, 900 + number, 70 + number]
        sanitizer.submitted(
            "load", number, f"promote of r{number}", [Access("device", slots, (0, 1), Mode.WRITE)]
        )
        sanitizer.submitted("compute", number, "layer", [Access("device", slots, (0, 1), Mode.READ)])
    (report,) = sanitizer.reports  # the same work on the same lanes
    assert report.slots == (1, 71, 901) and "slots 1, 71, 901" in report.sentence
    assert sanitizer.num_by_kind[Kind.RACE] == 3
    sanitizer.submitted("load", 4, "promote of r4", [Access("host", [4], (0, 1), Mode.WRITE)])
    sanitizer.submitted("compute", 4, "layer", [Access("host", [4], (0, 1), Mode.READ)])
    assert [report.arena for report in sanitizer.reports] == ["device", "host"]


def test_the_file_of_findings_is_there_from_the_start_and_has_all_of_them(tmp_path: Path) -> None:
    file = tmp_path / "findings.json"
    sanitizer = Sanitizer(json_file=file)
    assert json.loads(file.read_text()) == []
    for number, arena in enumerate(("device", "host"), 1):
        sanitizer.submitted("load", number, "promote", [Access(arena, [number], (0, 1), Mode.WRITE)])
        sanitizer.submitted("compute", number, "layer", [Access(arena, [number], (0, 1), Mode.READ)])
        assert [report["arena"] for report in json.loads(file.read_text())] == ["device", "host"][:number]
    written = json.loads(file.read_text())[0]
    assert (written["kind"], written["slots"], written["sentence"]) == (
        "race",
        [1],
        sanitizer.reports[0].sentence,
    )
    assert [deed["lane"] for deed in written["deeds"]] == ["load", "compute"]
