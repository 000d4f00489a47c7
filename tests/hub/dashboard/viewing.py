"""Someone who looks at the dashboard, and keeps book of what the page did."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WITHIN_MS = 15_000
DRAWN = "#page[data-shown]"
# Chromium itself says so of every answer that is none, or not 200: a page cannot keep it quiet.
_UNANSWERED = "Failed to load resource"


class Viewer:
    """A window of its own: no cookies, no storage.

    Attributes:
        page: Playwright's page.
        may_fail: Whether requests may go unanswered, or be refused.
    """

    def __init__(self, browser: Any) -> None:
        self._context = browser.new_context(viewport={"width": 1440, "height": 900})
        self.page = self._context.new_page()
        self.page.set_default_timeout(WITHIN_MS)
        self.may_fail = False
        self._said: list[str] = []
        self._asked: list[str] = []
        self._origin = ""
        self.page.on("console", lambda message: self._said.append(message.text))
        self.page.on("pageerror", lambda error: self._said.append(str(error)))
        self.page.on("dialog", lambda dialog: self._said.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self._asked.append(request.url))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.close()

    def open(self, url: str, *, is_drawn: bool = True) -> Any:
        """The page, once it has shown something."""
        self._origin = urlsplit(url).netloc
        self.page.goto(url)
        if is_drawn:
            self.page.wait_for_selector(DRAWN)
        return self.page

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector)).strip()

    def wait_for(self, selector: str, text: str) -> None:
        """Until an element has exactly this text."""
        self.page.wait_for_function(
            "([selector, text]) => document.querySelector(selector)?.innerText.trim() === text",
            arg=[selector, text],
        )

    def wait_until(self, expression: str) -> None:
        """Until a JavaScript expression is true."""
        # As a function: a bare expression would be evaluated in the page, whose policy forbids it.
        self.page.wait_for_function(f"() => {expression}")

    def check(self) -> None:
        """Nothing was said on the console, and nothing asked of anybody else."""
        said = [one for one in self._said if not (self.may_fail and one.startswith(_UNANSWERED))]
        assert said == []
        assert {urlsplit(url).netloc for url in self._asked} <= {self._origin}
