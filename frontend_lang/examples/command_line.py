"""The command line that all examples have, and the backend it names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager

import sapwood as sgl


@contextmanager
def backend_of_command_line(description: str | None) -> Iterator[sgl.Engine | sgl.RuntimeEndpoint]:
    """The server of `--backend`, or an engine in this process. `description` is for `--help`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--backend", metavar="URL", help="a server: Sapwood's, or SGLang's")
    parser.add_argument("--model", default="smollm2", help="the model to load without --backend")
    arguments = parser.parse_args()
    if arguments.backend:
        with closing(sgl.RuntimeEndpoint(arguments.backend)) as endpoint:
            yield endpoint
        return
    with sgl.Engine(arguments.model) as engine:
        yield engine
