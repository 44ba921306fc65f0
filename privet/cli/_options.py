"""Options of a training from the command line, a TOML file and the presets, all made from `TrainConfig`.

Each source gives a layer, a dictionary of fields of TrainConfig; a higher layer wins: command line, file, preset,
default. Options of a method or a loss are the fields of its class, so a new one brings its own.
"""

from __future__ import annotations

import argparse
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..data import SETS
from ..errors import ConfigError
from ..losses import LOSSES
from ..methods import METHODS, Method
from ..training import TrainConfig

Layer = dict[str, Any]

_KINDS: dict[str, Mapping[str, Any]] = {"method": METHODS, "loss": LOSSES}
"""Classes by name, whose fields are options."""
_NAMED = (*_KINDS, "model")
"""What has a name and options of its own: a table in TOML."""
_FOLLOWS = {
    "method": ("method_options",),
    "loss": ("loss_options",),
    "model": ("model_options",),
    "features": ("model", "model_options", "normalise"),
    "optimizer": ("lr", "momentum"),
    "steps": ("epochs",),
    "epochs": ("steps",),
}
"""What a lower layer says of these fields holds only as long as no higher layer changes the key."""


# The command line


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Every option that can be written as one word, by group. Those not given leave no trace in the namespace."""
    groups: dict[str, Any] = {}
    for f in fields(TrainConfig):
        title = f.metadata["group"]
        group = groups[title] = groups.get(title) or parser.add_argument_group(title)
        if _is_word(_hints(TrainConfig)[f.name]):
            more = "".join(f"; {name}: {known.summary}" for name, known in sorted(_KINDS.get(f.name, {}).items()))
            _add(group, f.name, _hints(TrainConfig)[f.name], _help(f, more), dest=f.name)
        elif f.name == "bounds":
            group.add_argument(
                flag(f.name), action="append", metavar="COLUMN=LOW:HIGH", default=argparse.SUPPRESS, help=_help(f)
            )
        if f.name == "model":
            text = "of the model: tanh, relu, sigmoid, or tempered:S,T,O for S*sigmoid(T*x) - O (default: the model's)"
            _add(group, "activation", str, text, dest="model.activation")
    for kind, name, owners in _options_of_kinds():
        hints = [_hints(_KINDS[kind][owner])[name] for owner in owners]
        if name in _hints(TrainConfig) or not all(map(_is_word, hints)):
            continue
        title = f"options of --{kind} {' or '.join(owners)}"
        group = groups[title] = groups.get(title) or parser.add_argument_group(title)
        texts = {owner: _help(_field(_KINDS[kind][owner], name)) for owner in owners}
        same = len(set(texts.values())) == 1
        text = texts[owners[0]] if same else "; ".join(f"{owner}: {text}" for owner, text in texts.items())
        _add(group, name, hints[0] if len(set(hints)) == 1 else str, text, dest=f"{kind}.{name}")


def from_command_line(args: argparse.Namespace) -> Layer:
    """The layer of what was given. Options of a method or loss are texts still: `resolve` knows which one it is."""
    given = dict(vars(args))
    if "bounds" in given:
        given["bounds"] = dict(map(_range, given["bounds"]))
    hints = _hints(TrainConfig)
    layer: Layer = {name: _parsed(flag(name), given[name], hints[name]) for name in hints if name in given}
    for key, value in given.items():
        kind, dot, name = key.partition(".")
        if dot:
            layer.setdefault(f"{kind}_options", {})[name] = value
    return layer


def _range(text: str) -> tuple[str, list[float]]:
    """A column and its bounds, from COLUMN=LOW:HIGH."""
    column, _, ends = text.rpartition("=")
    try:
        low, high = map(float, ends.split(":"))
    except ValueError:
        column = ""
    if not column:
        raise ConfigError(f"--bounds must be COLUMN=LOW:HIGH (age=0:100, say), and is {text!r}.")
    return column, [low, high]


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _add(group: Any, name: str, hint: Any, help: str, *, dest: str) -> None:
    options: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
    if bool in _alternatives(hint):
        options["action"] = argparse.BooleanOptionalAction
    else:
        choices = [str(v) for a in _alternatives(hint) if get_origin(a) is Literal for v in get_args(a)]
        options["metavar"] = "|".join([*choices, *["N"] * _is_number(hint)]) or name.upper()
    group.add_argument(flag(name), **options)


def _help(f: Field[Any], more: str = "") -> str:
    """The option's sentence and what holds if it is not given."""
    default = f.metadata.get("otherwise") or ("" if f.default in (None, False) else f.default)
    default = f"{default:g}" if isinstance(default, float) else str(default)
    if f.metadata.get("preset"):
        default = f"preset, else {default}" if default else "preset"
    return f"{f.metadata.get('help', '')}{more}{f' (default: {default})' if default else ''}"


