# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Whether this rank tells the others an address at which they can reach it."""

import ipaddress
import os
import socket

import psutil

_SETTING = "GLOO_SOCKET_IFNAME"


def check_own_address(nodes: int) -> None:
    """Raise ``ValueError`` where gloo would look for an interface that is none, or use loopback.

    gloo carries checkpoints and the exchange of settings also where NCCL carries tensors.
    """
    wanted = os.environ.get(_SETTING, "")
    known = psutil.net_if_addrs()
    for name in filter(None, wanted.split(",")):
        if name not in known:
            syntax = "; NCCL's ^ and = are not known to gloo" if name[0] in "^=" else ""
            raise ValueError(
                f"{_SETTING} = {wanted}: there is no interface {name} on {socket.gethostname()}"
                f"{syntax}; valid: {', '.join(sorted(known))}"
            )
    if nodes == 1:
        return
    host = socket.gethostname()
    if wanted:
        families = (socket.AF_INET, socket.AF_INET6)
        addresses = [a.address.split("%")[0] for n in wanted.split(",") for a in known[n]
                     if a.family in families]  # fmt: skip
        what = f"{_SETTING} = {wanted}"
    else:
        try:
            addresses = [str(a[4][0]) for a in socket.getaddrinfo(host, None)]
        except OSError as error:
            raise ValueError(
                f"the host name {host} cannot be resolved ({error.strerror}), and {_SETTING} is "
                f"not set; set it to the interface that leads to the other nodes: "
                f"{', '.join(sorted(known))}"
            ) from error
        what = f"the host name {host}"
    if all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise ValueError(
            f"{what} resolves to loopback ({', '.join(dict.fromkeys(addresses)) or 'nothing'}), "
            f"where the other {nodes - 1} node{'s' if nodes > 2 else ''} cannot reach this one; "
            f"set {_SETTING} to the interface that leads to them: {', '.join(sorted(known))}"
        )
