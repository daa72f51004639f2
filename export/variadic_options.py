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
        refusals: list[click.BadParameter] = []
        words = list(self._written_out(ctx, args, refusals))
        try:
            return super().parse_args(ctx, words)
        except click.UsageError as error:
            if type(error) is not click.UsageError or not refusals:
                raise
            # An argument too many may have been meant for the option before it.
            sentence = f"{error.message.rstrip('.')}, as {refusals[0].message}"
            raise click.UsageError(sentence, ctx) from None

    def _written_out(
        self, ctx: click.Context, args: Sequence[str], refusals: list[click.BadParameter]
    ) -> Iterator[str]:
        options = {
            name: option
            for option in self.get_params(ctx)
            if isinstance(option, click.Option) and option.multiple
            for name in option.opts
        }
        words = iter(args)
        repeated = ""
        for word in words:
            if repeated and not word.startswith("-"):
                try:
                    options[repeated].type(word, options[repeated], ctx)
                except click.BadParameter as refusal:
                    refusals.append(refusal)
                else:
                    yield from (repeated, word)
                    continue
            name, equals, _ = word.partition("=")
            repeated = name if name in options else ""
            yield word
            if repeated and not equals:
                yield from islice(words, 1)
            elif word == "--":
                yield from words
