"""The page in Chromium before a real server with all tiers: a chat that is repeated, requests meanwhile, a
killed store. Writes the pictures of the documents where PENSTOCK_PICTURES names a folder."""

from __future__ import annotations

import contextlib
import io
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.e2e.conftest import started_server
from tests.page.conftest import DEADLINE_S, OpenPage, expect
from tests.page.environment import HOME
from tests.store_servers import valkey_or_skip
from tests.support.servers import Valkey

PICTURES = os.environ.get("PENSTOCK_PICTURES", "")
MOST_BYTES = 150_000  # of a picture
FLAGS = ("--device", "cpu", "--weights", "int4", "--max-model-len", "4096", "--device-kv-blocks", "300")
STORY = "Story {}. The river ran on and the mill turned"


class Served:
    def __init__(self, url: str, store: Valkey, process: Any) -> None:
        self.url, self.store, self.process = url, store, process
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(5)]

    def _ask(self, number: int) -> None:
        """Prompts that come back, of several lengths, until it is over or the server is gone."""
        r = random.Random(number)
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(base_url=self.url, timeout=DEADLINE_S) as http,
        ):
            while not self._is_over.is_set():
                prompt = STORY.format(r.randrange(8)) + " and on" * r.choice([20, 80, 300])
                most = r.choice([4, 16, 40])
                body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": most, "ignore_eos": True}
                http.post("/v1/completions", json=body)

    def start_others(self) -> None:
        for thread in self._threads:
            thread.start()

    def end_others(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with valkey_or_skip() as store:
        tiers = ("--kv-offload-host-gib", "0.3", "--kv-offload-ssd-dir", str(tmp_path / "ssd"))
        more = ("--kv-offload-ssd-gib", "1", "--kv-offload-remote", store.url())
        with started_server(*FLAGS, *tiers, *more) as (process, url):
            one = Served(url, store, process)
            yield one
            process.kill()
            one.end_others()


def take_picture(page: Any, name: str, **options: Any) -> None:
    """Fewer colours, fewer bytes."""
    if not PICTURES:
        return
    image = Image.open(io.BytesIO(page.screenshot(animations="disabled", **options)))
    small = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    path = Path(PICTURES) / f"page-{name}.png"
    small.save(path, optimize=True)
    assert path.stat().st_size < MOST_BYTES


def serious_faults(page: Any) -> list[str]:
    """What axe-core calls serious or critical."""
    page.evaluate((HOME / "node_modules" / "axe-core" / "axe.min.js").read_text())
    found = page.evaluate("axe.run()")
    assert len(found["passes"]) > 20, "it has looked"
    return [
        f"{one['id']}: {[node['target'] for node in one['nodes']]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def ask_twice(page: Any) -> None:
    said, life = page.locator("#said .from b"), page.locator("#life p")
    page.click("#try")
    expect(said).to_have_count(1)
    expect(said.first).to_contain_text("prompt tokens computed")
    page.click("#again")
    expect(said).to_have_count(2)
    expect(said.last).to_contain_text("prompt tokens from device memory")
    expect(life).to_contain_text("in device memory")
    expect(life).to_contain_text("Ended: ")


def expect_others(page: Any) -> None:
    """What others do shows."""
    expect(page.locator(".host .level")).to_contain_text("full")
    expect(page.locator(".channel.moving").first).to_be_visible()
    expect(page.locator("#sources .legend")).to_contain_text("host")
    expect(page.locator("#first .legend")).to_contain_text("Last 5 minutes")
    expect(page.locator("#rows tr").nth(30)).to_be_attached()
    expect(page.locator("#failures")).to_contain_text("closed: in use")


def check_looks(page: Any) -> None:
    """In all sizes and colours; takes the pictures."""
    for _ in ("open", "closed again"):
        for details in page.locator("summary").all():
            details.click()
        assert serious_faults(page) == []
    page.evaluate("scrollTo(0, 0)")
    below = page.locator("#life").bounding_box()
    whole = {"x": 0, "y": 0, "width": 1400, "height": below["y"] + below["height"] + 16}
    take_picture(page, "light", clip=whole, full_page=True)
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    assert serious_faults(page) == []
    take_picture(page, "dark", clip=whole, full_page=True)
    page.set_viewport_size({"width": 360, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert serious_faults(page) == []
    page.evaluate("document.querySelector('.chat').scrollIntoView()")
    take_picture(page, "phone")
    page.set_viewport_size({"width": 1400, "height": 1000})


def test_a_server_at_work_and_a_store_that_is_killed(served: Served, open_page: OpenPage) -> None:
    page = open_page(served.url, expected="ERR_")  # when the server ends
    ask_twice(page)
    served.start_others()
    expect_others(page)
    check_looks(page)
    served.store.kill()
    expect(page.locator(".remote.fenced .level")).to_have_text("fenced off")
    expect(page.locator("#failures")).to_contain_text("open: fenced off")
    assert serious_faults(page) == []
    served.store.start()
    expect(page.locator(".remote .level")).to_have_text("usable")  # a probe has succeeded
    served.process.kill()
    expect(page.locator("#link-text")).to_contain_text("Connection lost, showing figures of")
    assert serious_faults(page) == []
