"""Kernels compile for every supported GPU, on a machine without one."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from maskrcnn_trt import plugins
from maskrcnn_trt.plugins.commands import kernels
from maskrcnn_trt.plugins.kernel_list import all_kernels
from maskrcnn_trt.plugins.runtime.compilation import (
    ARCHITECTURES,
    Kernel,
    KernelError,
    compile_kernel,
)

FOLDER = Path(plugins.__file__).parent
ELF = b"\x7fELF"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "maskrcnn-trt" / "kernels"


@pytest.fixture
def kernel() -> Kernel:
    """A kernel that compiles in a few hundredths of a second."""
    return next(kernel for kernel in all_kernels() if kernel.name == "grid_anchors")


def one_of_each() -> list[Kernel]:
    """Return one variant of each kernel."""
    return list({kernel.name: kernel for kernel in all_kernels()}.values())


@pytest.mark.slow
def test_command_compiles_every_variant(cache: Path) -> None:
    # The oldest architecture, and the first that selects other code in a kernel.
    capabilities = ("7.5", "9.0")
    options = [word for c in capabilities for word in ("--compute-capability", c)]
    result = CliRunner().invoke(kernels, ["build", *options])
    assert result.exit_code == 0, result.output
    assert all(f" {capability} " in result.output for capability in capabilities)
    assert str(cache) in result.output.replace("\n", "")
    # Kernels of one source with the same constants share a binary.
    sources = {(kernel.source, kernel.constants) for kernel in all_kernels()}
    files = list(cache.iterdir())
    assert len(files) == len(sources) * len(capabilities)
    assert all(file.read_bytes().startswith(ELF) for file in files)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES} - {75, 90}))
def test_every_kernel_compiles_for_every_architecture(architecture: int) -> None:
    for kernel in one_of_each():
        assert compile_kernel(kernel, architecture, "cubin").startswith(ELF)


def test_every_kernel_has_ptx_with_its_plain_name() -> None:
    for kernel in one_of_each():
        ptx = compile_kernel(kernel, 75, "ptx").decode().rstrip("\0")
        assert f".entry {kernel.name}(" in ptx
        assert ".target sm_75" in ptx


@pytest.mark.parametrize(
    ("capability", "fact"),
    [("90", "'90' is not"), ("9", "'9' is not"), ("4.2", "not compile for 4.2; choose from 7.5, ")],
)
def test_command_rejects_unsupported_architectures(capability: str, fact: str, cache: Path) -> None:
    result = CliRunner().invoke(kernels, ["build", "--compute-capability", capability])
    assert result.exit_code == 2
    assert fact in result.output
    assert not cache.exists()


def test_command_fails_without_a_writable_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    result = CliRunner().invoke(kernels, ["build", "--compute-capability", "9.0"])
    assert isinstance(result.exception, NotADirectoryError)


def test_every_source_belongs_to_a_kernel() -> None:
    assert {kernel.source for kernel in all_kernels()} == {
        str(p.relative_to(FOLDER)) for p in FOLDER.glob("*/*.cu")
    }


def test_sources_include_only_own_headers() -> None:
    ours = {f'"{path.name}"' for path in FOLDER.glob("*/*.cuh")}
    for path in (*FOLDER.glob("*/*.cu"), *FOLDER.glob("*/*.cuh")):
        lines = path.read_text().splitlines()
        included = {line.split()[1] for line in lines if line.startswith("#include")}
        assert included <= ours, path.name


def test_second_compilation_reads_the_cache(kernel: Kernel, cache: Path) -> None:
    compile_kernel(kernel, 90, "cubin")
    (file,) = cache.iterdir()
    file.write_bytes(b"kept")
    assert compile_kernel(kernel, 90, "cubin") == b"kept"
    assert compile_kernel(kernel, 80, "cubin") != b"kept"
    assert compile_kernel(kernel, 90, "ptx") != b"kept"


def test_unwritable_cache_is_ignored(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_kernel(kernel, 90, "cubin").startswith(ELF)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_compiler_errors_are_reported(kernel: Kernel) -> None:
    with pytest.raises(KernelError, match="sm_42"):
        compile_kernel(kernel, 42, "cubin")
    faulty = Kernel(kernel.source, kernel.name, (("THREADS", 7),))
    with pytest.raises(KernelError, match=f"{kernel.source} does not compile with .*THREADS=7"):
        compile_kernel(faulty, 90, "cubin")
