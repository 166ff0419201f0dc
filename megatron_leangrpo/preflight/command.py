# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Pre-flight: the checks of a launch in order, one table, and what follows.

    [--then COMMAND] RECIPE [--section.key=value ...]

Started by launch/torchrun.sh on every rank. Exit status 2 where something is wrong.
"""

import json
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_leangrpo import cli
from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.errors import run_command
from megatron_leangrpo.grpo.architecture import resolve_architecture
from megatron_leangrpo.grpo.commands import load
from megatron_leangrpo.preflight.clock import clock_check, measure_skews
from megatron_leangrpo.preflight.facts import agreement, own_facts
from megatron_leangrpo.preflight.meeting import launched_ranks, leave, meet, texts_of_all
from megatron_leangrpo.preflight.network import check_own_address
from megatron_leangrpo.preflight.recipe import check_recipe, checkpoint_bytes
from megatron_leangrpo.preflight.result import Check
from megatron_leangrpo.preflight.storage import check_output, space_check
from megatron_leangrpo.reporting.console import Console
from megatron_leangrpo.reporting.quiet import quiet_libraries

_MEANING = {True: "ok", False: "WRONG"}


def main(argv: Sequence[str] | None = None) -> None:
    """Check, and go on with a command where everything is good."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    then = None
    if arguments[:1] == ["--then"]:
        then, arguments = arguments[1], arguments[2:]
    if not arguments:
        sys.exit("usage: preflight.py [--then COMMAND] RECIPE [--section.key=value ...]")
    quiet_libraries()
    status = run_command(lambda: preflight(arguments[0], arguments[1:]))
    if status or then is None:
        sys.exit(status)
    cli.main([then, *arguments])


def preflight(recipe: str, overrides: Sequence[str]) -> None:
    """Run all checks on all ranks; ``ValueError`` on all where one of them fails."""
    config, _ = load(recipe, overrides)
    _, world = launched_ranks()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_own_address(nodes=max(1, world // local_ranks))
    meet()
    checks = _checks(config, world, local_ranks)
    console = Console(enabled=dist.get_rank() == 0)
    rows = [[check.name, _MEANING[check.good], check.found] for check in checks]
    console.line(_table(rows))
    wrong = [check for check in checks if not check.good]
    if wrong:
        raise ValueError(
            f"pre-flight: {len(wrong)} of {len(checks)} checks failed: "
            + "; ".join(f"{check.name}: {check.found}" for check in wrong)
        )
    leave()


def _checks(config: RunConfig, world: int, local_ranks: int) -> list[Check]:
    """All checks, the same on every rank (a collective)."""
    facts = [json.loads(text) for text in texts_of_all(json.dumps(own_facts(config)))]
    hosts = [own["host"] for own in facts]
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    first_ranks = [r for r in range(world) if r % local_ranks == 0]
    nodes = len(first_ranks)
    checks = [Check("ranks", True, f"{world} on {nodes} node{'s' if nodes > 1 else ''}")]
    checks += agreement(facts)
    checks.append(clock_check(measure_skews([r for r in first_ranks if r]), hosts))
    own = []
    if local_rank == 0:
        own = check_recipe(config, world, local_ranks)
    checks += _of_all_nodes(own, hosts)
    checks.append(check_output(config.output, local_rank == 0, hosts))
    if config.checkpoint.interval >= 0 and all(check.good for check in checks):
        # The newest ones, the best one, and the one that is being written.
        kept = config.checkpoint.keep + 2 if config.checkpoint.interval else 1
        size = checkpoint_bytes(config, resolve_architecture(config, needs_weights=False))
        checks += _of_all_nodes([space_check(config.output, size, kept)], hosts)
    if torch.cuda.is_available():
        checks.append(_nccl_check(world))
    return checks


def _of_all_nodes(own: list[Check], hosts: Sequence[str]) -> list[Check]:
    """Checks that each node makes for itself: the first one that fails, or else rank 0's."""
    rows = [json.loads(text) for text in texts_of_all(json.dumps([vars(c) for c in own]))]
    found = {row["name"]: Check(**row) for row in rows[0]}
    for host, own_rows in zip(hosts, rows):
        for check in (Check(**row) for row in own_rows):
            if not check.good and found.get(check.name, check).good:
                found[check.name] = Check(check.name, False, f"{host}: {check.found}")
            found.setdefault(check.name, check)
    return list(found.values())


def _nccl_check(world: int) -> Check:
    """Add up a number over all GPUs with NCCL."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    problem = ""
    try:
        group = dist.new_group(backend="nccl")
        value = torch.ones(1, device=device)
        dist.all_reduce(value, group=group)
        if value.item() != world:
            problem = f"a sum over {world} GPUs gave {value.item():g}"
        dist.destroy_process_group(group)
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    problems = [text for text in texts_of_all(problem) if text.strip()]
    return Check("NCCL", not problems, problems[0] if problems else f"reaches {world} GPUs")


def _table(rows: list[list[str]]) -> str:
    width = max(len(row[0]) for row in rows)
    return "pre-flight\n" + "\n".join(f"  {n:{width}}  {m:5}  {found}" for n, m, found in rows)
