import asyncio
import contextlib
import time

from maskrcnn_trt.serving.monitoring.loop_lag import LoopLag


def test_what_blocks_the_loop_is_measured() -> None:
    lag = LoopLag()

    async def block() -> None:
        measuring = asyncio.create_task(lag.run())
        await asyncio.sleep(0.15)
        time.sleep(0.4)
        await asyncio.sleep(0.15)
        measuring.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await measuring

    asyncio.run(block())
    assert lag.worst_s >= 0.3
    assert lag.worst_s >= lag.last_s >= 0
