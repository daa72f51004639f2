"""Commands `maskrcnn config ...`, and the list of configuration keys in `--help`."""

import difflib
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import click
from click.exceptions import NoSuchOption

if TYPE_CHECKING:
    from ..model.config.reference import Key

# Widths of the output and of its first column, in characters.
_MAX_WIDTH = 100
_MAX_TERM_WIDTH = 34


# Configuration key by the name that other training programs give to the same option.
_KEY_BY_OPTION: Final[Mapping[str, str]] = {
    "batch": "solver.images_per_batch",
    "batch_size": "solver.images_per_batch",
    "cos_lr": "solver.schedule",
    "ema": "solver.ema_decay",
    "img_size": "data.min_size",
    "imgsz": "data.min_size",
    "iterations": "solver.max_iterations",
    "learning_rate": "solver.base_lr",
    "lr": "solver.base_lr",
    "name": "output_dir",
    "num_workers": "data.workers",
    "output": "output_dir",
    "pretrained": "weights",
    "project": "output_dir",
}


class ConfiguredCommand(click.Command):
    """Click command that takes overrides `KEY=VALUE`. `--help` lists all keys of `TrainConfig`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line as click does. Reject configuration keys in a wrong form.

        Raises:
            click.UsageError: A configuration key is written as an option such as `--base-lr`, or
                without `=VALUE`. The message contains the correct form.
        """
        try:
            rest = super().parse_args(ctx, args)
        except NoSuchOption as error:
            options = [name for parameter in self.params for name in parameter.opts]
            key = _key_of_option(error.option_name)
            if key is None or difflib.get_close_matches(error.option_name, options, cutoff=0.8):
                raise
            meaning = ", the number of steps" if key == "solver.max_iterations" else ""
            raise click.UsageError(
                f"{error.option_name} is not an option; instead, give {key}=VALUE{meaning}", ctx
            ) from None
        overrides: Sequence[str] = ctx.params.get("overrides", ())
        for text, value in zip_longest(overrides, overrides[1:], fillvalue="VALUE"):
            if "=" not in text and text in _known_keys():
                raise click.UsageError(f"{text} has no value; write {text}={value}", ctx)
        return rest

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the configuration keys of each section at the end of the help text."""
        from ..model.config.reference import sections
        from .config import TrainConfig

        for section in sections(TrainConfig):
            rows = [
                (key.name, f"{key.meaning} [{key.allowed}; {_default_of(key)}]")
                for key in section.keys
            ]
            _write_section(formatter, section.name, section.meaning, rows)
        super().format_epilog(ctx, formatter)


def _known_keys() -> list[str]:
    from ..model.config.reference import sections
    from .config import TrainConfig

    return [f"{s.name}.{key.name}".lstrip(".") for s in sections(TrainConfig) for key in s.keys]


def _key_of_option(option: str) -> str | None:
    """Return the configuration key that an unknown option means: `solver.base_lr` for `--base-lr`.

    If the option matches no key, or several keys, return None.
    """
    name = option.lstrip("-").replace("-", "_")
    same = [key for key in _known_keys() if key.rpartition(".")[2] == name]
    return same[0] if len(same) == 1 else _KEY_BY_OPTION.get(name)


@click.group()
def config() -> None:
    """Show presets and configuration keys."""


@config.command(name="list")
def list_presets() -> None:
    """List the names of all presets, with a description of each."""
    from .config_sources import preset_text, presets

    formatter = click.HelpFormatter(max_width=_MAX_WIDTH)
    formatter.write_dl([(name, _first_sentence(preset_text(name))) for name in presets()])
    click.echo(formatter.getvalue(), nl=False)


@config.command()
@click.argument("source", metavar="CONFIG")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--yaml", "as_yaml", is_flag=True, help="Print a YAML file with all values.")
def show(source: str, overrides: tuple[str, ...], as_yaml: bool) -> None:
    """Print each key of CONFIG with its value, description, allowed values and default.

    CONFIG and KEY=VALUE are as in `maskrcnn train`. With the same arguments, `maskrcnn train` uses
    the printed values.
    """
    from .config import load_config, yaml_from_config

    loaded = load_config(source, overrides)
    click.echo(yaml_from_config(loaded) if as_yaml else _table_from(loaded), nl=False)


def _table_from(loaded: Any) -> str:
    """Return the text that `maskrcnn config show` prints for `loaded`, a `TrainConfig`."""
    from ..model.config.reference import sections, text_from_value

    formatter = click.HelpFormatter(max_width=_MAX_WIDTH)
    for section in sections(type(loaded)):
        values = attrgetter(section.name)(loaded) if section.name else loaded
        if values is None:
            _write_section(formatter, f"{section.name} = null", section.meaning, ())
            continue
        rows = []
        for key in section.keys:
            value = getattr(values, key.name)
            same = not key.required and value == key.default
            default = "the default" if same else _default_of(key)
            term = f"{key.name} = {text_from_value(value)}"
            rows.append((term, f"{key.meaning} [{key.allowed}; {default}]"))
        _write_section(formatter, section.name, section.meaning, rows)
    return formatter.getvalue().lstrip("\n")


def _write_section(
    formatter: click.HelpFormatter, name: str, meaning: str, rows: Sequence[tuple[str, str]]
) -> None:
    formatter.write_paragraph()
    formatter.write_text(f"{name or 'CONFIG'}: {meaning}")
    if rows:
        with formatter.indentation():
            formatter.write_dl(rows, col_max=_MAX_TERM_WIDTH)


def _default_of(key: "Key") -> str:
    from ..model.config.reference import text_from_value

    return "required" if key.required else f"default {text_from_value(key.default)}"


def _first_sentence(text: str) -> str:
    """Return the description of a preset: the first sentence of the comments in its YAML text."""
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    return re.split(r"(?<=\.)\s", comment, maxsplit=1)[0]
