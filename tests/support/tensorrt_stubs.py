"""TensorRT's real Python bindings on machines without TensorRT's libraries.

The wheel `tensorrt-cu13-bindings` contains the whole Python interface, but its extension module
links against three libraries outside of the wheel. `load_tensorrt` provides stubs of these
libraries. All classes, enumerations, flags and signatures are then real, but engines cannot be
built. Mark tests that need a real TensorRT with `needs_tensorrt`.
"""

import ast
import atexit
import ctypes
import functools
import importlib
import importlib.metadata
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

# Whether a real TensorRT is installed. Evaluated before any stub is loaded.
INSTALLED = importlib.util.find_spec("tensorrt") is not None

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
# Files of the package `tensorrt` as in its wheel, except for the plugin registry. A Python class
# replaces it, because the real one is in TensorRT's library.
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
    """Import `tensorrt`. If TensorRT is not installed, use stubs of its libraries.

    If the stubs cannot be built, the test is skipped. Afterwards, `import tensorrt` and
    `import tensorrt.plugin` work everywhere in the process. To test behaviour without TensorRT,
    hide it: `monkeypatch.setitem(sys.modules, "tensorrt", None)`.
    """
    if not INSTALLED:
        _install_stubs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escape sequences in the bindings' docstrings
        importlib.import_module("tensorrt.plugin")
    return importlib.import_module("tensorrt")


def stubbed_environment() -> dict[str, str]:
    """Return an environment in which a new process can `import tensorrt`."""
    if INSTALLED:
        return dict(os.environ)
    folder = str(_stub_folder())
    paths = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, "LD_LIBRARY_PATH": folder}


def missing_names(path: Path, alias: str, module: ModuleType) -> list[str]:
    """Return names in a source file, such as `trt.BuilderFlag.TF32`, that a module lacks.

    Args:
        path: a Python file.
        alias: name of the module in the file. All expressions `alias.X.Y` are checked.
        module: the module.
    """
    chains = {
        chain[1:]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and (chain := _chain(node)) and chain[0] == alias
    }
    return sorted(".".join((alias, *chain)) for chain in chains if not _resolves(module, chain))


def _chain(node: ast.expr) -> tuple[str, ...]:
    """Return the names in an expression such as `a.b.c`, or () for another expression."""
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
    for library in folder.glob("lib*"):
        # Loaded without sharing symbols, so that `tensorrt_rtx` works in the same process.
        ctypes.CDLL(str(library))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


@functools.cache
def _stub_folder() -> Path:
    """Build the stub libraries and the package `tensorrt` in a folder."""
    bindings = importlib.util.find_spec("tensorrt_bindings")
    if bindings is None or bindings.origin is None:
        pytest.skip("needs the wheel tensorrt-cu13-bindings (Linux x86-64)")
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc to build stubs of TensorRT's libraries")
    folder = Path(tempfile.mkdtemp(prefix="tensorrt-stubs-"))
    atexit.register(shutil.rmtree, folder)
    major = importlib.metadata.version("tensorrt_cu13_bindings").partition(".")[0]
    for library, source in _SOURCES.items():
        name = f"lib{library}.so.{major}"
        options = ["-x", "c", "-", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name]
        subprocess.run([compiler, *options], input=source, text=True, check=True)
    for file, text in _PACKAGE.items():
        path = folder / "tensorrt" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
