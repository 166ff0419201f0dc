# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""GenEval: the published scores of given objects, and the whole reward on tiny random models."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import (
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
    Mask2FormerConfig,
    SwinConfig,
)

from megatron_leangrpo.conditioning.prompts import Prompt, load_prompts
from megatron_leangrpo.rewards import geneval_detector as detector
from megatron_leangrpo.rewards import geneval_rules as rules
from megatron_leangrpo.rewards import make_reward
from megatron_leangrpo.rewards.base import ModelSettings
from tests.rewards.test_model_rewards import TOKENIZER, clip_folder, pictures, pil  # noqa: F401

ASSETS = TOKENIZER.parents[1]


def seen(*boxes, color="red"):
    """Objects of a class, found with falling scores; the colour stands in for CLIP."""
    scores = [0.9 - i / 100 for i in range(len(boxes))]
    found = zip(scores, boxes, strict=True)
    return [(color, rules.Detection(score, box, torch.ones(1))) for score, box in found]


def judged(objects, **metadata):
    """(partial score, benchmark's verdict) of objects {class: seen(...)}."""
    colors = {id(found): color for each in objects.values() for color, found in each}
    detections = {name: [found for _, found in each] for name, each in objects.items()}
    task = rules.parse_task(metadata)
    arguments = (task, detections, lambda _, some: [colors[id(found)] for found in some])
    return rules.partial_score(*arguments), rules.benchmark_correct(*arguments)


LEFT, RIGHT, ABOVE = (0, 40, 20, 60), (80, 40, 100, 60), (40, 0, 60, 20)
MIDDLE, TOUCHING = (40, 40, 60, 60), (44, 40, 64, 60)
CUP, TWO_CUPS = {"class": "cup", "count": 1}, {"class": "cup", "count": 2}
RED_CUP = CUP | {"color": "red"}


def dog(relation):
    return {"class": "dog", "count": 1, "position": [relation, 0]}


