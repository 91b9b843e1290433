"""Which notation a grammar is written in: clients send Lark and EBNF in the same field.

The rules of GBNF, llama.cpp's EBNF, begin `name ::=`; those of Lark begin `name:`. Only the
beginning of a line is looked at, so neither a string nor a comment nor a regular expression can
be taken for a rule.
"""

import re

from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.errors import RequestError

_EBNF_RULE = re.compile(r"<?[A-Za-z_][\w.-]*>?[ \t]*::=")
_LARK_RULE = re.compile(
    r"""
    [?!]{0,2} _?[A-Za-z]\w*                # a name: inlined, kept whole, or hidden
    (?: \.-?\d+ | \{[^}]*\} | \[[^\]]*\] )*  # priority, template parameters, attributes
    [ \t]* : (?!:?=)
    """,
    re.VERBOSE,
)
_LARK_DIRECTIVE = re.compile(r"%(?:import|ignore|declare|override|extend|llguidance)\b")


def notation_of(grammar: str) -> ConstraintKind | None:
    """LARK or EBNF, by the first rule in it; None if there is no rule of either. O(text)."""
    for line in grammar.removeprefix("\ufeff").splitlines():
        start = line.lstrip()
        if _EBNF_RULE.match(start):
            return ConstraintKind.EBNF
        if _LARK_RULE.match(start) or _LARK_DIRECTIVE.match(start):
            return ConstraintKind.LARK
    return None


def grammar_spec(definition: str) -> ConstraintSpec:
    """A grammar in whichever notation it is. Raises RequestError for neither."""
    if (notation := notation_of(definition)) is None:
        raise RequestError(
            "the grammar has no rule in Lark's notation (name: ...) and none in EBNF "
            "(name ::= ...); write it in one of them",
            param="constraint",
        )
    return ConstraintSpec(kind=notation, text=definition)
