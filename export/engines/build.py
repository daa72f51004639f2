"""Creation of engine builders from options, and reduction of top-k settings to TensorRT's limit.

The top-k settings are keys of the model configuration, such as `rpn.pre_nms_top_n_test`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ...model.bundle.manifest import EngineKind
from ...model.checkpoint import Checkpoint
from .build_log import BuildLog
from .builder import EngineBuilder
from .options import EngineOptions, check_engine_choices

# Largest k of TensorRT's TopK layer.
TOP_K_LIMIT = 3840

# Keys of the model configuration whose value is the k of a TopK layer, by section (`rpn`, `roi`).
_TOP_K_KEYS = {"rpn": ("pre_nms_top_n_test", "post_nms_top_n_test"), "roi": ("nms_candidates",)}


def builders_from_options(
    bundle: Path, kinds: Sequence[EngineKind], *, for_triton: bool = False, **choices: Any
) -> list[EngineBuilder]:
    """Return one builder per requested kind of engine.

    Args:
        bundle: folder of the bundle that will hold the engines.
        kinds: values of `--engine`, without `torch`.
        for_triton: whether Triton Inference Server will run the engines. If so, TensorRT engines
            with plugins get a profile for each batch size from 1 to the largest. Triton does not
            pad batches, and these engines leak memory if the batch size changes within a profile
            (https://github.com/NVIDIA/TensorRT/issues/4849).
        choices: values of the other engine options. None or (): the option was not given.

    Raises:
        click.UsageError: an option applies to none of `kinds`, or a path is inside the bundle
            folder. Or `for_triton` is set, and the engines would be built without weights.
        ModuleNotFoundError: TensorRT or TensorRT-RTX is not installed.
        EngineError: this machine cannot build engines of one of `kinds`.
    """
    bundle = bundle.resolve()
    given = {name: value for name, value in choices.items() if value not in (None, ())}
    check_engine_choices(given, bundle, kinds)
    if not kinds:
        return []
    log = BuildLog(given.pop("build_log", bundle.with_name(f"{bundle.name}.build.log")))
    if for_triton and given.get("strip_weights"):
        raise click.UsageError(
            "Triton cannot insert weights into an engine without weights; leave out --strip-weights"
        )
    has_plugins = given.get("plugins", True)
    options = EngineOptions(**given, profile_per_batch=for_triton and has_plugins)
    return [builder_for(kind, options, log) for kind in dict.fromkeys(kinds)]


def builder_for(kind: EngineKind, options: EngineOptions, log: BuildLog) -> EngineBuilder:
    """Return an engine builder for TensorRT or TensorRT-RTX, as `kind` selects.

    Raises:
        ModuleNotFoundError: TensorRT or TensorRT-RTX is not installed.
        EngineError: this machine cannot build engines of this kind.
    """
    # Imported on use, because possibly only one of TensorRT and TensorRT-RTX is installed.
    if kind == "tensorrt":
        from .tensorrt_builder import TensorRTEngineBuilder

        return TensorRTEngineBuilder(options, log)
    from .rtx_builder import RtxEngineBuilder

    return RtxEngineBuilder(options, log)


def limited_checkpoint(checkpoint: Checkpoint) -> tuple[Checkpoint, str]:
    """Reduce every top-k above TensorRT's limit to this limit, in a checkpoint's configuration.

    Returns:
        the checkpoint with the reduced values, and a list of the changes as text, as in
        `rpn.pre_nms_top_n_test=3840 instead of 6000`. If no top-k exceeds the limit: `checkpoint`
        itself and "".
    """
    config, changes = checkpoint.model_config, []
    for part, keys in _TOP_K_KEYS.items():
        section = getattr(config, part)
        excess = {key: getattr(section, key) for key in keys if getattr(section, key) > TOP_K_LIMIT}
        section = section.model_copy(update=dict.fromkeys(excess, TOP_K_LIMIT))
        config = config.model_copy(update={part: section})
        changes += [f"{part}.{k}={TOP_K_LIMIT} instead of {v}" for k, v in excess.items()]
    if not changes:
        return checkpoint, ""
    return replace(checkpoint, model_config=config), ", ".join(changes)
