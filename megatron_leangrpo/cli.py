# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The command line: ``leangrpo train | compare | plan | sample | evaluate | info | ...``.

Only the argument parser is imported here, so that ``--help`` answers at once.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class _Parser(argparse.ArgumentParser):
    """Makes a mistake on the command line like any other bad input: one line, from one rank."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


class _RecipeHelp(argparse.Action):
    """Shows the command and the packaged recipes, or the settings of the recipe that is named."""

    def __init__(self, option_strings: Sequence[str], dest: str, **keywords: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, **keywords)

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        parser.print_help()
        if namespace.recipe is not None:
            setattr(namespace, self.dest, True)
            return
        from megatron_leangrpo.config_reader import packaged_recipes, read_recipe

        print("\npackaged recipes:")
        for name in packaged_recipes():
            print(f"  {name:20}  {read_recipe(name).description}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; recipe overrides are left over for the recipe's parser."""
    parser = _Parser(
        prog="leangrpo",
        description="GRPO post-training of diffusion transformers on megatron-core.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_compare(commands)
    _add_plan(commands)
    _add_sample(commands)
    _add_evaluate(commands)
    _add_build_tiny(commands)
    _add_serve_reward(commands)
    info = commands.add_parser(
        "info", help="versions, devices, and what is optional and missing", allow_abbrev=False
    )
    info.set_defaults(run=_info)

    from megatron_leangrpo.overlap.arguments import add_overlap_command

    add_overlap_command(commands)
    return parser


def _add_train(commands) -> None:
    train = _recipe_command(commands, "train", _train, "run a recipe: rollout, rewards, updates")
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print parameters, tokens, batch arithmetic and bytes per rank",
    )


def _add_compare(commands) -> None:
    compare = _recipe_command(
        commands, "compare", _compare, "gradient, time and memory of each schedule on one rollout"
    )
    compare.add_argument("--schedules", default="replay,retain", help="comma-separated")
    compare.add_argument("--repeat", type=int, default=3, help="interleaved timed repeats")
    compare.add_argument("--json", metavar="FILE", help="also write the table as JSON")
    compare.add_argument(
        "--dump-grads", metavar="FILE", help="safetensors of the first schedule's full gradient"
    )


def _add_plan(commands) -> None:
    plan = _recipe_command(
        commands, "plan", _plan, "memory and seconds of each schedule and layout, before any GPU"
    )
    plan.add_argument(
        "--gpu",
        default="h100-80gb",
        help="h100-80gb, h200-141gb, a100-80gb, b200, l20, or host (default: h100-80gb)",
    )
    plan.add_argument("--gpus", type=int, metavar="N", help="1 to 1024 (default: one node)")
    plan.add_argument("--json", metavar="FILE", help="write every schedule and layout as JSON")
    plan.add_argument(
        "--timeline",
        metavar="FILE",
        help="draw a layout with pipeline stages as PNG: the configured one, or else the fastest",
    )


def _add_sample(commands) -> None:
    sample = _recipe_command(commands, "sample", _sample, "pictures from the base or a checkpoint")
    sample.add_argument("--checkpoint", metavar="DIR", help="a run directory or a checkpoint of it")


def _add_evaluate(commands) -> None:
    evaluate = _recipe_command(
        commands, "evaluate", _evaluate, "rewards of the base and of checkpoints, side by side"
    )
    evaluate.add_argument(
        "--checkpoint",
        metavar="DIR",
        action="append",
        default=[],
        help="a run, a checkpoint or an export, :live behind it for no average; may be repeated",
    )
    evaluate.add_argument("--json", metavar="FILE", help="also write the numbers as JSON")


def _add_build_tiny(commands) -> None:
    tiny = commands.add_parser(
        "build-tiny",
        help="re-create an embedded base model",
        description="Train a tiny FluxPipeline or WanPipeline folder from nothing: about 2 or 8 "
        "minutes on a core.",
        allow_abbrev=False,
    )
    tiny.add_argument("family", choices=["flux", "wan"], help="model family")
    tiny.add_argument("--output", metavar="DIR", required=True, help="new folder to write")
    tiny.add_argument(
        "--task",
        choices=["digits", "shapes", "motion"],
        help="what it learns to draw: digits (default) or shapes for flux, motion for wan",
    )
    tiny.add_argument(
        "--seed", type=int, default=0, help="of weights, pictures and training (default: 0)"
    )
    tiny.set_defaults(run=_build_tiny)


