# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""LoRA files: ours in diffusers' pipelines, and what other programs write in ours or refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_leangrpo.models.common.conversion import InMemory
from megatron_leangrpo.models.common.lora_targets import LowRank
from megatron_leangrpo.models.families import model_family
from megatron_leangrpo.models.lora_files import WEIGHTS, LoraFile, Names, read_lora
from megatron_leangrpo.models.lora_merging import Merged, WeightChanges
from megatron_leangrpo.models.saving import save_lora_folder
from tests.models import flux_parity, wan_parity
from tests.models.flux_parity import relative_l2

RANK = 4
Tensors = dict[str, torch.Tensor]


def _names(family_name: str, config) -> Names:
    family = model_family(family_name)
    with torch.device("meta"):
        model = family.build(config)
    return Names.of(model, family.weight_rules(config), family.original.weight_rules(config))


@pytest.fixture(scope="module")
def models():
    """The names of each model, and diffusers' model."""
    from megatron_leangrpo import platform

    platform.initialize_distributed(tensor_model_parallel_size=1)
    flux, wan = flux_parity.small_config(), wan_parity.text_to_video()
    made = {
        "flux": (_names("flux", flux), flux_parity.diffusers_model(flux)),
        "wan": (_names("wan", wan), wan_parity.diffusers_model(wan)),
    }
    platform.destroy_distributed()
    return made


def _pair(rows: int, columns: int, rank: int = RANK) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rank, columns), torch.randn(rows, rank)


def _adapters(model: torch.nn.Module, names: list[str], rank: int = RANK) -> Tensors:
    """A and B of some of diffusers' projections, without a prefix."""
    tensors = {}
    for name in names:
        a, b = _pair(*model.get_submodule(name).weight.shape, rank)
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    return tensors


def _changes(found: LoraFile) -> Tensors:
    """What merging adds to each weight."""
    tensors = found.tensors
    return {
        name: low.scale * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        for name, low in found.projections.items()
    }


def _plain_changes(tensors: Tensors, scale: float = 1.0) -> Tensors:
    stems = [n.removesuffix(".lora_A.weight") for n in tensors if n.endswith("lora_A.weight")]
    return {
        stem: scale * tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
        for stem in stems
    }


