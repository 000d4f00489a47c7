"""The SGLang adapter, step by step against the contract server in a process of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from thinwire.engines.engine import Engine, Policy, Timer
from thinwire.engines.sglang import SGLang
from thinwire.errors import (
    Deadline,
    EngineError,
    EngineUnreachable,
    InvalidArgument,
    NotFound,
    ThinwireError,
)
from thinwire.testing.sglang_scheduler import digest_of_folder

from .sglang_serving import (
    Answer,
    Clients,
    ask,
    ask_test,
    calls,
    free_port,
    server,
    soon,
    update_to,
    write_model,
)

KEEP = Policy(cache="keep", pause="keep")
HARD = Policy(cache="reset", pause="abort")
ALLOWED = [
    KEEP,
    Policy(cache="reset", pause="keep"),
    HARD,
    Policy(cache="keep", pause="abort"),
    Policy(cache="reset", pause="wait"),
    Policy(cache="new-sessions", pause="wait"),
]


def named(policy: Policy) -> str:
    return f"{policy.pause}-{policy.cache}"


@pytest.fixture
def models(tmp_path: Path) -> Callable[[int], Path]:
    def model(number: int) -> Path:
        folder = tmp_path / f"v{number}"
        return folder if folder.exists() else write_model(folder, number)

    return model


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for all the tests that leave it alive."""
    with server(write_model(tmp_path_factory.mktemp("served") / "v0", 0)) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(started: str) -> str:
    ask_test(started, reset=True)
    return started


def walk(engine: SGLang, folder: Path, number: int, policy: Policy, *, attach: bool = False) -> str:
    """One update, as a driver walks it; the label served at the end."""
    update = update_to(folder, number)
    engine.stage(update, soon())
    engine.pause(policy, soon())
    (engine.attach if attach else engine.apply)(update, soon())
    if policy.cache != "keep":
        engine.empty_caches(policy, soon())
    engine.set_label(update.label, soon())
    engine.resume(soon())
    assert engine.prove(update, soon()) is None
    return update.label


def test_it_is_an_engine() -> None:
    engine: Engine = SGLang()
    assert engine.name == "sglang"


@pytest.mark.parametrize("policy", ALLOWED, ids=named)
def test_every_policy_of_an_idle_server(
    endpoint: str, models: Callable[[int], Path], policy: Policy
) -> None:
    engine = SGLang(endpoint)
    assert engine.state(soon()).label == "default"
    for number in (1, 2):
        label = walk(engine, models(number), number, policy, attach=number == 1)
        assert engine.state(soon()).label == label
        assert not engine.state(soon()).is_paused
        digests = {label: digest_of_folder(models(number))}
        assert ask(endpoint, f"new {number}", 3).runs(digests) == [(label, label)]


def test_the_routes_of_an_update_in_their_order(
    endpoint: str, models: Callable[[int], Path]
) -> None:
    engine = SGLang(endpoint)
    walk(engine, models(1), 1, HARD, attach=True)
    ask_test(endpoint, fault="")
    walk(engine, models(2), 2, HARD)
    assert calls(endpoint)[:9] == [
        "/continue_generation",
        "/pause_generation",
        "/flush_cache",
        "/pause_generation",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/continue_generation",
        "/get_weights_by_name",
    ]


def in_flight(endpoint: str, tokens: int = 40) -> tuple[threading.Thread, Answer]:
    """A request that has begun to answer."""
    answer = Answer("long")
    thread = threading.Thread(target=ask, args=(endpoint, "long", tokens, answer))
    thread.start()
    while len(answer.tokens) < 3:
        time.sleep(0.01)
    return thread, answer


def test_keep_keep_freezes_and_goes_on(endpoint: str, models: Callable[[int], Path]) -> None:
    engine = SGLang(endpoint)
    first = walk(engine, models(1), 1, KEEP, attach=True)
    thread, answer = in_flight(endpoint)
    second = walk(engine, models(2), 2, KEEP)
    thread.join(10)
    assert (answer.finish, len(answer.tokens)) == ("length", 40)
    digests = {first: digest_of_folder(models(1)), second: digest_of_folder(models(2))}
    # The KV stays what the older weights made of it: that is what "keep" means.
    assert answer.runs(digests) == [(first, first), (second, first)]
    assert ask(endpoint, "long", 3).runs(digests) == [(second, first)]


