"""Token ids to text, as they arrive.

Works on the bytes that each token adds (`Tokenizer.token_bytes`), so the text of an answer does
not depend on how its tokens were grouped, and never contains a piece of the prompt.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from sapwood.runtime.stop import StopMatch, StopMatcher


class IncrementalDetokenizer:
    """The text of one answer, given out piece by piece as soon as it is certain.

    Held back are an incomplete character at the end and the longest ending that may still become
    a stop (see `StopMatcher.num_held`); nothing else. Bytes that are no UTF-8 become U+FFFD as in
    `bytes.decode(errors="replace")`. Ids outside the table add nothing: a model may have more rows
    than its tokenizer has tokens. `visible` has bytes that go before those of the table: of special
    tokens that are text for once.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        stops: StopMatcher | None = None,
        visible: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        self._token_bytes = token_bytes
        self._visible = visible
        self._matcher = StopMatcher() if stops is None else stops
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = b""  # not yet given to the decoder
        self._num_decoded = 0  # bytes given to the decoder
        self._finished = False

    def add(self, token_ids: Iterable[int], finished: bool = False) -> str:
        """Take in the next tokens; return the text that has become certain.

        `finished` says that no more will come: what was held back comes out, an incomplete
        character as U+FFFD. An end token is not text, so the caller leaves it out. At a stop the
        text ends in front of it, and whatever follows adds nothing. The cost is the matcher's.
        """
        if self._finished:
            return ""
        match = self._take_in(token_ids)
        if match is not None:
            self._finished = True
            return self._decode(match.text_len - self._num_decoded, final=True)
        if finished:
            self._finished = True
            return self._decode(len(self._pending), final=True)
        # A stop starts with a whole character, so a held beginning of one proves that an
        # incomplete character in front of it will stay incomplete.
        num_held = self._matcher.num_held
        return self._decode(len(self._pending) - num_held, final=num_held > 0)

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds to the text."""
        shown = self._visible.get(token_id)
        if shown is not None:
            return shown
        return self._token_bytes[token_id] if 0 <= token_id < len(self._token_bytes) else b""

    def _take_in(self, token_ids: Iterable[int]) -> StopMatch | None:
        for token_id in token_ids:
            token = self.bytes_of(token_id)
            self._pending += token
            match = self._matcher.feed(token)
            if match is not None:
                return match
        return None

    def _decode(self, num_bytes: int, *, final: bool) -> str:
        data, self._pending = self._pending[:num_bytes], self._pending[num_bytes:]
        self._num_decoded += num_bytes
        return self._decoder.decode(data, final)
