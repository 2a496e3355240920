"""Docstrings of Python packages as documents with summaries: the first line of a docstring summarizes the rest."""

import ast
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

SUMMARY_WORDS = range(3, 31)  # a shorter first line is a title, and a longer one a paragraph
LEAST_WORDS = 20  # of the rest, for something to summarize
# what a document may begin with instead of prose: a heading, a doctest, a field, or a directive
SECTION = re.compile(r"\w[\w ]*(:[ ]*\n|\n\s*[-=~]{3})|>>>|:\w|\.\. ")
TESTS = {"test", "tests", "testing", "conftest.py"}  # folders and files whose docstrings describe tests
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Docstring(NamedTuple):
    """The parts of a docstring, and where it is."""

    module: str  # a path in the wheel, such as "networkx/algorithms/clique.py"
    name: str  # of the class or function in the module, such as "Graph.add_node"; "" for the module itself
    summary: str  # the first line
    document: str  # what follows after the blank line

    @property
    def package(self) -> str:
        """The outermost package."""
        return self.module.partition("/")[0]

    @property
    def folder(self) -> str:
        """The innermost package, whose docstrings resemble one another."""
        return self.module.rpartition("/")[0]

    @property
    def begins(self) -> str:
        """What the document begins with: "prose", or a "section" such as the parameters."""
        return "section" if SECTION.match(self.document) else "prose"


def read_wheel(wheel: Path) -> Iterator[Docstring]:
    """The docstrings in a wheel that have a summary and something to summarize, by module and line.

    The files are parsed, never imported. A file that this Python cannot parse is left out.
    """
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".py") and "/" in name and not TESTS & {*PurePosixPath(name).parts}:
                yield from read_module(name, archive.read(name))


def read_module(module: str, source: bytes) -> Iterator[Docstring]:
    """The docstrings in one file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # \s in a docstring that is not raw
            warnings.simplefilter("ignore", DeprecationWarning)  # the same before Python 3.12
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for name, node in documented_nodes(tree):
        if parts := split_docstring(ast.get_docstring(node) or ""):
            yield Docstring(module, name, *parts)


def documented_nodes(node: ast.AST, name: str = "") -> Iterator[tuple[str, Documented]]:
    """The module, classes, and functions in a syntax tree, with their names."""
    if isinstance(node, Documented):
        yield name, node
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}".strip(".") if isinstance(child, Documented) else name
        yield from documented_nodes(child, inner)


def split_docstring(text: str) -> tuple[str, str] | None:
    """The summary and the document, or None if the first line is not followed by a blank one (PEP 257), or if a part
    does not have as many words as it should.
    """
    summary, _, rest = text.strip().partition("\n")
    if rest.partition("\n")[0].strip() or len(summary.split()) not in SUMMARY_WORDS or len(rest.split()) < LEAST_WORDS:
        return None
    return summary.strip(), rest.strip()


def distinct(docstrings: Iterable[Docstring]) -> Iterator[Docstring]:
    """Those whose summary and document do not repeat an earlier one, apart from case, numbers, and signs."""
    known: set[str] = set()
    for docstring in docstrings:
        parts = {re.sub(r"[\W\d_]+", " ", part).strip().lower() for part in (docstring.summary, docstring.document)}
        if not parts & known:
            yield docstring
        known |= parts
