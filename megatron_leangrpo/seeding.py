# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Random generators named by what they are for, so that no draw depends on any other draw."""

import hashlib
import struct

import numpy as np


def generator(domain: str, *values: int) -> np.random.Generator:
    """A generator that depends only on what it is for and on the integers that name the draw.

    Its state comes from a 128-bit hash. torch's CPU generator is not used because it keeps only 32
    bits of its seed: a run of a few hundred iterations would already repeat a noise tensor.
    """
    message = domain.encode() + b"\0" + struct.pack(f"<{len(values)}q", *values)
    digest = hashlib.blake2b(message, digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
