"""All cases that a backend of kernels is checked with.

Free of pytest, so that `for case in all_cases(): case.run(kernels, device)` checks a backend on a
machine with a device.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.kernels import attention_claims, drawing_claims, kv_claims, operation_claims
from tests.kernels.claims import Case, Claim


def all_cases() -> Iterator[Case]:
    """The cases of every claim, in the order in which they are written."""
    for module in (attention_claims, kv_claims, operation_claims, drawing_claims):
        for value in vars(module).values():
            if isinstance(value, Claim):
                yield from value.cases()
