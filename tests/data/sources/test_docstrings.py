import inspect
from pathlib import Path

from folio.data.sources.docstrings import Docstring, read_module, read_wheel, remove_duplicates, split_docstring
from tests.support.hub import fake_wheel

PROSE = "It begins with prose, which has as many words as the minimum for the document of a docstring: exactly 20."
SOURCE = f'''
"""The summary of the module.

{PROSE}
"""

class A:
    """Too short.

    {PROSE}
    """

    def f(self):
        r"""Return \\d of something.

        Parameters
        ----------
        x : int
            {PROSE}
        """

        def inner():
            """One line of the inner function.

            {PROSE}

                indented
            """

async def g():
    """A first paragraph that has
    two lines is not a summary.

    {PROSE}
    """

def h():
    """Nothing follows here to summarize.

    Only this.
    """
'''


def test_docstrings_match_inspect():
    """The oracle runs the module and reads the docstrings of its objects."""
    names: dict = {}
    exec(compile(SOURCE, "m", "exec"), names)
    docstrings = {docstring.name: docstring for docstring in read_module("p/q/m.py", SOURCE.encode())}
    assert list(docstrings) == ["", "A.f", "A.f.inner"]
    for name, expected in (("", names["__doc__"]), ("A.f", inspect.getdoc(names["A"].f))):
        assert "\n\n".join(docstrings[name][2:]) == inspect.cleandoc(expected)
    assert docstrings["A.f.inner"].document == f"{PROSE}\n\n    indented"
    assert [docstring.begins for docstring in docstrings.values()] == ["prose", "section", "prose"]
    assert (docstrings["A.f"].package, docstrings["A.f"].folder) == ("p", "p/q")


def test_splitting_docstrings_into_summary_and_document():
    assert split_docstring(f"Return the answer.\n   \n{PROSE}\n") == ("Return the answer.", PROSE)
    for text in ("", "Return the answer.", f"Return it.\n\n{PROSE}", f"{'word ' * 31}\n\n{PROSE}"):
        assert split_docstring(text) is None
    for document in (f"\n{PROSE}", "\n\nIt is 42."):
        assert split_docstring(f"Return the answer.{document}") is None


def test_sections():
    for document in ("Args:\n  x: a", "Parameters\n----------\nx", ">>> f()", ":param x: a", ".. note:: a"):
        assert Docstring("", "", "", document).begins == "section"
    for document in ("Args are: none", "Parameters\nare", "See: that.", "... and so on"):
        assert Docstring("", "", "", document).begins == "prose"


def test_tests_and_broken_files_in_a_wheel_are_skipped(tmp_path: Path):
    names = ("a/z.py", "a/b.py", "a/tests/test_b.py", "a/conftest.py", "setup.py", "a/b.txt")
    files = dict.fromkeys(names, SOURCE) | {"a/broken.py": "def f(:", "a/null.py": "\0"}
    files["a/imports.py"] = 'raise SystemExit("a file was imported")'
    docstrings = list(read_wheel(fake_wheel(tmp_path / "a.whl", files, root="")))
    expected = [(module, name) for module in ("a/b.py", "a/z.py") for name in ("", "A.f", "A.f.inner")]
    assert [(docstring.module, docstring.name) for docstring in docstrings] == expected
    assert [(docstring.module, docstring.name) for docstring in remove_duplicates(docstrings)] == expected[:3]


def test_duplicates_are_removed_independent_of_digits_and_case():
    texts = [("Add 2 numbers.", "Text a."), ("Add 3 Numbers!", "Text b."), ("Other one.", "text A"), ("Third.", "c")]
    docstrings = [Docstring("m", str(k), *parts) for k, parts in enumerate(texts)]
    assert [docstring.name for docstring in remove_duplicates(docstrings)] == ["0", "3"]
