# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Rewards with weights, against the published formulas on tiny random models of the same kind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import (
    BertTokenizer,
    BlipTextConfig,
    BlipTextModel,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
)

import megatron_leangrpo
from megatron_leangrpo.config import RewardConfig
from megatron_leangrpo.grpo.run_reward import build_run_reward
from megatron_leangrpo.rewards import make_reward
from megatron_leangrpo.rewards.base import ModelSettings

TOKENIZER = Path(megatron_leangrpo.__file__).parent / "assets/flux_digits/tokenizer"
CLIP_REWARDS = ["aesthetic", "clip_score", "hpsv2", "pickscore"]
SIZE = 32
PROMPTS = ["a red circle", "a blue square and more", "7", "a picture of a green triangle", "x"]
METADATA = [{}] * 5
HEAD = "sac+logos+ava1-l14-linearMSE"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "circle", "square"]
MEAN = torch.tensor((0.48145466, 0.4578275, 0.40821073))[:, None, None]
STD = torch.tensor((0.26862954, 0.26130258, 0.27577711))[:, None, None]
# Wide, tall, smaller than the model's picture, and exactly of its size.
SHAPES = [(40, 57), (61, 33), (20, 24), (SIZE, SIZE)]


def pictures(shape, n=5):
    """Smooth random pictures, so that resampling matters little and rounding stays visible."""
    coarse = torch.rand(n, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return functional.interpolate(coarse, shape, mode="bilinear").clamp(0, 1)


def pil(images):
    pixels = (images * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(picture) for picture in pixels]


def head():
    layers = [(SIZE, 1024), None, (1024, 128), None, (128, 64), None, (64, 16), (16, 1)]
    made = nn.Sequential(*(nn.Linear(*pair) if pair else nn.Dropout(0.2) for pair in layers))
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    return made.eval()


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("clip")
    tokenizer = CLIPTokenizer.from_pretrained(TOKENIZER)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={
            **tower,
            "num_hidden_layers": 2,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 24,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={**tower, "num_hidden_layers": 2, "image_size": SIZE, "patch_size": 8},
        projection_dim=SIZE,
        logit_scale_init_value=4.6,
    )
    model = CLIPModel(config)
    for parameter in model.parameters():
        if parameter.ndim:
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(
        {f"layers.{k}": v for k, v in head().state_dict().items()}, folder / f"{HEAD}.safetensors"
    )
    return folder


def settings(name, folder, **options):
    return ModelSettings(paths={name: str(folder)}, **{"batch_size": 2} | options)


def embeddings(folder, pixels, prompts=PROMPTS):
    """Unit picture and text vectors of transformers' model, and its logit scale."""
    model = CLIPModel.from_pretrained(folder).eval()
    tokens = CLIPTokenizer.from_pretrained(folder)(
        prompts, padding=True, truncation=True, max_length=24, return_tensors="pt"
    )
    with torch.no_grad():
        picture = model.get_image_features(pixel_values=pixels).pooler_output
        text = model.get_text_features(**tokens).pooler_output
    norm = torch.linalg.vector_norm
    picture = picture / norm(picture, dim=-1, keepdim=True)
    return picture, text / norm(text, dim=-1, keepdim=True), model.logit_scale.exp().item()


def processed(images):
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    )
    return processor(images=pil(images), return_tensors="pt")["pixel_values"]


def upstream_pickscore(folder, images):
    picture, text, scale = embeddings(folder, processed(images))
    return (scale * (text @ picture.T)).diag() / 26


def upstream_clip_score(folder, images):
    height, width = images.shape[-2:]
    if min(height, width) != SIZE:
        if height <= width:
            size = (SIZE, int(SIZE * width / height))
        else:
            size = (int(SIZE * height / width), SIZE)
        images = functional.interpolate(
            images, size, mode="bilinear", align_corners=False, antialias=True
        )
    top, left = (round((side - SIZE) / 2.0) for side in images.shape[-2:])
    pixels = (images[..., top : top + SIZE, left : left + SIZE] - MEAN) / STD
    tokens = CLIPTokenizer.from_pretrained(folder)(
        PROMPTS, padding="max_length", truncation=True, max_length=24, return_tensors="pt"
    )
    model = CLIPModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(pixel_values=pixels, **tokens).logits_per_image.diagonal() / 30


