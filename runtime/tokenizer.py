"""Text to token ids and back, for one checkpoint.

A face over the `tokenizers` library, which does the work; `transformers` is not imported, it would
cost seconds. Ids are 1-D C-contiguous int32 arrays from here to the tree. Knows nothing of
requests, sampling or models.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from sapwood.runtime.chat import Chat, Message
from sapwood.runtime.chat_template import ChatTemplate, RenderedChat
from sapwood.runtime.checkpoint_json import field_of, token_ids_of, wrong_field
from sapwood.runtime.control_tokens import ControlledText, ControlTokens
from sapwood.runtime.controlled_encoder import ControlledEncoder
from sapwood.runtime.errors import RequestError, UnsupportedModelError
from sapwood.runtime.tools import TOOL_FORMATS, ToolFormat, detect_tool_format

TokenIds = NDArray[np.int32]


class Tokenizer:
    """The tokenizer of a checkpoint folder, with its end tokens and its chat template.

    Never mutated after `from_folder`; may be used from several threads.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: tuple[int, ...],
        chat_template: str | None,
        tool_format: ToolFormat | None = None,
        model_vocab_size: int = 0,
    ) -> None:
        backend = _with_special_roles(backend)
        # A tokenizer.json may ask for cutting and padding; a prompt is never silently cut here.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._model_vocab_size = model_vocab_size
        self._added_tokens: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self._controlled = ControlledEncoder(backend)
        control = [token.content for token in self._added_tokens.values() if token.special]
        other = [token.content for token in self._added_tokens.values() if not token.special]
        self._control_tokens = ControlTokens(control, other)
        self._template = (
            ChatTemplate(
                chat_template, special_tokens, self._control_tokens, tool_format=tool_format
            )
            if chat_template
            else None
        )
        self.tool_format = tool_format  # None: calls are written in a way that is not known
        self.eos_token_ids = eos_token_ids
        self.bos_token_id: int | None = backend.token_to_id(special_tokens.get("bos_token", ""))

    @classmethod
    def from_folder(cls, folder: str | Path, *, tool_format: str = "auto") -> "Tokenizer":
        """Read `tokenizer.json` and what the files beside it say of end tokens and chat.

        `tool_format` is a name of `sapwood.runtime.tools.TOOL_FORMATS`, or "auto": the one that the
        chat template writes.

        End tokens are all those that generation_config.json, config.json and the tokenizer's own
        files name. Raises UnsupportedModelError where tokenizer.json is missing or any is broken.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedModelError(
                f"{folder} has no tokenizer.json; save the checkpoint's tokenizer once with "
                "transformers' AutoTokenizer to get one"
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UnsupportedModelError(f"{path} cannot be read: {error}") from error
        config = _read_json(folder / "config.json")
        tokenizer_config = _read_json(folder / "tokenizer_config.json")
        special_tokens = {
            **_special_tokens(_read_json(folder / "special_tokens_map.json")),
            **_special_tokens(tokenizer_config),
        }
        text_config = field_of(config, "text_config", dict, {}, where="config.json") or config
        generation = _read_json(folder / "generation_config.json")
        end_token = backend.token_to_id(special_tokens.get("eos_token", ""))
        eos_ids = [
            *token_ids_of(generation, "eos_token_id", where="generation_config.json"),
            *token_ids_of(text_config, "eos_token_id", where="config.json"),
            *token_ids_of(config, "eos_token_id", where="config.json"),
            *([] if end_token is None else [end_token]),
        ]
        template = _chat_template(folder, tokenizer_config)
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=tuple(dict.fromkeys(eos_ids)),
            chat_template=template,
            tool_format=_tool_format(tool_format, template),
            model_vocab_size=field_of(text_config, "vocab_size", int, 0, where="config.json"),
        )

    @property
    def chat_template(self) -> str | None:
        """The template's text."""
        return None if self._template is None else self._template.source

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id. The model may have more rows than that."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Token ids of `text`. Special tokens spelled out in it are parsed as such.

        `add_special_tokens` puts in front (and behind) what the tokenizer always puts there, such
        as a beginning-of-text token. Raises RequestError for text that is no valid Unicode.
        """
        # One text goes as a batch of one: that call lets other threads run meanwhile.
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[TokenIds]:
        """`encode` of several texts at once, on several cores."""
        for text in texts:
            _check_unicode(text)
        encodings = self._backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of text that the longest token stands for: no text of n bytes has fewer than
        n / max_token_bytes tokens."""
        tokens = (self.token_raw_bytes(token_id) for token_id in range(self.vocab_size))
        return max(map(len, tokens), default=0)

    def decode(
        self, token_ids: Sequence[int] | TokenIds, *, skip_special_tokens: bool = True
    ) -> str:
        """Text of a whole sequence. Raises RequestError for an id outside the vocabulary."""
        ids = np.asarray(token_ids, dtype=np.int64)
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if outside.size:
            raise RequestError(
                f"token id {outside[0]} is outside the vocabulary of {self.vocab_size} tokens",
                param="tokens",
            )
        text: str = self._backend.decode(ids.tolist(), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, chat: Chat | Sequence[Message]) -> RenderedChat:
        """A conversation as text, by the model's own template.

        Raises RequestError where the model has no template or the template refuses.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template; send a plain prompt instead of messages",
                param="messages",
            )
        return self._template.render(chat if isinstance(chat, Chat) else Chat(chat))

    def encode_chat(self, chat: Chat | Sequence[Message]) -> TokenIds:
        """Token ids of a conversation. The template alone writes special tokens."""
        return self.encode_controlled(self.render_chat(chat).content)

    def encode_controlled(self, content: ControlledText, *, start: int = 0) -> TokenIds:
        """Token ids of a text, from character `start` on, in which only the real control tokens
        are special tokens. Nothing is put in front or behind. Raises RequestError where this
        tokenizer cannot keep others apart.
        """
        return self._controlled.encode(content, start)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]], *, at_start: bool) -> TokenIds:
        """Token ids of texts that stand together, each with whether a chat template wrote it.

        Special tokens are real in what a template wrote, and only there. `at_start`: nothing is
        before them, so a text, also an empty one, gets in front what this tokenizer puts in front
        of every text; what a template wrote has it already. Otherwise nothing is put in front, not
        even the space that some tokenizers add to the first word. Raises RequestError.
        """
        pieces = [piece for piece in pieces if piece[0]]
        for text, _ in pieces:
            _check_unicode(text)
        content = self._control_tokens.joined(pieces)
        if not at_start:
            return self._encode_further(content)
        token_ids = self.encode_controlled(content)
        is_text = not (pieces and pieces[0][1])
        return np.concatenate([self._front_ids, token_ids]) if is_text else token_ids

    def _encode_further(self, content: ControlledText) -> TokenIds:
        """Token ids of a text that something is before."""
        token_ids = self.encode_controlled(content)
        num_spaces = len(content.text) - len(content.text.lstrip(" "))
        if self._num_spaces(token_ids) <= num_spaces:
            return token_ids
        for anchor in _ANCHORS:
            before = self.encode(anchor, add_special_tokens=False)
            both = self.encode_controlled(content.after(anchor))
            further = both[len(before) :]
            is_apart = np.array_equal(both[: len(before)], before)
            if is_apart and self._num_spaces(further) == num_spaces:
                return further
        return token_ids

    def _num_spaces(self, token_ids: TokenIds) -> int:
        """How many spaces the text of these tokens begins with."""
        num_spaces = 0
        for token_id in token_ids.tolist():
            raw = self.token_raw_bytes(token_id)
            rest = raw.lstrip(b" ")
            num_spaces += len(raw) - len(rest)
            if rest:
                break
        return num_spaces

    @cached_property
    def _front_ids(self) -> TokenIds:
        """What is put in front of every text, such as a beginning-of-text token."""
        plain = self.encode("a", add_special_tokens=False).tolist()
        whole = self.encode("a").tolist()
        places = range(len(whole) - len(plain) + 1)
        start = next((i for i in places if whole[i : i + len(plain)] == plain), 0)
        return np.array(whole[:start], dtype=np.int32)

    def can_split_before(self, control_token: str) -> bool:
        """Whether the tokens of any text are those of the part before this control token followed
        by those of the rest. Tried on a few texts, once per token."""
        return self._controlled.can_split_before(control_token)

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """For each token id the bytes that it adds to a text that it continues.

        Special tokens add nothing, nor do ids that only the model knows. The bytes of a sequence,
        joined and decoded, are `decode` of it, with two differences that are on purpose: a space
        that the library drops at the very beginning of a text is kept, as these tokens continue a
        prompt; and of a run of byte tokens that is not UTF-8 as a whole the valid characters are
        kept, where the library gives one U+FFFD per byte.

        Built once, at first use (about 0.1 s for 50,000 tokens). Raises UnsupportedModelError for
        a decoder that does not work token by token.
        """
        to_bytes = _byte_rule(self._backend.decoder)
        table = [b""] * max(self.vocab_size, self._model_vocab_size)
        for token, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            table[token_id] = to_bytes(token)
        for token_id, added in self._added_tokens.items():
            table[token_id] = b"" if added.special else to_bytes(added.content)
        return tuple(table)

    def token_raw_bytes(self, token_id: int) -> bytes:
        """`token_bytes` of one id, but a special token is spelled out; empty for an unknown id."""
        added = self._added_tokens.get(token_id)
        if added is not None and added.special:
            return added.content.encode()
        return self.token_bytes[token_id] if 0 <= token_id < len(self.token_bytes) else b""

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a special token, which is no part of an answer's text."""
        added = self._added_tokens.get(token_id)
        return added is not None and bool(added.special)

    def special_id(self, content: str) -> int | None:
        """The id of the special token that is spelled so; None where there is none."""
        token_id = self._backend.token_to_id(content)
        return token_id if token_id is not None and self.is_special(token_id) else None

    def token_text(self, token_id: int) -> str:
        """One token as a person may read it; U+FFFD where it holds a part of a character."""
        return self.token_raw_bytes(token_id).decode(errors="replace")


