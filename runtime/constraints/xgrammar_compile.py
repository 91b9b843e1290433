"""What runs in the process that compiles for xgrammar. (xgrammar itself imports torch.)"""

import json
from typing import TYPE_CHECKING, Any

from sapwood.runtime.constraints.bounded_process_main import Task
from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.messages import unpack
from sapwood.runtime.constraints.schema_check import refuse_what_is_no_schema
from sapwood.runtime.constraints.spec import ConstraintKind
from sapwood.runtime.constraints.token_table import TokenTable

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, TokenizerInfo


def make_task(setup: bytes) -> Task:
    """From a request, `{"kind", "json_options"}` and a text, to a grammar as xgrammar's JSON.

    `setup` is a `TokenTable`.
    """
    import jsonschema  # noqa: F401 (so that no fork has to)
    from xgrammar import GrammarCompiler

    info = tokenizer_info(TokenTable.from_bytes(setup))
    compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_request(request: bytes) -> bytes:
        header, (text,) = unpack(request)
        try:
            kind = ConstraintKind(header["kind"])
            compiled = _compiled(compiler, kind, text.decode(), header["json_options"])
        except (RuntimeError, ValueError) as error:
            raise GrammarError(
                f"xgrammar does not take it: {_message(error)}; change it or choose another backend"
            ) from error
        return compiled.serialize_json().encode()

    return compile_request


def tokenizer_info(table: TokenTable) -> "TokenizerInfo":
    """The vocabulary as xgrammar has it. Ends are told to it, as it would guess them."""
    from xgrammar import TokenizerInfo, VocabType

    return TokenizerInfo(
        list(table.token_bytes),
        VocabType.RAW,
        vocab_size=table.logits_size,
        stop_token_ids=list(table.eos_token_ids),
        add_prefix_space=False,
    )


def _compiled(
    compiler: "GrammarCompiler", kind: ConstraintKind, text: str, json_options: dict[str, Any]
) -> "CompiledGrammar":
    match kind:
        case ConstraintKind.JSON_SCHEMA:
            refuse_what_is_no_schema(text)
            return compiler.compile_json_schema(text, **json_options)
        case ConstraintKind.REGEX:
            return compiler.compile_regex(text)
        case ConstraintKind.STRUCTURAL_TAG:
            document = _with_json_as_grammars(json.loads(text), json_options)
            return compiler.compile_structural_tag(json.dumps(document))
    return compiler.compile_grammar(text)


def _with_json_as_grammars(value: Any, json_options: dict[str, Any]) -> Any:
    """A structural tag whose JSON has the whitespace that is asked for.

    xgrammar's own format for a JSON schema has bounded whitespace at best, and closes objects.
    """
    from xgrammar import Grammar

    if isinstance(value, list):
        return [_with_json_as_grammars(item, json_options) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"type", "json_schema"} and value["type"] == "json_schema":
        grammar = Grammar.from_json_schema(json.dumps(value["json_schema"]), **json_options)
        return {"type": "grammar", "syntax": "ebnf", "grammar": str(grammar)}
    return {
        key: item if key == "json_schema" else _with_json_as_grammars(item, json_options)
        for key, item in value.items()
    }


def _message(error: Exception) -> str:
    """Without the time and the place in xgrammar's source that it begins with."""
    text = str(error).strip()
    return text.split(": ", 1)[-1] if text.startswith("[") else text
