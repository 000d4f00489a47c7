"""deploy/s3 on a server that enforces it: each role does its work, and nothing beyond it."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import httpx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for servers.py, which rooms share

from servers import S3Server, seaweedfs
from thinwire import Follower, Maintainer, Policy, Publisher, fsck, open_stream
from thinwire.errors import AccessDenied, NotFound
from thinwire.follow.stream import Stream
from thinwire.maintain import set_policy
from thinwire.store import Store, open_store
from thinwire.store.wrappers import StoreWrapper

from .hubs import READ, hub_at, relay_at, until

POLICIES = Path(__file__).resolve().parents[2] / "deploy" / "s3"
ROLES = ("publisher", "maintainer", "follower", "hub")
# A stream lives in the first; in the second keys are tried that would not do a stream good.
TRIED = "tried"
BUCKETS = ("thinwire", TRIED)
LINEAGE = "0" * 32
# SeaweedFS does not know this key and takes it for absent; and the tests speak plain HTTP to it.
NOT_ENFORCED = {"CommitPointsAreCreatedAndNeverReplaced", "NothingOverPlainHttp"}
POLICY = Policy(anchor_every=3, merge_levels=(2,))
# All but the newest is dropped at once, and removed in the next round.
SHORT = Policy(anchor_every=3, merge_levels=(2,), keep_versions=1, keep_age_s=0, grace_s=0)


def document(name: str, bucket: str) -> dict[str, Any]:
    """A policy of deploy/s3 for this bucket."""
    return json.loads((POLICIES / f"{name}.json").read_text().replace("BUCKET", bucket))


class Roles(NamedTuple):
    """One server, and a key for each role."""

    server: S3Server
    assume: Callable[[str], None]

    def store(self, role: str, url: str) -> Store:
        """A store as a role sees it."""
        self.assume(role)
        return open_store(url, retry_s=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    folder = tmp_path_factory.mktemp("weed")
    names = {role: [f"{role}-{bucket}" for bucket in BUCKETS] for role in ROLES}
    identities: list[dict[str, Any]] = [
        {"name": role, "credentials": [keys_of(role)], "policyNames": names[role]} for role in ROLES
    ]
    admin = {"accessKey": "testkey", "secretKey": "testsecret1234"}
    identities.append({"name": "admin", "credentials": [admin], "actions": ["Admin"]})
    policies = [
        {"name": f"{role}-{bucket}", "content": json.dumps(document(role, bucket))}
        for role in ROLES
        for bucket in BUCKETS
    ]
    config = folder / "identities.json"
    config.write_text(json.dumps({"identities": identities, "policies": policies}))
    with seaweedfs(folder, f"-s3.config={config}") as server:
        assert ask_signed(server, "PUT", f"/{TRIED}") < 300
        for bucket in BUCKETS:
            fences = document("bucket", bucket)
            fences["Statement"] = [s for s in fences["Statement"] if s["Sid"] not in NOT_ENFORCED]
            assert (
                ask_signed(server, "PUT", f"/{bucket}", "policy", json.dumps(fences).encode()) < 300
            )
        yield server


@pytest.fixture
def roles(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Roles:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)

    def assume(role: str) -> None:
        keys = keys_of(role)
        if role == "admin":
            keys = {"accessKey": server.key, "secretKey": server.secret}
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys["accessKey"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys["secretKey"])

    return Roles(server, assume)


def keys_of(role: str) -> dict[str, str]:
    return {"accessKey": f"{role}key", "secretKey": f"{role}secret1234"}


def ask_signed(server: S3Server, method: str, path: str, query: str = "", body: bytes = b"") -> int:
    """Ask as the administrator, by AWS's Signature Version 4: no client here sets policies."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    digest = hashlib.sha256(body).hexdigest()
    headers = {
        "host": urlsplit(server.endpoint).netloc,
        "x-amz-content-sha256": digest,
        "x-amz-date": now,
    }
    asked = f"{quote(query)}=" if query else ""
    lines = [method, path, asked, *(f"{name}:{value}" for name, value in headers.items())]
    lines += ["", ";".join(headers), digest]
    scope = f"{now[:8]}/us-east-1/s3/aws4_request"
    request = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    key = f"AWS4{server.secret}".encode()
    for part in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{request}"):
        key = hmac.digest(key, part.encode(), "sha256")
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={server.key}/{scope}, SignedHeaders={';'.join(headers)}, "
        f"Signature={key.hex()}"
    )
    with httpx.Client(trust_env=False) as client:
        url = f"{server.endpoint}{path}{'?' if query else ''}{query}"
        return int(client.request(method, url, content=body, headers=headers).status_code)


