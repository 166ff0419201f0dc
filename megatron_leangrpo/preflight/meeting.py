# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The ranks of a launch meet for the checks alone, in a world that training does not inherit."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

SECONDS_TO_ARRIVE = 45.0

_stores: list[dist.Store] = []
"""Stores of this process: rank 0 may serve the one that training will use, and must not end it."""


def launched_ranks() -> tuple[int, int]:
    """Rank and number of ranks of this launch; alone without a launcher."""
    if "RANK" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def meet(seconds: float = SECONDS_TO_ARRIVE) -> None:
    """Start a world of gloo ranks; ``ValueError`` names the ranks that do not come in time."""
    rank, world = launched_ranks()
    timeout = timedelta(seconds=seconds)
    if world == 1:
        store: dist.Store = dist.HashStore()
    else:
        store = _find_store(rank, world, timeout)
    # Keys of its own: gloo would find the addresses of this world in the training's.
    store = dist.PrefixStore("leangrpo_preflight", store)
    _stores.append(store)
    store.set(f"here/{rank}", socket.gethostname())
    missing = _missing(store, world, timeout)
    if missing:
        came = sorted({store.get(f"here/{r}").decode() for r in range(world) if r not in missing})
        raise ValueError(
            f"pre-flight: ranks {_ranges(missing)} of {world} have not come within {seconds:.0f} s "
            f"(those of {', '.join(came)} have); look at the messages of the other nodes"
        )
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        raise ValueError(
            f"pre-flight: the ranks know of one another and cannot connect: "
            f"{str(error).splitlines()[0]} ({_own_addresses()}); set GLOO_SOCKET_IFNAME to the "
            "interface that leads to the other nodes"
        ) from error


def leave() -> None:
    """End the world of the checks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _find_store(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The store that training will use, without its wait for ranks that it could not name."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(
            host, port, world, serves, timeout, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, TimeoutError) as error:
        raise ValueError(
            f"pre-flight: rank {rank} cannot reach the store of the run at {host}:{port}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _missing(store: dist.Store, world: int, timeout: timedelta) -> list[int]:
    keys = [f"here/{rank}" for rank in range(world)]
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def _ranges(numbers: list[int]) -> str:
    """As 0, 4-7."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)


def _own_addresses() -> str:
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "nothing"
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
    return f"host name {host} is {address}, GLOO_SOCKET_IFNAME {interface}"


def texts_of_all(text: str) -> list[str]:
    """Each rank's text, in rank order (a collective); it travels as bytes, nothing is unpickled."""
    raw = text.encode("utf-8")
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(raw)]))
    longest = max(1, int(max(lengths)))
    padded = torch.frombuffer(bytearray(raw.ljust(longest, b"\0")), dtype=torch.uint8)
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(rows, padded)
    return [bytes(row[:n].tolist()).decode("utf-8") for row, n in zip(rows, map(int, lengths))]
