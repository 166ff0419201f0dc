# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""The reward server and its client, over a real connection."""

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

from megatron_leangrpo.conditioning.prompts import Prompt
from megatron_leangrpo.config import RemoteRewardConfig, RewardConfig
from megatron_leangrpo.rewards import RewardScores, WeightedReward, build_reward, make_reward
from megatron_leangrpo.rewards.base import RewardUnavailableError
from megatron_leangrpo.rewards.remote import RemoteSettings, RewardServer, remote_rewards
from megatron_leangrpo.rewards.wire import encode_picture

httpx = pytest.importorskip("httpx")
pytest.importorskip("tenacity")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

from megatron_leangrpo.grpo.run_reward import build_run_reward  # noqa: E402
from megatron_leangrpo.rewards.server import Limits, create_app  # noqa: E402
from tests.rewards.http_server import TOKEN, Faults, serve  # noqa: E402

IMAGES = torch.rand(5, 3, 12, 20, generator=torch.Generator().manual_seed(0))
PROMPTS = [f"a red circle, number {i}" for i in range(5)]
METADATA = [{"color": "red", "shape": "circle", "i": i} for i in range(5)]


class Fingerprint:
    """A score that any change of pixels, prompt or metadata changes."""

    verdict = "even"

    def __call__(self, images, prompts, metadata):
        ramp = torch.arange(images[0].numel(), dtype=torch.float64).sin()
        scores = torch.stack(
            [
                image.double().flatten() @ ramp + len(prompt) * item.get("i", 0)
                for image, prompt, item in zip(images, prompts, metadata, strict=True)
            ]
        )
        return RewardScores(scores, torch.tensor([item.get("i", 0) % 2 == 0 for item in metadata]))


class Rounded(Fingerprint):
    rounds_pixels = True

    def __call__(self, images, prompts, metadata):
        return super().__call__((images * 255).round() / 255, prompts, metadata)


class Blocked:
    """Scores when it is allowed to, and remembers how many images came together."""

    def __init__(self):
        self.entered, self.allowed, self.sizes = threading.Event(), threading.Event(), []

    def __call__(self, images, prompts, metadata):
        self.sizes.append(len(images))
        self.entered.set()
        assert self.allowed.wait(30)
        return torch.ones(len(images))


class Raises:
    def __call__(self, images, prompts, metadata):
        if "bad" in prompts:
            raise RuntimeError("cannot score this one")
        return torch.ones(len(images))


def settings(url, **options):
    return RemoteSettings(
        url, **{"timeout_seconds": 20, "deadline_seconds": 60, "retries": 3} | options
    )


def client(name, url, **options):
    return remote_rewards([name], settings(url, **options))[name]


def body(images=IMAGES, picture_format="png", **changes):
    request = {
        "id": "1",
        "reward": "fingerprint",
        "pictures": [encode_picture(image, picture_format) for image in images],
        "prompts": PROMPTS[: len(images)],
        "metadata": METADATA[: len(images)],
        "timeout_seconds": 10.0,
    }
    return json.dumps(request | changes)


def prompts(**changes):
    row = {"reward": "color_shape", "source": "p.txt", "lines": [0]}
    return json.dumps({**row, "prompts": ["a red circle"], "metadata": [{}], **changes})


@pytest.fixture(scope="module")
def url():
    rewards = {"fingerprint": Fingerprint(), "rounded": Rounded(), "raises": Raises()}
    rewards["color_shape"] = make_reward("color_shape")
    rewards["jpeg_compressibility"] = make_reward("jpeg_compressibility")
    with serve(create_app(rewards, limits=Limits(max_images=3, max_pixels=4096))) as address:
        yield address


@pytest.mark.parametrize("name", ["fingerprint", "rounded"])
def test_remote_scores_equal_local_ones_bit_for_bit(url, name):
    local = {"fingerprint": Fingerprint(), "rounded": Rounded()}[name]
    there = client(name, url)
    found, expected = there(IMAGES, PROMPTS, METADATA), local(IMAGES, PROMPTS, METADATA)
    assert torch.equal(found.scores, expected.scores)
    assert torch.equal(found.correct, expected.correct)


