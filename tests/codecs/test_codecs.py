# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from megatron_leangrpo.codecs import PatchCodec, VaeCodec, check_size
from megatron_leangrpo.codecs.packing import pack_latents, unpack_latents

# Issue 2, case HB14, FLUX rows.
GOOD_SIZES = [(512, 512), (512, 768), (768, 512), (720, 720), (1024, 16)]
BAD_SIZES = [
    (520, 520, "sampling.height=520: must be a positive multiple of 16; nearest valid: 512 or 528"),
    (1000, 1000, "sampling.height=1000: .*992 or 1008"),
    (1080, 1350, "sampling.height=1080: .*1072 or 1088"),
    (512, 1350, "sampling.width=1350: .*1344 or 1360"),
    (0, 512, "sampling.height=0: .*16 or 32"),
    (-16, 512, "sampling.height=-16: .*16 or 32"),
]


@pytest.fixture(scope="module")
def codec(base_folder):
    return VaeCodec.from_pipeline(base_folder)


@pytest.fixture(scope="module")
def pipeline(base_folder):
    from diffusers import FluxPipeline

    return FluxPipeline.from_pretrained(
        base_folder, text_encoder=None, text_encoder_2=None, dtype=torch.float32
    )


@pytest.mark.parametrize(("height", "width"), GOOD_SIZES)
def test_good_sizes_pass(height, width):
    check_size(height, width, 16)


@pytest.mark.parametrize(("height", "width", "message"), BAD_SIZES)
def test_bad_sizes_are_refused_with_the_nearest_valid_ones(height, width, message):
    with pytest.raises(ValueError, match=message):
        check_size(height, width, 16)
    with pytest.raises(ValueError, match=message):
        PatchCodec(64, 16).grid(height, width)


def test_packed_order_is_diffusers(pipeline):
    latents = torch.arange(2 * 4 * 6 * 10.0).view(2, 4, 6, 10)
    packed = pack_latents(latents)
    assert torch.equal(packed, pipeline._pack_latents(latents, 2, 4, 6, 10))
    assert torch.equal(unpack_latents(packed, 3, 5), latents)
    # diffusers takes the picture size; the tiny VAE divides it by 4.
    assert torch.equal(unpack_latents(packed, 3, 5), pipeline._unpack_latents(packed, 24, 40, 4))


def test_tiny_vae_sizes(codec):
    assert codec.multiple == 8
    assert codec.grid(32, 64) == (4, 8) and codec.grid(64, 32) == (8, 4)
    with pytest.raises(ValueError, match=r"sampling\.width=36: .*multiple of 8; .*32 or 40"):
        codec.grid(32, 36)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (32, 64), (64, 32)])
def test_decoding_equals_diffusers_pipeline(codec, pipeline, height, width):
    generator = torch.Generator().manual_seed(0)
    rows, columns = codec.grid(height, width)
    latents = torch.randn(3, rows * columns, 16, generator=generator)
    images = codec.decode(latents, height, width)
    unpacked = pipeline._unpack_latents(latents, height, width, pipeline.vae_scale_factor)
    config = pipeline.vae.config
    with torch.no_grad():
        decoded = pipeline.vae.decode(unpacked / config.scaling_factor + config.shift_factor)
    expected = pipeline.image_processor.postprocess(decoded.sample, output_type="pt")
    assert images.shape == (3, 3, height, width) and images.dtype == torch.float32
    assert torch.equal(images, expected)


def test_transposed_noise_is_not_the_transposed_picture(codec):
    """A swap of height and width would go unnoticed if it were."""
    latents = torch.randn(1, 32, 16, generator=torch.Generator().manual_seed(1))
    wide = codec.decode(latents, 32, 64)
    swapped = latents.view(1, 4, 8, 16).transpose(1, 2).reshape(1, 32, 16)
    tall = codec.decode(swapped, 64, 32)
    assert not torch.allclose(wide.transpose(-1, -2), tall, atol=1e-2)


def test_decoding_in_chunks_equals_decoding_at_once(codec, monkeypatch):
    from megatron_leangrpo.codecs import loading

    latents = torch.randn(5, 16, 16, generator=torch.Generator().manual_seed(2))
    expected = codec.decode(latents, 32, 32)
    monkeypatch.setattr(loading, "PIXELS_PER_CHUNK", 2 * 32 * 32)
    # Convolutions of other batch sizes may add in another order.
    torch.testing.assert_close(codec.decode(latents, 32, 32), expected, atol=1e-5, rtol=0)


def test_folder_without_vae_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not the VAE of a FLUX pipeline"):
        VaeCodec.from_pipeline(tmp_path)


def test_patch_codec_shows_the_first_three_latent_channels():
    codec = PatchCodec(channels=64, patch=16)
    assert codec.grid(32, 64) == (2, 4)
    latents = torch.zeros(1, 16, 4, 8)
    latents[0, 1, 0, 7] = 2.0
    image = codec.decode(pack_latents(latents), 32, 64)
    assert image.shape == (1, 3, 32, 64)
    assert (image[0, 1, :8, 56:] == 1).all()
    assert image[0, [0, 2]].eq(0.5).all() and image[0, 1, 8:].eq(0.5).all()


@pytest.mark.parametrize(("channels", "patch"), [(8, 16), (18, 16), (64, 3), (64, 0)])
def test_impossible_patch_codec_is_refused(channels, patch):
    with pytest.raises(ValueError, match="must be"):
        PatchCodec(channels, patch)
