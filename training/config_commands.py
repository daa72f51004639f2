"""Commands `maskrcnn config ...`, and the list of configuration keys in `--help`."""

import re
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..model.config.reference import Key

# Widths of the output and of its first column, in characters.
_MAX_WIDTH = 100
_MAX_TERM_WIDTH = 34


class ConfiguredCommand(click.Command):
    """Click command whose `--help` lists all keys of `TrainConfig`."""

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

    CONFIG and KEY=VALUE are as in `maskrcnn train`, which would use the printed values.
    """
    from .config import load_config, yaml_from_config

    loaded = load_config(source, overrides)
    click.echo(yaml_from_config(loaded) if as_yaml else _table_from(loaded), nl=False)


def _table_from(loaded: Any) -> str:
    """Return the keys and values of a `TrainConfig` as text, by section."""
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
    """Return the first sentence of the comments of a preset's YAML text."""
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    return re.split(r"(?<=\.)\s", comment, maxsplit=1)[0]
