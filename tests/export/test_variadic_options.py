import click
import pytest
from click.testing import CliRunner

from maskrcnn_trt.export.variadic_options import VariadicCommand


@click.command(cls=VariadicCommand)
@click.argument("model")
@click.option("--size", "sizes", multiple=True, type=int)
@click.option("-c", "--colour", "colours", multiple=True, type=click.Choice(["red", "blue"]))
@click.option("--name")
def probe(model: str, sizes: tuple[int, ...], colours: tuple[str, ...], name: str | None) -> None:
    click.echo(f"{model} {sizes} {colours} {name}")


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("m --size 1 2 3", "m (1, 2, 3) () None"),
        ("--size 1 2 m", "m (1, 2) () None"),
        ("--size 1 --size 2 m", "m (1, 2) () None"),
        ("--size=1 2 m", "m (1, 2) () None"),
        ("m -c red blue --size 4 -c red", "m (4,) ('red', 'blue', 'red') None"),
        ("m --size 1 2 --name 3", "m (1, 2) () 3"),
        ("--size 1 2 -- 3", "3 (1, 2) () None"),
        ("--size 1 -- --size", "--size (1,) () None"),
        ("m", "m () () None"),
    ],
)
def test_values_go_to_the_option_before_them(line: str, seen: str) -> None:
    result = CliRunner().invoke(probe, line.split())
    assert result.output == seen + "\n"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("m --size", "Option '--size' requires an argument"),
        ("m --size x", "'x' is not a valid integer"),
        ("m --size 1 x", "unexpected extra argument (x), as 'x' is not a valid integer"),
        ("--size 1 x m", "unexpected extra argument (m), as 'x' is not a valid integer"),
        ("m n --size 1", "unexpected extra argument (n)\n"),
        ("m --colour green", "'green' is not one of 'red', 'blue'"),
        ("--size 1 2", "Missing argument 'MODEL'"),
    ],
)
def test_wrong_values_are_named(line: str, sentence: str) -> None:
    result = CliRunner().invoke(probe, line.split())
    assert result.exit_code == 2
    assert sentence in result.output
