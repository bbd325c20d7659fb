"""The S3 store against a real server on loopback: what is written is read, what is wrong is never served, and
trouble ends in time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import obstore
import pytest

import penstock_s3 as s3
from penstock.errors import ConfigError
from penstock.kv.tiers import remote
from penstock.kv.tiers.remote import open_store
from penstock.kv.tiers.store import FORMAT, HEADER_BYTES, Outcome, Written, pack
from penstock_s3 import BucketStore, parse_address
from tests.cpu.kv.remote_rig import NUM_SLOTS, TIMEOUT_S, Slots, assert_fails, block_of, keys_of, wait_usable
from tests.support.servers import Bucket, ServerMissing

DONE, MISSING, CORRUPT = Outcome.DONE, Outcome.MISSING, Outcome.CORRUPT


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    try:
        server = Bucket()
    except ServerMissing as error:
        pytest.skip(f"no S3 server: {error}")
    with server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture
def slots() -> Slots:
    return Slots()


@pytest.fixture
def store(bucket: Bucket, slots: Slots, request: pytest.FixtureRequest) -> Iterator[BucketStore]:
    """Every test has a folder of its own in the bucket."""
    # a busy machine may take a second for a request
    opened = open_store(bucket.url(request.node.name), slots.space, 5 * TIMEOUT_S)
    assert isinstance(opened, BucketStore)
    yield opened
    opened.close()


def raw_put(store: BucketStore, key: bytes, value: bytes) -> None:
    obstore.put(store._bucket, store._path(key), value)


def raw_get(store: BucketStore, key: bytes) -> bytes:
    return bytes(obstore.get(store._bucket, store._path(key)).bytes())


def test_an_object_is_the_header_and_the_bytes(store: BucketStore, slots: Slots) -> None:
    (key,) = keys_of("layout", 1)
    slots.write(store, [key])
    assert raw_get(store, key) == pack(key, slots.space.digest, block_of(key)) + block_of(key)
    assert store._path(key) == f"{FORMAT}/{slots.space.digest.hex()}/{key.hex()}"


def test_a_block_that_is_there_is_not_sent_again(
    store: BucketStore, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("twice", 3)
    slots.write(store, keys[:2])
    sent: list[bytes] = []
    put = store._put
    monkeypatch.setattr(store, "_put", lambda named: (sent.append(named[0]), put(named)))
    assert slots.write(store, keys) == [DONE] * 3
    assert sent == keys[2:]


WRONG = {
    "a bit flipped in the bytes": lambda value, other: value[:-1] + bytes([value[-1] ^ 4]),
    "a bit flipped in the header": lambda value, other: value[:50] + bytes([value[50] ^ 1]) + value[51:],
    "the end is missing": lambda value, other: value[:-1],
    "too long": lambda value, other: value + b"\0",
    "nothing at all": lambda value, other: b"",
    "only the header": lambda value, other: value[:HEADER_BYTES],
    "the block of another key": lambda value, other: other,
    "the bytes of another key": lambda value, other: value[:HEADER_BYTES] + other[HEADER_BYTES:],
    "no header": lambda value, other: bytes(HEADER_BYTES) + value[HEADER_BYTES:],
}


def test_what_is_wrong_is_never_served_and_is_removed(store: BucketStore, slots: Slots) -> None:
    keys = keys_of("wrong", len(WRONG))
    good, *_ = others = keys_of("right", 2)
    slots.write(store, [*keys, *others])
    for key, spoil in zip(keys, WRONG.values(), strict=True):
        raw_put(store, key, spoil(raw_get(store, key), raw_get(store, good)))
    assert dict(zip(WRONG, slots.read(store, keys), strict=True)) == dict.fromkeys(WRONG, CORRUPT)
    assert slots.read(store, [*keys, *others]) == [MISSING] * len(keys) + [DONE, DONE]
    assert slots.write(store, keys) == [DONE] * len(keys)
    assert slots.read(store, keys) == [DONE] * len(keys)


def test_the_number_of_leading_blocks_is_found(store: BucketStore, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of("leading", 40)
    for num in (0, 1, 2, 15, 16, 17, 31, 40):
        monkeypatch.setattr(store, "_has", set(keys[:num]).__contains__)
        assert store.find(keys) == num


def test_few_rounds_of_questions_find_a_place_among_thousands(
    store: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("many", 5000)
    there = set(keys[:3210])
    rounds = []
    each = store._requests.each
    monkeypatch.setattr(store, "_has", lambda key: key in there)
    monkeypatch.setattr(
        store._requests,
        "each",
        lambda job, things, until: (rounds.append(len(things)), each(job, things, until))[1],
    )
    assert store.find(keys) == 3210
    assert len(rounds) <= 4 and max(rounds) <= 16


def test_reset_forgets_every_block(store: BucketStore, slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_REMOVE_AT_ONCE", 4)  # several pages
    keys = keys_of("reset", 11)
    slots.write(store, keys)
    assert store.reset() == 11
    assert slots.read(store, keys) == [MISSING] * 11
    assert store.reset() == 0


# ---------------------------------------------------------------------------------------------------- trouble


@pytest.mark.parametrize("error", [ConnectionError, obstore.exceptions.GenericError])
def test_one_broken_request_is_one_failed_block(
    store: BucketStore, slots: Slots, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Errors of the library are not those of the system."""
    keys = keys_of("one broken", 4)
    bad = keys[2]
    get, put, has = store._get, store._put, store._has

    def broken(key: bytes) -> None:
        if key == bad:
            raise error("with the request in it")

    monkeypatch.setattr(store, "_has", lambda key: (broken(key), has(key))[1])
    monkeypatch.setattr(store, "_put", lambda named: (broken(named[0]), put(named))[1])
    monkeypatch.setattr(store, "_get", lambda key: (broken(key), get(key))[1])
    assert slots.write(store, keys) == [DONE, DONE, Outcome.FAILED, DONE]
    assert slots.read(store, keys) == [DONE, DONE, Outcome.FAILED, DONE]
    assert store.find(keys) == 2
    assert "request" not in str(assert_fails(lambda: slots.read(store, [bad]))).replace("a request", "")


