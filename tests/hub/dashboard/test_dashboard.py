"""The dashboard in a real browser, on a real hub of a real stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from thinwire.report.messages import Fault
from thinwire.web import Role, Tokens

from .serving import Trainer, place_at, real_hub, training, update_to
from .viewing import DRAWN, Viewer

READ, FOLLOW = "read-token-of-16", "follow-token-of-16"


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    with training(tmp_path, versions=3) as made:
        yield made


def test_versions_replicas_and_staleness_are_shown(viewer: Viewer, trainer: Trainer) -> None:
    with real_hub(trainer.url) as url:
        place = place_at(url)
        place.report("eu-0", version=3, region="eu", updates=[update_to(3)])
        place.report("eu-1", version=2, region="eu", phase="fetch", target=3, total_bytes=10,
                     done_bytes=4)  # fmt: skip
        place.report("us-0", version=1, region="us", fault=Fault("Unavailable", "no answer", 1))
        place.report("us-1", region="us")
        place.report("relay-us", region="us", kind="relay", served_bytes=1000, fetched_bytes=10)
        page = viewer.open(url)
        assert viewer.text("#figure-head") == "v3"
        assert "step 30" in viewer.text("#figure-head-more")
        viewer.wait_until("document.querySelectorAll('button.cell').length === 4")
        assert "bucket read" in viewer.text("#figure-age-more")
        assert viewer.text("#figure-changed") == "1.00 %"
        assert float(viewer.text("#figure-saved").rstrip(" %")) > 10
        cells = page.eval_on_selector_all(
            "button.cell",
            "cells => cells.map(one => [one.ariaLabel, one.textContent, one.dataset.look])",
        )
        says = {label.split(":")[0]: (label, text, look) for label, text, look in cells}
        assert says["eu-0"] == ("eu-0: ready, current", "", "b0")
        assert says["eu-1"][0].startswith("eu-1: updating, behind by 10 steps")
        assert says["eu-1"][1:] == ("10", "b1")
        assert says["us-0"][1:] == ("20", "b2")
        assert says["us-1"] == ("us-1: joining, serves none", "↑", "joining")
        assert viewer.text("[data-region=eu] .counts") == "1 ready\n1 updating"
        assert (
            viewer.text("[data-region=us] .relays")
            == "◆ relay-us\ngave 1.00 kB, 99.00 % from its cache"
        )
        assert "eu-1" in viewer.text("#running")
        assert "40 %" in viewer.text("#running")
        assert "Unavailable" in viewer.text("#errors")
        assert "us-0" in viewer.text("#errors")
        assert viewer.text("#updates .who") == "eu-0"
        assert viewer.text("#updates .pause") == "300 ms"
        assert page.locator("#updates .bar span").count() == 5
        assert viewer.text("#list-note") == "5 of 5"


def test_a_commit_and_a_heartbeat_show_up_without_a_reload(
    viewer: Viewer, trainer: Trainer
) -> None:
    with real_hub(trainer.url) as url:
        place = place_at(url)
        place.report("eu-0", version=3, region="eu")
        page = viewer.open(url)
        page.evaluate("window.isSame = true")
        viewer.wait_for("#line-word", "live")
        trainer.publish(identity="policy-4")
        viewer.wait_for("#figure-head", "v4")
        assert "policy-4" in viewer.text("#figure-head-more")
        viewer.wait_for("button.cell", "10")
        place.report("eu-0", version=4, region="eu")
        place.report("ap-0", version=4, region="ap")
        viewer.wait_until("document.querySelectorAll('button.cell[data-look=b0]').length === 2")
        assert page.evaluate("window.isSame") is True


def test_a_stream_without_versions_and_replicas_says_so(viewer: Viewer, tmp_path: Path) -> None:
    with training(tmp_path, versions=0) as trainer, real_hub(trainer.url) as url:
        viewer.open(url)
        assert viewer.text("#figure-head") == "none yet"
        assert viewer.text("#versions-empty").startswith("Nothing was published yet")
        assert viewer.text("#fleet-empty").startswith("No replica has reported")
        viewer.wait_for("#line-word", "live")
        trainer.publish()
        viewer.wait_for("#figure-head", "v1")
        assert not viewer.page.is_visible("#versions-empty")


def test_it_asks_for_a_token_and_keeps_it_for_the_tab(viewer: Viewer, trainer: Trainer) -> None:
    viewer.may_fail = True
    tokens = Tokens({READ: Role.READ, FOLLOW: Role.FOLLOW})
    with real_hub(trainer.url, tokens=tokens) as url:
        place_at(url, FOLLOW).report("eu-0", version=3, region="eu")
        page = viewer.open(url, is_drawn=False)
        page.wait_for_selector("#token[open]")
        page.fill("#token-text", "a-token-that-is-wrong")
        page.keyboard.press("Enter")
        viewer.wait_until("document.getElementById('token-wrong').textContent !== ''")
        assert page.locator(DRAWN).count() == 0
        page.fill("#token-text", READ)
        page.keyboard.press("Enter")
        viewer.wait_for("#figure-head", "v3")
        viewer.wait_for("#line-word", "live")
        assert not page.is_visible("#token")
        page.reload()
        viewer.wait_for("#figure-head", "v3")
        assert page.evaluate("Object.values(localStorage).join()").find(READ) < 0
        page.click("#forget")
        page.wait_for_selector("#token[open]")


def test_a_hub_that_went_away_is_said_and_found_again(viewer: Viewer, trainer: Trainer) -> None:
    viewer.may_fail = True
    with real_hub(trainer.url) as url:
        page = viewer.open(url)
        viewer.wait_for("#line-word", "live")
        page.evaluate("window.isSame = true")
    viewer.wait_for("#line-word", "hub away")
    assert "Last heard" in viewer.text("#line-text")
    assert viewer.text("#figure-head") == "v3"
    trainer.publish()
    with real_hub(trainer.url, port=urlsplit(url).port or 0):
        viewer.wait_for("#line-word", "live")
        viewer.wait_for("#figure-head", "v4")
        assert not page.is_visible("#line-banner")
        assert page.evaluate("window.isSame") is True


def test_the_price_and_the_limit_are_the_viewers(viewer: Viewer, trainer: Trainer) -> None:
    with real_hub(trainer.url) as url:
        place = place_at(url)
        place.report("eu-0", version=1, region="eu")
        page = viewer.open(url)
        assert page.input_value("#limit") == "20"
        page.wait_for_selector("button.cell[data-look=b2]")
        page.fill("#limit", "5")
        page.wait_for_selector("button.cell[data-look=b4]")
        before = viewer.text("#figure-money")
        page.fill("#price", "1000")
        viewer.wait_until(f"document.getElementById('figure-money').innerText !== '{before}'")
        page.reload()
        page.wait_for_selector("button.cell[data-look=b4]")
        assert page.input_value("#price") == "1000.00"
        page.fill("#limit", "")
        page.wait_for_selector("button.cell[data-look=b2]")


def test_another_stream_can_be_chosen(viewer: Viewer, trainer: Trainer, tmp_path: Path) -> None:
    with (
        training(tmp_path / "other", versions=1) as other,
        real_hub(trainer.url, others={"other": other.url}) as url,
    ):
        page = viewer.open(f"{url}/#stream=other")
        viewer.wait_for("#figure-head", "v1")
        page.select_option("#stream", "run")
        viewer.wait_for("#figure-head", "v3")
        assert page.url.endswith("#stream=run")
        viewer.wait_for("#line-word", "live")
        other.publish()
        trainer.publish()
        viewer.wait_for("#figure-head", "v4")
