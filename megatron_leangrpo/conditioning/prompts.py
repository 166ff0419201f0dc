# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Prompt files and the order in which prompts are used."""

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SHOWN = 5


@dataclass(frozen=True)
class Prompt:
    """A prompt and what its line in the file says besides the text."""

    id: int
    """Line index, from 0: two equal lines are two prompts. A second draw of a line within one
    iteration gets an id of its own (see PromptSampler)."""
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read a .txt (one prompt a line), .jsonl or .parquet file.

    In the latter `prompt` is the text and other keys or columns are metadata. Blank lines are
    skipped. ValueError names the file, and the line or row where there is one.
    """
    path = Path(path)
    if path.suffix not in (".txt", ".jsonl", ".parquet"):
        raise ValueError(f"prompt file {path}: must end in .txt, .jsonl or .parquet")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"prompt file {path}: cannot be read ({error.strerror})") from error
    read = _read_parquet if path.suffix == ".parquet" else _read_lines
    prompts = list(read(path, content))
    if not prompts:
        raise ValueError(f"prompt file {path}: empty; give at least one prompt")
    return prompts


def _read_lines(path: Path, content: bytes) -> Iterator[Prompt]:
    for index, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n")):
        where = f"prompt file {path}:{index + 1}"
        try:
            line = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8 ({error.reason})") from error
        if line:
            text, metadata = (line, {}) if path.suffix == ".txt" else _parse_json_line(line, where)
            yield Prompt(index, text, metadata)


def _read_parquet(path: Path, content: bytes) -> Iterator[Prompt]:
    try:
        from pyarrow import ArrowException, BufferReader
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise ValueError(
            f"prompt file {path}: needs the extra [parquet] "
            "(pip install 'megatron-leangrpo[parquet]')"
        ) from error
    try:
        rows = read_table(BufferReader(content)).to_pylist()
    except (ArrowException, OSError) as error:
        line = str(error).splitlines()[0]
        raise ValueError(f"prompt file {path}: no readable parquet file: {line:.200}") from error
    for index, row in enumerate(rows):
        text, metadata = _prompt_of(row, f"prompt file {path}, row {index + 1}")
        yield Prompt(index, text, metadata)


def _parse_json_line(line: str, where: str) -> tuple[str, dict[str, Any]]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    return _prompt_of(row, where)


def _prompt_of(row: Any, where: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ValueError(f'{where}: must be an object with a text under "prompt"')
    text = row.pop("prompt").strip()
    if not text:
        raise ValueError(f'{where}: "prompt" is empty')
    return text, row


def describe_lines(path: str | Path, prompts: Sequence[Prompt]) -> list[str]:
    """What may be a mistake in a prompt file: blank lines between prompts, and repeated ones."""
    what = "row" if str(path).endswith(".parquet") else "line"
    present = {prompt.id for prompt in prompts}
    blank = [n + 1 for n in range(max(present)) if n not in present]
    first: dict[str, int] = {}
    repeats = []
    for prompt in prompts:
        if first.setdefault(prompt.text, prompt.id) != prompt.id:
            repeats.append(f"{prompt.id + 1} repeats {first[prompt.text] + 1}")
    notes = []
    if blank:
        notes.append(f"prompt file {path}: skipped blank {what} {_few(blank)}")
    if repeats:
        notes.append(
            f"prompt file {path}: {what} {_few(repeats)}; each is drawn, and is a group, of its own"
        )
    return notes


def _few(items: Sequence[object]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(str, items[:_SHOWN])) + more


def hold_out(prompts: Sequence[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to train on, and those of `count` texts that are kept from it.

    Which ones depends on the texts alone, and equal lines are on one side. ValueError where too few
    would be left.
    """
    texts = sorted({prompt.text for prompt in prompts})
    if not 0 <= count < len(texts):
        raise ValueError(
            f"prompts.held_out = {count}: the file has {len(texts)} different prompts; valid: "
            f"0 to {len(texts) - 1}"
        )
    held = set(random.Random("held out").sample(texts, count))
    train = [prompt for prompt in prompts if prompt.text not in held]
    return train, [prompt for prompt in prompts if prompt.text in held]


class PromptSampler:
    """Draws the prompts of an iteration as a function of (seed, iteration) alone.

    Prompts come from a chain of shuffled epochs, cut into iterations wherever epochs end, so
    that at any moment the numbers of uses differ by at most one. An iteration that reaches over
    the end of an epoch continues with prompts that it does not hold yet. With fewer prompts than it
    needs, an iteration holds some more than once: each draw is a group of its own, and draw r of a
    prompt has the id `prompt.id + r * (largest id + 1)`.
    """

    def __init__(self, prompts: list[Prompt], prompts_per_iteration: int, seed: int) -> None:
        if not prompts:
            raise ValueError("no prompts to draw from")
        if prompts_per_iteration < 1:
            raise ValueError(
                f"grpo.prompts_per_iteration={prompts_per_iteration}: must be at least 1"
            )
        self.prompts = prompts
        self.prompts_per_iteration = prompts_per_iteration
        self.seed = seed
        self._stride = max(prompt.id for prompt in prompts) + 1
        self._orders: list[list[int]] = []
        self._first_kept_epoch = 0

    def batch(self, iteration: int) -> list[Prompt]:
        """The prompts of an iteration (from 0), with ids that are unique within it."""
        first = iteration * self.prompts_per_iteration
        drawn: list[Prompt] = []
        uses: Counter[int] = Counter()
        for position in range(first, first + self.prompts_per_iteration):
            epoch, offset = divmod(position, len(self.prompts))
            prompt = self.prompts[self._epoch_order(epoch)[offset]]
            repeat = uses[prompt.id]
            uses[prompt.id] += 1
            drawn.append(dataclasses.replace(prompt, id=prompt.id + repeat * self._stride))
        return drawn

    def _epoch_order(self, epoch: int) -> list[int]:
        """Order of an epoch: it depends on those before, of which only the recent ones are kept."""
        if epoch < self._first_kept_epoch:
            self._orders, self._first_kept_epoch = [], 0
        while epoch >= self._first_kept_epoch + len(self._orders):
            self._orders.append(self._next_order(self._first_kept_epoch + len(self._orders)))
            if len(self._orders) > self.prompts_per_iteration // len(self.prompts) + 2:
                del self._orders[0]
                self._first_kept_epoch += 1
        return self._orders[epoch - self._first_kept_epoch]

    def _next_order(self, epoch: int) -> list[int]:
        count = len(self.prompts)
        order = list(range(count))
        random.Random(f"prompts {self.seed} {epoch}").shuffle(order)
        # The iteration under way when the epoch begins holds whole epochs and, before them, the end
        # of one. What it still needs comes first from the prompts outside that end.
        begin = epoch * count
        iteration_begin = begin // self.prompts_per_iteration * self.prompts_per_iteration
        first_epoch, offset = divmod(iteration_begin, count)
        if iteration_begin == begin or offset == 0:
            return order
        end = set(self._orders[first_epoch - self._first_kept_epoch][offset:])
        needed = iteration_begin + self.prompts_per_iteration - begin
        head = [index for index in order if index not in end][:needed]
        taken = set(head)
        return head + [index for index in order if index not in taken]
