import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from maskrcnn_trt.serving.commands.serve import _ready_line, config_from_options, config_options
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.pipeline.served_model import ModelSource


@click.command()
@config_options
def show(**values: Any) -> None:
    """Print the configuration."""
    click.echo(config_from_options(values).model_dump_json())


def run(*words: object, **environment: str) -> Result:
    variables = {f"MASKRCNN_{name.upper()}": value for name, value in environment.items()}
    return CliRunner().invoke(show, [str(word) for word in words], env=variables)


def config_of(result: Result) -> ServeConfig:
    assert result.exit_code == 0, result.output
    return ServeConfig.model_validate_json(result.stdout)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 1\nmax_batch: 2\nqueue_size: 3\nprecision: [fp16, fp32]\n")
    return path


def test_defaults_and_free_ports() -> None:
    assert config_of(run()) == ServeConfig()
    assert config_of(run("--port", 0, "--metrics-port", 0)).metrics_port == 0


def test_options_override_the_environment_which_overrides_the_file(file: Path) -> None:
    config = config_of(run("--config", file, "--port", 10, port="20", max_batch="20"))
    expected = ServeConfig(port=10, max_batch=20, queue_size=3, precision=("fp16", "fp32"))
    assert config == expected
    assert config_of(run(config=str(file))).queue_size == 3


def test_settings_with_several_values() -> None:
    expected = ServeConfig(precision=("tf32", "fp32"), preferred_batch=(2, 4))
    precisions = "--precision", "tf32", "--precision", "fp32"
    assert config_of(run(*precisions, "--preferred-batch", 2, "--preferred-batch", 4)) == expected
    assert config_of(run(precision="tf32 fp32", preferred_batch="2 4")) == expected


