# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""A training run whose rewards come from a server is the run whose rewards are local."""

import json
from pathlib import Path

import pytest

for package in ("httpx", "tenacity", "uvicorn", "fastapi"):
    pytest.importorskip(package)

from megatron_leangrpo.rewards import make_reward  # noqa: E402
from megatron_leangrpo.rewards.ocr import INSTALL_LINE, ocr_available  # noqa: E402
from megatron_leangrpo.rewards.server import create_app  # noqa: E402
from tests.rewards.http_server import TOKEN, serve  # noqa: E402

SMALL = (
    "--grpo.iterations=2",
    "--grpo.prompts_per_iteration=2",
    "--grpo.group_size=3",
    "--evaluation.num_steps=2",
    "--evaluation.samples_per_prompt=1",
    "--evaluation.max_prompts=2",
    "--evaluation.interval=0",
    "--reward.weights={color_shape: 1.0, jpeg_compressibility: 0.1}",
)
# What depends on the clock or the machine's state, not on the rewards.
NOT_RESULTS = ("seconds", "time", "memory", "per_second", "bytes", "gib", "tflops")


def results(run: str) -> list[dict]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not any(n in key for n in NOT_RESULTS)}
        for line in lines
    ]


# Both rewards of the tiny FLUX at its own size: evaluation, five iterations, evaluation.
TWO = ("--grpo.iterations=5", "--evaluation.interval=5")


@pytest.mark.parametrize(
    ("recipe", "rewards", "options"),
    [
        ("flux_tiny_shapes", ("color_shape", "jpeg_compressibility"), SMALL),
        pytest.param(
            "flux_tiny_two",
            ("ocr_recognizer", "color"),
            TWO,
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(not ocr_available(), reason=INSTALL_LINE),
            ],
        ),
    ],
)
def test_a_remote_run_equals_the_local_one_in_every_metric(
    recipe, rewards, options, leangrpo, monkeypatch
):
    run = ("train", recipe, *options, "--checkpoint.interval=-1")
    assert leangrpo(*run, "--output=local").status == 0
    monkeypatch.setenv("LEANGRPO_REWARD_TOKEN", TOKEN)
    with serve(create_app({name: make_reward(name) for name in rewards}, TOKEN)) as url:
        remote = (
            f"--reward.remote.url={url}",
            "--reward.remote.names=[" + ", ".join(rewards) + "]",
        )
        outcome = leangrpo(*run, *remote, "--output=remote")
    assert outcome.status == 0, outcome.err
    assert results("remote") == results("local")
    assert any("grad" in key for key in results("local")[0])
