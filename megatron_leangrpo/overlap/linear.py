# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Column- and row-parallel linears whose collectives run beside the products, forward and backward.

Tensors are `[s, b, h]`; under sequence parallelism each rank holds its share of the tokens between
the linears. In `bulk` (no `flash`) collectives stay whole: only a column-parallel backward has
products to put beside them. In `flash` a slice travels while the next one is multiplied. A
column-parallel backward with a weight gradient is bulk in both: it has a whole product beside each
collective, and none of them is cut.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from megatron_leangrpo.overlap import collectives
from megatron_leangrpo.overlap.engine import (
    Reduction,
    all_gather_products,
    products_reduce_scatter,
)
from megatron_leangrpo.overlap.plan import GATHER, SCATTER, LinearPlan
from megatron_leangrpo.overlap.products import Product, sum_of_products
from megatron_leangrpo.overlap.query_split import LaterRows


def column_parallel(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    plan: LinearPlan,
) -> tuple[torch.Tensor, ...]:
    """One output for each weight `[features, h]`: the input is gathered once for all of them."""
    rows = x.shape[:-1].numel()
    rows = rows if plan.shards_tokens else -(-rows // plan.size)
    plan = plan.chosen(rows, x.shape[-1], sum(map(len, weights)), plan.sent_bytes(x))
    return _ColumnParallel.apply(plan, x, *weights, *biases)


def row_parallel(
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    plan: LinearPlan,
    later: LaterRows | None = None,
) -> torch.Tensor:
    """The sum over ranks of all `x @ weight.t()`, reduced once, and then one bias.

    Tokens that do not divide by the ranks are padded: under sequence parallelism the last ranks'
    shares then end in rows of the bias alone. The first input may be filled as its rows are needed.
    """
    rows = -(-inputs[0].shape[:-1].numel() // plan.size)
    sharded = sum(x.shape[-1] for x in inputs)
    attention = later.flops_per_row if later else 0
    plan = plan.chosen(rows, len(weights[0]), sharded, inputs[0].element_size(), attention)
    return _RowParallel.apply(plan, later, bias, *inputs, *weights)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _transposed(weights: Sequence[torch.Tensor]) -> list[Product]:
    return [Product(weight.t()) for weight in weights]


def _reduce_scatter(
    inputs: Sequence[torch.Tensor],
    products: Sequence[Product],
    slice_rows: int,
    plan: LinearPlan,
    later: LaterRows | None = None,
) -> torch.Tensor:
    """Our `slice_rows` of the sum over ranks of all products, overlapped."""
    features, dtype = len(products[0].weight), products[0].weight.dtype
    rows, device = inputs[0].shape[0], inputs[0].device
    reduction = Reduction(rows, slice_rows, features, dtype, device, plan.sum_dtype)

    def produce(start: int, stop: int, total: torch.Tensor | None) -> torch.Tensor:
        if later is not None:
            later.fill(start, stop)
        return sum_of_products([x[start:stop] for x in inputs], products, total)

    return products_reduce_scatter(reduction, produce, plan.exchange(SCATTER, inputs[0]))


def _all_reduce(
    inputs: Sequence[torch.Tensor],
    products: Sequence[Product],
    plan: LinearPlan,
    batch: int = 1,
    later: LaterRows | None = None,
) -> torch.Tensor:
    """The sum over ranks of all products: an overlapped reduce-scatter, then a gather.

    Slices are of whole tokens, which have `batch` rows.
    """
    rows = inputs[0].shape[0]
    ours = _reduce_scatter(inputs, products, -(-rows // batch // plan.size) * batch, plan, later)
    return collectives.all_gather(ours, plan.group).wait()[:rows]


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: LinearPlan, x: torch.Tensor, *parameters: torch.Tensor | None):
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        ctx.plan, ctx.shape, ctx.biases = plan, x.shape, len(biases)
        rows = plan.packed(_rows(x))
        ctx.save_for_backward(rows if any(ctx.needs_input_grad[2 : 2 + count]) else None, *weights)
        outputs = _column_outputs(rows, plan.products(weights), biases, plan)
        return tuple(out.view(-1, *x.shape[1:-1], out.shape[-1]) for out in outputs)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        plan: LinearPlan = ctx.plan
        rows, *weights = ctx.saved_tensors
        grads = [_rows(grad) for grad in grads]
        _, needs_x, *needs = ctx.needs_input_grad
        needs_weight, needs_bias = needs[: len(weights)], needs[len(weights) :]
        gathered = None
        if any(needs_weight) and plan.shards_tokens:
            gathered = collectives.all_gather(rows, plan.group)
        dx = None
        if needs_x:
            dx = _column_input_grad(grads, plan.multiplied(weights), plan, any(needs_weight))
        if gathered is not None:
            rows = gathered.wait()
        if any(needs_weight):
            rows = plan.unpacked(rows, weights[0])
        dw = [
            plan.weight_gradient.of(weight, grad, rows) if needed else None
            for weight, grad, needed in zip(weights, grads, needs_weight)
        ]
        db = [grad.sum(0) if needed else None for grad, needed in zip(grads, needs_bias)]
        return None, dx().view(ctx.shape) if dx else None, *dw, *db


def _column_outputs(
    rows: torch.Tensor,
    products: Sequence[Product],
    biases: Sequence[torch.Tensor | None],
    plan: LinearPlan,
) -> list[torch.Tensor]:
    if plan.flash is None or not plan.shards_tokens:
        if plan.shards_tokens:
            rows = collectives.all_gather(rows, plan.group).wait()
        rows = products[0].rows(rows)
        return [product(rows, bias) for product, bias in zip(products, biases)]
    weights, count = [product.weight for product in products], plan.size * rows.shape[0]
    outputs = [weight.new_empty(count, len(weight)) for weight in weights]

    def consume(start: int, part: torch.Tensor) -> None:
        stop, part = start + len(part), products[0].rows(part)
        for product, bias, out in zip(products, biases, outputs):
            product(part, bias, out=out[start:stop])

    all_gather_products(rows, consume, plan.exchange(GATHER, rows))
    return outputs


def _column_input_grad(
    grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], plan: LinearPlan, beside: bool
) -> Callable[[], torch.Tensor]:
    """The input's gradient, to be asked for after the products that its collective may hide behind.

    `beside` says that there are such products; without them flash cuts this one.
    """
    reduces = plan.size > 1 and (plan.shards_tokens or plan.reduces_input_grad)
    products = _transposed(weights)
    if reduces and plan.flash is not None and not beside:
        if plan.shards_tokens:
            ours = grads[0].shape[0] // plan.size
            done = _reduce_scatter(grads, products, ours, plan)
        else:
            done = _all_reduce(grads, products, plan)
        return lambda: done
    partial = sum_of_products(grads, products)
    if not reduces:
        return lambda: partial
    if plan.shards_tokens:
        return collectives.reduce_scatter(partial, plan.group).wait
    return collectives.all_reduce(partial, plan.group).wait


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        plan: LinearPlan,
        later: LaterRows | None,
        bias: torch.Tensor | None,
        *tensors: torch.Tensor,
    ):
        count = len(tensors) // 2
        inputs, weights = [_rows(x) for x in tensors[:count]], tensors[count:]
        ctx.plan, ctx.shapes = plan, [x.shape for x in tensors[:count]]
        if plan.operands:
            if later is not None:
                later.fill(0, inputs[0].shape[0])  # All rows may share a scale.
            later, inputs = None, [plan.packed(x, n) for n, x in enumerate(inputs)]
        trained = ctx.needs_input_grad[3 + count :]
        kept = [x if needed else None for x, needed in zip(inputs, trained)]
        ctx.save_for_backward(*kept, *weights)
        out = _row_output(inputs, plan.products(weights), ctx.shapes[0], plan, later)
        if bias is not None:
            out = out.add_(bias)
        return out.view(-1, *ctx.shapes[0][1:-1], out.shape[-1])

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        plan: LinearPlan = ctx.plan
        count = len(ctx.shapes)
        # Once: recomputation unpacks a saved tensor a single time.
        saved = ctx.saved_tensors
        inputs, weights = saved[:count], saved[count:]
        _, _, needs_bias, *needs = ctx.needs_input_grad
        grad = _rows(grad)
        db = grad.sum(0) if needs_bias else None
        factors = plan.multiplied(weights)
        dx, grad = _row_input_grads(grad, factors, ctx.shapes, needs[:count], plan)
        dw = [
            plan.weight_gradient.of(weight, grad, plan.unpacked(x, weight, n)) if needed else None
            for n, (weight, x, needed) in enumerate(zip(weights, inputs, needs[count:]))
        ]
        return None, None, db, *dx, *dw


def _row_output(
    inputs: Sequence[torch.Tensor],
    products: Sequence[Product],
    shape: torch.Size,
    plan: LinearPlan,
    later: LaterRows | None,
) -> torch.Tensor:
    batch = inputs[0].shape[0] // shape[0]
    slice_rows = -(-shape[0] // plan.size) * batch
    if plan.flash is not None and plan.size > 1:
        if plan.shards_tokens:
            return _reduce_scatter(inputs, products, slice_rows, plan, later)
        return _all_reduce(inputs, products, plan, batch, later)
    if later is not None:
        later.fill(0, inputs[0].shape[0])
    partial = sum_of_products(inputs, products)
    if plan.size == 1:
        return partial
    if not plan.shards_tokens:
        return collectives.all_reduce(partial, plan.group).wait()
    missing = slice_rows * plan.size - partial.shape[0]
    if missing:
        partial = F.pad(partial, (0, 0, 0, missing))
    return collectives.reduce_scatter(partial, plan.group).wait()


def _row_input_grads(
    grad: torch.Tensor,
    weights: Sequence[torch.Tensor],
    shapes: Sequence[torch.Size],
    needed: Sequence[bool],
    plan: LinearPlan,
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """The gradient of each input that needs one, and the output's gradient for all tokens."""
    rows = shapes[0][:-1].numel()
    if not plan.shards_tokens:
        dx = [grad @ weight if need else None for weight, need in zip(weights, needed)]
    elif plan.flash is None:
        grad = collectives.all_gather(grad, plan.group).wait()[:rows]
        dx = [grad @ weight if need else None for weight, need in zip(weights, needed)]
    else:
        dx = [
            grad.new_empty(rows, weight.shape[1]) if need else None
            for weight, need in zip(weights, needed)
        ]

        def consume(start: int, part: torch.Tensor) -> None:
            # What was padded on the way out has no input.
            part = part[: max(0, rows - start)]
            for weight, out in zip(weights, dx):
                if out is not None:
                    torch.mm(part, weight, out=out[start : start + len(part)])

        grad = all_gather_products(grad, consume, plan.exchange(GATHER, grad))[:rows]
    return [d.view(shape) if d is not None else None for d, shape in zip(dx, shapes)], grad
