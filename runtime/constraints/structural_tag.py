"""Structural tags: answers of free text and constrained parts, as a JSON document.

Two shapes are taken, those that vLLM, SGLang and xgrammar take:

    {"type": "structural_tag", "format": ELEMENT}
    {"type": "structural_tag", "structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}

An element is an object with a `type`:

    const_string         value
    json_schema          json_schema, style ("json", "python", "qwen_xml"), strict
    regex                pattern
    grammar              grammar (Lark or GBNF)
    any_text             excludes, excludes_at_start
    sequence, or         elements
    optional, star, plus content
    tag                  begin, content, end (a string or several)
    triggered_tags       triggers, tags, at_least_one, stop_after_first, excludes
    tags_with_separator  tags, separator, at_least_one, stop_after_first

Our own are `strict` (false: where a schema cannot be enforced, any object), the style "python" and
`excludes_at_start` (regular expressions that the text may not begin with).

This file reads documents into nodes; `structural_tag_lark.py` writes them as a grammar.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sapwood.runtime.constraints.interface import GrammarError

MAX_DEPTH = 32  # elements within each other
MAX_ELEMENTS = 8192
MAX_TEXT_CHARS = 4096  # of a begin, an end, a trigger, a separator; not of a const_string
STYLES = ("json", "python", "qwen_xml")


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly this text. What in it spells a special token is that token."""

    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """JSON, or arguments in another style, by a schema."""

    where: str
    schema: Any
    style: str
    strict: bool


