"""What COCO 2014 and 2017 consist of, and where their parts lie in a folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

Edition = Literal["coco2014", "coco2017"]
Part = Literal["train", "val", "annotations"]

# The host has no certificate of its own name; the checksums guard what arrives.
BASE_URL = "http://images.cocodataset.org"


@dataclass(frozen=True)
class CocoPart:
    """A zip archive of COCO and the folder that is in it."""

    address: str
    """Below the base URL, as in `zips/val2017.zip`."""
    folder: str
    """The only folder at its top, as in `val2017`."""
    md5: str
    """In hexadecimal digits."""
    size: int | None
    """Bytes, if known."""

    @property
    def archive(self) -> str:
        """File name of the archive."""
        return self.address.rpartition("/")[2]

    def archive_in(self, root: Path) -> Path:
        """Path of the archive in the folder of a data set."""
        return root / self.archive

    def folder_in(self, root: Path) -> Path:
        """Path of the extracted folder in the folder of a data set."""
        return root / self.folder


def annotations_in(root: Path, images: str) -> Path:
    """Path of the instance annotations of an image folder such as `val2017`."""
    return root / "annotations" / f"instances_{images}.json"


# COCO publishes no checksums; on these the downloaders of several other projects agree.
_PARTS: Mapping[Edition, Mapping[Part, CocoPart]] = {
    "coco2014": {
        "train": CocoPart(
            "zips/train2014.zip", "train2014", "0da8c0bd3d6becc4dcb32757491aca88", 13_510_573_713
        ),
        "val": CocoPart(
            "zips/val2014.zip", "val2014", "a3d79f5ed8d289b7a7554ce06a5782b3", 6_645_013_297
        ),
        "annotations": CocoPart(
            "annotations/annotations_trainval2014.zip",
            "annotations",
            "0a379cfc70b0e71301e0f377548639bd",
            252_872_794,
        ),
    },
    "coco2017": {
        "train": CocoPart(
            "zips/train2017.zip", "train2017", "cced6f7f71b7629ddf16f17bbcfab6b2", 19_336_861_798
        ),
        "val": CocoPart(
            "zips/val2017.zip", "val2017", "442b8da7639aecaf257c1dceb8ba8c80", 815_585_330
        ),
        "annotations": CocoPart(
            "annotations/annotations_trainval2017.zip",
            "annotations",
            "f4bbac642086de4f52a3fdda2de5fa2c",
            252_907_541,
        ),
    },
}


def coco_parts(
    edition: Edition, names: Sequence[Part] = (), md5s: Mapping[str, str] = MappingProxyType({})
) -> dict[Part, CocoPart]:
    """Parts of an edition.

    Args:
        edition: which one.
        names: which parts; all, if none are given.
        md5s: by name of an archive, checksums to trust in place of the published ones.
    """
    parts = {n: part for n, part in _PARTS[edition].items() if not names or n in names}
    return {
        name: replace(part, md5=md5s[part.archive], size=None) if part.archive in md5s else part
        for name, part in parts.items()
    }
