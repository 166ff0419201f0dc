# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Everything the planner needs to know of a run; no model, name or file."""

from dataclasses import dataclass, field
from typing import Literal

from megatron_leangrpo.models.common.shape import Companions, TransformerShape
from megatron_leangrpo.planner.adapters import Adapters
from megatron_leangrpo.planner.blocks import Layout
from megatron_leangrpo.planner.packing import Packing


@dataclass(frozen=True)
class Batch:
    """The iteration of one rank, as the placement of groups makes it; a wave is one rollout."""

    waves: int
    """Waves of all mini-batches."""
    trained_waves: int
    """Waves of the first, on-policy mini-batch."""
    wave_size: int
    """Trajectories in a wave (the last one may have fewer)."""
    graphs_in_flight: int
    """Most on-policy waves that wait for their groups at once."""
    pending: int
    """Most waves whose latents are kept at once, off-policy ones included."""
    moment_copies: int
    """Most gradient-sized copies that reweight needs at once."""
    waves_in_flight: int = 1
    """Waves that are rolled out together, on their way through the stages of a pipeline."""
    graphs_of_a_step: int = 1
    """Graphs that replay and reweight hold at once: several on the stages of a pipeline."""


@dataclass(frozen=True)
class Ranks:
    """How the ranks of a run share it."""

    tensor: int = 1
    """Share the heads and features of a transformer."""
    context: int = 1
    """Share the tokens of a sample (Ulysses)."""
    data: int = 1
    """Have trajectories of their own."""
    pipeline: int = 1
    """Have blocks of their own."""

    @property
    def trajectory(self) -> int:
        """Ranks that work on the same trajectories."""
        return self.tensor * self.context

    @property
    def weights(self) -> int:
        """Ranks that hold the same weights, and share optimizer state."""
        return self.context * self.data

    def __str__(self) -> str:
        context = f" x CP {self.context}" if self.context > 1 else ""
        pipeline = f" x PP {self.pipeline}" if self.pipeline > 1 else ""
        return f"TP {self.tensor}{context}{pipeline} x DP {self.data}"


@dataclass(frozen=True)
class Jagg:
    """Options of the approximate schedule."""

    on: str = "retain"
    window: int = 3
    frac: float = 0.5


@dataclass(frozen=True)
class Workload:
    """A run at one size."""

    shape: TransformerShape
    sampled_steps: int
    """N."""
    trained_steps: int
    """T of a trajectory."""
    width: int
    """Bytes of a weight or activation: 2, 4 or 8."""
    samples: int
    """Trajectories of an iteration, over all ranks."""
    picture: int = 0
    """Bytes of a decoded trajectory."""
    micro_batch: int = 1
    updates: int = 1
    """Optimizer updates on one rollout; all but the first are replayed."""
    guided: bool = False
    """Classifier-free guidance: every velocity takes two forwards."""
    guided_batch: bool = True
    """Guidance runs as one forward of twice the batch rather than as two."""
    guided_detached: bool = False
    """Of two forwards of guidance, the one on the negative prompt leaves no graph."""
    expert_offload: bool = False
    """Of several experts only one is on the device."""
    kl: bool = False
    """There is a KL term, and with it a reference model."""
    reference_offload: bool = False
    average: bool = False
    """A float32 average of the weights is kept."""
    distributed_optimizer: bool = True
    sequence_parallel: bool = True
    trainable: int | None = None
    """Parameters of adapters, in float32 or wider, on a frozen base; None trains the base."""
    steps_chosen_singly: bool = False
    """The trajectories of a wave train steps of their own (DanceGRPO)."""
    pipeline_split: tuple[int, ...] | Literal["memory"] | None = None
    """Blocks of each stage; None balances their number, memory their weights."""
    packing: Packing | None = None
    """Of the inputs of linears in FP8."""
    adapters: Adapters | None = None
    """What is trained instead of the base."""
    jagg: Jagg = field(default_factory=Jagg)
    companions: Companions = field(default_factory=Companions)

    def layout(self, ranks: Ranks, recompute: str, batch: int) -> Layout:
        """How a forward of `batch` trajectories runs."""
        doubled = self.guided and self.guided_batch
        return Layout(
            batch=batch * (2 if doubled else 1),
            width=self.width,
            tensor_parallel=ranks.tensor,
            context_parallel=ranks.context,
            sequence_parallel=self.sequence_parallel,
            selective=recompute == "selective",
            # Adapters keep inputs as they came, and a frozen weight needs none.
            packing=self.packing if self.trainable is None else None,
            adapters=self.adapters,
        )

    @property
    def forwards(self) -> int:
        """Forwards of one velocity."""
        return 2 if self.guided and not self.guided_batch else 1

    @property
    def graphs(self) -> int:
        """Forwards of one velocity that a backward runs through."""
        return 1 if self.guided_detached else self.forwards

    @property
    def wide(self) -> int:
        """Bytes of a number of gradients, latents and optimizer state."""
        return max(4, self.width)

    def trained_steps_of(self, batch: int) -> float:
        """Steps of a wave that somebody in it trains, on average.

        Where every trajectory draws T of the first N - 1 steps by itself, a step is left out by all
        with probability (1 - T / (N - 1)) ** batch.
        """
        if not self.steps_chosen_singly:
            return self.trained_steps
        trainable = self.sampled_steps - 1
        missed = (1 - self.trained_steps / trainable) ** batch
        return trainable * (1 - missed)

    @property
    def latent(self) -> int:
        """Bytes of one trajectory's latents."""
        return self.shape.image_tokens * self.shape.in_channels * self.wide
