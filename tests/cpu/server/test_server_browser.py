"""What browsers and tools ask of a server: which origins may call, what is here, and in which words."""

from __future__ import annotations

import json
import re

import pytest

from penstock import __version__
from penstock.config import ServerConfig
from penstock.errors import ConfigError
from penstock.server import about
from penstock.server.routes import make_routes
from tests.cpu.server.served import MODEL, Served, completion, serving, until
from tests.support.scripted_engine import ScriptedEngine

ORIGIN = "https://app.example.org"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_a_page_of_an_allowed_origin_may_call_and_one_of_another_may_not() -> None:
    with serving(cors_origins=(ORIGIN,), api_key="k") as served:
        # a browser asks without the key
        asked = served.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in asked.headers["access-control-allow-headers"]
        refused = served.http.get("/v1/models", headers={"origin": ORIGIN})
        # the page can read why
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == ORIGIN
        answered = served.http.post(
            "/v1/completions",
            json=completion(max_tokens=1),
            headers={"origin": ORIGIN, "authorization": "Bearer k"},
        )
        assert (
            answered.status_code == 200
            and "x-request-id" in answered.headers["access-control-expose-headers"]
        )
        other = served.http.options("/v1/models", headers=PREFLIGHT | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_without_the_flag_no_origin_may_call(served: Served) -> None:
    reply = served.http.get("/v1/models", headers={"origin": ORIGIN})
    assert reply.status_code == 200 and not any(name.startswith("access-control") for name in reply.headers)


def test_options_needs_no_key_and_does_nothing() -> None:
    with serving(api_key="k") as served:
        for path in ("/v1/completions", "/v1/models", "/cache/reset"):
            assert served.http.options(path).status_code == 405
        assert served.http.options("/nowhere").status_code == 404
        assert served.engine.submitted == []


@pytest.mark.parametrize(
    "origin",
    ["", "example.org", "https://", "https://a/b", "https://a b", "**", "https://a:999999", "http://x\n"],
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origin"):
        ServerConfig(cors_origins=(origin,))


def test_the_version(served: Served) -> None:
    assert served.http.get("/version").json() == {"version": __version__}


def test_the_description_has_every_route_and_every_field(served: Served) -> None:
    described = served.http.get("/openapi.json").json()
    routes = {route.path.replace(":path}", "}") for route in make_routes(served.service)} - {"/"}
    assert set(described["paths"]) == routes == set(about.ROUTES)
    methods = {
        route.path.replace(":path}", "}"): {name.lower() for name in route.methods - {"HEAD"}}
        for route in make_routes(served.service)
    }
    for path, (_, _, _, body) in about.ROUTES.items():
        assert set(described["paths"][path]) == methods[path]
        assert all(
            "requestBody" in operation
            for method, operation in described["paths"][path].items()
            if method == "post" and body
        )
        if body is not None:
            reference = described["paths"][path]["post"]["requestBody"]["content"]["application/json"][
                "schema"
            ]["$ref"]
            component = described["components"]["schemas"][reference.rpartition("/")[2]]
            assert set(component["properties"]) == set(body.__struct_encode_fields__)
            assert component["additionalProperties"] is False
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(described))) <= set(
        described["components"]["schemas"]
    )
    assert r"\\Z" not in json.dumps(described), "only Python's regular expressions have that"
    assert "security" not in described
    with serving(api_key="k") as guarded:
        assert guarded.http.get("/openapi.json", headers={"authorization": "Bearer k"}).json()[
            "security"
        ] == [{"key": []}]


def test_the_landing_page_says_what_runs_here(served: Served) -> None:
    page = served.http.get("/")
    assert page.headers["content-type"].startswith("text/html") and "<script" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for fact in (MODEL, __version__, "ready", "100000 tokens", "device", "/openapi.json", "not needed"):
        assert fact in page.text
    served.loop.age_s = 99.0
    until(lambda: served.service.trouble(), "it is known")
    assert "silent for 99." in served.http.get("/").text
    served.loop.age_s = None


def test_nothing_on_the_page_is_markup_of_others() -> None:
    with serving(ScriptedEngine(name="<script>alert('x')</script>&")) as served:
        page = served.http.get("/").text
        assert "<script>" not in page and "&lt;script&gt;" in page and "&amp;" in page
