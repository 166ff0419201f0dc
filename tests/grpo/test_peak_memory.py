# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Peak activation bytes of each schedule, from the allocator's events, never from formulas."""

from __future__ import annotations

import functools

import pytest

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.memory import peak_allocated_bytes
from tests.grpo import tiny


@pytest.fixture(scope="module")
def peak(tmp_path_factory):
    """Peak of a second iteration of one trajectory; a first one allocates what stays."""
    prompts = tiny.write_prompts(tmp_path_factory.mktemp("prompts"))

    @functools.cache
    def measured(schedule: str, trained_steps: int, family: str = "flux") -> int:
        sections = {
            "model": {"max_text_tokens": 32},
            # One that looks at a corner, so that the peak is the model's.
            "reward": {"weights": {tiny.CENTRE: 1.0}},
            "sampling": {"num_steps": trained_steps + 1, "height": 256, "width": 256},
            "grpo": {
                "prompts_per_iteration": 1,
                "group_size": 2,
                "micro_batch_size": 1,
                "jagg_window": 3,
                "jagg_frac": 1.0,
                "jagg_on": schedule.removeprefix("jagg on "),
            },
        }
        video = {"height": 128, "width": 128, "num_frames": 13, "cfg_scale": 2.0}
        wan = tiny.merged(tiny.WAN, {"sampling": video}) if family == "wan" else {}
        experiment = tiny.start(tiny.tiny_config(prompts, **tiny.merged(sections, wan)))
        runner = experiment.runner("jagg" if schedule.startswith("jagg") else schedule)
        batch = experiment.sampler.batch(0)
        runner.run(0, batch)
        return peak_allocated_bytes(lambda: runner.run(0, batch))

    yield measured
    platform.destroy_distributed()


@pytest.mark.parametrize("trained_steps", [3, 9])
def test_reweight_needs_the_activations_of_one_replayed_step(peak, trained_steps):
    assert peak("reweight", trained_steps) <= 1.1 * peak("replay", trained_steps)


@pytest.mark.parametrize("schedule", ["replay", "reweight", "jagg on reweight"])
def test_all_that_grows_with_the_trained_steps_is_latents_and_velocities(peak, schedule):
    growth = peak(schedule, 9) - peak(schedule, 3)
    # Two trajectories, six more steps, a latent and a velocity of 256 tokens x 16 float32.
    data = 2 * 6 * 2 * 256 * 16 * 4
    assert growth == pytest.approx(data, rel=0.01)


@pytest.mark.parametrize("schedule", ["replay", "reweight"])
def test_so_it_is_for_guided_videos(peak, schedule):
    growth = peak(schedule, 9, "wan") - peak(schedule, 3, "wan")
    # A latent and a velocity of 4 x 8 x 8 tokens x 16 float32.
    assert growth == pytest.approx(2 * 6 * 2 * 256 * 16 * 4, rel=0.01)
    assert peak("retain", 9, "wan") > 5 * peak(schedule, 9, "wan")


def test_retain_is_linear_in_the_number_of_trained_steps(peak):
    three, six, nine = (peak("retain", steps) for steps in (3, 6, 9))
    assert six - three == pytest.approx(nine - six, rel=0.02)
    # Both trajectories of the group are in flight; a replayed step has transient memory besides.
    assert six - three > 3 * 2 * 0.5 * peak("replay", 3)


def test_jagg_keeps_two_steps_of_a_window_of_three(peak):
    """On retain those of all windows, on reweight those of one window of one trajectory."""
    retained_step = (peak("retain", 9) - peak("retain", 3)) / 6
    jagg_window = (peak("jagg on retain", 9) - peak("jagg on retain", 3)) / 2
    assert jagg_window == pytest.approx(2 * retained_step, rel=0.05)
    assert peak("jagg on reweight", 9) <= 1.1 * (peak("reweight", 9) + retained_step / 2)
