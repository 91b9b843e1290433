"""What runs in the process that compiles for outlines_core. Imports no torch."""

from sapwood.runtime.constraints.bounded_process_main import Task
from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.messages import unpack
from sapwood.runtime.constraints.token_automaton import explore
from sapwood.runtime.constraints.token_table import TokenTable


def make_task(setup: bytes) -> Task:
    """From a request, `{"regex"}` or `{"schema", "whitespace_pattern"}`, to a `TokenAutomaton`.

    `setup` is a `TokenTable`. Tokens are known by their bytes: by their text, all parts of
    characters would be one and the same.
    """
    from outlines_core import Index, Vocabulary
    from outlines_core.json_schema import build_regex_from_schema

    table = TokenTable.from_bytes(setup)
    ids_by_bytes: dict[bytes, list[int]] = {}
    for token_id, spelled in table.ordinary_tokens():
        ids_by_bytes.setdefault(spelled, []).append(token_id)
    end = table.logits_size  # no token: end tokens are dealt with outside the table
    vocabulary = Vocabulary(end, ids_by_bytes)

    def compile_request(request: bytes) -> bytes:
        header, _ = unpack(request)
        try:
            regex = header.get("regex")
            if regex is None:
                regex = build_regex_from_schema(header["schema"], header["whitespace_pattern"])
            index = Index(regex, vocabulary)
        except (ValueError, TypeError) as error:
            raise GrammarError(
                f"outlines_core does not take it: {error}; change it or take another backend"
            ) from error
        return explore(
            index.get_initial_state(),
            lambda state: [
                token for token in index.get_allowed_tokens(state) or () if token != end
            ],
            index.get_next_state,
            index.is_final_state,
        ).to_bytes()

    return compile_request
