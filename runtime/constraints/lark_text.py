"""What has to be known of a grammar's text, and done to it, before llguidance reads it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.limits import LongNumberError, json_integer

# llguidance's reader is recursive: it goes down through brackets and from rule to rule, and needs
# 2 kB of stack for each.
MAX_DEPTH = 64  # brackets within brackets
MAX_RULES = 2_000  # rules and brackets in all

# What a bracket in it is not a bracket of the grammar.
_OPAQUE = re.compile(
    r"""(?://|\#)[^\n]* | "(?:\\.|[^"\\\n])*" | /(?:\\.|[^/\\])+/ | (?P<special><[^<>\s]+>)
    | (?P<json>%(?:json|regex|llguidance)\s*) | (?P<bracket>[()\[\]{}]) | (?P<rule>:)""",
    re.VERBOSE,
)
_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")
_UNICODE_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SpecialTokenNames:
    """`<|name|>` as it is written, and the ids of `<[1,5-9]>` as ranges with both ends."""

    texts: frozenset[str]
    ranges: tuple[tuple[int, int], ...]


def special_tokens_in(text: str) -> SpecialTokenNames:
    """The tokens that a grammar in Lark names, outside strings and regular expressions.

    All tokens (`<[*]>`) and all but some (`<[^5]>`) name none. Raises GrammarError where brackets
    are nested too deeply.
    """
    texts: set[str] = set()
    ranges: list[tuple[int, int]] = []
    for match in _outside_json(text):
        name = match["special"]
        if name is None:
            continue
        if name.startswith("<[") and name.endswith("]>"):
            found = (_RANGE.fullmatch(part) for part in name[2:-2].split(","))
            ranges += [(int(m[1]), int(m[2] or m[1])) for m in found if m]
        else:
            texts.add(name)
    return SpecialTokenNames(frozenset(texts), tuple(ranges))


def with_json_rewritten(text: str, rewrite: Callable[[Any], Mapping[str, Any]]) -> str:
    """The grammar with `rewrite` of the schema after each `%json`.

    Raises GrammarError for JSON that is broken.
    """
    parts, last = [], 0
    for match in _outside_json(text):
        if (match["json"] or "").startswith("%json"):
            schema, end = _json_at(text, match.end())
            parts += [text[last : match.end()], json.dumps(rewrite(schema))]
            last = end
    return "".join((*parts, text[last:]))


def from_gbnf(text: str) -> str:
    """A grammar in GBNF, llama.cpp's notation, in Lark. Raises GrammarError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_UNICODE_ESCAPE.sub(_plain_escape, text))
    except Exception as error:  # the converter raises plain ones
        raise GrammarError(f"the grammar is not GBNF: {error or type(error).__name__}") from error


def _plain_escape(match: re.Match[str]) -> str:
    """The converter drops leading zeros of \\u00e9; the character itself it keeps."""
    code = match[1] or match[2]
    if code is None:
        return match[0]
    number = int(code, 16)
    if number < 0x80:
        return f"\\x{number:02x}"
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
        raise GrammarError(f"the grammar escapes {match[0]}, which is no character")
    return chr(number)


def _outside_json(text: str) -> Iterator[re.Match[str]]:
    """The parts of a grammar that `_OPAQUE` tells apart, without what is in JSON."""
    at = depth = num_rules = 0
    while match := _OPAQUE.search(text, at):
        at = match.end()
        bracket = match["bracket"]
        num_rules += match["rule"] is not None or (bracket or "") in ("(", "[", "{")
        if num_rules > MAX_RULES:
            raise GrammarError(
                f"the grammar has more than {MAX_RULES} rules and brackets; write it with fewer"
            )
        if bracket is not None:
            depth += 1 if bracket in "([{" else -1
            if depth > MAX_DEPTH:
                raise GrammarError(
                    f"the grammar has brackets nested deeper than {MAX_DEPTH}; give the inner ones "
                    "a rule of their own"
                )
        elif match["json"] is not None:
            at = _json_at(text, at)[1]
        yield match


def _json_at(text: str, at: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder(parse_int=json_integer).raw_decode(text, at)
    except LongNumberError as error:
        raise GrammarError(f"the JSON in the grammar has {error}") from error
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON in the grammar cannot be read: {error}") from error
