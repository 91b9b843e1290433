"""API speculation: what it saves, and that no answer differs from that of an ordinary call."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sapwood as sgl
from sapwood.frontend_lang.backends.interface import Answer, Call, Prompt
from sapwood.frontend_lang.nodes import Gen, Node, RoleEnd
from sapwood.frontend_lang.options import Options
from sapwood.frontend_lang.speculation import Speculator
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.errors import EngineBusyError, RequestError
from tests.frontend_lang.fakes import FakeBackend


class Model(FakeBackend):
    """Continues a text as `told` has it, in tokens of one to three characters; what is in no `told`
    it ends at once. Tells log-probabilities where `tells_tokens`, and usage where `tells_usage`."""

    def __init__(
        self,
        *told: str,
        chat_only: bool = False,
        tells_tokens: bool = True,
        tells_usage: bool = True,
        widths: Sequence[int] = (2, 1, 3),
    ) -> None:
        super().__init__(with_encoder=False, chat_only=chat_only)
        self.told = told
        self.tells_tokens, self.tells_usage = tells_tokens, tells_usage
        self.widths = widths
        self.calls: list[Call] = []
        self.texts: list[str] = []

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        self.calls.append(call)
        text = prompt.messages[-1]["content"] if self.chat_only else prompt.text
        self.texts.append(text)
        rest = next((told[len(text) :] for told in self.told if told.startswith(text)), "")
        options = call.options
        if options.get("return_logprob") and not self.tells_tokens:
            raise RequestError("no log-probabilities here", param="logprobs")
        return [self._cut(text, rest, options)]

    def _cut(self, before: str, rest: str, options: Options) -> Answer:
        stop = options.get("stop") or ()
        stops = [stop] if isinstance(stop, str) else list(stop)
        tokens, said = self._tokens(len(before), rest), ""
        limit = options["max_tokens"]
        assert limit is not None
        for number, token in enumerate(tokens[:limit], start=1):
            said += token
            begins = [said.find(stop) for stop in stops if stop in said]
            if begins:
                return self._told(said[: min(begins)], "stop", tokens[:number], options)
        reason = "stop" if len(tokens) < limit else "length"
        return self._told(said, reason, tokens[:limit], options)

    def _tokens(self, at: int, rest: str) -> list[str]:
        """Where a token ends hangs on its place in the text, not on where an answer began."""
        ends, position, turn = [], 0, 0
        while position < at + len(rest):
            position += self.widths[turn % len(self.widths)]
            turn += 1
            ends.append(position)
        begins = [at, *(end for end in ends if at < end)]
        return [rest[begin - at : end - at] for begin, end in zip(begins, begins[1:], strict=False)]

    def _told(self, text: str, reason: str, tokens: Sequence[str], options: Options) -> Answer:
        meta: dict[str, Any] = {"prompt_tokens": 10, "finish_reason": {"type": reason}}
        if self.tells_usage:
            meta["completion_tokens"] = len(tokens)
        if options.get("return_logprob"):
            meta["output_token_logprobs"] = [[-1.0, None, token] for token in tokens]
        return Answer(text=text, finish_reason=reason, meta=meta)


@dataclass(frozen=True)
class Ask:
    """A gen of a program in these tests."""

    stop: str | None
    max_tokens: int = 100


Part = str | Ask


def ran(model: Model, parts: Sequence[Part], num_tokens: int | None) -> list[Answer]:
    """The answers of a program of constants and gens, which end at the first that fails."""

    async def main() -> list[Answer]:
        speculator = None if num_tokens is None else Speculator(model, num_tokens)
        text, answers = "", []
        for index, part in enumerate(parts):
            if isinstance(part, str):
                text += part
                continue
            answer = await answered(model, speculator, text, part, parts[index + 1 :])
            answers.append(answer)
            text += answer.text
        return answers

    return asyncio.run(main())


async def answered(
    model: Model, speculator: Speculator | None, text: str, ask: Ask, after: Sequence[Part]
) -> Answer:
    options = Options(temperature=0.0, max_tokens=ask.max_tokens)
    if ask.stop is not None:
        options["stop"] = ask.stop
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": text})
    prompt = Prompt(text=text, messages=messages if model.chat_only else ())
    known = None
    if speculator is not None:
        upcoming: list[Node] = [Gen(None, Options()) for _ in after] or [RoleEnd("assistant")]
        known = await speculator.answer(prompt, Call(options=options), upcoming)
    if known is not None:
        return known
    return (await model.generate(prompt, Call(options=options)))[0]


TEXT = "Name: Ada\nBorn: 1815\nField: mathematics\n\nThe end."
FIELDS: list[Part] = ["Name:", Ask("\n"), "\nBorn:", Ask("\n"), "\nField:", Ask("\n")]


@pytest.mark.parametrize("chat_only", [False, True])
@pytest.mark.parametrize("tells_tokens", [False, True])
@pytest.mark.parametrize("tells_usage", [False, True])
def test_a_model_that_says_what_the_program_expects_is_called_once(
    chat_only: bool, tells_tokens: bool, tells_usage: bool
) -> None:
    model = Model(TEXT, chat_only=chat_only, tells_tokens=tells_tokens, tells_usage=tells_usage)
    answers = ran(model, FIELDS, num_tokens=64)
    assert [answer.text for answer in answers] == [" Ada", " 1815", " mathematics"]
    refused = 0 if chat_only or tells_tokens else 1
    assert len(model.calls) == 1 + refused
    assert model.texts[-1] == ("" if chat_only else "Name:")
    assert model.calls[-1].options.get("stop") is None


def test_the_cost_of_the_call_is_counted_once() -> None:
    first, *later = ran(Model(TEXT), FIELDS, num_tokens=64)
    assert first.meta["prompt_tokens"] == 10
    assert first.meta["completion_tokens"] > 0
    assert "speculated" not in first.meta
    for answer in later:
        assert answer.meta["speculated"] is True
        assert answer.meta["prompt_tokens"] == answer.meta["completion_tokens"] == 0
        assert answer.meta["finish_reason"] == {"type": "stop", "matched": "\n"}
    assert not any("logprobs" in name for answer in (first, *later) for name in answer.meta)


def test_a_program_that_goes_another_way_makes_ordinary_calls() -> None:
    other = "Name: Ada\nDied: 1852\nField: poetry\n"
    model = Model(TEXT, other)
    parts: list[Part] = ["Name:", Ask("\n"), "\nDied:", Ask("\n"), "\nField:", Ask("\n")]
    assert [answer.text for answer in ran(model, parts, 64)] == [" Ada", " 1852", " poetry"]
    assert model.texts == ["Name:", "Name: Ada\nDied:"]


def test_an_answer_that_is_longer_than_the_surplus_is_an_ordinary_call() -> None:
    model = Model("a:" + "x" * 50 + "\nb:" + "y" * 50 + "\n")
    parts: list[Part] = ["a:", Ask("\n", 30), "\nb:", Ask("\n", 30)]
    assert [answer.text for answer in ran(model, parts, 30)] == ["x" * 50, "y" * 50]
    assert len(model.calls) == 2


@pytest.mark.parametrize("chat_only", [False, True])
def test_the_last_gen_of_a_message_and_one_without_a_stop_ask_for_no_more(chat_only: bool) -> None:
    model = Model("abc", chat_only=chat_only)
    ran(model, [Ask(None, 5)], 64)
    assert model.calls[0].options["max_tokens"] == 5
    if chat_only:
        ran(model, [Ask("\n", 5)], 64)
        assert model.calls[1].options["max_tokens"] == 5


def test_a_backend_with_tokens_of_its_own_is_not_speculated_on() -> None:
    backend = FakeBackend(with_encoder=True)
    speculator = Speculator(backend, 64)
    call = Call(options=Options(max_tokens=4, stop="\n"))
    assert asyncio.run(speculator.answer(Prompt(text="a"), call, ())) is None
    assert not backend.asked


@pytest.mark.parametrize(
    "call",
    [
        Call(options=Options(max_tokens=4, stop="\n", n=2)),
        Call(options=Options(max_tokens=4, stop="\n", stop_regex="a")),
        Call(options=Options(max_tokens=4, stop="\n", return_logprob=True)),
        Call(options=Options(max_tokens=4, stop="\n"), constraint=ConstraintSpec.regex("a")),
        Call(options=Options(max_tokens=4, stop="\n"), separate_reasoning=True),
        Call(options=Options(stop="\n")),
    ],
)
def test_what_cannot_be_cut_out_of_a_text_is_an_ordinary_call(call: Call) -> None:
    model = Model(TEXT)
    assert asyncio.run(Speculator(model, 64).answer(Prompt(text="Name:"), call, ())) is None
    assert not model.calls


def test_another_temperature_is_not_answered_from_the_surplus() -> None:
    model = Model(TEXT)

    async def main() -> None:
        speculator = Speculator(model, 64)
        for text, temperature in [("Name:", 0.0), ("Name: Ada\nBorn:", 0.5)]:
            options = Options(max_tokens=50, stop="\n", temperature=temperature)
            assert await speculator.answer(Prompt(text=text), Call(options=options), ()) is not None

    asyncio.run(main())
    assert [call.options["temperature"] for call in model.calls] == [0.0, 0.5]


def test_an_error_of_the_api_is_raised() -> None:
    class Busy(Model):
        async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
            raise EngineBusyError("later")

    with pytest.raises(EngineBusyError):
        ran(Busy(TEXT), FIELDS, 64)


def test_a_number_of_tokens_below_one_is_refused() -> None:
    with pytest.raises(RequestError, match="num_api_spec_tokens"):
        Speculator(Model(TEXT), 0)


@pytest.mark.parametrize("max_tokens", range(1, 8))
@pytest.mark.parametrize("tells", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("widths", [[1], [2], [3], [3, 1]])
def test_a_limit_of_tokens_comes_where_it_would_have_come(
    max_tokens: int, tells: tuple[bool, bool], widths: list[int]
) -> None:
    """In front of a stop, in the middle of one, and behind it."""

    def answers(num_tokens: int | None) -> list[Answer]:
        model = Model(
            "xyzEND:uvwxyzEND", tells_tokens=tells[0], tells_usage=tells[1], widths=widths
        )
        return ran(model, ["x", Ask("END", 6), "END:u", Ask("END", max_tokens)], num_tokens)

    plain, speculated = answers(None), answers(40)
    assert [answer.text for answer in speculated] == [answer.text for answer in plain]
    assert [a.finish_reason for a in speculated] == [a.finish_reason for a in plain]


def test_tokens_that_do_not_spell_the_answer_are_not_counted() -> None:
    class Garbled(Model):
        async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
            [answer] = await super().generate(prompt, call)
            tokens = [[-1.0, None, "\ufffd"]] * len(answer.text)
            return [
                Answer(
                    text=answer.text, finish_reason="stop", meta={"output_token_logprobs": tokens}
                )
            ]

    answers = ran(Garbled("a" * 30 + "\nb"), [Ask("\n", 10)], 64)
    assert [answer.text for answer in answers] == ["a" * 20]  # ten tokens, by an ordinary call


parts_of_programs = st.lists(
    st.one_of(
        st.text("ab\n", min_size=1, max_size=3),
        st.builds(
            Ask,
            st.sampled_from(["\n", "a", "ab", "b\n", "ba\n", None]),
            st.integers(1, 12),
        ),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=400, deadline=None)
@given(
    told=st.text("ab\n", max_size=40),
    parts=parts_of_programs,
    follows=st.booleans(),
    num_tokens=st.integers(1, 40),
    tells=st.tuples(st.booleans(), st.booleans()),
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
@example("ab\n", [Ask("\n", 2), "\n", Ask("a", 1)], False, 9, (True, True), [3])
def test_answers_are_those_without_speculation(
    told: str,
    parts: list[Part],
    follows: bool,
    num_tokens: int,
    tells: tuple[bool, bool],
    widths: list[int],
) -> None:
    """`follows`: the program's constants are what the model says at their place."""

    def model() -> Model:
        return Model(told, tells_tokens=tells[0], tells_usage=tells[1], widths=widths)

    if follows:
        parts = following(told, model(), parts)
    plain = ran(model(), parts, None)
    speculated = ran(model(), parts, num_tokens)
    assert [answer.text for answer in speculated] == [answer.text for answer in plain]


