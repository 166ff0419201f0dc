# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Two transformers of one pipeline, as Wan 2.2 A14B has them, in every format and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints_tools.exporting import export_weights
from checkpoints_tools.importing import import_weights
from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.store import damage
from megatron_leangrpo.grpo.architecture import Architecture, resolve_architecture
from megatron_leangrpo.models.common.conversion import Converted, InMemory
from megatron_leangrpo.models.common.weights import full_tensors
from megatron_leangrpo.models.wan import config as wan_config
from megatron_leangrpo.models.wan.weight_map import weight_rules
from tests.checkpoints_tools import published
from tests.command_line import files
from tests.grpo import tiny
from tests.models import wan_parity

FOLDERS = ("transformer", "transformer_2")
INDEX = {
    "_class_name": "WanPipeline",
    "boundary_ratio": 0.85,
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "transformer_2": ["diffusers", "WanTransformer3DModel"],
}
SETTINGS = wan_parity.text_to_video()


@pytest.fixture(scope="module")
def experts() -> dict[str, published.Tensors]:
    """The weights by folder; do not change them."""
    high = {n: t.clone() for n, t in wan_parity.diffusers_model(SETTINGS).state_dict().items()}
    noise = torch.Generator().manual_seed(1)
    low = {n: t + 1e-2 * torch.randn(t.shape, generator=noise) for n, t in high.items()}
    return dict(zip(FOLDERS, (high, low)))


def save_pipeline(path: Path, experts: dict[str, published.Tensors]) -> Path:
    """Both folders, what names them, and another part."""
    for folder, tensors in experts.items():
        published.save_folder(path / folder, tensors, wan_config.to_diffusers_config(SETTINGS))
    (path / "model_index.json").write_text(json.dumps(INDEX))
    (path / "vae").mkdir()
    (path / "vae" / "config.json").write_text("{}")
    return path


@pytest.fixture
def pipeline(experts, tmp_path) -> Path:
    return save_pipeline(tmp_path / "pipeline", experts)


@pytest.fixture
def imported(pipeline, tmp_path) -> Path:
    import_weights("wan", str(pipeline), str(tmp_path / "megatron"), 2)
    return tmp_path / "megatron"


def holds(folder: Path, experts: dict[str, published.Tensors]) -> bool:
    return all(published.same(published.read_folder(folder / n), experts[n]) for n in experts)


@pytest.mark.parametrize("cut_for", [1, 2])
def test_a_pipeline_goes_through_bit_for_bit(experts, tmp_path, cut_for):
    narrow = {f: {n: t.bfloat16() for n, t in own.items()} for f, own in experts.items()}
    narrow["transformer_2"]["proj_out.bias"] = experts["transformer_2"]["proj_out.bias"]
    pipeline = save_pipeline(tmp_path / "pipeline", narrow)
    published.save_shards(pipeline / "transformer_2", narrow["transformer_2"])
    source = import_weights("wan", str(pipeline), str(tmp_path / "megatron"), cut_for)
    assert len(source.ours) == 2 * len(source.transformers["transformer"].ours)
    assert damage(tmp_path / "megatron") is None
    export_weights(str(tmp_path / "megatron"), str(tmp_path / "out"), False, 10**5)
    assert holds(tmp_path / "out", narrow)
    for name in FOLDERS:
        config = [json.loads((f / name / "config.json").read_text())
                  for f in (pipeline, tmp_path / "out")]  # fmt: skip
        assert config[0] == config[1]


def _architecture(base: str | None, weights: str, tensor_parallel: int = 1) -> Architecture:
    parallel = {"tensor_model_parallel_size": tensor_parallel}
    model = {"family": "wan", "preset": None, "base": base, "weights": weights}
    return resolve_architecture(tiny.tiny_config("none", model=model, parallel=parallel))


def _build(tensor_parallel: int, base: str, weights: str) -> dict[str, torch.Tensor]:
    platform.initialize_distributed(tensor_parallel)
    architecture = _architecture(base, weights, tensor_parallel)
    model = architecture.build_model(torch.device("cpu"))
    return full_tensors(model, architecture.weight_rules)


