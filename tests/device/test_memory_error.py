# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The script of tests/device/run.sh that reads a comparison's JSON file; needs no GPU."""

import json

from tests.device.memory_error import main


def test_a_schedule_has_a_line_for_what_was_measured_or_predicted(tmp_path, capsys):
    report = tmp_path / "report.json"
    row = {
        "peak_activation_bytes": 2**20,
        "gradient_buffer_bytes": 37_000_000,
        "moment_buffer_bytes": 0,
    }
    report.write_text(json.dumps({"schedules": {"replay": row, "reweight": row}}))
    main(str(report), "flux_bench", "--grpo.micro_batch_size=1")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("re")]
    assert [line.split("  ")[0] for line in lines] == [
        "replay, activations",
        "replay, gradient buffers",
        "reweight, activations",
        "reweight, gradient buffers",
        # Predicted, and not in this report: the error has no value.
        "reweight, moment buffers",
    ]
    assert lines[0].endswith("%") and lines[-1].endswith("-")
