# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from megatron_leangrpo.build_tiny.rendering import shape_task
from megatron_leangrpo.conditioning import Prompt
from megatron_leangrpo.rewards import build_reward

TASK = shape_task()


@pytest.fixture(scope="module")
def reward():
    return build_reward({"color_shape": 1.0})


def test_clean_renderings_are_right_and_score_high(reward):
    indices = [n % len(TASK.prompts) for n in range(120)]
    images = TASK.render(indices, seed=3)
    result = reward(images, [TASK.prompts[i] for i in indices], [{}] * 120)
    assert result.correct.all()
    assert result.total.mean() > 0.9


def test_wrong_shape_or_color_scores_low(reward):
    images = TASK.render([TASK.prompts.index("a red circle")] * 3, seed=0)
    prompts = ["a red circle", "a red cross", "a blue circle"]
    result = reward(images, prompts, [{}] * 3)
    assert result.correct.tolist() == [True, False, False]
    assert result.total[0] > 0.7 and result.total[1] < 0.1 and result.total[2] < 0.1


def test_score_is_continuous_between_two_shapes(reward):
    circle, cross = TASK.render([0, 3], seed=1)
    weights = torch.linspace(0, 1, 401)[:, None, None, None]
    images = circle * (1 - weights) + cross * weights
    scores = reward(images, ["a red circle"] * 401, [{}] * 401).total
    # A step of 1/400 of the way never moves the score by a tenth of its range.
    assert scores.diff().abs().max() < 0.1
    assert scores[0] > 0.7 and scores[-1] < 0.1


def test_empty_picture_scores_nothing(reward):
    result = reward(torch.full((1, 3, 32, 32), 0.9), ["a red circle"], [{}])
    assert result.total.item() < 0.05 and not result.correct.any()


def test_score_does_not_depend_on_the_picture_size(reward):
    image = TASK.render([5], seed=2)
    large = torch.nn.functional.interpolate(image, scale_factor=4, mode="bilinear")
    prompts = [TASK.prompts[5]]
    small_score = reward(image, prompts, [{}]).total
    # Bilinear enlargement blurs the outline by a fraction of a pixel.
    torch.testing.assert_close(reward(large, prompts, [{}]).total, small_score, atol=0.05, rtol=0)


def test_metadata_names_color_and_shape_for_any_wording(reward):
    image = TASK.render([0], seed=0)
    assert reward(image, ["un cercle rouge"], [{"color": "red", "shape": "circle"}]).correct.all()


def test_prompts_outside_its_world_are_named_with_their_line(reward):
    prompts = [Prompt(0, "a red circle"), Prompt(4, "a brown circle"), Prompt(6, "red blue square")]
    with pytest.raises(ValueError, match=r"p\.txt:5: names 0 colors(.|\n)*p\.txt:7: names 2"):
        reward.validate(prompts, "p.txt")


def test_color_alone_needs_no_shape_and_judges_digits():
    reward = build_reward({"color": 1.0})
    prompts = ["the number 7"] * 2
    reward.validate([Prompt(0, prompts[0], {"color": "red"})], "prompts.jsonl")
    with pytest.raises(ValueError, match=r"reward 'color' cannot score(.|\n)*names 0 colors"):
        reward.validate([Prompt(0, prompts[0], {})], "prompts.jsonl")
    ink = torch.tensor([0.86, 0.13, 0.13])[:, None, None]
    image = torch.full((1, 3, 32, 32), 0.9)
    image[:, :, 8:24, 14:18] = ink
    result = reward(image.repeat(2, 1, 1, 1), prompts, [{"color": "red"}, {"color": "blue"}])
    assert result.correct.tolist() == [True, False]
    assert result.total[0] > 0.95 and result.total[1] < 0.05
