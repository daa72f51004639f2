"""Metrics of a server, scraped over HTTP as Prometheus does."""

import asyncio
import re
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def read(url: str, accept: str = "text/plain") -> str:
    """Scrape an endpoint in the given format."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request) as response:
        assert response.headers["Content-Type"].startswith(accept.partition(";")[0])
        text: str = response.read().decode()
        return text


class Metrics:
    """Metrics endpoint at a URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def value(self, name: str, **labels: str) -> float:
        """Scrape the endpoint. Return the value of the only sample with this name and labels."""
        families = text_string_to_metric_families(await asyncio.to_thread(read, self.url))
        samples = [sample for family in families for sample in family.samples]
        (value,) = (s.value for s in samples if (s.name, s.labels) == (name, labels))
        return value

    async def becomes(self, expected: float, name: str, **labels: str) -> None:
        """Wait until the sample with this name and labels has the value `expected`."""
        async with asyncio.timeout(60):
            while await self.value(name, **labels) != expected:
                await asyncio.sleep(0.02)


def metrics_from_log(log: str) -> Metrics:
    """Return the metrics endpoint of the last server that logged its URL, at level INFO."""
    *_, url = re.findall(r"metrics at (http://\S+/metrics)", log)
    return Metrics(url)
