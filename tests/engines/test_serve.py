"""The sampling server: what it answers, what it refuses, and that every label is true."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

if not all(
    importlib.util.find_spec(name)
    for name in ("torch", "transformers", "starlette", "uvicorn", "httpx")
):
    warnings.warn("thinwire[serve] is not importable: it was NOT tested", stacklevel=1)
    pytest.skip("thinwire[serve] is not importable", allow_module_level=True)

import httpx
import torch
from typer.testing import CliRunner

from thinwire import Follower
from thinwire.cli.app import app
from thinwire.engines.engine import label_of
from thinwire.engines.transformers.protocol import Limits
from thinwire.engines.transformers.sampling import Sampler
from thinwire.engines.transformers.serving import Settings
from thinwire.errors import Unavailable

from .serving import (
    VOCABULARY,
    Fresh,
    Trainer,
    events,
    joined,
    llama,
    post,
    served,
    tokenizer_files,
)

LIMITS = Limits(body_bytes=20_000, max_tokens=100, rows=8, requests=40, version_timeout_s=30)


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_disks() -> Iterator[None]:
    with mock.patch.object(os, "fsync", return_value=None):
        yield


class Stand:
    """A stream with one version, and a server that follows it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.url = str(folder / "stream")
        self.trainer = Trainer(self.url, llama(), options.pop("files", None))
        self.trainer.publish()
        self.fresh = Fresh(self.url, folder)
        options = {"limits": LIMITS, "poll_s": 0.02, "dtype": "float32", **options}
        self.settings = Settings(url=self.url, **options)


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    found = Stand(tmp_path)
    yield found
    found.trainer.close()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stand, str]]:
    """A server that is not updated any more, without a tokenizer."""
    found = Stand(tmp_path_factory.mktemp("plain"), name="small")
    with served(found.settings) as at:
        yield found, at
    found.trainer.close()


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stand, str]]:
    """A server with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("worded")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    files = tokenizer_files(folder / "tokenizer", template)
    found = Stand.__new__(Stand)
    found.folder, found.url = folder, str(folder / "stream")
    found.trainer = Trainer(found.url, llama(vocab_size=256), files)
    found.trainer.publish()
    found.fresh = Fresh(found.url, folder)
    found.settings = Settings(url=found.url, limits=LIMITS, poll_s=0.02, dtype="float32")
    with served(found.settings) as at:
        yield found, at
    found.trainer.close()


class TestAnswers:
    def test_are_labelled(self, plain: tuple[Stand, str]) -> None:
        stand, at = plain
        answer = post(at, prompt=[1, 2, 3], max_tokens=4, logprobs=3, model="small").json()
        model = stand.fresh.load(1)
        assert answer["object"] == "text_completion"
        assert answer["weight_version"] in stand.fresh._models
        assert answer["weight_version_start"] == answer["weight_version_end"]
        assert answer["weight_step"] == 0
        assert answer["staleness"]["versions"] == 0
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
        }
        (choice,) = answer["choices"]
        stand.fresh.check(choice)
        logits = model(torch.tensor([[1, 2, 3]])).logits[0, -1].float().log_softmax(-1)
        best = logits.topk(3)
        tops = choice["logprobs"]["top_logprobs"][0]
        assert list(tops) == [f"token_id:{token}" for token in best.indices.tolist()]
        assert list(tops.values()) == pytest.approx(best.values.tolist(), abs=1e-4)

    def test_greedy_is_the_models_own(self, plain: tuple[Stand, str]) -> None:
        stand, at = plain
        answer = post(at, prompt=[5, 6], max_tokens=12, temperature=0).json()
        ids = torch.tensor([[5, 6]])
        for _ in range(12):
            best = stand.fresh.load(1)(ids).logits[0, -1].argmax()
            ids = torch.cat([ids, best[None, None]], dim=1)
        assert answer["choices"][0]["token_ids"] == ids[0, 2:].tolist()

    def test_a_seed_repeats_them_whatever_else_runs(self, plain: tuple[Stand, str]) -> None:
        _, at = plain
        asked: dict[str, Any] = {"prompt": [7, 8, 9], "max_tokens": 20, "seed": 5, "n": 2}
        alone = [choice["token_ids"] for choice in post(at, **asked).json()["choices"]]
        assert alone[0] != alone[1]
        found: list[list[list[int]]] = []

        def ask(number: int) -> None:
            if number % 2:
                post(at, prompt=[1] * (3 * number), max_tokens=9)
            else:
                choices = post(at, **asked).json()["choices"]
                found.append([choice["token_ids"] for choice in choices])

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [alone] * 4

    def test_several_prompts_and_answers(self, plain: tuple[Stand, str]) -> None:
        stand, at = plain
        prompts = [[3], [4, 5, 6, 7, 8], [9, 10]]
        answer = post(at, prompt=prompts, n=2, max_tokens=6, logprobs=0, temperature=1.5).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        for number, choice in enumerate(answer["choices"]):
            assert choice["prompt_token_ids"] == prompts[number // 2]
            stand.fresh.check(choice)

    def test_stop_at_tokens(self, plain: tuple[Stand, str]) -> None:
        _, at = plain
        everything = list(range(VOCABULARY))
        (choice,) = post(at, prompt=[1], stop_token_ids=everything, max_tokens=9).json()["choices"]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (1, "stop")

    def test_as_streams(self, plain: tuple[Stand, str]) -> None:
        stand, at = plain
        asked: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 7, "seed": 1, "logprobs": 1}
        whole = post(at, **asked).json()["choices"][0]
        response = post(at, **asked, stream=True, stream_options={"include_usage": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        parts = events(response)
        assert len(parts) == 8
        assert parts[-1]["usage"]["completion_tokens"] == 7
        assert {part["weight_version"] for part in parts} == {label_of(self._version(stand))}
        found = joined(parts)
        assert found["token_ids"] == whole["token_ids"]
        assert found["finish_reason"] == "length"
        stand.fresh.check({**found, "prompt_token_ids": [1, 2]})

    @staticmethod
    def _version(stand: Stand) -> Any:
        from thinwire import open_stream

        manifest = open_stream(stand.url).tip().head
        from thinwire.stream.version import Version

        assert manifest is not None
        return Version.of(manifest)

    def test_models_health_ready(self, plain: tuple[Stand, str]) -> None:
        stand, at = plain
        (model,) = httpx.get(f"{at}/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("small", 256)
        assert httpx.get(f"{at}/health").json() == {"status": "ok"}
        ready = httpx.get(f"{at}/ready").json()
        assert ready["ready"] is True
        assert ready["weight_version"] == label_of(self._version(stand))


class TestText:
    def test_prompts_and_stops(self, worded: tuple[Stand, str]) -> None:
        _, at = worded
        asked: dict[str, Any] = {"prompt": "héllo", "max_tokens": 60, "seed": 3}
        (whole,) = post(at, **asked).json()["choices"]
        text = whole["text"]
        stop = text[20:23]
        (cut,) = post(at, **asked, stop=[stop, "never there"]).json()["choices"]
        assert cut["text"] == text[: text.index(stop)]
        assert cut["finish_reason"] == "stop"
        parts = events(post(at, **asked, stop=stop, stream=True, return_token_ids=True))
        assert joined(parts)["text"] == cut["text"]
        full = events(post(at, **asked, stream=True, return_token_ids=True))
        assert joined(full)["text"] == text

    def test_chat(self, worded: tuple[Stand, str]) -> None:
        _, at = worded
        answer = post(
            at,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": [{"type": "text", "text": "ab"}]}],
            logprobs=True,
            top_logprobs=2,
            max_completion_tokens=5,
            return_token_ids=True,
        ).json()
        (choice,) = answer["choices"]
        assert answer["object"] == "chat.completion"
        assert choice["message"]["role"] == "assistant"
        assert len(choice["prompt_token_ids"]) == 2
        assert len(choice["logprobs"]["content"]) == 5
        assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
        parts = events(
            post(
                at,
                "/v1/chat/completions",
                messages=[{"role": "user", "content": "ab"}],
                stream=True,
                max_tokens=3,
            )
        )
        assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
        assert parts[-1]["choices"][0]["finish_reason"] == "length"


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "status", "param"),
        [
            ({}, 400, None),
            ({"prompt": ""}, 400, "prompt"),
            ({"prompt": "text"}, 400, "prompt"),
            ({"prompt": []}, 400, "prompt"),
            ({"prompt": [True]}, 400, "prompt"),
            ({"prompt": [[1], "a"]}, 400, "prompt"),
            ({"prompt": [VOCABULARY]}, 400, "prompt"),
            ({"prompt": [-1]}, 400, "prompt"),
            ({"prompt": [1] * 260}, 400, "prompt"),
            ({"prompt": [1] * 200, "max_tokens": 90}, 400, "prompt"),
            ({"prompt": [1], "max_tokens": 101}, 400, "max_tokens"),
            ({"prompt": [1], "max_tokens": 0}, 400, "max_tokens"),
            ({"prompt": [1], "n": 9}, 400, "n"),
            ({"prompt": [[1]] * 9}, 400, "n"),
            ({"prompt": [1], "n": 0}, 400, "n"),
            ({"prompt": [1], "n": "2"}, 400, "n"),
            ({"prompt": [1], "temperature": -1}, 400, "temperature"),
            ({"prompt": [1], "temperature": 2.1}, 400, "temperature"),
            ({"prompt": [1], "top_p": 0}, 400, "top_p"),
            ({"prompt": [1], "logprobs": 21}, 400, "logprobs"),
            ({"prompt": [1], "stop": ["a"]}, 400, None),
            ({"prompt": [1], "stop": [""]}, 400, "stop"),
            ({"prompt": [1], "top_k": 5}, 400, "top_k"),
            ({"prompt": [1], "presence_penalty": 1}, 400, "presence_penalty"),
            ({"prompt": [1], "tools": [{}]}, 400, "tools"),
            ({"prompt": [1], "echo": True}, 400, None),
            ({"prompt": [1], "model": "other"}, 404, "model"),
            ({"prompt": [1], "min_version": 1, "exact_version": 1}, 400, "min_version"),
            ({"prompt": [1], "min_version": 0}, 400, "min_version"),
            ({"prompt": [1], "version_timeout_s": 31}, 400, "version_timeout_s"),
            ({"prompt": [1], "min_version": 2}, 409, "min_version"),
            ({"prompt": [1], "exact_version": 2, "version_timeout_s": 0.1}, 409, "exact_version"),
        ],
    )
    def test_are_explained(
        self, plain: tuple[Stand, str], body: dict[str, Any], status: int, param: str | None
    ) -> None:
        response = post(plain[1], **body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, param), error
        assert error["message"]
        assert error["code"]
        assert set(error) >= {"message", "type", "param", "code"}

    def test_of_bodies_and_routes(self, plain: tuple[Stand, str]) -> None:
        _, at = plain
        path = f"{at}/v1/completions"
        as_json = {"content-type": "application/json"}
        assert httpx.post(path, content=b"{}").status_code == 415
        for content in (b"", b"{", b"[]", b"\xff", b"[" * 5000, b'{"prompt":' * 900, b"null"):
            assert httpx.post(path, content=content, headers=as_json).status_code == 400
        large = httpx.post(path, content=b" " * 20_001, headers=as_json)
        assert large.status_code == 413
        assert large.json()["error"]["code"] == "body_too_large"

        def parts() -> Iterator[bytes]:
            for _ in range(300):
                yield b" " * 100

        # Without a length said beforehand.
        assert httpx.post(path, content=parts(), headers=as_json).status_code == 413
        assert httpx.get(path).status_code == 405
        assert httpx.get(f"{at}/v2").json()["error"]["code"] == "not_found"
        chat = post(at, "/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
        assert chat.json()["error"]["code"] == "no_tokenizer"
        bad = post(at, "/v1/chat/completions", messages=[{"role": "user", "content": [{}]}])
        assert bad.status_code == 400
        assert post(at, prompt=[1], max_tokens=1).status_code == 200

    def test_too_many_at_once(self, stand: Stand) -> None:
        settings = stand.settings
        object.__setattr__(settings, "limits", LIMITS._replace(requests=2))
        with served(settings) as at:
            found: list[int] = []

            def ask() -> None:
                asked = {"prompt": [1], "max_tokens": 1, "min_version": 2}
                status = 429
                while status == 429:
                    status = post(at, **asked, version_timeout_s=20).status_code
                found.append(status)

            threads = [threading.Thread(target=ask) for _ in range(2)]
            for thread in threads:
                thread.start()
            end_s = time.monotonic() + 10
            while (refused := post(at, prompt=[1])).status_code != 429:
                assert time.monotonic() < end_s
            assert refused.json()["error"]["code"] == "too_many_requests"
            stand.trainer.publish()
            for thread in threads:
                thread.join(30)
            assert found == [200, 200]
            assert post(at, prompt=[1]).status_code == 200

    def test_a_token(self, stand: Stand) -> None:
        object.__setattr__(stand.settings, "token", "a-secret-of-some-length")
        with served(stand.settings) as at:
            assert post(at, prompt=[1]).status_code == 401
            assert httpx.get(f"{at}/v1/models").status_code == 401
            assert httpx.get(f"{at}/health").status_code == 200
            assert httpx.get(f"{at}/ready").json() == {"ready": True}
            secret = "a-secret-of-some-length"
            for given, status in (
                (f"Bearer {secret}", 200),
                (f"bearer {secret}", 200),
                ("Bearer é", 401),
                (f"Basic {secret}", 401),
                (secret, 401),
            ):
                headers = {"authorization": given.encode()}
                assert httpx.get(f"{at}/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("is_interruptible", [False, True])
def test_every_label_is_true_while_versions_change(stand: Stand, is_interruptible: bool) -> None:
    """Clients ask without a pause; what they get was sampled with what it says, token for token."""
    object.__setattr__(stand.settings, "is_interruptible", is_interruptible)
    object.__setattr__(stand.settings, "proves", True)
    answers: list[dict[str, Any]] = []
    failures: list[Any] = []
    is_over = threading.Event()

    def ask(at: str, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        with httpx.Client(timeout=60) as client:
            while not is_over.is_set():
                length = int(torch.randint(1, 30, (), generator=generator))
                prompt = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
                body = {"prompt": prompt, "max_tokens": 10 + 20 * number, "logprobs": 0}
                if number == 3:
                    body["exact_version"] = 1 + len(versions) // 2
                response = client.post(
                    f"{at}/v1/completions",
                    json={**body, "n": 1 + number % 2, "stream": number == 2},
                )
                if response.status_code == 409 and number == 3:
                    continue
                if response.status_code != 200:
                    failures.append(response.text)
                elif number == 2:
                    found = joined(events(response))
                    answers.append({"choices": [{**found, "prompt_token_ids": prompt}]})
                else:
                    answers.append(response.json())

    versions = [1]
    with served(stand.settings) as at:
        threads = [threading.Thread(target=ask, args=(at, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(8):
            versions.append(stand.trainer.publish().version)
            waited = post(at, prompt=[1], min_version=versions[-1], version_timeout_s=30)
            assert waited.status_code == 200, waited.text
            time.sleep(0.05)
        is_over.set()
        for thread in threads:
            thread.join(60)
        assert httpx.get(f"{at}/ready").json()["weight_version"].startswith("9-")
    assert not failures
    seen = set()
    crossed = 0
    for answer in answers:
        for choice in answer["choices"]:
            stand.fresh.check(choice)
            labels = [span["weight_version"] for span in choice["weight_spans"]]
            seen |= set(labels)
            crossed += len(labels) > 1
        if "weight_version" in answer:
            labels = [s["weight_version"] for c in answer["choices"] for s in c["weight_spans"]]
            numbers = [int(label.partition("-")[0]) for label in labels]
            assert answer["weight_version_start"].startswith(f"{min(numbers)}-")
            assert answer["weight_version_end"].startswith(f"{max(numbers)}-")
            assert answer["weight_version"] == (labels[0] if len(set(labels)) == 1 else None)
    assert len(seen) >= 5
    assert bool(crossed) == is_interruptible
    # The check would see a wrong label.
    tokens = answers[0]["choices"][0]
    wrong = {**tokens["weight_spans"][0], "weight_version": label_of_version(stand, tokens)}
    with pytest.raises(AssertionError):
        stand.fresh.check({**tokens, "weight_spans": [{**wrong, "stop": len(tokens["token_ids"])}]})


def label_of_version(stand: Stand, choice: dict[str, Any]) -> str:
    """The label of another version than that of a choice."""
    used = {span["weight_version"] for span in choice["weight_spans"]}
    return next(label for label in stand.fresh._models if label not in used)


class TestVersions:
    def test_waiting_for_one(self, stand: Stand) -> None:
        with served(stand.settings) as at:
            found: list[httpx.Response] = []

            def ask(**wanted: int) -> None:
                found.append(post(at, prompt=[1], max_tokens=3, version_timeout_s=20, **wanted))

            threads = [
                threading.Thread(target=ask, kwargs={"min_version": 2}),
                threading.Thread(target=ask, kwargs={"exact_version": 2}),
            ]
            for thread in threads:
                thread.start()
            time.sleep(0.1)
            assert not found
            stand.trainer.publish()
            for thread in threads:
                thread.join(30)
            assert [response.status_code for response in found] == [200, 200]
            assert all(r.json()["weight_version"].startswith("2-") for r in found)
            start_s = time.monotonic()
            past = post(at, prompt=[1], exact_version=1, version_timeout_s=20)
            assert past.status_code == 409
            assert past.json()["error"]["served_version"] == 2
            assert time.monotonic() - start_s < 5

    def test_a_store_that_is_away(self, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is here is served, and says for how long nobody could look."""

        def unavailable(*_: Any, **__: Any) -> None:
            raise Unavailable("no answer")

        with served(stand.settings) as at:
            assert post(at, prompt=[1]).status_code == 200
            with monkeypatch.context() as patch:
                patch.setattr(Follower, "catch_up", unavailable)
                end_s = time.monotonic() + 20
                while "not_updated_because" not in httpx.get(f"{at}/ready").json():
                    assert time.monotonic() < end_s
                time.sleep(0.1)
                answer = post(at, prompt=[1]).json()
            assert answer["weight_version"].startswith("1-")
            assert answer["staleness"]["checked_s"] >= 0.1
            stand.trainer.publish()
            asked = {"prompt": [1], "min_version": 2, "version_timeout_s": 30}
            assert post(at, **asked).status_code == 200
            assert "not_updated_because" not in httpx.get(f"{at}/ready").json()

    def test_an_update_that_waits_makes_answers_stale(self, stand: Stand) -> None:
        with (
            served(stand.settings) as at,
            httpx.stream(
                "POST",
                f"{at}/v1/completions",
                json={"prompt": [1], "max_tokens": 100, "stream": True},
                timeout=60,
            ) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            stand.trainer.publish()
            rest = "".join(lines)
        assert rest.endswith("data: [DONE]")
        assert '"weight_version":"2-' not in rest

    @pytest.mark.parametrize("is_stream", [True, False])
    def test_a_client_that_goes_ends_its_request(
        self, stand: Stand, is_stream: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[None] = []
        forward = Sampler._forward

        def slow(*arguments: Any) -> Any:
            calls.append(None)
            time.sleep(0.02)
            return forward(*arguments)

        monkeypatch.setattr(Sampler, "_forward", slow)
        body = {"prompt": [1], "max_tokens": 100, "n": 3, "stream": is_stream}
        with served(stand.settings) as at:
            if is_stream:
                with httpx.stream("POST", f"{at}/v1/completions", json=body) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.TimeoutException):
                    httpx.post(f"{at}/v1/completions", json=body, timeout=0.2)
            assert post(at, prompt=[1], max_tokens=1).status_code == 200
            assert 1 < len(calls) < 100

    def test_a_model_folder_and_a_stream_that_is_empty_yet(self, tmp_path: Path) -> None:
        model = llama()
        model.save_pretrained(tmp_path / "model")
        settings = Settings(
            url=str(tmp_path / "stream"), model=tmp_path / "model", limits=LIMITS, poll_s=0.02
        )
        with served(settings) as at:
            assert httpx.get(f"{at}/ready").status_code == 503
            assert post(at, prompt=[1]).status_code == 503
            assert post(at, prompt=[1], min_version=1).status_code == 409
            trainer = Trainer(settings.url, model)
            trainer.publish()
            asked = {"prompt": [1], "min_version": 1, "version_timeout_s": 30}
            assert post(at, **asked).status_code == 200
            trainer.close()


class TestCommand:
    def test_serves_until_it_is_told_to_stop(self, stand: Stand, tmp_path: Path) -> None:
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        arguments = ["serve", "--follow", stand.url, "--port", "0", "--poll", "0.05", "--json"]
        process = subprocess.Popen(
            [sys.executable, "-m", "thinwire", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
        )
        try:
            assert process.stdout is not None
            at = json.loads(process.stdout.readline())["url"]
            assert at.startswith("http://127.0.0.1:")
            stand.trainer.publish()
            asked = {"prompt": [1], "min_version": 2, "version_timeout_s": 30}
            assert post(at, **asked).json()["weight_step"] == 10
            assert list(temporary.iterdir())
            process.terminate()
            assert process.wait(30) == 0
            assert not list(temporary.iterdir())
        finally:
            process.kill()

    def test_without_a_token_only_for_this_machine(self, stand: Stand, tmp_path: Path) -> None:
        arguments = ["serve", "--follow", stand.url, "--host", "0.0.0.0"]
        found = CliRunner().invoke(app, arguments)
        assert found.exit_code == 2
        assert "--token-file" in found.output
        (tmp_path / "token").write_text("short")
        found = CliRunner().invoke(app, [*arguments, "--token-file", str(tmp_path / "token")])
        assert found.exit_code == 2

    def test_what_cannot_be_loaded(self, tmp_path: Path) -> None:
        trainer = Trainer(str(tmp_path / "stream"), torch.nn.Linear(2, 2))
        trainer.publish()
        trainer.close()
        found = CliRunner().invoke(app, ["serve", "--follow", str(tmp_path / "stream")])
        assert found.exit_code == 2
        assert "config.json" in found.output

    def test_a_model_of_another_shape(self, stand: Stand, tmp_path: Path) -> None:
        llama(hidden_size=16).save_pretrained(tmp_path / "model")
        with followed(stand, tmp_path):
            pass
        found = CliRunner().invoke(
            app,
            [
                *("serve", str(tmp_path / "model"), "--follow", stand.url),
                *("--folder", str(tmp_path / "copy"), "--port", "0"),
            ],
        )
        assert found.exit_code == 4
        assert "embed_tokens" in found.output


def followed(stand: Stand, tmp_path: Path) -> Any:
    follower = Follower(stand.url, tmp_path / "copy", lease=False)
    follower.catch_up()
    return follower
