import click
import pytest
from click.testing import CliRunner

from maskrcnn_trt.export.commands import VariadicCommand


@click.command(cls=VariadicCommand)
@click.argument("model")
@click.option("--size", "sizes", multiple=True, type=int)
@click.option("-c", "--color", "colors", multiple=True, type=click.Choice(["red", "blue"]))
@click.option("--name")
def probe(model: str, sizes: tuple[int, ...], colors: tuple[str, ...], name: str | None) -> None:
    click.echo(f"{model} {sizes} {colors} {name}")


@pytest.mark.parametrize(
    ("line", "parsed"),
    [("m --size 1 2 3", "m (1, 2, 3) () None"), ("--size 1 2 m", "m (1, 2) () None"),
     ("--size 1 --size 2 m", "m (1, 2) () None"), ("--size=1 2 m", "m (1, 2) () None"),
     ("m -c red blue --size 4 -c red", "m (4,) ('red', 'blue', 'red') None"),
     ("m --size 1 2 --name 3", "m (1, 2) () 3"), ("--size 1 2 -- 3", "3 (1, 2) () None"),
     ("--size 1 -- --size", "--size (1,) () None"), ("m", "m () () None")],
)  # fmt: skip
def test_values_belong_to_the_preceding_option(line: str, parsed: str) -> None:
    result = CliRunner().invoke(probe, line.split())
    assert result.output == parsed + "\n"


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("m --size", "Option '--size' requires an argument"),
        ("m --size x", "'x' is not a valid integer"),
        ("m --size 1 x", "unexpected extra argument (x), as 'x' is not a valid integer"),
        ("--size 1 x m", "unexpected extra argument (m), as 'x' is not a valid integer"),
        ("m n --size 1", "unexpected extra argument (n)\n"),
        ("m --color green", "'green' is not one of 'red', 'blue'"),
        ("--size 1 2", "Missing argument 'MODEL'"),
    ],
)
def test_invalid_values_are_usage_errors(line: str, fact: str) -> None:
    result = CliRunner().invoke(probe, line.split())
    assert result.exit_code == 2
    assert fact in result.output