@dataclass(frozen=True, slots=True)
class Pattern:
    regex: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """A grammar of its own."""

    where: str
    grammar: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyText:
    """Any text without `excludes` in it that begins with no match of `excludes_at_start`."""

    where: str
    excludes: tuple[str, ...] = ()
    excludes_at_start: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sequential:
    parts: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple["Node", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """`part`, `operator` (?, * or +) as in a regular expression."""

    where: str
    part: "Node"
    operator: str


@dataclass(frozen=True, slots=True)
class Tag:
    """`begin`, `content` and one of `ends`."""

    begin: str
    content: "Node"
    ends: tuple[str, ...]

    def after(self, trigger: str) -> Sequential:
        """What follows `trigger`, which it begins with."""
        ends = tuple(Text(end) for end in self.ends)
        end = ends[0] if len(ends) == 1 else Choice(ends)
        return Sequential((Text(self.begin.removeprefix(trigger)), self.content, end))


@dataclass(frozen=True, slots=True, kw_only=True)
class Triggered:
    """Any text with tags in it: where a trigger stands, one of its tags does."""

    where: str
    tags_by_trigger: Mapping[str, tuple[Tag, ...]]
    at_least_one: bool
    stop_after_first: bool
    excludes: tuple[str, ...]


Node = Text | Schema | Pattern | Embedded | AnyText | Sequential | Choice | Repeated | Triggered


def to_lark(
    document: Mapping[str, Any],
    *,
    special_token_id: Callable[[str], int | None],
    json_schema: Callable[[Any], Mapping[str, Any]],
) -> str:
    """The grammar of a document, in llguidance's Lark.

    `special_token_id` gives the id of a text that is exactly one special token. `json_schema`
    gives a schema as it may stand in the grammar, with its options, and raises GrammarError for
    one that is not taken. Raises GrammarError for a document that is wrong, naming the place.
    """
    from sapwood.runtime.constraints.structural_tag_lark import LarkWriter

    writer = LarkWriter(special_token_id=special_token_id, json_schema=json_schema)
    return writer.grammar(parse_structural_tag(document))


def parse_structural_tag(document: Mapping[str, Any]) -> Node:
    """Raises GrammarError for a document that is wrong, naming the place."""
    if not isinstance(document, Mapping) or document.get("type") != "structural_tag":
        raise GrammarError(
            'a structural tag is an object with "type": "structural_tag" and either "format" or '
            '"structures" and "triggers"'
        )
    if "format" in document:
        _check_keys(document, "the structural tag", ("type", "format"))
        return _Parser().node(document["format"], "format", 0)
    _check_keys(document, "the structural tag", ("type", "structures", "triggers"))
    return _legacy(document)


def _legacy(document: Mapping[str, Any]) -> Triggered:
    structures = _list(document, "structures", "")
    tags = tuple(_structure(item, f"structures[{i}]") for i, item in enumerate(structures))
    return Triggered(
        where="structures",
        tags_by_trigger=_by_trigger(tags, _texts(document, "triggers", ""), "structures"),
        at_least_one=False,
        stop_after_first=False,
        excludes=(),
    )


def _structure(value: Any, where: str) -> Tag:
    element = _object(value, where)
    _check_keys(element, where, ("begin", "schema", "end"))
    schema = Schema(
        where=where, schema=_required(element, "schema", where), style="json", strict=True
    )
    return Tag(_text(element, "begin", where), schema, (_text(element, "end", where),))


class _Parser:
    """Reads the elements of one document, and counts them."""

    def __init__(self) -> None:
        self._num_elements = 0

    def node(self, value: Any, where: str, depth: int) -> Node:
        element = _object(value, where)
        self._num_elements += 1
        if depth == MAX_DEPTH or self._num_elements > MAX_ELEMENTS:
            raise GrammarError(
                f"the structural tag has more than {MAX_DEPTH} elements within each other or "
                f"{MAX_ELEMENTS} in all (at {where}); ask for less"
            )
        kind = element.get("type")
        if not isinstance(kind, str) or kind not in _KEYS:
            raise GrammarError(f"{where}.type is {kind!r}; it must be one of {', '.join(_KEYS)}")
        _check_keys(element, where, ("type", *_KEYS[kind]))
        return self._of_kind(kind, element, where, depth + 1)

    def _of_kind(self, kind: str, element: Mapping[str, Any], where: str, depth: int) -> Node:
        if kind in ("sequence", "or"):
            parts = tuple(self._nodes(element, "elements", where, depth))
            return Sequential(parts) if kind == "sequence" else Choice(parts)
        if kind in _OPERATORS:
            content = _required(element, "content", where)
            part = self.node(content, f"{where}.content", depth)
            return Repeated(where=where, part=part, operator=_OPERATORS[kind])
        if kind == "tag":
            return self._tag(element, where, depth).after("")
        if kind == "triggered_tags":
            return self._triggered(element, where, depth)
        if kind == "tags_with_separator":
            return self._separated(element, where, depth)
        return _leaf(kind, element, where)

    def _nodes(self, element: Mapping[str, Any], key: str, where: str, depth: int) -> list[Node]:
        values = _list(element, key, where)
        if not values:
            raise GrammarError(f"{where}.{key} is empty; give one element at least")
        return [self.node(value, f"{where}.{key}[{i}]", depth) for i, value in enumerate(values)]

    def _tag(self, value: Any, where: str, depth: int) -> Tag:
        element = _object(value, where)
        if element.get("type", "tag") != "tag":
            raise GrammarError(f'{where}.type must be "tag"')
        _check_keys(element, where, ("type", *_KEYS["tag"]))
        content = self.node(_required(element, "content", where), f"{where}.content", depth + 1)
        ends = element.get("end")
        texts = (_text(element, "end", where),) if isinstance(ends, str) else ()
        return Tag(_text(element, "begin", where), content, texts or _texts(element, "end", where))

    def _tags(self, element: Mapping[str, Any], where: str, depth: int) -> tuple[Tag, ...]:
        values = _list(element, "tags", where)
        if not values:
            raise GrammarError(f"{where}.tags is empty; give one tag at least")
        return tuple(
            self._tag(value, f"{where}.tags[{i}]", depth) for i, value in enumerate(values)
        )

    def _triggered(self, element: Mapping[str, Any], where: str, depth: int) -> Triggered:
        tags = self._tags(element, where, depth)
        return Triggered(
            where=where,
            tags_by_trigger=_by_trigger(tags, _texts(element, "triggers", where), where),
            at_least_one=_flag(element, "at_least_one", where),
            stop_after_first=_flag(element, "stop_after_first", where),
            excludes=_texts(element, "excludes", where) if "excludes" in element else (),
        )

    def _separated(self, element: Mapping[str, Any], where: str, depth: int) -> Node:
        tag = Choice(tuple(tag.after("") for tag in self._tags(element, where, depth)))
        parts: tuple[Node, ...] = (tag,)
        if not _flag(element, "stop_after_first", where):
            separator = Text(_text(element, "separator", where))
            more = Sequential((separator, tag))
            parts = (tag, Repeated(where=where, part=more, operator="*"))
        if _flag(element, "at_least_one", where):
            return Sequential(parts)
        return Repeated(where=where, part=Sequential(parts), operator="?")


def _leaf(kind: str, element: Mapping[str, Any], where: str) -> Node:
    if kind == "const_string":
        return Text(_string(element, "value", where))
    if kind == "regex":
        return Pattern(_string(element, "pattern", where))
    if kind == "grammar":
        return Embedded(where=where, grammar=_string(element, "grammar", where))
    if kind == "any_text":
        return AnyText(
            where=where,
            excludes=_texts(element, "excludes", where) if "excludes" in element else (),
            excludes_at_start=_patterns(element, "excludes_at_start", where),
        )
    style = element.get("style", "json")
    if style not in STYLES:
        raise GrammarError(f"{where}.style is {style!r}; it must be one of {', '.join(STYLES)}")
    return Schema(
        where=where,
        schema=_required(element, "json_schema", where),
        style=style,
        strict=_flag(element, "strict", where, default=True),
    )


_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "const_string": ("value",),
        "json_schema": ("json_schema", "style", "strict"),
        "regex": ("pattern",),
        "grammar": ("grammar",),
        "any_text": ("excludes", "excludes_at_start"),
        "sequence": ("elements",),
        "or": ("elements",),
        "optional": ("content",),
        "star": ("content",),
        "plus": ("content",),
        "tag": ("begin", "content", "end"),
        "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
        "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    }
)
_OPERATORS = MappingProxyType({"optional": "?", "star": "*", "plus": "+"})


