# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Pipeline stages, cut anywhere, are the whole transformer: velocity, gradients, boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megatron_leangrpo import platform
from megatron_leangrpo.grpo.data_parallel import (
    reduce_gradients,
    wrap_data_parallel,
    zero_gradients,
)
from megatron_leangrpo.models.common.weights import (
    full_tensors,
    gradient_of,
    initialise,
    load_full_tensors,
)
from megatron_leangrpo.models.experts import Experts
from megatron_leangrpo.models.families import model_family
from megatron_leangrpo.overlap.settings import OverlapSettings
from megatron_leangrpo.pipeline.order import Item
from megatron_leangrpo.pipeline.stages import Stage
from megatron_leangrpo.pipeline.transport import StageTransport, TensorSpec
from tests.models import flux_parity, wan_parity

PER_TOKEN = {"timestep_per_token": True}
# float64 in another order of summation: the state's gradient is summed stage by stage.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def _splits(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each stage a block or more."""
    if stages == 1:
        yield (blocks,)
        return
    for first in range(1, blocks - stages + 2):
        for rest in _splits(blocks - first, stages - 1):
            yield (first, *rest)


def _flux(**overrides):
    sizes = {"num_double_blocks": 3, "num_single_blocks": 2, "params_dtype": torch.float64}
    return flux_parity.small_config(**{**sizes, **overrides})


def _wan(**overrides):
    sizes = {"num_layers": 4, "params_dtype": torch.float64}
    return wan_parity.text_to_video(**{**sizes, **overrides})


def _wan_with_picture(**overrides):
    return _wan(**{"num_layers": 3, "in_channels": 8, "image_dim": 20, **overrides})


CASES = {
    "flux": ("flux", _flux),
    "wan": ("wan", _wan),
    "wan with a picture": ("wan", _wan_with_picture),
    "wan, timesteps per token": ("wan", _wan),
}
OVERLAPPED = {
    "flux, overlapped": ("flux", partial(_flux, overlap=OverlapSettings("flash"))),
    "wan, overlapped": ("wan", partial(_wan, overlap=OverlapSettings("flash"))),
}


def _inputs(case: str, config):
    if case.startswith("flux"):
        return flux_parity.make_inputs(config, dtype=config.params_dtype)
    made = wan_parity.make_inputs(config, per_token="per token" in case)
    return made.to(config.params_dtype)


def _options(case: str) -> dict[str, bool]:
    return PER_TOKEN if "per token" in case else {}