def test_a_paused_server_fails_in_time_and_comes_back(
    bucket: Bucket, store: BucketStore, slots: Slots, request: pytest.FixtureRequest
) -> None:
    keys = keys_of("paused", 3)
    slots.write(store, keys)
    hurried = open_store(bucket.url(request.node.name), slots.space, 0.5)
    bucket.pause()
    try:
        for call in (
            lambda: slots.read(hurried, keys),
            lambda: slots.write(hurried, keys),
            lambda: hurried.find(keys),
            hurried.probe,
        ):
            assert_fails(call)
    finally:
        bucket.resume()
    wait_usable(hurried)
    hurried.close()
    assert slots.read(store, keys) == [DONE] * 3


def test_a_late_answer_touches_no_slot(
    bucket: Bucket, store: BucketStore, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of("late", NUM_SLOTS)
    slots.write(store, keys)
    late = threading.Event()
    get = store._get

    def slow(key: bytes) -> memoryview | None:
        value = get(key)
        assert late.wait(60)
        return value

    monkeypatch.setattr(store, "_get", slow)
    monkeypatch.setattr(store, "_timeout_s", 0.2)
    views = slots.views(len(keys))
    assert_fails(lambda: store.read(keys, views))
    slots.memory[:] = b"\x55" * len(slots.memory)  # somebody else has the slots now
    late.set()
    store._requests._threads.shutdown(wait=True)
    assert slots.memory == b"\x55" * len(slots.memory)


def test_a_killed_server_fails_then_is_empty_then_works(
    bucket: Bucket, store: BucketStore, slots: Slots
) -> None:
    keys = keys_of("killed", 3)
    slots.write(store, keys)
    bucket.kill()
    for call in (
        lambda: slots.read(store, keys),
        lambda: slots.write(store, keys),
        lambda: store.find(keys),
        store.probe,
        store.reset,
    ):
        assert_fails(call)
    bucket.start()
    wait_usable(store)
    assert slots.read(store, keys) == [MISSING] * 3
    assert slots.write(store, keys) == [DONE] * 3
    assert slots.read(store, keys) == [DONE] * 3


def test_a_wrong_secret_fails_without_repeating_it(
    bucket: Bucket, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-right-secret")
    store = open_store(bucket.url("secret"), slots.space, TIMEOUT_S)
    keys = keys_of("secret", 2)
    for call in (lambda: slots.read(store, keys), lambda: slots.write(store, keys), store.probe):
        message = str(assert_fails(call)) + repr(store)
        assert "secret" not in message.replace("/secret", "") and bucket.access_key not in message
    store.close()


def test_an_object_that_cannot_be_removed_ends_a_reset(
    store: BucketStore, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots.write(store, keys_of("stuck", 2))
    monkeypatch.setattr(obstore, "delete", lambda *_: None)
    assert_fails(store.reset)


def test_a_damaged_object_that_cannot_be_removed_is_corrupt_all_the_same(
    store: BucketStore, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = keys_of("cannot be removed", 2)
    slots.write(store, [good, bad])
    raw_put(store, bad, bytes(HEADER_BYTES + len(block_of(bad))))

    def refuses(*args: object) -> None:
        raise PermissionError("with the request in it")

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "delete", refuses)
        assert slots.read(store, [good, bad]) == [DONE, CORRUPT]
    assert slots.read(store, [good, bad]) == [DONE, CORRUPT], "the next one to read it tries again"
    assert slots.read(store, [good, bad]) == [DONE, MISSING]


# -------------------------------------------------------------------------------------------------------- URL


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "s3:///prefix",
        "s3://key:hunter2@bucket/prefix",
        "s3://bucket:9000/prefix",
        "s3://bucket?endpoint=hunter2",
        "s3://bucket?endpoint=http://key:hunter2@host",
        "s3://bucket?endpoint=",
        "s3://bucket?secret=hunter2",
        "s3://bucket?region=a&region=hunter2",
        "s3://bucket?endpoint=http://[hunter2",
        "s3://bucket?ca=/no/such/hunter2",
        "s3://bucket/prefix#hunter2",
    ],
)
def test_a_url_that_cannot_work_is_refused_without_repeating_it(url: str, slots: Slots) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url, slots.space, TIMEOUT_S)
    assert "--kv-offload-remote" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_an_object_that_was_cut_short_is_not_found_and_is_written_again(
    store: BucketStore, slots: Slots
) -> None:
    """Nobody has read it since: what `find` and `write` look at has to show it."""
    keys = keys_of("cut short", 3)
    slots.write(store, keys)
    raw_put(store, keys[1], raw_get(store, keys[1])[:-1])
    assert store.find(keys) == 1
    assert slots.write(store, keys) == [DONE] * 3
    assert store.find(keys) == 3
    assert slots.read(store, keys) == [DONE] * 3


