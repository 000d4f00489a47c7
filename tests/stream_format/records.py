"""Records of a stream, read and written by docs/stream.md sections 4 and 5 alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any


class RefusedError(Exception):
    """The stream is not what the document says."""


class MissingError(RefusedError):
    """There is no such object."""


def check(condition: object, message: str) -> None:
    if not condition:
        raise RefusedError(message)


# § 4: canonical JSON


def canonical(value: Any) -> bytes:
    """The one encoding of a JSON value."""
    return _text(value).encode()


def _text(value: Any) -> str:
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _double(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    pairs = sorted(value.items(), key=lambda pair: pair[0].encode())
    return f"{{{','.join(f'{_quoted(name)}:{_text(item)}' for name, item in pairs)}}}"


def _double(value: float) -> str:
    check(math.isfinite(value), "no number")
    sign = "-" if math.copysign(1, value) < 0 else ""
    # repr has the fewest digits, written in another way.
    mantissa, _, exponent = repr(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    e = int(exponent or 0) + len(whole) - 1 - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0") or "0"
    if value == 0:
        e = 0
    if -5 <= e <= 15:
        if e < 0:
            return f"{sign}0.{'0' * (-e - 1)}{digits}"
        digits = digits.ljust(e + 1, "0")
        return f"{sign}{digits[: e + 1]}.{digits[e + 1 :] or '0'}"
    return f"{sign}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e{e}"


_ESCAPES = dict(zip('"\\\b\t\n\f\r', map("\\{}".format, '"\\btnfr'), strict=True))


def _quoted(text: str) -> str:
    found = (_ESCAPES.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in text)
    return f'"{"".join(found)}"'


# § 5: records

Check = Callable[[Any], bool]
_NO_DEFAULT = object()


def _whole(low: int = -(2**62) + 1, high: int = 2**62) -> Check:
    return lambda v: type(v) is int and low <= v < high


def _matches(pattern: str) -> Check:
    return lambda v: isinstance(v, str) and re.fullmatch(pattern, v) is not None


def _or_empty(inner: Check) -> Check:
    return lambda v: v == "" or inner(v)


def _list_of(inner: Check, most: int = 1 << 26) -> Check:
    return lambda v: isinstance(v, list) and len(v) <= most and all(map(inner, v))


def _short(v: Any) -> bool:
    return isinstance(v, str) and len(v) <= 1024


_ID, _DIGEST = _matches("[0-9a-f]{32}"), _matches("[0-9a-f]{64}")
_VERSION, _COUNT, _SMALL = _whole(1, 10**12), _whole(0), _whole(0, 10**12)


def _BOOL(v: Any) -> bool:
    return isinstance(v, bool)


def _fields(table: dict[str, Any]) -> Check:
    """Exactly the fields of a table: name to check, or to (check, default)."""
    rows = {
        name: row if isinstance(row, tuple) else (row, _NO_DEFAULT) for name, row in table.items()
    }

    def has_fields(value: Any) -> bool:
        if not isinstance(value, dict) or not value.keys() <= rows.keys():
            return False
        for name, (inner, default) in rows.items():
            if name not in value:
                if default is _NO_DEFAULT:
                    return False
            elif not inner(value[name]) or default == value[name]:
                return False  # § 4.3: a default is left out
        return True

    return has_fields


def _levels(v: Any) -> bool:
    small = [2, *v] if isinstance(v, list) else []
    return _list_of(_VERSION, 16)(v) and all(
        large >= 2 and (at == 0 or (large > small[at] and large % small[at] == 0))
        for at, large in enumerate(v)
    )


_OBJECT_FIELDS = {"size": _whole(0, (1 << 46) + 1), "block": _COUNT, "blocks": _list_of(_DIGEST)}


def _object(more: dict[str, Any]) -> Check:
    has_fields = _fields(_OBJECT_FIELDS | more)

    def is_object(v: Any) -> bool:
        return (
            has_fields(v)
            and v["block"] in {1 << power for power in range(18, 27)}
            and len(v["blocks"]) == max(1, -(-v["size"] // v["block"]))
        )

    return is_object


def _file_name(v: Any) -> bool:
    """The plain names of format.md § 6; hidden files, which are rare, are refused here."""
    return (
        isinstance(v, str)
        and v != ""
        and v[0] != "."
        and len(v.encode()) <= 255
        and v.isprintable()
        and not set(v) & set("/\\:")
    )


_LINK = _fields({"version": _VERSION, "manifest": _DIGEST})
_SIGNED = {
    "format": lambda v: v == 1 and type(v) is int,
    "type": _short,
    "stream": _ID,
    "created_ms": _COUNT,
    "signer": (_DIGEST, ""),
    "signature": (_matches("[0-9a-f]{128}"), ""),
}
_SHARDS, _FILES = _list_of(_object({}), 4096), _list_of(_object({"name": _file_name}), 16384)
_POLICY = _fields(
    {
        "anchor_every": _SMALL,
        "merge_levels": _levels,
        "keep_versions": _SMALL,
        "keep_age_s": _SMALL,
        "grace_s": _SMALL,
        "accept_new_lineages": _BOOL,
    }
)
_SOURCE = _fields(
    {
        "kind": lambda v: v in ("huggingface", "folder"),
        "name": lambda v: _short(v) and v.isprintable(),
        "revision": (_short, ""),
    }
)
_MERGE = _fields(
    _SIGNED
    | {
        "lineage": _ID,
        "session": _ID,
        "base": _LINK,
        "target": _LINK,
        "weights": _DIGEST,
        "layout": _DIGEST,
        "shards": _SHARDS,
    }
)
RECORDS: dict[str, Check] = {
    "stream": _fields(_SIGNED | {"lineage": _ID, "model": (_short, ""), "policy": _POLICY}),
    "version": _fields(
        _SIGNED
        | {
            "kind": lambda v: v in ("anchor", "reference", "delta", "end"),
            "lineage": _ID,
            "first": _VERSION,
            "version": _VERSION,
            "session": _ID,
            "base": (_LINK, None),
            "previous": (_ID, ""),
            "step": (_whole(), None),
            "weights": (_DIGEST, ""),
            "layout": (_DIGEST, ""),
            "raw_bytes": (_COUNT, 0),
            "word_count": (_COUNT, 0),
            "changed_count": (_COUNT, 0),
            "shards": (_SHARDS, []),
            "files": (_FILES, []),
            "source": (_SOURCE, None),
            "content": (_DIGEST, ""),
            "successor": (_ID, ""),
            "metadata": (lambda v: isinstance(v, dict) and len(canonical(v)) <= 16384, {}),
        }
    ),
    "merge": _MERGE,
    "anchor": _fields(
        _SIGNED
        | {
            "lineage": _ID,
            "session": _ID,
            "target": _LINK,
            "weights": _DIGEST,
            "layout": _DIGEST,
            "files": _FILES,
        }
    ),
    "catalog": _fields(
        _SIGNED
        | {
            "lineage": _ID,
            "steps_from": (_SMALL, 0),
            "merges": (
                _list_of(_fields({"base": _VERSION, "version": _VERSION, "size": _COUNT})),
                [],
            ),
            "anchors": (_list_of(_fields({"version": _VERSION, "size": _COUNT})), []),
            "retired": (
                _list_of(
                    _fields(
                        {
                            "kind": lambda v: v in ("merge", "anchor", "steps"),
                            "base": _SMALL,
                            "version": _SMALL,
                            "at_ms": _whole(),
                        }
                    )
                ),
                [],
            ),
            "is_over": (_BOOL, False),
        }
    ),
    "head": _fields({"format": lambda v: v == 1, "lineage": _ID, "version": _VERSION}),
}
# Of each kind of version: whether it has files, shards, source and content, weights and layout,
# successor.
_HOLDS = {
    "anchor": (1, 0, 0, 1, 0),
    "reference": (0, 1, 1, 1, 0),
    "delta": (0, 1, 0, 1, 0),
    "end": (0, 0, 0, 0, 1),
}


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    check(len({name for name, _ in pairs}) == len(pairs), "a key is there twice")
    return dict(pairs)


def parse(data: bytes, kind: str) -> dict[str, Any]:
    """A record, verified in itself (§ 4, 5), but for its signature."""
    check(len(data) <= (1 << 16 if kind in ("stream", "head") else 1 << 25), f"{kind}: too large")
    try:
        record = json.loads(data.decode(), object_pairs_hook=_distinct)
        is_good = RECORDS[kind](record) and canonical(record) == data
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{kind}: {error}") from None
    check(is_good, f"{kind}: malformed")
    check(record.get("type", kind) == kind, f"{record.get('type')} where {kind} belongs")
    if kind == "version":
        check_version(record)
    elif kind == "merge":
        check(record["base"]["version"] < record["target"]["version"] and record["shards"], kind)
    elif kind == "anchor":
        check(record["files"], kind)
    elif kind == "catalog":
        check(all(e["base"] <= e["version"] for e in record.get("retired", [])), kind)
        check(all(e["base"] < e["version"] for e in record.get("merges", [])), kind)
    return record


def check_version(record: dict[str, Any]) -> None:
    """The tables of § 5.3."""
    version, first, base = record["version"], record["first"], record.get("base")
    holds = tuple(
        {name in record for name in names.split()}
        for names in ("files", "shards", "source content", "weights layout", "successor")
    )
    wanted = tuple({bool(has)} for has in _HOLDS[record["kind"]])
    check(holds == wanted, "it does not hold what its kind holds")
    check(record.get("successor") != record["lineage"], "it leads to its own lineage")
    is_first = version == first
    check(first <= version and is_first == (record["kind"] in ("anchor", "reference")), "place")
    if is_first:
        check((base is None) == ("previous" not in record), "base and previous")
        check(base is None or base["version"] == version, "it does not follow an end")
    else:
        check(base is not None and base["version"] == version - 1, "it does not follow")
        check("previous" not in record, "previous inside a lineage")