def test_a_run_with_two_remote_rewards_scores_as_the_local_run_does(url):
    weights = {"color_shape": 1.0, "jpeg_compressibility": 0.5}
    remote = RemoteRewardConfig(url=url, names=list(weights))
    there = build_run_reward(RewardConfig(weights=weights, remote=remote))
    there.validate([], "prompts.txt")
    here = build_run_reward(RewardConfig(weights=weights))
    found, expected = (r(IMAGES, PROMPTS, METADATA) for r in (there, here))
    assert torch.equal(found.total, expected.total)
    assert torch.equal(found.correct, expected.correct)
    assert there.rewards["color_shape"].verdict == here.rewards["color_shape"].verdict


def test_health_is_open_and_everything_else_wants_the_token(monkeypatch):
    with serve(create_app({"fingerprint": Fingerprint()}, TOKEN)) as address:
        assert httpx.get(f"{address}/health").json()["status"] == "ok"
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": f"Basic {TOKEN}"}):
            for answer in (
                httpx.get(f"{address}/rewards", headers=headers),
                httpx.post(f"{address}/score", headers=headers, content=body()),
                httpx.post(f"{address}/prompts", headers=headers, content=prompts()),
            ):
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "unauthorized"
        with pytest.raises(ValueError, match=r"'fingerprint'.*401 unauthorized"):
            client("fingerprint", address).validate([], "p.txt")
        monkeypatch.setenv("MY_TOKEN", TOKEN)
        allowed = client("fingerprint", address, token_variable="MY_TOKEN")
        assert len(allowed(IMAGES, PROMPTS, METADATA).scores) == 5


