# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Checkpoints over pipeline stages: what one layout has saved, another goes on from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from checkpoints_tools.exporting import export_weights
from checkpoints_tools.importing import import_weights
from checkpoints_tools.opening import open_checkpoint
from megatron_leangrpo import platform
from megatron_leangrpo.checkpoint.saving import CheckpointSaver
from megatron_leangrpo.checkpoint.store import step_folder
from megatron_leangrpo.checkpoint.training import TrainingState, load_checkpoint, load_weights
from megatron_leangrpo.config import OptimizerConfig
from megatron_leangrpo.grpo.data_parallel import (
    wrap_data_parallel,
    wrappers_of,
    zero_gradients,
)
from megatron_leangrpo.grpo.ema import WeightAverage
from megatron_leangrpo.grpo.optimization import Optimization, build_optimization
from megatron_leangrpo.models.common.lora import (
    adapter_rules,
    attach_adapters,
    initialise_adapters,
)
from megatron_leangrpo.models.common.lora_targets import LowRank
from megatron_leangrpo.models.common.weights import (
    full_shape,
    full_tensors,
    initialise,
    load_full_tensors,
    shard_dim,
)
from megatron_leangrpo.models.experts import Experts, rules_of_experts
from megatron_leangrpo.models.families import model_family
from megatron_leangrpo.models.loading import load_transformer_folder
from tests.checkpoints_tools import published
from tests.models import wan_parity
from tests.models.flux_parity import diffusers_model, small_config

Layout = tuple[int, int] | tuple[int, int, tuple[int, ...]]
"""Tensor and pipeline parallel, and maybe the split; the other ranks are data parallel."""
STEPS = 3
ADAPTED = {
    "transformer_blocks.0.attn.to_q": LowRank(2, 4.0),
    "transformer_blocks.1.attn.to_out.0": LowRank(2, 4.0),
    "single_transformer_blocks.0.attn.to_v": LowRank(3, 3.0),
    "single_transformer_blocks.1.proj_out": LowRank(2, 4.0),
}
# float32, and norms that are summed in another order decide how far a gradient is clipped.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@dataclass
class Run:
    """A model in training at one layout."""

    model: torch.nn.Module
    wrapped: torch.nn.Module
    optimization: Optimization
    average: WeightAverage
    rules: list
    trained: str

    @property
    def state(self) -> TrainingState:
        return TrainingState(
            self.model,
            self.optimization.optimizer,
            self.optimization.scheduler,
            self.average.values,
        )

    def train(self, first: int) -> list[float]:
        """Steps on given gradients; the norms."""
        norms = []
        for step in range(first, first + STEPS):
            zero_gradients(self.wrapped)
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if parameter.requires_grad:
                        parameter.main_grad.copy_(_gradient(name, parameter, step))
            for wrapper in wrappers_of(self.wrapped):
                wrapper.finish_grad_sync()
            norms.append(self.optimization.step()["grad_norm"])
            self.average.update(self.model, step)
        return norms

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that is trained and its average, from all ranks."""
        rules = adapter_rules(self.model) if self.trained == "adapters" else self.rules
        values = {id(p): self.average.values.get(n) for n, p in self.model.named_parameters()}
        averages = full_tensors(self.model, rules, lambda parameter: values[id(parameter)])
        live = full_tensors(self.model, rules)
        return live | {f"average.{name}": tensor for name, tensor in averages.items()}


def _gradient(name: str, parameter: torch.nn.Parameter, step: int) -> torch.Tensor:
    """This rank's shard of a random gradient, which the data-parallel ranks add up to."""
    seed = int.from_bytes(hashlib.sha256(f"{name} {step}".encode()).digest()[:6], "little")
    full = torch.randn(full_shape(parameter), generator=torch.Generator().manual_seed(seed))
    dim = shard_dim(parameter)
    own = full if dim is None else full.chunk(platform.tp_size(), dim)[platform.tp_rank()]
    return own / platform.dp_size()


def _build(layout: Layout, distributed: bool, trained: str, dtype=torch.float32) -> Run:
    tensor, stages, *split = layout
    platform.initialize_distributed(tensor, pipeline_model_parallel_size=stages)
    sizes = {
        "pipeline_split": split[0] if split else None,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": stages,
        "params_dtype": dtype,
    }
    if trained == "experts":
        family, config = model_family("wan"), wan_parity.text_to_video(num_layers=4, **sizes)
        rules = rules_of_experts(family.weight_rules(config), ("transformer", "transformer_2"))
        model = Experts(family.build(config), family.build(config), boundary=0.5)
    else:
        config = small_config(hidden_size=32, axes_dims_rope=(2, 2, 4), **sizes)
        family = model_family("flux")
        model, rules = family.build(config), family.weight_rules(config)
    initialise(model, rules, seed=0)
    if trained == "adapters":
        attach_adapters(model, rules, ADAPTED)
        initialise_adapters(model, seed=0)
    wrapped = wrap_data_parallel(model, distributed)
    # The norm is far above it: every step is clipped.
    settings = OptimizerConfig(lr=1e-2, clip_grad=0.5, use_distributed_optimizer=distributed)
    optimization = build_optimization(wrapped, settings, total_updates=100)
    average = WeightAverage(model, cap=0.9, interval=1)
    return Run(model, wrapped, optimization, average, rules, trained)


