"""The rollouts' process: plays many sessions at once, asking the sampler for every guess.

    python examples/wordle/rollouts.py ENVIRONMENT SAMPLER MODEL GROUPS GROUP_SIZE

A line on standard input is a request for one group: sessions with the same secret. A line on
standard output is a group that was played. Up to GROUPS are played at the same time, each session
by a client of its own. A turn keeps what the sampler said of it: tokens, log-probabilities, and the
version that sampled them, which may be another one in the next turn.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from typing import Any

import httpx
import msgspec
from alphabet import END, GUESS_TOKENS, decode, encode

from thinwire.engines.answers import from_thinwire
from thinwire.engines.record import Record

_TIMEOUT_S = 120.0


class Session(msgspec.Struct):
    """A game from its beginning to its end; each turn's prompt is all that was before it."""

    reward: float
    turns: list[Record]

    @property
    def tokens(self) -> list[int]:
        """All of it."""
        return [*self.turns[-1].prompt, *self.turns[-1].tokens]


class Group(msgspec.Struct):
    """Sessions with the secret of one seed."""

    seed: int
    sessions: list[Session]


class Player:
    """One client: plays one session after another.

    Args:
        environment: Its address.
        sampler: Its address.
        model: The model's name there.
        tls: Made once for all clients, though plain HTTP uses none: to make it is expensive.
    """

    def __init__(self, environment: str, sampler: str, model: str, tls: Any) -> None:
        self._environment, self._sampler, self._model = environment, sampler, model
        self._client = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=tls)

    async def play(self, seed: int) -> Session:
        """A session with the secret of a seed."""
        state = await self._post(f"{self._environment}/sessions", {"seed": seed})
        url = f"{self._environment}/sessions/{state['session']}/step"
        played, prompt = Session(0.0, []), encode(state["observation"] + END)
        while True:
            turn = await self._guess(prompt)
            guess = decode(turn.tokens).removesuffix(END)
            outcome = await self._post(url, {"guess": guess})
            played.turns.append(turn)
            played.reward += outcome["reward"]
            if outcome["done"]:
                return played
            prompt = [*prompt, *turn.tokens, *encode(outcome["observation"] + END)]

    async def _guess(self, prompt: list[int]) -> Record:
        """Tokens as the policy chooses them: temperature 1, and nothing cut off."""
        asked = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": GUESS_TOKENS,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = await self._post(f"{self._sampler}/v1/completions", asked)
        (found,) = from_thinwire(answer)
        return found

    async def _post(self, url: str, facts: dict[str, Any]) -> Any:
        answer = await self._client.post(
            url, content=msgspec.json.encode(facts), headers={"content-type": "application/json"}
        )
        if answer.status_code != 200:
            raise RuntimeError(f"{url} answered {answer.status_code}: {answer.text[:300]}")
        return msgspec.json.decode(answer.content)


async def play_groups(
    environment: str, sampler: str, model: str, group_count: int, group_size: int
) -> None:
    """Play as many groups as are asked for, until standard input ends."""
    tls = httpx.create_ssl_context(verify=False)
    seeds = itertools.count()
    asked, loop, is_over = asyncio.Semaphore(0), asyncio.get_running_loop(), asyncio.Event()

    async def play_one_after_another() -> None:
        players = [Player(environment, sampler, model, tls) for _ in range(group_size)]
        while True:
            await asked.acquire()
            seed = next(seeds)
            sessions = await asyncio.gather(*(player.play(seed) for player in players))
            print(msgspec.json.encode(Group(seed, sessions)).decode(), flush=True)

    def listen() -> None:
        for _ in sys.stdin:
            loop.call_soon_threadsafe(asked.release)
        loop.call_soon_threadsafe(is_over.set)

    threading.Thread(target=listen, daemon=True).start()
    over = asyncio.create_task(is_over.wait())
    tasks = [asyncio.create_task(play_one_after_another()) for _ in range(group_count)]
    done, _ = await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in (over, *tasks):
        task.cancel()
    for task in done:
        await task  # a player that failed ends the process with its error


if __name__ == "__main__":
    address, endpoint, name, at_once, size = sys.argv[1:]
    asyncio.run(play_groups(address, endpoint, name, int(at_once), int(size)))
