"""The table of the dashboard's files, and what the hub sends with them."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from thinwire.capacity.facts import EGRESS_PRICE
from thinwire.hub.pages import find_page

from .serving import real_hub, training

MAX_BYTES = 100_000


def names() -> list[str]:
    return sorted(path.name for path in (files("thinwire.hub") / "static").iterdir())


def test_the_table_has_every_file_and_no_other_is_found() -> None:
    for name in names():
        assert find_page(name) is not None, name
    strangers = ("../pages.py", "static/main.js", "", ".", "/etc/passwd", "main.js\0", "MAIN.JS")
    assert [find_page(name) for name in strangers] == [None] * len(strangers)


def test_the_page_is_small_and_names_no_other_host() -> None:
    pages = [find_page(name) for name in names()]
    assert sum(len(page.data) for page in pages if page) < MAX_BYTES
    for page in pages:
        assert page is not None
        text = page.data.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text
        assert "https:" not in text
        assert "innerHTML" not in text


def test_money_is_counted_as_by_the_plan() -> None:
    page = find_page("settings.js")
    assert page is not None
    assert f"DEFAULT_PRICE = {EGRESS_PRICE.value};" in page.data.decode()


def test_the_hub_sends_them_with_what_browsers_need(tmp_path: Path) -> None:
    with training(tmp_path, versions=0) as trainer, real_hub(trainer.url) as url:
        page = httpx.get(url)
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert page.headers["X-Content-Type-Options"] == "nosniff"
        script = httpx.get(f"{url}/static/main.js")
        assert script.headers["Content-Type"].startswith("text/javascript")
        again = {"If-None-Match": script.headers["ETag"]}
        assert httpx.get(f"{url}/static/main.js", headers=again).status_code == 304


@pytest.mark.parametrize("path", ["static/", "static/..%2fpages.py", "static/%2e%2e/x", "main.js"])
def test_the_hub_walks_no_folder(tmp_path: Path, path: str) -> None:
    with training(tmp_path, versions=0) as trainer, real_hub(trainer.url) as url:
        assert httpx.get(f"{url}/{path}").status_code == 404
