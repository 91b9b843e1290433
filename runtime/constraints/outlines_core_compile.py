"""What runs in the process that compiles for outlines_core. Imports no torch.

outlines_core (0.2.14) drops what may follow where a match could end already: of `ab(cd)?`, the c
after ab, and of `a|ab` the b. (Its automaton tells a match one byte late and prefers the first of
two alternatives.) So every expression is compiled with a character behind it that no answer has,
and a state is final if that character may come; then no match ends early.
"""

from sapwood.runtime.constraints.bounded_process_main import Task
from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.messages import unpack
from sapwood.runtime.constraints.token_automaton import explore
from sapwood.runtime.constraints.token_table import TokenTable

_TERMINATOR = "\U0010ffff"  # a noncharacter


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
    # No tokens of the model: end tokens are dealt with outside the table.
    end, terminator = table.logits_size, table.logits_size + 1
    ids_by_bytes.setdefault(_TERMINATOR.encode(), []).append(terminator)
    vocabulary = Vocabulary(end, ids_by_bytes)

    def compile_request(request: bytes) -> bytes:
        header, _ = unpack(request)
        try:
            regex = header.get("regex")
            if regex is None:
                regex = build_regex_from_schema(header["schema"], header["whitespace_pattern"])
            index = Index(f"(?:{regex}){_TERMINATOR}", vocabulary)
        except (ValueError, TypeError) as error:
            raise GrammarError(
                f"outlines_core does not take it: {error}; change it or take another backend"
            ) from error

        def tokens_of(state: int) -> list[int]:
            return [token for token in index.get_allowed_tokens(state) or () if token < end]

        def is_final(state: int) -> bool:
            following = index.get_next_state(state, terminator)
            return following is not None and index.is_final_state(following)

        initial = index.get_initial_state()
        return explore(initial, tokens_of, index.get_next_state, is_final).to_bytes()

    return compile_request
