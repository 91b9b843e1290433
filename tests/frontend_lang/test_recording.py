"""Recordings: what they answer, in which order, and what they say of a call they do not have."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

import sapwood as sgl
from sapwood.frontend_lang.backends.interface import Answer, Call, Piece, Prompt, Score
from sapwood.frontend_lang.backends.recording import Recording
from sapwood.frontend_lang.options import Options
from sapwood.runtime.constraints.spec import ConstraintSpec
from sapwood.runtime.errors import ContextLengthError, EngineBusyError, RequestError
from sapwood.runtime.hints import NO_HINTS, Hints
from tests.frontend_lang.fakes import FakeBackend

PROMPT = Prompt(text="The sky is ü\u2028\ud800", token_ids=(1, 2, 3))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "calls.jsonl"


def calling(**options: Any) -> Call:
    return Call(options=Options(**options))  # type: ignore[typeddict-item]


def generated(recording: Recording, prompt: Prompt = PROMPT, call: Call | None = None) -> Any:
    return asyncio.run(recording.generate(prompt, call or Call()))


class Failing(FakeBackend):
    """Fails with what it is given, after two pieces of a stream."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
        raise self.error

    async def stream(self, prompt: Prompt, call: Call) -> Any:
        yield Answer(text="a")
        yield Answer(text="b")
        raise self.error


def test_an_answer_comes_back_as_it_was(path: Path) -> None:
    call = Call(
        options=Options(temperature=0.5, stop=("\n",), logit_bias={10: 1.0, 9: 2.0}),
        constraint=ConstraintSpec.choice(["a", "b"]),
    )
    recorded = generated(Recording(FakeBackend(), path), call=call)
    assert recorded[0].text == "ok"
    assert generated(Recording(None, path, mode="replay"), call=call) == recorded


def test_scores_and_infinities_come_back_as_they_were(path: Path) -> None:
    backend = FakeBackend(logprob=lambda text: -math.inf if "b" in text else -1.0)

    def scored(recording: Recording) -> list[Score]:
        return asyncio.run(recording.score(PROMPT, [(97,), (98, 97)], NO_HINTS))

    recorded = scored(Recording(backend, path))
    assert [score.logprobs for score in recorded] == [(-1.0,), (-math.inf, -math.inf)]
    assert scored(Recording(None, path)) == recorded


def test_a_stream_comes_back_piece_by_piece(path: Path) -> None:
    async def streamed(recording: Recording) -> list[Answer]:
        return [piece async for piece in recording.stream(PROMPT, Call())]

    recorded = asyncio.run(streamed(Recording(FakeBackend("abc"), path)))
    assert [piece.text for piece in recorded] == ["a", "b", "c", ""]
    assert asyncio.run(streamed(Recording(None, path, mode="replay"))) == recorded


def test_tokens_and_templates_come_back_as_they_were(path: Path) -> None:
    async def told(recording: Recording) -> Any:
        assert recording.encoder is not None
        pieces = [Piece("a"), Piece("<", is_control=True)]
        ids = [await recording.encoder.encode(pieces, at_start=at) for at in (True, False, False)]
        return ids, await recording.encoder.role_text(("system", "user"))

    recorded = asyncio.run(told(Recording(FakeBackend(), path)))
    assert recorded[0][0] != recorded[0][1] == recorded[0][2]
    assert asyncio.run(told(Recording(None, path, mode="replay"))) == recorded


def test_a_recording_stands_in_for_its_backends_properties(path: Path) -> None:
    Recording(FakeBackend(chat_only=True, with_encoder=False), path)
    replayed = Recording(None, path, mode="replay")
    assert replayed.chat_only
    assert replayed.encoder is None
    assert "fake" in replayed.name


