"""Triton's interpreter where there is no GPU, and native code built in every way that this
processor has."""

import ctypes
import os
import platform
import shutil
import sys

import pytest
import torch

from sapwood.kernels.native import Native, build

# Triton looks at it when a kernel is defined, its own library's included.
if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "imported before its kernels could be interpreted"
    os.environ["TRITON_INTERPRET"] = "1"

# The processor's own vectors, AVX2's, and what every x86-64 has.
FLAGS = {"own": [], "avx2": ["-march=x86-64-v3"], "plain": ["-march=x86-64-v2"]}
WAYS = list(FLAGS) if platform.machine() == "x86_64" else ["own"]


@pytest.fixture(params=WAYS)
def native(request: pytest.FixtureRequest) -> Native:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    if request.param == "avx2" and torch.cpu.get_capabilities().get("avx2") is False:
        pytest.skip("this processor has no AVX2")
    return Native(ctypes.CDLL(str(build(compiler, FLAGS[request.param]))))