def _by_trigger(
    tags: Sequence[Tag], triggers: Sequence[str], where: str
) -> Mapping[str, tuple[Tag, ...]]:
    """The tags of each trigger; each tag has to have one, and one only."""
    found: dict[str, list[Tag]] = {trigger: [] for trigger in triggers}
    for tag in tags:
        begun = [trigger for trigger in found if tag.begin.startswith(trigger)]
        if len(begun) != 1:
            raise GrammarError(
                f"{where}: the tag that begins with {tag.begin[:40]!r} begins with {len(begun)} of "
                "the triggers; it must begin with exactly one"
            )
        found[begun[0]].append(tag)
    unused = [trigger for trigger, its_tags in found.items() if not its_tags]
    if unused:
        raise GrammarError(
            f"{where}: no tag begins with the trigger {unused[0]!r}; give one or leave it out"
        )
    return {trigger: tuple(its_tags) for trigger, its_tags in found.items()}


def _check_keys(element: Mapping[str, Any], where: str, known: Sequence[str]) -> None:
    for key in element:
        if key not in known:
            raise GrammarError(f"{where} has the unknown key {key!r}; known are {', '.join(known)}")


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise GrammarError(f"{where} must be an object")
    return value


def _required(element: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in element:
        raise GrammarError(f"{_place(where, key)} is missing")
    return element[key]


def _list(element: Mapping[str, Any], key: str, where: str) -> Sequence[Any]:
    value = _required(element, key, where)
    if not isinstance(value, list):
        raise GrammarError(f"{_place(where, key)} must be a list")
    return value


def _string(element: Mapping[str, Any], key: str, where: str) -> str:
    value = _required(element, key, where)
    if not isinstance(value, str):
        raise GrammarError(f"{_place(where, key)} must be a string")
    return _unicode(value, _place(where, key))


def _text(element: Mapping[str, Any], key: str, where: str) -> str:
    return _short(_string(element, key, where), _place(where, key))


def _texts(element: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """A list of texts that are not empty."""
    values = _list(element, key, where)
    place = _place(where, key)
    if not values or not all(isinstance(value, str) and value for value in values):
        raise GrammarError(f"{place} must be a list of strings that are not empty")
    return tuple(dict.fromkeys(_short(_unicode(value, place), place) for value in values))


def _patterns(element: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    values = _list(element, key, where) if key in element else []
    if not all(isinstance(value, str) for value in values):
        raise GrammarError(f"{_place(where, key)} must be a list of regular expressions")
    return tuple(_unicode(value, _place(where, key)) for value in values)


def _flag(element: Mapping[str, Any], key: str, where: str, *, default: bool = False) -> bool:
    value = element.get(key, default)
    if not isinstance(value, bool):
        raise GrammarError(f"{_place(where, key)} must be true or false")
    return value


def _short(value: str, place: str) -> str:
    if len(value) > MAX_TEXT_CHARS:
        raise GrammarError(
            f"{place} has {len(value)} characters, the limit is {MAX_TEXT_CHARS}; shorten it"
        )
    return value


def _unicode(value: str, place: str) -> str:
    if not value.isascii() and any(0xD800 <= ord(char) < 0xE000 for char in value):
        raise GrammarError(f"{place} has a lone surrogate, which no text can have; leave it out")
    return value


def _place(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