def test_each_setting_from_each_source(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "precision": ("fp32",),
        "preferred_batch": (4,),
        "timeout_s": 5,
        "workers": 2,
        "front_ends": 3,
        "max_connection_age_s": 600,
        "max_requests_per_s": 100,
        "max_images_per_s": 200,
        "decode_memory_mb": 512,
        "metrics_port": 9000,
        "http_port": 9001,
        "tls_certificate": "server.pem",
        "tls_key": "server.key",
        "tls_client_ca": "clients.pem",
        "token_file": "tokens",
        "admin_token_file": "admin-tokens",
    }
    values = ServeConfig(**settings).model_dump()
    words = [
        word
        for name, value in values.items()
        for one in (value if isinstance(value, tuple) else (value,))
        for word in (f"--{name.replace('_', '-')}", one)
    ]
    variables = {
        name: " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in values.items()
    }
    file = tmp_path / "all.yaml"
    file.write_text(ServeConfig(**values).model_dump_json())  # JSON is YAML
    for result in (run(*words), run(**variables), run("--config", file)):
        assert config_of(result) == ServeConfig(**values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_bach: 8", "unknown key max_bach (did you mean max_batch?)"),
        ("port: 70000", "port is 70000; allowed: whole number, >= 0, <= 65535"),
        ("precision: fp16", "precision is 'fp16'; allowed: list of fp32"),
        ("hang_timeout_s: .inf", "hang_timeout_s is inf; allowed: number, > 0, <= 86400"),
        ("- 1", "must be a mapping"),
        ("[]", "must be a mapping"),
        ("false", "must be a mapping"),
        ("a: [", "is not valid YAML"),
        ("1: 2", "unknown key 1; allowed here: host, port"),
        ("null: 2", "unknown key None"),
        ("2026-11-22: 2", "unknown key 2026-11-22; allowed here: host, port"),
        ("host.name: a", "unknown key host.name"),
        ("port: 1\nport: 2", "the key port occurs twice"),
        ("port: true", "port is True; allowed: whole number, >= 0, <= 65535"),
        ("hang_timeout_s: true", "hang_timeout_s is True; allowed: number, > 0, <= 86400"),
        ("preferred_batch: [4, true]", "True; allowed for preferred_batch: list of whole numbers"),
        ("port: '8500'", "port is '8500'; allowed: whole number, >= 0, <= 65535"),
        ("local_admin: 1", "local_admin is 1; allowed: true | false"),
        ("port: " + 5000 * "1", 'invalid int in "<unicode string>", line 1, column 7: port: 111'),
        ("port: 2026-13-45", "invalid timestamp in"),
        ("port: !!int ''", "invalid int in"),
        ("port: !!timestamp soon", "invalid timestamp in"),
        ("port: !!bool maybe", "invalid bool in"),
        ("port: " + 5000 * "[", "nested too deeply"),
        ("port: " + 5000 * "[" + 5000 * "]", "nested too deeply"),
        ("port: &itself [*itself]", "holds an invalid value"),
    ],
)
def test_errors_of_the_file_are_reported(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    result = run("--config", file)
    assert result.exit_code == 2
    assert f"{file}: " in result.stderr or f"{file} " in result.stderr
    assert message in result.stderr


def test_file_with_merge_keys_and_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("timeout_s: null\n<<: {port: 1, max_batch: 2}\nport: 3\n")
    assert config_of(run("--config", file)) == ServeConfig(port=3, max_batch=2)
    file.write_text("# nothing is set\n")
    assert config_of(run("--config", file)) == ServeConfig()


def test_dependent_settings_from_several_sources(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("tls_certificate: server.pem\npreferred_batch: [9]\n")
    files = {"tls_certificate": Path("server.pem"), "tls_key": Path("server.key")}
    expected = ServeConfig(**files, preferred_batch=(9,), max_batch=16)
    words = "--max-batch", 16, "--tls-key", "server.key"
    assert config_of(run("--config", file, max_batch="16", tls_key="server.key")) == expected
    assert config_of(run("--config", file, *words)) == expected


TIMES = [n for n in ServeConfig.model_fields if n.endswith("_s") and not n.endswith("_per_s")]


@pytest.mark.parametrize("value", ["inf", "nan", "1e10"])
@pytest.mark.parametrize("name", TIMES)
def test_times_are_at_most_a_day(name: str, value: str) -> None:
    result = run(f"--{name.replace('_', '-')}", value)
    assert result.exit_code == 2
    assert f"--{name.replace('_', '-')} is {float(value)}; allowed: number, >" in result.stderr
    assert ", <= 86400" in result.stderr
    assert f"MASKRCNN_{name.upper()} is" in run(**{name: value}).stderr


# A text is the content of the file, a dictionary the environment, and a tuple the command line.
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("preferred_batch: [16]", "preferred_batch is 16; allowed: 1 to max_batch, which is 8"),
        ("tls_key: server.key", "tls_certificate and tls_key"),
        ("metrics_port: 8500", "port and metrics_port"),
        ({"prot": "1"}, "did you mean MASKRCNN_PORT?"),
        (
            {"service_host": "10.0.0.1", "port": "tcp://10.0.0.1:80"},
            "Kubernetes has set MASKRCNN_PORT to tcp://10.0.0.1:80 for a service; set "
            "`enableServiceLinks: false`",
        ),
        ({"token_file": ""}, "MASKRCNN_TOKEN_FILE is empty"),
        ({"max_batch": "0"}, "MASKRCNN_MAX_BATCH is 0; allowed: whole number, >= 1"),
        ({"backend": "cuda"}, "MASKRCNN_BACKEND"),
        (("--workers", -1), "--workers is -1; allowed: whole number, >= 1, or leave it out"),
        (("--max-batch", 0), "--max-batch is 0; allowed: whole number, >= 1"),
        (("--preferred-batch", 9), "preferred_batch is 9; allowed: 1 to max_batch, which is 8"),
        (("--precision", "int4"), "--precision"),
        (("--timeout-s", -1), "--timeout-s is -1.0"),
        (("--max-delay-ms", "nan"), "--max-delay-ms is nan; allowed: number, >= 0, <= 86400000"),
        (("--queue-size", 2**31), "--queue-size is 2147483648; allowed: whole number, >= 1, <= 1"),
        (("--metrics-port", 8500), "port and metrics_port"),
    ],
)
def test_invalid_values_and_conflicts_are_reported(
    tmp_path: Path, source: str | dict[str, str] | tuple[object, ...], message: str
) -> None:
    if isinstance(source, dict):
        result = run(**source)
    elif isinstance(source, tuple):
        result = run(*source)
    else:
        (tmp_path / "serve.yaml").write_text(source)
        result = run("--config", tmp_path / "serve.yaml")
    assert result.exit_code == 2
    assert message in result.stderr


def test_line_of_a_ready_server_can_be_printed_for_any_name_of_a_bundle() -> None:
    model = ModelSource(Path(os.fsdecode(b"bundle\xff")))
    assert _ready_line("a:1", [model], "text").encode().startswith(b"Ready at a:1, serving bundle")
