# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""VideoAlign's VideoReward (KwaiVGI): visual quality, motion quality and text alignment of videos.

Qwen2-VL reads some frames and a question with one special token a criterion; a linear head on the
hidden states at these tokens gives the scores, which are normalised with the checkpoint's means and
standard deviations. As published, all tokens have plain text positions: the reward model does not
use Qwen2-VL's three-dimensional ones.

Differs: frames are not written to a video file first, and weights are float32, not bfloat16.
"""

import ast
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_leangrpo.rewards.base import ModelSettings, round_to_8_bits
from megatron_leangrpo.rewards.clip import normalize
from megatron_leangrpo.rewards.registry import register_reward
from megatron_leangrpo.rewards.video_align_weights import newest_checkpoint, read_weights
from megatron_leangrpo.rewards.weights import LazyModel, read_config, weights_folder

NAME = "video_align"
CRITERIA = ("VQ", "MQ", "TA")
SPECIAL_TOKENS = tuple(f"<|{criterion}_reward|>" for criterion in CRITERIA)
TEMPLATE = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"
FILES = ("model_config.json", "config.json", "tokenizer.json", "prompt_template.py")
VIDEO_FPS = 16
"""Frames a second of the videos: Wan 2.1's."""
MIN_FRAMES, MIN_PIXELS = 4, 128 * 28 * 28


def chosen_frames(count: int, fps: float) -> list[int]:
    """Frames that are read: `fps` a second, at least 4 of them and an even number."""
    most = count // 2 * 2
    wanted = min(max(count / VIDEO_FPS * fps, MIN_FRAMES), most)
    number = min(round(wanted / 2) * 2, count)
    if number < 2:
        raise ValueError(f"a video of {count} frames: {NAME} needs two or more")
    return torch.linspace(0, count - 1, number).round().long().tolist()


def frame_size(height: int, width: int, factor: int, max_pixels: int) -> tuple[int, int]:
    """Qwen2-VL's size of a frame: multiples of `factor`, between the least and most pixels."""
    new = [max(factor, round(side / factor) * factor) for side in (height, width)]
    if math.prod(new) > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        new = [math.floor(side / scale / factor) * factor for side in (height, width)]
    elif math.prod(new) < MIN_PIXELS:
        scale = math.sqrt(MIN_PIXELS / (height * width))
        new = [math.ceil(side * scale / factor) * factor for side in (height, width)]
    return new[0], new[1]


