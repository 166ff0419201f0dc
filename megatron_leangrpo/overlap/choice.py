# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`overlap.mode=auto`: how each layer's collectives are cut, from its shape and a calibration."""

from dataclasses import dataclass

from megatron_leangrpo import platform
from megatron_leangrpo.overlap.calibrate import Calibration
from megatron_leangrpo.overlap.cost_model import (
    Collective,
    Costs,
    Flash,
    attention_time,
    flash_time,
    none_time,
)

# A model of costs is not exact: slices must promise this much to be preferred to whole collectives.
_LEAST_GAIN = 0.03
_SUB_SLICES = (1, 2, 4, 8)
_WAYS: tuple[Collective, ...] = ("all-gather", "reduce-scatter")


@dataclass(frozen=True)
class LayerShape:
    """One linear of a tensor-parallel group: it gathers on one way and reduces on the other."""

    ranks: int
    rows: int
    """Tokens of a slice, times the batch."""
    whole_features: int
    """What is gathered or reduced: the side that is whole on every rank."""
    sharded_features: int
    """The side of which each rank has a share: that share."""
    element_bytes: int
    attention_flops: int = 0
    """Of an attention that is computed with a row of the reduce-scatter, and hides its hops too."""

    @property
    def name(self) -> str:
        """What it is called in a table."""
        beside = " with attention" if self.attention_flops else ""
        return f"{self.rows} x {self.whole_features} x {self.sharded_features}{beside}"

    def describe(self, flash: Flash | None) -> str:
        """What was chosen, in a table."""
        queries = ", queries split" if self.attention_flops else ""
        return f"flash ({flash.pattern}, {flash.sub_slices}){queries}" if flash else "bulk"


@dataclass(frozen=True)
class AttentionShape:
    """One attention between the exchanges of a context-parallel group."""

    ranks: int
    tokens: int
    """Of all ranks, pads included."""
    batch: int
    heads: int
    """Of a rank inside the attention."""
    head_dim: int
    element_bytes: int

    @property
    def name(self) -> str:
        """What it is called in a table."""
        return f"attention of {self.tokens}, {self.heads} x {self.head_dim}"

    def describe(self, flash: Flash | None) -> str:
        """What was chosen, in a table."""
        return f"flash ({flash.sub_slices} groups of heads)" if flash else "bulk"


Shape = LayerShape | AttentionShape


@dataclass(frozen=True)
class Choice:
    """What was chosen for a layer and what is predicted, forward and backward together."""

    flash: Flash | None
    exposed_seconds: float
    exposed_without: float
    """With whole collectives, one after the other with the products."""


_calibrations: dict[str, Calibration] = platform.kept_with_groups({})
_choices: dict[tuple[str, Shape], Choice] = platform.kept_with_groups({})


def calibration_of_all_ranks(path: str) -> Calibration:
    """The calibration that rank 0 reads: ranks that choose differently would wait for each other.

    Every process of the world must come to the first call.
    """
    if path not in _calibrations:
        text = platform.text_from_first_rank(lambda: _with_a_link(path).to_json())
        _calibrations[path] = Calibration.from_json(text)
    return _calibrations[path]


def _with_a_link(path: str) -> Calibration:
    calibration = Calibration.load(path)
    if not calibration.link_bytes_per_second:
        raise ValueError(
            f"overlap.calibration is {path}, which has no link: it was measured on one device; "
            "measure where there are two, or set overlap.mode to bulk or flash"
        )
    return calibration


def choose(path: str, shape: Shape) -> Choice:
    """The fastest way for a layer, remembered by its shape."""
    if (path, shape) not in _choices:
        find = fastest if isinstance(shape, LayerShape) else fastest_groups
        _choices[path, shape] = find(shape, calibration_of_all_ranks(path))
    return _choices[path, shape]


def choices() -> dict[Shape, Choice]:
    """What has been chosen so far, since megatron's groups were made."""
    return {shape: choice for (_, shape), choice in _choices.items()}


