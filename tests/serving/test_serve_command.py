from pathlib import Path

from click.testing import CliRunner

from maskrcnn_trt.serving.serve_command import serve


def test_settings_out_of_range_are_named(bundle: Path) -> None:
    result = CliRunner().invoke(serve, [str(bundle), "--max-batch", "0"])
    assert result.exit_code == 2
    assert "--max-batch is 0" in result.stderr
