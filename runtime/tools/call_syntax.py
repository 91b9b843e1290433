"""How a family of models writes tool calls, as data: the one definition behind the grammar that an
answer has to keep to and behind its reader.

An answer with two calls, by the names of the fields:

    <tool_call>\\n      trigger, opening
    {"name": "          before_name
    get_time
    ", "arguments":     before_arguments
    {"zone": "CET"}
    }                   after_arguments
    \\n</tool_call>\\n<tool_call>\\n     separator, and a call again
    \\n</tool_call>     closing

The grammar writes all of it exactly as it stands here, which is how chat templates write earlier
calls: a call that was generated is the beginning of the next turn's prompt, token for token. The
reader takes other whitespace between the words, too.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

SPACE = " \t\r\n"
MAX_SPACE = 16  # characters before a word of a call


class ArgumentStyle(StrEnum):
    """How arguments are written; as `style` in a structural tag."""

    JSON = "json"  # {"city": "Rome", "days": 3}
    PYTHON = "python"  # city="Rome", days=3
    QWEN_XML = "qwen_xml"  # <parameter=city>\nRome\n</parameter>\n


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """`trigger` announces calls wherever it stands in an answer; empty: nothing does. `lead`: a
    character between content and the trigger that is no part of the content. `bare`: an answer that
    begins with a call needs no trigger. `separator` None: an answer has one call at most.
    `markers`: what in it is a special token, in the tokenizers that have it.
    """

    lead: str = ""
    trigger: str = ""
    bare: bool = False
    opening: str = ""
    before_name: str = ""
    before_arguments: str
    style: ArgumentStyle = ArgumentStyle.JSON
    after_arguments: str = ""
    separator: str | None = None
    closing: str = ""
    markers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.trigger or self.bare

    def begin(self, name: str) -> str:
        """What a call of the tool `name` begins with, up to its arguments."""
        return f"{self.before_name}{name}{self.before_arguments}"

    def bare_head(self, names: str) -> str:
        """A regular expression for the beginning of an answer that names a tool, `names` being one
        for the names, with the whitespace that the reader takes.

        It ends with the name's delimiter, so that no match goes on in another.
        """
        words = words_of(self.opening + self.before_name)
        before = "".join(_SPACES + re.escape(word) for word in words)
        own_word = "" if self.before_name else _SPACES
        return f"{before}{own_word}({names}){re.escape(self.before_arguments[0])}"


def words_of(text: str) -> tuple[str, ...]:
    """What of a syntax's text has to be there, and in one piece."""
    return tuple(_WORD.findall(text))


_WORD = re.compile(r'"\w+"|</?\w+[=>]?|\[[A-Z_]+\]|\S')
_SPACES = f"[ \\t\\r\\n]{{0,{MAX_SPACE}}}"
