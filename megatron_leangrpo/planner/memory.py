# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Bytes on one rank: what stays for the run, and the highest point of the activations."""

import math
from dataclasses import astuple, dataclass

from megatron_leangrpo.planner.activations import GraphMemory, graph_memory
from megatron_leangrpo.planner.workload import Batch, Ranks, Workload


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank at the highest point of an iteration."""

    weights: int
    gradients: int
    moments: int
    """Copies of the gradient buffers that reweight weighs groups with."""
    optimizer: int
    average: int
    reference: int
    text_encoders: int
    codec: int
    rewards: int
    activations: int
    """Everything that comes and goes within an iteration."""
    messages: int = 0
    """On their way between the stages of a pipeline."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(astuple(self))


def rank_memory(
    work: Workload, batch: Batch, schedule: str, recompute: str, ranks: Ranks
) -> RankMemory:
    """Bytes on a rank of a layout under a schedule."""
    tp = ranks.tensor
    held = work.shape.parameters_of_rank(tp)
    trained = held if work.trainable is None else math.ceil(work.trainable / tp)
    gradients = trained * work.wide
    adapters = 0 if work.trainable is None else trained * work.wide
    # Two moments, and a float32 copy of weights that are narrower than that.
    state = trained * (2 * work.wide + (4 if work.width < 4 and not adapters else 0))
    copies = batch.moment_copies if base_of(work, schedule) == "reweight" else 0
    # Without an adapter the reference is a second copy of the weights.
    reference = held * work.width if work.kl and work.trainable is None else 0
    if work.reference_offload:
        blocks = sum(count for _, count in work.shape.blocks)
        reference = 2 * math.ceil(reference / (blocks * work.shape.experts))
    return RankMemory(
        weights=held * work.width // (work.shape.experts if work.expert_offload else 1) + adapters,
        gradients=gradients,
        moments=copies * gradients,
        optimizer=state // ranks.weights if work.distributed_optimizer else state,
        average=trained * work.wide if work.average else 0,
        reference=reference,
        text_encoders=work.companions.text_encoders,
        codec=work.companions.codec,
        rewards=work.companions.rewards,
        # The first iteration of jagg is exact, the later ones approximate.
        activations=max(
            peak_activations(work, batch, schedule, recompute, ranks, approximated)
            for approximated in (False, schedule == "jagg")
        ),
    )


def base_of(work: Workload, schedule: str) -> str:
    """The exact schedule whose graphs a schedule works on."""
    return work.jagg.on if schedule == "jagg" else schedule


def peak_activations(
    work: Workload,
    batch: Batch,
    schedule: str,
    recompute: str,
    ranks: Ranks,
    approximated: bool = False,
) -> int:
    """Highest bytes that tensors grow by in an iteration.

    `approximated` asks for an iteration of jagg after its first one, which is exact.
    """
    layout = work.layout(ranks, recompute, batch.wave_size)
    graph = graph_memory(work.shape, layout, recompute)
    graphs = graphs_held(work, batch, schedule, approximated)
    # Two forwards of one velocity, where guidance runs so, share one backward.
    peak = _backward_peak(graph, graphs, work.graphs)
    base = base_of(work, schedule)
    if work.kl:
        # The reference model runs in the rollout, while graphs are there that are kept then.
        kept = 0 if base == "replay" else graphs
        peak = max(peak, kept * graph.held + graph.without)
    if work.shape.is_first:
        # Waves that were rolled out together are scored together; decoding takes a copy.
        kept = graphs if base == "retain" else 0
        pictures = (batch.waves_in_flight + 1) * batch.wave_size * work.picture
        peak = max(peak, kept * graph.held + pictures)
    return peak + kept_data(work, batch)


def graphs_held(work: Workload, batch: Batch, schedule: str, approximated: bool = False) -> int:
    """Graphs of forwards alive at the highest point."""
    base = base_of(work, schedule)
    has_windows = schedule == "jagg" and approximated and windows(work)[0] > 0
    if base != "retain":
        # Those of both ends of a window are there before the backward of the later one starts.
        return max(2 if has_windows else 1, batch.graphs_of_a_step) * work.graphs
    steps = work.trained_steps_of(batch.wave_size)
    if has_windows:
        steps = backwards(work, batch.wave_size)
    return batch.graphs_in_flight * math.ceil(steps) * work.graphs


def _backward_peak(graph: GraphMemory, graphs: int, together: int) -> int:
    """Highest point while some of all graphs run their backwards together: one or more."""
    if together == 1:
        return (graphs - 1) * graph.held + graph.peak
    return (graphs - 2) * graph.held + graph.joint_peak


def windows(work: Workload) -> tuple[int, int]:
    """How many windows jagg approximates, and how many steps each has."""
    size = work.jagg.window
    if size < 3 or work.steps_chosen_singly:
        return 0, size
    full, rest = divmod(work.trained_steps, size)
    # Shorter windows take part in the ranking from three steps on.
    scored = full + (rest >= 3)
    return min(full, math.floor(work.jagg.frac * scored + 0.5)), size


def backwards(work: Workload, wave_size: int) -> float:
    """Backwards of a wave under jagg once windows are approximated: each costs two."""
    count, size = windows(work)
    return work.trained_steps_of(wave_size) - count * (size - 2)


def kept_data(work: Workload, batch: Batch) -> int:
    """Bytes of latents, velocities and embedded prompts of the waves that wait to be trained.

    Of pipeline stages the first one has the latents that a trained step began with and the last one
    all of it; every stage has prompts and final latents.
    """
    steps = math.ceil(work.trained_steps_of(batch.wave_size))
    latent = batch.wave_size * work.latent
    prompt = batch.wave_size * work.shape.text_tokens * work.shape.text_width * work.width
    # Every trained step leaves its velocity, the reference's and the latents it led to; what is
    # being sampled or weighed has a few tensors of that size more.
    of_a_step, momentary = int(work.shape.is_first), 0
    if work.shape.is_last:
        of_a_step, momentary = 2 + work.kl, 4
    waiting = (of_a_step * steps + 1) * latent + prompt * (2 if work.guided else 1)
    return batch.pending * waiting + momentary * latent
