"""The page in Chromium: images, masks, controls, keyboard, downloads and access."""

import json
import shutil
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from http_server import HttpAddress, served_over_http
from PIL import ExifTags, Image

import maskrcnn_trt.serving.http.server

Encode = Callable[..., bytes]
PAGE = Path(maskrcnn_trt.serving.http.server.__file__).parent / "page"
TOKEN = "s3cret"


@pytest.fixture(scope="module")
def server(
    bundle: Path, picture: Encode, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpAddress]:
    """Server of a bundle with a sample image."""
    own = tmp_path_factory.mktemp("bundle") / "bundle"
    shutil.copytree(bundle, own, copy_function=shutil.copy)
    (own / "samples").mkdir()
    (own / "samples" / "street.png").write_bytes(picture(1, codec="PNG"))
    with served_over_http(own, max_message_mb=1) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no Chromium; install it with apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        # Without a sandbox it also runs as root, as in containers.
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """Page at a viewport, its requests, and its errors."""

    def __init__(self, browser: Any, url: str, width: int = 1440, **options: Any) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 800}, **options)
        self.page.set_default_timeout(60_000)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._add_message)
        self.page.goto(url)

    def _add_message(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def send(self, data: bytes, name: str = "tiles.png", kind: str = "image/png") -> None:
        files = {"name": name, "mimeType": kind, "buffer": data}
        self.page.locator("#file").set_input_files(files)

    def wait_for_result(self) -> None:
        self.page.get_by_role("status").filter(has_text="detections shown").wait_for()

    def show_all(self) -> None:
        self.page.get_by_label("Minimum score").fill("0")

    @property
    def options(self) -> Any:
        return self.page.get_by_role("option")

    @property
    def caption(self) -> str:
        text: str = self.page.locator("#caption").inner_text()
        return text.strip()

    def pixels(self) -> Any:
        self.page.mouse.move(0, 0)
        return np.array(Image.open(BytesIO(self.page.locator("#canvas").screenshot())))


@pytest.fixture
def tab(browser: Any, server: HttpAddress) -> Iterator[Tab]:
    tab = Tab(browser, server.url)
    yield tab
    tab.page.close()


@pytest.fixture(scope="module")
def found(server: HttpAddress, picture: Encode) -> Any:
    """Detections of the image that the tests send."""
    url = f"{server.url}/v1/detect?mask_format=none"
    return httpx.post(url, content=picture(codec="PNG"), timeout=60).json()["detections"]


def test_page_is_small_and_loads_nothing_from_elsewhere(server: HttpAddress) -> None:
    texts = [(PAGE / name).read_text() for name in ("index.html", "page.css", "page.js")]
    assert sum(len(text.splitlines()) for text in texts) < 500
    assert not any("http://" in text or "https://" in text or "//cdn" in text for text in texts)
    response = httpx.get(server.url)
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1440])
def test_chosen_image(
    browser: Any, server: HttpAddress, picture: Encode, found: Any, width: int
) -> None:
    scheme = "dark" if width == 360 else "light"
    tab = Tab(browser, server.url, width, color_scheme=scheme)
    tab.send(picture(codec="PNG"))
    tab.wait_for_result()
    detections = sum("/v1/detect" in url for url in tab.requests)
    counts = {}
    for threshold in (0.0, found[2]["score"] - 1e-3, 0.99):
        tab.page.get_by_label("Minimum score").fill(f"{threshold:.2f}")
        counts[threshold] = tab.options.count()
        value = round(threshold, 2)
        assert counts[threshold] == sum(d["score"] >= value for d in found)
    assert len(set(counts.values())) == 3
    tab.show_all()
    drawn = tab.pixels()
    names = {detection["class_name"] for detection in found}
    for name in names:
        box = tab.page.get_by_role("checkbox", name=name)
        box.focus()
        tab.page.keyboard.press("Space")
        assert not box.is_checked()
    assert tab.options.count() == 0
    assert (tab.pixels() != drawn).any()
    tab.page.get_by_role("checkbox").first.click()
    assert tab.options.count() > 0
    assert sum("/v1/detect" in url for url in tab.requests) == detections
    assert all(url.startswith((server.url, "blob:")) for url in tab.requests)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.errors == []
    tab.page.close()


@pytest.mark.browser
def test_keyboard_alone(tab: Tab, picture: Encode, found: Any, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(codec="PNG"))
    page = tab.page
    # Playwright intercepts file dialogs from the first listener on. Between `expect_file_chooser`
    # and the key, that can be too late.
    page.on("filechooser", lambda _: None)
    page.get_by_role("button", name="street.png").wait_for()

    def tab_to(selector: str) -> None:
        for _ in range(20):
            page.keyboard.press("Tab")
            if page.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
                return
        raise AssertionError(selector)

    tab_to("#file")
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(tmp_path / "a.png")
    tab.wait_for_result()
    tab_to("#threshold")
    page.keyboard.press("Home")
    plain = tab.pixels()
    tab_to("#instances")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert tab.caption == f"{found[1]['class_name']} {found[1]['score']:.2f}"
    active = page.locator("#instances").get_attribute("aria-activedescendant")
    assert page.locator(f"#{active}").get_attribute("aria-selected") == "true"
    assert (np.array(Image.open(BytesIO(page.locator("#canvas").screenshot()))) != plain).any()
    page.keyboard.press("End")
    assert tab.caption.endswith(f"{found[-1]['score']:.2f}")
    page.keyboard.press("Escape")
    assert tab.caption == ""
    assert tab.errors == []


