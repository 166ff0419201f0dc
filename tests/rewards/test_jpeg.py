# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
import io

import pytest
import torch
from PIL import Image

from megatron_leangrpo.rewards import build_reward
from megatron_leangrpo.rewards.jpeg import compressibility, incompressibility


@pytest.mark.parametrize(
    ("size", "kilobytes", "score"),
    [(25000, 25.0, -0.05), (180500, 180.5, -0.361), (500000, 500.0, -1.0)],
)
def test_scale_is_flow_grpos(size, kilobytes, score):
    assert incompressibility(size) == pytest.approx(kilobytes, abs=1e-12)
    assert compressibility(size) == pytest.approx(score, abs=1e-12)


def test_size_is_that_of_pillows_file_at_quality_95():
    noise = torch.rand(2, 3, 24, 40, generator=torch.Generator().manual_seed(0))
    result = build_reward({"jpeg_incompressibility": 1.0})(noise, ["", ""], [{}, {}])
    for image, kilobytes in zip(noise, result.total.tolist(), strict=True):
        pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, format="JPEG", quality=95)
        assert kilobytes == len(buffer.getvalue()) / 1000


def test_flat_pictures_compress_better_than_noise():
    flat = torch.full((1, 3, 32, 32), 0.5)
    noise = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    total = build_reward({"jpeg_compressibility": 1.0})(
        torch.cat([flat, noise]), [""] * 2, [{}] * 2
    )
    assert total.total[0] > total.total[1]
