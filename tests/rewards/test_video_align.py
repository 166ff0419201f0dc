# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""VideoAlign's scores against its published formula, on a tiny random model of its architecture."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import Qwen2VLConfig, Qwen2VLModel

from megatron_leangrpo.config import RewardConfig
from megatron_leangrpo.grpo.run_reward import build_run_reward
from megatron_leangrpo.rewards.video_align import chosen_frames, frame_size

ORDER = ["VQ", "MQ", "TA"]
NORMS = {"VQ": (3.6757, 2.2476), "MQ": (1.1646, 1.3811), "TA": (2.8105, 2.5121)}
PROMPTS = ["a red circle", "a blue square moves left"]
QUESTION = "Rate it. <|VQ_reward|> and <|MQ_reward|> of {text_prompt} <|TA_reward|>\nEND\n"
CHAT = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
RANK, ALPHA = 2, 6
# Multiples of 28 with at least 128 x 28 x 28 pixels: the processor leaves them as they are.
HEIGHT, WIDTH, FRAMES = 308, 336, 9
MEAN = [0.48145466, 0.4578275, 0.40821073]
STD = [0.26862954, 0.26130258, 0.27577711]


class Upstream(nn.Module):
    """The modules of upstream's class that scores use, under their names in it."""

    def __init__(self, config, outputs):
        super().__init__()
        self.model = Qwen2VLModel(config)
        self.rm_head = nn.Linear(config.text_config.hidden_size, outputs, bias=False)


def tokenizer():
    words = "Rate it . and of END a red circle blue square moves left system user assistant You are"
    words += " helpful"
    vocabulary = {word: n for n, word in enumerate(["[UNK]", *words.split()])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([AddedToken(token, special=True) for token in CHAT])
    return made


def config(rows):
    pad = tokenizer().token_to_id("<|video_pad|>")
    return Qwen2VLConfig(
        text_config={
            "vocab_size": rows,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 3, 3],
            },
        },
        vision_config={
            "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        video_token_id=pad,
        image_token_id=pad + 100,
    )  # fmt: skip


def old_name(name):
    """As transformers 4.45 called it."""
    name = name.replace("base_model.model.model.visual.", "base_model.model.visual.")
    return name.replace("model.language_model.", "model.")


