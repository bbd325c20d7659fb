"""The address of a bucket of S3, or of an object store that speaks like it: what its URL may say, and the mistakes in one. Owns no
connection; what is in the bucket is `s3_bucket`'s business.

`s3://bucket[/prefix][?endpoint=http(s)://host:port&region=NAME&ca=FILE]`. Credentials come from the environment (AWS_*) or from the
machine, never from the URL. No message repeats any part of it: somebody may have put a key there all the same.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from penstock.errors import ConfigError
from penstock.kv.tiers.store import BlockStore, Space

_FLAG = "--kv-offload-remote"
_OPTIONS = ("endpoint", "region", "ca")


class BucketAddress(NamedTuple):
    """What the URL says."""

    bucket: str
    prefix: str
    options: dict[str, str]


def open_store(url: str, space: Space, timeout_s: float) -> BlockStore:
    """Connects lazily. Raises ConfigError for what can never work."""
    address = parse(url)
    try:
        importlib.import_module("obstore")
    except ImportError:
        raise ConfigError(f"{_FLAG} s3:// needs its client library: pip install 'penstock[remote]'") from None
    from penstock.kv.tiers.remote.s3_bucket import BucketStore, connect

    return BucketStore(connect(address, timeout_s), address, space, timeout_s)


def parse(url: str) -> BucketAddress:
    """Raises ConfigError."""
    try:
        parts = urlsplit(url)
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
        endpoint = urlsplit(dict(pairs).get("endpoint", "https://default"))
    except ValueError:
        raise ConfigError(f"{_FLAG} must look like s3://bucket/prefix?endpoint=...&region=...") from None
    options = dict(pairs)
    _need("@" not in parts.netloc, "has credentials in its URL: give them in the environment, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    _need(bool(parts.netloc) and ":" not in parts.netloc, "must name a bucket: s3://bucket/prefix; a host is an option, ?endpoint=...")
    _need(len(options) == len(pairs) and set(options) <= set(_OPTIONS), f"knows the options {', '.join(_OPTIONS)}, each at most once")
    _need(all(options.values()) and not parts.fragment, "has an empty option, or a # in it")
    _need(endpoint.scheme in ("http", "https") and bool(endpoint.hostname), "has an endpoint= that is not http://host or https://host")
    _need("@" not in endpoint.netloc, "has credentials in its endpoint=: give them in the environment")
    return BucketAddress(parts.netloc, parts.path.strip("/"), options)


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"{_FLAG} {message}")
