# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`leangrpo overlap`: the table, its JSON, the picture, and settings that make no sense."""

import json

import pytest


def test_simulate_prints_the_published_setting_and_writes_it(leangrpo, tmp_path):
    table, picture = tmp_path / "table.json", tmp_path / "timeline.png"
    result = leangrpo(
        "overlap", "simulate", "--json", str(table), "--timeline", str(picture), "--ranks", "4"
    )
    assert result.status == 0
    assert "calibration inputs" in result.out
    report = json.loads(table.read_text())
    exposed = {row["mode"]: row["exposed_ms"] for row in report["modes"]}
    assert exposed["none"] == pytest.approx(43.8)
    assert exposed["slicing (8)"] == pytest.approx(7.1, abs=0.05)
    assert exposed["flash (ring, 1)"] == pytest.approx(0.1)
    assert exposed["flash (ring, 4)"] == pytest.approx(0.0, abs=1e-9)
    assert [row["ranks"] for row in report["sweep"]] == [2, 4, 8, 16, 32, 64]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_simulate_plays_an_attention_between_all_to_alls(leangrpo, tmp_path):
    table, picture = tmp_path / "table.json", tmp_path / "timeline.png"
    settings = ["--collective=all-to-all", "--compute-ms=80", "--collective-ms=40"]
    settings += ["--latency-ms=0", "--sub-slices=5", f"--json={table}", f"--timeline={picture}"]
    result = leangrpo("overlap", "simulate", *settings)
    assert result.status == 0 and "attention between two all-to-alls" in result.out
    report = json.loads(table.read_text())
    exposed = {row["mode"]: row["exposed_ms"] for row in report["modes"]}
    assert exposed == pytest.approx({"none": 40.0, "flash (5 groups)": 8.0})
    # More ranks have fewer heads each, and send less to each of more.
    assert report["sweep"][-1]["collective_ms"] < report["sweep"][1]["collective_ms"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--compute-ms", "0"),
        ("--ranks", "1"),
        ("--ranks", "65"),
        ("--sub-slices", "0"),
        ("--add-ms", "-1"),
        ("--latency-ms", "20"),
        ("--collective-ms", "nan"),
        ("--json", "nowhere/table.json"),
    ],
)
def test_a_setting_that_makes_no_sense_ends_with_its_name(leangrpo, option, value):
    named = value if option == "--json" else option
    leangrpo.refuses([named], "overlap", "simulate", f"{option}={value}")


@pytest.mark.parametrize(
    ("option", "value"), [("--ranks", "9"), ("--repeat", "0"), ("--calibrate", "nowhere/file.json")]
)
def test_a_measurement_that_makes_no_sense_starts_no_rank(leangrpo, option, value):
    named = value if option == "--calibrate" else option
    leangrpo.refuses([named], "overlap", "measure", f"{option}={value}")