def test_abort_reset_ends_what_runs(endpoint: str, models: Callable[[int], Path]) -> None:
    engine = SGLang(endpoint)
    first = walk(engine, models(1), 1, HARD, attach=True)
    thread, answer = in_flight(endpoint)
    second = walk(engine, models(2), 2, HARD)
    thread.join(10)
    digests = {first: digest_of_folder(models(1)), second: digest_of_folder(models(2))}
    assert answer.finish == "abort"
    assert answer.runs(digests) == [(first, first)]
    assert ask(endpoint, "long", 3).runs(digests) == [(second, second)]


@pytest.mark.parametrize("cache", ["reset", "new-sessions"])
def test_wait_lets_what_runs_end(endpoint: str, models: Callable[[int], Path], cache: str) -> None:
    policy = Policy(cache=cache, pause="wait")  # type: ignore[arg-type]
    engine = SGLang(endpoint)
    first = walk(engine, models(1), 1, policy, attach=True)
    thread, answer = in_flight(endpoint, tokens=30)
    second = walk(engine, models(2), 2, policy)
    thread.join(10)
    digests = {first: digest_of_folder(models(1)), second: digest_of_folder(models(2))}
    assert (answer.finish, len(answer.tokens)) == ("length", 30)
    assert answer.runs(digests) == [(first, first)]
    assert ask(endpoint, "long", 3).runs(digests) == [(second, second)]


def test_wait_gives_up_where_requests_never_stop(
    endpoint: str, models: Callable[[int], Path]
) -> None:
    engine = SGLang(endpoint)
    policy = Policy(cache="reset", pause="wait")
    first = walk(engine, models(1), 1, policy, attach=True)
    with Clients(endpoint, 6, 20) as clients:
        time.sleep(0.3)
        with pytest.raises(Deadline):
            engine.pause(policy, soon(0.7))
        before, end_s = len(clients.answers), time.monotonic() + 10
        while len(clients.answers) <= before:
            assert time.monotonic() < end_s, "it answers nobody any more"
            time.sleep(0.01)
    assert not engine.state(soon()).is_paused
    digests = {first: digest_of_folder(models(1))}
    assert all(answer.runs(digests) == [(first, first)] for answer in clients.answers)


