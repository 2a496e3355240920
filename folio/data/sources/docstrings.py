"""Docstrings of Python packages as documents with summaries: the first line of a docstring summarizes the rest."""

import ast
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

SUMMARY_WORDS = range(3, 31)  # shorter first lines are titles, longer ones paragraphs
MIN_WORDS = 20  # of the rest of the docstring
# matches a heading, a doctest, a field, or a directive
SECTION = re.compile(r"\w[\w ]*(:[ ]*\n|\n\s*[-=~]{3})|>>>|:\w|\.\. ")
TESTS = {"test", "tests", "testing", "conftest.py"}  # folders and files to skip
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Docstring(NamedTuple):
    """The parts and the location of a docstring."""

    module: str  # a path in the wheel, such as "networkx/algorithms/clique.py"
    name: str  # class or function in the module, such as "Graph.add_node"; "" for the module itself
    summary: str  # the first line
    document: str  # the text after the blank line

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.module.partition("/")[0]

    @property
    def folder(self) -> str:
        """The innermost package, whose docstrings resemble each other."""
        return self.module.rpartition("/")[0]

    @property
    def begins(self) -> str:
        """How the document begins: with "prose", or with a "section" such as the parameters."""
        return "section" if SECTION.match(self.document) else "prose"


def read_wheel(wheel: Path) -> Iterator[Docstring]:
    """Yield the docstrings in a wheel that have a summary and a document, in the order of modules and lines.

    The files are parsed, not imported. Files that this Python version cannot parse are skipped.
    """
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py") and "/" in name and not TESTS & {*PurePosixPath(name).parts}:
                yield from read_module(name, archive.read(name))


def read_module(module: str, source: bytes) -> Iterator[Docstring]:
    """Yield the docstrings in one file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes in docstrings
            warnings.simplefilter("ignore", DeprecationWarning)  # the same before Python 3.12
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for name, node in documented_nodes(tree):
        if parts := split_docstring(ast.get_docstring(node) or ""):
            yield Docstring(module, name, *parts)


def documented_nodes(node: ast.AST, name: str = "") -> Iterator[tuple[str, Documented]]:
    """Yield the names and the nodes of the module, classes, and functions in a syntax tree."""
    if isinstance(node, Documented):
        yield name, node
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}".strip(".") if isinstance(child, Documented) else name
        yield from documented_nodes(child, inner)


def split_docstring(text: str) -> tuple[str, str] | None:
    """Return the summary and the document, or None if the first line is not followed by a blank line (PEP 257).

    The result is also None if the number of words is not in SUMMARY_WORDS, or less than MIN_WORDS.
    """
    summary, _, rest = text.strip().partition("\n")
    if rest.partition("\n")[0].strip() or len(summary.split()) not in SUMMARY_WORDS or len(rest.split()) < MIN_WORDS:
        return None
    return summary.strip(), rest.strip()


def remove_duplicates(docstrings: Iterable[Docstring]) -> Iterator[Docstring]:
    """Yield docstrings without duplicate summaries or documents. Case, digits, and punctuation are ignored."""
    known: set[str] = set()
    for docstring in docstrings:
        parts = {re.sub(r"[\W\d_]+", " ", part).strip().lower() for part in (docstring.summary, docstring.document)}
        if not parts & known:
            yield docstring
        known |= parts
