# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`overlap.mode=auto`: how each layer's collectives are cut, from its shape and a calibration."""

from dataclasses import dataclass

from megatron_leangrpo import platform
from megatron_leangrpo.overlap.calibrate import Calibration
from megatron_leangrpo.overlap.cost_model import Collective, Costs, Flash, flash_time, none_time

# A model of costs is not exact: slices must promise this much to be preferred to whole collectives.
_LEAST_GAIN = 0.03
_SUB_SLICES = (1, 2, 4, 8)


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


@dataclass(frozen=True)
class Choice:
    """What was chosen for a layer and what is predicted, forward and backward together."""

    flash: Flash | None
    exposed_seconds: float
    exposed_without: float
    """With whole collectives, one after the other with the products."""


_calibrations: dict[str, Calibration] = {}
_choices: dict[tuple[str, LayerShape], Choice] = {}


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


def choose(path: str, shape: LayerShape) -> Choice:
    """The fastest way for a layer, remembered by its shape."""
    if (path, shape) not in _choices:
        _choices[path, shape] = fastest(shape, calibration_of_all_ranks(path))
    return _choices[path, shape]


def choices() -> dict[LayerShape, Choice]:
    """What has been chosen so far."""
    return {shape: choice for (_, shape), choice in _choices.items()}


def fastest(shape: LayerShape, calibration: Calibration) -> Choice:
    """Compare whole collectives with every pattern and cut by the closed forms."""
    whole = _costs(shape, calibration, None)
    products = 2 * whole.compute_total
    without = 2 * none_time(whole)
    times = {flash: _seconds(shape, calibration, flash) for flash in _candidates()}
    best = min(times, key=lambda flash: times[flash])
    if shape.ranks == 1 or times[best] > (1 - _LEAST_GAIN) * without:
        return Choice(None, without - products, without - products)
    return Choice(best, times[best] - products, without - products)


def _candidates() -> list[Flash]:
    ring = [Flash(sub_slices=m, in_product=m > 1) for m in _SUB_SLICES]
    return ring + [Flash(pattern="direct", sub_slices=m) for m in _SUB_SLICES]


def _seconds(shape: LayerShape, calibration: Calibration, flash: Flash) -> float:
    ways: tuple[Collective, ...] = ("all-gather", "reduce-scatter")
    costs = _costs(shape, calibration, flash)
    time = 0.0
    for way in ways:
        time += flash_time(costs, way, flash)
    if flash.in_product:
        slower = calibration.sum_in_product_slowdown - 1
        # All products of a ring but the first are also additions.
        time += max(0.0, slower) * costs.compute * (shape.ranks - 1)
    return time


def _costs(shape: LayerShape, calibration: Calibration, flash: Flash | None) -> Costs:
    bandwidth = calibration.link_bytes_per_second
    assert bandwidth and calibration.link_latency_seconds is not None
    travels = shape.rows * shape.whole_features * shape.element_bytes
    flops = 2 * shape.rows * shape.whole_features * shape.sharded_features
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
