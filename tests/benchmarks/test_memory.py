import mmap

from maskrcnn_trt.benchmarks.memory import peak_memory_mib, reset_peak_memory


def test_peak_is_remembered_until_reset():
    reset_peak_memory()
    before = peak_memory_mib("cpu")
    # Pages that are surely new, unlike those of a freed array.
    with mmap.mmap(-1, 100 << 20) as block:
        for offset in range(0, len(block), mmap.PAGESIZE):
            block[offset] = 1
        during = peak_memory_mib("cpu")
    assert during - before > 90
    assert peak_memory_mib("cpu") - before > 90
    reset_peak_memory()
    assert peak_memory_mib("cpu") < during - 50
