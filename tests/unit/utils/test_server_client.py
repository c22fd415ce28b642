"""Requests that nobody waits for any more."""

from __future__ import annotations

import threading
import time

import pytest

from lightrft.utils.http_client import server_client
from lightrft.utils.http_client.server_client import OpenStream, ServerClient, Unanswered


@pytest.mark.parametrize("closes", ["client", "stream"])
def test_a_request_that_was_given_up_ends_without_a_word(
    closes: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_client, "QUIET_SECONDS", 0.0)
    client, stream = ServerClient("http://127.0.0.1:9", 3600.0, 4, dict), OpenStream()
    ends: list[BaseException] = []

    def ask() -> None:
        try:
            client.stream("/v1/completions", dict, bool, 3600.0, stream)
        except Unanswered as error:
            ends.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    while thread.is_alive() and "has not answered for" not in caplog.text:
        time.sleep(0.01)
    assert thread.is_alive()
    {"client": client, "stream": stream}[closes].close()
    caplog.clear()
    thread.join(300)
    assert not thread.is_alive() and not caplog.records
    assert ends or closes == "stream"
