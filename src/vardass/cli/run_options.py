"""The options of ``vardass adapt`` and ``vardass train``: one for each setting of ``RunConfig``, made from it."""

from __future__ import annotations

import ast
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from vardass.adapt.config import RunConfig
from vardass.adapt.run_folder import CONFIG_FILE
from vardass.errors import InputError
from vardass.files import parse_json
from vardass.validate import choose, refuse_code

DATA_PANEL = "Data and files"
_METHOD, _TRAINING, _MACHINE = "Method", "Training", "Machine"
_PANELS = {
    _METHOD: (
        "algorithm algorithm_options sampler sampler_options network network_options class_shares class_options "
        "refresh_every feature_source"
    ),
    _MACHINE: ("cache_embeddings tensorboard precision device devices workers eval_batch_size"),
}  # all others are about training
_SCHEMA: dict[str, Any] = RunConfig.model_json_schema()["properties"]
_TYPES: dict[str, Any] = {"integer": int, "number": float, "boolean": bool, "string": str, "object": list[str]}
_OWNED = {"algorithm": "algorithm_options", "sampler": "sampler_options", "network": "network_options"}
# where a command knows better than ``RunConfig``, whose network is not made for the data
_DEFAULTS: dict[str, Any] = {"cache_embeddings": "auto"}
_SHOWN = {
    "network": "a small network for the kind of data",
    "penalty": "1",
}
# where adapt has the settings of ``RunConfig.recommended``
_RECOMMENDED = {
    "penalty": "3 for mmd and coral, 3 b / 32 for batches of b < 32",
    "steps": "3000; for images and sounds on a CPU 60 epochs, at least 600 steps",
    "sampler": "for mmd and coral stratified, with strata of equal size; else balanced",
    "class_shares": "for mmd and coral uniform, where the sampler allows it; else none",
}

_SETTINGS = "key=value of any setting, such as lr_schedule=cosine or penalty=0.5; repeatable."
_CONFIG = "Settings from a YAML or JSON file, or from the folder of an earlier run; other options override them."
_TRUST = "Import and run code that files name as package.module:Name; names that you type are always imported."

TrustCode = Annotated[bool, typer.Option("--trust-code", help=_TRUST)]


