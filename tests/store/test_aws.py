from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import InvalidArgument
from thinwire.store import Store, open_store
from thinwire.store.aws import s3_options

SECRET = "profilesecret/AND+more"


@pytest.fixture
def aws(tmp_path: Path) -> dict[str, str]:
    """An environment whose AWS files can be written; see :func:`write`."""
    return {"HOME": str(tmp_path)}


def write(aws: dict[str, str], name: str, text: str) -> None:
    folder = Path(aws["HOME"]) / ".aws"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)


def keys(name: str = "KEY") -> str:
    return f"aws_access_key_id = {name}\naws_secret_access_key = {SECRET}\n"


def test_nothing_is_set(aws: dict[str, str]) -> None:
    assert s3_options(aws) == {}


def test_the_environment_is_left_to_obstore(aws: dict[str, str]) -> None:
    write(aws, "credentials", f"[default]\n{keys()}")
    aws |= {"AWS_ACCESS_KEY_ID": "E", "AWS_SECRET_ACCESS_KEY": "S", "AWS_REGION": "eu-1"}
    assert s3_options(aws) == {"region": "eu-1"}


def test_the_default_profile(aws: dict[str, str]) -> None:
    write(aws, "credentials", f"[default]\n{keys()}aws_session_token = T%T\n")
    write(aws, "config", "[default]\nregion = eu-2\nendpoint_url = http://h:1/\n")
    assert s3_options(aws) == {
        "access_key_id": "KEY",
        "secret_access_key": SECRET,
        "session_token": "T%T",
        "region": "eu-2",
        "endpoint": "http://h:1",
        "client_options": {"allow_http": True},
    }


def test_a_named_profile_and_files_elsewhere(aws: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "c").write_text(f"[default]\n{keys('NO')}[me]\n{keys('ME')}")
    (tmp_path / "g").write_text("[profile me]\nregion = r\n[me]\nregion = wrong\n")
    aws |= {
        "AWS_PROFILE": "me",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "c"),
        "AWS_CONFIG_FILE": "~/g",
        "HOME": str(tmp_path),
    }
    aws["AWS_CONFIG_FILE"] = str(tmp_path / "g")
    found = s3_options(aws)
    assert (found["access_key_id"], found["region"]) == ("ME", "r")


def test_keys_in_the_config_file(aws: dict[str, str]) -> None:
    write(aws, "config", f"[profile me]\n{keys('CONFIG')}")
    assert s3_options(aws | {"AWS_PROFILE": "me"})["access_key_id"] == "CONFIG"
    write(aws, "credentials", f"[me]\n{keys('CREDENTIALS')}")
    assert s3_options(aws | {"AWS_PROFILE": "me"})["access_key_id"] == "CREDENTIALS"


def test_the_environment_wins_over_the_profile(aws: dict[str, str]) -> None:
    write(aws, "config", "[default]\nregion = p\nendpoint_url = http://profile\n")
    aws |= {"AWS_DEFAULT_REGION": "d", "AWS_ENDPOINT_URL": "https://general"}
    assert s3_options(aws) == {"region": "d", "endpoint": "https://general"}
    aws |= {"AWS_REGION": "r", "AWS_ENDPOINT_URL_S3": "https://special"}
    assert s3_options(aws) == {"region": "r", "endpoint": "https://special"}


def test_an_endpoint_in_a_services_section(aws: dict[str, str]) -> None:
    text = "[default]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = https://s\n"
    write(aws, "config", text)
    assert s3_options(aws) == {"endpoint": "https://s"}


def test_web_identity_wins_over_keys_in_files(aws: dict[str, str]) -> None:
    write(aws, "credentials", f"[default]\n{keys()}")
    assert s3_options(aws | {"AWS_WEB_IDENTITY_TOKEN_FILE": "/t"}) == {}


