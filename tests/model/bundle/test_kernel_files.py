from pathlib import Path

import pytest
import torch
import triton
from triton import knobs
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from maskrcnn_trt.model.bundle.kernel_files import cached_kernels, restore_kernels
from maskrcnn_trt.plugins.kernel_list import all_kernels
from maskrcnn_trt.plugins.runtime.compilation import compile_kernel

GPU = torch.device("cuda", 0)


@triton.jit
def fill(output, BLOCK: tl.constexpr):
    tl.store(output + tl.arange(0, BLOCK), 1.0)


def compile_kernels() -> bool:
    """Compile a CUDA kernel and a Triton kernel, and return whether the latter was in the cache."""
    kernel = next(kernel for kernel in all_kernels() if kernel.name == "grid_anchors")
    compile_kernel(kernel, 90, "cubin")
    hits = []
    source = ASTSource(fill, {"output": "*fp32", "BLOCK": "constexpr"}, {(1,): 32})
    with knobs.compilation.scope():
        knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        triton.compile(source, GPUTarget("cuda", 90, 32))
    return bool(hits[0])


def use_caches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    use_caches(tmp_path / "first", monkeypatch)
    assert not compile_kernels()
    kernels = cached_kernels(GPU)
    use_caches(tmp_path / "second", monkeypatch)
    return kernels


def test_restored_kernels_are_not_compiled_again(kernels: dict[str, bytes]) -> None:
    assert {name.split("/")[0] for name in kernels} == {"nvrtc", "triton"}
    assert not any(b"/first/" in content for content in kernels.values())
    restore_kernels(kernels, GPU)
    assert cached_kernels(GPU) == kernels
    assert compile_kernels()
    assert cached_kernels(GPU) == kernels


def test_incomplete_kernel_is_compiled_again(kernels: dict[str, bytes]) -> None:
    # The process that restored the kernels was killed before it wrote the list of files.
    restore_kernels({n: c for n, c in kernels.items() if "__grp__" not in n}, GPU)
    assert not compile_kernels()
    assert compile_kernels()


def test_kernel_with_a_file_that_cannot_be_written_is_compiled_again(
    kernels: dict[str, bytes],
) -> None:
    (name,) = (n for n in kernels if n.startswith("triton/") and n.endswith(".cubin"))
    kernels[name.rpartition("/")[0] + f"/{'x' * 300}.cubin"] = kernels.pop(name)
    restore_kernels(kernels, GPU)
    assert not compile_kernels()
    assert compile_kernels()


def test_paths_with_special_characters_are_restored(
    kernels: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ('quoted " folder', "größe"):
        use_caches(tmp_path / folder, monkeypatch)
        restore_kernels(kernels, GPU)
        assert compile_kernels()
        assert cached_kernels(GPU) == kernels


def test_own_kernels_are_kept(kernels: dict[str, bytes]) -> None:
    assert not compile_kernels()
    restore_kernels(dict.fromkeys(kernels, b"other"), GPU)
    assert cached_kernels(GPU) == kernels
    assert compile_kernels()


def test_cache_that_cannot_be_written_is_not_used(
    kernels: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "second").touch()
    restore_kernels(kernels, GPU)
    assert cached_kernels(GPU) == {}
