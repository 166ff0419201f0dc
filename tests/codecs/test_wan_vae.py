# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from megatron_leangrpo.codecs import VideoPatchCodec, WanVaeCodec
from megatron_leangrpo.codecs.packing import pack_video_latents, unpack_video_latents

TINY = {"base_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]}
# As published, in small: Wan 2.1's VAE, and that of Wan 2.2 5B, which works on 2 x 2 patches.
WAN21 = {**TINY, "z_dim": 4, "scale_factor_spatial": 2, "scale_factor_temporal": 2}
WAN22_5B = {
    **WAN21,
    "decoder_base_dim": 6,
    "dim_mult": [1, 1],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 4,
}


def make_folder(path, fields):
    from diffusers import AutoencoderKLWan

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = AutoencoderKLWan(
            **fields, latents_mean=[0.5, -1.0, 0.0, 2.0], latents_std=[1.0, 3.0, 0.3, 2.0]
        )
    vae.save_pretrained(path / "vae")
    return path


def pipeline_of(folder):
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

    vae = AutoencoderKLWan.from_pretrained(folder / "vae")
    return WanPipeline(None, None, vae, UniPCMultistepScheduler())


def decoded_as_in_the_pipeline(pipeline, latents):
    """The last lines of WanPipeline.__call__."""
    vae, shape = pipeline.vae, (1, -1, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape)
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(shape)
    with torch.no_grad():
        video = vae.decode(latents / inverse_std + mean, return_dict=False)[0]
    return pipeline.video_processor.postprocess_video(video, output_type="pt")


@pytest.mark.parametrize(("fields", "multiple"), [(WAN21, 4), (WAN22_5B, 8)], ids=["2.1", "5B"])
def test_decoding_equals_diffusers_pipeline(tmp_path, fields, multiple):
    folder = make_folder(tmp_path, fields)
    codec = WanVaeCodec.from_pipeline(folder)
    assert codec.makes_videos and codec.multiple == multiple
    height, width = 4 * multiple, 2 * multiple
    assert codec.grid(height, width) == (4, 2)
    for latent_frames in (1, 3):
        generator = torch.Generator().manual_seed(0)
        latents = torch.randn(2, 4, latent_frames, 8, 4, generator=generator)
        videos = codec.decode(pack_video_latents(latents), height, width)
        frames = 1 + 2 * (latent_frames - 1)
        assert videos.shape == (2, frames, 3, height, width) and videos.dtype == torch.float32
        assert torch.equal(videos, decoded_as_in_the_pipeline(pipeline_of(folder), latents))


def test_decoding_in_chunks_equals_decoding_at_once(tmp_path, monkeypatch):
    from megatron_leangrpo.codecs import loading

    codec = WanVaeCodec.from_pipeline(make_folder(tmp_path, WAN21))
    latents = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(2))
    expected = codec.decode(latents, 8, 8)
    monkeypatch.setattr(loading, "PIXELS_PER_CHUNK", 1)
    # Convolutions of other batch sizes may add in another order.
    torch.testing.assert_close(codec.decode(latents, 8, 8), expected, atol=1e-5, rtol=0)


def test_video_tokens_are_packed_frame_by_frame():
    latents = torch.randn(2, 4, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    tokens = pack_video_latents(latents)
    assert tokens.shape == (2, 3 * 2 * 3, 16)
    # The second frame's first token: channels in (c, 2, 2) order.
    assert torch.equal(tokens[:, 6], latents[:, :, 1, :2, :2].flatten(1))
    assert torch.equal(unpack_video_latents(tokens, 2, 3), latents)


def test_patch_codec_shows_every_latent_frame_for_as_long_as_it_lasts():
    codec = VideoPatchCodec(channels=16, patch=4, temporal_stride=4)
    latents = torch.zeros(1, 4, 3, 4, 4)
    latents[0, 0, 1] = 2.0
    video = codec.decode(pack_video_latents(latents), 8, 8)
    assert codec.makes_videos and video.shape == (1, 9, 3, 8, 8)
    assert video[0, :, 0, 0, 0].tolist() == [0.5, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]


def test_folder_without_vae_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not the VAE of a Wan pipeline"):
        WanVaeCodec.from_pipeline(tmp_path)
