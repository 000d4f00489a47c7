"""Who may do what."""

from pathlib import Path

import pytest

from thinwire.errors import InvalidArgument, NotFound
from thinwire.web import Role, Tokens, check_exposure, is_loopback, read_token

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
        assert found.roles_of(f"Bearer {READ}") == {Role.READ}
        assert found.roles_of(f"bearer  {FOLLOW} ") == {Role.READ, Role.FOLLOW}
        assert found.roles_of(f"Bearer {PUBLISH}") == {Role.READ, Role.PUBLISH}

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
        assert tokens(tmp_path, f"read {READ}").roles_of(header) == frozenset()

    def test_without_any_everything_is_allowed(self) -> None:
        assert not Tokens()
        assert Tokens().roles_of("") == frozenset(Role)

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
        for text in ["", "short", f"{FOLLOW}\n{FOLLOW}", f"{READ} {READ}"]:
            path.write_text(text)
            with pytest.raises(InvalidArgument, match="holds no token"):
                read_token(path)


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
