# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""What is chosen follows from predicted bytes and seconds, and the reasons say so."""

import dataclasses

import pytest

from megatron_leangrpo.config import GrpoConfig
from megatron_leangrpo.grpo.in_flight import batch_of
from megatron_leangrpo.models.flux.config import flux_dev
from megatron_leangrpo.models.flux.shape import PUBLISHED_COMPANIONS as FLUX_COMPANIONS
from megatron_leangrpo.models.flux.shape import flux_shape
from megatron_leangrpo.models.wan.config import WanConfig
from megatron_leangrpo.models.wan.shape import PUBLISHED_COMPANIONS as WAN_COMPANIONS
from megatron_leangrpo.models.wan.shape import wan_shape
from megatron_leangrpo.planner.gpus import GIB, find_gpu
from megatron_leangrpo.planner.selector import Candidate, Choice, candidates, choose
from megatron_leangrpo.planner.workload import Jagg, Ranks, Workload

H100 = find_gpu("h100-80gb")


def flux(tokens: int = 1024, **changes) -> Workload:
    """FLUX.1-dev at Flow-GRPO's steps."""
    settings = {"sampled_steps": 6, "trained_steps": 5, "width": 2, "samples": 48 * 24}
    shape = flux_shape(flux_dev(), tokens, 512)
    return Workload(shape=shape, companions=FLUX_COMPANIONS, **{**settings, **changes})


def wan(**changes) -> Workload:
    """Wan 14B, 480 x 832 x 81 frames, guided."""
    settings = {"sampled_steps": 20, "trained_steps": 19, "width": 2, "samples": 16 * 16}
    shape = wan_shape(WanConfig(), 21 * 30 * 52, 512)
    return Workload(shape=shape, guided=True, companions=WAN_COMPANIONS, **{**settings, **changes})


def found(work: Workload, layouts, recompute: str = "none", **grpo) -> list[Candidate]:
    prompts = 48 if work.samples == 48 * 24 else 16
    config = GrpoConfig(
        prompts_per_iteration=prompts,
        group_size=work.samples // prompts,
        micro_batch_size=work.micro_batch,
        kl_beta=0.01 if work.kl else 0.0,
        **grpo,
    )
    return candidates(
        work,
        lambda ranks: batch_of(config, ranks.data, waves_in_flight=ranks.pipeline),
        layouts,
        H100,
        recompute,
    )


def pick(work: Workload, layouts, budget: float = H100.budget, **keywords) -> Choice:
    return choose(work, found(work, layouts, **keywords), int(budget), "a device")


