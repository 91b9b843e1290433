"""What does the worst that a request can ask for as a constraint cost: time and memory?

Each row runs in a process of its own, with the default backend over a real vocabulary: compiling,
then masks along an answer that is made of the first allowed token at each place, up to `--tokens`.
Memory is what the process grew by. A refusal is an answer too.

    python bench/hostile_grammars.py
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from common import RESULTS, commit, machine, make_parser, settings, write_json

from sapwood.runtime.constraints.interface import GrammarError, Vocabulary
from sapwood.runtime.constraints.llguidance_backend import LlguidanceBackend
from sapwood.runtime.constraints.spec import ConstraintKind, ConstraintSpec
from sapwood.runtime.constraints.vocabulary import vocabulary_of
from sapwood.runtime.tokenizer import Tokenizer
from sapwood.runtime.weights import find_model


def main() -> None:
    arguments = _parse()
    if arguments.row is not None:
        print(json.dumps(_measured(arguments)))
        return
    rows = {}
    for name in ROWS:
        rows[name] = _in_a_process(name, arguments)
        print(_line(name, rows[name]), flush=True)
    result = {"machine": machine(), "commit": commit(), "settings": settings(arguments)}
    write_json(arguments.out, {**result, "rows": rows})


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2", help="whose vocabulary is taken")
    parser.add_argument("--tokens", type=int, default=64, help="masks along an answer, at most")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for a row")
    parser.add_argument("--out", type=type(RESULTS), default=RESULTS / "hostile-grammars.json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_a_process(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--row", name, "--model", arguments.model]
    command += ["--tokens", str(arguments.tokens)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=arguments.timeout
        )
    except subprocess.TimeoutExpired:
        return {"outcome": f"no answer within {arguments.timeout} s"}
    if done.returncode:
        return {
            "outcome": f"the process ended with {done.returncode}",
            "stderr": done.stderr[-500:],
        }
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _line(name: str, row: dict[str, Any]) -> str:
    times = "".join(f"{row.get(key, 0):9.1f}" for key in ("compile_ms", "worst_step_ms", "mib"))
    return f"{name:42}{times}  {row['outcome'][:110]}"


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.from_folder(find_model(arguments.model))
    backend = LlguidanceBackend(vocabulary_of(tokenizer, tokenizer.vocab_size))
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size)
    backend.compile(ConstraintSpec.json_schema({"type": "string"}), deadline=1)
    spec = ROWS[arguments.row]()
    before = _peak_mib()
    start = time.perf_counter()
    result: dict[str, Any] = {}
    try:
        grammar = backend.compile(spec, deadline=1)
        result["compile_ms"] = 1e3 * (time.perf_counter() - start)
        steps = list(_steps(grammar.matcher(), vocabulary, arguments.tokens))
        result |= {"worst_step_ms": 1e3 * max(steps), "outcome": f"{len(steps)} masks"}
    except GrammarError as error:
        result.setdefault("compile_ms", 1e3 * (time.perf_counter() - start))
        result["outcome"] = f"refused: {error}"
    return {**result, "mib": _peak_mib() - before}


def _steps(matcher: Any, vocabulary: Vocabulary, num_tokens: int) -> Iterator[float]:
    """Seconds of each mask, with the forced tokens and the advance after it."""
    mask = np.zeros(vocabulary.mask_size, np.int32)
    for i in range(num_tokens):
        start = time.perf_counter()
        matcher.fill_mask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = [t for t in allowed.tolist() if t not in vocabulary.eos_token_ids]
        if allowed:
            matcher.forced_tokens()
            matcher.advance(allowed[(7919 * i) % len(allowed)])
        yield time.perf_counter() - start
        if not allowed:
            return


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---- the rows


def _regex(pattern: str) -> Callable[[], ConstraintSpec]:
    return lambda: ConstraintSpec.regex(pattern)


def _schema(make: Callable[[], Any]) -> Callable[[], ConstraintSpec]:
    return lambda: ConstraintSpec.json_schema(make())


def _string(**keywords: Any) -> Callable[[], ConstraintSpec]:
    return lambda: ConstraintSpec.json_schema({"type": "string", **keywords})


def _grammar(kind: ConstraintKind, text: str) -> Callable[[], ConstraintSpec]:
    return lambda: ConstraintSpec(kind=kind, text=text)


def _nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _any_of(depth: int) -> Any:
    """Each level has two objects that both hold the level below."""
    schema: Any = {"type": "string"}
    for level in range(depth):
        options = [
            {"type": "object", "properties": {f"{side}{level}": schema}} for side in ("a", "b")
        ]
        schema = {"anyOf": options}
    return schema


def _any_of_by_reference(depth: int) -> Any:
    definitions: dict[str, Any] = {"l0": {"type": "string"}}
    for level in range(1, depth + 1):
        below = {"$ref": f"#/$defs/l{level - 1}"}
        definitions[f"l{level}"] = {"anyOf": [below, below]}
    return {"$ref": f"#/$defs/l{depth}", "$defs": definitions, "minLength": 1}


def _all_of_any_of(factors: int, width: int) -> Any:
    def option(i: int, j: int) -> Any:
        return {"properties": {f"p{i}_{j}": {"const": j}}}

    return {
        "type": "object",
        "allOf": [{"anyOf": [option(i, j) for j in range(width)]} for i in range(factors)],
    }


def _optional_properties(count: int) -> Any:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def _reference_chain(length: int) -> Any:
    definitions: dict[str, Any] = {
        f"c{i}": {"type": "object", "properties": {"n": {"$ref": f"#/$defs/c{i + 1}"}}}
        for i in range(length)
    }
    return {"$ref": "#/$defs/c0", "$defs": {**definitions, f"c{length}": {"type": "string"}}}


_WORDS = [f"w{i * 7919 % 100003:05d}" for i in range(9000)]
_LOOKAROUND_PATTERN = "^(?=.*[0-9])[a-z0-9]+$"

ROWS: dict[str, Callable[[], ConstraintSpec]] = {
    "look-ahead": _regex("(?=a)ab"),
    "look-behind": _regex("a(?<=a)b"),
    "back-reference": _regex(r"(a|b)\1"),
    "word boundary": _regex(r"\bword\b"),
    "^abc$": _regex("^abc$"),
    r"\p{L}+": _regex(r"\p{L}+"),
    "(?i)abc": _regex("(?i)abc"),
    ".{0,200}": _regex(".{0,200}"),
    "[01]*1[01]{18}": _regex("[01]*1[01]{18}"),
    ".*a.{14}b": _regex(".*a.{14}b"),
    "(([a-z]{1,1000}){1,1000})": _regex("(([a-z]{1,1000}){1,1000})"),
    "a{100000}": _regex("a{100000}"),
    "(a{1000}){100}": _regex("(a{1000}){100}"),
    "[^x]{0,5000}": _regex("[^x]{0,5000}"),
    "alternation of 9,000 words": _regex("|".join(_WORDS)),
    "choice of 9,000 words": lambda: ConstraintSpec.choice(_WORDS),
    "5,000 nested parentheses": _regex("(" * 5000 + "a" + ")" * 5000),
    "(a*)*b": _regex("((a*)*)*b"),
    "(a|b|ab)*bc": _regex("(a|b|ab)*bc"),
    "recursive $ref": _schema(
        lambda: {"type": "object", "properties": {"n": {"$ref": "#"}, "v": {"type": "integer"}}}
    ),
    "$ref to itself": _schema(lambda: {"$ref": "#"}),
    "required recursion": _schema(
        lambda: {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    ),
    "not": _schema(lambda: {"not": {"required": ["a"]}}),
    "if": _schema(lambda: {"if": {"required": ["a"]}, "then": {"required": ["b"]}}),
    "contains": _schema(lambda: {"contains": {"type": "string"}}),
    "uniqueItems": _schema(lambda: {"uniqueItems": True}),
    "dependentRequired": _schema(lambda: {"dependentRequired": {"a": ["b"]}}),
    "propertyNames": _schema(lambda: {"propertyNames": {"maxLength": 3}}),
    "minimum 5, maximum 3": _schema(lambda: {"type": "integer", "minimum": 5, "maximum": 3}),
    "pattern with look-ahead": _string(pattern=_LOOKAROUND_PATTERN),
    "pattern and maxLength": _string(pattern="^[a-z]+$", maxLength=3),
    "pattern {1,129}": _string(pattern="^[a-z]{1,129}$"),
    "maxLength 100,000": _string(maxLength=100_000),
    "minLength 100,000": _string(minLength=100_000),
    "5,000 items": _schema(lambda: {"type": "array", "minItems": 5000, "maxItems": 5000}),
    "nesting 20": _schema(lambda: _nested(20)),
    "nesting 200": _schema(lambda: _nested(200)),
    "anyOf depth 8": _schema(lambda: _any_of(8)),
    "anyOf depth 10": _schema(lambda: _any_of(10)),
    "anyOf depth 16 by reference": _schema(lambda: _any_of_by_reference(16)),
    "allOf of 3 anyOf of 7": _schema(lambda: _all_of_any_of(3, 7)),
    "allOf of 4 anyOf of 8": _schema(lambda: _all_of_any_of(4, 8)),
    "allOf of 2 anyOf of 20": _schema(lambda: _all_of_any_of(2, 20)),
    "allOf of 8 anyOf of 8": _schema(lambda: _all_of_any_of(8, 8)),
    "enum of 9,000 strings": _schema(lambda: {"enum": _WORDS}),
    "enum of 20,000 strings": _schema(lambda: {"enum": [f"w{i}" for i in range(20_000)]}),
    "type and enum of 9,000 strings": _schema(lambda: {"type": "string", "enum": _WORDS}),
    "1,000 optional properties": _schema(lambda: _optional_properties(1000)),
    "500 optional properties": _schema(lambda: _optional_properties(500)),
    "5,000 optional properties": _schema(lambda: _optional_properties(5000)),
    "{}": _schema(dict),
    "remote $ref": _schema(lambda: {"$ref": "https://example.org/schema.json"}),
    "chain of 150 references": _schema(lambda: _reference_chain(150)),
    "chain of 1,500 references": _schema(lambda: _reference_chain(1500)),
    "Lark: chain of 3,000 rules": _grammar(
        ConstraintKind.LARK,
        "start: r0\n"
        + "".join(f"r{i}: r{i + 1} | X\n" for i in range(3000))
        + 'r3000: X\nX: "x"\n',
    ),
    "Lark: ambiguous": _grammar(ConstraintKind.LARK, 'start: a\na: a a | "x" | a a a\n'),
    "Lark: left and right recursion": _grammar(
        ConstraintKind.LARK, 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/\n'
    ),
    "Lark: nested brackets": _grammar(
        ConstraintKind.LARK, "start: " + "(" * 3000 + '"a"' + ")" * 3000
    ),
    "Lark: refers to nothing": _grammar(ConstraintKind.LARK, "start: nothing"),
    "EBNF: left recursion": _grammar(ConstraintKind.EBNF, 'root ::= root "a" | "b"'),
    "EBNF: broken": _grammar(ConstraintKind.EBNF, 'root ::= "a'),
}

if __name__ == "__main__":
    main()
