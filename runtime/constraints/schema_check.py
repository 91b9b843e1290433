"""Whether a JSON schema is one, and whether an answer satisfies it, by jsonschema.

For backends that do not enforce all of a schema. A schema's patterns are matched by backtracking,
which takes exponential time where somebody wants it to; so it is done in a process within a
deadline (`bounded_process.py`). What cannot be checked counts as wrong. Imports no torch.
"""

import json
from typing import Any

from sapwood.runtime.constraints.bounded_process import BoundedProcess, Outcome, WorkError
from sapwood.runtime.constraints.bounded_process_main import Task
from sapwood.runtime.constraints.interface import GrammarError
from sapwood.runtime.constraints.messages import pack, unpack

CHECK_SECONDS = 1.0
MEMORY_LIMIT = 2**28
MAX_PROBLEM_LEN = 300  # characters


class SchemaChecker:
    """Checks in a process of its own. Thread-safe."""

    def __init__(self) -> None:
        """Starts the process, and does not wait for it."""
        self._process = BoundedProcess(
            "sapwood.runtime.constraints.schema_check:make_task", b"", memory_limit=MEMORY_LIMIT
        )
        self._process.start()

    def check_schema(self, schema: str) -> None:
        """Raises GrammarError for what is no JSON schema."""
        problem = self._problem(pack({}, schema.encode()))
        if problem is not None:
            raise GrammarError(f"it is not a valid JSON schema: {problem}; correct it")

    def verdict(self, schema: str, answer: bytes) -> str | None:
        """What is wrong with a finished answer, None if nothing is. Some 10 ms."""
        return self._problem(pack({}, schema.encode(), answer))

    def close(self) -> None:
        self._process.close()

    def _problem(self, request: bytes) -> str | None:
        try:
            header, _ = unpack(self._process.run(request, deadline=CHECK_SECONDS).body)
        except WorkError as error:
            if error.outcome is Outcome.REFUSED:
                return str(error)
            return f"it could not be checked: {error}"
        problem: str | None = header["problem"]
        return problem


def make_task(setup: bytes) -> Task:
    """From a request, the schema and perhaps an answer, to `{"problem"}`."""
    import jsonschema
    from referencing import Registry

    def problem_of(schema: Any, answer: list[bytes]) -> str | None:
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        if not answer:
            validator.check_schema(schema, format_checker=validator.FORMAT_CHECKER)
            return None
        value = json.loads(answer[0].decode(), parse_constant=_refuse_constant)
        registry: Registry[Any] = Registry()  # the default one fetches what a $ref names
        validator(schema, registry=registry).validate(value)
        return None

    def check(request: bytes) -> bytes:
        _, (schema, *answer) = unpack(request)
        try:
            problem = problem_of(json.loads(schema), answer)
        except (jsonschema.ValidationError, jsonschema.SchemaError) as error:
            problem = f"{error.message[:MAX_PROBLEM_LEN]} (at {error.json_path})"
        except MemoryError:
            raise
        except Exception as error:  # not JSON, a $ref to nowhere, or too deep
            problem = f"{type(error).__name__}: {str(error)[:MAX_PROBLEM_LEN]}"
        return pack({"problem": problem})

    return check


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
