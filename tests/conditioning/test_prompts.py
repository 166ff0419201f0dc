# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
import sys
from collections import Counter

import pytest

from megatron_leangrpo.conditioning import Prompt, PromptSampler, load_prompts
from megatron_leangrpo.conditioning.prompts import describe_lines, hold_out


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def prompts(count):
    return [Prompt(n, f"the number {n}") for n in range(count)]


def test_text_file_is_one_prompt_a_line_and_ids_are_line_indices(tmp_path):
    path = write(tmp_path, "p.txt", "\ufeffone\r\n\n  two words \none\n")
    assert load_prompts(path) == [Prompt(0, "one"), Prompt(2, "two words"), Prompt(3, "one")]


def test_unicode_line_separators_do_not_split_a_line(tmp_path):
    path = write(tmp_path, "p.txt", "one\u2028still one\ntwo\n")
    assert [p.id for p in load_prompts(path)] == [0, 1]


def test_json_lines_keep_the_other_keys_as_metadata(tmp_path):
    path = write(
        tmp_path, "p.jsonl", '{"prompt": "the number 7", "target": "7"}\n{"prompt": "b"}\n'
    )
    assert load_prompts(path) == [Prompt(0, "the number 7", {"target": "7"}), Prompt(1, "b")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "", r"p\.txt: empty"),
        ("p.txt", "\n  \n", r"p\.txt: empty"),
        ("p.txt", b"fine\ncaf\xe9\n", r"p\.txt:2: not UTF-8"),
        ("p.txt", "fine\n".encode("utf-16"), r"p\.txt:1: not UTF-8"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": }\n', r"p\.jsonl:2: not JSON"),
        (
            "p.jsonl",
            '\n{"text": "a"}\n',
            r'p\.jsonl:2: must be an object with a text under "prompt"',
        ),
        ("p.jsonl", '{"prompt": 7}\n', r'p\.jsonl:1: must be an object with a text under "prompt"'),
        ("p.jsonl", '["a"]\n', r"p\.jsonl:1: must be an object"),
        ("p.jsonl", '{"prompt": " "}\n', r'p\.jsonl:1: "prompt" is empty'),
        ("p.csv", "a,b\n", r"p\.csv: must end in \.txt, \.jsonl or \.parquet"),
        ("p.parquet", "no parquet", r"p\.parquet: no readable parquet file"),
    ],
)
def test_unusable_file_is_refused_with_file_and_line(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(write(tmp_path, name, content))


def write_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pyarrow.table(columns), path)
    return path


def test_a_parquet_file_has_columns_of_metadata(tmp_path):
    columns = {"prompt": ["the number 7", " b "], "target": ["7", None], "n": [[1, 2], []]}
    assert load_prompts(write_parquet(tmp_path / "p.parquet", columns)) == [
        Prompt(0, "the number 7", {"target": "7", "n": [1, 2]}),
        Prompt(1, "b", {"target": None, "n": []}),
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"]}, r'p\.parquet, row 1: must be an object with a text under "prompt"'),
        ({"prompt": ["a", None]}, r"p\.parquet, row 2: must be an object"),
        ({"prompt": ["a", "b", " "]}, r'p\.parquet, row 3: "prompt" is empty'),
        ({"prompt": []}, r"p\.parquet: empty"),
    ],
)
def test_an_unusable_parquet_file_is_refused_with_its_row(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(write_parquet(tmp_path / "p.parquet", columns))


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    path = write(tmp_path, "p.parquet", "anything")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"p\.parquet: needs the extra \[parquet\]"):
        load_prompts(path)


def test_blank_and_repeated_lines_are_told_by_number(tmp_path):
    path = write(tmp_path, "p.txt", "one\n\n\ntwo\none\nthree\none\n\n")
    assert describe_lines(path, load_prompts(path)) == [
        f"prompt file {path}: skipped blank line 2, 3",
        f"prompt file {path}: line 5 repeats 1, 7 repeats 1; "
        "each is drawn, and is a group, of its own",
    ]
    many = [Prompt(n, "same") for n in range(9)]
    assert "6 repeats 1 and 3 more; each" in describe_lines("p.parquet", many)[0]
    assert "row 2 repeats 1" in describe_lines("p.parquet", many)[0]
    assert describe_lines("p.txt", prompts(4)) == []


