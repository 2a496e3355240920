from folio.experiments.sweep.outcome import Outcome
from folio.experiments.sweep.results import notes, summarize
from folio.experiments.sweep.results_page import curves, sweep_page
from folio.experiments.sweep.space import Range, Values
from tests.support.charts import charts_in


def test_html_in_names_is_escaped_and_long_names_are_shortened():
    """Parts of a name became tags, and the legend of a search with six settings covered the curves."""
    space = [Values("dataset", ("a<b>&c", "d" * 40)), Values("lr_schedule", ("cosine", "wsd"))]
    params = [{"dataset": "a<b>&c", "lr_schedule": "wsd"}, {"dataset": "d" * 40, "lr_schedule": "wsd"}]
    outcomes = [
        Outcome(i, 5, p, "finished", loss=1.0 + i, text=str(i), evaluations=((9, 1.0 + i),))
        for i, p in enumerate(params)
    ]
    rows = summarize(outcomes, [5])
    groups = charts_in(curves(rows, outcomes))["curves"]["groups"]
    assert [group["name"] for group in groups] == ["0: dataset=a<b>&c, lr_schedule=wsd", "trial 1"]
    assert "d" * 40 in groups[1]["lines"][0]["name"]
    remarks = notes(rows, outcomes, [5], is_search=False)
    assert any("differ in dataset" in remark for remark in remarks)
    assert sweep_page("a", space, rows, outcomes, {}, remarks).count("differ in dataset") == 1  # at the top
    failed = [Outcome(0, 5, params[0], "failed", error="<b>")]
    remarks = notes(summarize(failed, [5]), failed, [5], is_search=False)
    html = sweep_page("<i>", space, summarize(failed, [5]), failed, {}, remarks)
    assert "failed with seed 5: &lt;b&gt;" in html and "<title>&lt;i&gt;</title>" in html and not charts_in(html)


def test_the_charts_contain_the_losses_and_the_settings():
    space = [Values("n_head", (2, 4)), Range("learning_rate", 1e-4, 1e-1, log=True)]
    params = [dict(n_head=4, learning_rate=1e-2), dict(n_head=2, learning_rate=1e-3)]
    outcomes = [
        Outcome(0, 5, params[0], "finished", loss=1.0, evaluations=((8, 2.0), (16, 1.0))),
        Outcome(0, 6, params[0], "finished", loss=1.5, evaluations=((8, 2.5), (16, 1.5))),
        Outcome(1, 5, params[1], "pruned", loss=3.0, evaluations=((8, 3.0),)),
    ]
    rows = summarize(outcomes, [5, 6])
    page = sweep_page("sweep", space, rows, outcomes, {"n_head": 0.25}, [])
    assert "<p class='summary'>Trial 0 (n_head=4, learning_rate=0.01) has the lowest validation loss: " in page
    charts = charts_in(page)
    first, second = (group["lines"] for group in charts["curves"]["groups"])
    assert [(line["x"], line["y"], line["dash"]) for line in first] == [
        ([8, 16], [2.0, 1.0], "solid"),
        ([8, 16], [2.5, 1.5], "solid"),
    ]
    assert [line["name"][-6:] for line in first] == ["seed 5", "seed 6"]
    assert second[0]["dash"] == "dotted" and second[0]["name"].endswith("seed 5, pruned")
    n_head, learning_rate, loss = charts["settings"]["axes"]  # without the pruned trial
    assert n_head["values"] == [1] and n_head["categories"] == ["2", "4"]
    assert learning_rate["values"] == [1e-2] and learning_rate["bounds"] == [1e-4, 1e-1] and learning_rate["log"]
    assert loss["values"] == [1.25] and charts["importance"]["bars"] == [["n_head", 0.25]]
