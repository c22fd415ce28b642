"""Bearer tokens of a file that may be replaced while the server runs."""

from __future__ import annotations

import hmac
import logging
from datetime import UTC, datetime
from pathlib import Path

from lightrft.serving.problems import HTTPProblem
from lightrft.utils.errors import ConfigError

_log = logging.getLogger(__name__)


class BearerTokens:
    """The tokens of ``path``, read again when the file changes.

    A line holds a token and, after a space, the time when it expires. Lines that start with ``#``
    are comments.

    Args:
        path: The file.
        setting: Name of the setting, for messages.

    Raises:
        ConfigError: The file cannot be read, or holds no token or a time that is none.
    """

    def __init__(self, path: Path, setting: str = "http.token_file") -> None:
        self.path = path
        self.setting = setting
        self._stamp: tuple[int, int, int] | None = None
        self._tokens: dict[bytes, datetime | None] = {}
        self._read()

    def check(self, header: str) -> None:
        """Raise ``HTTPProblem`` unless ``header`` is ``Bearer`` with a token that has not expired.

        Args:
            header: The header ``Authorization`` of a request.
        """
        try:
            self._read()
        except ConfigError as error:
            # refused, since the file may have been taken away to lock everybody out
            _log.warning("%s", error)
            raise HTTPProblem(503, "the server cannot read its tokens; see its log") from error
        kind, _, given = header.partition(" ")
        if kind.lower() != "bearer" or not given.strip():
            raise _refused("no token; send the header 'Authorization: Bearer TOKEN'")
        expires, is_known = self._find(given.strip().encode())
        if not is_known:
            raise _refused("the token is not one of this server's")
        if expires is not None and expires <= datetime.now(UTC):
            raise _refused(f"the token expired at {expires.isoformat()}; take a new one")

    def _find(self, given: bytes) -> tuple[datetime | None, bool]:
        """Return the time when the token expires, and True if there is such a token."""
        found, is_known = None, False
        # all are compared in constant time, so that the time of an answer reveals no token
        for token, expires in self._tokens.items():
            if hmac.compare_digest(token, given):
                found, is_known = expires, True
        return found, is_known

    def _read(self) -> None:
        """Read the file if it has changed."""
        try:
            stat = self.path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp == self._stamp:
                return
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{self.setting} = {str(self.path)!r}: {error}") from error
        self._tokens = self._parsed(text)
        self._stamp = stamp

    def _parsed(self, text: str) -> dict[bytes, datetime | None]:
        found: dict[bytes, datetime | None] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                found[words[0].encode()] = _time(words[1]) if words[1:] else None
            except ValueError as error:
                raise ConfigError(
                    f"{self.setting} = {str(self.path)!r}, line {number}: {words[1]!r} is no "
                    "time; write e.g. 2027-01-31T12:00:00Z"
                ) from error
        if not found:
            raise ConfigError(
                f"{self.setting} = {str(self.path)!r} holds no token; write one a line"
            )
        return found


def _time(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _refused(message: str) -> HTTPProblem:
    return HTTPProblem(401, message, {"WWW-Authenticate": 'Bearer error="invalid_token"'})
