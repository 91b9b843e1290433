from typing import Any

from sapwood.runtime.turn_rules import joined_turns, without_system


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_only_the_users_messages_are_joined() -> None:
    turns = [say("system", "s"), say("user", "a"), say("user", "b"), say("assistant", "c")]
    turns += [say("assistant", "d"), say("user", "e")]
    assert joined_turns(turns) == [
        say("system", "s"), say("user", "a\nb"), say("assistant", "c"), say("assistant", "d"),
        say("user", "e"),
    ]  # fmt: skip


def test_what_was_given_is_not_changed() -> None:
    turns = [say("user", "a"), say("user", "b")]
    joined_turns(turns)
    without_system([say("system", "s"), turns[0]])
    assert turns == [say("user", "a"), say("user", "b")]


def test_a_system_message_begins_the_next_one() -> None:
    assert without_system([say("system", "s"), say("user", "a")]) == [say("user", "s\n\na")]
    assert without_system([say("user", "a")]) == [say("user", "a")]
    assert without_system([say("system", "s")]) == [say("system", "s")]
