"""What a hub's calls are worth: when to look because of one, and whether to rely on them.

A hub can be slow, or wrong, or hostile. Nothing that it says makes a follower take a version; what
it could do is make it look too often, or too seldom. Decisions only, without a clock.
"""

from __future__ import annotations

from typing import NamedTuple

# Looks that calls may cause: so many at once, and so many a second for long.
_BURST = 4.0
_PER_S = 1.0
# A call whose look found nothing makes the next one dearer, up to this.
_MAX_PRICE = 32.0


class Place(NamedTuple):
    """A version of a stream; 0: none."""

    lineage: str = ""
    version: int = 0


class Calls:
    """Decides on the calls of one hub. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._held = Place()
        self._named = Place()
        self._is_connected = False
        # Whether a version was found here that the hub had not named.
        self._was_late = False
        self._tokens = _BURST
        self._filled_s: float | None = None
        self._price = 1.0
        self._is_owed = False
        self._is_answering = False  # a look that a call caused has not ended

    @property
    def is_relied_on(self) -> bool:
        """Whether looks without a call may be rare.

        The hub is connected, has not been late, and what it named is here: where it names what
        cannot be found, looks go on as if there were no hub.
        """
        return self._is_connected and not self._was_late and not self._is_ahead()

    def connected(self, is_connected: bool) -> None:
        """The connection that calls come by was made, or ended."""
        self._is_connected = is_connected

    def named(self, place: Place) -> None:
        """The hub names a version as the newest."""
        if place == self._named or not place.version:
            return
        self._named = place
        self._is_owed = self._is_ahead()

    def hinted(self, place: Place) -> None:
        """The hub named it in passing: of use where the connection that calls come by is down.

        While it is up, this may be older than what was heard there.
        """
        if not self._is_connected:
            self.named(place)

    def held(self, place: Place) -> None:
        """The follower holds a version, or found again that it is the newest."""
        if place == self._held:
            return
        is_joining = self._held == Place()
        self._held = place
        if place == self._named:
            self._price = 1.0
            self._was_late = False
        elif not self._is_ahead() and not self._is_answering:
            # Until it names one before it is found here. What a joiner finds first was there.
            self._was_late = self._is_connected and not is_joining
        self._is_owed = self._is_owed and self._is_ahead()

    def looked(self) -> None:
        """A look ended; if it was for a call, and what was named is not here, that cost something.

        A store may show a version a little late, so that one more look is owed.
        """
        if self._is_answering and self._is_ahead():
            self._price = min(2 * self._price, _MAX_PRICE)
            self._is_owed = True
        self._is_answering = False

    def ring_s(self, now_s: float) -> float | None:
        """In how many seconds to look because of a call; None: there is no reason to."""
        if not self._is_owed:
            return None
        self._fill(now_s)
        return max(0.0, (self._price - self._tokens) / _PER_S)

    def rang(self, now_s: float) -> None:
        """The follower is looking."""
        self._fill(now_s)
        self._tokens -= self._price
        self._is_owed = False
        self._is_answering = True

    def _is_ahead(self) -> bool:
        """Whether the hub names something that a look may find."""
        named, held = self._named, self._held
        if named.version == 0 or named == held:
            return False
        # In another lineage any number may be newer; in ours only higher ones.
        return named.lineage != held.lineage or named.version > held.version

    def _fill(self, now_s: float) -> None:
        if self._filled_s is not None:
            room = max(_BURST, self._price)
            self._tokens = min(self._tokens + (now_s - self._filled_s) * _PER_S, room)
        self._filled_s = now_s
