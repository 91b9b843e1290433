"""Messages of text, made to keep to the rules that many chat templates have for turns.

Knows no templates; works on plain messages (`runtime/chat.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Any


def joined_turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of the user that follow each other are one: some templates take the user's and the
    assistant's in turn only, and two tools' results are two messages."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if joined and message["role"] == "user" == joined[-1]["role"]:
            joined[-1]["content"] += f"\n{message['content']}"
        else:
            joined.append(dict(message))
    return joined


def without_system(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The first message's text begins the next one instead, if it is the system's."""
    first, *rest = map(dict, messages)
    if first["role"] != "system" or not rest:
        return [first, *rest]
    return [{**rest[0], "content": f"{first['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
