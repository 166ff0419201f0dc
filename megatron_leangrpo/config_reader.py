# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""Reads a run configuration: a packaged recipe or a YAML file, then dotted overrides.

A recipe may start from another one (``extends: flux_tiny``) and may name an optional extra that it
needs and the recipe to run without it (``requires: ocr``, ``otherwise: flux_tiny_shapes``).
"""

import argparse
import dataclasses
import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_leangrpo.config import RunConfig

RECIPES = Path(__file__).parent / "recipes"
META_KEYS = ("extends", "requires", "otherwise", "description")


@dataclass(frozen=True)
class Recipe:
    """The YAML layers of a recipe, base first, and what it needs."""

    name: str
    layers: tuple[dict[str, Any], ...]
    description: str = ""
    requires: str | None = None
    otherwise: str | None = None


def packaged_recipes() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def read_recipe(name: str, above: tuple[Path, ...] = ()) -> Recipe:
    """Read a packaged recipe by name or a YAML file by path.

    A path after `extends:` is taken from the folder of the file that says it. `above` are the
    recipes that extend this one.
    """
    path = _recipe_path(name)
    if path in above:
        raise ValueError(f"recipe {name}: extends itself, by way of {above[-1]}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        cause = " ".join(str(error).split())
        raise ValueError(f"recipe {name}: {path} is not readable YAML: {cause}") from error
    if not isinstance(content, dict):
        raise ValueError(f"recipe {name}: {path} must hold sections with keys, not {content!r:.80}")
    meta = {key: content.pop(key, None) for key in META_KEYS}
    content.setdefault("recipe", path.stem)
    _check_keys(_flatten(content), f"recipe {path.name}")
    for section in _sections_with_keys() & content.keys():
        content[section] = {} if content[section] is None else content[section]
        if not isinstance(content[section], dict):
            raise ValueError(
                f"recipe {path.name}: {section} = {content[section]!r} must hold keys and values"
            )
    below: tuple[dict[str, Any], ...] = ()
    if meta["extends"]:
        base = str(meta["extends"])
        base = str(path.parent / base) if _is_path(base) else base
        below = read_recipe(base, (*above, path)).layers
    return Recipe(
        name=path.stem,
        layers=(*below, content),
        description=meta["description"] or "",
        requires=meta["requires"],
        otherwise=meta["otherwise"],
    )


def read_config(recipe: Recipe, overrides: list[str]) -> RunConfig:
    """Resolve a recipe and ``--section.key=value`` overrides to a typed configuration.

    Raises ``ValueError`` for an unknown key (naming the closest known one) or a value of the wrong
    type. ``--help`` and ``--print_config`` among the overrides print and exit.
    """
    from jsonargparse import ArgumentParser, set_parsing_settings

    _check_keys(_override_keys(overrides), "command line")
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="leangrpo",
        usage=argparse.SUPPRESS,
        description=f"Settings of {recipe.name}, each with its value there as the default.",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="Another YAML file on top of the recipe.")
    parser.add_class_arguments(RunConfig, None)
    layers = [f"--config={yaml.safe_dump(layer)}" for layer in recipe.layers]
    try:
        if "--help" in overrides:
            values = parser.parse_args(layers)
            parser.set_defaults({key: values[key] for key in _leaves()})
        parsed = parser.instantiate(parser.parse_args([*layers, *overrides]))
    except Exception as error:  # jsonargparse wraps every bad value in several error classes
        raise ValueError(_one_line(error)) from error
    return parsed_to_config(parsed)


def parsed_to_config(parsed: Any) -> RunConfig:
    """Build the configuration from jsonargparse's namespace of instantiated sections."""
    values = {name: value for name, value in vars(parsed).items() if name in _sections()}
    return RunConfig(**values)


def write_config(config: RunConfig) -> str:
    """Return the resolved configuration as YAML that `read_recipe` reads back."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def _sections() -> set[str]:
    return {f.name for f in dataclasses.fields(RunConfig)}


def _recipe_path(name: str) -> Path:
    if _is_path(name):
        if not Path(name).is_file():
            raise ValueError(f"recipe {name!r}: no such file")
        return Path(name).resolve()
    path = RECIPES / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(
            f"recipe {name!r} is not known{_closest(name, packaged_recipes())}; "
            f"packaged recipes: {', '.join(packaged_recipes())}, or give a path to a .yaml file"
        )
    return path


def _is_path(recipe: str) -> bool:
    return recipe.endswith((".yaml", ".yml")) or "/" in recipe


def known_keys() -> set[str]:
    """Return every dotted key of the configuration, sections included."""
    keys = set()
    for section in dataclasses.fields(RunConfig):
        keys.add(section.name)
        if dataclasses.is_dataclass(section.type):
            keys.update(f"{section.name}.{f.name}" for f in dataclasses.fields(section.type))
    return keys


def _sections_with_keys() -> set[str]:
    return {key.split(".")[0] for key in known_keys() if "." in key}


def _leaves() -> set[str]:
    return known_keys() - _sections_with_keys()


def _check_keys(keys: list[str], where: str) -> None:
    known = known_keys()
    for key in keys:
        parent = key.rsplit(".", 1)[0] if key.count(".") > 1 else key
        if key not in known and not (parent in known and parent.count(".") == 1):
            hint = _closest(key, sorted(known)) or "; leangrpo train RECIPE --help shows all"
            raise ValueError(f"{where}: unknown key {key!r}{hint}")


def _closest(name: str, known: list[str]) -> str:
    by_leaf = {key.rsplit(".", 1)[-1]: key for key in known}
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    leaf = difflib.get_close_matches(name.rsplit(".", 1)[-1], list(by_leaf), n=1, cutoff=0.7)
    found = match[0] if match else by_leaf[leaf[0]] if leaf else None
    return f"; did you mean {found!r}?" if found else ""


def _flatten(content: dict[str, Any]) -> list[str]:
    keys: list[str] = []
    for key, value in content.items():
        keys.append(str(key))
        if isinstance(value, dict):
            keys.extend(f"{key}.{inner}" for inner in value)
    return keys


def _override_keys(overrides: list[str]) -> list[str]:
    own = ("config", "help", "print_config")
    names = [word[2:].split("=", 1)[0].rstrip("+") for word in overrides if word.startswith("--")]
    return [name for name in names if name not in own]


def _one_line(error: Exception) -> str:
    """jsonargparse's message in a user's words."""
    text = " ".join(str(error).split()).replace("Parser key ", "setting ")
    text = re.sub(r"<class '(\w+)'>", r"\1", text).replace("NoneType", "null")
    union = re.search(r"Does not validate .* Subtypes: \[(.*)\] Errors: .* Given value: (.*)", text)
    if union:
        types = union[1].replace(", null", " or null")
        text = f"{text[: union.start()]}expected {types}. Got value: {union[2]}"
    return re.sub(r"Expected an? ", "expected ", text).replace("typing.Literal", "one of ")