# Scores by hand from the published evaluate_reward, verdicts from the published evaluate.
CASES = {
    "nothing": ({}, [CUP], [], 0.0, False),
    "one": ({"cup": seen(LEFT)}, [CUP], [], 1.0, True),
    "one too many": ({"cup": seen(LEFT, RIGHT)}, [CUP], [], 0.0, True),
    "three for one": ({"cup": seen(LEFT, RIGHT, ABOVE)}, [CUP], [], -1.0, True),
    "one of two": ({"cup": seen(LEFT)}, [TWO_CUPS], [], 0.5, False),
    "three of two": ({"cup": seen(LEFT, RIGHT, ABOVE)}, [TWO_CUPS], [], 0.5, True),
    "three excluded": (
        {"cup": seen(LEFT, RIGHT, ABOVE)}, [TWO_CUPS], [{"class": "cup", "count": 3}], 0.5, False,
    ),
    "one of two kinds": ({"cup": seen(LEFT)}, [CUP, {"class": "dog", "count": 1}], [], 0.5, False),
    "right colour": ({"cup": seen(LEFT)}, [RED_CUP], [], 1.0, True),
    "wrong colour": ({"cup": seen(LEFT, color="blue")}, [RED_CUP], [], 0.5, False),
    "no cup to be red": ({}, [RED_CUP], [], 0.0, False),
    "two cups, one to be red": ({"cup": seen(LEFT, RIGHT)}, [RED_CUP], [], 0.0, True),
    "one of two red": (
        {"cup": seen(LEFT) + seen(RIGHT, color="blue")},
        [TWO_CUPS | {"color": "red"}], [], (1 + 0.5) / 2, False,
    ),
    "left": ({"cup": seen(MIDDLE), "dog": seen(LEFT)}, [CUP, dog("left of")], [], 1.0, True),
    "not left": ({"cup": seen(MIDDLE), "dog": seen(RIGHT)}, [CUP, dog("left of")], [], 0.75, False),
    "above": ({"cup": seen(MIDDLE), "dog": seen(ABOVE)}, [CUP, dog("above")], [], 1.0, True),
    "nowhere": (
        {"cup": seen(MIDDLE), "dog": seen(TOUCHING)}, [CUP, dog("right of")], [], 0.75, False,
    ),
    "left of nothing": ({"dog": seen(LEFT)}, [CUP, dog("left of")], [], 1 / 3, False),
    "no dog": ({"cup": seen(LEFT)}, [CUP, dog("left of")], [], 1 / 3, False),
    # The benchmark looks at the surest cup alone; the reward has no pair of one cup and one dog.
    "two cups": (
        {"cup": seen(MIDDLE, LEFT), "dog": seen(LEFT)}, [CUP, dog("left of")], [],
        (0 + 1 + 0) / 3, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_given_objects_score_as_published(case):
    objects, include, exclude, score, correct = CASES[case]
    found = judged(objects, tag="counting", include=include, exclude=exclude)
    assert found == (pytest.approx(score), correct)


def published_relations(box, target):
    """GenEval's relative_position, in arrays."""
    boxes = np.array([box, target], dtype=float).reshape(2, 2, 2)
    center, target_center = boxes.mean(axis=1)
    sides = np.abs(boxes[:, 1] - boxes[:, 0]).sum(0)
    offset = center - target_center
    revised = np.maximum(np.abs(offset) - 0.1 * sides, 0) * np.sign(offset)
    if (np.abs(revised) < 1e-3).all():
        return set()
    x, y = revised / np.linalg.norm(offset)
    names = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {name for name, holds in names.items() if holds}


def test_places_are_the_published_ones():
    generator = np.random.default_rng(0)
    starts, sides = generator.integers(0, 60, (1000, 2, 2)), generator.integers(1, 40, (1000, 2, 2))
    pairs = np.concatenate([starts, starts + sides], 2).astype(float).tolist()
    ours = [rules.relations(tuple(box), tuple(target)) for box, target in pairs]
    assert ours == [published_relations(box, target) for box, target in pairs]
    # All nine kinds of place occur.
    assert len(set(map(frozenset, ours))) == 9


BAD = {
    "no tag": ({"include": [CUP]}, '"tag" is None'),
    "other tag": ({"tag": "size", "include": [CUP]}, "\"tag\" is 'size'"),
    "nothing asked": ({"tag": "colors"}, '"include" is missing'),
    "no list": ({"tag": "colors", "include": CUP}, '"include" must be a list'),
    "no object": ({"tag": "colors", "include": ["cup"]}, r"include\[0\] must be an object"),
    "class": ({"tag": "colors", "include": [CUP | {"class": "mouse"}]}, "\"class\" is 'mouse'"),
    "count": ({"tag": "colors", "include": [CUP | {"count": 0}]}, '"count" is 0'),
    "colour": ({"tag": "colors", "include": [CUP | {"color": "grey"}]}, "\"color\" is 'grey'"),
    "relation": ({"tag": "position", "include": [CUP, dog("behind")]}, r"include\[1\].*behind"),
    "itself": (
        {"tag": "position", "include": [CUP | {"position": ["above", 0]}]},
        r"include\[0\].*earlier",
    ),
    "exclude": ({"tag": "counting", "include": [CUP], "exclude": [{}]}, r"exclude\[0\].*None"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_metadata_that_geneval_cannot_judge_are_named_with_file_and_line(case, geneval_folder):
    metadata, message = BAD[case]
    good = {"tag": "single_object", "include": [CUP]}
    prompts = [Prompt(0, "a photo of a cup", good), Prompt(6, "a cup", metadata)]
    with pytest.raises(ValueError, match=f"(?s)'geneval' cannot.*geneval.jsonl:7: .*{message}"):
        reward_of(geneval_folder).validate(prompts, "geneval.jsonl")


def test_the_packaged_prompts_can_all_be_judged():
    prompts = load_prompts(ASSETS / "prompts/geneval.jsonl")
    assert {rules.parse_task(prompt.metadata).tag for prompt in prompts} == {*rules.TAGS[1:]}


def test_a_table_with_null_for_what_a_row_lacks_is_read():
    row = CUP | {"color": None, "position": None}
    task = rules.parse_task({"tag": "colors", "include": [row], "exclude": None})
    assert task == rules.Task("colors", (rules.Clause("cup", 1),))


@pytest.fixture(scope="module")
def geneval_folder(tmp_path_factory, clip_folder):  # noqa: F811
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("geneval")
    shutil.copytree(clip_folder, folder / "clip")
    swin = SwinConfig(
        image_size=32,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    published = {name: old for old, name in detector.RENAMED.items()}
    config = Mask2FormerConfig(
        backbone_config=swin,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=12,
        id2label={i: published.get(name, name) for i, name in enumerate(rules.OBJECTS)},
    )
    model = detector._detector_class()(config)
    # A random detector is sure of nothing; this one finds some five objects in a picture.
    nn.init.normal_(model.class_predictor.weight, std=1.5)
    model.save_pretrained(folder / "detector")
    file = folder / "detector" / "model.safetensors"
    # The loss's weights, which the published file holds too.
    save_file(load_file(file) | {"criterion.empty_weight": torch.ones(81)}, file, {"format": "pt"})
    return folder


def reward_of(folder, **options):
    settings = ModelSettings(paths={"geneval": str(folder)}, **{"batch_size": 2} | options)
    return make_reward("geneval", settings)


# Square; then wide, tall, and so wide that the long side decides.
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((64, 64), (800, 800)),
        ((48, 60), (800, 1000)),
        ((61, 33), (1333, 721)),
        ((16, 64), (333, 1333)),
    ],
)
def test_the_detector_sees_pictures_as_mmdet_prepares_them(shape, size):
    images = pictures(shape, n=2)
    wanted = torch.zeros(2, 3, *(math.ceil(side / 32) * 32 for side in size))
    mean, std = np.array([123.675, 116.28, 103.53]), np.array([58.395, 57.12, 57.375])
    for index, picture in enumerate(pil(images)):
        resized = picture.resize(size[::-1], Image.Resampling.BILINEAR)
        pixels = torch.tensor((np.array(resized) - mean) / std).permute(2, 0, 1)
        wanted[index, :, : size[0], : size[1]] = pixels
    # One of 255 levels: Pillow rounds once a direction.
    torch.testing.assert_close(detector.detector_pixels(images), wanted, atol=1.1 / 57, rtol=0)


def published_objects(classes, masks, names, threshold):
    """mmdet's instance_postprocess and GenEval's selection, in arrays and loops."""
    likely = np.exp(classes - classes.max(1, keepdims=True))
    likely = (likely / likely.sum(1, keepdims=True))[:, :-1]
    flat = likely.ravel()
    found = {}
    for pick in np.argsort(flat)[::-1][:100]:
        query, label = np.unravel_index(pick, likely.shape)
        inside = masks[query] > 0
        sure = (1 / (1 + np.exp(-masks[query])) * inside).sum() / (inside.sum() + 1e-6)
        score = flat[pick] * sure
        if score > threshold:
            rows, columns = inside.any(1).nonzero()[0], inside.any(0).nonzero()[0]
            box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
            found.setdefault(names[label], []).append((score, box, inside))
    return {name: sorted(each, key=lambda one: -one[0])[:16] for name, each in found.items()}


def test_objects_are_chosen_as_published():
    generator = np.random.default_rng(1)
    names = ["cup", "dog", "cat"]
    classes = generator.normal(size=(60, 4)) * 3
    masks = generator.normal(size=(60, 9, 7)) - 1.5
    masks[3] = -1
    wanted = published_objects(classes, masks, names, 0.3)
    found = detector.choose(torch.tensor(classes), torch.tensor(masks), names, 0.3)
    assert found.keys() == wanted.keys() and max(map(len, found.values())) > 8
    for name, each in wanted.items():
        assert [one.score for one in found[name]] == pytest.approx([score for score, _, _ in each])
        assert [one.box for one in found[name]] == [box for _, box, _ in each]
        assert all(
            np.array_equal(a.mask, b) for a, (_, _, b) in zip(found[name], each, strict=True)
        )


def test_no_more_than_sixteen_of_a_class_are_found():
    classes = torch.zeros(40, 2)
    classes[:, 0] = torch.linspace(3, 5, 40)
    found = detector.choose(classes, torch.ones(40, 2, 2), ["cup"], 0.3)["cup"]
    assert len(found) == 16 and found[0].score == max(one.score for one in found)


def published_color(folder, image, box, mask, name):
    """GenEval's colour of an object: Pillow's crop, and CLIP_benchmark's zero-shot classifier."""
    model = CLIPModel.from_pretrained(folder / "clip").eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder / "clip")
    blank = Image.new("RGB", image.size, color="#999")
    crop = Image.composite(image, blank, Image.fromarray(mask)).crop(box)
    size = {"shortest_edge": 32}
    processor = CLIPImageProcessorPil(size=size, crop_size={"height": 32, "width": 32})
    with torch.no_grad():
        weights = []
        for color in rules.COLORS:
            texts = [f"a photo of a {color} {name}", f"a photo of a {color}-colored {name}",
                     f"a photo of a {color} object"]  # fmt: skip
            tokens = tokenizer(
                texts, padding="max_length", truncation=True, max_length=24, return_tensors="pt"
            )
            features = model.get_text_features(**tokens).pooler_output
            mean = functional.normalize(features, dim=-1).mean(0)
            weights.append(mean / mean.norm())
        pixels = processor(images=crop, return_tensors="pt")["pixel_values"]
        picture = functional.normalize(model.get_image_features(pixel_values=pixels).pooler_output)
        logits = 100 * picture @ torch.stack(weights, 1)
    return rules.COLORS[logits.argmax(1).item()]


def test_the_whole_reward_follows_the_published_steps(geneval_folder, monkeypatch):
    monkeypatch.setattr(detector, "SHORT_SIDE", 64)
    images = pictures((40, 52), n=4)
    reward = reward_of(geneval_folder)
    # What the published steps find, by another path from the detector's outputs.
    model = detector._detector_class().from_pretrained(geneval_folder / "detector").eval()
    objects = []
    for image in images:
        pixels = detector.detector_pixels(image[None])
        with torch.no_grad():
            classes, masks = model(pixels)
        masks = functional.interpolate(masks, pixels.shape[-2:], mode="bilinear")
        masks = functional.interpolate(masks[..., :64, :83], (40, 52), mode="bilinear")[0]
        objects.append(
            published_objects(classes[0].numpy(), masks.numpy(), reward._detector.names, 0.3)
        )
    assert all(objects)
    metadata, expected = [], []
    for image, found in zip(pil(images), objects, strict=True):
        name, each = next(iter(found.items()))
        colors = [published_color(geneval_folder, image, box, mask, name) for _, box, mask in each]
        clause = {"class": name, "count": len(each), "color": colors[0]}
        metadata.append({"tag": "colors", "include": [clause]})
        expected.append((1 + colors.count(colors[0]) / len(each)) / 2)
    result = reward(images, ["p"] * 4, metadata)
    assert result.scores.tolist() == pytest.approx(expected)
    assert result.correct.tolist() == [score == 1 for score in expected]
    assert reward(images[1:2], ["p"], metadata[1:2]).scores[0] == result.scores[1]


def test_counting_wants_surer_objects(geneval_folder, monkeypatch):
    asked = []
    reward = reward_of(geneval_folder)
    monkeypatch.setattr(
        reward._detector, "detect", lambda images, sure: asked.append(sure) or [{}] * len(images)
    )
    metadata = [{"tag": tag, "include": [CUP]} for tag in ("counting", "colors")]
    reward(pictures((8, 8), n=2), ["p"] * 2, metadata)
    assert asked == [[0.9, 0.3]]


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def drop(file, name):
    save_file({n: t for n, t in load_file(file).items() if n != name}, file, {"format": "pt"})


BROKEN = {
    "no detector": (lambda f: shutil.rmtree(f / "detector"), "detector/config.json"),
    "no clip": (lambda f: shutil.rmtree(f / "clip"), "clip/config.json"),
    "no weights": (lambda f: (f / "detector/model.safetensors").unlink(), "model.safetensors"),
    "other model": (
        lambda f: change(f / "detector/config.json", model_type="detr"),
        "'detr', not 'mask2former'",
    ),
    "panoptic": (
        lambda f: change(f / "detector/config.json", id2label={"0": "person", "1": "sky"}),
        "other classes than COCO's 80",
    ),
    "cut": (
        lambda f: (f / "detector/model.safetensors").write_bytes(b"12345678"),
        "cannot be read",
    ),
    "a tensor missing": (
        lambda f: drop(f / "detector/model.safetensors", "class_predictor.bias"),
        "no tensor class_predictor.bias",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_missing_or_wrong_weights_are_named_before_the_run(broken, geneval_folder, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(geneval_folder, folder)
    breaks, message = BROKEN[broken]
    breaks(folder)
    with pytest.raises(ValueError, match=f"reward 'geneval'.*{message}"):
        reward_of(folder)
