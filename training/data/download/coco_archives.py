"""URLs, checksums and folders of the published zip archives of COCO 2014 and 2017."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

Edition = Literal["coco2014", "coco2017"]
Part = Literal["train", "val", "annotations"]

# HTTP, because the host has no certificate for its name. Checksums verify the content.
BASE_URL = "http://images.cocodataset.org"


@dataclass(frozen=True)
class CocoArchive:
    """Published zip archive of COCO."""

    # Path relative to the base URL, as in `zips/val2017.zip`.
    address: str
    # Name of the only top-level folder in the archive, as in `val2017`.
    folder: str
    # MD5 of the archive as hexadecimal digits.
    md5: str
    # Size of the archive in bytes. None: unknown.
    size: int | None

    @property
    def name(self) -> str:
        """File name of the archive."""
        return self.address.rpartition("/")[2]


def annotations_in(root: Path, images: str) -> Path:
    """Return the path of a split's annotation file in the folder `root`.

    `images` is the name of the split's image folder, such as `val2017`.
    """
    return root / "annotations" / f"instances_{images}.json"


# COCO publishes no checksums. Several other projects use these MD5s.
_ARCHIVES: Mapping[Edition, Mapping[Part, CocoArchive]] = {
    "coco2014": {
        "train": CocoArchive(
            "zips/train2014.zip", "train2014", "0da8c0bd3d6becc4dcb32757491aca88", 13_510_573_713
        ),
        "val": CocoArchive(
            "zips/val2014.zip", "val2014", "a3d79f5ed8d289b7a7554ce06a5782b3", 6_645_013_297
        ),
        "annotations": CocoArchive(
            "annotations/annotations_trainval2014.zip",
            "annotations",
            "0a379cfc70b0e71301e0f377548639bd",
            252_872_794,
        ),
    },
    "coco2017": {
        "train": CocoArchive(
            "zips/train2017.zip", "train2017", "cced6f7f71b7629ddf16f17bbcfab6b2", 19_336_861_798
        ),
        "val": CocoArchive(
            "zips/val2017.zip", "val2017", "442b8da7639aecaf257c1dceb8ba8c80", 815_585_330
        ),
        "annotations": CocoArchive(
            "annotations/annotations_trainval2017.zip",
            "annotations",
            "f4bbac642086de4f52a3fdda2de5fa2c",
            252_907_541,
        ),
    },
}


def coco_archives(
    edition: Edition, parts: Sequence[Part], md5s: Mapping[str, str] = MappingProxyType({})
) -> dict[Part, CocoArchive]:
    """Return the archives of a COCO edition, by part (`train`, `val` and `annotations`).

    Args:
        edition: Edition of COCO, such as `coco2017`.
        parts: Parts to include. Empty: all parts.
        md5s: MD5s by file name, for archives that differ on a mirror. They replace the published
            MD5s.
    """
    archives = {part: a for part, a in _ARCHIVES[edition].items() if not parts or part in parts}
    return {
        part: replace(a, md5=md5s[a.name], size=None) if a.name in md5s else a
        for part, a in archives.items()
    }