def test_held_out_prompts_are_never_trained_on_and_do_not_depend_on_the_order():
    lines = [Prompt(n, f"the number {n % 7}") for n in range(10)]
    train, held = hold_out(lines, 3)
    texts = [{prompt.text for prompt in side} for side in (train, held)]
    assert len(texts[1]) == 3 and not texts[0] & texts[1]
    assert sorted(train + held, key=lambda prompt: prompt.id) == lines
    other = hold_out(lines[::-1], 3)[1]
    assert {prompt.text for prompt in other} == texts[1]
    assert hold_out(lines, 0) == (lines, [])
    for count in (-1, 7):
        with pytest.raises(ValueError, match=rf"held_out = {count}: .* 7 .* valid: 0 to 6"):
            hold_out(lines, count)


def test_missing_file_and_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.txt: cannot be read \(No such file"):
        load_prompts(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ValueError, match=r"folder\.txt: cannot be read \(Is a directory"):
        load_prompts(tmp_path / "folder.txt")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 8, 9, 10, 24, 100])
@pytest.mark.parametrize("per_iteration", [1, 3, 8])
def test_uses_differ_by_at_most_one_at_any_moment(count, per_iteration):
    sampler = PromptSampler(prompts(count), per_iteration, seed=3)
    uses = Counter(dict.fromkeys(range(count), 0))
    for iteration in range(40):
        batch = sampler.batch(iteration)
        assert len(batch) == per_iteration
        assert len({prompt.id for prompt in batch}) == per_iteration
        uses.update(prompt.id % count for prompt in batch)
        assert max(uses.values()) - min(uses.values()) <= 1


@pytest.mark.parametrize("count", [8, 9, 10, 15, 24])
def test_no_prompt_twice_in_an_iteration_when_there_are_enough(count):
    sampler = PromptSampler(prompts(count), 8, seed=0)
    for iteration in range(50):
        assert {prompt.id for prompt in sampler.batch(iteration)} <= set(range(count))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_few_prompts_are_spread_evenly_over_separate_groups(count):
    sampler = PromptSampler(prompts(count), 8, seed=0)
    for iteration in range(20):
        batch = sampler.batch(iteration)
        uses = Counter(prompt.text for prompt in batch)
        assert len(uses) == count and max(uses.values()) - min(uses.values()) <= 1
        assert len({prompt.id for prompt in batch}) == 8


def test_equal_lines_stay_separate_groups():
    lines = [Prompt(n, f"the number {n % 3}") for n in range(8)]
    batch = PromptSampler(lines, 8, seed=0).batch(0)
    assert sorted(prompt.id for prompt in batch) == list(range(8))


def test_resume_gives_the_same_sequence():
    straight = PromptSampler(prompts(10), 8, seed=1)
    expected = [straight.batch(iteration) for iteration in range(20)]
    assert [PromptSampler(prompts(10), 8, seed=1).batch(n) for n in range(20)] == expected
    # Going back, as an evaluation in between might, changes nothing either.
    assert straight.batch(3) == expected[3]


def test_epochs_and_seeds_are_shuffled_differently():
    first = PromptSampler(prompts(10), 10, seed=0)
    assert first.batch(0) != first.batch(1)
    assert first.batch(0) != PromptSampler(prompts(10), 10, seed=1).batch(0)


@pytest.mark.parametrize("per_iteration", [0, -1])
def test_impossible_number_is_refused(per_iteration):
    with pytest.raises(
        ValueError, match=f"prompts_per_iteration={per_iteration}: must be at least"
    ):
        PromptSampler(prompts(3), per_iteration, seed=0)
