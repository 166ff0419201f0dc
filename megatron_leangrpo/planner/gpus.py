# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Devices by name: memory, speed, and the links between them."""

import os
from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One device and its place in a cluster; speeds are peaks, in units a second."""

    name: str
    memory: int
    """Bytes that its driver reports."""
    half: float
    """Dense bfloat16 floating-point operations."""
    single: float
    """float32 ones, as torch multiplies by default (no TF32)."""
    bandwidth: float
    """Bytes read or written in its own memory."""
    node_link: float
    """Bytes sent to another device of the node."""
    network: float
    """Bytes sent to a device of another node."""
    per_node: int = 8
    efficiency: float = 0.5
    """Share of the peak that large matrix products reach in a whole model. Megatron-Bridge reports
    326 TFLOP/s, collectives included, for Wan 14B on H100: a third of the peak."""
    latency: float = 2e-5
    """Seconds that a collective takes at least."""
    reserve: float = 0.08
    """Share of the memory for the CUDA context, NCCL, fragments, and decoding."""

    @property
    def budget(self) -> int:
        """Bytes that a run may plan with."""
        return int(self.memory * (1 - self.reserve))

    def flops(self, width: int) -> float:
        """Operations a second that are reached with numbers of `width` bytes."""
        peak = {2: self.half, 4: self.single}.get(width, self.single / 2)
        return peak * self.efficiency


# Peaks are those of NVIDIA's data sheets, without sparsity; memory is what nvidia-smi shows. Links
# count one direction: half of NVLink's published sum. The network is one 400 Gb/s port a GPU, but
# 200 Gb/s for A100 and a shared 100 Gb/s for L20, as in the reference designs of their time.
PRESETS = {
    gpu.name: gpu
    for gpu in (
        # H100 SXM5: 989 TFLOP/s, HBM3 at 3.35 TB/s, NVLink 4 at 900 GB/s.
        Gpu("h100-80gb", 81_559 * 2**20, 989e12, 67e12, 3.35e12, 450e9, 50e9),
        # H200 SXM: H100 with 141 GB of HBM3e at 4.8 TB/s.
        Gpu("h200-141gb", 143_771 * 2**20, 989e12, 67e12, 4.8e12, 450e9, 50e9),
        # A100 SXM4 80 GB: 312 TFLOP/s, HBM2e at 2.04 TB/s, NVLink 3 at 600 GB/s.
        Gpu("a100-80gb", 81_920 * 2**20, 312e12, 19.5e12, 2.04e12, 300e9, 25e9),
        # B200: 2.25 PFLOP/s, HBM3e at 8 TB/s, NVLink 5 at 1.8 TB/s.
        Gpu("b200", 183_359 * 2**20, 2250e12, 75e12, 8e12, 900e9, 50e9),
        # L20: 119.5 TFLOP/s, GDDR6 at 864 GB/s, PCIe 4.0 x16 and no NVLink.
        Gpu("l20", 46_068 * 2**20, 119.5e12, 59.8e12, 864e9, 32e9, 3e9),
    )
}
HOST = "host"


def host(ranks: int = 1) -> Gpu:
    """This machine's processors and memory, shared by some ranks."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # A core of a server multiplies about 50 GFLOP/s in float32, with AVX2 or AVX-512.
    speed = 50e9 * max(1, (os.cpu_count() or 1) / ranks)
    return Gpu(
        HOST,
        physical // ranks,
        half=speed / 2,
        single=speed,
        bandwidth=10e9,
        node_link=1e9,
        network=1e9,
        per_node=max(ranks, os.cpu_count() or 1),
        latency=1e-4,
    )


def find_gpu(name: str) -> Gpu:
    """A preset by name; ``ValueError`` names all."""
    if name == HOST:
        return host()
    if name not in PRESETS:
        raise ValueError(f"--gpu = {name!r} is not known; valid: {', '.join([*PRESETS, HOST])}")
    return PRESETS[name]


def known_peak(name: str, width: int) -> float | None:
    """Operations a second with numbers of `width` bytes, by the data sheet of a CUDA device."""
    # The presets of these names are SXM modules; cards are slower.
    gpu = None if "PCIe" in name or "NVL" in name else _preset_of(name)
    return None if gpu is None else {2: gpu.half, 4: gpu.single}.get(width)


def like_device(name: str, memory: int) -> Gpu:
    """The preset whose name is part of a CUDA device's, with the memory the device has.

    An unknown device gets H100's ratios of speeds, which decide between schedules.
    """
    return replace(_preset_of(name) or PRESETS["h100-80gb"], memory=memory)


def _preset_of(name: str) -> Gpu | None:
    kinds = {preset.split("-")[0]: gpu for preset, gpu in PRESETS.items()}
    words = name.lower().replace("-", " ").split()
    return next((gpu for kind, gpu in kinds.items() if kind in words), None)