@pytest.mark.parametrize(
    "line",
    [
        "role_arn = arn:aws:iam::1:role/r\nsource_profile = default",
        "sso_session = s",
        "sso_start_url = https://x",
        "credential_process = /bin/keys",
        "credential_source = Environment",
    ],
)
def test_a_profile_that_needs_boto3(
    aws: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(aws, "config", f"[profile me]\nregion = r\n{line}\n")
    aws["AWS_PROFILE"] = "me"
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InvalidArgument, match="boto3"):
        s3_options(aws)
    asked = fake_boto3(monkeypatch)
    assert s3_options(aws) == {"region": "r", "credential_provider": "provider"}
    assert asked == ["me"]


def test_keys_in_the_environment_make_boto3_needless(
    aws: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(aws, "config", "[default]\nsso_session = s\n")
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert s3_options(aws | {"AWS_ACCESS_KEY_ID": "E"}) == {}


def test_boto3_that_finds_nothing(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    write(aws, "config", "[default]\nsso_session = s\n")
    fake_boto3(monkeypatch, fails=True)
    with pytest.raises(InvalidArgument, match="RuntimeError") as caught:
        s3_options(aws)
    assert SECRET not in str(caught.value)
    assert caught.value.__context__ is None


def fake_boto3(monkeypatch: pytest.MonkeyPatch, *, fails: bool = False) -> list[str]:
    asked: list[str] = []

    def provider(session: Any) -> str:
        if fails:
            raise RuntimeError(SECRET)
        return "provider"

    boto3 = types.SimpleNamespace(Session=lambda profile_name: asked.append(profile_name))
    monkeypatch.setitem(sys.modules, "boto3", boto3)
    module = types.SimpleNamespace(Boto3CredentialProvider=provider)
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", module)
    return asked


def test_what_is_wrong_with_files_is_said_without_their_content(aws: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="no AWS profile 'none'"):
        s3_options(aws | {"AWS_PROFILE": "none"})
    write(aws, "credentials", f"[default]\naws_secret_access_key = {SECRET}\n")
    with pytest.raises(InvalidArgument, match="half a key") as half:
        s3_options(aws)
    write(aws, "credentials", f"{SECRET}\n")
    with pytest.raises(InvalidArgument, match="cannot be read") as broken:
        s3_options(aws)
    for caught in (half, broken):
        assert SECRET not in str(caught.value)
        assert caught.value.__context__ is None


@pytest.mark.parametrize("endpoint", ["h:1", "ftp://h", "http://", f"https://u:{SECRET}@h"])
def test_a_bad_endpoint(aws: dict[str, str], endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="endpoint") as caught:
        s3_options(aws | {"AWS_ENDPOINT_URL": endpoint})
    assert SECRET not in str(caught.value)


def test_certificates(aws: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(b"pem")
    aws["AWS_CA_BUNDLE"] = str(tmp_path / "ca.pem")
    assert s3_options(aws) == {"client_options": {"root_certificate": b"pem"}}
    with pytest.raises(InvalidArgument, match="AWS_CA_BUNDLE"):
        s3_options(aws | {"AWS_CA_BUNDLE": str(tmp_path / "none")})


def test_a_profile_reaches_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from .lying_server import Answer, lying_server

    with lying_server() as server:
        aws = {"HOME": str(tmp_path)}
        write(aws, "credentials", f"[me]\n{keys('PROFILEKEY')}")
        write(aws, "config", f"[profile me]\nregion = mars-1\nendpoint_url = {server.endpoint}\n")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("AWS_PROFILE", "me")
        server.answers = [Answer(200, b"abc")]
        store: Store = open_store("s3://bucket/pre", retry_s=0)
        assert store.get("a", limit_bytes=9) == b"abc"
        assert SECRET not in repr(store)
        _, path, headers = server.asked[0]
        assert path == "/bucket/pre/a"
        assert "Credential=PROFILEKEY/" in headers["authorization"]
        assert "/mars-1/s3/" in headers["authorization"]
