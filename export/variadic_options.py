"""Options that take several values after one name, which click has for arguments alone."""

from collections.abc import Iterator, Sequence
from itertools import islice

import click


class VariadicCommand(click.Command):
    """A command in which `--size 1 2` is `--size 1 --size 2` for options that can be repeated.

    A following word counts as a value as long as the option's type accepts it, so that options and
    arguments can stand in any order: `--size 1 2 model.pth`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words after the repetition is written out."""
        return super().parse_args(ctx, list(self._written_out(ctx, args)))

    def _written_out(self, ctx: click.Context, args: Sequence[str]) -> Iterator[str]:
        options = {
            name: option
            for option in self.get_params(ctx)
            if isinstance(option, click.Option) and option.multiple
            for name in option.opts
        }
        words = iter(args)
        repeated = ""
        for word in words:
            if repeated and _accepts(options[repeated], word, ctx):
                yield from (repeated, word)
                continue
            name, equals, _ = word.partition("=")
            repeated = name if name in options else ""
            yield word
            if repeated and not equals:
                yield from islice(words, 1)
            elif word == "--":
                yield from words


def _accepts(option: click.Option, word: str, ctx: click.Context) -> bool:
    if word.startswith("-"):
        return False
    try:
        option.type(word, option, ctx)
    except click.BadParameter:
        return False
    return True
