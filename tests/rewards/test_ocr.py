# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from megatron_leangrpo.build_tiny.rendering import digit_task
from megatron_leangrpo.conditioning import Prompt
from megatron_leangrpo.rewards import build_reward, make_reward
from megatron_leangrpo.rewards import ocr as ocr_module

needs_ocr = pytest.mark.skipif(not ocr_module.ocr_available(), reason=ocr_module.INSTALL_LINE)


@pytest.fixture(scope="module")
def recognizer():
    return make_reward("ocr_recognizer")


def text_image(text, width=160, height=48):
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (width, height), (240, 240, 240))
    font = ImageFont.load_default(28)
    ImageDraw.Draw(picture).text(
        (width / 2, height / 2), text, fill=(20, 20, 120), font=font, anchor="mm"
    )
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()[None] / 255


@needs_ocr
def test_recognizer_reads_clean_digits(recognizer):
    task = digit_task()
    indices = [n % 10 for n in range(40)]
    result = recognizer(task.render(indices, 5), [task.prompts[i] for i in indices],
                        [task.metadata[i] for i in indices])  # fmt: skip
    assert result.correct.float().mean() >= 0.95
    assert result.scores.mean() > 0.9


@needs_ocr
def test_recognizer_likelihood_is_low_for_another_digit(recognizer):
    image = digit_task().render([7], 0)
    scores = [recognizer(image, [f'"{d}"'], [{}]).scores.item() for d in "0123456789"]
    assert max(range(10), key=scores.__getitem__) == 7
    assert sum(scores) <= 1 + 1e-4


@needs_ocr
def test_recognizer_score_is_the_sum_over_ctc_paths(recognizer):
    """One character over T frames: the paths are blanks, a run of the character, blanks."""
    image = digit_task().render([3], 1)
    probabilities = recognizer.log_probabilities(image)[0].double().exp()
    blank, code = probabilities[:, 0], probabilities[:, recognizer._index["3"]]
    frames = len(blank)
    expected = sum(
        float(blank[:start].prod() * code[start:end].prod() * blank[end:].prod())
        for start in range(frames)
        for end in range(start + 1, frames + 1)
    )
    # ctc_loss works in float32 log space.
    assert math.isclose(recognizer(image, ['"3"'], [{}]).scores.item(), expected, rel_tol=1e-4)


@needs_ocr
def test_recognizer_reads_words_in_wide_pictures(recognizer):
    result = recognizer(text_image("HELLO"), ['a sign "HELLO"'], [{}])
    assert result.correct.all() and result.scores.item() > 0.5


@needs_ocr
def test_recognizer_has_frames_enough_for_long_targets_on_square_pictures(recognizer):
    result = recognizer(torch.rand(1, 3, 32, 32), ['"ABCDEFGHIJKL"'], [{}])
    assert torch.isfinite(result.scores).all()


@needs_ocr
def test_batch_equals_single_images(recognizer):
    task = digit_task()
    images, prompts = task.render(list(range(6)), 2), ['"1"', '"22"', '"3"', '"4"', '"55"', '"6"']
    together = recognizer(images, prompts, [{}] * 6).scores
    # Padding to the longest target changes what the network sees to the right of the digit.
    alone = torch.cat(
        [recognizer(images[i : i + 1], prompts[i : i + 1], [{}]).scores for i in (0, 2)]
    )
    torch.testing.assert_close(together[[0, 2]], alone, atol=1e-4, rtol=1e-3)


@needs_ocr
def test_detector_reward_scores_by_the_string_rule():
    reward = build_reward({"ocr": 1.0})
    images = torch.cat([text_image("OPEN", 256, 256), torch.full((1, 3, 256, 256), 0.9)])
    result = reward(images, ['a sign that says "OPEN"'] * 2, [{}] * 2)
    assert result.total.tolist() == [1.0, 0.0]
    assert result.correct.tolist() == [True, False]


@needs_ocr
@pytest.mark.parametrize("name", ["ocr", "ocr_recognizer"])
def test_bad_prompts_are_found_before_the_first_rollout(name):
    prompts = [Prompt(0, 'says "OPEN"'), Prompt(3, "says nothing"), Prompt(5, 'says ""')]
    with pytest.raises(ValueError, match=r"p\.txt:4: no text(.|\n)*p\.txt:6: the double quotes"):
        build_reward({name: 1.0}).validate(prompts, "p.txt")


@needs_ocr
def test_characters_that_the_recognizer_does_not_know_are_named(recognizer):
    with pytest.raises(ValueError, match=r"p\.txt:1: the recogniser does not know"):
        recognizer.validate([Prompt(0, '"\ue000"')], "p.txt")


@pytest.mark.parametrize("name", ["ocr", "ocr_recognizer"])
def test_missing_extra_is_refused_with_the_install_line(name, monkeypatch):
    monkeypatch.setattr(ocr_module.importlib.util, "find_spec", lambda name: None)
    assert not ocr_module.ocr_available()
    with pytest.raises(ValueError, match=r"pip install 'megatron_leangrpo\[ocr\]'"):
        make_reward(name)


def test_a_video_is_read_every_fourth_frame_and_only_frames_with_something_right_count():
    reward = object.__new__(ocr_module.VideoOcrReward)
    texts = {0: "STOP", 4: "", 8: "STOPS", 12: "STO"}
    reward.read = lambda frame: texts[int(frame[0, 0, 0])]
    video = torch.arange(13.0)[None, :, None, None, None].expand(1, -1, 3, 2, 2)
    result = reward(video, ['a sign "stop"'], [{}])
    # A letter more costs as much as one less; nothing read leaves the frame out.
    assert result.scores.tolist() == [pytest.approx((1 + 0.75 + 0.75) / 3)]
    assert result.correct.tolist() == [False]
    texts.update({4: "S t o p", 8: "stop", 12: "STOP"})
    assert reward(video, ['a sign "stop"'], [{}]).correct.tolist() == [True]
    texts.update(dict.fromkeys(texts, ""))
    assert reward(video, ['a sign "stop"'], [{}]).scores.tolist() == [0.0]