def upstream_hpsv2(folder, images):
    images = (images * 255).round() / 255
    height, width = images.shape[-2:]
    scale = SIZE / float(max(height, width))
    size = tuple(round(side * scale) for side in (height, width))
    if scale != 1.0:
        images = functional.interpolate(
            images, size, mode="bicubic", align_corners=False, antialias=True
        )
    square = torch.zeros(len(images), 3, SIZE, SIZE)
    top, left = (SIZE - size[0]) // 2, (SIZE - size[1]) // 2
    square[..., top : top + size[0], left : left + size[1]] = images
    picture, text, _ = embeddings(folder, (square - MEAN) / STD)
    return torch.diagonal(picture @ text.T)


def upstream_aesthetic(folder, images):
    picture, _, _ = embeddings(folder, processed(images))
    stored = load_file(folder / f"{HEAD}.safetensors")
    for layer in (0, 2, 4, 6, 7):
        weight, bias = stored[f"layers.{layer}.weight"], stored[f"layers.{layer}.bias"]
        picture = functional.linear(picture, weight, bias)
    return picture.squeeze(1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CLIP_REWARDS)
def test_clip_rewards_follow_the_published_formula(name, shape, clip_folder):
    images = pictures(shape)
    found = make_reward(name, settings(name, clip_folder))(images, PROMPTS, METADATA)
    expected = globals()[f"upstream_{name}"](clip_folder, images)
    torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=1e-5)
    # Not a formula that gives the same for every picture.
    assert expected.std() > 1e-3