def _with_special_roles(backend: Backend) -> Backend:
    """The tokenizer, with added tokens that name a role flagged special.

    Some checkpoints flag them as text (DeepSeek R1's <｜User｜>), and a message that spells one
    would begin a turn. Cost where there are any: that of reading tokenizer.json once more.
    """
    added = backend.get_added_tokens_decoder()
    roles = {i for i, t in added.items() if not t.special and _ROLE_TOKEN.fullmatch(t.content)}
    if not roles:
        return backend
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["special"] |= token["id"] in roles
    return Backend.from_str(json.dumps(state))


def _check_unicode(text: str) -> None:
    """Half of a surrogate pair reaches us through JSON escapes and has no encoding."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: a lone surrogate at character {error.start}",
            param="prompt",
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{path} must hold a JSON object")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like; each is a string or an object that holds one."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """A file of its own comes first; of several named templates the default one is taken."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    where, template = "tokenizer_config.json", tokenizer_config.get("chat_template")
    if not isinstance(template, list):
        return field_of(tokenizer_config, "chat_template", str, "", where=where) or None
    named = {}
    for entry in template:
        match entry:
            case {"name": str(name), "template": str(text)}:
                named[name] = text
            case _:
                wanted = "an object with a name and a template"
                raise wrong_field(where, "an entry of chat_template", entry, wanted)
    return named.get("default")


