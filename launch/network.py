# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Finds interface and address towards the master: `network.py ADDRESS PORT NODE_RANK`.

Prints "INTERFACE ADDRESS". gloo and torchrun would otherwise take whatever the node's own host name
resolves to, which in many images is 127.0.1.1. Node 0 also tries the port.
"""

import ipaddress
import os
import socket
import sys
import time

import psutil

# On Kubernetes the name of another pod appears some seconds after that pod.
RESOLVING_SECONDS = 45.0


def main() -> int:
    """Print the interface and its address, or say what is wrong and return 2."""
    master, port, node_rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    try:
        print(*find(master, port, node_rank))
    except ValueError as error:
        print(f"leangrpo: error: {error}", file=sys.stderr)
        return 2
    return 0


def find(master: str, port: int, node_rank: int) -> tuple[str, str]:
    """The interface towards the master and its address; ``ValueError`` where other nodes fail."""
    family, address = resolve(master)
    if ipaddress.ip_address(address).is_loopback:
        raise ValueError(
            f"MASTER_ADDR = {master} resolves to loopback ({address}) on {socket.gethostname()}; "
            "other nodes cannot reach that: give the address of node 0 in the network of the nodes "
            f"(found here: {', '.join(own_addresses(family)) or 'none'})"
        )
    if node_rank == 0:
        check_port(family, address, port)
    wanted = os.environ.get("GLOO_SOCKET_IFNAME")
    if wanted:
        return wanted, address_of(wanted, family)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket asks the routing table and sends nothing.
        try:
            probe.connect((address, port))
        except OSError as error:
            raise ValueError(
                f"MASTER_ADDR = {master} ({address}): {error.strerror}; there is no route to it "
                "from this node"
            ) from error
        own = probe.getsockname()[0]
    return interface_of(own), own


def resolve(master: str) -> tuple[socket.AddressFamily, str]:
    """The family and the first address of a name."""
    deadline = time.monotonic() + RESOLVING_SECONDS
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)[0]
            return family, str(address[0])
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"MASTER_ADDR = {master} cannot be resolved on {socket.gethostname()}: "
                    f"{error.strerror}; give the address of node 0"
                ) from error
        time.sleep(1)


def check_port(family: socket.AddressFamily, address: str, port: int) -> None:
    """Raise ``ValueError`` where the master's address is another node's or its port is taken."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # torch's store sets it too: what a finished run leaves behind is no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, 0))
        except OSError as error:
            raise ValueError(
                f"NODE_RANK is 0 on {socket.gethostname()}, but MASTER_ADDR ({address}) is none of "
                f"its addresses: {', '.join(own_addresses(family))}"
            ) from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"MASTER_PORT = {port} is taken on {socket.gethostname()} ({error.strerror}), "
                "perhaps by another run; set MASTER_PORT to another one on all nodes"
            ) from error


def addresses() -> dict[str, list[tuple[socket.AddressFamily, str]]]:
    """Family and address of all interfaces."""
    return {
        name: [(a.family, a.address.split("%")[0]) for a in found]
        for name, found in psutil.net_if_addrs().items()
    }


def own_addresses(family: socket.AddressFamily) -> list[str]:
    """This node's addresses that are not loopback."""
    found = [a for own in addresses().values() for f, a in own if f == family]
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]


def address_of(interface: str, family: socket.AddressFamily) -> str:
    """The address of an interface asked for in GLOO_SOCKET_IFNAME."""
    known = addresses()
    # A list may be given, as gloo allows; the first one counts here.
    first = interface.split(",")[0]
    for found, address in known.get(first, []):
        if found == family:
            return address
    reason = "has no address" if first in known else "is no interface"
    syntax = "; gloo takes names alone, not NCCL's ^ and =" if first[:1] in "^=" else ""
    raise ValueError(
        f"GLOO_SOCKET_IFNAME = {interface} {reason} of {socket.gethostname()}{syntax}; valid: "
        f"{', '.join(sorted(known))}"
    )


def interface_of(address: str) -> str:
    """The interface that has an address."""
    return next(name for name, own in addresses().items() if address in [a for _, a in own])


if __name__ == "__main__":
    sys.exit(main())
