# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Sizes that fit and that do not, and pictures that are not square (HB14)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image

from megatron_leangrpo import platform
from megatron_leangrpo.codecs.packing import pack_latents, unpack_latents
from megatron_leangrpo.config_reader import read_config, read_recipe
from megatron_leangrpo.diffusion.selection import DETERMINISTIC
from megatron_leangrpo.grpo import commands, run_report
from megatron_leangrpo.grpo.assets import ASSETS
from megatron_leangrpo.grpo.experiment import Experiment, build_experiment
from megatron_leangrpo.grpo.rollout import sigma_schedule
from tests.grpo import tiny
from tests.sampling import rollout

FIT = {
    (512, 512): 1024,
    (512, 768): 1536,
    (768, 512): 1536,
    (720, 720): 2025,
    (1024, 16): 64,
}
# Each bad side and the nearest valid values. The stride of the VAE, 8, divides 520, 1000 and 1080.
DO_NOT_FIT = {
    (520, 520): ["height=520", "width=520", "512 or 528"],
    (1000, 1000): ["height=1000", "width=1000", "992 or 1008"],
    (1080, 1350): ["height=1080", "1072 or 1088", "width=1350", "1344 or 1360"],
    (0, 512): ["height=0", "16 or 32"],
    (-16, 512): ["height=-16", "16 or 32"],
    (512, 8): ["width=8", "16 or 32"],
}


def _dry_run(height: int, width: int) -> None:
    sizes = [f"--sampling.height={height}", f"--sampling.width={width}"]
    commands.train("flux_dev_dancegrpo", sizes, dry_run=True)


@pytest.mark.parametrize(("height", "width"), FIT)
def test_a_size_that_fits_has_its_tokens(height, width, capsys):
    _dry_run(height, width)
    assert (
        f"{height} x {width} pixels (h x w), {FIT[height, width]} image tokens "
        f"({height // 16} x {width // 16})" in capsys.readouterr().out
    )


@pytest.mark.parametrize(("height", "width"), DO_NOT_FIT)
def test_a_size_that_does_not_fit_names_side_multiple_and_nearest(height, width):
    with pytest.raises(ValueError) as error:
        _dry_run(height, width)
    parts = ["sampling.", "multiple of 16", *DO_NOT_FIT[height, width]]
    assert all(part in str(error.value) for part in parts), error.value
    assert ("height" in str(error.value)) == bool(height % 16 or height <= 0)
    assert ("width" in str(error.value)) == bool(width % 16 or width <= 0)


@dataclass
class Case:
    """A run of the embedded base at a size, and initial noise for it."""

    experiment: Experiment
    height: int
    width: int
    noise: torch.Tensor

    def conditioning(self) -> Any:
        return self.experiment.encode(["the number 7"])

    def velocity(self) -> torch.Tensor:
        return self.experiment.policy(self.noise, torch.tensor([0.75]), self.conditioning())

    def latents(self) -> torch.Tensor:
        """After four deterministic steps of FLUX's own schedule."""
        sampling = self.experiment.config.sampling
        conditioning = self.conditioning()
        return rollout(
            lambda x, timestep: self.experiment.policy(x, timestep, conditioning),
            self.noise,
            sigma_schedule(sampling, 4, self.noise.shape[1]),
            sampling.kernel,
            sampling.noise_level,
            [DETERMINISTIC],
            lambda step: self.noise,
        )

    def picture(self) -> torch.Tensor:
        return self.experiment.codec.decode(self.latents(), self.height, self.width)


@pytest.fixture(scope="module")
def cases() -> Iterator[dict[tuple[int, int], Case]]:
    """The same noise at 32 x 64 and, transposed as a picture, at 64 x 32."""
    platform.initialize_distributed(1)
    noise = torch.randn(1, 4, 8, 16, generator=torch.Generator().manual_seed(0))
    found = {}
    for (height, width), latents in {(32, 64): noise, (64, 32): noise.mT}.items():
        overrides = [
            f"--sampling.height={height}",
            f"--sampling.width={width}",
            "--sampling.sigma_schedule=flux_dynamic",
            "--sampling.shift=null",
            "--reward.weights={jpeg_compressibility: 1.0}",
        ]
        config = read_config(read_recipe("flux_tiny"), overrides)
        experiment = build_experiment(config)
        found[height, width] = Case(experiment, height, width, pack_latents(latents))
    yield found
    platform.destroy_distributed()


@pytest.fixture(scope="module")
def pipeline() -> Any:
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(ASSETS / "flux_digits", torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


SIZES = [(32, 64), (64, 32)]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_a_run_trains_and_samples_pictures_of_its_size(tmp_path, height, width):
    recipe = [
        f"--sampling.height={height}",
        f"--sampling.width={width}",
        "--reward.weights={jpeg_compressibility: 1.0}",
        "--grpo.iterations=1",
        "--grpo.prompts_per_iteration=1",
        "--evaluation.max_prompts=1",
        "--evaluation.samples_per_prompt=1",
    ]
    with mock.patch.object(run_report, "save_curves"):
        commands.train("flux_tiny", [*recipe, f"--output={tmp_path / 'run'}"])
    [row] = tiny.metrics_rows(tmp_path / "run")
    assert row["grad_norm"] > 0
    assert row["ratio_min"] == row["ratio_max"] == 1
    commands.sample(
        "flux_tiny", [*recipe, f"--output={tmp_path / 'samples'}"], str(tmp_path / "run")
    )
    with Image.open(tmp_path / "samples/samples/00000-00-the-number-0.png") as picture:
        assert picture.size == (width, height)


@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_the_velocity_is_that_of_diffusers_model(cases, pipeline, size):
    case = cases[size]
    embeds, pooled, text_ids = pipeline.encode_prompt("the number 7", max_sequence_length=8)
    rows, columns = size[0] // 8, size[1] // 8
    expected = pipeline.transformer(
        hidden_states=case.noise,
        timestep=torch.tensor([0.75]),
        guidance=torch.tensor([3.5]),
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=pipeline._prepare_latent_image_ids(1, rows, columns, "cpu", torch.float32),
        return_dict=False,
    )[0]
    assert case.noise.shape[1] == rows * columns
    assert tiny.relative_l2(case.velocity(), expected) < 1e-5


@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_the_picture_is_that_of_diffusers_pipeline_and_as_wide(cases, pipeline, size):
    case, (height, width) = cases[size], size
    arguments = {
        "height": height,
        "width": width,
        "num_inference_steps": 4,
        "guidance_scale": 3.5,
        "max_sequence_length": 8,
        "latents": case.noise,
    }
    latents = pipeline("the number 7", output_type="latent", **arguments).images
    # Four steps, and sigmas that the pipeline rounds to float32.
    assert tiny.relative_l2(case.latents(), latents) < 1e-5
    picture = pipeline("the number 7", output_type="pt", **arguments).images
    assert case.picture().shape == picture.shape == (1, 3, height, width)
    assert tiny.relative_l2(case.picture(), picture) < 1e-5


@torch.no_grad()
def test_a_transposed_size_is_not_the_transposed_picture(cases):
    """If it were, swapped sides would go unnoticed above."""
    wide, high = cases[32, 64], cases[64, 32]
    velocity = unpack_latents(wide.velocity(), 4, 8)
    transposed = unpack_latents(high.velocity(), 8, 4).mT
    assert tiny.relative_l2(transposed, velocity) > 0.05
    assert tiny.relative_l2(high.picture().mT, wide.picture()) > 0.05