@pytest.mark.parametrize("nodes", [4, 8])
def test_small_pictures_keep_their_graphs(nodes):
    layouts = [Ranks(tp, data=8 * nodes // tp) for tp in (1, 2, 4, 8)]
    chosen = pick(flux(), layouts).chosen
    assert (chosen.schedule, chosen.recompute) == ("retain", "none")


@pytest.mark.parametrize("data_parallel", [2, 8, 32])
def test_long_videos_weigh_gradients_afterwards(data_parallel):
    chosen = pick(wan(), [Ranks(8, data=data_parallel)]).chosen
    assert chosen.schedule == "reweight"


@pytest.mark.parametrize("layout", [Ranks(4, data=8), Ranks(8, data=4), Ranks(8, data=8)])
@pytest.mark.parametrize("changes", [{}, {"trained_steps": 2}, {"tokens": 4096}])
def test_the_choice_flips_where_predicted_bytes_cross(layout, changes):
    work = flux(**changes)
    rows = [c for c in found(work, [layout]) if c.is_exact]
    edges = sorted({c.memory.total for c in rows})
    seen = set()
    for edge in edges:
        best = choose(work, rows, edge, "a device").chosen
        fitting = [c for c in rows if c.memory.total <= edge]
        assert best.seconds.total == min(c.seconds.total for c in fitting)
        seen.add((best.schedule, best.recompute))
        if edge > edges[0]:
            # A byte less, and whoever needs this much is out.
            below = choose(work, rows, edge - 1, "a device").chosen
            assert below.memory.total < edge
    assert len(seen) >= 3


def test_more_tokens_or_steps_take_retain_out_of_the_memory():
    layout = [Ranks(4, data=8)]
    by_tokens = [pick(flux(tokens=n), layout).chosen.schedule for n in (256, 1024, 4096)]
    by_steps = [pick(flux(trained_steps=t, sampled_steps=t + 1), layout).chosen for t in (2, 5, 25)]
    assert by_tokens[:2] == ["retain", "retain"]
    assert by_tokens[2] != "retain" or pick(flux(tokens=4096), layout).chosen.recompute == "full"
    assert [(c.schedule, c.recompute) for c in by_steps][:2] == [("retain", "none")] * 2
    assert (by_steps[2].schedule, by_steps[2].recompute) != ("retain", "none")


def test_a_kl_term_makes_reweight_dearer_than_replay():
    choice = pick(flux(kl=True), [Ranks(8, data=8)], budget=500 * GIB)
    rows = {(c.schedule, c.recompute): c for c in choice.reasons}
    trained = 5
    replay, reweight = rows["replay", "none"], rows["reweight", "none"]
    # N - T forwards of steps that are not trained; 4 and 5 for each that is.
    assert replay.forward_equivalents == 1 + 4 * trained
    assert reweight.forward_equivalents == 1 + 5 * trained
    assert rows["retain", "none"].forward_equivalents == 1 + 3 * trained
    assert reweight.seconds.total > replay.seconds.total
    assert "the KL term needs a backward of its own" in choice.reasons[reweight]
    assert "5 forwards a trained step against 4 for replay" in choice.reasons[reweight]


def test_with_a_frozen_base_both_cost_three():
    choice = pick(flux(kl=True, trainable=180_000_000), [Ranks(8, data=8)], budget=500 * GIB)
    costs = {c.schedule: c.forward_equivalents for c in choice.reasons if c.recompute == "none"}
    assert costs["replay"] == costs["reweight"] == 1 + 3 * 5


@pytest.mark.parametrize(
    ("steps", "replay", "lean", "jagg"),
    # `reference/grpo.md` section 14: N, T, then replay, retain and reweight, jagg (W).
    [((6, 5), 21, 16, (5, 10)), ((20, 19), 77, 58, (4, 42)), ((25, 4), 37, 33, (4, 29))],
)
def test_costs_are_those_of_the_published_table(steps, replay, lean, jagg):
    window, cost = jagg
    work = flux(sampled_steps=steps[0], trained_steps=steps[1], jagg=Jagg("retain", window, 1.0))
    costs = {
        c.schedule: c.forward_equivalents
        for c in found(work, [Ranks(8, data=8)])
        if c.recompute == "none"
    }
    assert (costs["replay"], costs["retain"], costs["reweight"]) == (replay, lean, lean)
    # 19 steps are 4 windows of 4 and 3 steps that stay exact.
    assert costs["jagg"] == cost


def test_an_approximation_is_listed_and_never_chosen():
    work = flux(jagg=Jagg("retain", 5, 1.0))
    choice = pick(work, [Ranks(8, data=8)], budget=500 * GIB)
    [jagg] = [c for c in choice.reasons if c.schedule == "jagg" and c.recompute == "none"]
    assert jagg.seconds.total < choice.chosen.seconds.total
    assert choice.chosen.is_exact
    assert choice.reasons[jagg].startswith("approximate, ")


def test_reweight_needs_single_trajectories():
    choice = pick(flux(micro_batch=3), [Ranks(8, data=8)])
    reasons = {r for c, r in choice.reasons.items() if c.schedule == "reweight"}
    assert reasons == {
        "takes one trajectory at a time: needs grpo.micro_batch_size = 1, which is 3"
    }


def test_a_budget_that_nothing_fits_names_the_least_that_would():
    rows = found(flux(), [Ranks(2, data=4), Ranks(8, data=1)])
    least = min(c.memory.total for c in rows if c.is_exact)
    with pytest.raises(ValueError) as error:
        choose(flux(), rows, 10 * GIB, "a small device")
    assert "no schedule fits into 10.0 GiB, what a run can use of a small device" in str(
        error.value
    )
    assert f"the least is {least / GIB:.1f} GiB" in str(error.value)
    assert "parallel.tensor_model_parallel_size" in str(error.value)
    assert choose(flux(), rows, least, "a device").chosen.memory.total == least


def test_graphs_in_flight_follow_from_the_placement():
    # 4 prompts x 8 samples: 8 ranks finish a group in a wave, 2 ranks in four of them.
    spread = GrpoConfig(prompts_per_iteration=4, group_size=8)
    assert [batch_of(spread, dp).graphs_in_flight for dp in (1, 2, 4, 8)] == [8, 4, 2, 1]
    local = dataclasses.replace(spread, placement="local")
    assert [batch_of(local, dp).graphs_in_flight for dp in (1, 2, 4)] == [8, 8, 8]
    pooled = dataclasses.replace(spread, advantage="flow_grpo_global_std")
    assert [batch_of(pooled, dp).graphs_in_flight for dp in (1, 2, 4, 8)] == [32, 16, 8, 4]
    # Groups that straddle waves overlap: three ranks have two waves of a group at most, and one.
    odd = GrpoConfig(prompts_per_iteration=3, group_size=4)
    assert batch_of(odd, 3).graphs_in_flight == 2


@pytest.mark.parametrize("changes", [{"kl": True}, {"average": True}, {"guided": True}])
def test_what_stays_for_the_run_is_counted(changes):
    plain, more = (found(flux(**c), [Ranks(8, data=8)])[0].memory for c in ({}, changes))
    weights = flux().shape.parameters_of_rank(8)
    assert more.reference == (2 * weights if "kl" in changes else 0)
    assert more.average == (4 * weights if "average" in changes else 0)
    # Guidance computes with twice the batch.
    ratio = more.activations / plain.activations
    assert 1.5 < ratio < 2.5 if "guided" in changes else ratio < 1.3
    offloaded = found(flux(kl=True, reference_offload=True), [Ranks(8, data=8)])[0].memory
    assert offloaded.reference < 0.1 * 2 * weights