BAD_PROMPTS = {
    "not JSON": ("{", 422, "bad_request"),
    "count": (prompts(lines=[0, 1]), 422, "bad_request"),
    "kind": (prompts(lines=["0"]), 422, "bad_request"),
    "reward": (prompts(reward="other"), 404, "unknown_reward"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_malformed_questions_about_prompts_are_refused_with_a_code(url, case):
    content, status, code = BAD_PROMPTS[case]
    answer = httpx.post(f"{url}/prompts", content=content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


PNG = [encode_picture(IMAGES[0], "png")]
REFUSED = {
    "not JSON": ("{", 422, "bad_request"),
    "deep": ("[" * 100_000, 422, "bad_request"),
    "pickle": (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94.", 422, "bad_request"),
    "unknown key": (body(IMAGES[:1], pickle="x"), 422, "bad_request"),
    "count": (body(IMAGES[:2], prompts=["one"]), 422, "bad_request"),
    "nothing": (body([]), 422, "bad_request"),
    "sizes": (
        body(IMAGES[:2], pictures=[*PNG, encode_picture(IMAGES[0, :, :8], "png")]),
        422,
        "bad_request",
    ),
    "reward": (body(IMAGES[:1], reward="other"), 404, "unknown_reward"),
    "images": (body(IMAGES[:4]), 413, "too_many_images"),
    "pixels": (body(torch.zeros(1, 3, 65, 64)), 413, "too_many_pixels"),
    "lies about its size": (
        body(
            IMAGES[:1],
            pictures=[encode_picture(torch.zeros(3, 900, 900), "png") | {"height": 8, "width": 8}],
        ),
        422,
        "bad_picture",
    ),
    "no PNG": (body(IMAGES[:1], pictures=[PNG[0] | {"data": "AAAA"}]), 422, "bad_picture"),
    "no base64": (body(IMAGES[:1], pictures=[PNG[0] | {"data": "?"}]), 422, "bad_picture"),
    "cut PNG": (
        body(IMAGES[:1], pictures=[PNG[0] | {"data": PNG[0]["data"][:200]}]),
        422,
        "bad_picture",
    ),
    "NaN": (body(IMAGES[:1] * float("nan"), "float32"), 422, "bad_picture"),
    "above 1": (body(IMAGES[:1] + 1, "float32"), 422, "bad_picture"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_oversized_or_malformed_is_refused_with_a_code(url, case):
    content, status, code = REFUSED[case]
    answer = httpx.post(f"{url}/score", content=content)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_unknown_routes_answer_in_the_same_form(url):
    for answer in (httpx.get(f"{url}/nothing"), httpx.get(f"{url}/score")):
        assert answer.json()["error"]["code"] == "http"


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_above_the_limit_is_not_read_to_its_end(declared):
    with serve(create_app({}, limits=Limits(max_body_bytes=1000))) as address:
        pieces = b"x" * 2000 if declared else iter([b"x" * 600, b"x" * 600])
        answer = httpx.post(f"{address}/score", content=pieces)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_requests_that_wait_together_are_scored_together_and_the_queue_is_bounded():
    reward = Blocked()
    app = create_app({"slow": reward}, limits=Limits(max_requests=3))
    with serve(app) as address, ThreadPoolExecutor(3) as pool:
        content = body(IMAGES[:1], reward="slow")
        send = lambda: httpx.post(f"{address}/score", content=content, timeout=30)  # noqa: E731
        answers = [pool.submit(send)]
        assert reward.entered.wait(30)
        answers += [pool.submit(send) for _ in range(2)]
        give_up = time.monotonic() + 30
        while httpx.get(f"{address}/health").json()["requests"] < 3:
            assert time.monotonic() < give_up
        refused = send()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        reward.allowed.set()
        assert [answer.result().json()["scores"] for answer in answers] == [[1.0]] * 3
        assert reward.sizes[0] == 1 and sum(reward.sizes) == 3


def test_a_client_waits_for_a_busy_server_and_spends_no_retries():
    reward, refused = Blocked(), threading.Event()
    app = create_app({"slow": reward}, limits=Limits(max_requests=1))

    async def watched(scope, receive, send):
        async def watch(message):
            if message.get("status") == 429:
                refused.set()
            await send(message)

        await app(scope, receive, watch)

    with serve(watched) as address, ThreadPoolExecutor(2) as pool:
        call = lambda: client("slow", address, retries=0)(IMAGES[:1], ["x"], [{}])  # noqa: E731
        first = pool.submit(call)
        assert reward.entered.wait(30)
        second = pool.submit(call)
        assert refused.wait(30)
        reward.allowed.set()
        assert [answer.result(60).scores.tolist() for answer in (first, second)] == [[1.0]] * 2


def test_batches_hold_only_what_fits_and_a_bad_request_spares_its_neighbours():
    from megatron_leangrpo.rewards.batching import Batcher, ExpiredError, Job

    first, later = Blocked(), time.monotonic() + 60
    batcher = Batcher({"slow": first, "raises": Raises()}, max_batch=3)
    jobs = {
        "first": Job("slow", IMAGES[:1], ["x"], [{}], later),
        "good": Job("raises", IMAGES[:1], ["x"], [{}], later),
        "bad": Job("raises", IMAGES[:1], ["bad"], [{}], later),
        "late": Job("raises", IMAGES[:1], ["x"], [{}], 0.0),
        "pair": Job("slow", IMAGES[:2], ["x"] * 2, [{}] * 2, later),
        "two more": Job("slow", IMAGES[:2], ["x"] * 2, [{}] * 2, later),
        "one": Job("slow", IMAGES[:1], ["x"], [{}], later),
    }
    batcher.submit(jobs["first"])
    assert first.entered.wait(30)
    for name in list(jobs)[1:]:
        batcher.submit(jobs[name])
    first.allowed.set()
    assert jobs["two more"].result.result(30).scores.tolist() == [1.0, 1.0]
    assert jobs["good"].result.result(30).scores.tolist() == [1.0]
    assert "cannot score" in str(jobs["bad"].result.exception(30))
    assert isinstance(jobs["late"].result.exception(30), ExpiredError)
    batcher.close()
    # 1, then 2 + 1 of one size past the pair that does not fit, then that pair.
    assert first.sizes == [1, 3, 2]


def test_a_reward_that_raises_on_the_server_fails_its_own_image_only(url):
    remote = {"raises": client("raises", url)}
    reward = WeightedReward(remote, {"raises": 1.0}, "drop_group")
    result = reward(IMAGES[:3], ["good", "bad", "good"], [{}] * 3)
    assert result.total.isnan().tolist() == [False, True, False]
    assert "RuntimeError: cannot score this one" in str(result.failures[0])


def test_a_server_that_is_gone_fails_the_batch_once_and_names_itself():
    with serve(create_app({})) as address:
        pass
    there = client("fingerprint", address, retries=1)
    with pytest.raises(ValueError, match=rf"'fingerprint'.*{address}.*the last of 2 attempts"):
        there.validate([], "p.txt")
    calls = []
    there.server.describe = lambda: calls.append(1) or RewardServer.describe(there.server)
    result = WeightedReward({"f": there}, {"f": 1.0}, "drop_group")(IMAGES, PROMPTS, METADATA)
    assert result.total.isnan().all() and len(result.failures) == 1 and len(calls) == 1


def test_a_reward_the_server_does_not_have_is_refused_before_the_run(url):
    with pytest.raises(ValueError, match=r"no reward 'hpsv3'.*it serves fingerprint"):
        client("hpsv3", url).validate([], "p.txt")


def test_prompts_are_checked_by_the_server_before_the_run(url):
    good, bad = Prompt(0, "a red circle"), Prompt(1500, "a thing")
    many = [good] * 1500
    client("color_shape", url).validate([good], "p.txt")
    client("fingerprint", url).validate([bad], "p.txt")
    with pytest.raises(ValueError) as there:
        client("color_shape", url).validate([*many, bad], "p.txt")
    with pytest.raises(ValueError) as here:
        make_reward("color_shape").validate([*many, bad], "p.txt")
    assert str(there.value) == str(here.value)
    assert "p.txt:1501" in str(here.value)
    with pytest.raises(ValueError, match=r"'color_shape'.*metadata that JSON cannot carry"):
        client("color_shape", url).validate([Prompt(0, "a red circle", {"when": time})], "p.txt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "host:80"}, r"reward\.remote\.url = 'host:80' must start with http"),
        ({"url": None}, r"reward\.remote\.url is not set"),
        ({"retries": -1}, r"reward\.remote\.retries = -1"),
        ({"timeout_seconds": 0.0}, r"reward\.remote\.timeout_seconds = 0"),
        ({"deadline_seconds": float("inf")}, r"reward\.remote\.deadline_seconds = inf"),
        ({"names": ["ocr"]}, r"reward\.remote\.names has 'ocr'.*valid: color_shape"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    remote = RemoteRewardConfig(**{"url": "http://h", "names": ["color_shape"]} | change)
    with pytest.raises(ValueError, match=message):
        build_run_reward(RewardConfig(weights={"color_shape": 1.0}, remote=remote))


def run_clients(address, clients, requests, timeout):
    """Requests in flight from several clients; returns wrong scores and unanswered requests."""
    local = {"fingerprint": Fingerprint(), "rounded": Rounded()}

    def work(index):
        generator = torch.Generator().manual_seed(index)
        options = {"timeout_seconds": timeout, "retries": 12}
        rewards = remote_rewards(list(local), settings(address, **options))
        wrong = unanswered = 0
        for i in range(requests // clients):
            name = list(local)[i % 2]
            count = 1 + i % 3
            images = torch.rand(count, 3, 8, 8 + i % 2, generator=generator)
            prompts = ["x" * (index + i % 7)] * count
            metadata = [{"i": index * requests + i + j} for j in range(count)]
            try:
                found = rewards[name](images, prompts, metadata)
            except RewardUnavailableError:
                unanswered += 1
                continue
            expected = local[name](images, prompts, metadata)
            same = torch.equal(found.scores, expected.scores)
            wrong += not (same and torch.equal(found.correct, expected.correct))
        rewards["rounded"].server.close()
        return wrong, unanswered

    with ThreadPoolExecutor(clients) as pool:
        results = list(pool.map(work, range(clients)))
    return sum(r[0] for r in results), sum(r[1] for r in results)


def fault_server(share):
    rewards = {"fingerprint": Fingerprint(), "rounded": Rounded()}
    return Faults(create_app(rewards, limits=Limits(max_requests=6)), share)


def test_no_wrong_score_survives_injected_failures():
    app = fault_server(share=0.3)
    with serve(app) as address:
        wrong, unanswered = run_clients(address, clients=8, requests=240, timeout=1.0)
    assert all(app.counts.values()), app.counts
    assert (wrong, unanswered) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_requests_with_injected_failures_leave_memory_flat():
    app, process = fault_server(share=0.05), psutil.Process(os.getpid())
    with serve(app) as address:
        wrong, unanswered = run_clients(address, 8, 2000, timeout=2.0)
        before = process.memory_info().rss
        more = run_clients(address, 8, 8000, timeout=2.0)
    grown = (process.memory_info().rss - before) / 2**20
    assert (wrong, unanswered, *more) == (0, 0, 0, 0)
    assert min(app.counts.values()) > 10
    # Server and clients share the process; 8000 leaked requests of a kilobyte would be 8 MiB, and
    # an allocator's arenas for 8 new threads stay below this.
    assert grown < 24, f"{grown:.1f} MiB"


def test_build_reward_takes_remote_rewards_beside_local_ones(url):
    there = build_reward(
        {"fingerprint": 1.0, "jpeg_compressibility": 1.0},
        remote=remote_rewards(["fingerprint"], settings(url)),
    )
    result = there(IMAGES, PROMPTS, METADATA)
    assert torch.equal(result.parts["fingerprint"], Fingerprint()(IMAGES, PROMPTS, METADATA).scores)