def _assert_equal(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    assert max(relative_l2(actual[name], expected[name]) for name in expected) < 1e-6


@pytest.mark.parametrize("alpha", [8.0, 2.0])
def test_a_pipeline_loads_our_file_at_the_trained_strength(models, tmp_path, alpha):
    from diffusers import FluxPipeline

    names, model = models["flux"]
    before = {n: p.clone() for n, p in model.state_dict().items()}
    wide = [n for n in names.known if n.endswith("to_out.0")]
    projections = {n: LowRank(2 if n in wide else RANK, alpha) for n in names.known}
    tensors = _adapters(model, [n for n in projections if n not in wide]) | _adapters(
        model, wide, rank=2
    )
    [file] = save_lora_folder(tmp_path / "lora", projections, tensors)
    assert [p.name for p in file.parent.iterdir()] == [WEIGHTS]
    found = read_lora(file.parent, names)
    assert found.projections == projections
    assert all(torch.equal(found.tensors[n], tensors[n]) for n in tensors)

    parts = ["scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"]
    pipeline = FluxPipeline(**dict.fromkeys(parts), transformer=model)
    pipeline.load_lora_weights(str(file.parent))
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    after = model.state_dict()
    changes = {n: (after[f"{n}.weight"] - before[f"{n}.weight"]) for n in projections}
    model.load_state_dict(before)
    expected = _changes(found)
    # The difference of two float32 weights.
    assert max(relative_l2(changes[n], expected[n]) for n in projections) < 1e-5


def test_a_second_export_replaces_the_first_and_foreign_files_are_kept(models, tmp_path):
    names, model = models["flux"]
    for prefix in ("transformer_blocks.0", "transformer_blocks.1"):
        chosen = {n: LowRank(RANK, 4.0) for n in names.known if n.startswith(f"{prefix}.attn")}
        [file] = save_lora_folder(tmp_path / "lora", chosen, _adapters(model, list(chosen)))
        assert all(name.startswith(f"transformer.{prefix}") for name in load_file(file))
    (tmp_path / "lora" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"mine\.txt"):
        save_lora_folder(tmp_path / "lora", chosen, _adapters(model, list(chosen)))


def test_a_kohya_file_is_read_as_diffusers_reads_it(models, tmp_path):
    from diffusers.loaders import FluxLoraLoaderMixin

    names, _ = models["flux"]
    hidden, ffn, kohya = 96, 384, {}
    sizes = {
        "img_attn_qkv": (3 * hidden, hidden), "txt_attn_qkv": (3 * hidden, hidden),
        "img_attn_proj": (hidden, hidden), "txt_attn_proj": (hidden, hidden),
        "img_mlp_0": (ffn, hidden), "img_mlp_2": (hidden, ffn), "txt_mlp_0": (ffn, hidden),
        "txt_mlp_2": (hidden, ffn), "img_mod_lin": (6 * hidden, hidden),
        "txt_mod_lin": (6 * hidden, hidden),
    }  # fmt: skip
    single = {"linear1": (3 * hidden + ffn, hidden), "linear2": (hidden, hidden + ffn)}
    for kind, layers in (("double", sizes), ("single", {**single, "modulation_lin": (288, 96)})):
        for n in range(2):
            for layer, shape in layers.items():
                stem = f"lora_unet_{kind}_blocks_{n}_{layer}"
                a, b = _pair(*shape)
                kohya |= {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": b}
                kohya[f"{stem}.alpha"] = torch.tensor(2.0)
    save_file(kohya, tmp_path / "kohya.safetensors")
    # The converter knows the rows of FLUX.1-dev's linear1 alone; they are q, k, v and the MLP's.
    others = {n: t for n, t in kohya.items() if "linear1" not in n}
    converted, _ = FluxLoraLoaderMixin.lora_state_dict(others, return_alphas=True)
    expected = _plain_changes({n.removeprefix("transformer."): t for n, t in converted.items()})
    for n in range(2):
        stem, block = f"lora_unet_single_blocks_{n}_linear1", f"single_transformer_blocks.{n}"
        fused = 2.0 / RANK * kohya[f"{stem}.lora_up.weight"] @ kohya[f"{stem}.lora_down.weight"]
        parts = [f"{block}.attn.to_{x}" for x in "qkv"] + [f"{block}.proj_mlp"]
        expected |= dict(zip(parts, fused.split((hidden, hidden, hidden, ffn))))
    _assert_equal(_changes(read_lora(tmp_path / "kohya.safetensors", names)), expected)


def test_a_wan_file_under_the_authors_names_is_read_as_diffusers_reads_it(models, tmp_path):
    from diffusers.loaders import WanLoraLoaderMixin

    names, _ = models["wan"]
    original = {}
    for n in range(2):
        for layer in ("self_attn.q", "self_attn.o", "cross_attn.k", "cross_attn.v", "ffn.0"):
            a, b = _pair(80 if layer == "ffn.0" else 64, 64)
            stem = f"diffusion_model.blocks.{n}.{layer}"
            original |= {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": b}
            original[f"{stem}.alpha"] = torch.tensor(1.0)
    save_file(original, tmp_path / "wan.safetensors")
    converted = WanLoraLoaderMixin.lora_state_dict({n: t.clone() for n, t in original.items()})
    expected = _plain_changes({n.removeprefix("transformer."): t for n, t in converted.items()})
    _assert_equal(_changes(read_lora(tmp_path / "wan.safetensors", names)), expected)


@pytest.mark.parametrize("prefix", ["", "transformer.", "base_model.model.", "diffusion_model."])
def test_any_usual_prefix_is_read_and_without_a_statement_alpha_is_the_rank(
    models, tmp_path, prefix
):
    names, model = models["flux"]
    plain = _adapters(
        model, ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.1.proj_mlp"]
    )
    save_file({prefix + n: t for n, t in plain.items()}, tmp_path / "a.safetensors")
    _assert_equal(_changes(read_lora(tmp_path / "a.safetensors", names)), _plain_changes(plain))


def test_underscores_for_dots_in_diffusers_names_are_read(models, tmp_path):
    """As sd-scripts and OneTrainer write them."""
    names, model = models["flux"]
    plain = _adapters(
        model, ["transformer_blocks.0.attn.to_out.0", "transformer_blocks.1.ff.net.2"]
    )
    renamed = {}
    for name, tensor in plain.items():
        stem, letter = name[: -len(".lora_A.weight")], name[-len("A.weight")]
        way = {"A": "down", "B": "up"}[letter]
        renamed[f"lora_transformer_{stem.replace('.', '_')}.lora_{way}.weight"] = tensor
    save_file(renamed, tmp_path / "a.safetensors")
    _assert_equal(_changes(read_lora(tmp_path / "a.safetensors", names)), _plain_changes(plain))


def test_a_peft_folder_has_the_scale_its_configuration_says(models, tmp_path):
    names, model = models["flux"]
    plain = _adapters(model, ["transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"])
    peft = {f"base_model.model.{n}": t for n, t in plain.items()}
    save_file(peft, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "use_rslora": True}
    config["alpha_pattern"] = {"to_k": 10}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    changes = _changes(read_lora(tmp_path, names))
    # rank-stabilised: alpha / sqrt(rank).
    expected = {
        **_plain_changes({n: t for n, t in plain.items() if "to_q" in n}, 6 / 2),
        **_plain_changes({n: t for n, t in plain.items() if "to_k" in n}, 10 / 2),
    }
    _assert_equal(changes, expected)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(ValueError, match="use_dora"):
        read_lora(tmp_path, names)


Q = "transformer.transformer_blocks.0.attn.to_q"
REFUSED = {
    "DoRA": ({f"{Q}.lora_magnitude_vector": torch.ones(96)}, "DoRA"),
    "LoKr": ({"lycoris_blocks_0.lokr_w1": torch.ones(8, 8)}, "LoKr"),
    "a bias": ({f"{Q}.lora_B.bias": torch.ones(96)}, "biases"),
    "a whole difference": ({f"{Q}.diff_b": torch.ones(96)}, "whole differences"),
    "a lone half": ({f"{Q[:-4]}to_k.lora_A.weight": torch.ones(4, 96)}, "to_k has no lora_B"),
    "a lone alpha": ({f"{Q[:-4]}to_k.alpha": torch.ones(())}, "to_k has an alpha alone"),
    "a text encoder": (
        {"lora_te1_x.lora_down.weight": torch.ones(4, 8),
         "lora_te1_x.lora_up.weight": torch.ones(8, 4)},
        "1 of the adapted projections are not in this model: lora_te1_x",
    ),
    "something else": ({"foo.weight": torch.ones(2)}, "no LoRA's: foo.weight"),
    "other ranks": ({f"{Q}.lora_B.weight": torch.ones(96, 3)}, r"\(4, 96\) and \(96, 3\)"),
    "the same twice": (
        {"transformer_blocks.0.attn.to_q.lora_A.weight": torch.ones(4, 96),
         "transformer_blocks.0.attn.to_q.lora_B.weight": torch.ones(96, 4)},
        "adapts transformer_blocks.0.attn.to_q twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_used_whole_is_refused_by_name(models, tmp_path, kind):
    names, model = models["flux"]
    extra, message = REFUSED[kind]
    plain = {f"transformer.{n}": t for n, t in _adapters(model, [Q[12:]]).items()}
    save_file(plain | extra, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=message):
        read_lora(tmp_path / "a.safetensors", names)


def test_a_file_for_another_model_is_refused_with_a_few_names_and_their_number(models, tmp_path):
    save_file(_adapters(models["wan"][1], list(models["wan"][0].known)), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"20 of .* blocks\.0\.attn1\.to_k, .* and 16 more"):
        read_lora(tmp_path / "a.safetensors", models["flux"][0])


@pytest.mark.parametrize("content", [None, b"", b"\x80\x04cos\nsystem\n", b"\x10\0\0\0\0\0\0\0{}"])
def test_what_is_no_safetensors_file_is_refused(models, tmp_path, content):
    path = tmp_path / "a.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"lora\.path: .*a\.safetensors"):
        read_lora(path, models["flux"][0])


def test_an_empty_or_ambiguous_folder_is_refused(models, tmp_path):
    with pytest.raises(ValueError, match="holds no safetensors"):
        read_lora(tmp_path, models["flux"][0])
    for name in ("b", "a"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"holds a\.safetensors, b\.safetensors"):
        read_lora(tmp_path, models["flux"][0])


def test_merged_weights_are_as_wide_as_asked_for():
    weight = torch.ones(4, 3, dtype=torch.bfloat16)
    a, b = torch.full((2, 3), 1e-2), torch.full((4, 2), 1e-2)
    tensors = {"x.lora_A.weight": a, "x.lora_B.weight": b}
    changes = WeightChanges({"x": LowRank(2, 4.0)}, tensors)
    base = InMemory({"x.weight": weight, "y.weight": weight})
    wide = Merged(base, changes, "--lora", torch.float32)
    # 2 * (two products of 1e-4)
    assert torch.allclose(wide["x.weight"], torch.full((4, 3), 1.0004), atol=1e-7)
    assert {info.dtype for info in wide.layout.values()} == {torch.float32}
    assert torch.equal(wide["y.weight"], weight.float())
    # Half a unit in the last place of bfloat16 at 1 is 4e-3.
    assert torch.equal(Merged(base, changes, "--lora")["x.weight"], weight)
    with pytest.raises(ValueError, match=r"--lora: adapts x\.weight \(4, 3\), which is not there"):
        Merged(InMemory({"y.weight": weight}), changes, "--lora")
