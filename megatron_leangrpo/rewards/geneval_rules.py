# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""GenEval's clauses (djghosh13/geneval), and the two scores of a picture's detected objects.

`benchmark_correct` is GenEval's own verdict, `partial_score` the reward that Flow-GRPO trains on
(yifan123/reward-server).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLORS = (
    "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white",
)  # fmt: skip
RELATIONS = ("left of", "right of", "above", "below")
# COCO's 80 classes, three of them under GenEval's own names.
OBJECTS = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat",
    "traffic light", "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog",
    "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "backpack", "umbrella",
    "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard", "sports ball", "kite",
    "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange",
    "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant",
    "bed", "dining table", "toilet", "tv", "laptop", "computer mouse", "tv remote",
    "computer keyboard", "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator",
    "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
POSITION_THRESHOLD = 0.1

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Detection:
    """One object found in a picture."""

    score: float
    box: Box
    """Left, top, right, bottom in pixels; right and bottom are the first ones outside."""
    mask: Tensor
    """[H, W] bool"""


Objects = Mapping[str, Sequence[Detection]]
"""The objects of each class, the most confident first."""
ColorsOf = Callable[[str, Sequence[Detection]], list[str]]
"""The colour of each of some objects of a class."""


@dataclass(frozen=True)
class Clause:
    """`count` objects of a class, and what is asked of them."""

    object: str
    count: int
    color: str | None = None
    relation: str | None = None
    """Where they are as seen from the objects of clause `target`."""
    target: int = 0


@dataclass(frozen=True)
class Task:
    """What a prompt's metadata ask for."""

    tag: str
    include: tuple[Clause, ...]
    exclude: tuple[Clause, ...] = ()


def parse_task(metadata: Mapping[str, Any]) -> Task:
    """Read "tag", "include" and "exclude" of a GenEval line; ValueError says what is wrong."""
    if metadata.get("tag") not in TAGS:
        raise ValueError(f'"tag" is {metadata.get("tag")!r}, must be one of {", ".join(TAGS)}')
    if not metadata.get("include"):
        raise ValueError('"include" is missing or empty; give at least one {"class", "count"}')
    found = {}
    for key in ("include", "exclude"):
        entries = metadata.get(key) or []
        if not isinstance(entries, list | tuple):
            raise ValueError(f'"{key}" must be a list')
        found[key] = tuple(_clause(entry, f"{key}[{i}]", i) for i, entry in enumerate(entries))
    return Task(metadata["tag"], found["include"], found["exclude"])


def _clause(entry: Any, where: str, index: int) -> Clause:
    if not isinstance(entry, Mapping):
        raise ValueError(f'{where} must be an object with "class" and "count"')
    name, count = entry.get("class"), entry.get("count")
    if name not in OBJECTS:
        raise ValueError(f'{where}: "class" is {name!r}, none of the 80 objects of GenEval')
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f'{where}: "count" is {count!r}, must be 1 or more')
    # A table of rows writes what a row lacks as null.
    color, position = entry.get("color"), entry.get("position")
    if color is not None and color not in COLORS:
        raise ValueError(f'{where}: "color" is {color!r}, must be one of {", ".join(COLORS)}')
    if position is None:
        return Clause(name, count, color)
    pair = position if isinstance(position, list | tuple) and len(position) == 2 else (None, None)
    if pair[0] not in RELATIONS or type(pair[1]) is not int or pair[1] not in range(index):
        raise ValueError(
            f'{where}: "position" is {position!r}, must be [RELATION, N] with one of '
            f"{', '.join(RELATIONS)} and the number of an earlier clause"
        )
    return Clause(name, count, color, *pair)


def relations(box: Box, target: Box) -> set[str]:
    """Where a box is as seen from a target: none, one or two of RELATIONS."""
    offsets, beyond = [], []
    for axis in (0, 1):
        offset = (box[axis] + box[axis + 2] - target[axis] - target[axis + 2]) / 2
        sides = abs(box[axis + 2] - box[axis]) + abs(target[axis + 2] - target[axis])
        far = max(abs(offset) - POSITION_THRESHOLD * sides, 0.0)
        offsets.append(offset)
        beyond.append(far if offset > 0 else -far)
    if max(map(abs, beyond)) < 1e-3:
        return set()
    distance = (offsets[0] ** 2 + offsets[1] ** 2) ** 0.5
    x, y = (value / distance for value in beyond)
    holds = (x < -0.5, x > 0.5, y < -0.5, y > 0.5)
    return {relation for relation, true in zip(RELATIONS, holds, strict=True) if true}


def _placed(clause: Clause, found: Sequence[Detection], targets: Sequence[Detection]) -> bool:
    return all(clause.relation in relations(f.box, t.box) for f in found for t in targets)


def benchmark_correct(task: Task, objects: Objects, colors_of: ColorsOf) -> bool:
    """Whether all clauses hold of each class's most confident objects; more of them may be there.

    More than the prompt names are wrong only where "exclude" says so.
    """
    groups: list[Sequence[Detection] | None] = []
    for clause in task.include:
        found = objects.get(clause.object, [])[: clause.count]
        holds = len(found) == clause.count
        if holds and clause.color is not None:
            holds = colors_of(clause.object, found).count(clause.color) == clause.count
        if holds and clause.relation is not None:
            targets = groups[clause.target]
            holds = targets is not None and _placed(clause, found, targets)
        groups.append(found if holds else None)
    too_many = (len(objects.get(c.object, [])) >= c.count for c in task.exclude)
    return all(group is not None for group in groups) and not any(too_many)


def partial_score(task: Task, objects: Objects, colors_of: ColorsOf) -> float:
    """The mean over what is checked of each clause, at most 1; below 0 for many objects too many.

    As published: a clause in the wrong place counts as a 0 and a 1 and not as a 0 alone.
    """
    parts: list[float] = []
    groups: list[Sequence[Detection] | None] = []
    for clause in task.include:
        found = objects.get(clause.object, [])
        parts.append(_share(clause, len(found)))
        holds = len(found) == clause.count
        if not holds and (clause.color is not None or clause.relation is not None):
            parts.append(0.0)
        if holds and clause.color is not None:
            right = colors_of(clause.object, found).count(clause.color)
            parts.append(_share(clause, right))
            holds = right == clause.count
        if holds and clause.relation is not None:
            targets = groups[clause.target]
            holds = targets is not None and _placed(clause, found, targets)
            if not holds:
                parts.append(0.0)
            if targets is not None:
                parts.append(1.0)
        groups.append(found if holds else None)
    return sum(parts) / len(parts)


def _share(clause: Clause, number: int) -> float:
    return 1 - abs(clause.count - number) / clause.count
