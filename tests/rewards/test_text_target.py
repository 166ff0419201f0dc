# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
import json
import unicodedata
from pathlib import Path

import pytest

from megatron_leangrpo.rewards.text_target import levenshtein, string_score, target_text

# What public prompt files contain (issue 2, case HB06).
GOOD = [
    ('a sign that says "OPEN"', "OPEN"),
    ('a sign that says "New York"', "New York"),
    ('two signs, "first" and "second"', "first"),
    ('a 6" nail beside a 3" nail', " nail beside a 3"),
]
BAD = [
    ("a sign that says nothing at all", "no text in straight double quotes"),
    ('a sign that says ""', "empty"),
    ('a sign that says "   "', "empty"),
    ('an unclosed sign that says "OPEN', "not closed"),
    ("a sign that says \u201cOPEN\u201d", "curly"),
    ("a sign that says 'OPEN'", "no text in straight double quotes"),
    ('a sign that says \\"OPEN\\"', "escaped"),
]
SCORES = [
    ("open", "open", 1.0),
    ("", "open", 0.0),
    ("please open now", "open", 1.0),
    ("opem", "open", 0.75),
    ("o p e n", "open", 1.0),
    ("OPEN", "open", 1.0),
    ("completely different text", "ab", 0.0),
    ("ope", "open", 0.75),
]


@pytest.mark.parametrize(("prompt", "target"), GOOD)
def test_target_is_the_first_double_quoted_text(prompt, target):
    assert target_text(prompt, {}) == target


@pytest.mark.parametrize(("prompt", "reason"), BAD)
def test_prompt_without_usable_quotes_is_refused_with_the_reason(prompt, reason):
    with pytest.raises(ValueError, match=reason):
        target_text(prompt, {})


def test_metadata_target_wins_over_quotes():
    assert target_text('the number "8"', {"target": "7"}) == "7"


@pytest.mark.parametrize("target", ["", "  ", 7, None])
def test_metadata_target_must_be_a_text(target):
    with pytest.raises(ValueError, match="target"):
        target_text("the number 7", {"target": target})


@pytest.mark.parametrize(("read", "target", "score"), SCORES)
def test_string_rule(read, target, score):
    assert string_score(read, target) == pytest.approx(score, abs=1e-12)


def test_string_rule_equals_reference_vectors():
    path = Path(__file__).parents[1] / "sde_vectors.json"
    for case in json.loads(path.read_text())["rewards"]["ocr"]["cases"]:
        score = string_score(case["recognised"], target_text(case["prompt"], {}))
        assert score == pytest.approx(case["reward"], abs=1e-12)


@pytest.mark.parametrize("text", ["caf\u00e9", "\u0130stanbul", "\uff11\uff12", "Stra\u00dfe"])
def test_composed_and_decomposed_spellings_are_the_same_text(text):
    for form in ("NFC", "NFD"):
        assert string_score(unicodedata.normalize(form, text), text) == 1.0
        assert string_score(text, unicodedata.normalize(form, text)) == 1.0


def test_levenshtein_counts_edits():
    assert levenshtein("kitten", "sitting") == 3
    assert levenshtein("", "abc") == levenshtein("abc", "") == 3
    assert levenshtein("same", "same") == 0
