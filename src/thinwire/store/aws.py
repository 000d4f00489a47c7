"""Where S3 access comes from: the environment first, then an AWS profile, then the machine.

What the environment says obstore reads by itself, as it does the machine's own role (web identity,
container, instance). Only profiles, which it does not know, are read here.
"""

from __future__ import annotations

import configparser
import importlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from thinwire.errors import InvalidArgument

_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
# A profile with one of these gets its keys from elsewhere: only AWS's own code can follow it.
_INDIRECT = (
    "role_arn",
    "sso_session",
    "sso_start_url",
    "sso_account_id",
    "credential_process",
    "credential_source",
    "web_identity_token_file",
    "login_session",
)
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def s3_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """What to pass to obstore's ``S3Store`` beside the bucket.

    Raises:
        InvalidArgument: A profile is missing, broken, or needs boto3; or the endpoint is no URL.
    """
    has_keys = bool(environment.get("AWS_ACCESS_KEY_ID"))
    name, profile = _profile(environment)
    options: dict[str, Any] = {}
    if not has_keys and not environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        options |= _credentials(name, profile)
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    region = region or profile.get("region")
    if region:
        options["region"] = region
    named = (environment.get(variable) for variable in _ENDPOINT_VARIABLES)
    endpoint = next(filter(None, named), None) or profile.get("endpoint_url")
    if endpoint:
        options["endpoint"] = _checked_endpoint(endpoint)
    if endpoint and endpoint.lower().startswith("http://"):
        options["client_options"] = {"allow_http": True}
    elif environment.get("AWS_CA_BUNDLE"):
        options["client_options"] = {"root_certificate": _certificates(environment)}
    return options


def _certificates(environment: Mapping[str, str]) -> bytes:
    path = Path(environment["AWS_CA_BUNDLE"])
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"the certificates at {path} cannot be read ({error.strerror})",
            hint="Check AWS_CA_BUNDLE, or unset it to use the system's own",
        ) from None


def _checked_endpoint(endpoint: str) -> str:
    # Not repeated in errors: whoever puts credentials into it may also get the syntax wrong.
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_url = is_url and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url or "@" in endpoint or "?" in endpoint:
        raise InvalidArgument(
            "the S3 endpoint is not a plain http or https URL",
            hint="Set AWS_ENDPOINT_URL to something like https://storage.example.com, and give"
            " credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ) from None
    return endpoint.rstrip("/")


def _profile(environment: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The profile's name and what both files say of it; the credentials file wins."""
    asked = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")
    name = asked or "default"
    config = _read(environment, "AWS_CONFIG_FILE", "config")
    credentials = _read(environment, "AWS_SHARED_CREDENTIALS_FILE", "credentials")
    sections = [
        config[section]
        for section in (name if name == "default" else "", f"profile {name}")
        if config.has_section(section)
    ]
    if credentials.has_section(name):
        sections.append(credentials[name])
    if asked and not sections:
        raise InvalidArgument(
            f"there is no AWS profile {asked!r}",
            hint="Check AWS_PROFILE, AWS_CONFIG_FILE and AWS_SHARED_CREDENTIALS_FILE",
        )
    merged: dict[str, str] = {}
    for section in sections:
        merged |= dict(section)
    endpoint = _service_endpoint(config, merged.get("services"))
    return name, merged | ({"endpoint_url": endpoint} if endpoint else {})


def _service_endpoint(config: configparser.RawConfigParser, services: str | None) -> str | None:
    """The S3 endpoint of a ``[services NAME]`` section: indented lines below ``s3 =``."""
    section = f"services {services}"
    if services is None or not config.has_section(section):
        return None
    for line in config[section].get("s3", "").splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "endpoint_url":
            return value.strip()
    return None


def _read(
    environment: Mapping[str, str], variable: str, default_name: str
) -> configparser.RawConfigParser:
    home = Path(environment.get("HOME") or "~")
    named = environment.get(variable)
    path = Path(named) if named else home / ".aws" / default_name
    with suppress(RuntimeError):  # a user without a home
        path = path.expanduser()
    parser = configparser.RawConfigParser(strict=False, default_section="", interpolation=None)
    broken = False
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError):
        # Not chained and not quoted: such a message holds a line of the file.
        broken = True
    if broken:
        raise InvalidArgument(
            f"the AWS file {path} cannot be read", hint="Mend it, or set the AWS_ variables"
        )
    return parser


def _credentials(name: str, profile: Mapping[str, str]) -> dict[str, Any]:
    if any(option in profile for option in _INDIRECT):
        return {"credential_provider": _boto3_provider(name)}
    if "aws_access_key_id" not in profile and "aws_secret_access_key" not in profile:
        return {}
    if not (profile.get("aws_access_key_id") and profile.get("aws_secret_access_key")):
        raise InvalidArgument(
            f"the AWS profile {name!r} has only half a key",
            hint="It needs aws_access_key_id and aws_secret_access_key",
        )
    return {ours: profile[theirs] for theirs, ours in _KEYS.items() if profile.get(theirs)}


def _boto3_provider(name: str) -> Any:
    try:
        boto3 = importlib.import_module("boto3")
        provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider
    except ImportError:
        raise InvalidArgument(
            f"the AWS profile {name!r} gets its keys elsewhere (SSO, a role or a program)",
            hint="Install boto3, which knows how (pip install boto3), or set AWS_ACCESS_KEY_ID"
            " and AWS_SECRET_ACCESS_KEY",
        ) from None
    failed = ""
    try:
        return provider(boto3.Session(profile_name=name))
    except Exception as error:
        failed = type(error).__name__
    raise InvalidArgument(
        f"boto3 found no keys for the AWS profile {name!r} ({failed})",
        hint="Log in first, e.g. aws sso login",
    )
