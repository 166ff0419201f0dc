# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Videos of samples: what is in the files, and what a run writes with and without PyAV."""

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_leangrpo.reporting import sample_files
from megatron_leangrpo.reporting.pictures import Sample
from megatron_leangrpo.reporting.sample_files import SampleFiles
from megatron_leangrpo.reporting.video import save_video


def decode(path):
    import av

    with av.open(path) as container:
        stream = container.streams.video[0]
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
        return frames, float(stream.average_rate)


def moving(count=9, height=32, width=48):
    """A black column that moves to the right on white."""
    video = torch.ones(count, 3, height, width)
    for n in range(count):
        video[n, :, :, 4 * n : 4 * n + 4] = 0
    return video


@pytest.fixture
def files(tmp_path):
    warnings = []
    made = SampleFiles(tmp_path, "wan_tiny", warnings.append)
    made.warnings = warnings
    return made


def names(folder):
    return {path.name for path in folder.iterdir()}


def samples(count=3):
    return [Sample(moving(), "a red circle moving left", 0.5, n == 0) for n in range(count)]


def test_a_video_file_plays_frame_by_frame_and_large_enough_to_see(tmp_path):
    save_video(tmp_path / "a.mp4", moving())
    frames, rate = decode(tmp_path / "a.mp4")
    # 32 x 48 is enlarged by 5; 9 frames last a second.
    assert frames.shape == (9, 160, 240, 3) and rate == 9
    for n, frame in enumerate(frames):
        column = frame.mean((0, 2))
        # What the encoder leaves out is far from half of the range.
        assert (column[20 * n : 20 * n + 20] < 64).all() and (column > 192).sum() == 220


@pytest.mark.parametrize(("height", "width"), [(33, 35), (480, 832)])
def test_odd_and_large_sizes_are_written(tmp_path, height, width):
    save_video(tmp_path / "a.mp4", torch.rand(2, 3, height, width))
    frames, _ = decode(tmp_path / "a.mp4")
    assert frames.shape[0] == 2 and frames.shape[1] % 2 == frames.shape[2] % 2 == 0


def test_a_run_of_videos_writes_sheets_and_videos_before_after_and_both(files, tmp_path):
    files.evaluation(0, 2, samples())
    files.evaluation(2, 2, samples())
    stems = {"step_000000", "step_000002", "before", "after", "before_after"}
    assert names(tmp_path) == {f"{s}.{kind}" for s in stems for kind in ("png", "mp4")} | {
        ".before.safetensors"
    }
    frames, _ = decode(tmp_path / "before_after.mp4")
    one, _ = decode(tmp_path / "after.mp4")
    assert len(frames) == 9 and frames.shape[2] > one.shape[2] / 2
    assert (frames[0] != frames[8]).any()
    assert files.warnings == []


def test_a_resumed_run_still_has_its_before(files, tmp_path):
    files.evaluation(0, 2, samples())
    sheet = Image.open(tmp_path / "before.png").size
    SampleFiles(tmp_path, "wan_tiny", print).evaluation(2, 2, samples())
    assert Image.open(tmp_path / "before_after.png").width > sheet[0]


def test_without_pyav_sheets_are_written_and_one_line_says_how_to_get_it(
    files, tmp_path, monkeypatch
):
    monkeypatch.setattr(sample_files, "can_write_videos", lambda: False)
    files.evaluation(0, 1, samples())
    files.evaluation(1, 1, samples())
    files.single(3, 0, samples()[0])
    assert not any(name.endswith(".mp4") for name in names(tmp_path))
    assert {"before.png", "after.png", "before_after.png"} < names(tmp_path)
    assert len(files.warnings) == 1
    assert "pip install 'megatron-leangrpo[video]'" in files.warnings[0]


def test_pictures_need_no_pyav(files, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_files, "can_write_videos", lambda: False)
    files.grid("grid", [Sample(torch.rand(3, 8, 8), "p")], "title")
    files.single(3, 1, Sample(torch.rand(3, 8, 8), "the number 7"))
    assert names(tmp_path) == {"grid.png", "00003-01-the-number-7.png"}
    assert files.warnings == []


def test_a_sample_alone_is_a_video(files, tmp_path):
    files.single(3, 1, samples()[0])
    assert names(tmp_path) == {"00003-01-a-red-circle-moving-left.mp4"}
