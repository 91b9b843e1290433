"""Readers of arguments, one for each style of writing them. All of them give JSON.

A reader hands on JSON text as it comes to be known; what it has handed on adds up to an object if
it returns True, and to the beginning of one, or to nothing, if not.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sapwood.runtime.tools.call_syntax import ArgumentStyle
from sapwood.runtime.tools.json_scanner import JsonObjectScanner
from sapwood.runtime.tools.python_arguments import read_python_arguments
from sapwood.runtime.tools.text_source import Steps, TextSource
from sapwood.runtime.tools.xml_arguments import read_xml_arguments

Write = Callable[[str], None]
ReadArguments = Callable[[TextSource, Mapping[str, Any], Write], Steps[bool]]


def read_json_arguments(source: TextSource, schema: Mapping[str, Any], write: Write) -> Steps[bool]:
    """A JSON object, handed on as it is."""
    scanner = JsonObjectScanner()
    while True:
        write(source.take_up_to(scanner))
        if scanner.is_complete or scanner.is_broken or not (yield from source.more()):
            return scanner.is_complete


READERS: Mapping[ArgumentStyle, ReadArguments] = MappingProxyType(
    {
        ArgumentStyle.JSON: read_json_arguments,
        ArgumentStyle.PYTHON: read_python_arguments,
        ArgumentStyle.QWEN_XML: read_xml_arguments,
    }
)
