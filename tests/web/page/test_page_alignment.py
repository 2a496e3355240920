"""The view of source and answer in a browser, compared with NumPy."""

from folio.data.tokenizer import ByteTokenizer, CharTokenizer
from tests.support.decoding import random_model
from tests.support.numpy_gpt import NumpyGPT, assert_same
from tests.support.viewers import Viewer
from tests.support.waiting import wait_until

SOURCE, PROMPT = "en: May 3, 2026 ", "en: May 3, 2026 | de:"
SIZES = dict(block_size=32, n_layer=3, n_head=2, n_embd=16)


def check_pictures(viewer: Viewer, model, ids: list[int], layer: int, head: int) -> None:
    """Check the attention to the source from the last token of the prompt on."""
    run, first, source = NumpyGPT(model).run(ids), len(PROMPT) - 1, len(SOURCE)
    weights = [run.layer(index).weights[:, first:, :source] for index in range(3)]
    assert_same(viewer.matrix("alignment"), weights[layer][head])
    coverage = {(index, h): weights[index][h].max(0).mean() for index in range(3) for h in range(2)}
    rows = viewer.table("alignment-heads")["rows"]
    assert_same([row[2] for row in rows], sorted(coverage.values(), reverse=True))
    assert_same([row[2] for row in rows], [coverage[row[0], row[1]] for row in rows])


def test_the_matrix_grows_while_the_answer_is_generated(new_viewer, serve, seed):
    tokenizer = CharTokenizer.of(PROMPT + "abcdefgh")  # no end-of-text token, so the context becomes full
    model = random_model(seed, vocab_size=tokenizer.vocab_size, **SIZES)
    ids = tokenizer.encode(PROMPT).tolist()
    viewer = new_viewer(serve(model, tokenizer=tokenizer)).open("alignment", text=PROMPT, layer=1, head=1)
    assert "alignment" in viewer.views()
    check_pictures(viewer, model, ids, 1, 1)
    sizes = viewer.redrawn("document.querySelector('[data-testid=alignment]').table().rows.length")
    viewer.page.get_by_text("Generate the answer").click()
    while len(ids) < SIZES["block_size"]:
        ids.append(int(NumpyGPT(model).run(ids).logits[-1].argmax()))
    rows = len(ids) - len(PROMPT) + 1
    wait_until(lambda: sizes()[-1:] == [rows])
    viewer.wait()
    assert sizes() == [*range(1, rows + 1)]
    assert viewer.state("ids") == [",".join(map(str, ids))]
    check_pictures(viewer, model, ids, 1, 1)
    viewer.find("alignment-heads").locator("tbody tr").first.click()  # the head with the largest coverage
    layer, head, _ = viewer.wait().table("alignment-heads")["rows"][0]
    assert viewer.state("layer", "head") == [layer, head]
    check_pictures(viewer, model, ids, layer, head)
    box = viewer.find("alignment").locator(".heat canvas").bounding_box()
    for selected in (len(ids) - 2, len(SOURCE) - 1):  # the row's token, then the column's
        viewer.page.mouse.click(box["x"] + box["width"] - 9, box["y"] + box["height"] - 5 - 2 * 24)
        assert viewer.wait().state("token") == [selected]


def test_generating_stops_at_the_end_of_text_and_when_the_page_changes(new_viewer, serve, seed):
    tokenizer = ByteTokenizer()
    model = random_model(seed, vocab_size=tokenizer.vocab_size, **SIZES)
    ids = tokenizer.encode(PROMPT).tolist()
    viewer = new_viewer(serve(model, tokenizer=tokenizer)).open("alignment", text=PROMPT)
    for other in ({"view": "tokens"}, {"text": "other", "ids": ""}):
        viewer("""async ([ids, other]) => {
          const generating = continueText(ids, {temperature: 0});
          await change(other);
          await generating;
        }""", [ids, other])  # fmt: skip
        assert viewer.state(*other) == [*other.values()]
    assert viewer.state("text", "ids") == ["other", ""] and "alignment" not in viewer.views()
    viewer.show("alignment", text="other")
    assert viewer.pictures() == [] and viewer.page.get_by_text("no source").is_visible()
    answers = {PROMPT + " a | b: c": 9, SOURCE + "| x": 2}  # with | and :, and without a colon
    for text, rows in answers.items():
        assert viewer.show("alignment", text=text).matrix("alignment").shape == (rows + 1, len(SOURCE))
    transformer = viewer.viewed.model.transformer  # changed to predict the end of text
    transformer.ln_f.weight.data.zero_()
    transformer.ln_f.bias.data = 100 * transformer.wte.weight.data[tokenizer.eot]
    transformer.wte.weight.data[tokenizer.eot] *= 2
    viewer.served.forget()
    viewer.after(viewer.open("alignment", text=PROMPT).page.get_by_text("Generate the answer").click)
    assert viewer.column("alignment", "answer \\ source") == ["end"]
    assert viewer.state("ids") == [",".join(map(str, ids))]
