"""The view of memorized spans in a browser, compared with a search of the training text."""

from tests.support.viewers import in_browser, serving
from train import train


@in_browser
def test_spans_and_their_sources(new_viewer, tiny, text):
    cfg, training = tiny(max_iters=2, eval_interval=1), text[: int(0.9 * len(text))]
    train(cfg)
    shown = "OOO" + training[5000:5020] + "RRRR"
    with serving([cfg.out_dir], shown) as served:
        viewer = new_viewer(served).open("memorized")
        longest = [max(n for n in range(len(shown) - t + 1) if shown[t : t + n] in training) for t in range(len(shown))]
        covering = [max((n for s, n in enumerate(longest) if s <= t < s + n), default=0) for t in range(len(shown))]
        assert viewer.column("memorized-text", "longest span from here") == longest
        assert viewer.column("memorized-text", "longest span covering it") == covering
        rows = viewer.table("memorized-spans")["rows"]
        assert rows[0][0] == max(longest) and str(max(longest)) in viewer.find("memorized-facts").inner_text()
        for length, count, position, span in rows:
            assert span == shown[position : position + length] and length == longest[position]
            assert count == sum(training.startswith(span, i) for i in range(len(training)))
        for row in (0, len(rows) - 1):
            viewer.find("memorized-spans").locator("tbody tr").nth(row).click()
            table = viewer.wait().table("memorized-place")
            source = dict(zip(table["columns"], table["rows"][0], strict=True))
            assert source["text"] == rows[row][3] and source["start"] == rows[row][2]
            assert source["offset"] == training.find(source["text"]) and source["dataset"] == "verse"
        viewer.find("memorized-10").click()
        assert viewer.wait().state("token") == [10] and rows[0][3] in viewer.find("memorized-place").text_content()
        viewer.page.close()  # before the server stops
