"""Functions that agents call, as JSON schemas with a question each: tests/data/bfcl."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "data" / "bfcl" / "functions.jsonl"


@dataclass(frozen=True)
class Function:
    id: str
    question: str
    name: str
    description: str
    parameters: dict[str, Any]

    @property
    def closed_parameters(self) -> dict[str, Any]:
        """As OpenAI's strict mode has them: every property is required and no other allowed."""
        closed = _closed(self.parameters)
        assert isinstance(closed, dict)
        return closed

    def as_tool(self) -> dict[str, Any]:
        """OpenAI's description of it."""
        name = "".join(c if c.isalnum() or c in "_-" else "_" for c in self.name)[:64]
        function = {"name": name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def load_functions() -> list[Function]:
    return [Function(**json.loads(line)) for line in _FILE.read_text().splitlines()]


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: value if key == "enum" else _closed(value) for key, value in schema.items()}
    if isinstance(closed.get("properties"), dict) and closed.get("type") == "object":
        closed |= {"required": list(closed["properties"]), "additionalProperties": False}
    return closed