@pytest.mark.parametrize(
    ("query", "named", "allow_http"),
    [
        ("", {}, None),
        ("?endpoint=http://h:1", {"endpoint": "http://h:1"}, True),
        ("?endpoint=https://h:1&region=r", {"endpoint": "https://h:1", "region": "r"}, False),
    ],
)
def test_what_the_url_says_reaches_the_library(
    monkeypatch: pytest.MonkeyPatch, query: str, named: dict[str, str], allow_http: bool | None
) -> None:
    made: list[tuple[object, dict[str, object]]] = []
    monkeypatch.setattr(s3, "S3Store", lambda bucket, **options: made.append((bucket, options)))
    for path, prefix in (("", None), ("/a/b/", "a/b")):
        s3.connect(parse_address(f"s3://bucket{path}{query}"), 2.5)
        ((bucket, options),) = made
        made.clear()
        client, again = options.pop("client_options"), options.pop("retry_config")
        assert (bucket, options) == ("bucket", {"prefix": prefix, **named})
        assert client.get("allow_http") == allow_http, (
            "what is meant to be encrypted is never sent in the clear"
        )
        assert (
            client["timeout"] == client["connect_timeout"] == again["retry_timeout"] == timedelta(seconds=2.5)
        )


def test_all_requests_of_a_call_have_one_deadline(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    deadlines: list[float] = []
    keys = keys_of("one deadline", 40)
    store = open_store("s3://bucket?endpoint=http://127.0.0.1:1&region=r", slots.space, 4.0)
    assert isinstance(store, BucketStore)

    def together(job: object, things: Sequence[object], until: float) -> list[tuple[int, object]]:
        """Of 40 blocks the first is there, and damaged; each answer takes a second."""
        nonlocal now_s
        now_s += 1.0
        deadlines.append(until)
        there = {store._has: keys[0], store._get: keys[0]}.get(job)
        return [
            (place, (memoryview(b"") if job == store._get else True) if thing == there else None)
            for place, thing in enumerate(things)
        ]

    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(store._requests, "together", together)
    for call, num_rounds in (
        (lambda: store.find(keys), 2),
        (lambda: slots.write(store, keys), 2),
        (lambda: slots.read(store, keys), 2),
    ):
        began_s = now_s
        call()
        assert deadlines == [began_s + 4.0] * num_rounds
        deadlines.clear()
    store.close()


def test_manifests_are_listed_from_every_page(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("s3://bucket?endpoint=http://127.0.0.1:1&region=r", slots.space, 60.0)
    assert isinstance(store, BucketStore)
    names = (("aa-1", "ab-2"), ("aa-3", "aa-4"))
    pages = [
        [{"path": f"{store._manifests}/{name}", "size": 0 if name == "aa-4" else 9} for name in page]
        for page in names
    ]
    monkeypatch.setattr(obstore, "list", lambda *args: iter(pages))
    assert store.manifests() == ["aa-1", "ab-2", "aa-3"] and store.manifests("aa") == ["aa-1", "aa-3"]
    store.close()


# -------------------------------------------------------------------------------------------------- manifests


@pytest.fixture
def honouring(slots: Slots) -> Iterator[BucketStore]:
    """Over a bucket in memory: it compares and writes in one step, as S3 does."""
    address = parse_address("s3://bucket/prefix")
    with contextlib.closing(BucketStore(obstore.store.MemoryStore(), address, slots.space, 10.0)) as store:  # type: ignore[arg-type]
        yield store


def test_of_writers_of_one_manifest_at_once_exactly_one_is_told_that_it_is_there(
    honouring: BucketStore,
) -> None:
    for number, instead_of in enumerate([None, b"old"] * 5):
        id, start = f"aa-{number}", threading.Barrier(8)
        if instead_of is not None:
            honouring.write_manifest(id, instead_of, None)

        def write(
            value: int, id: str = id, instead_of: bytes | None = instead_of, start: threading.Barrier = start
        ) -> Written:
            start.wait(60.0)
            return honouring.write_manifest(id, b"by %d" % value, None, instead_of)

        with ThreadPoolExecutor(8) as threads:
            outcomes = list(threads.map(write, range(8)))
        assert sorted(outcome.name for outcome in outcomes) == ["DONE", *["TAKEN"] * 7]
        assert honouring.read_manifest(id) == b"by %d" % outcomes.index(Written.DONE)


def test_a_name_whose_manifest_was_removed_under_a_condition_is_free(honouring: BucketStore) -> None:
    assert honouring.write_manifest("aa-1", b"old", None) is Written.DONE
    honouring.remove_manifest("aa-1", b"another")
    assert honouring.manifests() == ["aa-1"]
    honouring.remove_manifest("aa-1", b"old")
    assert honouring.read_manifest("aa-1") is None and honouring.manifests() == []
    assert honouring.write_manifest("aa-1", b"new", None) is Written.DONE
    assert (
        honouring.write_manifest("aa-1", b"newer", None) is Written.TAKEN
        and honouring.read_manifest("aa-1") == b"new"
    )


def test_a_server_that_ignores_conditions_is_told_of_once(
    store: BucketStore, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("aa-1", "aa-2"):
        assert store.write_manifest(name, b"text", None) is Written.DONE
    assert [
        record.getMessage() for record in caplog.records if "ignores conditions" in record.getMessage()
    ] == ["the bucket's server ignores conditions: two engines may both take one name, without an error"]