def _chain(layouts: list[Layout], folder: str, distributed: bool, trained: str, dtype):
    """Train at one layout after the other, each from the checkpoint of the one before it."""
    results = []
    for number, layout in enumerate(layouts):
        run = _build(layout, distributed, trained, dtype)
        if number:
            done = load_checkpoint(step_folder(Path(folder), STEPS * number), run.state)
            assert done == STEPS * number
            loaded = run.tensors()
            assert loaded.keys() == results[-1][1].keys()
            assert all(torch.equal(loaded[n], t) for n, t in results[-1][1].items())
        norms = run.train(STEPS * number)
        saver = CheckpointSaver(Path(folder), keep=9)
        saver.start(run.state, STEPS * (number + 1))
        saver.finish()
        results.append((norms, run.tensors()))
    return results


def _straight(count: int, trained: str, dtype=torch.float32):
    run = _build((1, 1), False, trained, dtype)
    return [(run.train(STEPS * n), run.tensors()) for n in range(count)]


CHAIN = [(2, 2), (1, 1), (4, 1), (1, 4), (2, 2)]


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize(
    ("layouts", "ranks", "distributed", "trained", "dtype"),
    [
        ([(2, 2), (1, 1)], 4, True, "weights", torch.float32),
        ([(2, 2), (4, 1)], 4, True, "adapters", torch.float32),
        pytest.param(CHAIN, 4, True, "adapters", torch.float32, marks=pytest.mark.slow),
        pytest.param(
            [(2, 2), (1, 4), (1, 1)], 4, True, "experts", torch.float32, marks=pytest.mark.slow
        ),
        pytest.param(CHAIN, 4, True, "weights", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(CHAIN, 4, False, "weights", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(
            [(1, 2, (1, 3)), (1, 2, (3, 1))],
            2,
            True,
            "weights",
            torch.float32,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_goes_on_at_any_layout_as_if_it_had_never_changed(
    run_ranks, tmp_path, layouts, ranks, distributed, trained, dtype
):
    expected = _straight(len(layouts), trained, dtype)
    results = run_ranks(ranks, _chain, layouts, str(tmp_path), distributed, trained, dtype)
    # In bfloat16 a master's last bits decide how a weight is rounded.
    tolerance = TOLERANCE if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-4}
    for own in results:
        for (norms, tensors), (their_norms, theirs) in zip(own, expected, strict=True):
            assert min(norms) > 1
            assert norms == pytest.approx(their_norms, rel=1e-5)
            assert tensors.keys() == theirs.keys()
            for name, tensor in tensors.items():
                torch.testing.assert_close(tensor, theirs[name], **tolerance)


def _reload(family_name: str, layout: Layout, plain: str, imported: str, folder: str):
    """Load an import and its source at a layout, save there; the weights of both, on each rank."""
    tensor, stages = layout
    platform.initialize_distributed(tensor, pipeline_model_parallel_size=stages)
    family = model_family(family_name)
    published_config, tensors = load_transformer_folder(plain, family.class_name)
    config = family.from_diffusers_config(
        published_config,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
    )
    rules, first, second = family.weight_rules(config), *(family.build(config) for _ in range(2))
    load_full_tensors(first, rules, tensors)
    load_weights(Path(imported), second, average=False)
    wrapped = wrap_data_parallel(second, use_distributed_optimizer=True)
    built = build_optimization(wrapped, OptimizerConfig(), total_updates=1)
    saver = CheckpointSaver(Path(folder), keep=1)
    state = TrainingState(
        second, built.optimizer, built.scheduler, transformer_config=published_config
    )
    saver.start(state, 1)
    saver.finish()
    return full_tensors(first, rules), full_tensors(second, rules)


def _published(family_name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Random weights in diffusers' own files."""
    config = small_config() if family_name == "flux" else wan_parity.image_to_video(num_layers=4)
    make = diffusers_model if family_name == "flux" else wan_parity.diffusers_model
    state = {name: tensor.clone() for name, tensor in make(config).state_dict().items()}
    to_config = model_family(family_name).to_diffusers_config
    published.save_folder(folder, state, to_config(config))
    return state


@pytest.mark.parametrize(
    ("family_name", "layout"),
    [
        ("wan", (2, 2)),
        pytest.param("flux", (1, 4), marks=pytest.mark.slow),
        pytest.param("flux", (2, 2), marks=pytest.mark.slow),
        pytest.param("wan", (1, 4), marks=pytest.mark.slow),
        *(
            pytest.param(name, layout, marks=pytest.mark.slow)
            for name in ("flux", "wan")
            for layout in ((2, 1), (1, 2), (2, 4))
        ),
    ],
)
def test_from_diffusers_through_stages_and_back_is_bit_exact(
    run_ranks, tmp_path, family_name, layout
):
    plain, imported, saved = (tmp_path / name for name in ("plain", "imported", "saved"))
    state = _published(family_name, plain)
    import_weights(family_name, str(plain), str(imported), layout[0])
    folders = map(str, (plain, imported, saved))
    results = run_ranks(layout[0] * layout[1], _reload, family_name, layout, *folders)
    for loaded in (tensors for rank in results for tensors in rank):
        assert published.same(loaded, state)
    # Opening compares all names and shapes with the whole model's.
    assert open_checkpoint(step_folder(saved, 1), "A").step == 1
    export_weights(str(step_folder(saved, 1)), str(tmp_path / "out"), False, 10**9)
    assert published.same(published.read_folder(tmp_path / "out"), state)
