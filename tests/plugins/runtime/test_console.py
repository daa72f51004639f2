import pytest
from rich.table import Table

from maskrcnn_trt.plugins.runtime.console import table_console


def test_tables_in_files_are_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "")
    cells = [f"[car] {index:08}" for index in range(12)]
    table = Table(*cells)
    table.add_row(*cells)
    table_console().print(table)
    out = capsys.readouterr().out
    assert all(out.count(cell) == 2 for cell in cells)