@pytest.mark.parametrize(
    "error",
    [
        RequestError("n is 0", param="n", code="wrong"),
        ContextLengthError("too long"),
        EngineBusyError("later"),
    ],
)
def test_errors_are_recorded_too(path: Path, error: Exception) -> None:
    async def failure(recording: Recording) -> Exception:
        with pytest.raises(type(error)) as caught:
            await recording.generate(PROMPT, Call())
        return caught.value

    asyncio.run(failure(Recording(Failing(error), path)))
    replayed = asyncio.run(failure(Recording(None, path, mode="replay")))
    assert type(replayed) is type(error)
    assert str(replayed) == str(error)
    assert getattr(replayed, "param", None) == getattr(error, "param", None)


def test_what_a_stream_said_before_an_error_is_recorded_with_it(path: Path) -> None:
    async def streamed(recording: Recording) -> str:
        text = ""
        with pytest.raises(EngineBusyError):
            async for piece in recording.stream(PROMPT, Call()):
                text += piece.text
        return text

    assert asyncio.run(streamed(Recording(Failing(EngineBusyError("later")), path))) == "ab"
    assert asyncio.run(streamed(Recording(None, path, mode="replay"))) == "ab"


def test_equal_calls_get_their_answers_in_order(path: Path) -> None:
    recording = Recording(FakeBackend(["a", "b", "c"]), path)
    assert [generated(recording)[0].text for _ in range(3)] == ["a", "b", "c"]
    replayed = Recording(None, path, mode="replay")
    assert [generated(replayed)[0].text for _ in range(3)] == ["a", "b", "c"]
    with pytest.raises(RequestError, match="of its equals 3 were recorded, this is number 4"):
        generated(replayed)


def test_equal_calls_at_once_are_told_apart_by_when_they_began(path: Path) -> None:
    class Backwards(FakeBackend):
        """The later a call begins, the sooner it is answered."""

        async def generate(self, prompt: Prompt, call: Call) -> list[Answer]:
            number = len(self.asked)
            self.asked.append(None)  # type: ignore[arg-type]
            await asyncio.sleep(0.01 * (3 - number))
            return [Answer(text=str(number), finish_reason="stop")]

    async def at_once(recording: Recording) -> list[str]:
        calls = (recording.generate(PROMPT, Call()) for _ in range(3))
        return [answers[0].text for answers in await asyncio.gather(*calls)]

    assert asyncio.run(at_once(Recording(Backwards(), path))) == ["0", "1", "2"]
    assert asyncio.run(at_once(Recording(None, path, mode="replay"))) == ["0", "1", "2"]


def test_hints_are_no_part_of_a_call(path: Path) -> None:
    generated(Recording(FakeBackend(), path), call=Call(hints=Hints(program_id="one")))
    replayed = Recording(None, path, mode="replay")
    assert generated(replayed, call=Call(hints=Hints(program_id="two")))[0].text == "ok"


def test_auto_asks_the_backend_only_for_what_is_new(path: Path) -> None:
    generated(Recording(FakeBackend("old"), path))
    backend = FakeBackend("new")
    recording = Recording(backend, path)
    assert generated(recording)[0].text == "old"
    assert generated(recording, call=calling(seed=1))[0].text == "new"
    assert len(backend.asked) == 1
    assert generated(Recording(None, path), call=calling(seed=1))[0].text == "new"


def test_record_begins_anew(path: Path) -> None:
    generated(Recording(FakeBackend("old"), path))
    recording = Recording(FakeBackend("new"), path, mode="record")
    assert generated(recording)[0].text == "new"
    assert len(path.read_text().splitlines()) == 2


def test_a_call_that_is_not_there_is_compared_with_the_nearest(path: Path) -> None:
    recording = Recording(FakeBackend(), path)
    far = Prompt(text="Something else altogether", token_ids=(9, 9))
    for prompt, temperature in [(far, 0.1), (PROMPT, 0.5)]:
        generated(recording, prompt, calling(temperature=temperature, max_tokens=7))
    replayed = Recording(None, path, mode="replay")
    with pytest.raises(RequestError) as caught:
        generated(replayed, PROMPT, calling(temperature=0.7, max_tokens=7))
    message = str(caught.value)
    assert "differs in options.temperature: it has 0.5, this call 0.7" in message
    assert str(path) in message
    assert 'mode="record"' in message