def _options_of_kinds() -> list[tuple[str, str, list[str]]]:
    """Every option of any method, then of any loss: kind, name, and which of the kind have it."""
    owners: dict[tuple[str, str], list[str]] = {}
    for kind, known in _KINDS.items():
        for owner in sorted(known):
            for f in fields(known[owner]):
                owners.setdefault((kind, f.name), []).append(owner)
    return [(kind, name, found) for (kind, name), found in owners.items()]


def _field(owner: Any, name: str) -> Field[Any]:
    return next(f for f in fields(owner) if f.name == name)


# TOML


def from_toml(path: Path) -> Layer:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"The configuration {path} cannot be read: {why}.") from error
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        why = str(error).replace("end of document", f"the end, line {len(text.splitlines())}")
        raise ConfigError(f"The configuration {path} is not TOML: {why}.") from error
    return _layer(content, str(path))


def _layer(content: Mapping[str, Any], where: str) -> Layer:
    """Checked names and types; the tables `method`, `loss` and `model` become a name and options."""
    hints = _hints(TrainConfig)
    layer: Layer = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in hints or name.endswith("_options"):
            raise ConfigError(f"{where}: there is no option '{key}'. There are: {', '.join(_settable())}.")
        if name in _NAMED and isinstance(value, Mapping):
            options = {k.replace("-", "_"): v for k, v in value.items()}
            if "name" in options:
                layer[name] = fit(f"{where}: {name}.name", options.pop("name"), str)
            layer[f"{name}_options"] = options
        else:
            layer[name] = fit(f"{where}: {name}", value, hints[name])
    return layer


def _settable() -> list[str]:
    return [f.name for f in fields(TrainConfig) if not f.name.endswith("_options")]


# Layers


def preset(data: str, method: str) -> Layer:
    """What was found to be good for a data set and a method, by measuring."""
    content = tomllib.loads((files(__package__) / "presets.toml").read_text(encoding="utf-8"))
    of_data = content.get(data, content["table"])
    where = f"presets.toml, {data}"
    return _over(_layer(of_data.get(method, {}), where), _layer(of_data.get("default", {}), where))


def resolve(*layers: Layer) -> TrainConfig:
    """One configuration from the user's layers, the highest first, and the preset that they ask for."""
    given: Layer = {}
    for layer in reversed(layers):
        given = _over(layer, given)
    method = given.get("method", _field(TrainConfig, "method").default)
    _check_name("method", method)
    data = given.get("data", _field(TrainConfig, "data").default)
    base = (preset(data, method) if given.get("preset", True) else {}) | {"method": method}
    if "epsilon" in given and "noise" in given:  # then the length is what is asked for
        base = {key: value for key, value in base.items() if key not in ("epochs", "steps")}
    chosen = _over(given, base)
    if chosen.get("features", "none") != "none":
        chosen = {"model": "linear", "normalise": "group"} | chosen
    for kind in _KINDS:
        name = chosen.get(kind, _field(TrainConfig, kind).default)
        _check_name(kind, name)
        chosen[f"{kind}_options"] = _checked_options(kind, name, chosen.get(f"{kind}_options", {}))
    return TrainConfig(**chosen)


def refuse_idle(given: Layer, config: TrainConfig) -> None:
    """Refuses what was given and says nothing beside the rest: it was meant to do something."""
    for name in given:
        if name == "data_dir" and config.features == "none" and config.data not in SETS.keys() - {"digits"}:
            raise ConfigError(f"--data-dir is for mnist, fashion-mnist and cifar10, and --data is {config.data}.")
        if name == "test_fraction" and config.data in SETS:
            raise ConfigError(f"--test-fraction is for tables; {config.data} has test records of its own.")
        if not name.endswith("_options"):
            _refuse_idle(name, TrainConfig, vars(config))
    for kind, known in _KINDS.items():
        owner = known[getattr(config, kind)]
        values = {f.name: f.default for f in fields(owner)} | dict(getattr(config, f"{kind}_options"))
        for name in given.get(f"{kind}_options", {}):
            _refuse_idle(name, owner, values)


