"""Answers from given passages, with their source.

Shows a prompt whose order is chosen for sharing: the passages found stand in the order of the
collection, not of their rank, so questions that find the same ones share all of them.
"""

import math
import re
from collections.abc import Sequence

import sapwood as sgl
from sapwood.frontend_lang.examples.command_line import backend_of_command_line
from sapwood.frontend_lang.examples.material import Passage, passages

QUESTIONS = (
    "Which tree is the tallest of all?",
    "How tall can the tallest tree grow, and where does it get its water?",
    "Why are apple trees grafted?",
    "Which conifer sheds its needles in autumn?",
)


@sgl.function
def rag_over_passages(s: sgl.ProgramState, question: str, found: Sequence[Passage]) -> None:
    s += "Answer from these passages alone, then name the one that says it.\n\n"
    for passage in found:
        s += f"{passage.title}: {passage.text}\n\n"
    s += "Question: " + question + "\nAnswer:" + sgl.gen("answer", stop="\n")
    s += "\nSource: " + sgl.select("source", [passage.title for passage in found])


def retrieve(question: str, collection: Sequence[Passage], num_passages: int = 3) -> list[Passage]:
    """Those that have most in common with the question, in the order of the collection.

    A word counts the more, the fewer passages have it.
    """
    word_sets = [_words(f"{passage.title} {passage.text}") for passage in collection]

    def weight(word: str) -> float:
        return math.log(len(collection) / max(1, sum(word in words for words in word_sets)))

    asked = _words(question)
    scores = [sum(map(weight, sorted(asked & words))) for words in word_sets]
    best = sorted(range(len(collection)), key=lambda i: -scores[i])[:num_passages]
    return [collection[i] for i in sorted(best)]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]+", text.lower()))


def main() -> None:
    with backend_of_command_line(__doc__) as backend:
        arguments = [
            {"question": question, "found": retrieve(question, passages())}
            for question in QUESTIONS
        ]
        states = rag_over_passages.run_batch(
            arguments, backend=backend, temperature=0, max_tokens=48
        )
        for question, state in zip(QUESTIONS, states, strict=True):
            print(f"{question}\n {state['answer']} [{state['source']}]")


if __name__ == "__main__":
    main()
