"""From a constraint to llguidance's notation: checks, and everything that is written anew.

A function of the constraint's text and of how special tokens are spelled; knows no tokenizer, no
masks and no limits of time.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from sapwood.runtime.constraints import lark_text, regex_text
from sapwood.runtime.constraints.choices import read_choices
from sapwood.runtime.constraints.interface import GrammarError, Vocabulary
from sapwood.runtime.constraints.json_schema import json_grammar, parsed_json
from sapwood.runtime.constraints.lark_endings import refuse_endless
from sapwood.runtime.constraints.limits import MAX_GRAMMAR_BYTES
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """What grammars may say of a vocabulary: its special tokens, by their spelling or their id."""

    text_by_id: Mapping[int, str]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Self:
        texts = {
            i: vocabulary.token_bytes[i].decode(errors="replace")
            for i in vocabulary.special_token_ids
        }
        return cls(text_by_id=texts, eos_token_ids=vocabulary.eos_token_ids)

    def id_by_text(self) -> dict[str, int]:
        """Of tokens that are spelled alike, the last. O(special tokens)."""
        return {text: i for i, text in self.text_by_id.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlguidanceText:
    """A grammar as `LLMatcher` takes it, and the special tokens that it names."""

    grammar: str
    special_token_ids: tuple[int, ...]


def llguidance_text(spec: ConstraintSpec, special: SpecialTokens) -> LlguidanceText:
    """Raises GrammarError for what is not enforced exactly, and for what is too much work.

    Python's work: some 25 us for each schema within a schema, up to 0.1 s.
    """
    from llguidance import LLMatcher

    match spec.kind:
        case ConstraintKind.JSON_SCHEMA:
            schema = json_grammar(parsed_json(spec.text), spec)
            return _naming_none(LLMatcher.grammar_from_json_schema(schema))
        case ConstraintKind.REGEX:
            _check_size(spec.text, "regular expression")
            pattern = regex_text.python_to_rust(spec.text)
            return _naming_none(LLMatcher.grammar_from_regex(pattern))
        case ConstraintKind.CHOICE:
            return _naming_none(LLMatcher.grammar_from_lark(_choice_grammar(spec.text)))
        case ConstraintKind.LARK:
            _check_size(spec.text, "grammar")
            text = lark_text.with_json_rewritten(
                spec.text, lambda schema: json_grammar(schema, spec)
            )
            refuse_endless(text)
            return _lark_grammar(text, special)
        case ConstraintKind.EBNF:
            _check_size(spec.text, "grammar")
            text = lark_text.from_gbnf(spec.text)
            refuse_endless(text)
            return _lark_grammar(text, special)
        case ConstraintKind.STRUCTURAL_TAG:
            return _lark_grammar(_structural_tag(spec, special), special)


def _naming_none(grammar: str) -> LlguidanceText:
    return LlguidanceText(grammar=grammar, special_token_ids=())


def _lark_grammar(text: str, special: SpecialTokens) -> LlguidanceText:
    from llguidance import LLMatcher

    names = lark_text.special_tokens_in(text)
    id_by_text = special.id_by_text()
    ids = {id_by_text[name] for name in names.texts if name in id_by_text}
    ids |= {i for first, last in names.ranges for i in special.text_by_id if first <= i <= last}
    _refuse_ends(ids.intersection(special.eos_token_ids), special)
    grammar = LLMatcher.grammar_from_lark(text)
    return LlguidanceText(grammar=grammar, special_token_ids=tuple(sorted(ids)))


def _refuse_ends(named: Iterable[int], special: SpecialTokens) -> None:
    for token_id in named:
        raise GrammarError(
            f"the grammar names {special.text_by_id[token_id]}, which ends an answer; leave it "
            "out: an answer may end wherever the grammar is complete"
        )


def _structural_tag(spec: ConstraintSpec, special: SpecialTokens) -> str:
    from sapwood.runtime.constraints import structural_tag

    document = parsed_json(spec.text)
    if not isinstance(document, Mapping):
        raise GrammarError("a structural tag is a JSON object with a type and a format")
    return structural_tag.to_lark(
        document,
        special_token_id=special.id_by_text().get,
        json_schema=lambda schema: json_grammar(schema, spec),
    )


def _choice_grammar(text: str) -> str:
    """One terminal, so that the choices are one automaton."""
    choices = read_choices(text)
    options = " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))
    return f"start: CHOICE\nCHOICE: {options}"


def _check_size(text: str, what: str) -> None:
    num_bytes = len(text.encode(errors="replace"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise GrammarError(
            f"the {what} has {num_bytes} bytes, at most {MAX_GRAMMAR_BYTES} are taken; shorten it"
        )