@pytest.mark.browser
def test_instance_under_the_pointer(tab: Tab, picture: Encode) -> None:
    tab.send(picture(codec="PNG"))
    tab.wait_for_result()
    tab.show_all()
    canvas = tab.page.locator("#canvas")
    box = canvas.bounding_box()
    captions = set()
    for x in range(5, 100, 10):
        for y in range(5, 100, 10):
            tab.page.mouse.move(
                box["x"] + box["width"] * x / 100, box["y"] + box["height"] * y / 100
            )
            captions.add(tab.caption)
    assert "" in captions
    assert len(captions) > 1
    assert tab.page.locator("[aria-selected=true]").count() <= 1


@pytest.mark.browser
def test_parts_of_a_mask_are_separate(tab: Tab, picture: Encode) -> None:
    squares = [[5, 5, 25, 5, 25, 25, 5, 25], [150, 80, 190, 80, 190, 110, 150, 110]]

    def two_parts(route: Any) -> None:
        response = route.fetch()
        result = response.json()
        result["detections"] = [{**result["detections"][0], "score": 1, "segmentation": squares}]
        route.fulfill(response=response, json=result)

    tab.page.route("**/v1/detect?*", two_parts)
    tab.send(picture(codec="PNG"))
    tab.wait_for_result()
    box = tab.page.locator("#canvas").bounding_box()
    captions = []
    for x, y in ((15, 15), (100, 64), (170, 95)):  # the second point is between the squares
        tab.page.mouse.move(box["x"] + box["width"] * x / 200, box["y"] + box["height"] * y / 120)
        captions.append(tab.caption)
    assert captions[0] == captions[2] != ""
    assert captions[1] == ""


@pytest.mark.browser
def test_samples_paste_and_drop(tab: Tab, picture: Encode) -> None:
    page = tab.page
    page.get_by_role("button", name="street.png").click()
    tab.wait_for_result()
    page.get_by_role("img", name="street with").wait_for()
    script = """async ([kind, bytes]) => {
        const files = new DataTransfer();
        files.items.add(new File([new Uint8Array(bytes)], kind + ".png", {type: "image/png"}));
        const Event = kind === "paste" ? ClipboardEvent : DragEvent;
        const data = {clipboardData: files, dataTransfer: files, bubbles: true, cancelable: true};
        document.body.dispatchEvent(new Event(kind, data));
    }"""
    for kind in ("paste", "drop"):
        page.evaluate(script, [kind, list(picture(3, codec="PNG"))])
        page.get_by_role("img", name=f"{kind} with").wait_for()
    assert tab.errors == []


@pytest.mark.browser
def test_downloads(tab: Tab, picture: Encode, found: Any) -> None:
    tab.send(picture(codec="PNG"))
    tab.wait_for_result()
    tab.show_all()
    files = {}
    for name in ("PNG", "JSON"):
        with tab.page.expect_download() as download:
            tab.page.get_by_role("button", name=name, exact=True).click()
        assert download.value.suggested_filename == f"tiles-detections.{name.lower()}"
        files[name] = Path(download.value.path()).read_bytes()
    image = Image.open(BytesIO(files["PNG"]))
    assert image.size == (200, 120)
    original = np.array(Image.open(BytesIO(picture(codec="PNG"))))
    assert (np.array(image.convert("RGB")) != original).any()
    result = json.loads(files["JSON"])
    assert [d["score"] for d in result["detections"]] == [d["score"] for d in found]
    assert result["timing"]["infer_us"] > 0


@pytest.mark.browser
def test_transparent_and_rotated_webp(tab: Tab, picture: Encode) -> None:
    image, exif = Image.open(BytesIO(picture(codec="PNG"))), Image.Exif()
    image.putalpha(0)
    exif[ExifTags.Base.Orientation] = 6
    file = BytesIO()
    image.save(file, "WEBP", lossless=True, exif=exif)
    with tab.page.expect_request("**/v1/detect*") as request:
        tab.send(file.getvalue(), "sign.webp", "image/webp")
    # Chromium ignores the orientation of WebP, so the server must not apply it.
    assert request.value.headers["content-type"] == "image/jpeg"
    tab.wait_for_result()
    tab.page.get_by_label("Minimum score").fill("1")
    assert tab.options.count() == 0
    area = "getContext('2d').getImageData(0, 0, canvas.width, canvas.height)"
    blank = f"canvas => canvas.{area}.data.every(value => value === 0)"
    assert tab.page.locator("#canvas").evaluate(blank)


@pytest.mark.browser
def test_errors_are_announced(tab: Tab, picture: Encode) -> None:
    tab.send(picture())
    result = tab.page.locator("#result")
    result.wait_for()
    tab.send(b"no image", "notes.txt")
    tab.page.get_by_role("status").filter(has_text="notes.txt is not an image").wait_for()
    assert result.is_hidden()  # it would seem to belong to notes.txt
    tab.send(picture(codec="PNG") + bytes(2 << 20))
    tab.page.get_by_role("status").filter(has_text="max_message_mb").wait_for()


@pytest.mark.browser
def test_token(browser: Any, bundle: Path, picture: Encode, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(TOKEN)
    with served_over_http(bundle, token_file=tmp_path / "tokens") as server:
        tab = Tab(browser, server.url)
        field = tab.page.get_by_label("Token of this server")
        field.fill("wrong")
        field.press("Enter")
        tab.page.get_by_role("status").filter(has_text="token").wait_for()
        field.fill("10\u20ac")  # cannot be sent in a header
        field.press("Enter")
        assert "letters" in field.get_attribute("title")
        assert not field.evaluate("field => field.checkValidity()")
        field.fill(f" {TOKEN} ")
        tab.page.get_by_role("button", name="Use token").click()
        tab.page.get_by_text("3 classes").wait_for()
        field.wait_for(state="hidden")
        tab.send(picture(codec="PNG"))
        tab.wait_for_result()
        tab.page.close()
