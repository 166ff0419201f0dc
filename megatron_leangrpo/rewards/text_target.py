# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The text a prompt asks to be written, and Flow-GRPO's rule to score what was read instead.

The target is `metadata["target"]` if the prompt file has it, else the text in the prompt's first
pair of straight double quotes.
"""

import unicodedata
from collections.abc import Mapping
from typing import Any

CURLY_QUOTES = "\u201c\u201d\u201e\u201f\u00ab\u00bb"


def normalize_text(text: str) -> str:
    """Spaces removed, lower case, composed form (NFC): two spellings of one text become equal.

    Full-width characters stay what they are; they differ from ASCII.
    """
    return unicodedata.normalize("NFC", "".join(text.split()).lower())


def target_text(prompt: str, metadata: Mapping[str, Any]) -> str:
    """The text to be written, as given; ValueError if there is none or only spaces."""
    if "target" in metadata:
        target = metadata["target"]
        if not isinstance(target, str) or not target.strip():
            raise ValueError(f'"target" is {target!r}; it must be a text that is not empty')
        return target
    before, opening, rest = prompt.partition('"')
    if not opening:
        hint = "found curly quotes; " if any(q in prompt for q in CURLY_QUOTES) else ""
        raise ValueError(f'no text in straight double quotes ({hint}write "TEXT" or give "target")')
    target, closing, _ = rest.partition('"')
    if not closing:
        raise ValueError('a double quote is opened and not closed (write "TEXT")')
    if before.endswith("\\") or target.endswith("\\"):
        raise ValueError('double quotes are escaped (write plain "TEXT" without backslashes)')
    if not target.strip():
        raise ValueError('the double quotes are empty (write "TEXT")')
    return target


def levenshtein(first: str, second: str) -> int:
    """Number of insertions, deletions and substitutions between two texts."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(second, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def string_score(recognized: str, target: str) -> float:
    """1 if what was read contains the target, else 1 - min(edit distance, length) / length."""
    recognized, target = normalize_text(recognized), normalize_text(target)
    return 1.0 if target in recognized else edit_score(recognized, target)


def edit_score(recognized: str, target: str) -> float:
    """1 - min(edit distance, length) / length: here, more text than the target costs."""
    recognized, target = normalize_text(recognized), normalize_text(target)
    return 1 - min(levenshtein(recognized, target), len(target)) / len(target)
