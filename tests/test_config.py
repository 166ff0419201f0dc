# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Recipes and overrides resolve to one typed configuration; mistakes are named."""

import dataclasses

import pytest
import yaml

from megatron_leangrpo.config import RunConfig
from megatron_leangrpo.config_reader import (
    Recipe,
    known_keys,
    packaged_recipes,
    read_config,
    read_recipe,
    write_config,
)

EMPTY = Recipe("empty", ({},))


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_packaged_recipe_reads_and_says_what_it_is(name):
    recipe = read_recipe(name)
    assert read_config(recipe, []).recipe == name
    assert recipe.description


def test_overrides_win_over_the_recipe_and_a_recipe_over_the_one_it_extends(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: flux_tiny\ngrpo: {iterations: 3}\n")
    config = read_config(read_recipe(str(path)), ["--grpo.group_size=4"])
    base = read_config(read_recipe("flux_tiny"), [])
    assert (config.grpo.iterations, config.grpo.group_size) == (3, 4)
    assert config.sampling == base.sampling
    assert config.recipe == "mine"


def test_the_resolved_configuration_reads_back_unchanged(tmp_path):
    config = read_config(read_recipe("flux_tiny"), ["--seed=5", "--reward.weights.ocr=0.5"])
    path = tmp_path / "config.yaml"
    path.write_text(write_config(config))
    assert read_config(read_recipe(str(path)), []) == config


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("--grpo.group_sise=3", ["grpo.group_sise", "'grpo.group_size'"]),
        ("--group_size=3", ["group_size", "'grpo.group_size'"]),
        ("--grpo.schedule=retian", ["grpo.schedule", "retian", "retain"]),
        ("--grpo.group_size=many", ["grpo.group_size", "many", "int"]),
        ("flux_tiny", ["flux_tiny"]),
    ],
)
def test_a_wrong_override_is_refused_by_name(override, names):
    with pytest.raises(ValueError) as error:
        read_config(EMPTY, [override])
    assert all(name in str(error.value) for name in names)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("grpo: {group_sise: 3}", ["grpo.group_sise", "grpo.group_size"]),
        ("grpo: [1", ["not readable YAML"]),
        ("- 1", ["sections with keys"]),
        ("grpo: 3", ["grpo = 3", "keys and values"]),
    ],
)
def test_a_wrong_recipe_file_is_refused_by_name(tmp_path, content, names):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        read_recipe(str(path))
    assert all(name in str(error.value) for name in ["bad.yaml", *names])
    assert "\n" not in str(error.value)


def test_an_unknown_recipe_names_the_closest():
    with pytest.raises(ValueError, match="flux_tiny"):
        read_recipe("flux_tyni")
    with pytest.raises(ValueError, match="no such file"):
        read_recipe("missing/recipe.yaml")


def test_a_recipe_extends_a_file_beside_it_but_not_itself(tmp_path):
    (tmp_path / "base.yaml").write_text("extends: flux_bench\nseed: 5\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\ngrpo: {iterations: 3}\nmodel:\n")
    (tmp_path / "loop.yaml").write_text("extends: ./other.yaml\n")
    (tmp_path / "other.yaml").write_text("extends: ./loop.yaml\n")
    config = read_config(read_recipe(str(tmp_path / "mine.yaml")), [])
    assert (config.seed, config.grpo.iterations, config.model.preset) == (5, 3, "flux_bench")
    with pytest.raises(ValueError, match=r"extends itself, by way of .*other\.yaml"):
        read_recipe(str(tmp_path / "loop.yaml"))


def test_every_field_says_what_it_does():
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser()
    parser.add_class_arguments(RunConfig, None)
    text = {a.dest: a.help for a in parser._actions}
    sections = {f.name for f in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(f.type)}
    for key in known_keys() - sections:
        assert text[key] and len(text[key]) > 10, key


def test_a_recipe_is_plain_yaml_without_unknown_keys():
    for name in packaged_recipes():
        for layer in read_recipe(name).layers:
            assert yaml.safe_load(yaml.safe_dump(layer)) == layer