def _add_serve_reward(commands) -> None:
    serve = commands.add_parser(
        "serve-reward",
        help="rewards over HTTP, for runs with reward.remote.url",
        description="Serve rewards over HTTP, for runs with reward.remote.url. The bearer token "
        "is read from LEANGRPO_REWARD_TOKEN or --token-file.",
        allow_abbrev=False,
    )
    serve.add_argument("rewards", metavar="REWARD", nargs="+", help="as in reward.weights")
    serve.add_argument(
        "--path", metavar="NAME=DIR", action="append", default=[], help="weights of a reward"
    )
    serve.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: auto)")
    serve.add_argument("--batch-size", type=int, default=16, help="images in one forward")
    serve.add_argument("--offload", action="store_true", help="models wait in host memory")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on")
    serve.add_argument("--port", type=int, default=8085)
    serve.add_argument("--token-file", metavar="FILE", help="file with the bearer token")
    serve.add_argument("--max-requests", type=int, default=32, help="in hand; more get 429")
    serve.add_argument("--max-images", type=int, default=64, help="of a request")
    serve.add_argument("--max-pixels", type=int, default=16 * 2**20, help="of a request")
    serve.add_argument("--max-body-bytes", type=int, default=64 * 2**20, help="of a request")
    serve.add_argument("--max-batch", type=int, default=64, help="images scored together")
    serve.set_defaults(run=_serve_reward)


def _recipe_command(commands, name: str, run, summary: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        allow_abbrev=False,
        add_help=False,
        usage=f"leangrpo {name} RECIPE [options] [--section.key=value ...]",
    )
    parser.add_argument("recipe", metavar="RECIPE", help="packaged recipe or YAML file")
    parser.add_argument(
        "-h",
        "--help",
        action=_RecipeHelp,
        help="show this and the packaged recipes; after a RECIPE, every setting and its value",
    )
    parser.set_defaults(run=run, takes_overrides=True)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 2 bad input, 1 failure while running, 130 interrupted."""
    from megatron_leangrpo.errors import run_command

    sys.exit(run_command(lambda: _run(argv)))


def _run(argv: Sequence[str] | None) -> None:
    from megatron_leangrpo.reporting.quiet import quiet_libraries

    parser = build_parser()
    arguments, overrides = parser.parse_known_args(argv)
    if overrides and not getattr(arguments, "takes_overrides", False):
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    if getattr(arguments, "help", False):
        overrides = ["--help"]
    arguments.overrides = overrides
    quiet_libraries()
    arguments.run(arguments)


def _train(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.grpo import commands

    commands.train(arguments.recipe, arguments.overrides, dry_run=arguments.dry_run)


def _compare(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.grpo import commands

    commands.compare(
        arguments.recipe,
        arguments.overrides,
        schedules=[name.strip() for name in arguments.schedules.split(",")],
        repeat=arguments.repeat,
        json_path=arguments.json,
        gradients_path=arguments.dump_grads,
    )


def _plan(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.grpo import commands

    commands.plan(
        arguments.recipe,
        arguments.overrides,
        gpu=arguments.gpu,
        gpus=arguments.gpus,
        json_path=arguments.json,
        timeline_path=arguments.timeline,
    )


def _sample(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.grpo import commands

    commands.sample(arguments.recipe, arguments.overrides, checkpoint=arguments.checkpoint)


def _evaluate(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.grpo import commands

    commands.evaluate(
        arguments.recipe,
        arguments.overrides,
        checkpoints=arguments.checkpoint,
        json_path=arguments.json,
    )


def _build_tiny(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.build_tiny.flux import build_tiny_flux
    from megatron_leangrpo.build_tiny.wan import build_tiny_wan

    build = {"flux": build_tiny_flux, "wan": build_tiny_wan}[arguments.family]
    task = {} if arguments.task is None else {"task": arguments.task}
    build(arguments.output, seed=arguments.seed, **task)


def _serve_reward(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.rewards import serving
    from megatron_leangrpo.rewards.base import ModelSettings
    from megatron_leangrpo.rewards.weights import find_device

    limits = ("max_requests", "max_images", "max_pixels", "max_body_bytes", "max_batch")
    serving.serve_rewards(
        arguments.rewards,
        ModelSettings(
            serving.parse_paths(arguments.path),
            find_device("--device", arguments.device),
            arguments.batch_size,
            arguments.offload,
        ),
        host=arguments.host,
        port=arguments.port,
        token_file=arguments.token_file,
        limits={name: getattr(arguments, name) for name in limits},
    )


def _info(arguments: argparse.Namespace) -> None:
    from megatron_leangrpo.info import print_info

    print_info()
