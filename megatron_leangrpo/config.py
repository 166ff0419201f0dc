# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The typed configuration of a run; every field maps one to one to ``--section.key=value``."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """Which transformer is trained, and in which precision."""

    family: Literal["flux", "wan"] = "flux"
    """Model family: pictures by FLUX.1, videos by Wan 2.1 and 2.2."""
    base: str | None = None
    """Base model: a diffusers pipeline folder, or the name of an embedded base
    (flux_digits, flux_shapes, wan_motion)."""
    weights: str | None = None
    """Transformer weights in place of the base's: a megatron checkpoint that
    `python -m checkpoints_tools import` has made, or RUN/checkpoints/step_N of a run."""
    preset: str | None = None
    """Architecture by name (flux_dev, flux_slice, flux_tiny, flux_bench; wan21_1.3b, wan21_14b,
    wan21_i2v_14b, wan22_a14b, wan22_5b, wan_tiny, wan_bench), with random weights when no base is
    given."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Dtype of weights and activations. Log-probs and latents are never narrower than float32."""
    expert_boundary: float | None = None
    """Noise level from which the first of Wan 2.2's two transformers runs, in place of the
    boundary_ratio of the base's model_index.json."""
    expert_offload: bool = False
    """Keep the weights of the transformer that does not run in host memory while an iteration rolls
    out and trains, and while it evaluates."""
    guidance_scale: float = 3.5
    """Input of the guidance embedding of guidance-distilled models; ignored by other models."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activation recomputation as in Megatron: selective recomputes attention, full every block."""
    max_text_tokens: int = 512
    """Length to which the T5 prompt is padded or cut."""


@dataclass(frozen=True)
class Fp8Config:
    """FP8 in the linears of the blocks: tokens' projections and MLPs."""

    recipe: Literal["none", "delayed", "current", "blockwise", "mxfp8"] = "none"
    """Scaling recipe of transformer-engine: by tensor from earlier iterations or from the tensor
    itself, by 1 x 128 and 128 x 128 blocks (Hopper), by 32 numbers (Blackwell)."""
    backend: Literal["transformer_engine", "reference"] = "transformer_engine"
    """transformer_engine needs a GPU with FP8; reference quantises and dequantises in torch,
    anywhere and slowly."""
    backward: Literal["dequantized", "quantized"] = "dequantized"
    """dequantized multiplies gradients unrounded with what the forward has multiplied, so that
    every schedule gives one gradient; quantized rounds gradients too (transformer-engine's
    default), for replay and retain."""
    format: Literal["e4m3", "hybrid"] | None = None
    """hybrid has E5M2 for quantized gradients, e4m3 E4M3 for all; by default hybrid for delayed and
    current, e4m3 for blockwise and mxfp8."""
    first_last_blocks_bf16: int = 0
    """Blocks at either end of the model that keep its dtype."""
    amax_history_len: int = 1024
    """delayed: iterations whose maxima the scales come from."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """delayed: the largest of them or the newest."""
    margin: int = 0
    """delayed: scales are 2 ** margin smaller than what would just fit."""
    float32_scales: bool = False
    """blockwise: scales of any mantissa instead of powers of two."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: A and B of each projection are trained, all weights are frozen."""

    rank: int = 0
    """Rank of every adapter; 0 trains all weights instead. Published: 64 (Flow-GRPO's FLUX), 32
    (its Wan 2.1), 128 (DanceGRPO)."""
    alpha: float | None = None
    """alpha / rank multiplies B A x; twice the rank when not given (Flow-GRPO, DanceGRPO)."""
    targets: list[str] = field(default_factory=list)
    """Diffusers' names of the projections, or their ends as in PEFT, such as to_q or ff.net.2; when
    empty, Flow-GRPO's for the model family."""
    path: str | None = None
    """LoRA file or folder to start from; rank, alpha and targets are then the file's."""


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout in Megatron's words; the rest of the world is data parallel."""

    tensor_model_parallel_size: int = 1
    """Ranks that share one copy of the transformer. Must divide the number of heads."""
    context_parallel_size: int = 1
    """Ranks over which the tokens of a sample are sharded outside attention (Ulysses); inside,
    each has all tokens of its share of the heads."""
    pipeline_model_parallel_size: int = 1
    """Stages over which the transformer's blocks are split, each on ranks of its own."""
    pipeline_split: list[int] | Literal["memory"] | None = None
    """Blocks of each stage, such as [10, 15, 16, 16]; null balances time, memory the weights."""
    pipeline_waves_in_flight: int = 0
    """Waves that are on their way through the stages at once; 0: as many as there are stages."""
    sequence_parallel: bool = True
    """Shard tokens between the linears over the tensor-parallel ranks; without effect at size 1."""
    timeout_seconds: int = 600
    """A collective that waits longer than this ends the job."""


