import shlex
from pathlib import Path

import pytest

from maskrcnn_trt.model.shell_commands import shell_path


@pytest.mark.parametrize(
    ("path", "word"),
    [("data", "data"), ("./-data", "./-data"), ("/a/-b", "/a/-b"), ("-my data", "./-my data")],
)
def test_paths_are_single_words_that_are_no_options(path: str, word: str) -> None:
    assert shlex.split(shell_path(Path(path))) == [word]
