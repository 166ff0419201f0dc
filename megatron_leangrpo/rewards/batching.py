# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Scores the requests of several clients on one thread, waiting ones of the same kind together."""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_leangrpo.rewards.base import Reward, RewardScores
from megatron_leangrpo.rewards.registry import check_scores
from megatron_leangrpo.rewards.wire import to_unit_range


class ExpiredError(RuntimeError):
    """A job waited for longer than its client does."""


@dataclass(eq=False)
class Job:
    """Images [n, 3, H, W] or videos [n, frames, 3, H, W] of one request, as decoded, and where
    their scores go."""

    reward: str
    images: Tensor
    prompts: Sequence[str]
    metadata: Sequence[dict[str, Any]]
    expires: float
    """By `time.monotonic`."""
    result: "Future[RewardScores]" = field(default_factory=Future)

    @property
    def pictures(self) -> int:
        """How many images are scored; a video is its frames."""
        return math.prod(self.images.shape[:-3])

    def goes_with(self, other: "Job") -> bool:
        """Whether both can be scored in one call."""
        return (self.reward, self.images.shape[1:]) == (other.reward, other.images.shape[1:])


class Batcher:
    """One thread that scores jobs in order of arrival, up to `max_batch` images in one call."""

    def __init__(self, rewards: Mapping[str, Reward], max_batch: int) -> None:
        self.rewards, self.max_batch = dict(rewards), max_batch
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; the caller bounds how many there are."""
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    def close(self) -> None:
        """Finish the batch in hand, cancel what waits and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        for job in self._waiting:
            job.result.cancel()

    def _run(self) -> None:
        while (jobs := self._next_batch()) is not None:
            live = [job for job in jobs if job.result.set_running_or_notify_cancel()]
            late = [job for job in live if job.expires < time.monotonic()]
            for job in late:
                job.result.set_exception(ExpiredError("waited for longer than its timeout"))
            in_time = [job for job in live if job not in late]
            if in_time:
                self._score(in_time)

    def _next_batch(self) -> list[Job] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            if self._closed:
                return None
            batch = [self._waiting.popleft()]
            size = batch[0].pictures
            for job in list(self._waiting):
                if job.goes_with(batch[0]) and size + job.pictures <= self.max_batch:
                    self._waiting.remove(job)
                    batch.append(job)
                    size += job.pictures
            return batch

    @torch.no_grad()
    def _score(self, jobs: list[Job]) -> None:
        name = jobs[0].reward
        prompts = [prompt for job in jobs for prompt in job.prompts]
        metadata = [item for job in jobs for item in job.metadata]
        try:
            images = torch.cat([to_unit_range(job.images) for job in jobs])
            scores = check_scores(name, self.rewards[name](images, prompts, metadata), prompts)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].result.set_exception(error)
                return
            # One by one, so that a bad request does not take its neighbours along.
            for job in jobs:
                self._score([job])
            return
        start = 0
        for job in jobs:
            rows = slice(start, start + len(job.images))
            start = rows.stop
            correct = None if scores.correct is None else scores.correct[rows]
            job.result.set_result(RewardScores(scores.scores[rows], correct))
