from collections.abc import Mapping
from typing import Any

import pytest

from sapwood.kernels.specialization import ArgumentType, Specialization


class Kernel:
    """A jit function as far as a specialization reads it."""

    __name__ = "add"
    arg_names = ("x", "y", "size", "BLOCK")


def specialization(
    signature: Mapping[str, str] | None = None, num_warps: int = 4, **constants: Any
) -> Specialization:
    return Specialization(
        name="add-float",
        function=Kernel(),  # type: ignore[arg-type]
        signature=signature or {"size": "i32", "x": "*fp32", "y": "*fp32:4"},
        constants=constants or {"BLOCK": 64},
        num_warps=num_warps,
        num_stages=1,
    )


def test_a_pointer_is_aligned_to_16_bytes_and_a_number_to_nothing_unless_it_says() -> None:
    assert specialization().arguments == {
        "x": ArgumentType("*fp32", 16),
        "y": ArgumentType("*fp32", 4),
        "size": ArgumentType("i32", 1),
    }


def test_arguments_come_in_the_order_of_the_kernels_parameters() -> None:
    assert list(specialization().arguments) == ["x", "y", "size"]


def test_a_parameter_that_is_missing_unknown_or_there_twice_is_named() -> None:
    with pytest.raises(ValueError, match="missing: y, unknown: z, twice: x"):
        specialization({"x": "*fp32", "z": "i32", "size": "i32"}, BLOCK=64, x=None)


@pytest.mark.parametrize("text", ["", "i32:", ":16", "i32:x"])
def test_what_is_no_type_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a type such as"):
        specialization({"x": "*fp32", "y": "*fp32", "size": text})


def test_a_number_of_warps_that_no_kernel_has_is_refused() -> None:
    with pytest.raises(ValueError, match="3 warps"):
        specialization(num_warps=3)
