# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`leangrpo serve-reward`: builds the rewards, finds the token and runs the server."""

import importlib.util
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_leangrpo.rewards.base import ModelSettings
from megatron_leangrpo.rewards.connection import INSTALL_LINE
from megatron_leangrpo.rewards.registry import make_reward
from megatron_leangrpo.rewards.wire import TOKEN_VARIABLE

if TYPE_CHECKING:
    from megatron_leangrpo.rewards.server import Limits

MAX_CONNECTIONS = 4096


def serve_rewards(
    names: Sequence[str],
    settings: ModelSettings,
    host: str,
    port: int,
    token_file: str | None,
    limits: Mapping[str, int],
) -> None:
    """Serve rewards until interrupted. Raises ``ValueError`` for what a user can cause."""
    missing = [m for m in ("fastapi", "uvicorn") if importlib.util.find_spec(m) is None]
    if missing:
        raise ValueError(f"serve-reward needs {' and '.join(missing)}: {INSTALL_LINE}")
    if not 0 <= port <= 65535:
        raise ValueError(f"--port {port} must be between 0 (any free one) and 65535")
    token = read_token(token_file)
    if token is None and not _is_loopback(host):
        raise ValueError(
            f"--host {host} can be reached from other machines and there is no token; set "
            f"{TOKEN_VARIABLE} or give --token-file FILE, or serve on 127.0.0.1"
        )
    checked = check_limits(limits)
    rewards = {name: make_reward(name, settings) for name in names}

    import uvicorn

    from megatron_leangrpo.rewards.server import create_app

    config = uvicorn.Config(
        create_app(rewards, token, checked),
        host=host,
        port=port,
        log_level="warning",
        # Connections, idle ones of many ranks too; what is in hand is bounded by max_requests.
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=60,
    )
    with _listen(host, port) as listener:
        who = "with a bearer token" if token else "without a token"
        address = f"http://{host}:{listener.getsockname()[1]}"
        print(f"serving {', '.join(names)} {who} on {address}", flush=True)
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error}") from error


def read_token(token_file: str | None) -> str | None:
    """The token of a file, or else of the environment; None if neither is given."""
    if token_file is None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        where = TOKEN_VARIABLE
        if not token:
            return None
    else:
        where = f"--token-file {token_file}"
        try:
            token = Path(token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{where} cannot be read as ASCII text: {error}") from error
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{where} must have 16 or more ASCII characters without spaces")
    return token


def check_limits(limits: Mapping[str, int]) -> "Limits":
    """The limits, each 1 or more."""
    from megatron_leangrpo.rewards.server import Limits

    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be 1 or more")
    return Limits(**limits)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_paths(pairs: Sequence[str]) -> dict[str, str]:
    """`name=folder` pairs as a mapping."""
    paths = {}
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not (name and equals and folder):
            raise ValueError(f"--path {pair!r} must be NAME=FOLDER, such as pickscore=/models/p")
        paths[name] = folder
    return paths