def _whole(case: str):
    """The whole model after its backward, and its velocity."""
    name, make = CASES[case]
    config = make()
    inputs, model = _inputs(case, config), model_family(name).build(config)
    initialise(model, model_family(name).weight_rules(config), seed=1)
    velocity = model(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
    velocity.backward(inputs.velocity_grad)
    return model, inputs, velocity


def _leaves(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


def _passed_through(stages, inputs, options) -> tuple[torch.Tensor, list]:
    """The last stage's output, and what entered and left each stage."""
    state, passed = (inputs.latents,), []
    for number, stage in enumerate(stages):
        shapes = (len(inputs.latents), inputs.prompt, inputs.grid)
        if number:
            expected = tuple(map(TensorSpec.of, state))
            assert stages[number - 1].boundary(*shapes, **options) == expected
            assert stage.received(*shapes, **options) == expected
            state = _leaves(state)
        before = state
        state = stage.run_stage(state, inputs.timestep, inputs.prompt, inputs.grid)
        passed.append((before, state))
    return state[0], passed


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("case", CASES)
def test_cut_anywhere_it_is_the_whole_model(case):
    whole, inputs, velocity = _whole(case)
    config, weights = CASES[case][1](), dict(whole.named_parameters())
    build = model_family(CASES[case][0]).build
    for count in range(1, 5):
        for split in _splits(config.num_blocks, min(count, config.num_blocks)):
            stages = [build(config, Stage.of(split, n)) for n in range(len(split))]
            own = [dict(stage.named_parameters()) for stage in stages]
            names = [name for parameters in own for name in parameters]
            assert len(names) == len(weights) and set(names) == weights.keys()
            for parameters in own:
                for name, parameter in parameters.items():
                    parameter.data = weights[name].data
            output, passed = _passed_through(stages, inputs, _options(case))
            assert torch.equal(output, velocity), split
            gradients: Sequence[torch.Tensor] = (inputs.velocity_grad,)
            for before, after in reversed(passed):
                torch.autograd.backward(after, gradients)
                gradients = [x.grad for x in before]
            for parameters in own:
                for name, parameter in parameters.items():
                    torch.testing.assert_close(parameter.grad, weights[name].grad, **TOLERANCE)


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize("case", ["flux", "wan with a picture"])
def test_what_passes_a_boundary_in_bfloat16_has_the_announced_dtypes(case):
    name, make = CASES[case]
    config = make(params_dtype=torch.bfloat16, recompute_granularity="full")
    split = (1, config.num_blocks - 1)
    stages = [model_family(name).build(config, Stage.of(split, n)) for n in range(2)]
    for stage in stages:
        for parameter in stage.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    output, _ = _passed_through(stages, _inputs(case, config), {})
    assert output.dtype == torch.bfloat16


@pytest.mark.usefixtures("single_process")
def test_two_experts_are_cut_alike_and_each_runs_its_noise_levels():
    config, family = _wan(num_layers=2), model_family("wan")
    inputs = _inputs("wan", config)

    def build(stage: Stage) -> Experts:
        return Experts(family.build(config, stage), family.build(config, stage), boundary=0.5)

    whole = build(Stage.whole(2))
    for seed, expert in enumerate((whole.high, whole.low)):
        initialise(expert, family.weight_rules(config), seed)
    weights = dict(whole.named_parameters())
    stages = [build(Stage.of((1, 1), n)) for n in range(2)]
    for stage in stages:
        for name, parameter in stage.named_parameters():
            parameter.data = weights[name].data
    for level in (0.9, 0.1):
        inputs.timestep.fill_(level)
        velocity = whole(inputs.latents, inputs.timestep, inputs.prompt, inputs.grid)
        assert torch.equal(_passed_through(stages, inputs, {})[0], velocity)


def _on_ranks(case: str, weights, layout: tuple[int, int, int], split: tuple[int, ...]):
    """The velocity of a pipeline and, in the same layout without one; all gradients."""
    name, make = (CASES | OVERLAPPED)[case]
    family, (tensor, context, stages) = model_family(name), layout
    sizes = {
        "tensor_model_parallel_size": tensor,
        "context_parallel_size": context,
        "sequence_parallel": True,
    }
    inputs = _inputs(case, make())
    arguments = inputs.timestep, inputs.prompt, inputs.grid
    platform.initialize_distributed(tensor, context_parallel_size=context)
    config = make(**sizes)
    whole = family.build(config)
    load_full_tensors(whole, family.weight_rules(config), weights)
    with torch.no_grad():
        expected = whole(inputs.latents, *arguments)

    platform.initialize_distributed(
        tensor, context_parallel_size=context, pipeline_model_parallel_size=stages
    )
    config = make(**sizes, pipeline_model_parallel_size=stages, pipeline_split=split)
    model = family.build(config)
    load_full_tensors(model, family.weight_rules(config), weights)
    wrapped = wrap_data_parallel(model, use_distributed_optimizer=False)
    zero_gradients(wrapped)
    with wrapped.no_sync():
        velocity = _forward_and_backward(model, inputs, _options(case))
    reduce_gradients(wrapped)
    gradients = full_tensors(model, family.weight_rules(config), gradient_of)
    group = torch.distributed.get_process_group_ranks(platform.trajectory_group())
    return velocity, expected, gradients, group


def _forward_and_backward(model, inputs, options) -> torch.Tensor | None:
    stage, item = model.stage, Item(0, 0)
    transport = StageTransport(platform.pp_group(), timeout_seconds=60)
    shapes = (len(inputs.latents), inputs.prompt, inputs.grid)
    sends, receives = model.boundary(*shapes, **options), model.received(*shapes, **options)
    state = (inputs.latents,)
    if not stage.is_first:
        transport.expect("forward", receives, item)
        state = tuple(x.requires_grad_() for x in transport.receive("forward", item))
    outputs = model.run_stage(state, inputs.timestep, inputs.prompt, inputs.grid)
    edges = [get_gradient_edge(x) for x in outputs]
    gradients: Sequence[torch.Tensor] = (inputs.velocity_grad,)
    velocity = outputs[0].detach() if stage.is_last else None
    if not stage.is_last:
        transport.expect("backward", sends, item)
        transport.send("forward", outputs, sends, item)
        del outputs
        gradients = transport.receive("backward", item)
    torch.autograd.backward(edges, gradients)
    if not stage.is_first:
        transport.send("backward", [x.grad for x in state], receives, item)
    transport.finish()
    return velocity


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize(
    ("case", "layout", "split"),
    [
        ("flux", (2, 1, 2), (2, 3)),
        ("wan with a picture", (1, 2, 2), (1, 2)),
        pytest.param("flux", (1, 1, 4), (2, 1, 1, 1), marks=pytest.mark.slow),
        pytest.param("flux, overlapped", (2, 1, 2), (4, 1), marks=pytest.mark.slow),
        pytest.param("wan, overlapped", (1, 2, 2), (1, 3), marks=pytest.mark.slow),
        pytest.param("wan, timesteps per token", (1, 2, 2), (2, 2), marks=pytest.mark.slow),
    ],
)
def test_stages_on_ranks_are_the_model_of_their_layout(run_ranks, case, layout, split):
    plain = case.removesuffix(", overlapped")
    whole, _, _ = _whole(plain)
    config = CASES[plain][1]()
    rules = model_family(CASES[plain][0]).weight_rules(config)
    weights, expected = full_tensors(whole, rules), full_tensors(whole, rules, gradient_of)
    tensor, context, stages = layout
    ranks = tensor * context * stages
    results = run_ranks(ranks, _on_ranks, case, weights, layout, split)
    for rank, (velocity, own, gradients, group) in enumerate(results):
        assert group == list(range(ranks))
        assert (velocity is not None) == (rank >= ranks - ranks // stages)
        assert velocity is None or torch.equal(velocity, own)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], **TOLERANCE)


@pytest.mark.parametrize(
    ("overrides", "blocks"),
    [
        ({"pipeline_model_parallel_size": 4}, [14, 14, 14, 15]),
        # Double blocks have more than twice the weights of single ones.
        ({"pipeline_model_parallel_size": 4, "pipeline_split": "memory"}, [9, 9, 19, 20]),
        ({"pipeline_model_parallel_size": 2, "pipeline_split": (7, 50)}, [7, 50]),
    ],
)
def test_blocks_are_split_by_time_or_by_memory_or_as_asked_for(overrides, blocks):
    config = model_family("flux").presets["flux_dev"](**overrides)
    stages = [config.stage(n) for n in range(config.pipeline_model_parallel_size)]
    assert [len(stage.blocks) for stage in stages] == blocks
    assert [n for stage in stages for n in stage.blocks] == list(range(57))


@pytest.mark.parametrize(
    ("family", "preset", "overrides", "message"),
    [
        (
            "flux",
            "flux_tiny",
            {"pipeline_model_parallel_size": 5},
            r"parallel\.pipeline_model_parallel_size is 5, .* 4 blocks .* valid values: 1 to 4$",
        ),
        (
            "wan",
            "wan_bench",
            {"pipeline_model_parallel_size": 2, "pipeline_split": (1, 2)},
            r"parallel\.pipeline_split is \[1, 2\], which adds up to 3, .* as \[2, 2\]$",
        ),
        (
            "wan",
            "wan_bench",
            {"pipeline_split": (2, 2)},
            r"parallel\.pipeline_split is \[2, 2\], which has 2 numbers for 1 stages",
        ),
    ],
)
def test_a_split_that_cannot_be_is_refused(family, preset, overrides, message):
    with pytest.raises(ValueError, match=message):
        model_family(family).presets[preset](**overrides)