def test_each_role_does_its_work(roles: Roles, tmp_path: Path) -> None:
    url = f"{roles.server.url}/run"
    weights = np.random.default_rng(0).normal(0, 0.02, 100_000).astype(np.float16)
    roles.assume("publisher")
    with Publisher(open_stream(url, policy=POLICY), tmp_path / "p", maintain=False) as publisher:
        for step in range(6):
            weights[step::1000] *= np.float16(1.01)
            publisher.publish({"w": weights}, step=step)
    roles.assume("maintainer")
    with Maintainer(url, tmp_path / "m") as maintainer:
        done = maintainer.run_once()
    assert done.failed_count == 0
    assert done.merge_count > 0
    assert done.anchor_count > 0
    roles.assume("publisher")
    set_policy(open_stream(url), SHORT)
    roles.assume("maintainer")
    with Maintainer(url, tmp_path / "m") as maintainer:
        # Objects have whole seconds there: what is as old as this second is not old yet.
        until(lambda: maintainer.run_once().removed.object_count > 0, "something is removed")
    roles.assume("follower")
    stream = open_stream(url)
    with Follower(stream, tmp_path / "f") as follower:
        assert follower.catch_up().step == 5
        # That is all that it may write.
        assert leases(stream) == 1
    assert fsck(open_stream(url)).is_whole
    # A relay needs what a follower needs, and leaves one lease for all who read through it.
    with relay_at(roles.store("follower", url), tmp_path / "relay") as relay:
        with Follower(open_stream(url, relay=relay), tmp_path / "r") as follower:
            assert follower.catch_up().step == 5
            until(lambda: leases(stream) == 1, "the relay has left its lease")
        until(lambda: leases(stream) == 0, "and taken it back")
    roles.assume("hub")
    # `fsck` is for those who may read the weights; all that the hub needs are records.
    with hub_at(open_stream(url)) as hub, httpx.Client(trust_env=False) as client:
        client.headers["authorization"] = f"Bearer {READ}"

        def steps() -> list[int]:
            found = client.get(f"{hub}/v1/streams/policy/versions").json()
            return [version["step"] for version in found["versions"]]

        until(lambda: steps() == [5, 4, 3, 2, 1, 0], "the hub has read all versions")
        assert client.get(f"{hub}/v1/streams/policy").json()["fault"] is None


def leases(stream: Stream) -> int:
    """How many followers say what they need."""
    return sum(entry.key.startswith("leases/0") for entry in stream.store.list("leases/"))


DELTA = f"{LINEAGE}/deltas/000000000001-000000000002/x.tw"
ANCHOR = f"{LINEAGE}/anchors/000000000001-0123456789abcdef/model.safetensors"
ANCHOR_MANIFEST = f"{LINEAGE}/anchors/000000000001.json"
MANIFEST = f"{LINEAGE}/manifests/000000000009.json"
MERGE = f"{LINEAGE}/merges/000000000001-000000000005.json"
CATALOG = f"{LINEAGE}/catalog.json"
LEASE = f"leases/000000000001-{LINEAGE}.json"
MAINTAINER = "leases/maintainer.json"
STREAM, HEAD = "stream.json", "head.json"
ANCHORS = {ANCHOR, ANCHOR_MANIFEST}
EVERYTHING = {STREAM, HEAD, DELTA, MANIFEST, MERGE, CATALOG, LEASE, MAINTAINER, *ANCHORS}
MAY_READ = {"hub": {STREAM, HEAD, MANIFEST}}
MAY_PUT = {
    "publisher": {STREAM, HEAD, DELTA, MANIFEST, *ANCHORS},
    "maintainer": {DELTA, MERGE, CATALOG, LEASE, MAINTAINER, *ANCHORS},
    "follower": {LEASE},
    "hub": set(),
}
MAY_DELETE = {
    "publisher": {DELTA, *ANCHORS},
    "maintainer": {DELTA, MERGE, LEASE, MAINTAINER, *ANCHORS},
    "follower": {LEASE},
    "hub": set(),
}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_so_much_and_no_more(roles: Roles, role: str) -> None:
    admin = roles.store("admin", f"s3://{TRIED}")
    for key in EVERYTHING:
        admin.put(f"run/{key}", b"{}")
        admin.put(f"other/{key}", b"{}")
    store = roles.store(role, f"s3://{TRIED}")

    def allowed(call: Callable[[str], object], folder: str = "run") -> set[str]:
        return {key for key in EVERYTHING if is_allowed(partial(call, f"{folder}/{key}"))}

    assert allowed(lambda key: store.get(key, limit_bytes=100)) == MAY_READ.get(role, EVERYTHING)
    assert allowed(lambda key: store.put(key, b"{}")) == MAY_PUT[role]
    assert allowed(lambda key: store.delete([key])) == MAY_DELETE[role]
    assert allowed(lambda key: store.get(key, limit_bytes=100), "other") == set()
    assert allowed(lambda key: store.put(key, b"{}"), "other") == set()
    # What is missing is missing, not forbidden: a follower looks for what is not there yet.
    with pytest.raises(NotFound):
        store.get("run/" + MANIFEST.replace("9", "8"), limit_bytes=100)


