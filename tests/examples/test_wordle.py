"""examples/wordle: the game, its server, and the quick form of the whole run."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

for package in ("torch", "transformers", "starlette", "uvicorn", "httpx", "safetensors"):
    pytest.importorskip(package, reason=f"{package} is not installed: the example was NOT run")

TestClient = pytest.importorskip("starlette.testclient").TestClient

ROOT = Path(__file__).resolve().parents[2]
WORDLE = ROOT / "examples" / "wordle"
TIMEOUT_S = 900


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the example, and forgets all of them afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(WORDLE))
    before = set(sys.modules)
    yield importlib.import_module
    folders = (str(WORDLE), str(ROOT / "examples"), str(ROOT / "benchmarks"))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folders):
            del sys.modules[name]


# -- the game -------------------------------------------------------------------------------------


def test_what_a_guess_is_answered_with(example: Any) -> None:
    game: ModuleType = example("game")
    assert game.mark("bread", "bread") == "BREAD"
    assert game.mark("light", "money") == "-----"
    assert game.mark("crane", "ocean") == "c-ane"
    # A letter is told as often as the secret has it: one of grass' two s, the one in its place.
    assert game.mark("geese", "queen") == "-eE--"
    assert game.mark("eerie", "green") == "eer--"


def test_the_words_are_words_of_five_letters(example: Any) -> None:
    words = example("game").WORDS
    assert len(set(words)) == len(words) >= 30
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in words)


def test_rewards_add_up(example: Any) -> None:
    game: ModuleType = example("game")
    one = game.Game("bread", game.WORDS)
    first = one.step("dream")  # three of its letters are elsewhere or in place
    assert first.observation == "dREA-"
    assert not first.done
    wrong = one.step("aaaaa")
    assert (wrong.observation, wrong.reward) == ("!!!!!", pytest.approx(-0.05))
    last = one.step("bread")
    assert last.done
    assert first.reward + wrong.reward + last.reward == pytest.approx(0.8 - 0.05)

    at_once = game.Game("bread", game.WORDS).step("bread")
    assert (at_once.reward, at_once.done) == (1.0, True)

    lost = game.Game("bread", game.WORDS)
    outcomes = [lost.step("light") for _ in range(game.MAX_GUESSES)]
    assert [outcome.done for outcome in outcomes] == [False] * 4 + [True]
    assert sum(outcome.reward for outcome in outcomes) == 0


# -- its server -----------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_sessions_over_http(example: Any) -> None:
    environment, game = example("environment"), example("game")
    client = TestClient(environment.make_app(environment.Sessions()))
    opened = client.post("/sessions", json={"seed": 7}).json()
    assert opened["observation"] == "_____"
    secret = game.secret_of(7, game.WORDS)
    other = next(word for word in game.WORDS if word != secret)
    url = f"/sessions/{opened['session']}/step"
    first = client.post(url, json={"guess": other}).json()
    assert first["observation"] == game.mark(other, secret)
    assert not first["done"]
    assert client.post(url, json={"guess": secret}).json()["done"]
    # Done is gone.
    gone = client.post(url, json={"guess": secret})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "no_session")
    assert client.get("/stats").json() | {"mean": 0} == {
        "open": 0,
        "peak": 1,
        "mean": 0,
        "opened": 1,
        "expired": 0,
    }


def test_a_seed_has_one_secret_and_seeds_differ(example: Any) -> None:
    game: ModuleType = example("game")
    secrets = [game.secret_of(seed, game.WORDS) for seed in range(200)]
    assert secrets == [game.secret_of(seed, game.WORDS) for seed in range(200)]
    assert len(set(secrets)) > 20


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/sessions", b"{", 400, "invalid_json"),
        ("/sessions", b'{"seed": "x"}', 400, "invalid_json"),
        ("/sessions", b'{"seed": -1}', 400, "invalid_value"),
        ("/sessions", b'{"seed": 1e300}', 400, "invalid_json"),
        ("/sessions", b" " * 2000, 413, "too_large"),
        ("/sessions/none/step", b'{"guess": "bread"}', 404, "no_session"),
        ("/sessions/none/step", b'{"guess": "breadbreadbreadbread"}', 400, "invalid_value"),
        ("/sessions/none/step", b"\xff", 400, "invalid_json"),
    ],
)
def test_what_is_refused(example: Any, path: str, body: bytes, status: int, code: str) -> None:
    environment = example("environment")
    client = TestClient(environment.make_app(environment.Sessions()))
    answer = client.post(path, content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_sessions_are_limited_and_expire(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = example("environment")
    monkeypatch.setattr(environment, "MAX_SESSIONS", 3)
    clock = Clock()
    sessions = environment.Sessions(now_s=clock)
    first, second, _ = (sessions.open(seed)["session"] for seed in range(3))
    with pytest.raises(environment.Refused) as refused:
        sessions.open(3)
    assert refused.value.status == 429
    clock.now_s += environment.MAX_IDLE_S
    sessions.step(first, "nothing")  # not idle any more
    clock.now_s += 1
    found = sessions.stats()
    assert (found["open"], found["peak"], found["expired"]) == (1, 3, 2)
    sessions.step(first, "nothing")
    with pytest.raises(environment.Refused):
        sessions.step(second, "nothing")


def test_how_many_were_open_on_average(example: Any) -> None:
    environment = example("environment")
    clock = Clock()
    sessions = environment.Sessions(now_s=clock)
    clock.now_s += 1000  # before the first one nothing counts
    sessions.open(1)
    clock.now_s += 10
    sessions.open(2)
    clock.now_s += 10
    assert sessions.stats()["mean"] == pytest.approx(1.5)


# -- what rollouts are worth ----------------------------------------------------------------------


def test_a_turn_of_two_versions_is_refused(example: Any) -> None:
    trainer = example("trainer")
    assert trainer.version_of("12-0123456789ab") == 12
    with pytest.raises(ValueError, match="not sampled under one version"):
        trainer.version_of(None)


def log_probs_of(model: Any, text: list[int]) -> list[float]:
    """Of each token but the first, as a sampler with the same weights has them."""
    import torch
    from policy import token_log_probs

    tokens = torch.tensor([text])
    with torch.no_grad():
        found = token_log_probs(model(tokens).logits[:, :-1], tokens[:, 1:])
    return [float(value) for value in found[0]]


def turns_in(model: Any, text: list[int], starts: tuple[int, ...]) -> list[Any]:
    """Lines of a session as the sampler says them."""
    from thinwire.engines.record import Record, spans_of

    found = log_probs_of(model, text)
    return [
        Record(
            request="r",
            prompt_count=start,
            prompt=tuple(text[:start]),
            tokens=tuple(text[start : start + 6]),
            log_probs=tuple(found[start - 1 : start + 5]),
            spans=spans_of(6, "1-a", "1-a"),
        )
        for start in starts
    ]


def test_ratios_of_the_same_weights_are_one(example: Any) -> None:
    """Tokens, places and log-probabilities of several turns fall into line."""
    import torch

    player, trainer, rollouts = example("player"), example("trainer"), example("rollouts")
    model = player.make_player(("bread", "crane"), 0, 0)
    text = example("alphabet").encode("_____\nbread\n-Rea-\ncrane\n")
    played = rollouts.Session(0.5, turns_in(model, text, (6, 18)))
    assert played.tokens == text
    short = rollouts.Session(0.0, turns_in(model, text, (6,)))
    group = rollouts.Group(0, [played, short])
    ratios = trainer.Trainer(model, example("run").QUICK).step(1, [group])
    assert ratios.shape == (18,)
    assert ratios.numpy() == pytest.approx(1.0, abs=1e-4)
    assert trainer.effective_share(ratios) == pytest.approx(1.0)
    assert trainer.effective_share(torch.tensor([3.0, 0.0, 0.0])) == pytest.approx(1 / 3)
    assert trainer.clipped_share(torch.tensor([1.0, 1.3, 0.7, 1.1])) == 0.5


def test_what_earns_more_becomes_likelier(example: Any) -> None:
    player, trainer, rollouts = example("player"), example("trainer"), example("rollouts")
    model = player.make_player(("bread", "crane"), 0, 0)
    good, bad = map(example("alphabet").encode, ("_____\nbread\n", "_____\ncrane\n"))

    def preference() -> float:
        return sum(log_probs_of(model, good)[5:]) - sum(log_probs_of(model, bad)[5:])

    before, learner = preference(), trainer.Trainer(model, example("run").QUICK)
    for step in range(1, 6):
        sessions = [
            rollouts.Session(reward, turns_in(model, text, (6,)))
            for reward, text in ((1.0, good), (0.0, bad))
        ]
        learner.step(step, [rollouts.Group(0, sessions)])
    assert preference() > before + 1


# -- the whole run --------------------------------------------------------------------------------


def test_the_quick_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "examples/wordle/run.py", "--quick", "--work", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "run" / "rows.json").read_text())
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert "the trainer's weights of its step: yes" in done.stdout
    assert "the sampler held in the end are the trainer's: yes" in done.stdout
    assert "those of the version it names: yes" in done.stdout
    assert "64 open at once at most" in done.stdout
    # Asynchronous, within its bound; and the ratios are of other weights than the trainer's.
    assert 1 <= max(row["max_staleness"] for row in rows) <= 4
    assert any(row["high_ratio"] > 1.01 for row in rows)
    assert (tmp_path / "run" / "wordle.svg").read_text().startswith("<svg")
