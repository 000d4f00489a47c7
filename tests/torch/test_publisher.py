"""Publishing step after step: what followers get is what the weights were."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    warnings.warn("torch is not importable: publishing from torch was NOT tested", stacklevel=1)
    pytest.skip("torch is not importable", allow_module_level=True)

import torch
from torch import nn

from thinwire.errors import (
    Deadline,
    InvalidArgument,
    TensorMismatch,
    ThinwireError,
    Unavailable,
)
from thinwire.stream.events import Event, Published, Refused

from .making import held_in
from .training import BF16, Recorder, Small, Stand, done, nudge, rows_of, train, wait_until


class TestTraining:
    @pytest.mark.parametrize(
        "make",
        [
            lambda p: torch.optim.AdamW(p, lr=1e-3),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
            lambda p: torch.optim.RMSprop(p, lr=1e-3),
            lambda p: torch.optim.Adafactor(p, lr=1e-3),
            lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=1e-3),
        ],
        ids=["AdamW", "SGD", "RMSprop", "Adafactor", "Muon"],
    )
    def test_several_steps_between_publishes(self, stand: Stand, make: Callable[..., Any]) -> None:
        """Whatever the optimizer, and however often it stepped: nothing is lost."""
        model = Small()
        optimizer = make(list(model.parameters()))
        publisher = stand.publisher(model)
        follower = stand.follower()
        step = 0
        for steps in (0, 1, 2, 3):
            for _ in range(steps):
                step += 1
                train(model, optimizer, step)
            version = done(publisher.publish(step))
            assert follower.catch_up() == version
            assert held_in(stand.folder / "f") == rows_of(model)
        follower.close()
        stand.check_whole()

    def test_gradients_are_accumulated(self, stand: Stand) -> None:
        model = Small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        publisher = stand.publisher(model)
        done(publisher.publish(0))
        for _ in range(3):
            model(torch.arange(16)).square().sum().backward()
        assert done(publisher.publish(1)).changed_count == 0, "gradients are no weights"
        optimizer.step()
        done(publisher.publish(2))
        assert stand.held() == rows_of(model)
        assert any(parameter.grad is not None for parameter in model.parameters())

    def test_bf16_weights(self, stand: Stand) -> None:
        model = Small().to(BF16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        publisher = stand.publisher(model)
        for step in range(3):
            done(publisher.publish(step))
            assert stand.held() == rows_of(model)
            train(model, optimizer, step)

    def test_zeros_that_change_sign_and_nan_payloads(self, stand: Stand) -> None:
        model = nn.Linear(300, 300, bias=False).to(BF16)
        words = model.weight.detach().view(torch.int16)
        words.zero_()
        publisher = stand.publisher(model)
        done(publisher.publish(0))
        payloads = [0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFFF]
        words[0, :5] = torch.tensor(payloads, dtype=torch.int32).to(torch.int16)
        words[7] = -0x8000
        assert done(publisher.publish(1)).changed_count == 305
        assert stand.held() == rows_of(model)
        words[0, 0] = 0x7F82
        assert done(publisher.publish(2)).changed_count == 1
        assert stand.held() == rows_of(model)

    def test_master_weights_that_become_nan(self, stand: Stand) -> None:
        """A run that diverged is published as it is."""
        model = nn.Linear(300, 300)
        publisher = stand.publisher(model)
        done(publisher.publish(0))
        with torch.no_grad():
            model.weight[3, 5:90] = torch.nan
            model.bias.fill_(-torch.inf)
        done(publisher.publish(1))
        assert stand.held() == rows_of(model)
        assert done(publisher.publish(2)).changed_count == 0

    def test_training_goes_on_while_a_version_is_on_its_way(self, stand: Stand) -> None:
        """Of the first version and of a delta: what was captured is what arrives."""
        model = Small()
        publisher = stand.publisher(model)
        for step in range(2):
            gate = stand.hold()
            expected = rows_of(model)
            ticket = publisher.publish(step)
            nudge(model, step, share=0.5)
            gate.set()
            done(ticket)
            assert stand.held() == expected
        done(publisher.publish(2))
        assert stand.held() == rows_of(model)

    def test_every_publish_counts_however_soon_it_comes(self, stand: Stand) -> None:
        """Whoever waited for a ticket is not told that it is still on its way."""
        model = nn.Linear(30, 30)
        publisher = stand.publisher(model)
        for step in range(60):
            nudge(model, step)
            assert done(publisher.publish(step)).version == step + 1

    def test_nothing_of_old_publishes_is_kept(self, stand: Stand) -> None:
        publisher = stand.publisher(nn.Linear(30, 30))
        sizes = []
        for step in range(12):
            done(publisher.publish(step))
            told = publisher._publisher.ranks._told  # type: ignore[attr-defined]
            sizes.append(sum(map(len, told.values())))
        assert max(sizes[6:]) <= max(sizes[:6])
        kept = sorted(p.name for p in publisher._rank_folder.rglob("*") if p.is_file())
        assert kept == [".thinwire-lock", "stream-id"]


class TestTickets:
    def test_a_committed_one(self, stand: Stand) -> None:
        model = Small()
        publisher = stand.publisher(model)
        assert publisher.head is None
        ticket = publisher.publish(7, metadata={"reward": 0.5, "tags": ["a"]})
        version = done(ticket)
        assert (ticket.state, ticket.is_done, ticket.error) == ("committed", True, None)
        assert ticket.version == version == publisher.head
        assert (version.version, version.step, version.kind) == (1, 7, "anchor")
        assert version.metadata == {"reward": 0.5, "tags": ["a"]}
        nudge(model)
        ticket = publisher.publish(8)
        version = done(ticket)
        words = sum(p.numel() for p in model.parameters())
        assert version.word_count == words
        assert ticket.raw_bytes == version.raw_bytes == 2 * words
        assert 0 < ticket.changed_count == version.changed_count < words / 20
        assert 0 < ticket.payload_bytes == version.payload_bytes < ticket.raw_bytes / 5
        assert set(ticket.seconds) == {"capture", "wait", "encode", "upload", "commit"}
        assert all(seconds >= 0 for seconds in ticket.seconds.values())
        assert "committed" in repr(ticket)
        assert "8" in repr(ticket)

    def test_states_on_the_way(self, stand: Stand) -> None:
        model = Small()
        publisher = stand.publisher(model)
        done(publisher.publish(0))
        nudge(model)
        upload, commit = threading.Event(), threading.Event()

        def hook(when: str, operation: str, key: str) -> None:
            if when == "before" and operation == "put_file":
                assert upload.wait(60)
            if when == "before" and operation == "put_if_absent":
                assert commit.wait(60)

        stand.store.hook = hook
        ticket = publisher.publish(1)
        wait_until(lambda: ticket.state == "uploading")
        assert not ticket.is_done
        with pytest.raises(Deadline, match="step 1 is still uploading"):
            ticket.wait(0.01)
        assert ticket.payload_bytes == ticket.raw_bytes == 0
        upload.set()
        wait_until(lambda: ticket.state == "committing")
        assert not ticket.is_done
        assert publisher.head is not None
        assert publisher.head.version == 1
        commit.set()
        assert done(ticket).version == 2

    def test_steps_need_not_be_given(self, stand: Stand) -> None:
        assert done(stand.publisher(nn.Linear(3, 3)).publish()).step is None

    @pytest.mark.parametrize("step", [1.5, "3", True, 2**63])
    def test_steps_that_are_none(self, stand: Stand, step: Any) -> None:
        publisher = stand.publisher(nn.Linear(3, 3))
        with pytest.raises(InvalidArgument):
            publisher.publish(step)
        assert done(publisher.publish(1)).version == 1, "nothing was done"

    def test_metadata_that_no_manifest_holds(self, stand: Stand) -> None:
        publisher = stand.publisher(nn.Linear(3, 3))
        with pytest.raises(InvalidArgument):
            publisher.publish(1, metadata={"x": object()})
        with pytest.raises(ThinwireError):
            publisher.publish(1, metadata={"x": "y" * (64 << 20)}).wait(60)
        assert done(publisher.publish(2)).version == 1

    def test_a_closed_publisher(self, stand: Stand) -> None:
        model = Small()
        with stand.publisher(model) as publisher:
            gate = stand.hold()
            ticket = publisher.publish(1)
            threading.Timer(0.1, gate.set).start()
        assert ticket.state == "committed", "closing waits for what is on its way"
        with pytest.raises(InvalidArgument, match="closed"):
            publisher.publish(2)
        publisher.close()
        assert stand.held() == rows_of(model)

    def test_waiting_for_the_publisher(self, stand: Stand) -> None:
        publisher = stand.publisher(nn.Linear(3, 3))
        assert publisher.wait() is None
        publisher.publish(1)
        head = publisher.wait(60)
        assert head is not None
        assert head == publisher.head


class TestBusy:
    def test_latest_skips_and_the_next_delta_spans_both(self, stand: Stand) -> None:
        model = Small()
        publisher = stand.publisher(model)
        done(publisher.publish(0))
        gate = stand.hold()
        nudge(model, 1)
        first = publisher.publish(1)
        expected = rows_of(model)
        wait_until(lambda: first.state == "uploading")
        skipped = []
        for step in (2, 3, 4):
            nudge(model, step)
            skipped.append(publisher.publish(step))
        assert [t.state for t in skipped] == ["skipped"] * 3
        assert [t.wait(0) for t in skipped] == [None] * 3
        assert all(t.is_done and t.error is None and t.payload_bytes == 0 for t in skipped)
        gate.set()
        assert done(first).version == 2
        assert stand.held() == expected
        version = done(publisher.publish(5))
        assert (version.version, version.step) == (3, 5)
        assert stand.held() == rows_of(model)
        stand.check_whole()

    def test_block_waits_and_publishes_every_step(self, stand: Stand) -> None:
        model = Small()
        publisher = stand.publisher(model, when_busy="block")
        done(publisher.publish(0))
        gate = stand.hold()
        nudge(model, 1)
        first = publisher.publish(1)
        expected = rows_of(model)
        nudge(model, 2)
        threading.Timer(0.2, gate.set).start()
        second = publisher.publish(2)
        assert first.state == "committed", "it was waited for"
        done(second)
        assert stand.held(2) == expected
        assert stand.held(3) == rows_of(model)

    def test_block_does_not_wait_for_ever(self, stand: Stand) -> None:
        model = Small()
        publisher = stand.publisher(model, when_busy="block", deadline_s=0.2)
        done(publisher.publish(0))
        gate = stand.hold()
        first = publisher.publish(1)
        with pytest.raises(Deadline, match="still on its way"):
            publisher.publish(2)
        gate.set()
        done(first)
        nudge(model)
        assert done(publisher.publish(3)).version == 3
        assert stand.held() == rows_of(model)


class TestFailures:
    @pytest.mark.parametrize("first_fails", [False, True])
    @pytest.mark.parametrize("is_done", [False, True])
    def test_an_upload_that_fails(self, stand: Stand, first_fails: bool, is_done: bool) -> None:
        """Twice; then a good one: it has everything since the last version that there is."""
        model = Small()
        publisher = stand.publisher(model)
        if not first_fails:
            done(publisher.publish(0))
        stand.fail("put_file", is_done=is_done)
        tickets = []
        for step in (1, 2):
            nudge(model, step)
            tickets.append(publisher.publish(step))
            with pytest.raises(Unavailable):
                tickets[-1].wait(60)
        assert [t.state for t in tickets] == ["failed"] * 2
        assert isinstance(tickets[0].error, Unavailable)
        assert (publisher.head is None) == first_fails
        refused = [e for e in stand.observer.events if isinstance(e, Refused)]
        assert [event.code for event in refused] == ["unavailable"] * 2
        stand.mend()
        nudge(model, 3)
        version = done(publisher.publish(3))
        assert (version.version, version.step) == (1 if first_fails else 2, 3)
        assert stand.held() == rows_of(model)
        nudge(model, 4)
        done(publisher.publish(4))
        assert stand.held() == rows_of(model)
        stand.check_whole()

    @pytest.mark.parametrize("is_first", [False, True])
    @pytest.mark.parametrize("times", [1, 3])
    @pytest.mark.parametrize("is_done", [False, True])
    def test_a_commit_that_is_not_answered(
        self, stand: Stand, is_done: bool, times: int, is_first: bool
    ) -> None:
        """Whether it landed is found out; there is one version, and never two."""
        model = Small()
        publisher = stand.publisher(model)
        if not is_first:
            done(publisher.publish(0))
            nudge(model)
        left = [times]

        def hook(when: str, operation: str, key: str) -> None:
            if operation == "put_if_absent" and when == ("after" if is_done else "before"):
                left[0] -= 1
                if left[0] >= 0:
                    raise Unavailable("nobody answered")
            if operation == "put_if_absent" and when == "before" and is_done and left[0] < times:
                left[0] -= 1
                if left[0] >= 0:
                    raise Unavailable("nobody answered again")

        stand.store.hook = hook
        ticket = publisher.publish(1)
        version = done(ticket)
        assert version.version == (1 if is_first else 2)
        assert ticket.state == "committed"
        refused = [e for e in stand.observer.events if isinstance(e, Refused)]
        assert len(refused) == times
        assert stand.held() == rows_of(model)
        nudge(model, 9)
        assert done(publisher.publish(2)).version == version.version + 1
        assert stand.held() == rows_of(model)
        stand.check_whole()

    def test_a_store_that_is_down_for_a_while(self, stand: Stand) -> None:
        """Steps are skipped while the commit is asked for; training is never held up."""
        model = Small()
        publisher = stand.publisher(model)
        done(publisher.publish(0))
        stand.fail("put_if_absent")
        nudge(model, 1)
        first = publisher.publish(1)
        wait_until(lambda: any(isinstance(e, Refused) for e in stand.observer.events))
        states = []
        for step in range(2, 6):
            nudge(model, step)
            states.append(publisher.publish(step).state)
        assert states == ["skipped"] * 4
        stand.mend()
        assert done(first).step == 1
        assert done(publisher.publish(6)).version == 3
        assert stand.held() == rows_of(model)

    def test_a_store_that_is_down_for_a_while_with_block(self, stand: Stand) -> None:
        model = Small()
        publisher = stand.publisher(model, when_busy="block")
        done(publisher.publish(0))
        stand.fail("put_if_absent")
        nudge(model, 1)
        first = publisher.publish(1)
        threading.Timer(0.2, stand.mend).start()
        nudge(model, 2)
        second = publisher.publish(2)
        assert first.state == "committed"
        assert done(second).version == 3
        assert stand.held() == rows_of(model)

    def test_closing_while_the_store_is_down(self, stand: Stand) -> None:
        """It ends; the ticket says that it failed."""
        model = Small()
        publisher = stand.publisher(model)
        done(publisher.publish(0))
        stand.fail("put_if_absent")
        ticket = publisher.publish(1)
        wait_until(lambda: any(isinstance(e, Refused) for e in stand.observer.events))
        with pytest.raises(Deadline, match="step 1 is given up"):
            publisher.close(timeout_s=0.1)
        with pytest.raises(Unavailable):
            ticket.wait(60)
        stand.mend()
        other = stand.publisher(model)
        nudge(model)
        done(other.publish(2))
        assert stand.held() == rows_of(model)
        stand.check_whole()

    def test_the_hint_of_the_head_is_not_worth_failing(self, stand: Stand) -> None:
        model = Small()
        publisher = stand.publisher(model)
        stand.fail("put")
        assert done(publisher.publish(0)).version == 1
        stand.mend()
        assert stand.held() == rows_of(model)

    @pytest.mark.parametrize("which", ["encode", "upload"])
    def test_what_is_no_error_of_ours(
        self, stand: Stand, monkeypatch: pytest.MonkeyPatch, which: str
    ) -> None:
        """A bug somewhere: a failed ticket, and the next publish is right."""
        model = Small()
        publisher = stand.publisher(model)
        done(publisher.publish(0))
        nudge(model, 1)

        def boom(*arguments: Any, **options: Any) -> Any:
            raise ZeroDivisionError("a bug")

        target = "thinwire.publish.attempt.code_unit" if which == "encode" else None
        with monkeypatch.context() as patch:
            patch.setattr(target or "thinwire.publish.attempt.put_files", boom)
            with pytest.raises(ThinwireError, match="ZeroDivisionError: a bug"):
                publisher.publish(1).wait(60)
        nudge(model, 2)
        assert done(publisher.publish(2)).version == 2
        assert stand.held() == rows_of(model)
        assert list(publisher._rank_folder.rglob("*.tw")) == []

    def test_a_capture_that_fails(self, stand: Stand) -> None:
        """Raised where it happens; the next publish goes on from the last version."""
        model = Small()
        publisher = stand.publisher(model)
        done(publisher.publish(0))
        weight = model.layers[1].weight
        model.layers[1].weight = nn.Parameter(torch.ones(3, 3))
        nudge(model, 1)
        with pytest.raises(TensorMismatch, match=r"layers\.1\.weight"):
            publisher.publish(1)
        model.layers[1].weight = weight
        nudge(model, 2)
        assert done(publisher.publish(2)).version == 2
        assert stand.held() == rows_of(model)


class TestEvents:
    def test_what_an_observer_hears(self, stand: Stand) -> None:
        model = Small()
        publisher = stand.publisher(model)
        ticket = publisher.publish(5)
        version = done(ticket)
        (event,) = stand.observer.events
        assert isinstance(event, Published)
        assert (event.version, event.step, event.payload_bytes) == (1, 5, version.payload_bytes)

    def test_an_observer_that_raises_once(self, stand: Stand) -> None:
        """It was told not to; the version exists all the same, and the next one follows it."""

        class Broken(Recorder):
            def on_event(self, event: Event) -> None:
                super().on_event(event)
                if len(self.events) == 2:
                    raise RuntimeError("broken")

        model = Small()
        observer = Broken()
        publisher = stand.publisher(model, observer=observer)
        done(publisher.publish(0))
        nudge(model, 1)
        with suppress(ThinwireError):
            publisher.publish(1).wait(60)
        assert stand.held() == rows_of(model)
        nudge(model, 2)
        assert done(publisher.publish(2)).version == 3
        assert stand.held() == rows_of(model)
        stand.check_whole()
