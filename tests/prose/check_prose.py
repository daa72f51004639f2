"""Check the wording of docstrings, messages, comments and pages against `banned.toml`.

Usage: check_prose.py [FILE OR FOLDER ...]. Without arguments, check all Python files and pages that
git does not ignore. Each finding is printed as `file:line: "words": remedy`. The exit code is 1 if
there is a finding.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

RULES = Path(__file__).with_name("banned.toml")
# Generated code, and benchmark records, which stay as they were written.
_EXCLUDED = re.compile(r"_pb2|benchmarks/results/.+-\d{6}\.md$")
_DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Calls whose string arguments a user reads, besides constructors of exceptions.
_MESSAGE_CALLS = {"fail", "debug", "info", "warning", "error", "exception", "critical", "echo"}
# Fenced and indented blocks on a page.
_BLOCK = re.compile(r"^(```+).*?^\1|^ {4}(?! *[-*\d])[^\n]*", re.MULTILINE | re.DOTALL)
# Spans, examples, link targets, HTML tags and addresses.
_CODE = re.compile(r"`[^`]*`|^ *>>>.*|\]\([^)]*\)|<[^>\n]*>|https?://\S+", re.MULTILINE)


class Passage(NamedTuple):
    """Text that a person reads, and its first line in the file."""

    # `docstring`, `heading`, `message`, `comment` or `page`.
    kind: str
    line: int
    text: str


class Rule(NamedTuple):
    """Banned construction: the kinds of passage it applies to, and the remedy."""

    kinds: frozenset[str]
    pattern: re.Pattern[str]
    remedy: str


def load_rules(path: Path = RULES) -> list[Rule]:
    """Read the ban list. A space in a pattern matches any white space, line breaks included."""
    return [
        Rule(
            frozenset(entry["kinds"]),
            re.compile(entry["pattern"].replace(" ", r"\s+")),
            f"{entry['reason']}; {entry['instead']}",
        )
        for entry in tomllib.loads(path.read_text())["rule"]
    ]


def passages_in_python(source: str) -> Iterator[Passage]:
    """Find docstrings, messages, comments and strings below attributes."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS) and node.body and _is_string(node.body[0]):
            yield _passage("docstring", node.body[0].value)
        if isinstance(node, ast.Module | ast.ClassDef):
            is_config = any("Config" in ast.unparse(b) for b in getattr(node, "bases", ()))
            kind = "docstring" if is_config else "attribute string"
            for before, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(before, ast.Assign | ast.AnnAssign) and _is_string(after):
                    yield _passage(kind, after.value)
        if isinstance(node, ast.Call):
            yield from (_passage("message", text) for text in _messages_of(node))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = _without(_CODE, token.string.lstrip("#! :"))
            yield Passage("comment", token.start[0], text)


def _is_string(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _messages_of(call: ast.Call) -> Iterator[ast.expr]:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in _MESSAGE_CALLS or name.endswith(("Error", "Exception", "BadParameter")):
        yield from (a for a in call.args[:1] if isinstance(a, ast.Constant | ast.JoinedStr))
    yield from (k.value for k in call.keywords if k.arg in ("help", "short_help"))


def _passage(kind: str, node: ast.expr) -> Passage:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(
        part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "{}"
        for part in parts
    )
    return Passage(kind, node.lineno, _without(_CODE, text))


def passages_in_page(source: str) -> Iterator[Passage]:
    """Find headings and the text of a Markdown page, code left out."""
    text = _without(_CODE, _without(_BLOCK, source))
    yield Passage("page", 1, text)
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            yield Passage("heading", number, line.lstrip("# "))


def _without(code: re.Pattern[str], text: str) -> str:
    """Replace code by one letter, and keep its line breaks so that line numbers stay right."""
    return code.sub(lambda match: "x" + "\n" * match[0].count("\n"), text)


def findings_in(path: Path, rules: Iterable[Rule]) -> Iterator[str]:
    """Check one file, and describe each finding in a line."""
    read = passages_in_page if path.suffix == ".md" else passages_in_python
    for passage in read(path.read_text()):
        for rule in rules:
            if passage.kind in rule.kinds:
                for match in rule.pattern.finditer(passage.text):
                    line = passage.line + passage.text.count("\n", 0, match.start())
                    words = " ".join(match[0].split())[:60]
                    yield f'{path}:{line}: "{words}": {rule.remedy}'


def main(arguments: list[str]) -> int:
    """Check files and folders, print the findings, and return the exit code."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *arguments]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [Path(p) for p in listed if p.endswith((".py", ".md")) and not _EXCLUDED.search(p)]
    rules = load_rules()
    findings = [line for path in paths if path.exists() for line in findings_in(path, rules)]
    print(*findings, sep="\n", end="\n" if findings else "")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
