# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from megatron_leangrpo.rewards import (
    RewardError,
    RewardScores,
    WeightedReward,
    build_reward,
    make_reward,
    register_reward,
    reward_names,
)
from megatron_leangrpo.rewards import registry as registry_module

IMAGES = torch.zeros(3, 3, 8, 8)
PROMPTS = ["one", "two", "three"]
METADATA = [{}, {}, {}]


def score(function, **options):
    reward = WeightedReward({"mine": function}, {"mine": 1.0}, **options)
    return reward(IMAGES, PROMPTS, METADATA)


def test_built_in_rewards_are_known_by_name():
    assert set(reward_names()) >= {
        "jpeg_compressibility",
        "jpeg_incompressibility",
        "ocr",
        "ocr_recognizer",
        "color_shape",
    }


def test_unknown_name_is_refused_with_the_closest():
    with pytest.raises(ValueError, match=r"unknown reward 'ocr_recogniser'.*'ocr_recognizer'"):
        build_reward({"ocr_recogniser": 1.0})


@pytest.mark.parametrize("weights", [{}, {"color_shape": float("nan")}, {"color_shape": 0.0}])
def test_useless_weights_are_refused(weights):
    with pytest.raises(ValueError, match=r"reward\.weights"):
        build_reward(weights)


def test_registered_reward_is_built_and_cannot_be_registered_twice(monkeypatch):
    monkeypatch.setattr(registry_module, "_FACTORIES", {})
    monkeypatch.setattr(registry_module, "_BUILT_IN", ())

    @register_reward("brightness")
    class Brightness:
        def __call__(self, images, prompts, metadata):
            return images.mean((1, 2, 3))

    result = build_reward({"brightness": 2.0})(IMAGES + 0.25, PROMPTS, METADATA)
    assert result.total.dtype == torch.float64
    torch.testing.assert_close(result.total, torch.full((3,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(result.parts["brightness"], result.total / 2)
    assert result.correct is None
    with pytest.raises(ValueError, match="twice"):
        register_reward("brightness")(Brightness)


def test_reward_outside_the_package_is_imported_by_path():
    reward = make_reward("megatron_leangrpo.rewards.jpeg:JpegCompressibility")
    assert reward(IMAGES, PROMPTS, METADATA).shape == (3,)
    with pytest.raises(ValueError, match="no_such_module"):
        make_reward("no_such_module:Reward")


OWN_FILE = """
import dataclasses

@dataclasses.dataclass
class Scaled:
    factor: float = 2.0
    def __call__(self, images, prompts, metadata):
        return self.factor * score(images, prompts, metadata)

def score(images, prompts, metadata):
    return images.mean((1, 2, 3))
"""


def test_one_python_file_is_a_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN_FILE)
    weights = {"own.py:score": 1.0, f"{tmp_path}/own.py:Scaled": 0.5}
    total = build_reward(weights)(IMAGES, PROMPTS, METADATA).total
    torch.testing.assert_close(total, 2 * IMAGES.mean((1, 2, 3)).double())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.py:score", "FileNotFoundError"),
        ("broken.py:score", "SyntaxError"),
        ("empty.py:score", "AttributeError.*score"),
    ],
)
def test_a_file_without_the_reward_is_named(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def score(:")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match=f"reward '{name}' cannot be imported: {message}"):
        make_reward(name)


def test_verdicts_are_combined_with_and():
    parts = {
        "a": lambda *_: RewardScores(torch.ones(3), torch.tensor([True, True, False])),
        "b": lambda *_: RewardScores(torch.ones(3), torch.tensor([True, False, False])),
        "c": lambda *_: torch.ones(3),
    }
    result = WeightedReward(parts, {"a": 1.0, "b": 0.5, "c": -1.0})(IMAGES, PROMPTS, METADATA)
    assert result.correct.tolist() == [True, False, False]
    assert result.total.tolist() == [0.5] * 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_score_raises_with_name_prompt_and_value(bad):
    with pytest.raises(RewardError, match=f"'mine' gave {bad} for prompt 'two'") as caught:
        score(lambda *_: torch.tensor([1.0, bad, 1.0]))
    assert caught.value.name == "mine" and caught.value.prompt == "two"


def test_wrong_number_of_scores_raises():
    with pytest.raises(RewardError, match="3 images"):
        score(lambda *_: torch.zeros(2))


def test_exception_inside_a_reward_raises_with_its_name():
    def broken(images, prompts, metadata):
        raise RuntimeError("server is gone")

    with pytest.raises(RewardError, match="'mine' gave RuntimeError: server is gone"):
        score(broken)


def test_failed_sample_does_not_take_its_neighbours_along():
    def breaks_on_two(images, prompts, metadata):
        if "two" in prompts:
            raise RuntimeError("cannot score this")
        return torch.ones(len(prompts))

    result = score(breaks_on_two, failure_policy="drop_group")
    assert result.total.isnan().tolist() == [False, True, False]
    assert [failure.prompt for failure in result.failures] == ["two"]
