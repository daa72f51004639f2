"""Tests of the wording check itself."""

from pathlib import Path

import pytest
from check_prose import findings_in, load_rules, main

RULES = load_rules()


def lines_of_findings(path: Path, text: str) -> list[int]:
    path.write_text(text)
    return [int(finding.split(":")[1]) for finding in findings_in(path, RULES)]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('"""Images of a folder."""\n', []),
        ('"""What the folder holds."""\n', [1]),
        ('def f():\n    """Return the batch.\n\n    None, if the queue holds one.\n    """\n', []),
        ('def f():\n    """Return the batch.\n\n    timeout: none, waits forever.\n    """\n', [4]),
        ('def f():\n    """Return the folder that the file lies in."""\n', [2]),
        ('def f():\n    """Resize the image in place."""\n', []),
        ("raise ValueError(f'{x} is no image')\n", [1]),
        ("raise ValueError(f'{x} is not an image; there is no decoder')\n", []),
        ("click.option('--x', help='Who may call.')\n", [1]),
        ("# one a GPU\nx = 1\n", [1]),
        ("x = 1\n# One per GPU, as `one a GPU` was.\ny = 'one a GPU'\n", []),
        ("LIMIT = 3\n'''Largest batch.'''\n", [2]),
        ("class Solver(FrozenConfig):\n    batch: int\n    '''Images per step.'''\n", []),
        ("class Loader:\n    batch: int\n    '''Images per step.'''\n", [3]),
    ],
)
def test_python(tmp_path: Path, text: str, lines: list[int]) -> None:
    assert lines_of_findings(tmp_path / "module.py", text) == lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("# Reload\n\nThe server loads the bundle again.\n", []),
        ("# Reload\n\n## How to reload\n", [3]),
        ("The server shows the\npicture, of\nlate.\n", [2, 2]),
        ("```sh\nmaskrcnn picture # told\n```\n\nA `picture` from [here](told/picture.md).\n", []),
    ],
)
def test_page(tmp_path: Path, text: str, lines: list[int]) -> None:
    assert lines_of_findings(tmp_path / "page.md", text) == lines


def test_findings_name_line_words_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("One picture.\n")
    (finding,) = findings_in(path, RULES)
    assert finding.startswith(f'{path}:1: "picture": ')
    assert "image" in finding


def test_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).parent
    monkeypatch.chdir(folder)
    assert main(["check_prose.py"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["test_check_prose.py"]) == 0
