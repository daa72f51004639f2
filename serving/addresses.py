"""What may be the address of a server. Loads no gRPC."""

import re

_HOST_AND_PORT = re.compile(r"(?:[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+(?:%\w+)?\]):([0-9]{1,5})")
_TARGET = re.compile(r"(?:dns|ipv4|ipv6|unix|unix-abstract|vsock|xds|google-c2p):\S+")
"""Of the schemes that gRPC resolves; whatever else it takes for the name of a host."""
_HTTP = re.compile(r"https?://", re.IGNORECASE)


def check_address(address: str) -> None:
    """Refuse what cannot be the address of a server.

    Args:
        address: `host:port`, an IPv6 host in brackets, or a target with a scheme of gRPC.

    Raises:
        ValueError: it is neither.
    """
    match = _HOST_AND_PORT.fullmatch(address)
    if _TARGET.fullmatch(address) or (match and 1 <= int(match[1]) <= 65535):
        return
    http = _HTTP.match(address)
    remedy = f"leave out {http[0]} and " if http else ""
    raise ValueError(
        f"{address!r} is no address of a server; {remedy}give host:port, as in localhost:8500 or "
        "[::1]:8500, or a target with a scheme of gRPC, as in dns:///host:8500 or unix:/path"
    )