def is_allowed(call: Callable[[], object]) -> bool:
    try:
        call()
    except AccessDenied:
        return False
    return True


def test_versions_stay_whoever_asks(roles: Roles) -> None:
    admin = roles.store("admin", f"s3://{TRIED}/run")
    for key in (STREAM, MANIFEST):
        admin.put(key, b"{}")
        # One at a time: SeaweedFS asks no bucket's policy about the keys of a bulk deletion.
        assert ask_signed(roles.server, "DELETE", f"/{TRIED}/run/{key}") == 403
    admin.put(MERGE, b"{}")
    assert ask_signed(roles.server, "DELETE", f"/{TRIED}/run/{MERGE}") == 204


def test_plain_http_is_refused(roles: Roles) -> None:
    fences = document("bucket", "plain")
    fences["Statement"] = [s for s in fences["Statement"] if s["Sid"] == "NothingOverPlainHttp"]
    assert ask_signed(roles.server, "PUT", "/plain") < 300
    admin = roles.store("admin", "s3://plain")
    admin.put("a", b"{}")
    assert ask_signed(roles.server, "PUT", "/plain", "policy", json.dumps(fences).encode()) < 300
    with pytest.raises(AccessDenied):
        admin.get("a", limit_bytes=100)


class Recorder(StoreWrapper):
    """Writes down which keys are created, which are put and which are deleted."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.created: set[str] = set()
        self.replaced: set[str] = set()

    def put(self, key: str, data: bytes) -> None:
        self.replaced.add(key)
        super().put(key, data)

    def put_file(self, key: str, path: Path) -> None:
        self.replaced.add(key)
        super().put_file(key, path)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self.created.add(key)
        super().put_if_absent(key, data)


def test_what_must_be_created_is_what_is_created(tmp_path: Path) -> None:
    store = Recorder(open_store(str(tmp_path / "bucket")))
    stream = Stream(store, policy=POLICY)
    weights = np.arange(1000, dtype=np.float32)
    with (
        Publisher(stream, tmp_path / "p", maintain=False) as publisher,
        Maintainer(stream, tmp_path / "m") as maintainer,
        Follower(stream, tmp_path / "f") as follower,
    ):
        for step in range(6):
            weights[step] += 1
            publisher.publish({"w": weights}, step=step)
        maintainer.run_once()
        follower.catch_up()
    (fence,) = (
        statement
        for statement in document("bucket", "b")["Statement"]
        if statement["Sid"] == "CommitPointsAreCreatedAndNeverReplaced"
    )
    assert fence["Condition"]["Null"] == {"s3:if-none-match": "true"}
    is_fenced = [matcher(resource) for resource in fence["Resource"]]
    fenced = {
        key
        for key in store.created | store.replaced
        if any(found(f"arn:aws:s3:::b/run/{key}") for found in is_fenced)
    }
    # stream.json is created once, and put again where a policy is changed.
    assert fenced == store.created - {STREAM}
    assert {key.split("/")[1] for key in fenced} == {"manifests", "merges", "anchors"}
    assert not fenced & store.replaced


def matcher(resource: str) -> Callable[[str], Any]:
    """AWS's wildcards: they go over slashes."""
    pattern = re.escape(resource).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(pattern).fullmatch


def test_documents_have_what_aws_asks_for() -> None:
    for path in sorted(POLICIES.glob("*.json")):
        if path.stem == "lifecycle":
            continue
        found = document(path.stem, "b")
        assert found["Version"] == "2012-10-17"
        names = [statement["Sid"] for statement in found["Statement"]]
        assert len(set(names)) == len(names)
        # A Sid is letters and digits; a bucket's policy is at most 20 KB, an inline one 10,240.
        assert all(re.fullmatch(r"[A-Za-z0-9]+", name) for name in names)
        assert len(path.read_bytes()) < 10_240
        for statement in found["Statement"]:
            assert statement["Effect"] == ("Deny" if path.stem == "bucket" else "Allow")
            assert ("Principal" in statement) == (path.stem == "bucket")


def test_rules_expire_nothing_that_is_current_but_leases() -> None:
    rules = json.loads((POLICIES / "lifecycle.json").read_text())["Rules"]
    expiring = [rule["Filter"]["Prefix"] for rule in rules if "Days" in rule.get("Expiration", {})]
    assert expiring == ["run/leases/"]
    assert len({rule["ID"] for rule in rules}) == len(rules)
