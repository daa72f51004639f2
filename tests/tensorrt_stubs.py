"""The real TensorRT Python bindings, also where TensorRT's libraries are not.

The wheel `tensorrt-cu13-bindings` holds the whole Python interface, but its extension module is
linked against three libraries that are not in it. `load_tensorrt` gives it stand-ins of the same
names: every class, enumeration, flag and signature is then the real one, while nothing can be
built. What needs a real TensorRT is marked with `needs_tensorrt`.

The stand-ins are loaded without sharing their symbols, so `tensorrt_rtx` lives in the same process.
"""

import ast
import atexit
import ctypes
import functools
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType

import pytest

INSTALLED = importlib.util.find_spec("tensorrt") is not None
"""Whether a real TensorRT is there; settled before any stand-in is loaded."""

needs_tensorrt = pytest.mark.skipif(
    not INSTALLED, reason="needs TensorRT (`pip install maskrcnn-trt[tensorrt]`) and a GPU"
)

_SOURCES = {
    "nvinfer": """
        void *createInferBuilder_INTERNAL(void *logger, int version) { return 0; }
        void *createInferRefitter_INTERNAL(void *engine, void *logger, int version) { return 0; }
        void *createInferRuntime_INTERNAL(void *logger, int version) { return 0; }
        void *getBuilderPluginRegistry(int capability) { return 0; }
        void *getPluginRegistry(void) { return 0; }
    """,
    "nvinfer_plugin": """
        _Bool initLibNvInferPlugins(void *logger, const char *name_space) { return 1; }
    """,
    "nvonnxparser": """
        void *createNvOnnxParser_INTERNAL(void *network, void *logger, int version) { return 0; }
        void *createNvOnnxParserRefitter_INTERNAL(void *refitter, void *logger, int v) { return 0; }
        int getNvOnnxParserVersion(void) { return 0; }
    """,
}
# The package `tensorrt` as its own wheel has it, and a plugin registry, which is part of what the
# libraries would bring.
_PACKAGE = {
    "__init__.py": """
from tensorrt_bindings import *
from tensorrt_bindings import IPluginCreatorInterface, __version__


class _PluginRegistry:
    def __init__(self):
        self._creators = {}

    def register_creator(self, creator, plugin_namespace=""):
        assert isinstance(creator, IPluginCreatorInterface)
        key = creator.name, creator.plugin_version, plugin_namespace
        return self._creators.setdefault(key, creator) is creator

    def get_creator(self, type, version, plugin_namespace=""):
        return self._creators.get((type, version, plugin_namespace))


_registry = _PluginRegistry()


def get_plugin_registry():
    return _registry
""",
    "plugin/__init__.py": "from tensorrt_bindings.plugin import *\n",
}


def load_tensorrt() -> ModuleType:
    """The module `tensorrt`, over stand-ins where it is not installed; skips where that fails.

    From then on `import tensorrt` and `import tensorrt.plugin` work everywhere in the process. A
    test of what happens without TensorRT hides it:
    `monkeypatch.setitem(sys.modules, "tensorrt", None)`.
    """
    if not INSTALLED:
        _install_stubs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The bindings' docstrings hold invalid escape sequences.
        importlib.import_module("tensorrt.plugin")
    return importlib.import_module("tensorrt")


def stubbed_environment() -> dict[str, str]:
    """Environment of a fresh process in which `import tensorrt` works as after `load_tensorrt`."""
    if INSTALLED:
        return dict(os.environ)
    folder = str(_stub_folder())
    return {**os.environ, "PYTHONPATH": folder, "LD_LIBRARY_PATH": folder}


def missing_names(path: Path, alias: str, module: ModuleType) -> list[str]:
    """Names such as `trt.BuilderFlag.TF32` in a source file that the module does not have.

    Args:
        path: a Python file.
        alias: what the file calls the module; any `alias.X.Y` in the code counts, however the file
            came by it.
        module: that module.
    """
    chains = {
        chain[1:]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and (chain := _chain(node)) and chain[0] == alias
    }
    return sorted(".".join((alias, *chain)) for chain in chains if not _resolves(module, chain))


def _chain(node: ast.expr) -> tuple[str, ...]:
    """The names of `a.b.c`, empty for an expression that begins otherwise."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (owner := _chain(node.value)):
        return (*owner, node.attr)
    return ()


def _resolves(module: ModuleType, chain: tuple[str, ...]) -> bool:
    try:
        functools.reduce(getattr, chain, module)
    except AttributeError:
        return False
    return True


@functools.cache
def _install_stubs() -> None:
    folder = _stub_folder()
    for library in _SOURCES:
        ctypes.CDLL(str(folder / f"lib{library}.so.11"))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


@functools.cache
def _stub_folder() -> Path:
    """A folder with the stand-in libraries and the package `tensorrt`."""
    bindings = importlib.util.find_spec("tensorrt_bindings")
    if bindings is None or bindings.origin is None:
        pytest.skip("needs the wheel tensorrt-cu13-bindings, which Linux x86-64 has")
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc to build stand-ins for TensorRT's libraries")
    folder = Path(tempfile.mkdtemp(prefix="tensorrt-stubs-"))
    atexit.register(shutil.rmtree, folder)
    for library, source in _SOURCES.items():
        name = f"lib{library}.so.11"
        options = ["-x", "c", "-", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name]
        subprocess.run([compiler, *options], input=source, text=True, check=True)
    for file, text in _PACKAGE.items():
        path = folder / "tensorrt" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
