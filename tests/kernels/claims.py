"""What a backend of kernels must do, as claims that are checked by cases.

A claim is a function whose name says it and whose body fails where it does not hold. Nothing here
imports pytest: a machine with a device checks the same cases without it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sapwood.kernels.interface import Kernels

# (relative to the largest value) what each dtype's own rounding allows
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
DTYPES = tuple(sorted(TOLERANCE, key=str))


class Subject:
    """A backend under test, the device it computes on and random numbers that never come twice."""

    def __init__(self, kernels: Kernels, device: torch.device, seed: int = 0) -> None:
        self.kernels = kernels
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Fresh normal numbers on the device."""
        return torch.randn(shape, generator=self._generator).to(self.device, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A claim with one value for each of its parameters.

    Core cases have each value at least once; the others are the rest of all combinations.
    """

    name: str
    is_core: bool
    check: Callable[[Subject], None]

    def run(self, kernels: Kernels, device: torch.device, seed: int | None = None) -> None:
        """Raise AssertionError where the claim does not hold. New tensors are poisoned."""
        if seed is None:
            seed = zlib.crc32(self.name.encode())
        with PoisonedTensors():
            self.check(Subject(kernels, device, seed))


@dataclass(frozen=True, slots=True)
class Claim:
    """A function of a subject and parameters, and the values that each parameter takes."""

    function: Callable[..., None]
    values_by_parameter: dict[str, Sequence[Any]]

    def cases(self) -> Iterator[Case]:
        """All combinations. Those with the i-th value of every parameter, going around in each, are
        core."""
        names, values = self.values_by_parameter.keys(), self.values_by_parameter.values()
        longest = max(map(len, values), default=1)
        core = {tuple(i % len(v) for v in values) for i in range(longest)}
        for indices in product(*(range(len(v)) for v in values)):
            chosen = [v[i] for v, i in zip(values, indices, strict=True)]
            arguments = dict(zip(names, chosen, strict=True))
            labels = (_label(name, value) for name, value in arguments.items())
            yield Case(
                name="-".join([self.function.__name__, *labels]),
                is_core=indices in core,
                check=_Call(self.function, arguments),
            )


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[..., None]
    arguments: dict[str, Any]

    def __call__(self, subject: Subject) -> None:
        self.function(subject, **self.arguments)


def claim(**values_by_parameter: Sequence[Any]) -> Callable[[Callable[..., None]], Claim]:
    """Make a claim of a function, checked for all combinations of its parameters' values."""
    return lambda function: Claim(function, values_by_parameter)


def _label(name: str, value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, (str, torch.dtype)):
        return str(value).removeprefix("torch.")
    return f"{name}={value}"


class PoisonedTensors(TorchFunctionMode):
    """Every new tensor of undefined contents is full of NaN, or of what is large and odd, so that
    what was never written shows."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.empty_like, Tensor.new_empty):
            is_float = result.dtype.is_floating_point
            result.fill_(torch.nan if is_float else torch.iinfo(result.dtype).max)
        return result


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Errors relative to the largest value; by default what the dtype's own rounding allows."""
    assert actual.shape == expected.shape
    if not actual.numel():
        return
    tolerance = TOLERANCE[actual.dtype] if tolerance is None else tolerance
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"
