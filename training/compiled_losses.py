"""Compile the training losses and their gradients with `torch.compile`."""

import logging
import os
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as autograd_config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.nn import functional as F

from ..model.bundle.program import ignore_torch_warnings
from ..model.inductor import configure_inductor
from ..model.losses import LossTerms
from ..model.mask_rcnn import MaskRCNN
from ..model.targets import Targets
from ..plugins.runtime.user_cache import cache_folder
from .config import ConfigError

logger = logging.getLogger(__name__)

# The number of objects per image is padded to a multiple of this number, because each distinct
# number of objects needs its own CUDA graph.
_OBJECTS = 16


class CompiledLosses:
    """Compiled replacement for `MaskRCNN.losses`. `torch.compile` compiles it in three parts.

    Each part is compiled once for each shape of the image batch.
    """

    def __init__(
        self,
        model: MaskRCNN,
        backend: str = "inductor",
        *,
        graphs: bool = False,
        required: bool = True,
        on_counts: Callable[[Tensor], None] | None = None,
        on_gradients: Callable[[], None] | None = None,
    ) -> None:
        """Prepare the compiled losses. The first call with each image batch shape compiles them.

        Args:
            model: Model to train.
            backend: Argument `backend` of `torch.compile`.
            graphs: Run the forward and backward passes as CUDA graphs. The results of a call, the
                counts given to `on_counts`, and the gradients are then valid only until the next
                call.
            required: True: raise `ConfigError` if torch cannot compile on this machine. False: log
                a warning, and compute without compilation.
            on_counts: Function to call with `LossTerms.counts` in each forward pass, before the
                losses are computed. If a compilation fails, it may be called twice. None: call
                nothing.
            on_gradients: Function to call twice in each backward pass: when the gradients of group
                1 of `parameters_by_part` are computed, and when those of group 2 are. The second
                call is left out if the backbone's first stages are frozen. Both calls are left out
                if the whole backbone is frozen, or if a compilation has failed. None: call nothing.
        """
        # On import, torch sets this variable to a folder in /tmp, unless the user has set it.
        # Replace only torch's value.
        if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder("inductor"))
        # By default, torch splits the compiled graph into one part per gradient bucket of
        # DistributedDataParallel. Such parts take longer to compile, and are not in the compilation
        # cache of an earlier run with one GPU.
        torch._dynamo.config.optimize_ddp = False
        options = configure_inductor()
        if graphs:
            options |= {
                "triton.cudagraphs": True,
                "triton.cudagraph_dynamic_shape_warn_limit": 1000,
            }
        self._model = model
        compiled = partial(
            torch.compile,
            dynamic=False,
            backend=backend,
            options=options if backend == "inductor" else None,  # other compilers reject them
        )
        self._first_stages = compiled(model.first_stages)
        self._sample_from_maps = compiled(model.sample_from_maps)
        self._loss_sums = compiled(model.loss_sums)
        self._graphs, self._required, self._is_eager = graphs, required, False
        self._on_counts, self._on_gradients = on_counts, on_gradients
        self._compiled: set[torch.Size] = set()

    def __call__(
        self, images: Tensor, image_sizes: Tensor, targets: Targets, seeds: Tensor
    ) -> LossTerms:
        """Compute the five losses of an image batch, each as a sum and a divisor (a count).

        `targets` is the ground truth. `seeds` has one seed per image, for the random sampling of
        anchors and RoIs. The shapes are as in `MaskRCNN.forward`.

        Raises:
            ConfigError: torch cannot compile on this machine, and the argument `required` of the
                constructor is True.
        """
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            targets = _padded(targets)
        for tensor in targets:
            # The number of objects differs from batch to batch, so do not compile for each number.
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
        if images.shape in self._compiled or self._is_eager:
            return self._losses(images, image_sizes, targets, seeds)
        self._compiled.add(images.shape)
        return self._compile(images, image_sizes, targets, seeds)

    def _losses(
        self, images: Tensor, image_sizes: Tensor, targets: Targets, seeds: Tensor
    ) -> LossTerms:
        # A compiled backward pass returns all its gradients at its end. Therefore the model is
        # compiled in three parts. The gradients of the last two parts are summed over the ranks
        # while the backward pass continues. These parts have most of the weights, and the first
        # part takes long enough to hide the sum. The counts are summed while the forward pass
        # continues.
        height, width = images.shape[2:]
        maps = self._first_stages(images, image_sizes)
        self._report_gradients_of(maps[-1])
        samples = self._sample_from_maps(maps, (height, width), image_sizes, targets, seeds)
        if self._on_counts is not None:
            self._on_counts(samples.counts)
        self._report_gradients_of(samples.features[-1])
        return LossTerms(self._loss_sums(samples, targets), samples.counts)

    def _report_gradients_of(self, output: Tensor) -> None:
        """Let the backward pass call `on_gradients` when it has computed the gradient of `output`.

        If `on_gradients` is None or `output` needs no gradient, nothing is called.
        """
        on_gradients = self._on_gradients
        if on_gradients is not None and output.requires_grad:
            output.register_hook(lambda _: on_gradients())  # type: ignore[no-untyped-call]

    def _compile(
        self, images: Tensor, image_sizes: Tensor, targets: Targets, seeds: Tensor
    ) -> LossTerms:
        height, width = images.shape[2:]
        logger.info("compiling the training step for images of %dx%d pixels", height, width)
        start = time.perf_counter()
        # Compile the backward pass now too, so that its time and errors belong to this
        # call. By default, torch compiles it when it first runs.
        eagerly = autograd_config.patch(force_non_lazy_backward_lowering=True)
        try:
            with eagerly, ignore_torch_warnings():
                losses = self._losses(images, image_sizes, targets, seeds)
        except BackendCompilerFailed as error:
            inner = error.inner_exception
            cause, *_ = f"{type(inner).__name__}: {inner}".splitlines()
            problem = f"torch cannot compile the training step: {cause}"
            if self._required:
                raise ConfigError(
                    f"{problem}; to train without compilation, set compile=false"
                ) from error
            logger.warning("%s; training goes on without compilation, which is slower", problem)
            self._stop_compiling()
        # This is not done in the `except` block, because the traceback keeps tensors alive there.
        if self._is_eager:
            return self._losses(images, image_sizes, targets, seeds)
        # `cudnn_convolution` has measured its implementations in CUDA graphs. Release the memory
        # that torch reserved for these graphs.
        torch.cuda.empty_cache()
        logger.info("compiled the training step in %.0f s", time.perf_counter() - start)
        return losses

    def _stop_compiling(self) -> None:
        model, self._graphs, self._is_eager = self._model, False, True
        self._first_stages, self._loss_sums = model.first_stages, model.loss_sums
        self._sample_from_maps = model.sample_from_maps
        # Without compilation, the order in which gradients are computed is not known.
        self._on_gradients = None


def parameters_by_part(model: MaskRCNN) -> list[list[nn.Parameter]]:
    """Group a model's parameters by the time at which `CompiledLosses` computes their gradients.

    Group 1: box and mask heads. Group 2: RPN, and the backbone's `layer4` and FPN. Group 3: the
    rest of the backbone. The gradients are computed in this order.
    """
    groups: list[list[nn.Parameter]] = [[], [], []]
    for name, parameter in model.named_parameters():
        is_first = name.startswith("backbone.body.") and ".layer4." not in name
        index = 0 if name.startswith("roi_heads.") else 2 if is_first else 1
        groups[index].append(parameter)
    return groups


def _padded(targets: Targets) -> Targets:
    """Pad the targets with zeros to the next multiple of `_OBJECTS` objects per image."""
    missing = -targets.labels.shape[1] % _OBJECTS
    return Targets(*(F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing]) for x in targets))
