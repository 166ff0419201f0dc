# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""ImageReward-v1.0: BLIP reads the prompt while it looks at the picture.

Reads the published weights under their own names, in `transformers`' BLIP.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_leangrpo.rewards.base import ModelSettings
from megatron_leangrpo.rewards.clip import pillow_pixels
from megatron_leangrpo.rewards.registry import register_reward
from megatron_leangrpo.rewards.weights import (
    LazyModel,
    Shapes,
    check_shapes,
    find_file,
    load_tokenizer,
    open_tensors,
    read_config,
    score_head,
    stored_shapes,
    wanted_shapes,
    weights_folder,
)

NAME = "image_reward"
MEAN, STD = 0.16717362830052426, 1.0333394966054072
MAX_TOKENS = 35
VISUAL, TEXT = "blip.visual_encoder.", "blip.text_encoder."
HEAD_WIDTH = 64

# Published names to transformers' names, of the picture's transformer.
_RENAMED = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.(\d+)\.norm(\d)\.", r"encoder.layers.\1.layer_norm\2."),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"encoder.layers.\1.self_attn.qkv."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection."),
    (r"^blocks\.(\d+)\.mlp\.", r"encoder.layers.\1.mlp."),
)


def model_name(published: str) -> str | None:
    """The name in `BlipReward` of a published tensor; None if it has no part in the score."""
    if published.startswith("mlp.layers."):
        return "head." + published.removeprefix("mlp.layers.")
    if published.startswith(TEXT):
        return "text." + published.removeprefix(TEXT)
    if not published.startswith(VISUAL):
        return None
    name = published.removeprefix(VISUAL)
    for pattern, replacement in _RENAMED:
        name, found = re.subn(pattern, replacement, name)
        if found:
            return "visual." + name
    return None


class BlipReward(nn.Module):
    """Picture transformer, text transformer that attends to it, and the head."""

    def __init__(self, stored: Shapes, text: dict[str, Any]) -> None:
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        super().__init__()
        width, _, patch, _ = stored[VISUAL + "patch_embed.proj.weight"]
        patches = stored[VISUAL + "pos_embed"][1] - 1
        blocks = {m[1] for n in stored if (m := re.match(rf"{re.escape(VISUAL)}blocks\.(\d+)", n))}
        self.image_size = patch * round(patches**0.5)
        self.visual = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=width,
                intermediate_size=stored[VISUAL + "blocks.0.mlp.fc1.weight"][0],
                num_hidden_layers=len(blocks),
                num_attention_heads=width // HEAD_WIDTH,
                image_size=self.image_size,
                patch_size=patch,
                layer_norm_eps=1e-6,
            )
        )
        keys = (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
            "hidden_act",
            "layer_norm_eps",
        )
        self.text = BlipTextModel(
            BlipTextConfig(
                **{key: text[key] for key in keys if key in text},
                vocab_size=stored[TEXT + "embeddings.word_embeddings.weight"][0],
                encoder_hidden_size=width,
                # Gives the layers their attention to the picture; nothing here is causal.
                is_decoder=True,
            ),
            add_pooling_layer=False,
        )
        self.head = score_head(self.text.config.hidden_size)

    def forward(self, pixels: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Scores [n] of pixels [n, 3, S, S] with token ids and their mask [n, t]."""
        picture = self.visual(pixel_values=pixels).last_hidden_state
        hidden = self.text(
            input_ids=tokens,
            attention_mask=mask,
            encoder_hidden_states=picture,
            encoder_attention_mask=torch.ones(picture.shape[:2], device=picture.device),
            is_decoder=False,
        ).last_hidden_state
        return (self.head(hidden[:, 0]).squeeze(1) - MEAN) / STD


@register_reward(NAME)
class ImageRewardReward:
    """Standardised human preference: mean 0 and deviation 1 over ImageReward's own pictures.

    The folder holds the published ImageReward.pt (or the same as safetensors), med_config.json,
    and the tokenizer of bert-base-uncased.
    """

    rounds_pixels = True

    def __init__(self, settings: ModelSettings) -> None:
        folder = weights_folder(NAME, settings, "med_config.json")
        self._file = find_file(NAME, folder, "ImageReward.safetensors", "ImageReward.pt")
        self._text_config = read_config(NAME, folder, "med_config.json")
        self._stored = stored_shapes(NAME, self._file)
        try:
            wanted = wanted_shapes(self._build)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"reward {NAME!r}: {self._file} is not ImageReward-v1.0: {error}"
            ) from error
        check_shapes(NAME, self._file, _renamed(self._stored), wanted)
        self._tokenizer = load_tokenizer(NAME, folder, "BertTokenizer")
        self._batch_size = settings.batch_size
        self._model = LazyModel(self._load, settings)

    def _build(self) -> BlipReward:
        return BlipReward(self._stored, self._text_config)

    def _load(self) -> BlipReward:
        model = self._build()
        tensors = _renamed(open_tensors(NAME, self._file))
        wanted = model.state_dict().keys()
        model.load_state_dict({n: t for n, t in tensors.items() if n in wanted}, strict=False)
        return model

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        tokens = self._tokenizer(
            list(prompts),
            padding="max_length",
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        )
        scores = []
        with self._model.on_device() as (model, device):
            for start in range(0, len(images), self._batch_size):
                rows = slice(start, start + self._batch_size)
                pixels = pillow_pixels(images[rows], model.image_size).to(device)
                ids, mask = (tokens[k][rows].to(device) for k in ("input_ids", "attention_mask"))
                scores.append(model(pixels, ids, mask).cpu())
        return torch.cat(scores)


def _renamed(tensors: dict[str, Any]) -> dict[str, Any]:
    return {new: value for name, value in tensors.items() if (new := model_name(name))}
