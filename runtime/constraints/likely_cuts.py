"""How a known text is likely to be cut into tokens: as the model cut it the last time.

Where a grammar knows the next text but what follows could merge with its end (`":"` before a
string), no token is forced. The tokenizer's own cut is a good guess, and a model's habit a better
one: SmolLM2 writes `":` and then `"`, against its tokenizer, one time in five.
"""

from collections import OrderedDict
from collections.abc import Sequence

from sapwood.runtime.constraints.interface import Encode

MAX_TEXTS = 4096
MAX_TEXT_BYTES = 256


class LikelyCuts:
    """Guesses for the texts of one vocabulary. They change how many passes an answer takes, and
    never the answer. O(text); what was learned is kept for the texts that were met last.
    """

    def __init__(self, encode: Encode, token_bytes: Sequence[bytes]) -> None:
        self._encode = encode
        self._token_bytes = token_bytes
        self._learned: OrderedDict[bytes, list[int]] = OrderedDict()

    def of(self, text: bytes) -> list[int]:
        """The tokens to try."""
        learned = self._learned.get(text)
        return self._usual(text) if learned is None else learned

    def learn(self, text: bytes, token_id: int) -> None:
        """The model began `text` with this token."""
        token = self._token_bytes[token_id]
        if len(text) > MAX_TEXT_BYTES or not text.startswith(token):
            return  # a token that goes beyond the text is no cut of it
        self._learned[text] = [token_id, *self._usual(text[len(token) :])]
        self._learned.move_to_end(text)
        if len(self._learned) > MAX_TEXTS:
            self._learned.popitem(last=False)

    def _usual(self, text: bytes) -> list[int]:
        return list(self._encode(text.decode(errors="ignore"))) if text else []
