# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""`leangrpo serve-reward`: what it refuses before it listens, and that it serves."""

import os
import signal
import subprocess
import sys

import pytest

from megatron_leangrpo.rewards.wire import TOKEN_VARIABLE

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("parts", "arguments"),
    [
        (["--host 0.0.0.0", TOKEN_VARIABLE, "--token-file"], ["--host", "0.0.0.0"]),
        (["--port 70000"], ["--port", "70000"]),
        (["--path 'pickscore'", "NAME=FOLDER"], ["--path", "pickscore"]),
        (["--max-images 0"], ["--max-images", "0"]),
        (["--device = 'tpu'", "auto"], ["--device", "tpu"]),
        (["--token-file nothing"], ["--token-file", "nothing"]),
        (["unknown reward 'color_shap'", "'color_shape'"], ["color_shap"]),
        (["reward 'hpsv2'", "reward.paths.hpsv2"], ["hpsv2"]),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(leangrpo, parts, arguments):
    leangrpo.refuses(parts, "serve-reward", "color_shape", *arguments)


@pytest.mark.parametrize("token", ["short", "with a space in the middle", "with-an-ümlaut-in-it"])
def test_a_token_that_a_header_cannot_carry_or_anybody_can_guess_is_refused(
    leangrpo, monkeypatch, token
):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    leangrpo.refuses([TOKEN_VARIABLE, "16 or more ASCII"], "serve-reward", "color_shape")


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    (tmp_path / "token").write_text("0123456789abcdef\n")
    command = [sys.executable, "-m", "megatron_leangrpo", "serve-reward", "jpeg_compressibility"]
    with subprocess.Popen(
        [*command, "--port", "0", "--token-file", str(tmp_path / "token")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as server:
        line = server.stdout.readline()
        url = line.split()[-1]
        try:
            with httpx.Client(transport=httpx.HTTPTransport(retries=5), timeout=60) as client:
                assert client.get(f"{url}/health").json()["status"] == "ok"
                assert client.get(f"{url}/rewards").status_code == 401
        finally:
            server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=60)
    assert line.startswith("serving jpeg_compressibility with a bearer token on http://127.0.0.1:")
    assert server.returncode in (0, 130), err
    assert "Traceback" not in err