@pytest.mark.parametrize("tensor_parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_starts_from_an_import(run_ranks, imported, experts, tmp_path, tensor_parallel):
    # Its base has other weights.
    other = {f: {n: t + 1 for n, t in own.items()} for f, own in experts.items()}
    base = save_pipeline(tmp_path / "base", other)
    expected = {f"{f}.{n}": t for f, own in experts.items() for n, t in own.items()}
    for found in run_ranks(tensor_parallel, _build, tensor_parallel, str(base), str(imported)):
        assert published.same(found, expected)


def test_the_authors_folders_mean_the_same_weights(tools, pipeline, experts, tmp_path):
    theirs = tmp_path / "Wan2.2"
    for folder, name in zip(FOLDERS, ("high_noise_model", "low_noise_model")):
        ours = dict(Converted(InMemory(experts[folder]), weight_rules(SETTINGS), to_ours=True))
        rules = weight_rules(SETTINGS, naming="original")
        there = Converted(InMemory(ours), rules, to_ours=False)
        tensors = {n: there[n].contiguous() for n in there}
        config = {"_class_name": "WanModel", "num_heads": SETTINGS.num_attention_heads}
        published.save_folder(theirs / name, tensors, config)
    import_weights("wan", str(theirs), str(tmp_path / "theirs"))
    assert tools("verify", pipeline, theirs).status == 0
    assert tools("verify", pipeline, tmp_path / "theirs").status == 0


def test_exporting_into_a_pipeline_replaces_its_transformers_alone(imported, experts, tmp_path):
    other = {f: {n: t + 1 for n, t in own.items()} for f, own in experts.items()}
    target = save_pipeline(tmp_path / "target", other)
    published.save_shards(target / "transformer", other["transformer"])
    before = files(target)
    export_weights(str(imported), str(target), False, 10**9)
    assert holds(target, experts)
    after = files(target)
    for kept in ("model_index.json", "vae/config.json"):
        assert after[kept] == before[kept]
    # Diffusers' own reader of the configuration, and ours.
    from diffusers import WanPipeline

    assert WanPipeline.load_config(target)["boundary_ratio"] == INDEX["boundary_ratio"]
    assert _architecture(str(target), str(imported)).config.expert_boundary == 0.85


def test_an_export_that_fails_leaves_both_as_they_were(imported, pipeline, monkeypatch):
    from megatron_leangrpo.models import saving

    write, before = saving._write_transformer, files(pipeline)

    def write_first(folder: Path, *arguments: Any) -> list[str]:
        if "transformer_2" in folder.name:
            raise OSError("no space")
        return write(folder, *arguments)

    monkeypatch.setattr(saving, "_write_transformer", write_first)
    with pytest.raises(OSError, match="no space"):
        export_weights(str(imported), str(pipeline), False, 10**9)
    assert files(pipeline) == before


def test_verify_and_inspect_know_both(tools, refuses, pipeline, imported, experts, tmp_path):
    outcome = tools("verify", pipeline, imported, "--forward")
    assert outcome.status == 0, outcome
    assert f"EQUAL: {2 * len(experts['transformer'])} tensors" in outcome.out
    for folder in FOLDERS:
        assert f"forward of {folder} EQUAL" in outcome.out
    changed = {**experts["transformer_2"]}
    changed["proj_out.bias"] = changed["proj_out.bias"] + 1
    other = save_pipeline(tmp_path / "other", {**experts, "transformer_2": changed})
    outcome = tools("verify", imported, other, "--forward")
    assert outcome.status == 1 and "transformer_2.proj_out.bias" in outcome.out
    assert "forward of transformer EQUAL" in outcome.out
    assert "forward of transformer_2 DIFFERENT" in outcome.out
    refuses(["A has two transformers and B one"], "verify", imported, pipeline / "transformer")
    for path in (pipeline, imported):
        outcome = tools("inspect", path)
        assert outcome.status == 0 and "wan, 2 transformers of 2 blocks" in outcome.out
    described = json.loads(tools("inspect", pipeline, "--json").out)
    assert described["transformers"] == list(FOLDERS)
    assert described["parameters"] == 2 * sum(t.numel() for t in experts["transformer"].values())
    # One of them alone is a checkpoint as any other.
    import_weights("wan", str(pipeline / "transformer_2"), str(tmp_path / "low"))
    assert tools("verify", pipeline / "transformer_2", tmp_path / "low").status == 0


def _without_second(pipeline: Path) -> None:
    shutil.rmtree(pipeline / "transformer_2")


def _without_tensor(pipeline: Path) -> None:
    tensors = published.read_folder(pipeline / "transformer_2")
    del tensors["proj_out.bias"]
    published.save_shards(pipeline / "transformer_2", tensors, parts=1)


def _without_name(pipeline: Path) -> None:
    (pipeline / "model_index.json").write_text('{"_class_name": "WanPipeline"}')


def _without_first_and_index(pipeline: Path) -> None:
    shutil.rmtree(pipeline / "transformer")
    (pipeline / "model_index.json").unlink()


def _other_architecture(pipeline: Path) -> None:
    settings = wan_parity.text_to_video(num_layers=1)
    state = {n: t.clone() for n, t in wan_parity.diffusers_model(settings).state_dict().items()}
    _without_second(pipeline)
    config = wan_config.to_diffusers_config(settings)
    published.save_folder(pipeline / "transformer_2", state, config)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (_without_second, ["has no folder transformer_2", "needed are transformer and"]),
        (_without_tensor, ["transformer_2 are not those of its wan", "1 missing", "proj_out.bias"]),
        (_without_name, ["has a folder transformer_2, which its model_index.json does not name"]),
        (_without_first_and_index, ["has no folder transformer ", "transformer_2"]),
        (_other_architecture, ["transformer_2", "differ in their format or architecture"]),
    ],
)
def test_what_is_not_two_whole_transformers_is_refused(pipeline, refuses, tmp_path, change, parts):
    change(pipeline)
    out = tmp_path / "out"
    refuses(["--input", *parts], "import", "--model", "wan", "--input", pipeline, "--output", out)
    assert not out.exists()


def test_a_folder_of_something_else_is_not_written_into(imported, refuses, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    arguments = ["export", "--input", imported, "--output", mine]
    refuses(["--output", "holds thesis.tex and no model_index.json"], *arguments)
    assert files(mine).keys() == {"thesis.tex"}
