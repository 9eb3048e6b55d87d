"""Recipes: a flat YAML file becomes one or more typed dataclasses.

A recipe has no nesting of its own and no magic: each key is a field of one of the dataclasses that the method asks
for (a key that several of them share goes to each). What is checked here, before any model or data is touched: unknown
and repeated keys, missing required fields and the type of every value. YAML 1.1 reads `1e-4` as text; a field typed
`float` takes it as the number that was meant.
"""

import dataclasses
import enum
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .errors import MoEMBError, nearest


class RecipeError(MoEMBError, ValueError):
    """A recipe or an override that cannot be used; the text names the key, the value and the remedy."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; a recipe with two is a mistake."""

    def construct_mapping(self, node, deep=False):
        seen = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise RecipeError(
                    f"{self.name}: the key on line {key_node.start_mark.line + 1} is {key!r}, but a key must be a name"
                )
            if key in seen:
                raise RecipeError(
                    f"{self.name}: '{key}' is given twice, on lines {seen[key]} and {key_node.start_mark.line + 1}; "
                    "keep one of them"
                )
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read a recipe file as a flat mapping, without looking at what the keys mean.

    Args:
        path (`str` or `Path`): the YAML file.

    Returns:
        `dict[str, Any]`: key -> value as YAML gives it.

    Raises:
        RecipeError: the file is absent, empty, is not YAML, is not a mapping, or holds a key twice.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [str(p) for p in sorted(path.parent.glob("*.y*ml"))] if path.parent.is_dir() else []
        raise RecipeError(f"recipe '{path}' does not exist{nearest(str(path), siblings)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe '{path}' cannot be read: {error}") from error
    try:
        loader = _UniqueKeyLoader(text)
        loader.name = str(path)
        content = loader.get_single_data()
    except RecipeError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-13-01
        raise RecipeError(f"recipe '{path}' is not valid YAML: {error}") from error
    if content is None:
        raise RecipeError(f"recipe '{path}' is empty; add 'key: value' lines, or write {{}} for the defaults alone")
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise RecipeError(f"recipe '{path}' must be a flat mapping of 'key: value' lines")
    return content


def parse_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Turn `["--learning_rate", "1e-4", "--packing=false", "--bf16"]` into `{key: raw text}`.

    A flag without a value means `true`; dashes inside a key may stand for underscores.

    Raises:
        RecipeError: an element that is neither a `--key` nor the value of one.
    """
    values: dict[str, str] = {}
    key = None
    for token in overrides:
        if token.startswith("--") and len(token) > 2:
            name, separator, value = token[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = value if separator else "true"
            key = None if separator else name
        elif key is not None:
            values[key] = token
            key = None
        else:
            raise RecipeError(f"unexpected argument '{token}'; overrides are written '--key value' or '--key=value'")
    return values


def load_recipe(path: str | Path | None, *dataclass_types, overrides: Sequence[str] = (), extra_keys=()) -> tuple:
    """Read a recipe, apply the overrides and build one instance per dataclass.

    Args:
        path (`str`, `Path` or `None`): the YAML file; `None` builds from defaults and overrides alone.
        dataclass_types (`type`): dataclasses (for example `TrainingArguments` subclasses) that own the keys.
        overrides (`Sequence[str]`, *optional*): command line pairs, `["--key", "value", ...]`; they win over the file.
        extra_keys (`Sequence[str]`, *optional*): keys that may stand in the file and that the caller reads itself
            with [`read_recipe`], for example `method`.

    Returns:
        `tuple`: the instances, in the order of `dataclass_types`.

    Raises:
        RecipeError: unknown key (named, with the nearest valid one), missing required key, or a value of the wrong
            type. A `ValueError` or `TypeError` from a dataclass' own `__post_init__` is passed on as a RecipeError.

    Example:

    ```python
    >>> arguments, training = load_recipe("recipes/moemb-mini/pretrain.yaml", DataArguments, TrainingArguments)
    ```
    """
    values = read_recipe(path) if path is not None else {}
    source = dict.fromkeys(values, str(path))
    known = {f.name: f for dc in dataclass_types for f in dataclasses.fields(dc) if f.init}
    raw = parse_overrides(overrides)
    for key in [*values, *raw]:
        if key not in known and key not in extra_keys:
            place = f"in {path}" if key in values else "on the command line"
            raise RecipeError(f"unknown key '{key}' {place}{nearest(key, [*known, *extra_keys])}")
    instances = []
    for dc in dataclass_types:
        hints = _type_hints(dc)
        arguments = {}
        for field in (f for f in dataclasses.fields(dc) if f.init):
            name, hint = field.name, hints.get(field.name, Any)
            if name in raw:
                arguments[name] = _coerce_override(raw[name], hint, f"--{name}")
            elif name in values:
                arguments[name] = _coerce(values[name], hint, f"'{name}' in {source[name]}")
        instances.append(_build(dc, arguments, path))
    return tuple(instances)


def expand_paths(settings: Any) -> None:
    """Replaces a leading `~` by the home folder in every `Path` of a dataclass of settings."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Path):
            setattr(settings, field.name, value.expanduser())


def check_least(settings: Any, **least: float) -> None:
    """
    Checks the lower bounds of settings.

    Args:
        settings: a dataclass of settings.
        least (`float`): by the name of the setting; `None` as its value passes.

    Raises:
        ValueError: a value below its bound, or not a number.
    """
    for name, bound in least.items():
        value = getattr(settings, name)
        if value is not None and not value >= bound:
            raise ValueError(f"{name} is {value}, but must be at least {bound}")


