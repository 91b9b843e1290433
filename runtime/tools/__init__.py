"""Tool calls: what may be called, and how models write it."""

from sapwood.runtime.tools.detection import detect_tool_format
from sapwood.runtime.tools.formats import TOOL_FORMATS, tool_format
from sapwood.runtime.tools.interface import ToolFormat
from sapwood.runtime.tools.tool import (
    Tool,
    ToolChoice,
    ToolMode,
    checked_tool_choice,
    checked_tools,
)

__all__ = [
    "TOOL_FORMATS",
    "Tool",
    "ToolChoice",
    "ToolFormat",
    "ToolMode",
    "checked_tool_choice",
    "checked_tools",
    "detect_tool_format",
    "tool_format",
]
