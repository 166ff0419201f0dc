# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which prompts are longer than their encoders take."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def shorten(text: str, limit: int = 60) -> str:
    """The text on one line, its middle left out if it is long."""
    text = " ".join(text.split())
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]} … {text[-half:]}"


def describe_cuts(
    prompts: Sequence[str],
    tokenizers: Mapping[str, tuple[Any, int]],
    clean: Callable[[str], str] = str,
) -> list[str]:
    """One line per prompt that is cut, then one per set of prompts that the cut makes equal.

    `tokenizers` are an encoder's tokenizer and the tokens it keeps, by the encoder's name.
    """
    cut: dict[str, str] = {}
    equal: dict[tuple[tuple[int, ...], ...], list[str]] = defaultdict(list)
    for prompt in dict.fromkeys(prompts):
        text = clean(prompt)
        ids = {name: tok(text, verbose=False).input_ids for name, (tok, _) in tokenizers.items()}
        kept = [
            f"{name} keeps {limit} of {len(ids[name])} tokens"
            for name, (_, limit) in tokenizers.items()
            if len(ids[name]) > limit
        ]
        if not kept:
            continue
        cut[prompt] = f'prompt "{shorten(prompt)}" is cut: {", ".join(kept)}'
        left = (
            tok(text, max_length=limit, truncation=True).input_ids
            for tok, limit in tokenizers.values()
        )
        equal[tuple(map(tuple, left))].append(prompt)
    return [
        *cut.values(),
        *(
            "these prompts are equal after the cut, their groups stay apart: "
            + ", ".join(f'"{shorten(p)}"' for p in group)
            for group in equal.values()
            if len(group) > 1
        ),
    ]
