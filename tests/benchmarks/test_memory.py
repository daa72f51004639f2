import numpy as np

from maskrcnn_trt.benchmarks.memory import peak_memory_mib, reset_peak_memory


def test_peak_is_remembered_until_reset():
    reset_peak_memory()
    before = peak_memory_mib("cpu")
    block = np.ones(100 << 20, np.uint8)
    during = peak_memory_mib("cpu")
    del block
    assert during - before > 90
    assert peak_memory_mib("cpu") - before > 90
    reset_peak_memory()
    assert peak_memory_mib("cpu") < during - 50
