import os
import subprocess
import sys


def test_every_form_that_is_launched_is_compiled_ahead_of_time() -> None:
    """Also says that Triton's own binding takes the arguments, which the interpreter never asks,
    and that no size of a step makes a kernel compile again while requests run."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.kernels.launch_everything"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