@dataclass(frozen=True)
class OverlapConfig:
    """How the collectives of tensor and context parallelism run beside products and attention;
    without effect where both sizes are 1."""

    mode: Literal["off", "bulk", "flash", "auto"] = "off"
    """off: one after the other, as megatron; bulk: whole ones, beside each other in the backward;
    flash: in slices that travel while others are multiplied, forward and backward, and Ulysses in
    groups of heads; auto: bulk or flash, whichever the cost model finds faster for a layer and its
    tokens."""
    pattern: Literal["ring", "direct"] = "ring"
    """flash: ring talks to neighbours (PCIe, several nodes), direct straight to the owner of a
    slice, who sums in float32."""
    sub_slices: int = 2
    """flash: parts of a rank's slice, 1 to 16; from 2 on a ring adds inside the products. Groups
    of heads around an attention."""
    calibration: str | None = None
    """auto: the file that `leangrpo overlap measure --calibrate FILE` writes on this machine."""


@dataclass(frozen=True)
class SamplingConfig:
    """The sampler of the rollout: sizes, sigmas, stochastic kernel, and which steps are trained."""

    height: int = 512
    """Image height in pixels."""
    width: int = 512
    """Image width in pixels."""
    num_frames: int = 1
    """Frames of a video, a multiple of 4 and one more; 1 for pictures."""
    cfg_scale: float = 1.0
    """Classifier-free guidance: above 1 every step also runs the model on `negative_prompt`."""
    cfg_scale_2: float | None = None
    """The same for the second of Wan 2.2's two transformers; `cfg_scale` when not given."""
    negative_prompt: str = ""
    """What guidance leads away from."""
    cfg_forwards: Literal["joint", "separate"] = "joint"
    """One forward of twice the batch, or two forwards."""
    num_steps: int = 10
    """Denoising steps of a rollout (N)."""
    sigma_schedule: Literal["flux_dynamic", "static_shift", "unipc_flow"] = "flux_dynamic"
    """flux_dynamic shifts by the number of image tokens (diffusers, Flow-GRPO), static_shift by
    `shift` (DanceGRPO), unipc_flow has the sigmas of diffusers' UniPC at `shift` (Flow-GRPO's
    Wan)."""
    shift: float | None = None
    """Shift of static_shift and unipc_flow: sigma = shift * t / (1 + (shift - 1) * t)."""
    truncate_timesteps: bool = False
    """Feed the model int(1000 * sigma) / 1000 as DanceGRPO does."""
    kernel: Literal["flow_sde", "dance_sde", "wan_sde", "cps"] = "flow_sde"
    """Stochastic step of the rollout."""
    noise_level: float | None = 0.7
    """Noise level of the kernel (Flow-GRPO's noise_level, DanceGRPO's eta); wan_sde has none."""
    shared_initial_noise: bool = False
    """Start every member of a group from the same latent."""
    step_selection: Literal["first_fraction", "random_fraction", "window", "progressive"] = (
        "first_fraction"
    )
    """Which steps are trained: the first ones (Flow-GRPO), a random fraction (DanceGRPO), a window
    with a drawn start (Flow-GRPO-Fast), or a window that slides over the run (MixGRPO). Windows are
    stochastic inside and deterministic outside."""
    timestep_fraction: float | None = None
    """Share of steps trained by first_fraction (0.99) and random_fraction (0.6)."""
    block_size: int | None = None
    """random_fraction draws blocks of this many consecutive steps instead of single steps, so that
    jagg has windows to interpolate in."""
    window_size: int | None = None
    """Steps in a window or progressive window."""
    window_starts: list[int] | None = None
    """Starts that the start of a window is drawn from."""
    window_interval: int | None = None
    """Iterations a progressive window stays where it is (25)."""
    window_stride: int | None = None
    """Steps by which a progressive window advances (1)."""
    window_decay: float | None = None
    """Progressive windows stay shorter at later starts, by exp(-window_decay) a step (MixGRPO)."""
    window_decay_start: int | None = None
    """Start from which window_decay counts."""
    selection_scope: Literal["sample", "group", "iteration"] | None = None
    """Who shares one draw of the trained steps (random_fraction: sample, window: group)."""
    output: Literal["final", "predicted_x0"] = "final"
    """What is decoded: the last latent, or the x0 predicted at the last step (DanceGRPO)."""