def following(told: str, model: Model, parts: Sequence[Part]) -> list[Part]:
    """The program with the constants that the model would have said."""
    text, followed = "", []
    for part in parts:
        if isinstance(part, str):
            part = told[len(text) : len(text) + len(part)]
            text += part
        else:
            text += asyncio.run(answered(model, None, text, part, ())).text
        followed.append(part)
    return followed


# -- programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat_only", [False, True])
def test_a_program_is_answered_by_one_call(chat_only: bool) -> None:
    @sgl.function(num_api_spec_tokens=64)
    def person(s: Any) -> None:
        if chat_only:
            s += sgl.user("Who?") + sgl.assistant_begin()
        s += "Name:" + sgl.gen("name", stop="\n", temperature=0)
        s += "\nBorn:" + sgl.gen("born", stop="\n", temperature=0)
        if chat_only:
            s += sgl.assistant_end()

    model = Model(TEXT, chat_only=chat_only)
    state = person.run(backend=model)
    assert (state["name"], state["born"]) == (" Ada", " 1815")
    assert len(model.calls) == 1


def test_branches_that_sample_do_not_share_a_surplus() -> None:
    @sgl.function(num_api_spec_tokens=64)
    def votes(s: Any) -> None:
        s += "Name:"
        forks = s.fork(3)
        for fork in forks:
            fork += sgl.gen("name", stop="\n", temperature=1.0)
        forks.join()

    model = Model(TEXT)
    votes.run(backend=model)
    assert len(model.calls) == 3
