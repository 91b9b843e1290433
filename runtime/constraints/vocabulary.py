"""What backends have to know of a tokenizer, taken from ours."""

import re
from collections.abc import Sequence

from sapwood.runtime.constraints.interface import Vocabulary
from sapwood.runtime.control_tokens import ControlledText
from sapwood.runtime.tokenizer import Tokenizer


def vocabulary_of(tokenizer: Tokenizer, logits_size: int) -> Vocabulary:
    """The vocabulary of a model with `logits_size` rows.

    Tokens that the model has no row for are left out; rows without a token have no bytes. O(rows).
    """
    ids = range(logits_size)
    token_bytes = tuple(map(tokenizer.token_raw_bytes, ids))
    special_token_ids = tuple(filter(tokenizer.is_special, ids))
    spelled = [token_bytes[token_id].decode() for token_id in special_token_ids]
    # No special tokens: a pattern that is found nowhere.
    special = re.compile("|".join(map(re.escape, spelled)) or "(?!)")

    def encode(text: str) -> Sequence[int]:
        content = ControlledText(text, (), has_quoted=special.search(text) is not None)
        token_ids: list[int] = tokenizer.encode_controlled(content).tolist()
        return token_ids

    return Vocabulary(
        token_bytes=token_bytes,
        special_token_ids=special_token_ids,
        eos_token_ids=tuple(i for i in tokenizer.eos_token_ids if i < logits_size),
        logits_size=logits_size,
        encode=encode,
    )
