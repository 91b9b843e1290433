"""Whether a JSON schema is one, and whether an answer satisfies it, by jsonschema.

For backends that do not enforce all of a schema. Schemas can be large, and their patterns are
matched by backtracking, which takes exponential time where somebody wants it to; so all of it is
done in a process within a deadline (`bounded_process.py`). An answer that cannot be checked counts
as wrong. Imports no torch.
"""

import json
from typing import Any

from sapwood.runtime.constraints.bounded_process import BoundedProcess, WorkError
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

    def verdict(self, schema: str, answer: bytes) -> str | None:
        """What is wrong with a finished answer, None if nothing is. Some 10 ms."""
        request = pack({}, schema.encode(), answer)
        try:
            header, _ = unpack(self._process.run(request, deadline=CHECK_SECONDS).body)
        except WorkError as error:
            return f"it could not be checked: {error}"
        problem: str | None = header["problem"]
        return problem

    def close(self) -> None:
        self._process.close()


def refuse_what_is_no_schema(schema: str) -> None:
    """Raises GrammarError. Takes time without a bound."""
    import jsonschema

    content = json.loads(schema)
    validator = jsonschema.validators.validator_for(content, jsonschema.Draft202012Validator)
    try:
        validator.check_schema(content, format_checker=validator.FORMAT_CHECKER)
    except jsonschema.SchemaError as error:
        raise GrammarError(
            f"it is not a valid JSON schema: {_problem(error)}; correct it"
        ) from error


def make_task(setup: bytes) -> Task:
    """From a request, the schema and an answer, to `{"problem"}`."""
    import jsonschema
    from referencing import Registry

    registry: Registry[Any] = Registry()  # the default one fetches what a $ref names

    def check(request: bytes) -> bytes:
        _, (schema_text, answer) = unpack(request)
        try:
            schema = json.loads(schema_text)
            value = json.loads(answer.decode(), parse_constant=_refuse_constant)
            validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            validator(schema, registry=registry).validate(value)
        except jsonschema.ValidationError as error:
            return pack({"problem": _problem(error)})
        except (ValueError, RecursionError) as error:
            return pack({"problem": f"it is not JSON: {str(error)[:MAX_PROBLEM_LEN]}"})
        return pack({"problem": None})

    return check


def _problem(error: Any) -> str:
    return f"{error.message[:MAX_PROBLEM_LEN]} (at {error.json_path})"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
