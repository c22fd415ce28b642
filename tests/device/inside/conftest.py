"""Tests that run on the counting device. They are collected only in the process that ``test_counting_device.py`` starts."""

from __future__ import annotations

import os

import pytest
import torch

from tests.device.counting_device import register

collect_ignore_glob = [] if os.environ.get("LIGHTRFT_COUNTING_DEVICE") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The counting device, from here on the current accelerator."""
    return register()


@pytest.fixture(autouse=True)
def _plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention on the CPU as on any other device: by plain products, not by the CPU's fused kernel."""
    monkeypatch.setattr("lightrft.models.attention.segment_plan._fused", lambda *_: False)
