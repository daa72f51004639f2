"""What TensorRT cannot select, and a checkpoint that asks for no more."""

from dataclasses import replace

from ..model.checkpoint import Checkpoint

TOP_K_LIMIT = 3840
"""Most entries that TensorRT's TopK layer selects."""

_SELECTIONS = {
    "rpn": ("pre_nms_top_n_test", "post_nms_top_n_test"),
    "roi": ("nms_candidates",),
}


def limited_checkpoint(checkpoint: Checkpoint) -> tuple[Checkpoint, str]:
    """Reduce numbers of candidates to what TensorRT selects.

    Returns:
        the checkpoint with another configuration, or itself; and what is different, as in
        `rpn.pre_nms_top_n_test=3840 instead of 6000`, empty where nothing is.
    """
    config, changes = checkpoint.model_config, []
    for part, keys in _SELECTIONS.items():
        section = getattr(config, part)
        excess = {key: getattr(section, key) for key in keys if getattr(section, key) > TOP_K_LIMIT}
        section = section.model_copy(update=dict.fromkeys(excess, TOP_K_LIMIT))
        config = config.model_copy(update={part: section})
        changes += [f"{part}.{k}={TOP_K_LIMIT} instead of {v}" for k, v in excess.items()]
    if not changes:
        return checkpoint, ""
    return replace(checkpoint, model_config=config), ", ".join(changes)
