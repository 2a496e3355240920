from folio.experiments.sweep.results import notes, summarize
from folio.experiments.sweep.results_page import curves, sweep_page
from folio.experiments.sweep.space import Values
from folio.experiments.sweep.study import Outcome
from tests.support.charts import charts_in


def test_names_with_html_and_long_ones_are_shown_as_they_are():
    """plotly took parts of a name for tags, and the legend of a search with six settings covered the curves."""
    space = [Values("dataset", ("a<b>&c", "d")), Values("lr_schedule", ("cosine", "wsd"))]
    params = [{"dataset": "a<b>&c", "lr_schedule": "wsd"}, {"dataset": "d" * 40, "lr_schedule": "wsd"}]
    outcomes = [Outcome(i, 5, p, "finished", loss=1.0 + i, evaluations=((9, 1.0 + i),)) for i, p in enumerate(params)]
    rows = summarize(outcomes, [5])
    groups = charts_in(curves(rows, outcomes))["curves"]["groups"]
    assert [group["name"] for group in groups] == ["0: dataset=a<b>&c, lr_schedule=wsd", "trial 1"]
    assert "d" * 40 in groups[1]["lines"][0]["name"]
    remarks = notes(rows, outcomes, [5], is_search=False)
    assert "With another dataset, a loss is that of other text, and cannot be compared." in remarks
    failed = [Outcome(0, 5, params[0], "failed", error="<b>")]
    remarks = notes(summarize(failed, [5]), failed, [5], is_search=False)
    html = sweep_page("<i>", space, summarize(failed, [5]), failed, {}, remarks)
    assert "failed with seed 5: &lt;b&gt;" in html and "<title>&lt;i&gt;</title>" in html and not charts_in(html)
