"""The metrics of a server, as Prometheus scrapes them."""

import asyncio
import re
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def read(url: str, accept: str = "text/plain") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept})) as answer:
        assert answer.headers["Content-Type"].startswith(accept.partition(";")[0])
        text: str = answer.read().decode()
        return text


class Metrics:
    """The metrics at a URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def value(self, name: str, **labels: str) -> float:
        """The value of a sample that is there once."""
        families = text_string_to_metric_families(await asyncio.to_thread(read, self.url))
        samples = [sample for family in families for sample in family.samples]
        (value,) = (s.value for s in samples if (s.name, s.labels) == (name, labels))
        return value

    async def becomes(self, expected: float, name: str, **labels: str) -> None:
        """Return when a sample has a value."""
        async with asyncio.timeout(60):
            while await self.value(name, **labels) != expected:
                await asyncio.sleep(0.02)


def metrics_in(log: str) -> Metrics:
    """Those of the last server whose log says at level INFO where they are."""
    *_, url = re.findall(r"metrics at (http://\S+/metrics)", log)
    return Metrics(url)
