# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Files that are replaced as a whole or not at all."""

import pytest

from megatron_leangrpo.files import atomic_path, atomic_write, slug


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    atomic_write(tmp_path / "a.json", "old")

    def write_half() -> None:
        with atomic_path(tmp_path / "a.json") as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


def test_a_write_replaces_the_whole_file(tmp_path):
    atomic_write(tmp_path / "a", "a longer text")
    atomic_write(tmp_path / "a", b"short")
    assert (tmp_path / "a").read_bytes() == b"short"


def test_the_temporary_file_keeps_the_suffix_that_names_the_format(tmp_path):
    with atomic_path(tmp_path / "a.png") as temporary:
        assert temporary.suffix == ".png"
        assert temporary.parent == tmp_path
        temporary.touch()


def test_slugs_are_plain():
    assert slug("The Number 7!") == "the-number-7"
    assert slug("Crème brûlée") == "creme-brulee"
    assert slug("../..") == ""
    assert len(slug("y" * 300)) == 40
