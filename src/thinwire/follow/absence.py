"""How far to believe a relay that something is not there."""

from __future__ import annotations

# That a record is not there is looked up in the store itself this often.
ABSENT_CHECK_S = 60.0
# What was written just now may be missing at an honest relay: it hides only what it denies again so
# much later.
_AGAIN_AFTER_S = 2.0
# A relay that denied what the store has is not believed for so long, and twice as long each time
# that it is found to hide something before long.
_FIRST_DOUBT_S = 5.0
_LONGEST_DOUBT_S = 3600.0
_FORGIVEN_AFTER_S = 10 * ABSENT_CHECK_S


class Absences:
    """When to look whether what a relay says is missing is missing in the store too.

    Args:
        now_s: The time.
    """

    def __init__(self, now_s: float) -> None:
        self._check_s = now_s
        self._hid_s = now_s - _FORGIVEN_AFTER_S
        self._doubt_s = 0.0
        self._denied_s = now_s - _FORGIVEN_AFTER_S
        self._denied_key = ""

    def is_due(self, now_s: float) -> bool:
        """Whether to look now; counts as having looked."""
        doubted_until_s = max(self._hid_s + self._doubt_s, self._denied_s + _FIRST_DOUBT_S)
        if now_s < self._check_s and now_s >= doubted_until_s:
            return False
        self._check_s = now_s + ABSENT_CHECK_S
        return True

    def note_denied(self, key: str, now_s: float) -> None:
        """The relay said that something is missing which the store has."""
        if not self._denied_key:
            self._denied_key, self._denied_s = key, now_s

    def take_denied(self, now_s: float) -> str:
        """What the relay is to be asked for once more now; empty: nothing."""
        if now_s < self._denied_s + _AGAIN_AFTER_S:
            return ""
        key, self._denied_key = self._denied_key, ""
        return key

    def note_hidden(self, now_s: float) -> float:
        """It denied it again; returns for how long all that it says is missing is looked up."""
        is_again = now_s - self._hid_s < _FORGIVEN_AFTER_S
        self._doubt_s = min(self._doubt_s * 2, _LONGEST_DOUBT_S) if is_again else _FIRST_DOUBT_S
        self._hid_s = now_s
        return self._doubt_s

    def forgive(self) -> None:
        """It has it by now."""
        self._doubt_s = 0.0
        self._denied_s = self._hid_s