def _build(dataclass_type, arguments: dict[str, Any], path) -> Any:
    missing = [
        f.name + (f" ({f.metadata['help']})" if "help" in f.metadata else "")
        for f in dataclasses.fields(dataclass_type)
        if f.init
        and f.name not in arguments
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    where = f"recipe '{path}'" if path is not None else "the command line"
    if missing:
        raise RecipeError(f"{where} lacks {', '.join(missing)}; add it to the file or pass --key value")
    try:
        return dataclass_type(**arguments)
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{where}: {error}") from error


def _type_hints(dataclass_type) -> dict[str, Any]:
    """Resolved annotations. Those that name something the defining module did not import stay unchecked (`Any`)."""
    try:
        return typing.get_type_hints(dataclass_type)
    except (NameError, TypeError, AttributeError):
        fields = dataclasses.fields(dataclass_type)
        return {f.name: f.type if not isinstance(f.type, str) else Any for f in fields}


def _coerce_override(text: str, hint, label: str) -> Any:
    """A command line value is text: read it as YAML first, and as plain text where the field wants a string."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    try:
        return _coerce(value, hint, label)
    except RecipeError:
        if isinstance(value, str):
            raise
        try:
            return _coerce(text, hint, label)
        except RecipeError:
            pass
        raise


def _coerce(value, hint, label: str) -> Any:
    """Return `value` as the type `hint`, or raise a RecipeError that names the label, the value and the type."""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, (str, typing.TypeVar, typing.ForwardRef)):
        return value
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, members, hint, label)
    if origin is typing.Annotated:
        return _coerce(value, members[0], label)
    if origin is typing.Literal:
        if value in members:
            return value
        raise RecipeError(f"{label} is {value!r}, but must be one of {list(members)}{nearest(str(value), members)}")
    if origin in (list, tuple, set, Sequence) or hint in (list, tuple, set):
        return _coerce_sequence(value, origin or hint, members, hint, label)
    if origin in (dict, Mapping) or hint is dict:
        return _coerce_mapping(value, members, hint, label)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _coerce_dataclass(value, hint, label)
    return _coerce_scalar(value, hint, label)


def _coerce_scalar(value, hint, label: str) -> Any:
    if hint in (None, type(None)):
        if value is None:
            return None
        raise _wrong_type(value, "null", label)
    if hint is bool:
        if isinstance(value, bool):
            return value
        raise _wrong_type(value, "true or false", label)
    if hint in (int, float):
        return _coerce_number(value, hint, label)
    if hint is str:
        if isinstance(value, str):
            return value
        raise _wrong_type(value, "text (quote it)", label)
    if not isinstance(hint, type):
        return value
    if issubclass(hint, enum.Enum) or issubclass(hint, Path):
        try:
            return hint(value)
        except (ValueError, TypeError):
            choices = [member.value for member in hint] if issubclass(hint, enum.Enum) else "a path"
            raise _wrong_type(value, f"one of {choices}" if isinstance(choices, list) else choices, label) from None
    if isinstance(value, (hint, str, dict)):
        return value  # a type with its own reading of text, for example torch.dtype: its owner checks it
    raise _wrong_type(value, getattr(hint, "__name__", str(hint)), label)


def _coerce_number(value, hint, label: str) -> int | float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise _wrong_type(value, "a number", label) from None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong_type(value, "a number", label)
    if hint is int:
        if value != value or value in (float("inf"), float("-inf")) or int(value) != value:
            raise _wrong_type(value, "a whole number", label)
        return int(value)
    return float(value)


def _coerce_union(value, members, hint, label: str) -> Any:
    if value is None and type(None) in members:
        return None
    members = [m for m in members if m is not type(None)]
    if len(members) == 1:
        return _coerce(value, members[0], label)
    exact = [m for m in members if type(value) is m]
    for member in exact + [m for m in members if m not in exact]:
        try:
            return _coerce(value, member, label)
        except RecipeError:
            continue
    raise _wrong_type(value, str(hint).replace("typing.", ""), label)


def _coerce_sequence(value, container, members, hint, label: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(value, "a list, such as [a, b]", label)
    if container is tuple and members and Ellipsis not in members:
        if len(members) != len(value):
            raise _wrong_type(value, f"a list of {len(members)} values", label)
        return tuple(_coerce(v, m, f"{label}, value {i}") for i, (v, m) in enumerate(zip(value, members)))
    inner = members[0] if members else Any
    items = [_coerce(v, inner, f"{label}, value {i}") for i, v in enumerate(value)]
    return container(items) if container in (tuple, set) else items


def _coerce_mapping(value, members, hint, label: str) -> dict:
    if not isinstance(value, dict):
        raise _wrong_type(value, "a mapping, such as {a: 1}", label)
    inner = members[1] if len(members) == 2 else Any
    return {key: _coerce(item, inner, f"{label}, key '{key}'") for key, item in value.items()}


def _coerce_dataclass(value: dict, hint, label: str) -> Any:
    hints = _type_hints(hint)
    names = [f.name for f in dataclasses.fields(hint) if f.init]
    for key in value:
        if key not in names:
            raise RecipeError(f"unknown key '{key}' in {label}{nearest(key, names)}")
    return _build(hint, {k: _coerce(v, hints.get(k, Any), f"'{k}' of {label}") for k, v in value.items()}, label)


def _wrong_type(value, wanted: str, label: str) -> RecipeError:
    return RecipeError(f"{label} is {value!r} ({type(value).__name__}), but must be {wanted}")
