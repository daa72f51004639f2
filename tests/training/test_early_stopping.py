from maskrcnn_trt.training.config import EvaluationConfig
from maskrcnn_trt.training.early_stopping import BEST_BY, EarlyStopping


def test_patience_counts_evaluations_that_do_not_improve() -> None:
    stopping = EarlyStopping(EvaluationConfig(period=1, patience=2), {}, None)
    assert [stopping.record({BEST_BY: ap}) for ap in (0.0, 0.2, 0.1)] == [True, True, False]
    assert stopping.reason({BEST_BY: 0.1}) is None
    stopping.record({BEST_BY: 0.2})
    assert stopping.reason({BEST_BY: 0.2}) is not None


def test_an_ap_that_cannot_be_measured_does_not_end_a_run() -> None:
    """COCO's AP is -1 if the validation images have no objects, or none could be read."""
    stopping = EarlyStopping(EvaluationConfig(period=1, patience=1), {}, None)
    for _ in range(3):
        assert not stopping.record({BEST_BY: -1.0})
        assert stopping.reason({BEST_BY: -1.0}) is None