def patches(frames: Tensor, patch: int, merge: int, together: int) -> tuple[Tensor, Tensor]:
    """Frames [t, 3, H, W] as Qwen2-VL's rows of patches, and the grid [1, 3] of them."""
    count, channels, height, width = frames.shape
    rows, columns = height // patch, width // patch
    cut = frames.view(
        count // together, together, channels,
        rows // merge, merge, patch, columns // merge, merge, patch,
    ).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # fmt: skip
    grid = torch.tensor([[count // together, rows, columns]])
    return cut.reshape(grid.prod(), -1), grid


class VideoReward(nn.Module):
    """Qwen2-VL without its language head, and the head of the scores."""

    def __init__(self, config: Any, outputs: int) -> None:
        from transformers import Qwen2VLModel

        super().__init__()
        self.model = Qwen2VLModel(config)
        self.rm_head = nn.Linear(config.text_config.hidden_size, outputs, bias=False)

    def forward(self, ids: Tensor, pixels: Tensor, grid: Tensor, asked: Tensor) -> Tensor:
        """Raw scores [criteria] of one video, in the order of its special tokens.

        ids and asked are [tokens]: the text, and where in it the special tokens are.
        """
        video = self.model.visual(pixels, grid_thw=grid).pooler_output
        embedded = self.model.language_model.embed_tokens(ids)
        embedded = embedded.masked_scatter(
            (ids == self.model.config.video_token_id)[:, None], video.to(embedded.dtype)
        )
        # No position_ids: one position a token, as published.
        hidden = self.model.language_model(inputs_embeds=embedded[None]).last_hidden_state[0]
        scores = self.rm_head(hidden[asked])
        return scores.diagonal() if scores.shape[1] == len(CRITERIA) else scores[:, 0]


class VideoAlign:
    """All three scores of videos; the rewards below share it and its last scores."""

    def __init__(self, settings: ModelSettings) -> None:
        from tokenizers import Tokenizer
        from transformers import Qwen2VLConfig

        self.folder = weights_folder(NAME, settings, *FILES)
        described = read_config(NAME, self.folder, "model_config.json")
        file = self.folder / "model_config.json"
        try:
            data, model = described["data_config"], described["model_config"]
            self.fps, self.max_pixels = float(data["fps"]), int(data["max_frame_pixels"])
            self.outputs = int(model["output_dim"])
            norms = described["inference_config"]
            self.mean, self.std = (
                torch.tensor([float(norms[f"{c}_{kind}"]) for c in CRITERIA], dtype=torch.float64)
                for kind in ("mean", "std")
            )
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"reward {NAME!r}: {file} is not VideoReward's: {error!r}") from error
        usual = data.get("sample_type", "uniform") == "uniform" and not data.get("num_frames")
        special = model.get("use_special_tokens") and self.outputs in (1, len(CRITERIA))
        if not (usual and special and data.get("prompt_template_type") == "detailed_special"):
            raise ValueError(
                f"reward {NAME!r}: {file} must say sample_type uniform, no num_frames, "
                "use_special_tokens, output_dim 1 or 3 and detailed_special"
            )
        self.lora = described.get("peft_lora_config") or {}
        self.checkpoint = newest_checkpoint(NAME, self.folder)
        self.template = _template(self.folder / "prompt_template.py")
        self.config = Qwen2VLConfig.from_pretrained(self.folder, local_files_only=True)
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self.tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
        self._model = LazyModel(self._load, settings)
        self._last: tuple[Tensor, tuple[str, ...], Tensor] | None = None

    def _load(self) -> nn.Module:
        weights = read_weights(NAME, self.checkpoint, self.lora)
        embedding = weights["model.language_model.embed_tokens.weight"]
        # Published with one row a token of its tokenizer, not Qwen2-VL's padded number.
        self.config.text_config.vocab_size = len(embedding)
        with torch.device("meta"):
            model = VideoReward(self.config, self.outputs)
        wanted = model.state_dict()
        for name, tensor in wanted.items():
            if name not in weights or weights[name].shape != tensor.shape:
                found = tuple(weights[name].shape) if name in weights else "missing"
                raise ValueError(
                    f"reward {NAME!r}: {self.checkpoint} has {name} {found}, its model needs "
                    f"{tuple(tensor.shape)}"
                )
        model = VideoReward(self.config, self.outputs)
        model.load_state_dict({name: weights[name] for name in wanted})
        return model

    def scores(self, videos: Tensor, prompts: Sequence[str]) -> Tensor:
        """Normalised VQ, MQ and TA [n, 3] in float64."""
        last = self._last
        if last is not None and last[0] is videos and last[1] == tuple(prompts):
            return last[2]
        with self._model.on_device() as (model, device):
            raw = [
                self._one(model, device, video, prompt)
                for video, prompt in zip(videos, prompts, strict=True)
            ]
        result = (torch.stack(raw).cpu().double() - self.mean) / self.std
        self._last = (videos, tuple(prompts), result)
        return result

    def _one(self, model: nn.Module, device: torch.device, video: Tensor, prompt: str) -> Tensor:
        vision = self.config.vision_config
        merge, together = vision.spatial_merge_size, vision.temporal_patch_size
        frames = round_to_8_bits(video[chosen_frames(len(video), self.fps)]).float()
        factor = vision.patch_size * merge
        size = frame_size(*frames.shape[-2:], factor, self.max_pixels)
        if size != tuple(frames.shape[-2:]):
            frames = functional.interpolate(frames, size, mode="bicubic", antialias=True)
            frames = frames.clamp(0, 255).round()
        pixels, grid = patches(normalize(frames / 255), vision.patch_size, merge, together)
        text = self.chat(prompt, int(grid.prod()) // merge**2)
        ids = torch.tensor(self.tokenizer.encode(text, add_special_tokens=False).ids)
        special = torch.tensor([self.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS])
        (asked,) = torch.isin(ids, special).nonzero(as_tuple=True)
        if len(asked) != len(CRITERIA):
            raise ValueError(f"the prompt has reward tokens of {NAME} in it: {prompt!r}")
        return model(*(tensor.to(device) for tensor in (ids, pixels, grid, asked)))

    def chat(self, prompt: str, video_tokens: int) -> str:
        """The conversation that Qwen2-VL's template makes of a video and the question."""
        video = "<|vision_start|>" + "<|video_pad|>" * video_tokens + "<|vision_end|>"
        question = self.template.format(text_prompt=prompt)
        return (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\n{video}{question}<|im_end|>\n<|im_start|>assistant\n"
        )


def _template(file: Path) -> str:
    """The question in upstream's Python file, which is read and not run."""
    try:
        for statement in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == TEMPLATE:
                text = ast.literal_eval(statement.value)
                if all(part in text for part in (*SPECIAL_TOKENS, "{text_prompt}")):
                    return text
    except (SyntaxError, ValueError, TypeError) as error:
        raise ValueError(f"reward {NAME!r}: {file} cannot be read: {error}") from error
    raise ValueError(f"reward {NAME!r}: {file} has no {TEMPLATE} with {{text_prompt}}")


@lru_cache(maxsize=1)
def _shared(folder: str | None, device: str, offload: bool) -> VideoAlign:
    paths = {} if folder is None else {NAME: folder}
    return VideoAlign(ModelSettings(paths, device, offload=offload))


class _Criterion:
    """One of the scores, normalised: about 0 on average and 1 in spread."""

    takes_videos = True
    rounds_pixels = True
    index: int

    def __init__(self, settings: ModelSettings) -> None:
        folder = settings.paths.get(NAME)
        self._model = _shared(folder, str(settings.device), settings.offload)

    def __call__(
        self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Tensor:
        return self._model.scores(images, prompts)[:, self.index]


@register_reward("video_align_vq")
class VisualQuality(_Criterion):
    """Clarity, detail and sense of the frames."""

    index = 0


@register_reward("video_align_mq")
class MotionQuality(_Criterion):
    """Stability, naturalness and amount of motion."""

    index = 1


@register_reward("video_align_ta")
class TextAlignment(_Criterion):
    """How well the video shows its prompt."""

    index = 2
