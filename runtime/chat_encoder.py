"""Conversations to tokens, continuing the tokens of earlier turns wherever their text goes on.

Ties the chat template, the tokenizer and the memory of turns together. Knows no engine.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from sapwood.radix import Namespace, NamespaceKind, NamespacePart
from sapwood.runtime.chat import Chat, Message
from sapwood.runtime.chat_template import RenderedChat
from sapwood.runtime.tokenizer import TokenIds, Tokenizer
from sapwood.runtime.turns import (
    ChatPrompt,
    Divergence,
    PrefixReport,
    Turn,
    TurnMemory,
    conversation_digests,
    find_divergence,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedChat:
    """A conversation's tokens; the first `num_remembered_tokens` are an earlier turn's."""

    token_ids: TokenIds
    num_remembered_tokens: int
    rendered: RenderedChat
    prompt: ChatPrompt
    divergence: Divergence | None

    @property
    def report(self) -> PrefixReport:
        return PrefixReport(
            num_tokens=len(self.token_ids),
            num_remembered_tokens=self.num_remembered_tokens,
            divergence=self.divergence,
        )


class ChatEncoder:
    """Renders and tokenises conversations, and remembers how they went on. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, turns: TurnMemory | None = None) -> None:
        self._tokenizer = tokenizer
        self._turns = turns or TurnMemory()

    def render(self, chat: Chat | Sequence[Message]) -> RenderedChat:
        """The conversation as text. Raises RequestError."""
        return self._tokenizer.render_chat(chat)

    def encode(self, rendered: RenderedChat, namespace: Namespace) -> EncodedChat:
        """Its tokens. Raises RequestError. Cost: tokenising what no earlier turn has."""
        content = rendered.content
        keyed, all_places = content.keyed()
        if key := rendered.options.turns_key:
            namespace = (*namespace, NamespacePart(NamespaceKind.SALT, key))
        prompt = ChatPrompt(
            keyed=keyed,
            conversations=conversation_digests(rendered.messages, namespace),
            options=_options_digest(rendered),
            namespace=namespace,
        )
        starts = {
            place: start
            for place, (start, end) in zip(all_places, content.controls, strict=True)
            if self._tokenizer.can_split_before(content.text[start:end])
        }
        turn = self._turns.recall(prompt, list(starts))
        if turn is None:
            remembered, start = np.empty(0, np.int32), 0
        else:
            remembered, start = turn.token_ids, starts[len(turn.keyed)]
        rest = self._tokenizer.encode_controlled(content, start=start)
        token_ids = np.concatenate([remembered, rest])
        return EncodedChat(
            token_ids=token_ids,
            num_remembered_tokens=len(remembered),
            rendered=rendered,
            prompt=prompt,
            divergence=self._divergence(turn, prompt, token_ids, rendered),
        )

    def remember(
        self,
        prompt: ChatPrompt,
        prompt_token_ids: TokenIds,
        answer_ids: Sequence[int],
        answer: str,
        content: str | None = None,
    ) -> None:
        """Keep a finished turn: the answer's text as it was generated, and all tokens generated.

        `content`: what of it a client has as such, where it also has reasoning or tool calls. A
        template that writes these as the model did continues the turn, any other does not.
        End tokens and what a stop string cut off are left out. Where no number of whole tokens has
        exactly this text, only the prompt's tokens are kept, to explain what came of it.
        """
        whole = self._tokens_of(answer, answer_ids)
        kept = np.array(whole or (), np.int32)
        self._turns.remember(
            Turn(
                prompt=replace(prompt, conversations=prompt.conversations[-1:]),
                answer=answer,
                token_ids=np.concatenate([prompt_token_ids, kept]),
                num_prompt_tokens=len(prompt_token_ids),
                is_exact=whole is not None,
                content=content,
            )
        )

    def _tokens_of(self, text: str, token_ids: Sequence[int]) -> Sequence[int] | None:
        """The fewest first tokens that are exactly this text, without special tokens."""
        wanted, spelled = text.encode(), bytearray()
        for num_tokens, token_id in enumerate((*token_ids, None)):
            if len(spelled) >= len(wanted):
                return token_ids[:num_tokens] if spelled == wanted else None
            if token_id is None or self._tokenizer.is_special(token_id):
                break
            spelled += self._tokenizer.token_raw_bytes(token_id)
        return None

    def _divergence(
        self, turn: Turn | None, prompt: ChatPrompt, token_ids: TokenIds, rendered: RenderedChat
    ) -> Divergence | None:
        last = self._turns.last_turn(prompt)
        if last is None or (turn is not None and _reaches(turn, last)):
            return None
        return find_divergence(last, prompt, token_ids, rendered.messages, self._spelled)

    def _spelled(self, token_ids: TokenIds) -> str:
        return b"".join(map(self._tokenizer.token_raw_bytes, token_ids.tolist())).decode(
            errors="replace"
        )


def _reaches(turn: Turn, last: Turn) -> bool:
    """Whether a turn that is continued is as good as the conversation's last."""
    same_messages = turn.prompt.conversations == last.prompt.conversations
    return same_messages or len(turn.keyed) >= len(last.keyed)


def _options_digest(rendered: RenderedChat) -> bytes:
    """Of what changes how earlier messages are rendered."""
    options = rendered.options
    what = [list(rendered.told_tools), dict(options.chat_template_kwargs), options.reasoning_effort]
    return blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=32).digest()
