"""Which rules of a grammar in Lark can end: what always needs itself again has no finite answer.

What a rule needs is read from its text: names that have to come, in one of its alternatives. A
rule with anything that is not known here (an operator, attributes, parameters) counts as one that
ends, as do terminals, in which llguidance itself allows no recursion.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.lark_text import with_json_rewritten

_MAX_NAME_LEN = 100  # characters of a name that a message shows
_NOTHING = ""  # the place of what needs no rule

_TOKEN = re.compile(
    r"""
      (?://|\#)[^\n]*                                        # a comment, of no group
    | ^[ \t]*[?!]*(?P<rule>_*[a-z][\w-]*)[ \t]*:(?!:)        # the beginning of a rule
    | (?P<unread>^[ \t]*(?:[?!]*\w[\w.-]*(?:\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*:(?!:)|%(?!json)\w+))
    | (?P<text>"(?:\\.|[^"\\\n])*"[a-z]*|/(?:\\.|[^/\\])+/[a-z]*|<[^<>\s]+>|%json\s*\{\})
    | (?P<name>[A-Za-z_](?:[\w-]*\w)?)
    | (?P<open>[(\[]) | (?P<close>[)\]]) | (?P<alternative>\|)
    | (?P<optional>[?*]|\{\s*(?:0+\s*)?,\s*(?:\d+\s*)?\}|~\s*0+(?!\d)(?:\s*\.\.\s*\d+)?)
    | \+ | \{\s*\d+\s*(?:,\s*\d*\s*)?\} | ~\s*\d+(?:\s*\.\.\s*\d+)? | \.\. | ->\s*\w+  # likewise
    | (?P<unknown>\S)
    """,
    re.VERBOSE | re.MULTILINE,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Alternative:
    """Of a rule or of a bracket, which has a name of its own: what has to come in it."""

    rule: str
    needs: list[str] = field(default_factory=list)


def refuse_endless(text: str) -> None:
    """Raises GrammarError for a rule that cannot end, whether it is used or not. O(text)."""
    if "%lark" in text:
        return  # a grammar within, whose rules have names of their own
    alternatives = list(_alternatives(with_json_rewritten(text, lambda _: {})))
    ending = _ending_rules(alternatives)
    for rule in (a.rule for a in alternatives if not a.rule.startswith("(")):
        if rule not in ending:
            name = "that an answer begins with" if rule == "start" else repr(rule[:_MAX_NAME_LEN])
            raise GrammarError(
                f"the rule {name} never ends: each of its alternatives leads to a rule that needs "
                "itself again; give that rule an alternative without itself"
            )


def _alternatives(text: str) -> Iterator[_Alternative]:
    """All in a grammar, in their order; each is complete only at the end."""
    num_brackets = 0
    within: list[_Alternative] = []  # those that are being read, the innermost last
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "rule":
            within = [_Alternative(match["rule"])]
            yield within[-1]
        elif kind == "unread":
            within = []
        elif kind is None or not within:
            continue
        elif kind in ("name", "text"):
            within[-1].needs.append(match["name"] or _NOTHING)
        elif kind == "open":
            num_brackets += 1
            within.append(_Alternative(f"({num_brackets})"))
            yield within[-1]
        elif kind == "close":
            inner = within.pop()
            if within:
                within[-1].needs.append(inner.rule if match["close"] == ")" else _NOTHING)
        elif kind == "alternative":
            within[-1] = _Alternative(within[-1].rule)
            yield within[-1]
        elif kind == "optional" and within[-1].needs:
            within[-1].needs[-1] = _NOTHING
        elif kind == "unknown":
            yield _Alternative(within[0].rule)


def _ending_rules(alternatives: Iterable[_Alternative]) -> set[str]:
    """The rules and brackets of which an alternative needs only such as end."""
    rules = {alternative.rule for alternative in alternatives}
    missing = {a: rules.intersection(a.needs) for a in alternatives}
    needing: defaultdict[str, list[_Alternative]] = defaultdict(list)
    for alternative, names in missing.items():
        for name in names:
            needing[name].append(alternative)
    ending: set[str] = set()
    found = [alternative.rule for alternative, names in missing.items() if not names]
    while found:
        name = found.pop()
        if name in ending:
            continue
        ending.add(name)
        for alternative in needing[name]:
            missing[alternative].discard(name)
            if not missing[alternative]:
                found.append(alternative.rule)
    return ending
