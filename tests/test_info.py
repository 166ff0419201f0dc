# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""leangrpo info."""

import json
import subprocess
import sys

from megatron_leangrpo import info


def test_versions_and_devices_are_those_of_this_machine():
    import torch

    found = info.collect_info()
    assert found["versions"]["torch"] == torch.__version__
    assert found["backend"].startswith("cuda" if torch.cuda.is_available() else "cpu")
    assert found["cpu_cores"] >= 1
    assert found["memory_bytes"] > 2**28
    json.dumps(found)


def test_what_is_missing_comes_with_its_purpose_and_how_to_get_it(monkeypatch, capsys):
    find_spec = info.importlib.util.find_spec
    monkeypatch.setattr(
        info.importlib.util,
        "find_spec",
        lambda name: None if name == "rapidocr" else find_spec(name),
    )
    info.print_info()
    lines = capsys.readouterr().out.splitlines()
    index = next(i for i, line in enumerate(lines) if "rapidocr" in line)
    assert "missing" in lines[index]
    assert "OCR" in lines[index]
    assert "pip install 'megatron-leangrpo[ocr]'" in lines[index + 1]


def test_gpus_without_a_cuda_build_are_explained(monkeypatch, capsys):
    monkeypatch.setattr(info, "gpu_lines", lambda: ["NVIDIA H200, 143771 MiB, 580.159"])
    monkeypatch.setattr(info, "_torch_cuda_build", lambda: None)
    assert info.collect_info()["backend"] == "cpu (gloo)"
    info.print_info()
    assert "there are GPUs, but this torch is built without CUDA" in capsys.readouterr().out


def test_fused_kernels_are_named_with_what_is_used_in_their_place(monkeypatch, capsys):
    monkeypatch.setattr(info, "gpu_lines", lambda: ["NVIDIA H200, 143771 MiB, 580.159"])
    there = {"transformer_engine", "fused_weight_gradient_mlp_cuda"}
    monkeypatch.setattr(info.importlib.util, "find_spec", lambda name: name in there or None)
    kernels = {k["work"]: k for k in map(info._fused, info.FUSED_KERNELS)}
    assert kernels["Adam"]["in_use"] == kernels["gradient norm"]["in_use"] == "transformer-engine"
    assert kernels["weight gradients"]["in_use"] == "apex"
    assert kernels["layer norms"]["in_use"] == "torch's layer norm"
    explained = info._explain_fused(kernels["RMS norms"])
    assert "ours, with the rotation (transformer-engine's kernel is not used: it has" in explained
    there.clear()
    kernels = {k["work"]: k for k in map(info._fused, info.FUSED_KERNELS)}
    assert kernels["Adam"]["in_use"] == "torch's AdamW" and kernels["Adam"]["present"] is None
    assert info._explain_fused(kernels["Adam"]) == "torch's AdamW (no fused kernel here)"


def test_without_a_gpu_no_fused_kernel_is_in_use(monkeypatch):
    monkeypatch.setattr(info, "gpu_lines", list)
    monkeypatch.setattr(info.importlib.util, "find_spec", lambda name: True)
    adam = info._fused(info.FUSED_KERNELS[0])
    assert adam["in_use"] == "torch's AdamW" and adam["why_not"] == "no GPU"


def test_nothing_heavy_is_imported():
    program = (
        "import sys; from megatron_leangrpo.info import collect_info; collect_info();"
        "print([m for m in ('torch', 'megatron', 'diffusers', 'transformers', 'onnxruntime')"
        " if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "[]\n"
