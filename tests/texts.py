"""Prompts in plain English: five beginnings of some length, and ten ends for each."""

STEMS = (
    "A radix tree stores strings by their common beginnings. Each edge carries a run of letters, "
    "each node is a place where two strings part. To look a string up, walk from the root and "
    "compare edge by edge; the walk ends where nothing matches any more.",
    "Dear team, thank you for the work of the last month. The new warehouse opened on time, the "
    "two lines run without faults, and the first customers have sent kind words. Before we plan "
    "the next quarter I would like to hear from each of you.",
    "Question: A farmer has 17 sheep and buys 8 more at the market. On the way home 3 of them run "
    "off, and a neighbour gives him 2 as a present. How many sheep does the farmer have now? "
    "Answer: He starts with 17, 17 + 8 = 25, 25 - 3 = 22, 22 + 2 = 24. The answer is 24.",
    "The ferry leaves the harbour at seven in the morning, when the fog still lies on the water. "
    "On board are a teacher, a man with a cello, and a girl who counts the gulls. None of them "
    "knows that the captain has not slept since Tuesday.",
    "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < "
    "len(right):\n        if left[i] <= right[j]:\n            result.append(left[i])\n            "
    "i += 1\n        else:\n            result.append(right[j])\n            j += 1\n",
)

ENDS = (
    " In short,",
    " The first thing to note is that",
    "\n\nQuestion: What is the most important word in the text above?\nAnswer:",
    " However, one problem remains:",
    "\n\nSummary:",
    " For example, imagine that",
    " Later that day,",
    "\n\nTranslated into simple words, this means",
    " Three reasons speak for it. First,",
    " And yet",
)

PROMPTS = tuple(stem + end for stem in STEMS for end in ENDS)
