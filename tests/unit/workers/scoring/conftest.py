"""Servers of the model of a test module, and short waits of clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightrft.utils.http_client import server_client
from tests.serving_helpers import judge_server


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The address of a server of ``folder``, which the module makes."""
    with judge_server(folder) as (url, _):
        yield url


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "FIRST_WAIT", 0.01)
