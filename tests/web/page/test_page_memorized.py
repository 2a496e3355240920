"""Spans of the training text in a browser, compared with a search of the text: their view, and the note on a text."""

import shutil

from tests.support.viewers import Viewer
from tests.support.waiting import wait_until
from train import train


def test_spans_and_their_sources(new_viewer, serve, tiny, text):
    cfg, training = tiny(max_iters=2, eval_interval=1), text[: int(0.9 * len(text))]
    train(cfg)
    shown = "OOO" + training[5000:5020] + "RRRR"
    viewer = new_viewer(serve(cfg.out_dir, text=shown)).open("memorized")
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


def note_of(viewer: Viewer) -> str:
    return viewer.find("training-note").inner_text()


def test_a_text_of_the_training_data_is_labeled(new_viewer, serve, tiny, text, tmp_path, mixed_dir):
    """80 of the 96 characters of the first text were training text, and its loss was shown as if it were new."""
    for name, dataset in (("a", "verse"), ("b", "prose")):
        settings = dict(dataset=dataset, data_dir=mixed_dir, out_dir=str(tmp_path / name))
        train(tiny(max_iters=2, eval_interval=1, block_size=64, **settings))
    shutil.rmtree(missing := f"{mixed_dir}/prose")
    quote = text[5000:5040]
    viewer = new_viewer(serve(str(tmp_path / "a"), text=f"OOO{quote}RR")).open("tokens")
    expected = "40 of these 45 characters occur in the training data, so the loss is not that of new text."
    wait_until(lambda: note_of(viewer) == expected)
    assert viewer.find("training-note").get_attribute("class") == "quoted"
    viewer.show("story", text=quote[::-1])
    wait_until(lambda: note_of(viewer) == "")
    viewer.show("examples", text=quote)
    wait_until(lambda: note_of(viewer).startswith("40 of these 40 characters"))
    viewer = new_viewer(serve(str(tmp_path / "a"), str(tmp_path / "b"), text=quote)).open("compare")
    wait_until(lambda: "40 of these 40" in note_of(viewer))
    first, second = (viewed.name for viewed in viewer.served.provider.viewed)
    reason = f"Not compared with the training data: its training data, {missing}, does not exist"
    assert note_of(viewer).startswith(f"{first}: 40 of these") and f" {second}: {reason}" in note_of(viewer)
    viewer.show("compare", text=quote[::-1])
    wait_until(lambda: note_of(viewer).startswith(f"{second}: {reason}"))
