"""Structural tags as grammars of llguidance (its dialect of Lark).

Free text is one lexeme. Where it has to end, at a trigger or an end, the lexeme has that text at
its end and is lazy: it is over as soon as the text is there, wherever tokens are cut. A special
token ends a lexeme by itself.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sapwood.runtime.constraints import lark_text
from sapwood.runtime.constraints.argument_styles import SELF, python_arguments, qwen_xml_arguments
from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.lark_endings import refuse_endless
from sapwood.runtime.constraints.notation import notation_of
from sapwood.runtime.constraints.regex_text import python_to_rust
from sapwood.runtime.constraints.spec import ConstraintKind
from sapwood.runtime.constraints.structural_tag import (
    AnyText,
    Choice,
    Embedded,
    Node,
    Pattern,
    Repeated,
    Schema,
    Sequential,
    Text,
    Triggered,
)

_ANYTHING = "(?s:.*)"
# What special tokens look like; which of them are some, the tokenizer says.
_SPECIAL = re.compile(r"<[^<>\s]{1,64}>|\[[A-Z_/0-9]{1,32}\]|<｜[^｜]{1,64}｜>")

# A literal in pieces: texts, and ids of special tokens.
_Piece = str | int


class LarkWriter:
    """Writes the grammar of one document."""

    def __init__(
        self,
        *,
        special_token_id: Callable[[str], int | None],
        json_schema: Callable[[Any], Mapping[str, Any]],
    ) -> None:
        self._special_token_id = special_token_id
        self._json_schema = json_schema
        self._rules: list[str] = []
        self._names: dict[str, str] = {}  # of rules, by what they are

    def grammar(self, node: Node) -> str:
        start = self._expression(node, ())
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _expression(self, node: Node, ends: Sequence[str]) -> str:
        """The node and, if there are `ends`, one of them after it."""
        match node:
            case AnyText():
                return self._any_text(node, ends)
            case Triggered():
                return self._triggered(node, ends)
            case Sequential():
                return self._sequence(node.parts, ends)
            case Choice():
                options = (self._expression(option, ends) for option in node.options)
                return _grouped(" | ".join(options))
            case Repeated():
                return self._repeated(node, ends)
            case _:
                return f"{self._bounded(node)} {self._one_of(ends)}".rstrip()

    def _bounded(self, node: Text | Schema | Pattern | Embedded) -> str:
        match node:
            case Text():
                return self._literal(node.value)
            case Schema():
                return self._schema(node)
            case Pattern():
                return self._rule("regex", _regex(python_to_rust(node.regex)))
            case Embedded():
                return self._rule("grammar", f"%lark {{\n{self._embedded(node)}\n}}")

    def _sequence(self, parts: Sequence[Node], ends: Sequence[str]) -> str:
        parts = _flat(parts)
        written: list[str] = []
        at = 0
        while at < len(parts):
            part, is_last = parts[at], at == len(parts) - 1
            if not _is_open(part):
                written.append(self._expression(part, ()))
                at += 1
            elif is_last:
                return " ".join([*written, self._expression(part, ends)])
            else:
                written.append(self._expression(part, _literals_of(parts[at + 1], part)))
                at += 2
        return _grouped(" ".join([*written, self._one_of(ends)]).strip() or '""')

    def _repeated(self, node: Repeated, ends: Sequence[str]) -> str:
        if not _is_open(node.part):
            part = self._expression(node.part, ())
            return f"{_grouped(part)}{node.operator} {self._one_of(ends)}".rstrip()
        if node.operator != "?":
            raise GrammarError(
                f"{node.where} repeats free text, which never ends; put it into a tag with an end"
            )
        return _grouped(f"{self._expression(node.part, ends)} | {self._one_of(ends) or _EMPTY}")

    def _any_text(self, node: AnyText, ends: Sequence[str]) -> str:
        return self._free(
            [(end, "") for end in ends], node.excludes, node.excludes_at_start, is_tail=not ends
        )

    def _triggered(self, node: Triggered, ends: Sequence[str]) -> str:
        if any(_is_open(tag.after("")) for tags in node.tags_by_trigger.values() for tag in tags):
            raise GrammarError(
                f"{node.where} has a tag that ends in free text; give the tag an end"
            )
        if node.at_least_one:
            whole = [tag.after("") for tags in node.tags_by_trigger.values() for tag in tags]
            first = self._expression(Choice(tuple(whole)), ())
        if node.at_least_one and node.stop_after_first:
            return f"{first} {self._one_of(ends)}".rstrip()
        tagged = self._free(
            [(trigger, self._after(node, trigger)) for trigger in node.tags_by_trigger],
            node.excludes,
            (),
            is_tail=False,
        )
        stops = tuple(node.tags_by_trigger)
        tail = self._free([(end, "") for end in ends], node.excludes, (), not ends, stops)
        if node.stop_after_first:
            return _grouped(f"{tagged} {self._one_of(ends)} | {tail}")
        rest = f"{_grouped(tagged)}* {tail}"
        return f"{first} {rest}" if node.at_least_one else rest

    def _after(self, node: Triggered, trigger: str) -> str:
        tags = node.tags_by_trigger[trigger]
        return self._expression(Choice(tuple(tag.after(trigger) for tag in tags)), ())

    def _free(
        self,
        stops: Sequence[tuple[str, str]],
        excludes: Sequence[str],
        excludes_at_start: Sequence[str],
        is_tail: bool,
        spelled: Sequence[str] = (),
    ) -> str:
        """Free text up to a stop, of which each has what follows it; with `is_tail`, to the end.

        No text spells a special token that stops it, nor one of `spelled`.
        """
        pieces = [(self._pieces(stop), after) for stop, after in stops]
        special = [
            stop
            for stop in (*(stop for stop, _ in stops), *spelled)
            if not isinstance(self._pieces(stop)[0], str)
        ]
        text = self._text(tuple(dict.fromkeys([*excludes, *special])), excludes_at_start)
        options = [self._up_to(text, stop, after) for stop, after in pieces]
        if is_tail:
            options.append(text)
        return _grouped(" | ".join(options))

    def _up_to(self, text: str, stop: Sequence[_Piece], after: str) -> str:
        first, rest = stop[0], stop[1:]
        if isinstance(first, int):
            head = f"{text} <[{first}]>"
        elif rest and isinstance(rest[0], int):
            # A text and then a special token: it is the token that ends the text.
            head = self._rule("up_to", f"{text} {_quoted(first)}", is_terminal=True)
        else:
            head = self._rule("up_to[lazy]", f"{text} {_quoted(first)}")
        return " ".join(part for part in (head, _spelled(rest), after) if part)

    def _text(self, excludes: Sequence[str], excludes_at_start: Sequence[str]) -> str:
        """A terminal for any text but that."""
        body = _regex(_ANYTHING)
        if excludes:
            inside = "|".join(map(_escaped, excludes))
            body += f" & ~{_regex(f'{_ANYTHING}({inside}){_ANYTHING}')}"
        if excludes_at_start:
            start = "|".join(f"({python_to_rust(pattern)})" for pattern in excludes_at_start)
            body += f" & ~{_regex(f'({start}){_ANYTHING}')}"
        return self._rule("text", body, is_terminal=True)

    def _embedded(self, node: Embedded) -> str:
        """The grammar of an element in Lark, whichever notation it is in."""
        match notation_of(node.grammar):
            case ConstraintKind.LARK:
                text = lark_text.with_json_rewritten(node.grammar, self._json_schema)
            case ConstraintKind.EBNF:
                text = lark_text.from_gbnf(node.grammar)
            case _:
                raise GrammarError(
                    f"{node.where}.grammar has no rule in Lark's notation (name: ...) and none in "
                    "EBNF (name ::= ...); write it in one of them"
                )
        refuse_endless(text)
        return text

    def _schema(self, node: Schema) -> str:
        if node.style == "python":
            body = python_arguments(node.schema, node.strict, self._value, self._rule)
            return self._rule("arguments", body)
        if node.style == "qwen_xml":
            body = qwen_xml_arguments(node.schema, node.strict, self._value, self._rule)
            return self._rule("arguments", body)
        try:
            return self._value(node.schema, node.strict)
        except GrammarError:
            if node.strict:
                raise
            return self._value({"type": "object"}, True)

    def _value(self, schema: Any, strict: bool, options: Mapping[str, Any] | None = None) -> str:
        """JSON by a schema, as a rule. Raises GrammarError.

        Of a schema that is not `strict` it is tried whether it compiles, as something else can take
        its place; one that is strict has to, and the whole is compiled anyway.
        """
        key = json.dumps([schema, strict, dict(options or {})], ensure_ascii=False)
        if key not in self._names:
            gated = self._json_schema(schema)
            if not strict and not _compiles(gated):
                raise GrammarError("a schema cannot be enforced; simplify it")
            guidance = {**gated.get("x-guidance", {}), **(options or {})}
            body = json.dumps({**gated, "x-guidance": guidance}, ensure_ascii=False)
            self._names[key] = self._rule("json", f"%json {body}")
        return self._names[key]

    def _one_of(self, ends: Sequence[str]) -> str:
        """The ends as literals; nothing if there are none."""
        if not ends:
            return ""
        literals = [self._literal(end) for end in ends]
        return literals[0] if len(literals) == 1 else _grouped(" | ".join(literals))

    def _literal(self, text: str) -> str:
        return _spelled(self._pieces(text)) if text else _EMPTY

    def _pieces(self, text: str) -> list[_Piece]:
        """A text cut into texts and special tokens."""
        pieces: list[_Piece] = []
        start = 0
        for match in _SPECIAL.finditer(text):
            token_id = self._special_token_id(match.group())
            if token_id is None:
                continue
            pieces += [*filter(None, [text[start : match.start()]]), token_id]
            start = match.end()
        return [*pieces, *filter(None, [text[start:]])]

    def _rule(self, name: str, body: str, *, is_terminal: bool = False) -> str:
        """The name of a rule with this body, which is written once. `name` may have options."""
        key = f"{name}: {body}"
        if key not in self._names:
            name, bracket, options = name.partition("[")
            unique = f"{name}_{len(self._names)}"
            unique = unique.upper() if is_terminal else unique
            self._rules.append(f"{unique}{bracket}{options}: {body.replace(SELF, unique)}")
            self._names[key] = unique
        return self._names[key]


_EMPTY = '""'


def _is_open(node: Node) -> bool:
    """Whether a node may end in free text, which ends where something says so."""
    match node:
        case AnyText():
            return True
        case Triggered():
            return not (node.at_least_one and node.stop_after_first)
        case Sequential():
            parts = _flat(node.parts)
            return bool(parts) and _is_open(parts[-1])
        case Choice():
            return any(map(_is_open, node.options))
        case Repeated():
            return _is_open(node.part)
        case _:
            return False


def _flat(parts: Sequence[Node]) -> list[Node]:
    """The parts of a sequence, those of sequences in it as well; neighbouring texts are one."""
    flat: list[Node] = []
    for part in parts:
        for inner in _flat(part.parts) if isinstance(part, Sequential) else [part]:
            if not isinstance(inner, Text):
                flat.append(inner)
            elif flat and isinstance(flat[-1], Text):
                flat[-1] = Text(flat[-1].value + inner.value)
            elif inner.value:
                flat.append(inner)
    return flat


def _literals_of(node: Node, before: Node) -> tuple[str, ...]:
    """The texts that a node may be, which end the free text `before` it."""
    options = node.options if isinstance(node, Choice) else (node,)
    texts = tuple(option.value for option in options if isinstance(option, Text) and option.value)
    if len(texts) != len(options):
        where = getattr(before, "where", "the free text in it")
        raise GrammarError(
            f"{where} is free text, and what follows it is no fixed text, so that nothing says "
            "where it ends; put a const_string after it or leave it to the end"
        )
    return texts


def _spelled(pieces: Sequence[_Piece]) -> str:
    return " ".join(
        f"<[{piece}]>" if isinstance(piece, int) else _quoted(piece) for piece in pieces
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _grouped(expression: str) -> str:
    return f"({expression})"


def _escaped(text: str) -> str:
    """A regular expression for exactly this text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text)


def _regex(pattern: str) -> str:
    """A regular expression as Lark writes it; // would be a comment."""
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(pattern, '')}/" if pattern else _EMPTY


def _compiles(schema: Mapping[str, Any]) -> bool:
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    is_error, _ = LLMatcher.validate_grammar_with_warnings(grammar)
    return not is_error
