"""What a hub answers, over HTTP: statuses, limits, roles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from thinwire.hub import FleetLimits, Hub, HubLimits, Rule
from thinwire.report.messages import MAX_HEARTBEAT_BYTES, Answer, Heartbeat
from thinwire.web import Role

from .making import (
    PATIENT,
    TOKENS,
    Trainer,
    beat,
    calling,
    head_at,
    known_tokens,
    training,
    until,
    update,
)

STREAM = "/v1/streams/policy"
_LIMITS = HubLimits(fleet=FleetLimits(replicas=40, regions=3, interval_s=60, settle_s=0))


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with training(tmp_path_factory.mktemp("hub")) as made:
        for number in range(1, 6):
            made.publish(step=10 * number, identity=f"run-{number}")
        yield made


@pytest.fixture(scope="module")
def client(trainer: Trainer) -> Iterator[httpx.Client]:
    hub = Hub({"policy": trainer.url}, poll_s=0.05, limits=_LIMITS, rule=Rule(20))
    with calling(hub) as made:
        head_at(made, 5)
        yield made


def said(client: httpx.Client, heartbeat: Heartbeat) -> httpx.Response:
    return client.post(
        f"{STREAM}/heartbeats",
        content=msgspec.json.encode(heartbeat),
        headers={"content-type": "application/json"},
    )


def post(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    return client.post(path, json=body)


def fault(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert set(error) == {"code", "message", "hint"}
    return answer.status_code, error["message"]


def lineage_of(client: httpx.Client) -> str:
    found: str = client.get(STREAM).json()["head"]["lineage"]
    return found


def test_a_stream_and_its_versions(client: httpx.Client, trainer: Trainer) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    (status,) = client.get("/v1/streams").json()["streams"]
    assert (status["name"], status["fault"]) == ("policy", None)
    assert status["url"].endswith("/policy")
    assert (status["head"]["version"], status["head"]["step"]) == (5, 50)
    assert status["head"]["identity"] == "run-5"
    assert 0 <= status["looked_s"] < 30

    def versions(**query: Any) -> list[int]:
        answer = client.get(f"{STREAM}/versions", params=query)
        assert answer.headers["cache-control"] == "no-store"
        return [one["version"] for one in answer.json()["versions"]]

    until(lambda: versions() == [5, 4, 3, 2, 1], "the history")
    assert versions(limit=2) == [5, 4]
    assert versions(limit=2, before=4) == [3, 2]
    sizes = client.get(f"{STREAM}/versions").json()["versions"]
    status = client.get(STREAM).json()
    assert status["sent_bytes"] == sum(one["payload_bytes"] for one in sizes)
    assert status["full_bytes"] == 5 * 800


def test_heartbeats_and_what_is_seen_of_them(client: httpx.Client) -> None:
    lineage = lineage_of(client)
    answer = said(client, beat("eu-1", 4, lineage=lineage, region="eu", updates=[update(4)]))
    assert answer.status_code == 200
    told = msgspec.json.decode(answer.content, type=Answer)
    assert told.head is not None
    assert (told.head.version, told.interval_s) == (5, 60.0)
    said(client, beat("eu-2", 5, lineage=lineage, region="eu"))
    said(client, beat("us-1", region="us"))
    said(client, beat("relay", kind="relay", region="eu", served_bytes=9))
    answer = client.get(f"{STREAM}/replicas").json()
    assert [one["beat"]["replica"] for one in answer["replicas"]] == [
        *("eu-1", "eu-2", "relay", "us-1")
    ]
    assert answer["next"] is None
    assert answer["counts"]["ready"] == 2
    first = answer["replicas"][0]
    assert (first["state"], first["staleness_steps"]) == ("ready", 10)
    assert first["staleness_s"] >= 0
    page = client.get(f"{STREAM}/replicas", params={"region": "eu", "limit": 2}).json()
    assert (page["next"], len(page["replicas"])) == ("eu-2", 2)
    rest: dict[str, Any] = {"region": "eu", "limit": 2, "after": "eu-2"}
    page = client.get(f"{STREAM}/replicas", params=rest).json()
    assert [one["beat"]["replica"] for one in page["replicas"]] == ["relay"]
    eu, us = client.get(STREAM).json()["regions"]
    assert (eu["counts"]["ready"], eu["relay_count"], eu["served_bytes"]) == (2, 1, 9)
    assert (us["counts"]["joining"], us["staleness_steps_p95"]) == (1, None)
    (known,) = client.get(f"{STREAM}/updates").json()["updates"]
    assert (known["replica"], known["region"], known["version"]) == ("eu-1", "eu", 4)
    for replica in ("eu-1", "eu-2", "us-1", "relay"):
        assert client.delete(f"{STREAM}/replicas/{replica}").status_code == 204
    assert client.get(f"{STREAM}/replicas").json()["replicas"] == []


def test_readiness(client: httpx.Client) -> None:
    lineage = lineage_of(client)

    def ready(**query: Any) -> tuple[int, bool]:
        answer = client.get(f"{STREAM}/ready", params=query)
        return answer.status_code, answer.json()["is_ready"]

    assert ready() == (503, False)
    said(client, beat("a", 5, lineage=lineage, region="eu"))
    said(client, beat("b", 3, lineage=lineage, region="us"))
    # The hub's own rule is 20 steps.
    assert ready() == (200, True)
    assert ready(max_staleness_steps=19) == (503, False)
    assert ready(max_staleness_steps=19, share=0.5) == (200, True)
    assert ready(max_staleness_steps=0, region="eu") == (200, True)
    assert ready(max_staleness_steps=0, region="us") == (503, False)
    assert ready(max_staleness_steps=0, replica="a") == (200, True)
    assert ready(max_staleness_steps=0, replica="b") == (503, False)
    assert ready(max_staleness_steps=0, region="nowhere") == (503, False)
    assert ready(max_staleness_steps=19, share=0.5, min_count=2) == (503, False)
    assert ready(max_staleness_steps=19, share=0.5, published=5) == (200, True)
    assert ready(max_staleness_steps=19, share=0.5, published=6) == (503, False)
    answer = client.get(f"{STREAM}/ready", params={"published": 6, "replica": "a"}).json()
    assert answer["reason"].endswith("the hub has not read version 6 yet")
    answer = client.get(f"{STREAM}/ready", params={"max_staleness_steps": 19}).json()
    assert (answer["ready_count"], answer["count"]) == (1, 2)
    assert "1 of 2 replicas" in answer["reason"]
    assert client.get(f"{STREAM}/ready", params={"replica": "c"}).status_code == 404
    for replica in ("a", "b"):
        client.delete(f"{STREAM}/replicas/{replica}")


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v1/streams/none", 404, "no stream is called 'none'"),
        ("/v1/streams/none/wait", 404, "none"),
        ("/v1/nothing", 404, "no such path"),
        (f"{STREAM}/", 404, "no such path"),
        ("/v1/streams/policy%2Fversions/x", 404, "no such path"),
        (f"{STREAM}/versions?limit=0", 422, "limit must be from 1 to 1000"),
        (f"{STREAM}/versions?limit=1001", 422, "limit"),
        (f"{STREAM}/versions?limit=1e3", 422, "limit must be an integer"),
        (f"{STREAM}/versions?limit=", 422, "limit"),
        (f"{STREAM}/versions?limit=\u0663", 422, "limit"),
        (f"{STREAM}/versions?limit={'9' * 5000}", 422, "limit"),
        (f"{STREAM}/versions?limit=1&limit=2", 400, "comes twice"),
        (f"{STREAM}/versions?limits=1", 400, "no parameter 'limits'"),
        (f"{STREAM}/ready?max_staleness_step=1", 400, "no parameter"),
        (f"{STREAM}/ready?share=1.5", 422, "share"),
        (f"{STREAM}/ready?share=nan", 422, "share"),
        (f"{STREAM}/ready?replica=a%0A", 422, "replica"),
        (f"{STREAM}/ready?lost=no", 422, "lost must match"),
        (f"{STREAM}/ready?min_count=0", 422, "min_count"),
        (f"{STREAM}/wait?timeout_s=61", 422, "timeout_s"),
        (f"{STREAM}/wait?lineage=xyz", 422, "lineage"),
        ("/static/none.js", 404, "no such file"),
        ("/static/..%2f__init__.py", 404, "no such"),
    ],
)
def test_what_is_refused(client: httpx.Client, path: str, status: int, text: str) -> None:
    found = fault(client.get(path))
    assert found[0] == status
    assert text in found[1]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 400, "no JSON"),
        (b"{", 400, "no JSON"),
        (b"[" * 30_000, 422, "Expected `object`"),
        (b'{"replica": "\xff"}', 400, "no JSON"),
        (b"[]", 422, "Expected `object`"),
        (b"{}", 422, "`replica`"),
        (b'{"replica": "a b"}', 422, "$.replica"),
        (b'{"replica": "a\\n"}', 422, "$.replica"),
        (b'{"replica": "a", "version": -1}', 422, "$.version"),
        (b'{"replica": "a", "version": 1e400}', 422, "$.version"),
        (b'{"replica": "a", "fetched_bytes": 9007199254740992}', 422, "$.fetched_bytes"),
        (b'{"replica": "a", "pause_s": NaN}', 400, "no JSON"),
        (b'{"replica": "a", "phase": "sleep"}', 422, "$.phase"),
        (b'{"replica": "a", "updates": [{"version": 1, "ended_ms": "x"}]}', 422, "ended_ms"),
        (b" " * (MAX_HEARTBEAT_BYTES + 1), 413, f"{MAX_HEARTBEAT_BYTES} bytes"),
    ],
)
def test_bodies_that_are_refused(client: httpx.Client, body: bytes, status: int, text: str) -> None:
    kind = {"content-type": "application/json"}
    for content in (body, iter([body[:10], body[10:]])):
        found = fault(client.post(f"{STREAM}/heartbeats", content=content, headers=kind))
        assert found[0] == status
        assert text in found[1]
    assert client.get(f"{STREAM}/replicas").json()["replicas"] == []


@pytest.mark.parametrize("share", ["1e-05", "+0.5", "0.30000000000000004", "1E-3"])
def test_numbers_as_anybody_writes_them(client: httpx.Client, share: str) -> None:
    assert client.get(f"{STREAM}/ready", params={"share": share}).status_code in (200, 503)


def test_a_list_from_its_beginning(client: httpx.Client) -> None:
    assert client.get(f"{STREAM}/replicas?after=").status_code == 200


def test_a_body_says_that_it_is_json(client: httpx.Client) -> None:
    # What a form of a web page elsewhere could send.
    answer = client.post(f"{STREAM}/signal", content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415


def test_limits_of_the_fleet(client: httpx.Client) -> None:
    for number in range(40):
        assert said(client, beat(f"r{number}")).status_code == 200
    assert fault(said(client, beat("one-more"))) == (
        429,
        "40 replicas are known, and no more are taken",
    )
    assert said(client, beat("r0", 5)).status_code == 200
    for number in range(40):
        client.delete(f"{STREAM}/replicas/r{number}")
    assert fault(client.delete(f"{STREAM}/replicas/r0"))[0] == 404


def test_methods(client: httpx.Client) -> None:
    answer = client.request("PATCH", STREAM)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD, OPTIONS"
    both = client.request("DELETE", "/hot_load/v1/models/hot_load")
    assert both.headers["allow"] == "GET, HEAD, OPTIONS, POST"
    assert client.options(f"{STREAM}/heartbeats").headers["allow"] == "OPTIONS, POST"
    for path in (STREAM, f"{STREAM}/events", f"{STREAM}/wait"):
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    assert client.head("/v1/streams/none").status_code == 404


def test_roles(trainer: Trainer) -> None:
    hub = Hub({"policy": trainer.url}, tokens=known_tokens(), poll_s=0.05)
    asked = [
        ("GET", STREAM, {Role.READ, Role.FOLLOW, Role.PUBLISH}, 200),
        ("GET", "/metrics", {Role.READ, Role.FOLLOW, Role.PUBLISH}, 200),
        ("POST", f"{STREAM}/heartbeats", {Role.FOLLOW}, 200),
        ("DELETE", f"{STREAM}/replicas/a", {Role.FOLLOW}, 204),
        ("POST", f"{STREAM}/signal", {Role.PUBLISH}, 202),
    ]
    with calling(hub) as client:
        for path in ("/health", "/openapi.json"):
            assert client.get(path).status_code == 200
        for method, path, allowed, status in asked:
            body = {"replica": "a"} if path.endswith("heartbeats") else {}
            given: dict[str, Any] = {"json": body} if method == "POST" else {}
            refused = client.request(method, path, **given)
            assert fault(refused)[0] == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            wrong = {"authorization": "Bearer none-0123456789abcdef"}
            assert client.request(method, path, headers=wrong, **given).status_code == 401
            for role, token in TOKENS.items():
                headers = {"authorization": f"Bearer {token}"}
                answer = client.request(method, path, headers=headers, **given)
                assert answer.status_code == (status if role in allowed else 403)


def test_the_dashboard_comes_with_a_strict_policy(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    again = client.get("/", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_stream_that_is_not_there_yet_and_then_is(tmp_path: Path) -> None:
    hub = Hub({"policy": str(tmp_path / "policy")}, poll_s=0.05)
    with calling(hub) as client:
        status = until(lambda: (s := client.get(STREAM).json())["fault"] and s)
        assert (status["head"], status["fault"]["code"]) == (None, "not-found")
        ready = client.get(f"{STREAM}/ready")
        assert (ready.status_code, ready.json()["reason"]) == (
            503,
            "the hub has not read the stream yet",
        )
        assert said(client, beat("a", 7)).json()["head"] is None
        with training(tmp_path, model="small") as trainer:
            trainer.publish()
            status = head_at(client, 1)
        assert (status["fault"], status["model"]) == (None, "small")


@pytest.mark.parametrize(
    ("host", "is_answered"),
    [
        ("localhost:8765", True),
        ("LOCALHOST.", True),
        ("127.0.0.2", True),
        ("[::1]:8765", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example:8765", False),
        ("0.0.0.0:8765", False),
        ("[fe80::1]", False),
        ("[::1", False),
    ],
)
def test_without_tokens_only_names_of_this_machine_are_answered(
    client: httpx.Client, host: str, is_answered: bool
) -> None:
    for path in ("/", "/v1/streams", "/openapi.json"):
        status = client.get(path, headers={"host": host}).status_code
        assert status == (200 if is_answered else 421)
    answer = client.post(f"{STREAM}/signal", json={"version": 1}, headers={"host": host})
    assert answer.status_code == (202 if is_answered else 421)


def test_with_tokens_any_name_is_answered(trainer: Trainer) -> None:
    hub = Hub({"policy": trainer.url}, tokens=known_tokens(), poll_s=3600, limits=PATIENT)
    with calling(hub, TOKENS[Role.READ]) as client:
        answer = client.get("/v1/streams", headers={"host": "hub.example"})
        assert answer.status_code == 200


def test_a_newer_replica_may_say_more(client: httpx.Client) -> None:
    more = {"of_the_future": 1}
    known = {"version": 3, "ended_ms": 1, **more}
    fault = {"code": "x", "message": "y", "at_ms": 1, **more}
    body = {"replica": "new", "updates": [known], "fault": fault, **more}
    assert post(client, f"{STREAM}/heartbeats", body).status_code == 200
    assert post(client, f"{STREAM}/signal", {"version": 1, **more}).status_code == 202
    assert client.delete(f"{STREAM}/replicas/new").status_code == 204


def test_what_a_restarted_hub_knows_again_and_what_not(trainer: Trainer) -> None:
    """The bucket and a heartbeat say all that counts; who has not spoken yet is not known."""

    def shown(client: httpx.Client, *said_of: str) -> dict[str, Any]:
        head_at(client, 5)
        for name in said_of:
            said(client, beat(name, 4, lineage=lineage_of(client), region="eu"))
        until(lambda: len(client.get(f"{STREAM}/versions").json()["versions"]) == 5)
        status = client.get(STREAM).json()
        for region in status["regions"]:
            del region["staleness_s_max"]
        del status["looked_s"]
        return {"status": status, "versions": client.get(f"{STREAM}/versions").json()}

    def make() -> Hub:
        return Hub({"policy": trainer.url}, poll_s=0.05, limits=PATIENT)

    with calling(make()) as client:
        shown(client, "a", "b")
        said(client, beat("a", 5, lineage=lineage_of(client), region="eu", updates=[update(5)]))
        before = shown(client, "a", "b")
        assert len(client.get(f"{STREAM}/updates").json()["updates"]) == 1
    with calling(make()) as client:
        alone = shown(client, "a")
        assert alone["versions"] == before["versions"]
        assert alone["status"]["counts"]["ready"] == 1
        assert client.get(f"{STREAM}/ready?replica=b").status_code == 404
        assert shown(client, "a", "b") == before
        assert client.get(f"{STREAM}/updates").json()["updates"] == []
