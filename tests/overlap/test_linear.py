# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Sharded linears against the unsharded ones: every output and gradient, in every mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_leangrpo import platform
from megatron_leangrpo.overlap.cost_model import Flash
from megatron_leangrpo.overlap.linear import column_parallel, row_parallel
from megatron_leangrpo.overlap.plan import LinearPlan
from megatron_leangrpo.overlap.weight_grad import WeightGradient

SIZES = (1, 2, 3, pytest.param(4, marks=pytest.mark.slow))
MODES = [None] + [
    Flash(pattern=pattern, sub_slices=m, in_product=in_product)
    for pattern, in_product in (("ring", False), ("ring", True), ("direct", False))
    for m in (1, 2, 3)
]
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
BATCH, WIDTH, SHARD = 2, 6, 3
# Tokens a rank has under sequence parallelism. 3 do not divide by 2 sub-slices.
TOKENS = 3


def _integers(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Small enough that every sum in these tests is below 256, which bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def _floats(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _plan(flash: Flash | None, sequence_parallel: bool, **settings) -> LinearPlan:
    name = f"{flash} {sequence_parallel}"
    return LinearPlan(platform.tp_group(), sequence_parallel, flash, name, **settings)


def _shard(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(platform.tp_size(), dim)[platform.tp_rank()].clone()


def _leaves(*tensors: torch.Tensor, trains: bool = True) -> list[torch.Tensor]:
    return [tensor.detach().clone().requires_grad_(trains) for tensor in tensors]


def _same(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def _column_is_exact(mode: Flash | None, dtype: torch.dtype, sp: bool, trains: bool) -> bool:
    """Two weights over one input, with a bias on the first."""
    size = platform.tp_size()
    x = _integers(1, TOKENS * size, BATCH, WIDTH, dtype=dtype)
    full = [_integers(seed, SHARD * size, WIDTH, dtype=dtype) for seed in (2, 3)]
    bias = _integers(4, SHARD * size, dtype=dtype)
    dy = [_integers(seed, TOKENS * size, BATCH, SHARD * size, dtype=dtype) for seed in (5, 6)]

    (whole_x,) = _leaves(x)
    whole = _leaves(*full, bias, trains=trains)
    expected = [F.linear(whole_x, whole[0], whole[2]), F.linear(whole_x, whole[1])]
    torch.autograd.backward(expected, dy)

    (ours_x,) = _leaves(_shard(x, 0) if sp else x)
    ours = _leaves(*(_shard(w, 0) for w in (*full, bias)), trains=trains)
    out = column_parallel(ours_x, ours[:2], [ours[2], None], _plan(mode, sp))
    torch.autograd.backward(out, [_shard(grad, 2) for grad in dy])

    whole_dx = _shard(whole_x.grad, 0) if sp else whole_x.grad
    return all(
        [
            *(_same(o, _shard(e, 2)) for o, e in zip(out, expected)),
            _same(ours_x.grad, whole_dx),
            *(_same(o.grad, _shard(w.grad, 0) if trains else None) for o, w in zip(ours, whole)),
        ]
    )


def _row_is_exact(mode: Flash | None, dtype: torch.dtype, sp: bool, trains: bool) -> bool:
    """Two inputs that are summed, over tokens that leave one rank a row of pads."""
    size = platform.tp_size()
    tokens = TOKENS * size - (size > 1)
    x = [_integers(seed, tokens, BATCH, SHARD * size, dtype=dtype) for seed in (1, 2)]
    full = [_integers(seed, WIDTH, SHARD * size, dtype=dtype) for seed in (3, 4)]
    bias = _integers(5, WIDTH, dtype=dtype)
    dy = _integers(6, tokens, BATCH, WIDTH, dtype=dtype)

    whole_x = _leaves(*x)
    whole = _leaves(*full, bias, trains=trains)
    expected = F.linear(whole_x[0], whole[0], whole[2]) + F.linear(whole_x[1], whole[1])
    expected.backward(dy)

    ours_x = _leaves(*(_shard(part, 2) for part in x))
    ours = _leaves(*(_shard(w, 1) for w in full), bias, trains=trains)
    out = row_parallel(ours_x, ours[:2], ours[2], _plan(mode, sp))
    if sp:
        pads = (0, 0, 0, 0, 0, TOKENS * size - tokens)
        wanted = _shard(F.pad(expected - whole[2], pads) + whole[2], 0)
        out.backward(_shard(F.pad(dy, pads), 0))
        if trains and size > 1:
            # As megatron does for a parameter that is marked sequence_parallel.
            dist.all_reduce(ours[2].grad, group=platform.tp_group())
    else:
        wanted = expected
        out.backward(dy)
    return all(
        [
            _same(out, wanted),
            *(_same(o.grad, _shard(w.grad, 2)) for o, w in zip(ours_x, whole_x)),
            *(
                _same(o.grad, _shard(w.grad, 1) if trains else None)
                for o, w in zip(ours[:2], whole)
            ),
            _same(ours[2].grad, whole[2].grad),
        ]
    )


def _exactness(size: int) -> list[str]:
    platform.initialize_distributed(size)
    wrong = []
    # Each mode meets every dtype, and over the modes each of its settings does.
    cases = itertools.product(MODES, (True, False), (True, False))
    for (mode, sp, trains), dtype in zip(cases, itertools.cycle(DTYPES)):
        for kind in (_column_is_exact, _row_is_exact):
            if not kind(mode, dtype, sp, trains):
                wrong.append(f"{kind.__name__} {mode} {dtype} sp={sp} trains={trains}")
    return wrong


@pytest.mark.parametrize("size", SIZES)
def test_outputs_and_gradients_have_the_bits_of_the_unsharded_linear(run_ranks, size):
    """On integers every order of summation gives one number: nothing may differ."""
    assert run_ranks(size, _exactness, size) == [[] for _ in range(size)]


def _frozen() -> list[str]:
    """What frozen layers keep for the backward beside weights, and products for their gradients."""
    kept: list[str] = []
    x = _floats(1, TOKENS, BATCH, WIDTH).requires_grad_()
    weights = [_floats(2, SHARD, WIDTH), _floats(3, WIDTH, SHARD)]
    known = {weight.data_ptr() for weight in weights}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in known:
            kept.append(f"kept {tuple(tensor.shape)}")
        return tensor

    def product(*_) -> None:
        kept.append("a weight's gradient")

    for mode in MODES:
        plan = _plan(mode, True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            (hidden,) = column_parallel(x, weights[:1], [None], plan)
            out = row_parallel([hidden], weights[1:], None, plan)
        with mock.patch.object(WeightGradient, "of", product):
            out.sum().backward()
    return kept


class _ShardOf(torch.autograd.Function):
    """A rank's share of a tensor that all have; the gradient is put together again."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        return _shard(x, dim)

    @staticmethod
    def backward(ctx, grad):
        return _gathered(grad, ctx.dim), None


class _Whole(torch.autograd.Function):
    """What all ranks' shares make; each takes its share of the gradient."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        return _gathered(x, dim)

    @staticmethod
    def backward(ctx, grad):
        return _shard(grad, ctx.dim), None


class _Replicated(torch.autograd.Function):
    """A parameter that ranks apply to their own tokens: its gradients are summed."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=platform.tp_group())
        return grad


def _gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(platform.tp_size())]
    dist.all_gather(parts, x, group=platform.tp_group())
    return torch.cat(parts, dim)


def _as_one_function(kind: str, mode: Flash | None, sp: bool) -> Callable[..., torch.Tensor]:
    """The sharded layer as a function of whole tensors, the same on every rank."""

    def column(x, weight, bias):
        x = _ShardOf.apply(x, 0) if sp else x
        shards = _ShardOf.apply(weight, 0), _ShardOf.apply(bias, 0)
        (out,) = column_parallel(x, shards[:1], shards[1:], _plan(mode, sp))
        return _Whole.apply(out, 2)

    def row(x, weight, bias):
        bias = _Replicated.apply(bias) if sp else bias
        shards = _ShardOf.apply(x, 2), _ShardOf.apply(weight, 1)
        out = row_parallel(shards[:1], shards[1:], bias, _plan(mode, sp))
        return _Whole.apply(out, 0) if sp else out

    return column if kind == "column" else row


def _gradcheck() -> None:
    modes = [None, Flash(), Flash(sub_slices=2, in_product=True), Flash(pattern="direct")]
    for kind, mode, sp, trains in itertools.product(
        ("column", "row"), modes, (True, False), (True, False)
    ):
        x = _floats(1, 4, 1, 2).requires_grad_()
        weight, bias = (_floats(2, 2, 2), _floats(3, 2))
        function = _as_one_function(kind, mode, sp)
        parameters = (weight.requires_grad_(trains), bias.requires_grad_(trains))
        # Along random directions, the same on both ranks.
        assert torch.autograd.gradcheck(function, (x, *parameters), fast_mode=True)


def _run_layers(mode: Flash | None, inputs: list[torch.Tensor], retain: bool) -> list[torch.Tensor]:
    """Gradients of a column- and a row-parallel linear after each other, for every input."""
    weights = [_floats(7, SHARD, WIDTH), _floats(8, WIDTH, SHARD)]
    weights = [weight + platform.tp_rank() for weight in weights]
    plan = _plan(mode, sequence_parallel=True)
    gradients, kept = [], []

    def backward(x, params, out):
        out.square().sum().backward()
        gradients.extend([x.grad, *(p.grad for p in params)])

    for x in inputs:
        (x,), params = _leaves(x), _leaves(*weights)
        (hidden,) = column_parallel(x, params[:1], [None], plan)
        out = row_parallel([torch.tanh(hidden)], params[1:], None, plan)
        kept.append((x, params, out))
        if not retain:
            backward(*kept.pop())
    for entry in kept:
        backward(*entry)
    return gradients


def _retained() -> bool:
    inputs = [_floats(20 + i, TOKENS, BATCH, WIDTH) for i in range(4)]
    same = []
    for mode in MODES:
        at_once = _run_layers(mode, inputs, retain=False)
        later = _run_layers(mode, inputs, retain=True)
        same += map(torch.equal, at_once, later)
    return all(same)


def _views() -> None:
    for mode, sp in itertools.product((None, Flash(sub_slices=2)), (True, False)):
        plan = _plan(mode, sp)
        x = _floats(1 + sp * platform.tp_rank(), BATCH, 4, WIDTH)
        weight, dy = _floats(2, SHARD, WIDTH), _floats(3, SHARD, BATCH, 8 if sp else 4)
        results = []
        for view in (x.transpose(0, 1), x.transpose(0, 1).contiguous()):
            (leaf,) = _leaves(view)
            (out,) = column_parallel(leaf, [weight], [None], plan)
            out.backward(dy.permute(2, 1, 0))
            results.append((out, leaf.grad))
        assert all(map(torch.equal, *results))


def _main_grads() -> None:
    x = _integers(1 + platform.tp_rank(), 4, BATCH, WIDTH, dtype=torch.bfloat16)
    for flash, main_dtype in itertools.product((None, Flash()), (torch.float32, torch.bfloat16)):
        plain, fused, deferred = (
            torch.nn.Parameter(torch.ones(3, WIDTH).bfloat16()) for _ in "abc"
        )
        put_off: list = []
        how = {
            plain: WeightGradient(),
            fused: WeightGradient(fused=True),
            deferred: WeightGradient(fused=True, deferred=put_off),
        }
        for weight, weight_gradient in how.items():
            if weight_gradient.fused:
                weight.main_grad = torch.ones(3, WIDTH, dtype=main_dtype)
                weight.grad_added_to_main_grad = False
            plan = _plan(flash, True, weight_gradient=weight_gradient)
            (out,) = column_parallel(x.clone().requires_grad_(), [weight], [None], plan)
            out.backward(torch.ones_like(out))
        assert torch.equal(fused.main_grad, 1 + plain.grad.to(main_dtype))
        assert fused.grad_added_to_main_grad and not fused.grad.any()
        assert torch.equal(deferred.main_grad, torch.ones_like(deferred.main_grad))
        how[deferred].run_deferred()
        assert torch.equal(deferred.main_grad, fused.main_grad) and not put_off


def _float32_sums() -> list[float]:
    """The error of a ring in bfloat16, in float32, and of direct sums in float32."""
    platform.initialize_distributed(4)
    x = _floats(10 + platform.tp_rank(), 64, 1, 32)
    weight = _floats(20 + platform.tp_rank(), 64, 32)
    exact = x.bfloat16().double() @ weight.bfloat16().double().t()
    dist.all_reduce(exact, group=platform.tp_group())
    exact = _shard(exact, 0)
    errors = []
    for flash, dtype in (
        (Flash(), None),
        (Flash(), torch.float32),
        (Flash(pattern="direct"), None),
    ):
        plan = _plan(flash, True, sum_dtype=dtype)
        out = row_parallel([x.bfloat16()], [weight.bfloat16()], None, plan)
        errors.append(float((out.double() - exact).norm() / exact.norm()))
    return errors


def test_sums_in_float32_are_more_exact_than_in_bfloat16(run_ranks):
    for ring, wide, direct in run_ranks(4, _float32_sums):
        assert wide < 0.9 * ring and direct == wide


def _different_tokens() -> str:
    x = torch.ones(4 + platform.tp_rank(), BATCH, WIDTH)
    plan = LinearPlan(platform.tp_group(), True, Flash(), "blocks.3.fc1")
    try:
        column_parallel(x, [torch.ones(SHARD, WIDTH)], [None], plan)
    except RuntimeError as error:
        return str(error)
    return ""


def _on_two_ranks() -> dict[str, Any]:
    """All that two ranks show, in one layout; asserts fail there."""
    platform.initialize_distributed(2)
    for check in (_gradcheck, _views, _main_grads):
        check()
    return {check.__name__: check() for check in (_frozen, _retained, _different_tokens)}


def test_on_two_ranks_gradients_graphs_views_buffers_and_errors_are_what_they_should_be(run_ranks):
    """`_gradcheck`: gradients are those of finite differences.

    `_views` give what their copies give. `_main_grads`: weight gradients go to megatron's buffer at
    once or later. `_frozen` layers keep no input and multiply for no weight. `_retained`: many
    forwards before the first backward change no bit. `_different_tokens` name rank and layer.
    """
    for rank, found in enumerate(run_ranks(2, _on_two_ranks)):
        assert found["_frozen"] == [] and found["_retained"]
        error = found["_different_tokens"]
        assert f"rank {rank} of 2, layer blocks.3.fc1" in error
        assert "(8, 6)" in error and "(10, 6)" in error
