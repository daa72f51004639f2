"""MkDocs hook: build the site from the Markdown pages of all folders of the repository.

If a page links to a source file or a folder, the site gets a page that shows the file's source or
the folder's list of files.
"""

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "build" / "docs-package" / "maskrcnn_trt"
# Target of a Markdown link to a file or folder (no scheme such as https:), without its anchor.
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(?=[)#])")
# Files that a browser displays or saves. All other link targets are shown as source.
_DOWNLOADS = {".ipynb", ".json", ".png", ".svg"}
_LANGUAGES = {".proto": "protobuf", ".py": "python", ".toml": "toml", ".yaml": "yaml"}
# Markdown files without a page on the site: templates, which GitHub shows only in its forms.
_NO_PAGES = re.compile(r"^\.github/(?!SECURITY)")
# Pages that the navigation omits: benchmark records, which benchmarks/results/README.md lists.
_RECORD = re.compile(r"^benchmarks/results/.+-\d{6}\.md$")


def on_startup(**_: object) -> None:
    """Copy the package's Python files to a separate folder, from which mkdocstrings reads them."""
    # mkdocstrings searches all folders within the package's folder. In a checkout, this folder can
    # contain .venv.
    shutil.rmtree(PACKAGE, ignore_errors=True)
    for path in _tracked_files():
        if path.endswith(".py") and not path.startswith((".", "docs/", "tests/")):
            copy = PACKAGE / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, copy)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return all files of the site.

    They are the theme's files, the repository's Markdown pages, and the other files and folders of
    the repository to which pages link:

    - Images, JSON files and notebooks are copied.
    - Any other file gets a page that shows its source.
    - A folder gets a page that lists its files. These files are added to the site, too.
    """
    tracked = _tracked_files()
    pages = [path for path in tracked if path.endswith(".md") and not _NO_PAGES.match(path)]
    site = Files([file for file in files if file.src_dir != config.docs_dir])
    for path in pages:
        hidden = InclusionLevel.NOT_IN_NAV if _RECORD.match(path) else InclusionLevel.INCLUDED
        site.append(_file(config, path, hidden, abs_src_path=str(ROOT / path)))
    pending = [target for path in pages for target in _targets(path)]
    while pending:
        target = pending.pop()
        uri = _uri(target)
        if site.get_file_from_path(uri) is not None or not (ROOT / target).exists():
            continue
        if (ROOT / target).is_dir():
            members = [path for path in tracked if str(PurePosixPath(path).parent) == target]
            pending += members
            site.append(_file(config, uri, content=_listing(target, members)))
        elif uri == target:
            site.append(_file(config, uri, abs_src_path=str(ROOT / target)))
        else:
            site.append(_file(config, uri, content=_source(target)))
    return site


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's Markdown in which links to repository paths are replaced by site links."""
    path = page.file.src_uri
    if not (ROOT / path).exists():  # a page that `on_files` generated
        return markdown
    return _LINK.sub(lambda link: _relative(_uri(_resolved(path, link[1])), path), markdown)


def _tracked_files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(path for path in listed.splitlines() if (ROOT / path).exists())


def _file(
    config: MkDocsConfig,
    uri: str,
    inclusion: InclusionLevel = InclusionLevel.NOT_IN_NAV,
    *,
    content: str | None = None,
    abs_src_path: str | None = None,
) -> File:
    file = File.generated(
        config, uri, content=content, abs_src_path=abs_src_path, inclusion=inclusion
    )
    file.generated_by = "pages.py"
    return file


def _targets(page: str) -> Iterator[str]:
    """Yield the paths that the Markdown file `page` links to, relative to the repository's root."""
    for link in _LINK.findall((ROOT / page).read_text()):
        yield _resolved(page, link)


def _resolved(page: str, link: str) -> str:
    return os.path.normpath(PurePosixPath(page).parent / link)


def _relative(uri: str, page: str) -> str:
    return os.path.relpath(uri, PurePosixPath(page).parent)


def _uri(target: str) -> str:
    """Return the path within the site at which a repository's file or folder is shown."""
    if (ROOT / target).is_dir():
        return str(PurePosixPath(target, "README.md"))
    if not (ROOT / target).exists() or Path(target).suffix in {".md", *_DOWNLOADS}:
        return target
    return f"{target}.md"


def _source(path: str) -> str:
    text = (ROOT / path).read_text()
    fence = "`" * (2 + max(map(len, re.findall(r"`+", text)), default=1))
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"{_heading(path)}{fence} {language}\n{text}\n{fence}\n"


def _listing(folder: str, members: list[str]) -> str:
    rows = []
    for path in members:
        summary = ""
        if path.endswith(".py"):
            docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
            summary = docstring.partition("\n")[0].replace("|", "\\|")
        rows.append(f"| [`{Path(path).name}`]({Path(_uri(path)).name}) | {summary} |")
    return f"{_heading(f'{folder}/')}| file | content |\n|---|---|\n" + "\n".join(rows) + "\n"


def _heading(path: str) -> str:
    # The search finds pages and the API, not sources.
    return f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