def fastest(shape: LayerShape, calibration: Calibration) -> Choice:
    """Compare whole collectives with every pattern and cut by the closed forms."""
    whole = [_costs(shape, calibration, None, way) for way in _WAYS]
    products = sum(costs.compute_total for costs in whole)
    without = sum(none_time(costs) for costs in whole)
    times = {flash: _seconds(shape, calibration, flash) for flash in _candidates()}
    best = min(times, key=lambda flash: times[flash])
    if shape.ranks == 1 or times[best] > (1 - _LEAST_GAIN) * without:
        return Choice(None, without - products, without - products)
    return Choice(best, times[best] - products, without - products)


def fastest_groups(shape: AttentionShape, calibration: Calibration) -> Choice:
    """Compare the attention between whole exchanges with groups of its heads.

    An attention is reckoned as fast as a product, which is too fast: what is hidden is more.
    """
    times = {}
    for groups in _SUB_SLICES:
        if groups == 1 or groups <= shape.heads:
            # A backward has twice the attention, and exchanges as much.
            forward, backward = (_attention_costs(shape, calibration, groups, n) for n in (1, 2))
            times[groups] = attention_time(forward, groups) + attention_time(backward, groups)
    best = min(times, key=lambda groups: times[groups])
    products = 3 * _attention_costs(shape, calibration, 1, 1).compute_total
    if shape.ranks == 1 or times[best] > (1 - _LEAST_GAIN) * times[1]:
        best = 1
    flash = Flash(sub_slices=best) if best > 1 else None
    return Choice(flash, times[best] - products, times[1] - products)


def _attention_costs(
    shape: AttentionShape, calibration: Calibration, groups: int, passes: int
) -> Costs:
    bandwidth = calibration.link_bytes_per_second
    assert bandwidth and calibration.link_latency_seconds is not None
    features = shape.batch * shape.heads * shape.head_dim
    flops = passes * 4 * shape.tokens**2 * features
    return Costs(
        ranks=shape.ranks,
        compute=flops
        / calibration.flops_per_second
        / _efficiency(calibration, groups)
        / shape.ranks,
        hop=4 * shape.tokens / shape.ranks * features * shape.element_bytes / bandwidth,
        latency=calibration.link_latency_seconds,
    )


def _candidates() -> list[Flash]:
    ring = [Flash(sub_slices=m, in_product=m > 1) for m in _SUB_SLICES]
    return ring + [Flash(pattern="direct", sub_slices=m) for m in _SUB_SLICES]


def _seconds(shape: LayerShape, calibration: Calibration, flash: Flash) -> float:
    costs = {way: _costs(shape, calibration, flash, way) for way in _WAYS}
    time = sum(flash_time(costs[way], way, flash) for way in _WAYS)
    if flash.in_product:
        slower = calibration.sum_in_product_slowdown - 1
        # All products of a ring but the first are also additions.
        time += max(0.0, slower) * costs["all-gather"].compute * (shape.ranks - 1)
    return time


def _costs(
    shape: LayerShape, calibration: Calibration, flash: Flash | None, way: Collective
) -> Costs:
    bandwidth = calibration.link_bytes_per_second
    assert bandwidth and calibration.link_latency_seconds is not None
    travels = shape.rows * shape.whole_features * shape.element_bytes
    flops = 2 * shape.rows * shape.whole_features * shape.sharded_features
    if way == "reduce-scatter":
        flops += shape.rows * shape.attention_flops
    parts = shape.ranks * flash.sub_slices if flash else 1
    return Costs(
        ranks=shape.ranks,
        compute=flops / calibration.flops_per_second / _efficiency(calibration, parts),
        hop=travels / bandwidth,
        latency=calibration.link_latency_seconds,
        add=travels / calibration.add_bytes_per_second,
    )


def _efficiency(calibration: Calibration, parts: int) -> float:
    """Of the smallest measured number of parts that is not smaller, relative to the whole."""
    measured = {int(count): value for count, value in calibration.cut_efficiency.items()}
    count = min((count for count in measured if count >= parts), default=max(measured))
    return min(1.0, measured[count])