@dataclass(frozen=True)
class GrpoConfig:
    """The GRPO iteration: groups, schedule, objective."""

    iterations: int = 100
    """Iterations of the run: each is one rollout and `updates_per_rollout` optimizer steps."""
    prompts_per_iteration: int = 8
    """Groups an iteration, over all data-parallel ranks."""
    group_size: int = 8
    """Samples a prompt (G)."""
    placement: Literal["spread", "local"] = "spread"
    """spread deals the members of a group over the data-parallel ranks, local keeps a group on one
    rank."""
    micro_batch_size: int = 1
    """Trajectories in one forward; rollout and update use the same micro-batches."""
    schedule: Literal["auto", "replay", "retain", "reweight", "jagg"] = "retain"
    """How the gradient of the first update is evaluated. replay, retain and reweight give the same
    number, jagg an approximation with fewer backwards; auto takes the fastest of the exact ones
    that fits into memory, and decides model.recompute_granularity with it."""
    jagg_on: Literal["replay", "retain", "reweight"] = "retain"
    """Which schedule's graphs jagg works on."""
    jagg_window: int = 3
    """Consecutive trained steps (W) whose W backwards jagg replaces by two."""
    jagg_frac: float = 0.5
    """Share of the windows that jagg may approximate: those whose velocities agree best with the
    line between the end points in the iteration before. The others are exact."""
    jagg_check_interval: int = 0
    """Iterations between two measurements of jagg's gradient against the exact one; each replays
    the whole rollout. 0 measures never."""
    updates_per_rollout: int = 1
    """Optimizer steps a rollout; the second and later ones are off-policy and always replayed."""
    clip_range: float = 1e-4
    """PPO clip of the probability ratio."""
    ratio_norm: Literal["none", "grpo_guard", "flow_factory"] = "none"
    """Ratio normalisation of GRPO-Guard, with its factor 1 / -dt on the loss or without."""
    advantage: Literal[
        "flow_grpo_global_std",
        "flow_grpo_group_std",
        "dance_group",
        "dance_global",
        "verl_omni_global_std",
        "verl_omni_group_std",
        "flow_factory",
        "dr_grpo",
        "leave_one_out",
    ] = "flow_grpo_group_std"
    """Advantage convention, named after the code it comes from."""
    adv_clip: float | None = 5.0
    """Advantages are clamped to plus or minus this."""
    reward_combination: Literal["reward_sum", "advantage_sum", "gdpo"] = "reward_sum"
    """How several rewards become one advantage."""
    kl_beta: float = 0.0
    """Weight of the KL term to the base model; 0 needs no reference model."""
    reference_offload: bool = False
    """Keep the reference model of the KL term in host memory and fetch a block at a time."""
    cfg_detach: bool = False
    """No gradient flows through the velocity of `sampling.negative_prompt` (Flow-GRPO until July
    2025)."""
    kl_form: Literal["flow_grpo", "exact", "mean_mse", "velocity_mse"] = "flow_grpo"
    """KL without dt (Flow-GRPO), with dt (Flow-GRPO's Wan), or Flow-Factory's mean squares."""


@dataclass(frozen=True)
class RemoteRewardConfig:
    """Rewards that `leangrpo serve-reward` computes elsewhere."""

    url: str | None = None
    """Address of the reward server, such as http://host:8085."""
    names: list[str] = field(default_factory=list)
    """Which rewards of `weights` the server computes."""
    timeout_seconds: float = 60.0
    """Longest wait for one answer."""
    deadline_seconds: float = 300.0
    """Longest wait for one answer with all retries."""
    retries: int = 10
    """Further attempts after an error, with growing random pauses; waiting for a server that is
    busy does not count."""
    token_variable: str = "LEANGRPO_REWARD_TOKEN"
    """Environment variable that holds the bearer token; no token is sent where it is not set."""


@dataclass(frozen=True)
class JudgeConfig:
    """The vision-language model that the reward vlm_judge asks."""

    url: str | None = None
    """Address of an OpenAI-compatible endpoint, such as http://host:8000/v1."""
    model: str | None = None
    """Its name there."""
    prompt: str | None = None
    """Question with {prompt} in it, answered by "Final Score: N" with N from 1 to 5, or by N."""
    concurrency: int = 16
    """Questions at once from each rank."""
    timeout_seconds: float = 60.0
    """Longest wait for one answer."""
    deadline_seconds: float = 300.0
    """Longest wait for one answer with all retries."""
    retries: int = 10
    """Further attempts after an error, with growing random pauses."""
    token_variable: str = "LEANGRPO_JUDGE_TOKEN"
    """Environment variable that holds the bearer token; no token is sent where it is not set."""


