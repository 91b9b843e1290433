"""Regular expressions put into other words, for engines that read them differently.

What `runtime/regex_syntax.py` reads is written again with explicit characters only, so that a dot,
a class and an escape mean the same in every engine.
"""

import re
from collections.abc import Callable

from sapwood.runtime.regex_syntax import Chars, Concat, Node, Ranges, RegexError, Repeat, parse

# Classes [...], to their end or that of the pattern; escapes; other characters.
_PIECE = re.compile(
    r"\[(?P<negated>\^)?\]?(?P<items>(?:[^\]\\]|\\.)*)(?:\]|\Z)|\\(?P<escaped>.)|.", re.DOTALL
)


def read(pattern: str) -> Node:
    """The tree of a pattern that all of a text is to match. Raises RegexError.

    \\d, \\w and \\s are ASCII's, which is less than what Python has; where negating them would make
    that more, they are refused.
    """
    if any(map(_negates_a_named_class, _PIECE.finditer(pattern))):
        raise RegexError(r"a negated \d, \w or \s; write the characters out, as in [^0-9]")
    return parse(without_anchors(pattern))


def _negates_a_named_class(piece: re.Match[str]) -> bool:
    """Of ASCII's class, the others would have letters and spaces of other scripts in them."""
    escaped = piece["escaped"] or ""
    if piece["items"] is not None:
        escaped = "".join(re.findall(r"\\(.)", piece["items"], re.DOTALL))
    return any(name in escaped for name in ("dwsDWS" if piece["negated"] else "DWS"))


def without_anchors(pattern: str) -> str:
    """A pattern without the anchors at its ends, which mean nothing where all of a text matches."""
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$"):
        before = pattern[:-1]
        num_backslashes = len(before) - len(before.rstrip("\\"))
        if num_backslashes % 2 == 0:
            return before
    return pattern


def written(tree: Node, escape: Callable[[int], str]) -> str:
    """The pattern of a tree, with each code point as `escape` writes it. O(size of both)."""
    match tree:
        case Chars(ranges):
            return _char_class(ranges, escape)
        case Concat(parts):
            return "".join(written(part, escape) for part in parts)
        case Repeat(part, low, high):
            bounds = f"{{{low},{'' if high is None else high}}}"
            return f"(?:{written(part, escape)}){bounds}"
        case _:
            return f"(?:{'|'.join(written(option, escape) for option in tree.options)})"


def restricted(tree: Node, allowed: Ranges) -> Node | None:
    """The tree of the matches that have characters of `allowed` only; None where there is none.

    `allowed` is sorted and apart, as in `Chars`.
    """
    match tree:
        case Chars(ranges):
            common = _intersection(ranges, allowed)
            return Chars(common) if common else None
        case Concat(parts):
            kept = [restricted(part, allowed) for part in parts]
            whole = [part for part in kept if part is not None]
            return Concat(tuple(whole)) if len(whole) == len(kept) else None
        case Repeat(part, low, high):
            inner = restricted(part, allowed)
            if inner is None:
                return Concat(()) if low == 0 else None
            return Repeat(inner, low, high)
        case _:
            options = [restricted(option, allowed) for option in tree.options]
            left = tuple(option for option in options if option is not None)
            return type(tree)(left) if left else None


def _char_class(ranges: Ranges, escape: Callable[[int], str]) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return escape(ranges[0][0])
    items = (
        escape(low) if low == high else f"{escape(low)}-{escape(high)}" for low, high in ranges
    )
    return f"[{''.join(items)}]"


def _intersection(first: Ranges, second: Ranges) -> Ranges:
    common = (
        (max(low, other_low), min(high, other_high))
        for low, high in first
        for other_low, other_high in second
    )
    return tuple((low, high) for low, high in common if low <= high)
