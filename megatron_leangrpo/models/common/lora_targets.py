# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Which projections of a model can have an adapter, which a user means, and how strong each is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

A, B = "lora_A.weight", "lora_B.weight"
"""PEFT's names of the two factors."""
_SHOWN = 4


@dataclass(frozen=True)
class LowRank:
    """Rank and strength of one projection's adapter."""

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """What multiplies `B A x`."""
        return self.alpha / self.rank


def match_targets(targets: Sequence[str], known: Iterable[str]) -> list[str]:
    """The projections that targets mean, by PEFT's rule: the whole name, or its end after a dot.

    ``ValueError`` for a target that means none.
    """
    known = list(known)
    matched = {t: [n for n in known if n == t or n.endswith(f".{t}")] for t in targets}
    unmatched = [target for target, names in matched.items() if not names]
    if unmatched:
        raise ValueError(
            f"lora.targets = {unmatched[0]!r} matches no projection of this model; valid: the end "
            f"of a name: {', '.join(target_names(known))}"
        )
    chosen = {name for names in matched.values() for name in names}
    return [name for name in known if name in chosen]


def check_projections(names: Iterable[str], known: Iterable[str], what: str = "lora.path") -> None:
    """Raise ``ValueError`` for projections that the model does not have."""
    known = set(known)
    unknown = sorted(set(names) - known)
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise ValueError(
            f"{what}: {len(unknown)} of the adapted projections are not in this model: "
            f"{', '.join(unknown[:_SHOWN])}{more}; it has {', '.join(target_names(known))}"
        )


def target_names(known: Iterable[str]) -> list[str]:
    """The projections' names, those of all blocks of a kind as one."""
    return sorted({re.sub(r"^(\w+\.)+\d+\.", "", name) for name in known})
