"""The session in which newer versions of SGLang take new weights."""

from __future__ import annotations

from http import HTTPStatus

from lightrft.utils.http_client.server_client import ServerClient, Unanswered


class UpdateSession:
    """A session of weight updates. Older versions of SGLang have none.

    Args:
        client: Sends requests to the server.
    """

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    def open(self) -> None:
        """Open a session. One that an update left open, since it broke off, is closed first.

        Raises ``Unanswered`` if the server refuses it.
        """
        try:
            self._ask("begin")
        except Unanswered as error:
            if not error.refused:
                raise
            self._ask("end")
            self._ask("begin")

    def close(self) -> None:
        """Close the session: the server finishes what it does once for all tensors of an update.

        Raises ``Unanswered`` if it fails.
        """
        self._ask("end")

    def _ask(self, step: str) -> None:
        try:
            self._client.ask("POST", f"/{step}_weight_update", {}, once=True)
        except Unanswered as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