@pytest.mark.parametrize("name", CLIP_REWARDS)
def test_scores_do_not_depend_on_the_neighbours_of_an_image(name, clip_folder):
    images = pictures((40, 57))
    together = make_reward(name, settings(name, clip_folder, batch_size=5))
    scores = together(images, PROMPTS, METADATA)
    alone = torch.cat([together(images[i : i + 1], PROMPTS[i : i + 1], [{}]) for i in range(5)])
    # float32 products of other shapes round differently, and the logit scale is 100.
    torch.testing.assert_close(scores, alone, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("name", CLIP_REWARDS)
def test_rewards_that_say_that_they_round_pixels_do(name, clip_folder):
    reward = make_reward(name, settings(name, clip_folder))
    images = pictures((40, 57))
    rounded = (images * 255).round() / 255
    same = torch.equal(reward(images, PROMPTS, METADATA), reward(rounded, PROMPTS, METADATA))
    assert same == getattr(reward, "rounds_pixels", False)


def test_weights_are_read_when_first_needed_and_wait_in_host_memory(clip_folder, monkeypatch):
    from megatron_leangrpo.rewards import clip

    loaded, moves = [], []
    load = clip.load_clip
    monkeypatch.setattr(clip, "load_clip", lambda folder: loaded.append(folder) or load(folder))
    reward = make_reward("pickscore", settings("pickscore", clip_folder, offload=True))
    assert loaded == []
    move = CLIPModel.to
    monkeypatch.setattr(
        CLIPModel, "to", lambda m, device: moves.append(str(device)) or move(m, device)
    )
    for _ in range(2):
        reward(pictures((40, 57)), PROMPTS, METADATA)
    assert loaded == [clip_folder]
    # To the device and back to the host, each time.
    assert moves == ["cpu", "cpu"] * 2


def blip_tensors(width=128, depth=2, text_width=32, patch=8):
    """Random weights under the names of ImageReward.pt."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, (SIZE // patch) ** 2 + 1, width),
        "patch_embed.proj.weight": (width, 3, patch, patch),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    linears = {"attn.qkv": (3, 1), "attn.proj": (1, 1), "mlp.fc1": (2, 1), "mlp.fc2": (1, 2)}
    for block in range(depth):
        for norm in ("norm1", "norm2"):
            shapes |= {f"blocks.{block}.{norm}.{kind}": (width,) for kind in ("weight", "bias")}
        for name, (rows, columns) in linears.items():
            shapes[f"blocks.{block}.{name}.weight"] = (rows * width, columns * width)
            shapes[f"blocks.{block}.{name}.bias"] = (rows * width,)
    tensors = {f"blip.visual_encoder.{name}": shape for name, shape in shapes.items()}
    text = BlipTextModel(blip_text_config(width, text_width), add_pooling_layer=False)
    for name, tensor in text.state_dict().items():
        tensors[f"blip.text_encoder.{name}"] = tuple(tensor.shape)
    for name, tensor in head().state_dict().items():
        tensors[f"mlp.layers.{name}"] = tuple(tensor.shape)
    tensors["blip.itm_head.weight"] = (2, 3)
    made = {n: torch.randn(shape, generator=generator) * 0.15 for n, shape in tensors.items()}
    made["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    return made


def blip_text_config(width, text_width):
    return BlipTextConfig(
        hidden_size=text_width,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=40,
        vocab_size=len(WORDS) + 2,
        encoder_hidden_size=width,
        is_decoder=True,
        hidden_act="gelu",
        layer_norm_eps=1e-12,
    )


@pytest.fixture(scope="module")
def image_reward_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image_reward")
    torch.save(blip_tensors(), folder / "ImageReward.pt")
    text = {
        "model_type": "bert",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 40,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "vocab_size": len(WORDS),
        "encoder_width": 768,
    }
    (folder / "med_config.json").write_text(json.dumps(text))
    BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    return folder


def published_visual_encoder(tensors, pixels, width=128, heads=2):
    """timm's pre-norm transformer, under its own names."""
    t = {n.removeprefix("blip.visual_encoder."): v for n, v in tensors.items()}
    x = functional.conv2d(pixels, t["patch_embed.proj.weight"], t["patch_embed.proj.bias"], 8)
    x = torch.cat([t["cls_token"].expand(len(x), 1, width), x.flatten(2).mT], 1) + t["pos_embed"]

    def norm(x, name):
        return functional.layer_norm(x, (width,), t[f"{name}.weight"], t[f"{name}.bias"], 1e-6)

    def linear(x, name):
        return functional.linear(x, t[f"{name}.weight"], t[f"{name}.bias"])

    for block in ("blocks.0", "blocks.1"):
        qkv = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv")
        q, k, v = qkv.view(*x.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4)
        attention = (q @ k.mT * (width // heads) ** -0.5).softmax(-1) @ v
        x = x + linear(attention.transpose(1, 2).reshape(x.shape), f"{block}.attn.proj")
        hidden = functional.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1"))
        x = x + linear(hidden, f"{block}.mlp.fc2")
    return norm(x, "norm")


def upstream_image_reward(folder, images):
    tensors = torch.load(folder / "ImageReward.pt", weights_only=True)
    text = BlipTextModel(blip_text_config(128, 32), add_pooling_layer=False).eval()
    prefix = "blip.text_encoder."
    text.load_state_dict(
        {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)},
        strict=False,
    )
    last = head()
    last.load_state_dict(
        {n.removeprefix("mlp.layers."): v for n, v in tensors.items() if n.startswith("mlp.")}
    )
    tokens = BertTokenizer.from_pretrained(folder)(
        PROMPTS, padding="max_length", truncation=True, max_length=35, return_tensors="pt"
    )
    with torch.no_grad():
        embedded = published_visual_encoder(tensors, processed(images))
        hidden = text(
            tokens.input_ids,
            attention_mask=tokens.attention_mask,
            encoder_hidden_states=embedded,
            encoder_attention_mask=torch.ones(embedded.shape[:-1], dtype=torch.long),
            is_decoder=False,
        ).last_hidden_state[:, 0]
        return ((last(hidden) - 0.16717362830052426) / 1.0333394966054072).squeeze()


@pytest.mark.parametrize("shape", SHAPES)
def test_image_reward_follows_the_published_formula(shape, image_reward_folder):
    images = pictures(shape)
    reward = make_reward("image_reward", settings("image_reward", image_reward_folder))
    found = reward(images, PROMPTS, METADATA)
    expected = upstream_image_reward(image_reward_folder, images)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 1e-3


def test_image_reward_reads_safetensors_as_it_reads_the_published_file(
    image_reward_folder, tmp_path
):
    folder = tmp_path / "safe"
    shutil.copytree(image_reward_folder, folder, ignore=lambda *_: ["ImageReward.pt"])
    save_file(blip_tensors(), folder / "ImageReward.safetensors")
    images = pictures((40, 57))
    scores = [
        make_reward("image_reward", settings("image_reward", f))(images, PROMPTS, METADATA)
        for f in (folder, image_reward_folder)
    ]
    assert torch.equal(*scores)


class Planted:
    def __reduce__(self):
        return (print, ("this must never be printed",))


BROKEN = {
    "no config": lambda f: (f / "config.json").unlink(),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "other model": lambda f: (f / "config.json").write_text('{"model_type": "bert"}'),
    "cut weights": lambda f: (f / "model.safetensors").write_bytes(
        (f / "model.safetensors").read_bytes()[:-100]
    ),
    "no tokenizer": lambda f: [p.unlink() for p in f.glob("*token*")],
}


@pytest.mark.parametrize("broken", BROKEN)
def test_missing_or_wrong_weights_end_the_run_before_it_starts(broken, clip_folder, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(clip_folder, folder)
    BROKEN[broken](folder)
    config = RewardConfig(weights={"pickscore": 1.0}, paths={"pickscore": str(folder)})
    with pytest.raises(ValueError, match=f"reward 'pickscore'.*{folder}") as caught:
        build_run_reward(config)
    assert "\n" not in str(caught.value)


def test_tensors_that_do_not_fit_are_named(clip_folder, tmp_path):
    folder = tmp_path / "wrong"
    shutil.copytree(clip_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["visual_projection.weight"] = torch.zeros(7, 32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"'hpsv2'.*visual_projection.weight of shape \(7, 32\)"):
        make_reward("hpsv2", settings("hpsv2", folder))
    del tensors["visual_projection.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"'hpsv2'.*has no tensor visual_projection.weight"):
        make_reward("hpsv2", settings("hpsv2", folder))


@pytest.mark.parametrize("name", [*CLIP_REWARDS, "image_reward"])
def test_a_path_that_is_missing_or_no_folder_is_named(name):
    with pytest.raises(ValueError, match=rf"reward '{name}'.*reward\.paths\.{name} is not set"):
        make_reward(name)
    with pytest.raises(ValueError, match=rf"'{name}'.*reward\.paths\.{name} = '/no/such'"):
        make_reward(name, settings(name, "/no/such"))


def test_code_planted_in_a_weights_file_does_not_run(image_reward_folder, tmp_path, capsys):
    folder = tmp_path / "planted"
    shutil.copytree(image_reward_folder, folder)
    torch.save({"blip": Planted()}, folder / "ImageReward.pt")
    with pytest.raises(ValueError, match=r"'image_reward'.*ImageReward\.pt cannot be read"):
        make_reward("image_reward", settings("image_reward", folder))
    assert "must never" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, r"reward\.batch_size = 0"),
        ({"device": "tpu"}, r"reward\.device = 'tpu' must be auto"),
        ({"device": "cuda:99"}, r"reward\.device = 'cuda:99'"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        build_run_reward(RewardConfig(weights={"color_shape": 1.0}, **change))