def test_a_text_that_differs_is_shown_where_it_does(path: Path) -> None:
    generated(Recording(FakeBackend(), path), Prompt(text="x" * 500 + "The sky is blue"))
    with pytest.raises(RequestError, match="from character 511 it has '.*sky is blue'") as caught:
        generated(Recording(None, path), Prompt(text="x" * 500 + "The sky is red"))
    assert "sky is red'" in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_verb_that_was_never_recorded_is_said(path: Path) -> None:
    generated(Recording(FakeBackend(), path))
    with pytest.raises(RequestError, match="no call of score"):
        asyncio.run(Recording(None, path).score(PROMPT, ["a"], NO_HINTS))


def test_replay_never_asks_a_backend(path: Path) -> None:
    Recording(FakeBackend(), path)
    backend = FakeBackend()
    with pytest.raises(RequestError, match="no call of generate"):
        generated(Recording(backend, path, mode="replay"))
    assert not backend.asked


@pytest.mark.parametrize("content", ["", "{}\n", "no json\n", "[]\n", '{"recording": {}}\n'])
def test_a_file_that_is_no_recording_is_refused(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(RequestError, match="no recording"):
        Recording(FakeBackend(), path)


def test_a_recording_of_another_version_is_refused(path: Path) -> None:
    path.write_text(json.dumps({"recording": {"version": 99}}) + "\n")
    with pytest.raises(RequestError, match="version 99"):
        Recording(FakeBackend(), path)


def test_what_cannot_be_done_is_said_at_once(path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        Recording(None, path, mode="replay")
    with pytest.raises(RequestError, match="no backend"):
        Recording(None, path)
    with pytest.raises(RequestError, match="needs a backend"):
        Recording(None, path, mode="record")
    with pytest.raises(RequestError, match="auto, record, replay"):
        Recording(FakeBackend(), path, mode="rewind")


def test_a_call_that_was_cancelled_is_not_recorded(path: Path) -> None:
    async def main() -> None:
        recording = Recording(FakeBackend(delay=30.0), path)
        task = asyncio.ensure_future(recording.generate(PROMPT, Call()))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert len(path.read_text().splitlines()) == 1


def test_info_is_recorded_and_flushing_and_closing_reach_the_backend(path: Path) -> None:
    backend = FakeBackend()
    recording = Recording(backend, path)
    info = asyncio.run(recording.server_info())
    assert info["name"] == "fake"
    asyncio.run(recording.flush_cache())
    asyncio.run(recording.aclose())
    assert (backend.num_flushes, backend.is_closed) == (1, True)
    replayed = Recording(None, path, mode="replay")
    assert asyncio.run(replayed.server_info()) == info
    asyncio.run(replayed.flush_cache())
    asyncio.run(replayed.aclose())


def test_a_program_with_forks_replays_what_it_said(path: Path) -> None:
    @sgl.function
    def votes(s: Any, question: str) -> None:
        s += sgl.user(question)
        forks = s.fork(8)
        for fork in forks:
            fork += sgl.assistant(sgl.gen("answer", max_tokens=4, temperature=1.0))
        forks.join()
        s += sgl.user("So?") + sgl.assistant(sgl.gen("end", max_tokens=4))

    def run(backend: Any) -> tuple[list[str], str, str]:
        state = votes.run("Which?", backend=backend)
        return state["answer"], state["end"], state.text()

    numbers = iter(range(1000))
    recorded = run(Recording(FakeBackend(lambda prompt, call: f"<{next(numbers)}>"), path))
    assert len(set(recorded[0])) == 8
    for _ in range(3):
        assert run(Recording(None, path, mode="replay")) == recorded
