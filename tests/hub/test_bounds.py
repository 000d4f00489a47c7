"""For whom a token may speak at a hub."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from thinwire.hub import Hub
from thinwire.web import Tokens

from .making import PATIENT, beat, calling, training

STREAM = "/v1/streams/policy"


class Log:
    """What a hub logs."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def info(self, event: str, **facts: Any) -> None:
        pass

    def warning(self, event: str, **facts: Any) -> None:
        if event == "denied":
            self.refused.append(facts["reason"])

    error = info


def test_a_token_of_one_region_speaks_for_no_other(tmp_path: Path) -> None:
    """Nor takes the name of another region's replica, which a hub that just started never heard."""
    file = tmp_path / "tokens"
    file.write_text(
        f"follow {'e' * 16} samplers replica=eu-* region=eu\nfollow {'u' * 16} replica=us-*\n"
        f"follow {'a' * 16}\nread {'r' * 16}\n"
    )
    log = Log()
    with ExitStack() as stack:
        url = stack.enter_context(training(tmp_path)).url
        hub = Hub({"policy": url}, tokens=Tokens.read(file), limits=PATIENT, logger=log)
        client = stack.enter_context(calling(hub))

        def tell(token: str, replica: str, region: str) -> int:
            client.headers["authorization"] = f"Bearer {token * 16}"
            content = msgspec.json.encode(beat(replica, 1, region=region))
            headers = {"content-type": "application/json"}
            return client.post(f"{STREAM}/heartbeats", content=content, headers=headers).status_code

        def leave(token: str, replica: str) -> int:
            client.headers["authorization"] = f"Bearer {token * 16}"
            return client.delete(f"{STREAM}/replicas/{replica}").status_code

        for replica, region in [("us-1", "eu"), ("eu-1", "us"), ("eu-1", ""), ("one", "eu")]:
            assert tell("e", replica, region) == 403
        assert tell("e", "eu-1", "eu") == 200
        assert tell("u", "us-1", "us") == 200
        assert tell("u", "eu-1", "us") == 403
        assert leave("e", "us-1") == 403
        assert leave("u", "eu-1") == 403
        # Whether there is such a one is not told either.
        assert leave("u", "eu-2") == 403
        shown = client.get(f"{STREAM}/replicas").json()["replicas"]
        assert [(one["beat"]["replica"], one["beat"]["region"]) for one in shown] == [
            ("eu-1", "eu"),
            ("us-1", "us"),
        ]
        # One that moves to another region goes on with its own token, or another that fits.
        assert tell("u", "us-1", "eu") == 200
        assert tell("a", "us-1", "eu") == 200
        assert leave("u", "us-1") == 204
        assert leave("u", "us-1") == 404
        # The hub says once of each who was refused, and for whom the token is.
        before = len(log.refused)
        assert tell("e", "us-1", "eu") == 403
        assert tell("r", "us-1", "us") == 403
        assert len(log.refused) == before + 1
        assert "role follow" in log.refused[-1]
        assert (
            log.refused[0] == "this token speaks for replica=eu-* region=eu, not for 'us-1' in the"
            " region 'eu'"
        )
        for number in range(300):
            tell("e", f"made-up-{number}", "eu")
        assert len(log.refused) == 256