def _refuse_idle(name: str, owner: Any, values: Mapping[str, Any]) -> None:
    other, *wanted = _field(owner, name).metadata.get("needs", (None,))
    if other is not None and values[other] not in wanted:
        asked = flag(other) if wanted == [True] else f"{flag(other)} {' or '.join(wanted)}"
        raise ConfigError(f"{flag(name)} says something only with {asked}: add that, or leave it out.")


def _check_name(kind: str, name: str) -> None:
    if name not in _KINDS[kind]:
        raise ConfigError(f"There is no {kind} '{name}'. There are: {', '.join(sorted(_KINDS[kind]))}.")


def _over(high: Layer, low: Layer) -> Layer:
    outdated = {
        follower
        for key, followers in _FOLLOWS.items()
        if key in high and high[key] != low.get(key, "none" if key == "features" else None)
        for follower in followers
    }
    kept = {key: value for key, value in low.items() if key not in outdated}
    options = {
        key: {**kept.get(key, {}), **high.get(key, {})}
        for key in (*(f"{kind}_options" for kind in _NAMED), "bounds")
        if key in kept or key in high
    }
    return kept | high | options


def _checked_options(kind: str, owner: str, options: Mapping[str, Any]) -> dict[str, Any]:
    hints = _hints(_KINDS[kind][owner])
    for name in options:
        if name not in hints:
            raise ConfigError(
                f"{kind.capitalize()} '{owner}' has no option '{name}' ({flag(name)}). "
                f"It has: {', '.join(hints) or 'none'}."
            )
    return {name: _parsed(name, value, hints[name]) for name, value in options.items()}


def method_from(name: str, given: Sequence[str]) -> Method:
    """A method by its name and options written as NAME=VALUE."""
    _check_name("method", name)
    pairs = [text.partition("=") for text in given]
    if wrong := next((key for key, sign, _ in pairs if not sign), None):
        raise ConfigError(f"An option of the method is written NAME=VALUE, not {wrong!r}.")
    return METHODS[name](**_checked_options("method", name, {key.replace("-", "_"): value for key, _, value in pairs}))


# Types


@cache
def _hints(owner: Any) -> dict[str, Any]:
    hints = get_type_hints(owner)
    return {f.name: hints[f.name] for f in fields(owner)}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """The types that a union allows, None left out."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(part for part in parts if part is not type(None))


def _is_word(hint: Any) -> bool:
    """Whether a value can stand on a command line."""
    return any(a in (bool, int, float, str) or get_origin(a) is Literal for a in _alternatives(hint))


def _is_number(hint: Any) -> bool:
    return any(a in (int, float) for a in _alternatives(hint))


def _parsed(name: str, value: Any, hint: Any) -> Any:
    """A value of the type from a text of the command line; what is no text is checked as it is."""
    if not isinstance(value, str) or str in _alternatives(hint):
        return fit(name, value, hint)
    for guess in _readings(value):
        try:
            return fit(name, guess, hint)
        except ConfigError:
            continue
    raise _misfit(name, value, hint)


def _readings(text: str) -> Iterator[Any]:
    yield text
    for read in (int, float):
        try:
            yield read(text)
        except ValueError:
            continue
    if text in ("true", "false"):
        yield text == "true"


def fit(name: str, value: Any, hint: Any) -> Any:
    """The value if it is of the type, or an error that names it. Whole numbers are numbers; truth values are not."""
    for kind in _alternatives(hint):
        origin = get_origin(kind)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is float and number:
            return float(value)
        if _is_plain(value, kind, number):
            return value
        if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
            return {k: fit(f"{name}.{k}", v, get_args(kind)[1]) for k, v in value.items()}
        if isinstance(origin, type) and issubclass(origin, Sequence) and isinstance(value, list | tuple):
            return [fit(f"{name}[{i}]", v, get_args(kind)[0]) for i, v in enumerate(value)]
    raise _misfit(name, value, hint)


def _is_plain(value: Any, kind: Any, number: bool) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return (
        kind is Any
        or (kind in (bool, str) and isinstance(value, kind))
        or (kind is int and number and isinstance(value, int))
    )


def _misfit(name: str, value: Any, hint: Any) -> ConfigError:
    return ConfigError(f"{name} must be {' or '.join(map(_description, _alternatives(hint)))}, and is {value!r}.")


def _description(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    is_table = isinstance(get_origin(kind), type) and issubclass(get_origin(kind), Mapping)
    return words.get(kind) or ("a table" if is_table else "a list")
