"""Models on the hub, without the minute of retries of its client where there is no network."""

from __future__ import annotations

import functools

from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from lightrft.utils.errors import ModelError, first_line

SECONDS = 5.0
"""Longest time to wait for a connection to the hub."""


def on_hub(path: str, revision: str | None) -> str:
    """Return the hub name ``path``, or its folder in the cache if the hub cannot be reached.

    Raises ``ModelError`` if it is not in the cache either.
    """
    return path if constants.is_offline_mode() else _found(path, revision, constants.ENDPOINT)


# A start asks several times. Errors are not remembered, so that a later call may reach the hub.
@functools.cache
def _found(path: str, revision: str | None, endpoint: str) -> str:
    try:
        get_session().head(endpoint, timeout=SECONDS)
    except Exception as error:  # of httpx, or what a release of the hub's client has in its place
        try:
            return snapshot_download(path, revision=revision, local_files_only=True)
        except LocalEntryNotFoundError:
            raise ModelError(
                f"model.path = {path!r}: there is no such folder, and {endpoint} cannot "
                f"be reached ({first_line(error)}); give a folder, or check name and network"
            ) from None
    return path
