"""The tests of ``inside``, in one process whose accelerator is a device other than the CPU.

To run some of them alone: ``LIGHTRFT_COUNTING_DEVICE=1 python -m pytest tests/device/inside -k NAME``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from tests.device.counting_device import alone, build, missing_tool

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def _built() -> None:
    """Compile the device first: a test must not be charged with that."""
    if why := missing_tool():
        pytest.skip(why)
    build()


def test_a_build_that_was_killed_does_not_keep_others_waiting(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    with alone(tmp_path):
        assert not (tmp_path / "lock").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("_built")
def test_a_device_that_was_compiled_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(*args: object, **options: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(cpp_extension, "load", compiles)
    assert build.__wrapped__().counts().keys() >= {"current_bytes"}


@pytest.mark.slow
@pytest.mark.usefixtures("_built")
def test_training_on_a_device_other_than_the_cpu_equals_the_cpu_and_waits_and_keeps_no_more_than_stated() -> (
    None
):
    words = [
        sys.executable,
        "-m",
        "pytest",
        str(HERE / "inside"),
        "-q",
        "-p",
        "no:cacheprovider",
        "--durations=10",
    ]
    environment = {**os.environ, "LIGHTRFT_COUNTING_DEVICE": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]  # of the worker of pytest-xdist that runs this
    done = subprocess.run(
        words, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4000:]
