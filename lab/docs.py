"""Write the generated parts of the documentation: tables of settings, and the line numbers of references to code.

    python lab/docs.py                 after changing a setting, or moving code that the pages refer to
    python lab/docs.py --check=True    changes nothing, and fails if a page differs

A table stands between <!-- settings: SCRIPT NAME ... --> and <!-- end -->; without names, it has all settings of the
script's own class. A reference is `NAME` ([PATH:LINE](LINK)), where NAME is defined in the file PATH, as train_step or
GPT.forward. Everything else is written by hand.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio import UserError  # noqa: E402
from folio.base.settings import DescribedField, Settings, describe_fields, run_script  # noqa: E402

TABLE = re.compile(r"(<!-- settings: (\S+)((?: \w+)*) -->\n).*?(<!-- end -->)", re.DOTALL)
REFERENCE = re.compile(r"`([\w.]+)`(\s+)\(\[([\w/.-]+):\d+\]\(((?:\.\./)*)\3#L\d+\)\)")


@dataclass(frozen=True)
class DocsConfig(Settings):
    check: bool = False  # True: change nothing, and fail if a page differs


def main(cfg: DocsConfig) -> None:
    for page in pages():
        name, content = page.relative_to(ROOT), page.read_text(encoding="utf-8")
        if (updated := update(content, name)) == content:
            continue
        if cfg.check:
            raise UserError(f"{name} differs from the code that it describes: run python lab/docs.py")
        page.write_text(updated, encoding="utf-8")
        print(name)


def pages() -> list[Path]:
    """The Markdown files of the repository."""
    return [*sorted(ROOT.glob("*.md")), ROOT / "lab" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def update(content: str, page: Path) -> str:
    """The content of a page with its tables and line numbers as they should be. Raises UserError."""
    try:
        content = TABLE.sub(lambda match: f"{match[1]}{settings_table(match[2], match[3].split())}{match[4]}", content)
        return REFERENCE.sub(lambda match: reference(*match.groups()), content)
    except LookupError as error:
        raise UserError(f"{page}: {error.args[0]}") from None


# --- tables of settings -----------------------------------------------------------------------------------------------


def settings_class(script: str) -> type[Settings]:
    """The settings of a script, such as tools/serve.py."""
    if not (ROOT / script).is_file():
        raise LookupError(f"there is no script {script}")
    module = import_module(script.removesuffix(".py").replace("/", "."))
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    return next(cls for cls in own if issubclass(cls, Settings))


def settings_table(script: str, names: Sequence[str]) -> str:
    """The table of these settings of a script; without names, a table of each group of its own settings."""
    cls = settings_class(script)
    described = {field.name: field for field in describe_fields(cls)}
    if missing := set(names) - described.keys():
        raise LookupError(f"{script} has no setting {min(missing)}")
    if names:
        return table_rows([described[name] for name in names])
    own = [field for name, field in described.items() if name in cls.__annotations__]
    groups = groupby(own, lambda field: field.group)
    return "\n".join(f"{f'**{group}**' if group else ''}\n\n{table_rows(list(members))}" for group, members in groups)


def table_rows(settings: Sequence[DescribedField]) -> str:
    rows = ["| setting | default | effect |", "|---|---|---|"]
    for setting in settings:
        name = setting.name if setting.is_positional else f"--{setting.name}"
        default = "" if setting.is_positional else f"`{setting.default}`"
        effect = " ".join(setting.description).replace("|", r"\|")
        rows.append(f"| `{name}` | {default} | {effect} |")
    return "\n".join(rows) + "\n"


# --- references to code -----------------------------------------------------------------------------------------------


def reference(name: str, space: str, path: str, up: str) -> str:
    line = find_definition(name, path)
    return f"`{name}`{space}([{path}:{line}]({up}{path}#L{line}))"


def find_definition(name: str, path: str) -> int:
    """The line of a Python file that defines a name. Raises LookupError."""
    if not (ROOT / path).is_file():
        raise LookupError(f"there is no file {path}")
    for defined, line in definitions(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if defined == name:
            return line
    raise LookupError(f"{path} does not define {name}")


def definitions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, int]]:
    """The functions, classes, methods, constants, and fields of a module, as GPT.forward, and their lines."""
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + node.name, node.lineno
            case ast.ClassDef():
                yield prefix + node.name, node.lineno
                yield from definitions(node, f"{prefix}{node.name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name, node.lineno


if __name__ == "__main__":
    run_script(main, DocsConfig, needs_output=False)