def test_wait_sees_a_request_that_slips_in(
    endpoint: str, models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SGLang(endpoint)
    policy = Policy(cache="reset", pause="wait")
    first = walk(engine, models(1), 1, policy, attach=True)
    slipped_in: list[tuple[threading.Thread, Answer]] = []
    pause = engine._routes.pause

    def pause_late(mode: str, timer: Timer) -> None:
        if not slipped_in:
            slipped_in.append(in_flight(endpoint))
        pause(mode, timer)

    monkeypatch.setattr(engine._routes, "pause", pause_late)
    second = walk(engine, models(2), 2, policy)
    thread, answer = slipped_in[0]
    thread.join(10)
    digests = {first: digest_of_folder(models(1)), second: digest_of_folder(models(2))}
    assert answer.finish == "length"
    assert answer.runs(digests) == [(first, first)]


def test_a_pause_that_fails_does_not_let_unknown_weights_serve(
    endpoint: str, models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SGLang(endpoint)
    walk(engine, models(1), 1, HARD, attach=True)
    ask_test(endpoint, fault="mixed")
    engine.pause(HARD, soon())
    with pytest.raises(EngineError):
        engine.apply(update_to(models(2), 2), soon())
    ask_test(endpoint, token_s=0.02)
    for again in (engine, SGLang(endpoint)):
        monkeypatch.setattr(again._routes, "flush", lambda *_, **__: "not now")
        with pytest.raises((Deadline, EngineError)):
            again.pause(HARD, soon(1.0))
    assert "/continue_generation" not in calls(endpoint)


def test_keep_reset_is_refused_where_requests_wait(
    endpoint: str, models: Callable[[int], Path]
) -> None:
    engine = SGLang(endpoint)
    policy = Policy(cache="reset")
    first = walk(engine, models(1), 1, policy, attach=True)
    thread, answer = in_flight(endpoint)
    with pytest.raises(EngineError, match="while requests wait") as failure:
        engine.pause(policy, soon())
    assert "abort" in failure.value.hint
    # Nothing was touched, and the request goes on.
    thread.join(10)
    assert answer.finish == "length"
    assert not engine.state(soon()).is_paused
    digests = {first: digest_of_folder(models(1))}
    assert answer.runs(digests) == [(first, first)]


def test_keep_reset_where_the_server_can(endpoint: str, models: Callable[[int], Path]) -> None:
    ask_test(endpoint, flushes_retracted=True)
    engine = SGLang(endpoint)
    policy = Policy(cache="reset")
    first = walk(engine, models(1), 1, policy, attach=True)
    thread, answer = in_flight(endpoint)
    second = walk(engine, models(2), 2, policy)
    thread.join(10)
    digests = {first: digest_of_folder(models(1)), second: digest_of_folder(models(2))}
    assert (answer.finish, len(answer.tokens)) == ("length", 40)
    # Computed again under the new weights, prompt included.
    assert answer.runs(digests) == [(first, first), (second, second)]
    assert ask(endpoint, "long", 3).runs(digests) == [(second, second)]


def test_wait_keep_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="wait and the cache policy keep"):
        SGLang(endpoint).pause(Policy(cache="keep", pause="wait"), soon())
    assert calls(endpoint) == []


def test_a_cache_behind_the_cache_is_refused(endpoint: str) -> None:
    ask_test(endpoint, hicache_storage_backend="file")
    with pytest.raises(EngineError, match="hicache_storage_backend"):
        SGLang(endpoint).pause(HARD, soon())
    SGLang(endpoint).pause(KEEP, soon())


@pytest.mark.parametrize("fault", ["begin", "half", "mixed", "lie"])
def test_a_load_that_fails_is_not_known(
    endpoint: str, models: Callable[[int], Path], fault: str
) -> None:
    engine = SGLang(endpoint)
    walk(engine, models(1), 1, HARD, attach=True)
    ask_test(endpoint, fault=fault)
    update = update_to(models(2), 2)
    engine.stage(update, soon())
    engine.pause(HARD, soon())
    with pytest.raises(EngineError, match="no success: Failed"):
        engine.apply(update, soon())
    assert engine.undo(update, soon()) is False
    # Another process would see it too, and resumes nothing.
    other = SGLang(endpoint).state(soon())
    assert other.is_paused
    assert other.label == "thinwire-not-known"
    engine.attach(update, soon())
    engine.set_label(update.label, soon())
    engine.resume(soon())
    digests = {update.label: digest_of_folder(models(2))}
    assert ask(endpoint, "a", 3).runs(digests) == [(update.label, update.label)]


@pytest.mark.parametrize("fault", ["skip", "partly"])
def test_a_load_that_claims_too_much_is_found(
    endpoint: str, models: Callable[[int], Path], fault: str
) -> None:
    engine = SGLang(endpoint)
    walk(engine, models(1), 1, HARD, attach=True)
    ask_test(endpoint, fault=fault)
    update = update_to(models(2), 2)
    engine.pause(HARD, soon())
    with pytest.raises(EngineError, match="shows other weights"):
        engine.attach(update, soon())


@pytest.mark.parametrize("policy", [KEEP, Policy(cache="reset"), HARD], ids=named)
def test_what_a_failed_load_held_does_not_block_the_next(
    endpoint: str, models: Callable[[int], Path], policy: Policy
) -> None:
    engine = SGLang(endpoint)
    first = walk(engine, models(1), 1, KEEP, attach=True)
    thread, answer = in_flight(endpoint)
    ask_test(endpoint, fault="mixed")
    update = update_to(models(2), 2)
    engine.pause(KEEP, soon())
    with pytest.raises(EngineError):
        engine.apply(update, soon())
    # Another process takes over, with a policy of its own.
    second = walk(SGLang(endpoint), models(2), 2, policy, attach=True)
    thread.join(10)
    digests = {first: digest_of_folder(models(1)), second: digest_of_folder(models(2))}
    assert answer.finish == ("length" if policy is KEEP else "abort")
    answer.runs(digests)
    assert ask(endpoint, "a", 3).runs(digests) == [(second, second)]


def test_what_another_process_left_paused_does_not_block_abort(
    endpoint: str, models: Callable[[int], Path]
) -> None:
    first = walk(SGLang(endpoint), models(1), 1, KEEP, attach=True)
    thread, answer = in_flight(endpoint)
    SGLang(endpoint).pause(KEEP, soon())
    second = walk(SGLang(endpoint), models(2), 2, HARD)
    thread.join(10)
    digests = {first: digest_of_folder(models(1)), second: digest_of_folder(models(2))}
    assert answer.finish == "abort"
    assert answer.runs(digests) == [(first, first)]


def test_a_load_that_hangs(endpoint: str, models: Callable[[int], Path]) -> None:
    engine = SGLang(endpoint)
    walk(engine, models(1), 1, HARD, attach=True)
    ask_test(endpoint, fault="hang", hang_s=2.0)
    update = update_to(models(2), 2)
    engine.pause(HARD, soon())
    began_s = time.monotonic()
    with pytest.raises(Deadline):
        engine.apply(update, soon(0.5))
    assert time.monotonic() - began_s < 1.5
    # The next one waits until the hanging one has ended, and is not mistaken for it.
    update = update_to(models(3), 3)
    engine.attach(update, soon())
    assert time.monotonic() - began_s > 2.0
    engine.resume(soon())
    digests = {update.label: digest_of_folder(models(3))}
    assert ask(endpoint, "a", 3).runs(digests) == [(update.label, update.label)]


def test_a_server_that_dies_in_a_load(models: Callable[[int], Path]) -> None:
    with server(models(0)) as endpoint:
        engine = SGLang(endpoint)
        walk(engine, models(1), 1, HARD, attach=True)
        ask_test(endpoint, fault="die")
        engine.pause(HARD, soon())
        with pytest.raises(EngineUnreachable) as failure:
            engine.apply(update_to(models(2), 2), soon())
        assert failure.value.context["sent"] is True
        with pytest.raises(EngineUnreachable):
            engine.state(soon())


def test_an_older_release_that_flushes_always_is_killed_by_it(
    models: Callable[[int], Path],
) -> None:
    """Why older releases are refused: this is what they do."""
    with server(models(0), "--ignores-no-flush") as endpoint:
        engine = SGLang(endpoint)
        walk(engine, models(1), 1, KEEP, attach=True)
        thread, answer = in_flight(endpoint)
        engine.pause(KEEP, soon())
        with pytest.raises(EngineUnreachable):
            engine.apply(update_to(models(2), 2), soon())
        thread.join(10)
        assert answer.finish == "lost"


def test_requests_that_the_server_loses(models: Callable[[int], Path]) -> None:
    """It waits for them forever when told to end what runs; we do not."""
    with server(models(0)) as endpoint:
        engine = SGLang(endpoint)
        walk(engine, models(1), 1, KEEP, attach=True)
        thread, answer = in_flight(endpoint)
        ask_test(endpoint, loses_requests=True)
        walk(engine, models(2), 2, KEEP)
        assert ask_test(endpoint)["in_flight"] == 1
        with pytest.raises(Deadline):
            engine.pause(HARD, soon(0.5))
    thread.join(10)
    assert answer.finish == "lost"


def test_the_identity_is_of_one_start(endpoint: str, models: Callable[[int], Path]) -> None:
    engine = SGLang(endpoint)
    first = engine.state(soon()).identity
    walk(engine, models(1), 1, HARD, attach=True)
    assert SGLang(endpoint).state(soon()).identity == first
    # What a start does, if it is not told otherwise.
    ask_test(endpoint, random_seed=1)
    assert engine.state(soon()).identity != first


def test_with_a_fixed_seed_the_label_tells_of_a_restart(models: Callable[[int], Path]) -> None:
    states = []
    for _ in range(2):
        with server(models(0), "--random-seed", "1") as endpoint:
            states.append(SGLang(endpoint).state(soon()))
            walk(SGLang(endpoint), models(1), 1, HARD, attach=True)
    assert states[0].identity == states[1].identity
    assert states[1].label == "default"


def test_the_keys(models: Callable[[int], Path]) -> None:
    with server(models(0), "--api-key", "api-key-1", "--admin-api-key", "adm1n-key") as endpoint:
        for wrong in (SGLang(endpoint), SGLang(endpoint, "other-key", api_key="api-key-1")):
            with pytest.raises(EngineError, match="401") as failure:
                wrong.pause(KEEP, soon())
            assert "--admin-api-key" in failure.value.hint
            assert "other-key" not in str(failure.value)
        engine = SGLang(endpoint, "adm1n-key", api_key="api-key-1")
        walk(engine, models(1), 1, HARD, attach=True)
        assert "adm1n" not in repr(engine) + repr(vars(engine))


def test_the_older_names_of_the_routes(models: Callable[[int], Path]) -> None:
    with server(models(0), "--older") as endpoint:
        engine = SGLang(endpoint)
        walk(engine, models(1), 1, HARD, attach=True)
        walk(engine, models(2), 2, Policy(cache="reset", pause="wait"))


@pytest.mark.parametrize(
    ("said_of_itself", "said"),
    [({"version": "0.5.8"}, "is SGLang 0.5.8"), ({"tokenizer_worker_num": 2}, "2 tokenizer")],
)
def test_servers_that_cannot_be_updated(
    endpoint: str, said_of_itself: dict[str, Any], said: str
) -> None:
    ask_test(endpoint, **said_of_itself)
    with pytest.raises(EngineError, match=said):
        SGLang(endpoint).state(soon())


@pytest.mark.parametrize("version", ["0.5.9", "0.5.10rc0", "0.6.1", "1.0.0", "0.0.0.dev1+g12", "?"])
def test_versions_that_are_taken(endpoint: str, version: str) -> None:
    ask_test(endpoint, version=version)
    SGLang(endpoint).state(soon())


def test_a_folder_that_is_no_model(endpoint: str, tmp_path: Path) -> None:
    engine = SGLang(endpoint)
    with pytest.raises(NotFound):
        engine.stage(update_to(tmp_path / "none", 1), soon())
    folder = write_model(tmp_path / "bare", 1)
    (folder / "config.json").unlink()
    with pytest.raises(InvalidArgument, match="no config"):
        engine.stage(update_to(folder, 1), soon())


def test_the_folder_as_the_server_sees_it(endpoint: str, models: Callable[[int], Path]) -> None:
    wrong = SGLang(endpoint, engine_folder="/nowhere")
    wrong.pause(HARD, soon())
    with pytest.raises(EngineError, match="weights iterator"):
        wrong.apply(update_to(models(1), 1), soon())
    right = SGLang(endpoint, engine_folder=str(models(1)))
    walk(right, models(1), 1, HARD, attach=True)


def test_a_server_that_computes_in_another_type_is_proved(endpoint: str, tmp_path: Path) -> None:
    """Its weights are the folder's, rounded. Here the server is given a rounded folder."""
    stream = write_model(tmp_path / "stream", 1, np.float32)
    for number, dtype in enumerate((np.float16, ml_dtypes.bfloat16), 1):
        served = write_model(tmp_path / f"served-{number}", 1, dtype)
        engine = SGLang(endpoint, engine_folder=str(served))
        engine.pause(HARD, soon())
        engine.attach(update_to(stream, number), soon())
        assert engine.prove(update_to(stream, number), soon()) is None


def test_nothing_shown_proves_nothing(endpoint: str, models: Callable[[int], Path]) -> None:
    engine = SGLang(endpoint)
    walk(engine, models(1), 1, HARD, attach=True)
    ask_test(endpoint, quantization="fp8")
    assert engine.prove(update_to(models(1), 1), soon()) is None
    # Another label is another version, whatever is shown.
    assert engine.prove(update_to(models(1), 2), soon()) is False


def test_nobody_listens() -> None:
    engine = SGLang(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(EngineUnreachable, match="does not take the connection"):
        engine.state(soon())
    with pytest.raises(ThinwireError):
        engine.pause(KEEP, soon())