def _tool_format(name: str, template: str | None) -> ToolFormat | None:
    found = detect_tool_format(template) if name == "auto" else name
    return None if found is None else TOOL_FORMATS[found]


def _byte_rule(decoder: Any) -> Callable[[str], bytes]:
    """The function from a token's spelling to its bytes that a library decoder amounts to.

    Raises UnsupportedModelError for a decoder whose output for a token depends on its neighbours.
    """
    state = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "none"}
    steps = list(_flat_steps(state))
    kinds = "".join(f"{step['type']} " for step in steps)
    if kinds == "ByteLevel ":
        return _byte_level
    replacements = []
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Metaspace":
            replacements.append((step["replacement"], " "))
        elif step["type"] == "Replace" or (step["type"] == "Strip" and step["stop"]):
            kinds += "unknown "
    # Strip comes last and works on the whole text: it only drops a space at its very beginning.
    if not re.fullmatch("((Replace|Metaspace) )*(ByteFallback )?(Fuse (Strip )?)?", kinds):
        raise UnsupportedModelError(
            f"this tokenizer's decoder ({kinds.strip()}) does not work token by token; "
            "byte-level and sentencepiece-style decoders are served"
        )
    has_byte_tokens = "ByteFallback " in kinds

    def spelled(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        if has_byte_tokens and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.encode()

    return spelled


def _flat_steps(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if state["type"] == "Sequence":
        for step in state["decoders"]:
            yield from _flat_steps(step)
    else:
        yield state


# Texts that a first word may follow; which of them ends with a whole token depends on the word.
_ANCHORS = ("\n", ".", "a")

_ROLE_TOKEN = re.compile("<[|｜](system|user|assistant|tool)[|｜]>", re.IGNORECASE)
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _byte_level_alphabet() -> Mapping[int, str]:
    """From the printable stand-in of each byte back to the byte (Radford et al. 2019, §2.2).

    Bytes that print well in Latin-1 stand for themselves, the others got the code points from 256
    on, in order. Values are Latin-1 characters; U+FFFF marks what stands for no byte.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {code: chr(code) if code in printable else "\uffff" for code in range(256)}
    others = (byte for byte in range(256) if byte not in printable)
    return MappingProxyType(alphabet | {256 + i: chr(byte) for i, byte in enumerate(others)})


_BYTE_LEVEL = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    """A token with any character outside the alphabet is taken as plain text, as a whole."""
    try:
        return token.translate(_BYTE_LEVEL).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
