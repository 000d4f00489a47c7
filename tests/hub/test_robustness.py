"""Malformed requests, slow clients and idle connections: none of them fails a good request."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from thinwire.hub import Hub
from thinwire.web import Role

from .making import PATIENT, TOKENS, head_at, known_tokens, listening, training

# The clients are shared with a program, which is no installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from rude_clients import KINDS, Held, Target, send_malformed

STREAM = "/v1/streams/policy"


def target(url: str) -> Target:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return Target(
        host=parts.hostname,
        port=parts.port,
        get=("/health", "/v1/streams", f"{STREAM}/versions", f"{STREAM}/replicas", "/metrics"),
        post=(f"{STREAM}/heartbeats",),
        headers=f"authorization: Bearer {TOKENS[Role.FOLLOW]}\r\n".encode(),
    )


async def ask_well(url: str, until: Callable[[], bool]) -> int:
    """Good requests, one after the other, until something is over; how many there were."""
    headers = {"authorization": f"Bearer {TOKENS[Role.FOLLOW]}"}
    count = 0
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
        while not until():
            answers: list[httpx.Response] = [
                await client.get(STREAM),
                await client.post(f"{STREAM}/heartbeats", json={"replica": "good"}),
                await client.get(f"{STREAM}/wait", params={"timeout_s": 0}),
                await client.get("/metrics"),
            ]
            assert [answer.status_code for answer in answers] == [200] * 4
            count += len(answers)
    return count


def test_rude_clients_fail_no_good_one(tmp_path: Path) -> None:
    async def run(url: str) -> tuple[Counter[str], int]:
        hub = target(url)
        is_over = False
        good = asyncio.create_task(ask_well(url, lambda: is_over))
        async with Held(hub, idle_count=100, slow_head_count=20, slow_body_count=20, deaf_count=20):
            outcomes = await send_malformed(hub, 20 * len(KINDS), seed=1)
        is_over = True
        return outcomes, await good

    with training(tmp_path) as trainer:
        trainer.publish()
        made = Hub({"policy": trainer.url}, tokens=known_tokens(), poll_s=0.2, limits=PATIENT)
        with listening(made) as url:
            headers = {"authorization": f"Bearer {TOKENS[Role.READ]}"}
            with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
                head_at(client, 1)
                outcomes, good_count = asyncio.run(run(url))
                replicas: Any = client.get(f"{STREAM}/replicas").json()["replicas"]
    assert outcomes.total() == 20 * len(KINDS)
    assert good_count > 0
    # No bug shows, and nobody is left without an answer or an end.
    assert not {"500", "silent"} & set(outcomes)
    assert outcomes["400"] > 50
    assert outcomes["422"] > 10
    assert outcomes["413"] == 40
    # What was not a heartbeat left nothing behind.
    assert {one["beat"]["replica"] for one in replicas} == {"good"}
