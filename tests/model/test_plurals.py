import pytest

from maskrcnn_trt.model.plurals import counted


@pytest.mark.parametrize(("number", "text"), [(0, "0 images"), (1, "1 image"), (2, "2 images")])
def test_nouns_agree_with_their_numbers(number: int, text: str) -> None:
    assert counted(number, "image") == text


def test_irregular_plurals() -> None:
    assert [counted(n, "class", "classes") for n in (1, 2)] == ["1 class", "2 classes"]
