"""What holds for all tests: two spinning OpenMP threads, which make tiny models far slower on a small machine, must be ruled out before
torch is imported; and what takes longest begins first."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import hypothesis
import pytest

LONGEST = (
    "test_ray.py",
    "test_faults.py",
    "test_ranks.py",
    "test_teams.py",
    "test_parity.py",
    "test_zero.py",
    "test_demo.py",
    "test_counting_device.py",
    "test_fsdp2.py",
    "test_asynchronous.py",
    "test_gpu_scripts.py",
    "test_deepspeed.py",
    "test_resume.py",
    "test_one_file_grpo.py",
    "test_cli.py",
    "test_bad_input.py",
    "test_engine_workers.py",
    "test_imports.py",
    "test_early_ends.py",
    "test_divergence.py",
)
"""The files that run first, longest first.

A worker of pytest-xdist that has nothing left takes tests from the end of the other's list. With a long test there, one core
would be idle at the end of all.
"""

# A request of a test waits for a busy machine. httpx gives up after five seconds.
httpx._config.DEFAULT_TIMEOUT_CONFIG.__init__(300.0)

# An example may take long on a busy machine. The search for mutants, which takes 15 examples of most properties, has a profile of
# its own, which is loaded by then.
hypothesis.settings.register_profile(
    "suite", max_examples=40, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
if hypothesis.settings.get_current_profile_name() != "mutation":
    hypothesis.settings.load_profile("suite")

FAMILY_LISTS = (
    ("lightrft.models.tiny", "ALL_MEDIA_FAMILIES"),
    ("lightrft.models.tiny.text_families", "TEXT_FAMILIES"),
)
MANY = 20
"""Families of a test from which on it is run for a third of them."""


@pytest.fixture
def exact() -> Iterator[None]:
    """Compute in float64 throughout, so that two orders of one sum agree far below float32's storage."""
    import torch

    from tests.model_helpers import Float64

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.hookimpl(tryfirst=True)  # before ``-m`` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))
    families = families_of(items)
    mark_torchvision(families)
    mark_thorough(families)


def families_of(items: list[pytest.Item]) -> dict[pytest.Item, list[str]]:
    """The tiny families among the parameters of each test that has some, in the order of the parameters."""
    known = set[str]()
    for module, name in FAMILY_LISTS:
        # A run that does not import the families has no such test.
        known |= set(getattr(sys.modules.get(module), name, ()))
    found = {}
    for item in items:
        params = vars(item)["callspec"].params if "callspec" in vars(item) else {}
        if names := [v for v in params.values() if isinstance(v, str) and v in known]:
            found[item] = names
    return found


def mark_torchvision(families: dict[pytest.Item, list[str]]) -> None:
    """Mark the tests of families that need a package of ``make test-torchvision``, and skip them if it is not installed."""
    tiny = sys.modules.get("lightrft.models.tiny")
    needing = getattr(tiny, "TORCHVISION_FAMILIES", ())
    for item in [item for item, names in families.items() if not set(names).isdisjoint(needing)]:
        item.add_marker(pytest.mark.torchvision)
        if missing := next(filter(None, map(tiny.missing_package, families[item])), None):
            item.add_marker(pytest.mark.skip(reason=f"needs {missing}: make test-torchvision"))


def mark_thorough(families: dict[pytest.Item, list[str]]) -> None:
    """Leave two thirds of the cases of a test of many families to ``make test-all``.

    Such a test keeps a third of the families, and a family is in about a third of such tests.
    """
    tests: dict[str, dict[pytest.Item, str]] = {}
    for item, names in families.items():
        tests.setdefault(item.nodeid.partition("[")[0], {})[item] = names[0]
    for name, cases in tests.items():
        order = list(dict.fromkeys(cases.values()))
        first = zlib.crc32(name.encode())
        for item, family in cases.items() if len(order) >= MANY else ():
            if (order.index(family) + first) % 3:
                item.add_marker(pytest.mark.thorough)
