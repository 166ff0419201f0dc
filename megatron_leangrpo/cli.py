# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The command line: ``leangrpo train | compare | sample | build-tiny | info``.

Only the argument parser is imported here, so that ``--help`` answers at once.
"""

import argparse
import sys
from collections.abc import Sequence


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; recipe overrides are left over for the recipe's parser."""
    parser = argparse.ArgumentParser(
        prog="leangrpo",
        description="GRPO post-training of diffusion transformers on megatron-core.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = _recipe_command(commands, "train", _train, "run a recipe: rollout, rewards, updates")
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print parameters, tokens, batch arithmetic and bytes per rank",
    )

    compare = _recipe_command(
        commands, "compare", _compare, "gradient, time and memory of each schedule on one rollout"
    )
    compare.add_argument("--schedules", default="replay,retain", help="comma-separated")
    compare.add_argument("--repeat", type=int, default=3, help="interleaved timed repeats")
    compare.add_argument("--json", metavar="FILE", help="also write the table as JSON")
    compare.add_argument(
        "--dump-grads", metavar="FILE", help="safetensors of the first schedule's full gradient"
    )

    sample = _recipe_command(commands, "sample", _sample, "pictures from the base or a checkpoint")
    sample.add_argument("--checkpoint", metavar="DIR", help="a run directory or a checkpoint of it")

    tiny = commands.add_parser("build-tiny", help="re-create an embedded base model")
    tiny.add_argument("family", choices=["flux"])
    tiny.add_argument("--output", metavar="DIR", required=True)
    tiny.add_argument("--task", choices=["digits", "shapes"], default="digits")
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(run=_build_tiny)

    info = commands.add_parser("info", help="versions, devices, and what is optional and missing")
    info.set_defaults(run=_info)
    return parser


def _recipe_command(commands, name: str, run, summary: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        allow_abbrev=False,
        epilog="Everything else is --section.key=value; see leangrpo train RECIPE --print_config.",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="packaged recipe or YAML file")
    parser.set_defaults(run=run, takes_overrides=True)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 2 bad input, 1 failure while running, 130 interrupted."""
    parser = build_parser()
    arguments, overrides = parser.parse_known_args(argv)
    if overrides and not getattr(arguments, "takes_overrides", False):
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    arguments.overrides = overrides
    from megatron_leangrpo.errors import run_command
    from megatron_leangrpo.reporting.quiet import quiet_libraries

    quiet_libraries()
    sys.exit(run_command(lambda: arguments.run(arguments)))


def _train(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.grpo import commands

    commands.train(arguments.recipe, arguments.overrides, dry_run=arguments.dry_run)


def _compare(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.grpo import commands

    commands.compare(
        arguments.recipe,
        arguments.overrides,
        schedules=arguments.schedules.split(","),
        repeat=arguments.repeat,
        json_path=arguments.json,
        gradients_path=arguments.dump_grads,
    )


def _sample(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.grpo import commands

    commands.sample(arguments.recipe, arguments.overrides, checkpoint=arguments.checkpoint)


def _build_tiny(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.build_tiny.flux import build_tiny_flux

    build_tiny_flux(arguments.output, task=arguments.task, seed=arguments.seed)


def _info(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.info import print_info

    print_info()
