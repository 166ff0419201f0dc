# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m checkpoints_tools import | export | verify | inspect``."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

DIFFERENT = 1


class _Parser(argparse.ArgumentParser):
    """Makes a mistake on the command line like any other bad input: one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="python -m checkpoints_tools",
        description="Converts, compares and lists checkpoints of FLUX and Wan transformers. Only "
        "safetensors, JSON and megatron's distributed format are read; nothing is unpickled.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_conversions(commands)
    verify = commands.add_parser(
        "verify",
        help="compare two checkpoints; exit status 1 when they differ",
        description="Compare two checkpoints of any format tensor by tensor.",
        allow_abbrev=False,
    )
    verify.add_argument("first", metavar="A", help="checkpoint of any format")
    verify.add_argument("second", metavar="B", help="checkpoint of any format")
    verify.add_argument("--average", action="store_true", help="take the weight average of A")
    verify.add_argument(
        "--forward",
        action="store_true",
        help="also run each on the CPU: diffusers' own model for its files, else ours",
    )
    verify.set_defaults(run=_verify)

    inspect = commands.add_parser(
        "inspect", help="parameters, shapes, dtypes, format, step, layout", allow_abbrev=False
    )
    inspect.add_argument("path", metavar="DIR", help="checkpoint of any format")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)
    return parser


def _add_conversions(commands) -> None:
    read = commands.add_parser(
        "import",
        help="diffusers or original weights to a megatron checkpoint",
        description="Read a diffusers transformer or pipeline folder, or the authors' own files, "
        "and write a megatron distributed checkpoint that loads at any tensor-parallel size.",
        allow_abbrev=False,
    )
    read.add_argument("--model", choices=["flux", "wan"], required=True, help="model family")
    read.add_argument("--input", metavar="DIR", required=True, help="folder or .safetensors file")
    read.add_argument("--output", metavar="DIR", required=True, help="folder to write")
    read.add_argument(
        "--tensor-model-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="cut the files for this many ranks, which then read fastest (default: 1)",
    )
    read.set_defaults(run=_import)

    write = commands.add_parser(
        "export",
        help="a checkpoint to a diffusers transformer folder",
        description="Write the weights of an imported checkpoint, a checkpoint of a run, or a "
        "run's newest one as a folder that diffusers' from_pretrained reads. Adapters become a "
        "LoRA file that load_lora_weights reads, or are merged.",
        allow_abbrev=False,
    )
    write.add_argument("--input", metavar="DIR", required=True, help="checkpoint or run directory")
    write.add_argument("--output", metavar="DIR", required=True, help="folder to write or replace")
    write.add_argument("--average", action="store_true", help="the weight average of the run")
    write.add_argument("--lora", metavar="PATH", help="merge a LoRA file into the weights")
    write.add_argument(
        "--merged",
        action="store_true",
        help="of a run that trained adapters, the base with them instead of a LoRA file",
    )
    write.add_argument(
        "--max-shard-size", default="10GB", metavar="SIZE", help="of a file (default: 10GB)"
    )
    write.set_defaults(run=_export)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 different or failed, 2 bad input, 130 interrupted."""
    from megatron_leangrpo.errors import run_command

    sys.exit(run_command(lambda: _run(argv)))


def _run(argv: Sequence[str] | None) -> int | None:
    from megatron_leangrpo.reporting.quiet import quiet_libraries

    arguments = build_parser().parse_args(argv)
    quiet_libraries()
    return arguments.run(arguments)


def _import(arguments: argparse.Namespace) -> None:
    from checkpoints_tools.importing import import_weights
    from megatron_leangrpo.reporting.console import Console

    size = arguments.tensor_model_parallel_size
    source = import_weights(arguments.model, arguments.input, arguments.output, size)
    console = Console()
    for note in source.notes:
        console.warning(note)
    console.line(
        f"{len(source.tensors)} tensors of {source.path} ({source.format} format) in "
        f"{arguments.output}"
    )


def _export(arguments: argparse.Namespace) -> None:
    from checkpoints_tools.exporting import export_weights, parse_size
    from megatron_leangrpo.reporting.console import Console

    done = export_weights(
        arguments.input,
        arguments.output,
        arguments.average,
        parse_size(arguments.max_shard_size),
        arguments.lora,
        arguments.merged,
    )
    step = "" if done.step is None else f" after iteration {done.step}"
    Console().line(
        f"{done.what}{step} of {done.path} in {arguments.output}: {done.num_tensors} tensors, "
        f"{len(done.files)} file{'' if len(done.files) == 1 else 's'}"
    )


def _verify(arguments: argparse.Namespace) -> int:
    from checkpoints_tools.adapters import find_adapters
    from checkpoints_tools.opening import open_checkpoint
    from checkpoints_tools.verdict import print_comparison, print_forward
    from checkpoints_tools.verifying import compare
    from megatron_leangrpo.reporting.console import Console

    adapters = (
        find_adapters(arguments.first, "A", arguments.average),
        find_adapters(arguments.second, "B"),
    )
    if any(adapters):
        if not all(adapters) or arguments.forward:
            raise ValueError(
                "A and B: adapters are compared with adapters, by what they change; for --forward, "
                "or with whole weights, export them merged first"
            )
        comparison = compare(*adapters)
        print_comparison(Console(), comparison)
        return 0 if comparison.equal else DIFFERENT
    first = open_checkpoint(arguments.first, "A", average=arguments.average)
    second = open_checkpoint(arguments.second, "B")
    if first.family_name != second.family_name:
        raise ValueError(f"A is a {first.family_name} and B a {second.family_name}")
    if len(first.folders) != len(second.folders):
        one, two = ("A", "B") if len(first.folders) == 1 else ("B", "A")
        raise ValueError(
            f"{two} has two transformers and {one} one; compare it with a folder of one of them"
        )
    console = Console()
    comparison = compare(first, second)
    print_comparison(console, comparison)
    equal = comparison.equal
    if arguments.forward:
        from checkpoints_tools.forward import compare_forward

        for folder, own in first.transformers.items():
            difference = compare_forward(own, second.transformers[folder])
            of = folder if len(first.folders) > 1 else ""
            equal &= print_forward(console, difference, of)
    return 0 if equal else DIFFERENT


def _inspect(arguments: argparse.Namespace) -> None:
    from checkpoints_tools.adapters import describe_adapters, find_adapters
    from checkpoints_tools.inspecting import describe
    from checkpoints_tools.opening import open_checkpoint
    from checkpoints_tools.verdict import print_adapters, print_description
    from megatron_leangrpo.reporting.console import Console

    adapters = find_adapters(arguments.path, "DIR", verified=False)
    if adapters is not None:
        described, show = describe_adapters(adapters), print_adapters
    else:
        described = describe(open_checkpoint(arguments.path, "DIR", verified=False))
        show = print_description
    if arguments.json:
        print(json.dumps(described, indent=1))
    else:
        show(Console(), described)
