"""How a kernel is launched for one shape: its constants and warps.

What is compiled ahead of time is made of the same, so that it is what is launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sapwood.kernels.specialization import JitFunction, Specialization

NUM_STAGES = 3  # Triton's default; kernels without a loop over memory do not use it


class KernelForm(NamedTuple):
    """The values of a kernel's `tl.constexpr` parameters, and the warps of a program."""

    constants: Mapping[str, int]
    num_warps: int

    @property
    def options(self) -> dict[str, int]:
        """What a launch names beside constants. A product and a sum may be rounded once."""
        return {"num_warps": self.num_warps, "num_stages": NUM_STAGES, "enable_fp_fusion": True}

    def specialization(
        self, name: str, function: JitFunction, signature: Mapping[str, str]
    ) -> Specialization:
        """`function` in this form. A pointer that the signature lacks is not passed."""
        missing = set(function.arg_names) - set(signature) - set(self.constants)
        return Specialization(
            name=name,
            function=function,
            signature=signature,
            constants={**self.constants, **dict.fromkeys(missing)},
            num_warps=self.num_warps,
            num_stages=NUM_STAGES,
        )


# Triton has both, for its compiler: called by the host they take two microseconds each.


def num_pieces(size: int, piece: int) -> int:
    """Of `piece` elements at most that `size` elements are cut into."""
    return -(-size // piece)


def next_power_of_two(size: int) -> int:
    """The least that is not below `size`, which is positive."""
    return 1 << (size - 1).bit_length()
