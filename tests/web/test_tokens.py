"""Who may do what."""

from pathlib import Path

import pytest

from thinwire.errors import InvalidArgument, NotFound
from thinwire.web import NotAllowed, Role, Tokens, check_exposure, is_loopback, read_token

READ, FOLLOW, PUBLISH = "r" * 16, "f" * 24, "p" * 512


def tokens(tmp_path: Path, text: str) -> Tokens:
    path = tmp_path / "tokens"
    path.write_text(text)
    return Tokens.read(path)


class TestTokens:
    def test_roles(self, tmp_path: Path) -> None:
        found = tokens(
            tmp_path,
            f"# people\nread {READ} grafana\n\nfollow\t{FOLLOW} # eu\n  publish {PUBLISH}\n",
        )
        assert found
        assert found.grant_of(f"Bearer {READ}").roles == {Role.READ}
        assert found.grant_of(f"bearer  {FOLLOW} ").roles == {Role.READ, Role.FOLLOW}
        assert found.grant_of(f"Bearer {PUBLISH}").roles == {Role.READ, Role.PUBLISH}

    @pytest.mark.parametrize(
        "header",
        [
            "",
            READ,
            f"Basic {READ}",
            f"Bearer {READ}x",
            f"Bearer {READ[:-1]}",
            "Bearer",
            "Bearer ",
            "Bearer " + "a" * 100_000,
            "Bearer \udcff\udcfe",
            "Bearer schlüsselschlüssel",
        ],
    )
    def test_what_is_no_token(self, tmp_path: Path, header: str) -> None:
        assert tokens(tmp_path, f"read {READ}").grant_of(header).roles == frozenset()

    def test_for_whom_a_token_may_speak(self, tmp_path: Path) -> None:
        found = tokens(
            tmp_path,
            f"follow {READ} samplers-eu region=eu-* replica=*.eu\nfollow {FOLLOW} replica=us-*\n"
            f"publish {PUBLISH} trainer\n",
        )
        eu, us = (found.grant_of(f"Bearer {token}") for token in (READ, FOLLOW))
        assert eu.is_for("a.eu", "eu-west")
        assert us.is_for("us-1", "us")
        assert us.is_for("us-1", "eu-west")
        assert eu.is_for("a.eu")
        for replica, region in [
            ("a.eu", "us"),
            ("a.us", "eu-west"),
            ("a.eu", ""),
            ("a.eu", "EU-1"),
        ]:
            assert not eu.is_for(replica, region)
        assert not us.is_for("whoever", "us")
        assert not eu.is_for("a.us")
        assert found.grant_of(f"Bearer {PUBLISH}").is_for("any", "")
        assert Tokens().grant_of("").is_for("any", "anywhere")

    def test_who_is_refused(self, tmp_path: Path) -> None:
        found = tokens(tmp_path, f"read {READ}\nfollow {FOLLOW}\n")
        assert Role.FOLLOW in found.check(f"Bearer {FOLLOW}", Role.FOLLOW).roles
        for header, role, status, says in [
            ("", Role.READ, 401, "is needed"),
            (f"Bearer {PUBLISH}", Role.READ, 401, "no token that is known"),
            (f"Bearer {READ}", Role.FOLLOW, 403, "of the role follow"),
        ]:
            with pytest.raises(NotAllowed, match=says) as refused:
                found.check(header, role)
            assert refused.value.status == status
            assert refused.value.hint

    @pytest.mark.parametrize(("mode", "is_told"), [(0o600, False), (0o440, False), (0o644, True)])
    def test_a_file_that_everybody_may_read_is_told(
        self, mode: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "tokens"
        path.write_text(f"read {READ}")
        path.chmod(mode)
        Tokens.read(path)
        assert len(caplog.records) == is_told
        assert ("may use the token" in caplog.text) == is_told
        assert READ not in caplog.text

    def test_without_any_everything_is_allowed(self) -> None:
        assert not Tokens()
        assert Tokens().grant_of("").roles == frozenset(Role)

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "no token"),
            ("# nothing\n", "no token"),
            (f"admin {READ}", "line 1: no role"),
            (f"read {READ}\nfollow", "line 2: no role"),
            ("read short", "5 letters"),
            ("read " + "x" * 513, "513 letters"),
            ("read " + "x" * 15 + "\x07", "printable"),
            (f"read {READ}\nfollow {READ}", "line 2: the token stands twice"),
            ("read " + "ä" * 20, "no file of tokens"),
            (f"follow {READ} eu regions=eu", "'regions=eu' is neither"),
            (f"follow {READ} region=eu region=us", "line 1: 'region=us' is neither"),
            (f"follow {READ} region=", "is neither"),
            (f"follow {READ} region=[eu]", "is neither"),
            (f"follow {READ} region=*a*b*c*d*e*f*", "is neither"),
            (f"follow {READ} region=" + "x" * 65, "is neither"),
            (f"read {READ} region=eu", "is neither"),
            *(
                (f"follow {READ} {words}", "is neither")
                for words in [
                    "region:eu-*",
                    "region eu-*",
                    "region",
                    "replicas",
                    "samplers region: eu",
                    "--region eu",
                    "--region=eu",
                    "samplers eu",
                ]
            ),
            (f"follow {READ} samplers region=eu", "alone keeps nobody from the names"),
            ("\n".join(f"read {number:016d}" for number in range(1001)), "line 1001"),
        ],
    )
    def test_bad_files(self, tmp_path: Path, text: str, says: str) -> None:
        with pytest.raises(InvalidArgument, match=says) as caught:
            tokens(tmp_path, text)
        assert READ not in str(caught.value)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound):
            Tokens.read(tmp_path / "none")

    def test_one_token(self, tmp_path: Path) -> None:
        path = tmp_path / "token"
        path.write_text(f"  {FOLLOW}\n")
        assert read_token(path) == FOLLOW
        for text, says in [
            ("", "no token: what is there has 0 letters"),
            ("short", "no token: what is there has 5 letters"),
            (f"{READ} {READ}", "no token: what is there has blanks"),
            (f"{FOLLOW}\n{FOLLOW}\n{FOLLOW}", "holds 3 lines"),
        ]:
            path.write_text(text)
            with pytest.raises(InvalidArgument, match=says) as caught:
                read_token(path)
            assert READ not in str(caught.value)


class TestExposure:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
    def test_loopback(self, host: str) -> None:
        assert is_loopback(host)
        check_exposure(host, has_tokens=False)

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
    def test_others(self, host: str) -> None:
        check_exposure(host, has_tokens=True)
        with pytest.raises(InvalidArgument, match="open to other machines"):
            check_exposure(host, has_tokens=False)
