"""Build the counting device, register it as an accelerator of this process, and read its counts.

A process that has called ``register`` has another current accelerator for good: only the tests in ``inside`` do, in a process
of their own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock

NAME = "counting"
SOURCE = Path(__file__).with_name("counting_device.cpp")


def missing_tool() -> str:
    """Return why the device cannot be built here, or nothing."""
    absent = [tool for tool in ("ninja",) if shutil.which(tool) is None]
    if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
        absent.append("a C++ compiler")
    return (
        f"the counting device cannot be built: {' and '.join(absent)} not found" if absent else ""
    )


@contextmanager
def alone(folder: Path) -> Generator[None]:
    """Keep other processes from building in ``folder``.

    torch waits for ever for a process that was killed while it was building: its file ``lock`` stays.
    The system takes back the lock that is held here when the process ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "building"):
        (folder / "lock").unlink(missing_ok=True)
        yield


@cache
def build() -> ModuleType:
    """Compile the device, or load what an earlier process compiled from the same source and torch."""
    from torch.utils import cpp_extension

    versions = torch.__version__ + sys.version
    digest = hashlib.sha256(SOURCE.read_bytes() + versions.encode()).hexdigest()[:16]
    folder = Path(cpp_extension.get_default_build_root()) / f"lightrft_counting_device_{digest}"
    flags = ["-O0", "-g0"]  # a minute less to compile, and the kernels are torch's own
    with alone(folder):
        finished = folder / "finished"
        # torch would compile again in each new virtual environment, whose headers have other paths.
        if finished.exists():
            return load(folder / "counting_device.so")
        extension = cpp_extension.load(
            "counting_device", [str(SOURCE)], build_directory=str(folder), extra_cflags=flags
        )
        finished.touch()
        return extension


def load(library: Path) -> ModuleType:
    """Import the compiled device from its file."""
    spec = importlib.util.spec_from_file_location(library.stem, library)
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


@cache
def register() -> torch.device:
    """Make the device the current accelerator of this process."""
    extension = build()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend()
    extension.take_over(_shadowed())
    # As ``Module.to`` does for a GPU: weights that modules share stay shared.
    torch.__future__.set_swap_module_params_on_conversion(True)
    return torch.device(NAME, 0)


def _shadowed() -> list[str]:
    """Operations of which the CPU has a kernel beside a composite one, which any other device would run instead."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    own = {
        line.split('"')[1]
        for line in SOURCE.read_text(encoding="utf-8").splitlines()
        if line.startswith("  m.impl(")
    }
    composites = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if (
            not name.startswith("aten::")
            or not has(name, "CPU")
            or name.removeprefix("aten::") in own
        ):
            continue
        if any(has(name, key) for key in composites) and not _makes_a_view(name):
            found.append(name.removeprefix("aten::"))
    return found


def _makes_a_view(name: str) -> bool:
    base, _, overload = name.partition(".")
    schema = torch._C._get_schema(base, overload)
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _module(extension: ModuleType) -> ModuleType:
    """The Python side that torch asks of an accelerator."""
    module: Any = ModuleType(f"torch.{NAME}")
    generator = extension.default_generator()
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.manual_seed = module.manual_seed_all = lambda seed: generator.manual_seed(seed)
    module.get_rng_state = lambda device=None: generator.get_state()
    module.set_rng_state = lambda state, device=None: generator.set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    return module


@dataclass
class Counts:
    """Counts over a block: bytes, transfers, and the ``places`` (operation, file:line of lightrft) at which the host waited."""

    before: int = 0
    peak_bytes: int = 0
    after: int = 0
    waits: int = 0
    to_device: int = 0
    to_host: int = 0
    places: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def counted(where: bool = True) -> Generator[Counts]:
    """Count what the body does on the device; with ``where``, also at which lines of lightrft it waited."""
    extension, counts = build(), Counts()
    extension.reset()
    counts.before = extension.counts()["current_bytes"]
    if where:
        extension.on_wait(lambda name: counts.places.append((name, _line())))
    try:
        yield counts
    finally:
        extension.on_wait(None)
        found = extension.counts()
        counts.peak_bytes, counts.after = found["peak_bytes"], found["current_bytes"]
        counts.waits, counts.to_device, counts.to_host = (
            found["waits"],
            found["to_device"],
            found["to_host"],
        )


def _line() -> str:
    """The innermost line of lightrft on the stack, and the innermost of all where that is another."""
    frames = [f for f in traceback.extract_stack() if "counting_device" not in f.filename]
    own = [f for f in frames if "/lightrft/" in f.filename and "/site-packages/" not in f.filename]
    lines = dict.fromkeys(
        f"{Path(f.filename).name}:{f.lineno}" for some in (own, frames) for f in some[-1:]
    )
    return " in ".join(lines) or "a thread of autograd"


def allocated() -> int:
    """Bytes that live tensors hold on the device."""
    return build().counts()["current_bytes"]
