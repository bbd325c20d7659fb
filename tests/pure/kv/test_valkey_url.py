"""What a URL of a Valkey store may say; mistakes in one are told without repeating any of it."""

from __future__ import annotations

import ssl
import traceback
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.kv.tiers.remote import Node
from penstock_valkey import PASSWORD_VARIABLE, ValkeyAddress, parse_address

SECRET = "hunter2swordfish"


def test_a_plain_address() -> None:
    assert parse_address("valkey://store.example:7000/3?ttl=60", {}) == ValkeyAddress(
        (Node("store.example", 7000),), db=3, ttl_s=60
    )


def test_a_cluster_may_name_several_nodes() -> None:
    address = parse_address("valkey://a:1,b:2,c?cluster=1", {})
    assert address.cluster and address.nodes == (Node("a", 1), Node("b", 2), Node("c", 6379))


def test_credentials_are_decoded_and_may_hold_anything() -> None:
    address = parse_address("valkey://joe:p%40ss%2Fw%3Frd%23@host", {})
    assert (address.user, address.password) == ("joe", "p@ss/w?rd#")
    assert parse_address("valkey://:a:b@c@host", {}).password == "a:b@c"


def test_the_password_may_come_from_the_environment_and_the_url_goes_first() -> None:
    environment = {PASSWORD_VARIABLE: "from outside"}
    assert parse_address("valkey://host", environment).password == "from outside"
    assert parse_address("valkey://joe@host", environment).user == "joe"
    assert parse_address("valkey://:mine@host", environment).password == "mine"


def test_a_password_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="UTF-8"):
        parse_address("valkey://host", {PASSWORD_VARIABLE: "\udcff"})


def test_a_repr_shows_no_credentials() -> None:
    address = parse_address(f"valkeys://joe:{SECRET}@host", {})
    assert SECRET not in repr(address) and "joe" not in repr(address) and "host" in repr(address)


def test_tls_verifies_certificate_and_name_unless_told_not_to() -> None:
    context = parse_address("valkeys://host", {}).tls
    assert context is not None and context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    careless = parse_address("valkeys://host?verify=none", {}).tls
    assert careless is not None and careless.verify_mode is ssl.CERT_NONE
    assert parse_address("valkey://host", {}).tls is None


@pytest.mark.parametrize("rest", ["store", "joe:pw@[::1]:7000/3?ttl=60", "a:1,b:2?cluster=1"])
def test_the_schemes_of_redis_say_the_same(rest: str) -> None:
    assert parse_address(f"redis://{rest}", {}) == parse_address(f"valkey://{rest}", {})
    own, theirs = parse_address(f"valkeys://{rest}", {}), parse_address(f"rediss://{rest}", {})
    assert replace(own, tls=None) == replace(theirs, tls=None)
    assert (
        theirs.tls is not None and theirs.tls.verify_mode is ssl.CERT_REQUIRED and theirs.tls.check_hostname
    )


BAD = {
    "no host": f"valkey://joe:{SECRET}@",
    "a port that is none": f"valkey://:{SECRET}@host:99999",
    "a port that is a word": f"valkey://host:{SECRET}",
    "a slash in the password": f"valkey://:{SECRET}/x@host",
    "a question mark in the password": f"valkey://:{SECRET}?x@host",
    "a question mark that looks like an option": f"valkey://:p?{SECRET}=x@host",
    "a number sign in the password": f"valkey://:{SECRET}#x@host",
    "brackets in the password": f"valkey://:{SECRET}[@host",
    "characters that urlsplit refuses": f"valkey://:{SECRET}℀@host",
    "a user without a password": f"valkey://{SECRET}@host",
    "several hosts of no cluster": f"valkey://:{SECRET}@a,b",
    "a database of a cluster": f"valkey://:{SECRET}@a/1?cluster=1",
    "a database that is no number": f"valkey://host/{SECRET}",
    "an unknown option": f"valkey://:x@host?{SECRET}=1",
    "an option twice": f"valkey://:{SECRET}@host?ttl=1&ttl=2",
    "an option without a value": f"valkey://:x@host?{SECRET}",
    "no time to live": f"valkey://:{SECRET}@host?ttl=0",
    "a time to live that is no number": f"valkey://host?ttl={SECRET}",
    "a cluster that is maybe": f"valkey://host?cluster={SECRET}",
    "options for TLS without it": f"valkey://:{SECRET}@host?verify=none",
    "options for TLS without it, of redis": f"redis://:{SECRET}@host?verify=none",
    "another way to verify": f"valkeys://host?verify={SECRET}",
    "an authority that is not there": f"valkeys://host?ca=/nowhere/{SECRET}",
    "a certificate that is not there": f"valkeys://host?cert=/nowhere/{SECRET}",
    "a key without a certificate": f"valkeys://host?key=/nowhere/{SECRET}",
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_url_is_refused_without_being_repeated(case: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_address(BAD[case], {})
    assert "--kv-offload-remote" in str(refused.value)
    assert SECRET not in "".join(traceback.format_exception(refused.value, chain=True))


@given(st.text(max_size=60))
@example("")
@example("host:65536")
@example("[::1]:6379/0")
@example("host/-1?timeout=")
@example("%zz@:@/?#")
def test_any_text_is_understood_or_refused_as_a_mistake(text: str) -> None:
    for url in (f"valkey://{text}", f"valkey://:{text}@host", f"valkey://host?{text}"):
        try:
            address = parse_address(url, {})
        except ConfigError:
            continue
        assert address.nodes and all(node.host and 0 < node.port < 65536 for node in address.nodes)
