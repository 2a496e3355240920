"""The view of memorized spans in a browser, against a search of the training text."""

from tests.support.viewers import in_browser, serving
from train import train


@in_browser
def test_spans_and_their_places_are_those_of_the_training_text(new_viewer, tiny, text):
    cfg, training = tiny(max_iters=2, eval_interval=1), text[: int(0.9 * len(text))]
    train(cfg)
    shown = "OOO" + training[5000:5020] + "RRRR"
    with serving([cfg.out_dir], shown) as served:
        viewer = new_viewer(served).open("memorized")
        longest = [max(n for n in range(len(shown) - t + 1) if shown[t : t + n] in training) for t in range(len(shown))]
        covering = [max((n for s, n in enumerate(longest) if s <= t < s + n), default=0) for t in range(len(shown))]
        assert viewer.column("memorized-text", "longest span from here") == longest
        assert viewer.column("memorized-text", "longest span that covers it") == covering
        rows = viewer.table("memorized-spans")["rows"]
        assert rows[0][0] == max(longest) and str(max(longest)) in viewer.find("memorized-facts").inner_text()
        for length, count, position, span in rows:
            assert span == shown[position : position + length] and length == longest[position]
            assert count == sum(training.startswith(span, i) for i in range(len(training)))
        for row in (0, len(rows) - 1):
            viewer.find("memorized-spans").locator("tbody tr").nth(row).click()
            place = viewer.wait().table("memorized-place")
            place = dict(zip(place["columns"], place["rows"][0], strict=True))
            assert place["text"] == rows[row][3] and place["start"] == rows[row][2]
            assert place["offset"] == training.find(place["text"]) and place["dataset"] == "verse"
        viewer.find("memorized-10").click()
        assert viewer.wait().state("token") == [10] and rows[0][3] in viewer.find("memorized-place").text_content()
        viewer.page.close()  # before its server
