# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""GenEval's object detector: Mask2Former for COCO's instances, with mmdet's preparation and choice.

The weights are transformers' (facebook/mask2former-swin-small-coco-instance). Its processor would
stretch a picture to multiples of 32; mmdet adds a margin, and so does this.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_leangrpo.rewards.base import ModelSettings, round_to_8_bits
from megatron_leangrpo.rewards.geneval_rules import OBJECTS, Detection, Objects
from megatron_leangrpo.rewards.weights import LazyModel, find_file, read_config, stored_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORT_SIDE, LONG_SIDE, DIVISOR = 800, 1333, 32
MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)
MAX_DETECTIONS, MAX_OF_A_CLASS = 100, 16
# Published checkpoints' names of classes that GenEval calls otherwise.
RENAMED = {
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
}


def resized(height: int, width: int) -> tuple[int, int]:
    """mmdet's size of a picture: short side 800, but no side above 1333."""
    scale = min(SHORT_SIDE / min(height, width), LONG_SIDE / max(height, width))
    return int(height * scale + 0.5), int(width * scale + 0.5)


def detector_pixels(images: Tensor) -> Tensor:
    """Normalised pixels [n, 3, h, w] of images in [0, 1], padded to multiples of 32.

    The mean's grey is added to the right and below, and as published the model is not told where.
    """
    pixels = round_to_8_bits(images).float()
    size = resized(*pixels.shape[-2:])
    pixels = functional.interpolate(pixels, size, mode="bilinear", align_corners=False).round()
    pixels = (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    bottom, right = (-side % DIVISOR for side in size)
    return functional.pad(pixels, (0, right, 0, bottom))


def _bounds(present: Tensor) -> tuple[int, int]:
    indices = present.nonzero()
    return int(indices[0]), int(indices[-1]) + 1


def choose(
    classes: Tensor, masks: Tensor, names: list[str], threshold: float
) -> dict[str, list[Detection]]:
    """The objects above a score, by class and falling score, 16 of a class at most.

    `classes` [queries, names + 1] are logits whose last is "nothing", `masks` [queries, H, W]
    logits. A query counts once for each class that is among the 100 likeliest.
    """
    chances = classes.softmax(-1)[:, :-1].flatten()
    likeliest, picks = chances.topk(min(MAX_DETECTIONS, len(chances)))
    found: dict[str, list[Detection]] = {}
    for chance, pick in zip(likeliest.tolist(), picks.tolist(), strict=True):
        query, label = divmod(pick, len(names))
        inside = masks[query] > 0
        # The mean likelihood inside is at most 1.
        if chance <= threshold or not inside.any():
            continue
        sure = masks[query].sigmoid()[inside].sum() / (inside.sum() + 1e-6)
        score = chance * sure.item()
        if score > threshold:
            (top, bottom), (left, right) = (_bounds(inside.any(axis)) for axis in (1, 0))
            box = (float(left), float(top), float(right), float(bottom))
            found.setdefault(names[label], []).append(Detection(score, box, inside.cpu()))
    return {
        name: sorted(objects, key=lambda found: -found.score)[:MAX_OF_A_CLASS]
        for name, objects in found.items()
    }


class Detector:
    """Mask2Former from a folder in Hugging Face layout; weights are read on first use."""

    def __init__(self, reward: str, folder: Path, settings: ModelSettings) -> None:
        self.reward, self.folder, self.batch_size = reward, folder, settings.batch_size
        find_file(reward, folder, "config.json")
        config = read_config(reward, folder)
        if config.get("model_type") != "mask2former":
            raise ValueError(
                f"reward {reward!r}: {folder / 'config.json'} is of model_type "
                f"{config.get('model_type')!r}, not 'mask2former'"
            )
        labels = {int(index): name for index, name in config.get("id2label", {}).items()}
        self.names = [RENAMED.get(labels[index], labels[index]) for index in sorted(labels)]
        if sorted(self.names) != sorted(OBJECTS):
            raise ValueError(
                f"reward {reward!r}: {folder / 'config.json'} has other classes than COCO's 80 "
                "instances (a detector such as mask2former-swin-small-coco-instance)"
            )
        # Also says that the file is cut or none, without reading it.
        stored_shapes(reward, find_file(reward, folder, "model.safetensors"))
        self._read(device_map="meta")
        self._model = LazyModel(self._read, settings)

    def _read(self, **options: object) -> "PreTrainedModel":
        model, report = _detector_class().from_pretrained(
            self.folder,
            local_files_only=True,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
        wrong = [*report["missing_keys"], *(found[0] for found in report["mismatched_keys"])]
        if wrong:
            raise ValueError(
                f"reward {self.reward!r}: {self.folder / 'model.safetensors'} has no tensor "
                f"{min(wrong)} of the shape that its config.json asks for"
            )
        return model

    def detect(self, images: Tensor, thresholds: Sequence[float]) -> list[Objects]:
        """The objects above each image's threshold."""
        height, width = images.shape[-2:]
        rows, columns = resized(height, width)
        found: list[Objects] = []
        with self._model.on_device() as (model, device):
            for batch in images.split(self.batch_size):
                pixels = detector_pixels(batch)
                for classes, masks in zip(*model(pixels.to(device)), strict=True):
                    # One picture at a time: its 100 masks of full size are 256 MB.
                    masks = _resize(masks, *pixels.shape[-2:])[:, :rows, :columns]
                    masks = _resize(masks, height, width)
                    found.append(choose(classes, masks, self.names, thresholds[len(found)]))
        return found


def _resize(masks: Tensor, height: int, width: int) -> Tensor:
    return functional.interpolate(
        masks[:, None], (height, width), mode="bilinear", align_corners=False
    )[:, 0]


def _detector_class() -> type["PreTrainedModel"]:
    """Mask2Former without its loss, which would need scipy."""
    from transformers import Mask2FormerConfig, Mask2FormerModel
    from transformers.models.mask2former.modeling_mask2former import Mask2FormerPreTrainedModel

    class Mask2Former(Mask2FormerPreTrainedModel):
        _keys_to_ignore_on_load_unexpected = (r"^criterion\.",)

        def __init__(self, config: Mask2FormerConfig) -> None:
            super().__init__(config)
            self.model = Mask2FormerModel(config)
            self.class_predictor = nn.Linear(config.hidden_dim, config.num_labels + 1)
            self.post_init()

        def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
            found = self.model(pixel_values=pixels)
            classes = self.class_predictor(found.transformer_decoder_last_hidden_state)
            return classes, found.masks_queries_logits[-1]

    return Mask2Former
