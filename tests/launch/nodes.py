# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Nodes for tests: network namespaces with an address, a host name and an /etc/hosts of their own.

Everything stays on this machine: the only link is a pair of virtual interfaces between two of them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
NETWORK = "10.77.0"


def why_not() -> str | None:
    """Why no nodes can be made here, or None."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs ip (Debian: iproute2) and unshare (util-linux)"
    name = f"lg-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    inside = subprocess.run(
        ["ip", "netns", "exec", name, "unshare", "--mount", "--uts", "hostname", "probe"],
        capture_output=True,
        text=True,
    )
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return f"unshare is refused here: {inside.stderr.strip()}" if inside.returncode else None


class Node:
    """One network namespace; what is started in it belongs to it until `kill`."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.name = number, f"lg{os.getpid()}-{number}"
        self.address, self.host = f"{NETWORK}.{number + 1}", f"node{number}"
        self.interface = f"lg{os.getpid() % 10000}v{number}"
        self.hosts = folder / f"hosts{number}"
        self._processes: list[subprocess.Popen[str]] = []

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, cwd: Path
    ) -> subprocess.Popen[str]:
        """Start a command in the node; its output is added to a file."""
        inside = f'hostname {self.host}; mount --bind {self.hosts} /etc/hosts; exec "$@"'
        with log.open("a") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, "unshare", "--mount", "--uts",
                 "bash", "-ec", inside, "node", *command],
                env={**os.environ, **environment},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                text=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def kill(self) -> None:
        """End everything in the node at once, as a power cut would."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True
        )
        for pid in map(int, found.stdout.split()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self._processes:
            process.wait(timeout=30)


class Cluster:
    """Two nodes with one link between them; a context manager."""

    def __init__(self, folder: Path, host_name_on_loopback: bool = False) -> None:
        self.nodes = [Node(0, folder), Node(1, folder)]
        self._own_name = "127.0.1.1" if host_name_on_loopback else None

    def __enter__(self) -> Cluster:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        first, second = self.nodes
        for node in self.nodes:
            _ip("netns", "add", node.name)
            _ip("-n", node.name, "link", "set", "lo", "up")
            names = [
                (self._own_name if peer is node and self._own_name else peer.address, peer.host)
                for peer in self.nodes
            ]
            lines = ["127.0.0.1 localhost", *(" ".join(pair) for pair in names)]
            node.hosts.write_text("\n".join(lines) + "\n")
        _ip("link", "add", first.interface, "netns", first.name, "type", "veth",
            "peer", "name", second.interface, "netns", second.name)  # fmt: skip
        for node in self.nodes:
            _ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", node.interface)
        self.restore()

    def cut(self) -> None:
        """Take the link down: packets are lost and nobody is told."""
        first = self.nodes[0]
        _ip("-n", first.name, "link", "set", first.interface, "down")

    def restore(self) -> None:
        """Bring the link up."""
        for node in self.nodes:
            _ip("-n", node.name, "link", "set", node.interface, "up")

    def __exit__(self, *exception: object) -> None:
        for node in self.nodes:
            if Path("/run/netns", node.name).exists():
                node.kill()
                _ip("netns", "delete", node.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
