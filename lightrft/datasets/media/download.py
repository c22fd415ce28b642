"""Downloads with limits on size, total time and hosts."""

from __future__ import annotations

import base64
import ssl
import time
import urllib.request
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote

from lightrft.datasets.media.access import Access

if TYPE_CHECKING:
    import httpcore
    import httpx

REDIRECTS = 10
BLOCK = 1 << 20
"""Largest number of bytes that one decompression step returns."""
_MOVED = (301, 302, 303, 307, 308)
_BLANK = b"\xef\xbb\xbf \t\r\n"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one download.

    Args:
        seconds: longest total time, from the first look-up to the last byte.
        largest: largest size in bytes, after decompression.
        access: hosts that may be contacted.
    """

    seconds: float
    largest: int
    access: Access


class Late(Exception):
    """A download timed out."""


def receive(url: str, file: IO[bytes], bounds: Bounds) -> None:
    """Download ``url`` to ``file``.

    Redirects are followed. Each redirect is checked like the first address.

    Args:
        url: the address.
        file: the open file to write to.
        bounds: the limits.

    Raises:
        ValueError: the host is refused, the download fails or exceeds ``bounds``, or the content is
            empty or a text page.
    """
    import httpcore
    import httpx

    refused = f"{public(url)} cannot be downloaded"
    ends = time.monotonic() + bounds.seconds
    try:
        address = httpx.URL(url)
        for _ in range(REDIRECTS + 1):
            moved = _ask(address, file, bounds, ends)
            if moved is None:
                return
            address = address.join(moved)
    except (Late, httpcore.TimeoutException) as error:
        raise ValueError(f"{refused} within data.media.timeout = {bounds.seconds:g} s") from error
    except (
        httpx.InvalidURL,
        httpcore.NetworkError,
        httpcore.ProtocolError,
        httpcore.UnsupportedProtocol,
        OSError,
    ) as error:
        raise ValueError(f"{refused}: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{refused}: {error}") from error
    raise ValueError(f"{refused}: it is redirected more than {REDIRECTS} times")


def public(url: str) -> str:
    """Return ``url`` without name and password, for messages."""
    scheme, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"


def _ask(address: httpx.URL, file: IO[bytes], bounds: Bounds, ends: float) -> str | None:
    """Write one response to ``file``. Return the address of its redirect, or None."""
    import httpcore

    if address.scheme not in ("http", "https"):
        raise ValueError(f"only http and https addresses can be read, not {address.scheme}")
    bounds.access.check_host(address.host)
    target = httpcore.URL(
        scheme=address.raw_scheme, host=address.raw_host, port=address.port, target=address.raw_path
    )
    headers: dict[bytes | str, bytes | str] = {
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "User-Agent": "lightrft",
    }
    # of this address alone: a redirect to another host must not get the password
    if address.userinfo:
        account = unquote(address.userinfo.decode())
        headers["Authorization"] = f"Basic {base64.b64encode(account.encode()).decode()}"
    with (
        _pool(address, bounds, ends) as pool,
        pool.stream("GET", target, headers=headers) as response,
    ):
        # latin-1 decodes any byte, and headers may hold any
        found: dict[str, str] = {}
        for name, value in response.headers:
            found[name.decode("latin-1").lower()] = value.decode("latin-1")
        if response.status in _MOVED and "location" in found:
            return found["location"]
        if response.status != 200:
            raise ValueError(f"the server answers with status {response.status}")
        # 20 digits exceed every limit, and int() refuses very long texts
        if (length := found.get("content-length", "")).isdigit():
            _check_size(int(length[:20]), bounds)
        encoding = found.get("content-encoding", "").lower().strip()
        _copy(_plain(response.iter_stream(), encoding), file, bounds, ends)
    return None


def _copy(blocks: Iterable[bytes], file: IO[bytes], bounds: Bounds, ends: float) -> None:
    size, first = 0, b""
    for data in blocks:
        size += len(data)
        first = first or data.lstrip(_BLANK)[:1]
        _check_size(size, bounds)
        if time.monotonic() > ends:
            raise Late
        file.write(data)
    # an HTML or JSON page under status 200 is usually an error message
    if first in (b"", b"<", b"{"):
        raise ValueError(f"what comes is {'a page of text, no media' if first else 'empty'}")


def _check_size(size: int, bounds: Bounds) -> None:
    if size > bounds.largest:
        raise ValueError(f"it has more than the {bounds.largest} bytes of data.media.max_file_mb")


def _plain(blocks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
    """Decompress a body in steps of bounded size. A server may compress without being asked."""
    if encoding in ("", "identity"):
        yield from blocks
        return
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"its content encoding {encoding!r} is not known")
    # 32 makes zlib recognise gzip and deflate by their headers.
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        for data in blocks:
            rest = data
            while rest:
                yield decoder.decompress(rest, BLOCK)
                rest = decoder.unconsumed_tail
    except zlib.error as error:
        raise ValueError(f"its compressed body is damaged: {error}") from None


def _pool(address: httpx.URL, bounds: Bounds, ends: float) -> httpcore.ConnectionPool:
    """Return a connection pool for one request.

    It uses the proxy of the environment if there is one.
    """
    import httpcore
    import httpx

    proxy = None
    if not urllib.request.proxy_bypass(address.host):
        proxy = urllib.request.getproxies().get(address.scheme)
    options: dict[str, Any] = {
        # a proxy may have a private address; the user chose it, not a row
        "ssl_context": httpx.create_ssl_context(),
        "network_backend": _network(None if proxy else bounds.access, ends),
    }
    if proxy is None:
        return httpcore.ConnectionPool(**options)
    named = proxy if "://" in proxy else f"http://{proxy}"
    if not named.startswith("http"):
        raise ValueError(f"the proxy {public(named)} is none of http or https")
    account = httpx.URL(named).userinfo.partition(b":")
    return httpcore.HTTPProxy(
        str(httpx.URL(named).copy_with(userinfo=b"")),
        proxy_auth=(account[0], account[2]) if account[0] else None,
        **options,
    )


def _network(access: Access | None, ends: float) -> httpcore.NetworkBackend:
    """Return sockets that connect only to addresses that ``access`` allows.

    No call lasts beyond ``ends``, a time of ``time.monotonic``.
    """
    import httpcore

    def left() -> float:
        seconds = ends - time.monotonic()
        if seconds <= 0:
            raise Late
        return seconds

    class Stream(httpcore.NetworkStream):
        def __init__(self, inner: httpcore.NetworkStream) -> None:
            self.inner = inner

        def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
            return self.inner.read(max_bytes, left())

        def write(self, buffer: bytes, timeout: float | None = None) -> None:
            self.inner.write(buffer, left())

        def close(self) -> None:
            self.inner.close()

        def start_tls(
            self,
            ssl_context: ssl.SSLContext,
            server_hostname: str | None = None,
            timeout: float | None = None,
        ) -> httpcore.NetworkStream:
            return Stream(self.inner.start_tls(ssl_context, server_hostname, left()))

        def get_extra_info(self, info: str) -> Any:
            return self.inner.get_extra_info(info)

    class Backend(httpcore.NetworkBackend):
        def connect_tcp(
            self,
            host: str,
            port: int,
            timeout: float | None = None,
            local_address: str | None = None,
            socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
        ) -> httpcore.NetworkStream:
            failed: Exception | None = None
            for one in [host] if access is None else access.addresses(host, port):
                try:
                    return Stream(
                        httpcore.SyncBackend().connect_tcp(
                            one, port, left(), local_address, socket_options
                        )
                    )
                except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                    failed = error
            raise failed or httpcore.ConnectError(f"{host} has no address")

    return Backend()
