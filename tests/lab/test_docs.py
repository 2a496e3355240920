"""lab/docs.py: tables of settings, and the line numbers of references to code."""

import inspect
from pathlib import Path

import pytest

from folio import UserError
from folio.base.settings import help_text, setting_names
from lab import docs
from model import GPT
from train import TrainConfig

PAGE = Path("docs/page.md")
TABLE = "before\n<!-- settings: train.py n_layer dropout -->\n<!-- end -->\nafter `train_step` of `train.py`"


def test_the_pages_are_up_to_date():
    stale = [
        page for page in docs.pages() if docs.update(page.read_text(encoding="utf-8"), page) != page.read_text("utf-8")
    ]
    assert not stale, "run python lab/docs.py"


def test_a_table_has_the_settings_of_the_help():
    lines = docs.update(TABLE, PAGE).splitlines()
    assert lines[0] == "before" and lines[-1] == TABLE.splitlines()[-1]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    assert [name for name, *_ in rows] == ["--n_layer", "--dropout"]
    for name, default, effect in rows:
        assert any(f"{name}={default}" in line and effect in line for line in help_text(TrainConfig).splitlines())
    assert docs.update("\n".join(lines), PAGE) == "\n".join(lines)
    all_settings = docs.update("<!-- settings: train.py -->\n<!-- end -->", PAGE)
    assert all_settings.count("| `--") == len(setting_names(TrainConfig)) and "**model**" in all_settings
    plan = docs.update("<!-- settings: tools/plan.py -->\n<!-- end -->", PAGE)  # a subclass of TrainConfig
    assert "`--gpus`" in plan and "`--n_layer`" not in plan


def test_line_numbers_are_those_of_the_definitions():
    line = inspect.getsourcelines(GPT.forward)[1]
    page = "`GPT.forward` ([model.py:{0}](model.py#L{0})), `POSITIONS`\n([model.py:{1}](model.py#L{1})) in model.py"
    lines = Path(docs.ROOT / "model.py").read_text(encoding="utf-8").splitlines()
    positions = next(number for number, line in enumerate(lines, 1) if line.startswith("POSITIONS: "))
    assert docs.update(page.format(1, 2), PAGE) == page.format(line, positions)


@pytest.mark.parametrize(
    "page, problem",
    [
        ("`missing` ([model.py:1](../model.py#L1))", "model.py does not define missing"),
        ("`GPT` ([mode.py:1](../mode.py#L1))", "there is no file mode.py"),
        ("<!-- settings: train.py layers -->\n<!-- end -->", "train.py has no setting layers"),
        ("<!-- settings: tools/trian.py -->\n<!-- end -->", "there is no script tools/trian.py"),
    ],
)
def test_a_page_that_names_what_does_not_exist_is_an_error(page, problem):
    with pytest.raises(UserError, match=f"docs/page.md: {problem}"):
        docs.update(page, PAGE)