@pytest.fixture(scope="module", params=[1, 3], ids=["output_dim=1", "output_dim=3"])
def published(request, tmp_path_factory):
    """A folder as upstream saves it, and the model in it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("video_align")
    made = tokenizer()
    rows = made.get_vocab_size() + len(ORDER)
    # The base has padded rows that the published checkpoint lacks.
    config(rows + 50).save_pretrained(folder)
    made.save(str(folder / "tokenizer.json"))
    model = Upstream(config(rows), request.param)
    targets = ["q_proj", "v_proj", "down_proj"]
    low = LoraConfig(target_modules=targets, r=RANK, lora_alpha=ALPHA, modules_to_save=["rm_head"])
    model = get_peft_model(model, low).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15) if parameter.ndim > 1 else None
    state = {old_name(name): tensor for name, tensor in model.state_dict().items()}
    state["base_model.model.lm_head.weight"] = torch.zeros(2, 2)
    for step, content in ((9, {}), (11, state)):
        (folder / f"checkpoint-{step}").mkdir()
        torch.save(content, folder / f"checkpoint-{step}" / "model.pth")
    norms = {f"{c}_{k}": v for c in ORDER for k, v in zip(("mean", "std"), NORMS[c], strict=True)}
    described = {
        "data_config": {
            "fps": 2.0, "max_frame_pixels": 200704, "num_frames": None,
            "sample_type": "uniform", "prompt_template_type": "detailed_special",
        },
        "model_config": {"output_dim": request.param, "use_special_tokens": True},
        "peft_lora_config": {"lora_r": RANK, "lora_alpha": ALPHA, "use_rslora": False},
        "inference_config": norms,
    }  # fmt: skip
    (folder / "model_config.json").write_text(json.dumps(described))
    lines = ["import nothing_that_exists", f"DETAILED_PROMPT_WITH_SPECIAL_TOKEN = {QUESTION!r}"]
    (folder / "prompt_template.py").write_text("\n".join(lines))
    return folder, model, request.param


def videos():
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(len(PROMPTS) * FRAMES, 3, 11, 12, generator=generator)
    smooth = nn.functional.interpolate(coarse, (HEIGHT, WIDTH), mode="bilinear")
    return smooth.view(len(PROMPTS), FRAMES, 3, HEIGHT, WIDTH)


def upstream_patches(frames):
    """Qwen2-VL's rows of pixels: two frames together, patches in blocks of two by two."""
    rows = []
    for t in range(0, len(frames), 2):
        for block_y in range(0, HEIGHT, 28):
            for block_x in range(0, WIDTH, 28):
                for y in (block_y, block_y + 14):
                    for x in (block_x, block_x + 14):
                        cut = frames[t : t + 2, :, y : y + 14, x : x + 14]
                        rows.append(cut.transpose(0, 1).flatten())
    return torch.stack(rows), torch.tensor([[len(frames) // 2, HEIGHT // 14, WIDTH // 14]])


@torch.no_grad()
def upstream(model, outputs, video, prompt):
    """Normalised VQ, MQ and TA of one video as upstream's forward and _norm compute them."""
    # 9 frames of a second at 16 a second, 2 a second: the least, 4.
    frames = (video[[0, 3, 5, 8]] * 255).round() / 255
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    pixels, grid = upstream_patches((frames - mean) / std)
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"<|vision_start|>{'<|video_pad|>' * (len(pixels) // 4)}<|vision_end|>"
        f"{QUESTION.format(text_prompt=prompt)}<|im_end|>\n<|im_start|>assistant\n"
    )
    made = tokenizer()
    made.add_special_tokens([f"<|{name}_reward|>" for name in ORDER])
    ids = torch.tensor([made.encode(text).ids])
    inner = model.base_model.model
    embeds = inner.model.language_model.embed_tokens(ids)
    seen = inner.model.visual(pixels, grid_thw=grid).pooler_output
    mask = (ids == made.token_to_id("<|video_pad|>")).unsqueeze(-1).expand_as(embeds)
    embeds = embeds.masked_scatter(mask, seen)
    positions = torch.arange(ids.shape[1]).view(1, 1, -1).expand(3, 1, -1)
    hidden = inner.model.language_model(inputs_embeds=embeds, position_ids=positions)[0]
    logits = inner.rm_head(hidden)
    asked = torch.zeros_like(ids, dtype=torch.bool)
    for name in ORDER:
        asked |= ids == made.token_to_id(f"<|{name}_reward|>")
    pooled = logits[asked].view(1, 3, -1)
    pooled = pooled.diagonal(dim1=1, dim2=2) if outputs == 3 else pooled
    raw = pooled.reshape(3).double().tolist()
    return [(r - NORMS[c][0]) / NORMS[c][1] for r, c in zip(raw, ORDER, strict=True)]


def test_scores_equal_the_published_formula(published):
    folder, model, outputs = published
    names = [f"video_align_{name.lower()}" for name in ORDER]
    reward = build_run_reward(
        RewardConfig(weights=dict.fromkeys(names, 1.0), paths={"video_align": str(folder)})
    )
    reward.check_medium(videos=True)
    with pytest.raises(ValueError, match="video_align_vq scores videos"):
        reward.check_medium(videos=False)
    pictures = videos()
    result = reward(pictures, PROMPTS, [{}, {}])
    wanted = torch.tensor(
        [upstream(model, outputs, v, p) for v, p in zip(pictures, PROMPTS, strict=True)]
    ).double()
    assert wanted.std() > 0.01
    for column, name in enumerate(names):
        torch.testing.assert_close(result.parts[name], wanted[:, column], atol=1e-5, rtol=0)
    models_of = {id(r._model) for r in reward.rewards.values()}
    assert len(models_of) == 1


@pytest.mark.parametrize(("count", "number"), [(2, 2), (5, 4), (33, 4), (81, 10), (161, 20)])
def test_frames_are_chosen_as_published(count, number):
    frames = chosen_frames(count, fps=2.0)
    assert len(frames) == number and frames[0] == 0 and frames[-1] == count - 1


def test_frame_sizes_are_qwens():
    assert frame_size(480, 832, 28, 200704) == (336, 588)
    assert frame_size(240, 416, 28, 200704) == (252, 420)
    assert frame_size(32, 32, 28, 200704) == (336, 336)
    assert frame_size(308, 336, 28, 200704) == (308, 336)


def test_a_folder_without_upstreams_files_is_refused(published, tmp_path):
    folder, _, _ = published
    weights = {"video_align_vq": 1.0}
    with pytest.raises(ValueError, match=r"reward.paths.video_align is not set"):
        build_run_reward(RewardConfig(weights=weights))
    for name in ("model_config.json", "config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = RewardConfig(weights=weights, paths={"video_align": str(tmp_path)})
    with pytest.raises(ValueError, match=r"there is no prompt_template.py"):
        build_run_reward(config)
    (tmp_path / "prompt_template.py").write_text("X = 1")
    with pytest.raises(ValueError, match=r"there is no checkpoint-N"):
        build_run_reward(config)
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "model.pth").write_bytes(b"")
    with pytest.raises(ValueError, match=r"prompt_template.py has no DETAILED_PROMPT"):
        build_run_reward(config)
