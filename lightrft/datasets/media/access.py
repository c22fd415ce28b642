"""The files and hosts that rows may access. All others raise ``ValueError`` with the reason."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ANY = "*"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of ``data.media.allow``.

    Args:
        roots: folders whose files may be read, or ``*``.
        hosts: host names, patterns such as ``*.example.org``, addresses or networks. ``*`` allows
            every public address.
    """

    roots: tuple[str, ...] = (ANY,)
    hosts: tuple[str, ...] = (ANY,)

    def check_file(self, path: Path) -> Path:
        """Return ``path`` with all links resolved, if it is below one of ``roots``.

        If ``roots`` contains ``*``, ``path`` is returned unchanged. Raises ``ValueError``
        otherwise.
        """
        if ANY in self.roots:
            return path
        # Resolved, or a link below a root could lead out of it.
        real = path.resolve()
        roots = [Path(root).expanduser().resolve() for root in self.roots]
        if not any(real.is_relative_to(root) for root in roots):
            raise ValueError(f"{path} is in none of the folders of data.media.allow.roots")
        return real

    def check_host(self, host: str) -> None:
        """Raise ``ValueError`` for a host that its name alone excludes.

        ``addresses`` checks the addresses of the host.
        """
        # Without the brackets of IPv6, and without the zone of a link-local address.
        literal = host.strip("[]").partition("%")[0]
        try:
            address = ipaddress.ip_address(literal)
        except ValueError:
            # A name may have an address in an allowed network, which a look-up will tell.
            if ANY in self.hosts or self._is_named(host) or self._networks():
                return
            raise ValueError(f"the host {host} is not in data.media.allow.hosts") from None
        self._check_address(host, address)

    def addresses(self, host: str, port: int) -> list[str]:
        """Look up ``host`` and return its allowed addresses, at least one.

        Connect to these addresses and do not look up ``host`` again, because a second look-up may
        return others. Raises ``ValueError`` if no address is allowed.
        """
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ValueError(f"the host {host} cannot be found ({error})") from None
        allowed = []
        refused = ValueError(f"the host {host} has no address")
        # Without repetitions: a host has an entry for each protocol.
        for text in dict.fromkeys(str(entry[4][0]) for entry in found):
            try:
                # without the zone of a link-local address, such as fe80::1%eth0
                address = ipaddress.ip_address(text.partition("%")[0])
                self._check_address(host, address)
                allowed.append(text)
            except ValueError as error:
                refused = error
        if not allowed:
            raise refused
        return allowed

    def _check_address(self, host: str, address: Address) -> None:
        if self._is_named(host) or any(address in network for network in self._networks()):
            return
        if ANY not in self.hosts:
            raise ValueError(f"the host {host} is not in data.media.allow.hosts")
        # rows come from others, so by default they must not reach into the user's own network
        for one in _meant(address):
            if not one.is_global or one.is_multicast:
                way_out = "add the host to data.media.allow.hosts if rows may read it"
                raise ValueError(f"the host {host} has the private address {address}; {way_out}")

    def _is_named(self, host: str) -> bool:
        host = host.lower().rstrip(".")
        # ``*`` is not a name: it allows public addresses alone.
        patterns = [pattern.lower().rstrip(".") for pattern in self.hosts if pattern != ANY]
        return any(fnmatchcase(host, pattern) for pattern in patterns)

    def _networks(self) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
        found = []
        for entry in self.hosts:
            # strict=False accepts an address with a prefix, such as 10.0.0.1/8
            with suppress(ValueError):  # the entry is a host name
                found.append(ipaddress.ip_network(entry, strict=False))
        return found


UNRESTRICTED = Access()
"""Rules that allow every file, and every host with a public address."""


def _meant(address: Address) -> Iterator[Address]:
    """Yield ``address`` and the IPv4 addresses that an IPv6 address may embed."""
    yield address
    if not isinstance(address, ipaddress.IPv6Address):
        return
    inside = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    # ``ipaddress`` knows no NAT64, whose last 32 bits are the IPv4 address.
    if address in _NAT64:
        inside.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    yield from filter(None, inside)
