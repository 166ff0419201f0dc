# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""CLIP from a folder in Hugging Face layout, and three ways to prepare pictures for it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_leangrpo.rewards.base import ModelSettings, round_to_8_bits
from megatron_leangrpo.rewards.weights import (
    LazyModel,
    check_shapes,
    load_tokenizer,
    read_config,
    stored_shapes,
    wanted_shapes,
    weights_folder,
)

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

Prepare = Callable[[Tensor, int], Tensor]


def normalize(pixels: Tensor) -> Tensor:
    """Pixels [n, 3, H, W] in [0, 1] by CLIP's mean and standard deviation."""
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    return (pixels - mean[:, None, None]) / std[:, None, None]


def pillow_pixels(images: Tensor, size: int) -> Tensor:
    """CLIP's published preparation: 8 bits, Pillow's bicubic on the short side, centre crop."""
    from PIL import Image
    from transformers import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )
    pixels = round_to_8_bits(images).permute(0, 2, 3, 1).contiguous().numpy()
    pictures = [Image.fromarray(picture) for picture in pixels]
    return processor(images=pictures, return_tensors="pt")["pixel_values"]


def bilinear_pixels(images: Tensor, size: int) -> Tensor:
    """torchvision's Resize and CenterCrop of unrounded pixels: bilinear on the short side."""
    images = images.detach().to("cpu", torch.float32)
    height, width = images.shape[-2:]
    short, long = sorted((height, width))
    new_long = int(size * long / short)
    new = (size, new_long) if height <= width else (new_long, size)
    if new != (height, width):
        images = functional.interpolate(images, new, mode="bilinear", antialias=True)
    top, left = (round((side - size) / 2) for side in new)
    return normalize(images[..., top : top + size, left : left + size])


def padded_pixels(images: Tensor, size: int) -> Tensor:
    """HPSv2's: 8 bits, bicubic on the long side without clamping, black around the rest."""
    images = round_to_8_bits(images).float() / 255
    height, width = images.shape[-2:]
    scale = size / max(height, width)
    new = (round(height * scale), round(width * scale))
    if new != (height, width):
        images = functional.interpolate(images, new, mode="bicubic", antialias=True)
    rows, columns = size - new[0], size - new[1]
    around = (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
    return normalize(functional.pad(images, around))


class Clip:
    """Image and text features of a CLIP model, in batches; weights are read on first use."""

    def __init__(self, reward: str, settings: ModelSettings, prepare: Prepare) -> None:
        self.folder = weights_folder(reward, settings, "config.json", "model.safetensors")
        kind = read_config(reward, self.folder).get("model_type")
        if kind != "clip":
            raise ValueError(
                f"reward {reward!r}: {self.folder / 'config.json'} is of model_type {kind!r}, "
                "not 'clip'"
            )
        from transformers import CLIPConfig, CLIPModel

        self.config = CLIPConfig.from_pretrained(self.folder, local_files_only=True)
        file = self.folder / "model.safetensors"
        wanted = wanted_shapes(lambda: CLIPModel(self.config))
        check_shapes(reward, file, stored_shapes(reward, file), wanted)
        self.tokenizer = load_tokenizer(reward, self.folder, "CLIPTokenizer")
        self.prepare, self.batch_size = prepare, settings.batch_size
        self._model = LazyModel(self._load, settings)

    def _load(self) -> nn.Module:
        return load_clip(self.folder)

    def image_features(self, images: Tensor) -> Tensor:
        """Unit vectors [n, d] on the host."""
        with self._model.on_device() as (model, device):
            return torch.cat(list(self._image_batches(model, device, images))).cpu()

    def text_features(self, prompts: Sequence[str]) -> Tensor:
        """Unit vectors [n, d] on the host."""
        with self._model.on_device() as (model, device):
            texts = _batches(list(prompts), self.batch_size)
            return torch.cat([self._text(model, device, text) for text in texts]).cpu()

    def scaled_cosines(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, float]:
        """The cosine [n] of each image and its prompt, and the model's logit scale."""
        with self._model.on_device() as (model, device):
            cosines = []
            texts = _batches(list(prompts), self.batch_size)
            pictures = self._image_batches(model, device, images)
            for text, picture in zip(texts, pictures, strict=True):
                cosines.append((picture * self._text(model, device, text)).sum(-1))
            return torch.cat(cosines).cpu(), model.logit_scale.exp().item()

    def _image_batches(
        self, model: nn.Module, device: torch.device, images: Tensor
    ) -> Iterator[Tensor]:
        for batch in images.split(self.batch_size):
            pixels = self.prepare(batch, self.config.vision_config.image_size).to(device)
            features = model.get_image_features(pixel_values=pixels).pooler_output
            yield features / features.norm(dim=-1, keepdim=True)

    def _text(self, model: nn.Module, device: torch.device, prompts: list[str]) -> Tensor:
        # One length for all, so that a prompt's neighbours do not change its rounding.
        tokens = self.tokenizer(
            prompts,
            padding="max_length",
            truncation=True,
            max_length=self.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(device)
        features = model.get_text_features(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask
        ).pooler_output
        return features / features.norm(dim=-1, keepdim=True)


def load_clip(folder: Path) -> nn.Module:
    """The CLIP model of a folder, in float32."""
    from transformers import CLIPModel

    return CLIPModel.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
    )


def _batches(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]