@dataclass(frozen=True)
class RewardConfig:
    """Rewards and what happens when one fails."""

    weights: dict[str, float] = field(default_factory=dict)
    """Reward name to weight, e.g. {ocr: 1.0}."""
    failure_policy: Literal["raise", "drop_group"] = "raise"
    """A reward that raises or is not finite ends the run, or its whole group gets advantage 0."""
    frame_interval: int = 4
    """Frames of a video that a reward of pictures scores, and whose scores are averaged: the first
    and every frame_interval-th after it; 0 is the first frame alone (DanceGRPO)."""
    paths: dict[str, str] = field(default_factory=dict)
    """Reward name to the local folder of its weights, e.g. {pickscore: /models/PickScore_v1}."""
    device: str = "auto"
    """Where reward models run: auto (the policy's device), cpu, cuda or cuda:N."""
    batch_size: int = 16
    """Images in one forward of a reward model."""
    offload: bool = False
    """Keep reward models in host memory and move them to the device only while they score."""
    remote: RemoteRewardConfig = field(default_factory=RemoteRewardConfig)
    """Rewards computed by a reward server."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """The endpoint of vlm_judge."""


@dataclass(frozen=True)
class PromptConfig:
    """Prompt files: .txt with a prompt a line, or .jsonl or .parquet with `prompt` and metadata."""

    train: str | None = None
    """Training prompts."""
    evaluation: str | None = None
    """Held-out prompts of the evaluation; the training prompts when not given."""
    held_out: int = 0
    """Different prompts of `train` that are evaluated and never trained on, where there is no file
    for that; which ones depends on the texts alone."""
    embedding_cache: str | None = None
    """Folder that keeps the prompts' embeddings. A run encodes what is new before it loads the
    transformer, and frees the text encoders; they are not loaded where nothing is new."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and the learning-rate schedule, counted in optimizer updates."""

    lr: float = 1e-5
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate after the decay."""
    lr_warmup_updates: int = 0
    """Updates of linear warm-up from 0."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from lr to min_lr over the run's updates."""
    weight_decay: float = 1e-4
    """AdamW weight decay."""
    adam_beta1: float = 0.9
    """AdamW beta 1."""
    adam_beta2: float = 0.999
    """AdamW beta 2."""
    adam_eps: float = 1e-8
    """AdamW epsilon."""
    clip_grad: float = 1.0
    """Gradient norm clip; 0 turns it off."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Sum gradients over the data-parallel ranks bucket by bucket beside an update's last backward
    (replay, retain, and jagg on them; reweight has none left when it knows the gradient)."""
    ema_decay: float = 0.0
    """Cap of the decay of the weight average, min((1 + n) / (10 + n), cap); 0 keeps none."""
    ema_interval: int = 8
    """Updates between two updates of the average (Flow-GRPO)."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation by deterministic sampling with fixed noise; average weights when they exist."""

    interval: int = 10
    """Iterations between evaluations; 0 evaluates before and after the run only."""
    num_steps: int = 28
    """Denoising steps."""
    samples_per_prompt: int = 4
    """Images a prompt."""
    max_prompts: int = 64
    """Prompts taken from the file, in order."""
    micro_batch_size: int = 16
    """Images in one forward."""
    seed: int = 1234
    """Seed of the initial noise."""
    grid_images: int = 40
    """Images in a sample grid."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Megatron distributed checkpoints in the run directory."""

    interval: int = 0
    """Iterations between checkpoints; 0 saves at the end only, -1 never."""
    export_interval: int = 0
    """Iterations between exports for diffusers (export/step_N, from the checkpoint of the same
    iteration); 0 exports at the end only, -1 never."""
    keep: int = 3
    """Newest checkpoints that stay, besides the one with the best evaluation."""
    resume: bool | Literal["auto"] = False
    """true continues from the newest checkpoint of `output` whose files are whole; auto does so
    where there is a run and starts one where there is none (for jobs that are requeued)."""


@dataclass(frozen=True)
class OperationsConfig:
    """What a run does by itself when it is in trouble."""

    rollbacks: int = 0
    """How often a run may go back to the checkpoint of its best evaluation, when the reward has
    collapsed or the gradient norm has a spike; 0 only warns. Iterations are counted on: what
    follows has later prompts and other noise, at a lower learning rate."""
    rollback_lr_factor: float = 0.5
    """What each rollback multiplies the learning rate with, for the rest of the run."""


@dataclass(frozen=True)
class RunConfig:
    """One run of leangrpo."""

    recipe: str = "custom"
    """Name of the recipe; names the run directory."""
    output: str | None = None
    """Run directory; a fresh runs/<recipe>-<n> when not given."""
    seed: int = 0
    """Seed of prompts, noise and step selection."""
    wandb: bool = False
    """Also log to Weights & Biases."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    prompts: PromptConfig = field(default_factory=PromptConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    operations: OperationsConfig = field(default_factory=OperationsConfig)