def with_run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace ``**given`` of a command by options for all settings of a run, in panels; None is not given."""
    shown = {**_SHOWN, **(_RECOMMENDED if command.__name__ == "adapt" else {})}
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    penalty = rf"Weight λ of the discrepancy, the same as --option penalty=... \[default: {shown['penalty']}]"
    made = [
        _parameter("penalty", float, typer.Option(help=penalty, rich_help_panel=_METHOD)),
        *(_option(name, schema, shown.get(name)) for name, schema in _SCHEMA.items()),
        _parameter("settings", list[str], typer.Option("--set", help=_SETTINGS, rich_help_panel=DATA_PANEL)),
        _parameter("config", Path, typer.Option(help=_CONFIG, rich_help_panel=DATA_PANEL)),
        _parameter("trust_code", bool, typer.Option("--trust-code", help=_TRUST, rich_help_panel=DATA_PANEL)),
        _parameter("schema", bool, schema_option(RunConfig.model_json_schema, panel=DATA_PANEL)),
    ]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        given.pop("schema", None)  # answered by its callback
        command(**given)

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in own] + made
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapped


def _option(name: str, schema: Mapping[str, Any], shown: str | None) -> inspect.Parameter:
    panel = next((panel for panel, names in _PANELS.items() if name in names.split()), _TRAINING)
    parts = _alternatives(schema)
    kind: Any = _TYPES.get(parts[0].get("type", ""), str) if len(parts) == 1 else str  # what only `_value` reads
    flags = [_flag(name), *(["--option"] if name == "algorithm_options" else [])]
    if kind is bool:
        flags = [f"{flag}/--no-{flag[2:]}" for flag in flags]
    text = schema.get("description", "").replace("``", "")
    choices: list[str] = next((part["enum"] for part in parts if "enum" in part), [])
    if choices:
        text += f" One of {', '.join(choices)}."
    if kind == list[str]:
        text += " key=value; repeatable."
    default = shown or _DEFAULTS.get(name, schema.get("default"))
    if default is not None and default is not False:
        text += f" [default: {default}]"
    return _parameter(name, kind, typer.Option(*flags, help=escape(text), rich_help_panel=panel))


def _flag(name: str) -> str:
    """``--sampler-option`` of ``sampler_options``: one pair at a time; else the name with dashes."""
    return "--" + (name.removesuffix("s") if name.endswith("_options") else name).replace("_", "-")


def _alternatives(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]


def _value(name: str, text: str) -> Any:
    """The text itself for a setting that is one, such as the schedule ``none``; else what it looks like."""
    is_text = [part.get("type") for part in _alternatives(_SCHEMA.get(name, {}))] == ["string"]
    return text if is_text else _literal(text)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def schema_option(make: Callable[[], dict[str, Any]], *, panel: str | None = None) -> Any:
    """The option ``--schema``: print what ``make`` returns, for editors, and do nothing else."""

    def show(wanted: bool) -> None:
        if wanted:
            print(json.dumps(make(), indent=2))
            raise typer.Exit

    text = "Print the JSON schema of the settings, for editors, and exit."
    return typer.Option("--schema", callback=show, is_eager=True, help=text, rich_help_panel=panel)


def settings_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a ``RunConfig`` from what `with_run_options` passed on; ``network`` only where one was named.

    Options and ``--set`` override ``--config``; two that differ are refused. Options of an algorithm, sampler or
    network in ``--config`` are left out if another one is asked for.
    """
    flags = {name: value for name, value in given.items() if value is not None}
    file, pairs, penalty = flags.pop("config", None), flags.pop("settings", None), flags.pop("penalty", None)
    trust_code = flags.pop("trust_code", False)
    asked: dict[str, tuple[Any, str]] = {}  # value, and what was typed, by "setting" or "group_options.option"

    def ask(name: str, value: Any, typed: str) -> None:
        name = "algorithm_options.penalty" if name == "penalty" else name
        group, _, option = name.partition(".")
        if isinstance(value, dict) and not option and _is_group(group):
            for key, each in value.items():
                ask(f"{group}.{key}", each, typed)
            return
        for known in (name, group) if _is_group(group) else (name,):
            if known in asked and asked[known][0] != value:
                raise InputError(f"{typed} and {asked[known][1]} differ; give one of them")
        asked[name] = value, typed

    for name, value in flags.items():
        flag = "--option" if name == "algorithm_options" else _flag(name)
        if isinstance(value, list):
            for option, each in parse_pairs(_flag(name), value).items():
                ask(f"{name}.{option}", each, f"{flag} {option}={each}")
        else:
            value = _value(name, value) if isinstance(value, str) else value
            ask(name, value, f"{flag} {value}")
    if penalty is not None:
        ask("penalty", penalty, f"--penalty {penalty}")
    for name, value in parse_pairs("--set", pairs).items():
        choose(name.partition(".")[0], "setting", (*_SCHEMA, "penalty"))
        ask(name, value, f"--set {name}={value}")
    settings = {**_DEFAULTS, **({} if file is None else _read_config(file.expanduser(), trust_code))}
    for owner, options in _OWNED.items():
        if owner in asked and asked[owner][0] != settings.get(owner):
            settings.pop(options, None)
    for name, (value, _) in asked.items():
        group, _, option = name.partition(".")
        if option and _is_group(group):
            settings[group] = {**settings.get(group, {}), option: value}
        else:
            settings[name] = value
    return settings


def _is_group(name: str) -> bool:
    """Whether a setting holds options by name."""
    return bool(_SCHEMA.get(name, {}).get("type") == "object")


def _read_config(file: Path, trust_code: bool) -> dict[str, Any]:
    """Settings in a file, or in the folder of a run."""
    from vardass.lab.yaml_file import parse_yaml

    file = file / CONFIG_FILE if file.is_dir() else file
    try:
        text = file.read_text(encoding="utf-8-sig")
        found = parse_json(text) if file.suffix == ".json" else parse_yaml(text)
        if not isinstance(found, dict):
            raise InputError(f'it must hold settings by name, like {{"steps": 100}}, got type {type(found).__name__}')
        refuse_code(found, "it", trust_code=trust_code)
        RunConfig(**found)
    except OSError as error:
        raise InputError(f"--config {file} cannot be read: {error.strerror}; give a file of settings") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--config {file} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except InputError as error:
        raise InputError(f"--config {file}: {error}") from None
    return found


_EXAMPLES = {"--set": "refresh_every=50", "--sampler-option": "min_size=2", "--network-option": "hidden=[64]"}


def parse_pairs(option: str, texts: list[str] | None) -> dict[str, Any]:
    """Values by name from texts such as ``penalty=0.5``; what is no Python literal is a word."""
    found: dict[str, Any] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            example = _EXAMPLES.get(option, "penalty=0.5")
            raise InputError(f"{option} takes key=value, got {text!r}; for example {example}")
        found[name] = _value(name, value) if option == "--set" else _literal(value)
    return found


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    try:
        return words[text.lower()] if text.lower() in words else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word
