"""The views in a browser, compared with NumPy.

The check of a view is a function with @shows("its-id"). All checks of a model share a page.
"""

import math
import re

import numpy as np
import pytest

from folio.data.tokenizer import CharTokenizer
from tests.support.decoding import random_model
from tests.support.numpy_gpt import NumpyRun, alibi_slopes, assert_largest, assert_same, sinusoids, softmax, t5_bucket
from tests.support.repository import ROOT
from tests.support.stops import frames, rows_of, show_stop
from tests.support.viewers import Checks, Place, Viewer, assert_same_map, check_products, checks, effect_of

SELECTED = dict(head_channel=3, stream_channel=5, neuron=7, qkv_part=1, parameter="transformer.h.*.attn.c_attn.weight")
shows = Checks(checks)


def check_views(viewer: Viewer, run: NumpyRun, place: Place, **switches) -> None:
    """Compare all views with NumPy. switches: as in the state of the page."""
    for view in shows:
        viewer("state => void change(state)", {"view": view, **vars(place), **SELECTED, **switches})
        assert viewer.wait().find(f"view-{view}").count() == 1, view
        assert not viewer.page.locator(".check.wrong").count(), view
        shows.run(view, viewer, run, place)


def test_views_equal_numpy(new_viewer, served, seed):
    """After one weight was changed."""
    with served.perturbed(seed):
        viewer = new_viewer(served).open("tokens")
        check_views(viewer, viewer.run(), Place())


@pytest.mark.parametrize(
    "kind, state, switches",
    [
        ("char", dict(mask="after", mlps_off="1"), dict(mask="after", mlps_off=(1,))),
        ("bpe", dict(mask="off", scale=0), dict(mask="off", scale=False)),
        ("rotary", dict(heads_off="0.1,1.0", mlps_off="0"), dict(heads_off=((0, 1), (1, 0)), mlps_off=(0,))),
    ],
)
def test_switches_change_the_views(kind, state, switches, new_viewer, servers):
    viewer = new_viewer(servers(kind)).open("tokens")
    check_views(viewer, viewer.run(**switches), Place(), **state)


@pytest.mark.parametrize("position", ["learned", "alibi"])
def test_views_of_several_documents_equal_numpy(position, new_viewer, serve):
    """With a mask of documents. The page showed scores of the other documents, and positions from the first one."""
    tokenizer, text = CharTokenizer("abcdef", eot=True), "abc<|endoftext|>fed<|endoftext|>abcdef"
    model = random_model(1, block_size=48, vocab_size=7, n_embd=32, position=position, document_token=tokenizer.eot)
    viewer, place = new_viewer(serve(model, tokenizer=tokenizer, text=text)).open("tokens"), Place(1, 0, 10)
    run = viewer.run()
    check_views(viewer, run, place)
    for view in viewer.views():
        viewer.show(view, **vars(place)).text()
    (scores,) = rows_of(frames(show_stop(viewer, "mask", token=place.token), [0.3])[0], "bars")
    assert [bar["text"] == "\N{MINUS SIGN}\N{INFINITY}" for bar in scores["bars"]] == run.hidden_keys[10, :11].tolist()
    if position == "learned":
        assert "position 2," in show_stop(viewer, "vector", token=place.token).text()


# --- the model --------------------------------------------------------------------------------------------------------


@shows("map")
def check_map(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    config, T = run.gpt.config, len(run.ids)
    H, C, V = config.n_head, config.n_embd, config.vocab_size
    shapes = {title: list(map(int, re.findall(r"\d+", shape))) for title, _, shape, _ in viewer.table("map")["rows"]}
    assert shapes["Split into heads"] == shapes["Weighted sum of v"] == [H, T, C // H]
    assert shapes["Up"] == [T, 4 * C] and shapes["Softmax"] == [T, V]
    assert ("Softmax, no mask" if run.gpt.mask == "off" else "Mask, softmax") in shapes
    assert viewer.page.locator("#view .map a").count() >= len(shapes)
    values = viewer(
        """() => loadContext().then(valuesOf).then(values => Object.fromEntries(Object.entries(values).map(
          ([name, {shape, data}]) => [name, {shape, data: Array.from(data)}])))"""
    )
    layer, t, likely = run.layer(viewer.state("layer")[0]), place.token, np.argsort(-run.logits[place.token])[:40]
    expected = {
        "embedding": run.embeddings[t], "ln_1": layer.ln_1[t], "qkv": layer.qkv[t], "q": layer.q[:, t],
        "weights": layer.weights[:, t], "z": layer.z[:, t], "merged": layer.z[:, t], "attention": layer.attention[t],
        "ln_2": layer.ln_2[t], "preactivation": layer.preactivation[t], "hidden": layer.hidden[t], "mlp": layer.mlp[t],
        "logits": run.logits[t, likely], "probabilities": run.probabilities[t, likely],
    }  # fmt: skip
    if config.position in ("learned", "sinusoidal"):
        expected["position"] = run.positions[t]
    assert values.keys() == expected.keys()
    assert viewer.page.locator("#view .map image").count() == len(expected)
    for name, numbers in expected.items():
        assert_same(values[name]["data"], numbers.flatten())


@shows("parameters")
def check_parameters(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    rows, counts = viewer.table("parameters")["rows"], viewer.viewed.model.num_params()
    for part in {row[1] for row in rows}:
        assert sum(row[3] for row in rows if row[1] == part) == counts[part]
    assert sum(row[3] for row in rows) == counts["total"]
    assert viewer.find("params-total").inner_text() == f"{counts['total']:,}"
    values = run.gpt.parameters[f"h.{place.layer}.attn.c_attn.weight"]
    assert_same(viewer.matrix("tensor"), values)
    expected, edges = np.histogram(values.astype(np.float32), 64)
    assert viewer.column("histogram", "count") == expected.tolist()
    assert_same(viewer.column("histogram", "from"), edges[:-1])
    totals = dict(zip(viewer.column("published", "model"), viewer.column("published", "total"), strict=True))
    assert totals["this model"] == counts["total"] and totals["GPT-2 small"] == 124_439_808
    assert viewer.column("published", "attention")[-1] == 57_982_058_496  # of GPT-3


# --- the input --------------------------------------------------------------------------------------------------------


@shows("embedding")
def check_embedding(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    token, wte = run.ids[place.token], run.gpt.parameters["wte.weight"]
    parts = [run.embeddings[place.token], run.positions[place.token], run.stream[0, place.token]]
    assert_same(viewer.matrix("embedding"), np.stack(parts, 1))
    wte = wte[: viewer.viewed.tokenizer.vocab_size]
    cosine = wte @ wte[token] / np.linalg.norm(wte, axis=1) / np.linalg.norm(wte[token])
    nearest = viewer.column("nearest", "id")
    assert_same(viewer.column("nearest", "cosine"), cosine[nearest])
    assert_largest([token, *nearest], cosine)
    assert_same_map(np.array([row[2:] for row in viewer.table("vocabulary-map")["rows"]]), wte, wte)


@shows("positions")
def check_positions(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    config = run.gpt.config
    T, C, H = config.block_size, config.n_embd, config.n_head
    if config.position in ("learned", "sinusoidal"):
        table = run.gpt.positions(np.arange(T))
        unit = table / np.linalg.norm(table, axis=1, keepdims=True)
        assert_same(viewer.matrix("position-table"), table)
        assert_same(viewer.matrix("position-similarity"), unit @ unit.T)
        assert_same(viewer.column("position-row", "cosine"), unit @ unit[place.token])
    if config.position == "learned":
        assert_same(viewer.matrix("sinusoids"), sinusoids(T, C))
    elif config.position == "rotary":
        pairs = C // H // 2
        angles = np.outer(10000.0 ** (-np.arange(pairs) / pairs), np.arange(T))
        assert_same(viewer.matrix("rotary-angles"), np.cos(angles))
    elif config.position == "relative":
        biases = run.gpt.parameters["relative_bias.weight"][t5_bucket(np.arange(T))]
        assert_same(viewer.matrix("position-bias"), biases)
    elif config.position == "alibi":
        assert_same(viewer.matrix("position-bias"), -np.outer(np.arange(T), alibi_slopes(H)))


@shows("examples")
def check_examples(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    pieces = [viewer.viewed.tokenizer.piece(token) for token in run.ids]
    assert viewer.column("examples", "prefix") == ["".join(pieces[:t]) for t in range(1, len(pieces))]
    assert viewer.column("examples", "next") == pieces[1:]
    assert_same(viewer.column("examples", "loss"), run.losses)
    assert_same(viewer.column("examples", "probability"), np.exp(-run.losses))
    assert_same(viewer.column("examples", "probability of the guess"), run.probabilities[:-1].max(-1))


# --- attention --------------------------------------------------------------------------------------------------------


@shows("looking-back")
def check_looking_back(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    weights = run.layer(place.layer).weights
    assert_same(viewer.matrix("looking-back"), weights[place.head])
    assert_same(viewer.column("arcs", f"head {place.head}"), weights[place.head, place.token])
    all_heads = viewer.page.get_by_label("arcs of all heads")
    viewer.after(all_heads.check)
    for head, head_weights in enumerate(weights):
        assert_same(viewer.column("arcs", f"head {head}"), head_weights[place.token])
    viewer.after(all_heads.uncheck)


@shows("attention-row")
def check_attention_row(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer, D = run.layer(place.layer), run.gpt.config.n_embd // run.gpt.config.n_head
    scores, masked = layer.scores[place.head, place.token], run.masked_scores(place.layer, place.head)[place.token]
    products = scores * math.sqrt(D) if run.gpt.scale else scores
    bias = [] if layer.bias is None else [layer.bias[place.head, place.token]]
    columns = [products, scores, *bias, masked, np.exp(masked - masked.max()), layer.weights[place.head, place.token]]
    table = np.array([row[:1] + row[2:] for row in viewer.table("attention-row")["rows"]], dtype=np.float64)
    for shown, expected in zip(table.T, [np.arange(len(run.ids)), *columns], strict=True):
        assert_same(shown, expected)


# --- the layers -------------------------------------------------------------------------------------------------------


@shows("qkv")
def check_qkv(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer, config = run.layer(place.layer), run.gpt.config
    C, D = config.n_embd, config.n_embd // config.n_head
    q, k, v = layer.qkv[place.token].reshape(3, -1, D)[:, place.head]
    rotated = [heads[place.head, place.token] for heads in (layer.q, layer.k)]
    columns = [q, rotated[0], k, rotated[1], v] if config.position == "rotary" else [q, k, v]
    assert_same(viewer.matrix("qkv"), np.stack(columns, 1))
    assert_same(viewer.matrix("qkv-numbers"), np.stack(columns, 1))
    row = C + place.head * D + SELECTED["head_channel"]  # a component of the key
    check_products(viewer, "qkv-products", run, f"h.{place.layer}.attn.c_attn", row, layer.ln_1[place.token])


@shows("head-split")
def check_head_split(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    qkv, H = run.layer(place.layer).qkv[place.token], run.gpt.config.n_head
    assert_same(viewer.matrix("head-split-whole"), qkv.reshape(3, -1).T)
    assert_same(viewer.matrix("head-split"), qkv.reshape(3, H, -1).transpose(1, 0, 2).reshape(H, -1).T)
    assert "✓ one matrix \N{MINUS SIGN} one matrix per head" in viewer.find("head-split").inner_text()


@shows("weighted-sum")
def check_weighted_sum(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer = run.layer(place.layer)
    *values, total = viewer.table("weighted-sum")["rows"]
    count = len(values)
    assert count == (len(run.ids) if run.gpt.mask == "off" else place.token + 1)
    assert_same([row[2] for row in values], layer.weights[place.head, place.token, :count])
    assert_same([row[3:] for row in values], layer.v[place.head, :count])
    assert_same(total[3:], layer.z[place.head, place.token])
    effect = effect_of(run, layer.head_outputs[place.head, place.token], place.token)
    shown = np.array([[row[1], row[3]] for row in viewer.table("head-effect")["rows"]])
    assert_same(shown.T, [np.sort(effect)[::-1][: len(shown)], np.sort(effect)[: len(shown)]])


@shows("merge")
def check_merge(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    layer, before = run.layer(place.layer), run.stream[2 * place.layer, place.token]
    z, added, attention = layer.z[:, place.token], layer.head_outputs[:, place.token], layer.attention[place.token]
    bias = run.gpt.parameters.get(f"h.{place.layer}.attn.c_proj.bias")
    parts = [*added, *([] if bias is None else [bias]), attention, before, before + attention]
    assert_same(viewer.matrix("merge-z"), z.T)
    assert_same(viewer.matrix("merge"), np.stack(parts, 1))
    assert_same(viewer.column("merge-heads", "norm of z"), np.linalg.norm(z, axis=1))
    assert_same(viewer.column("merge-heads", "norm of output"), np.linalg.norm(added, axis=1))
    effects = np.array([effect_of(run, vector, place.token) for vector in added])
    shown = np.array([[row[4], row[6]] for row in viewer.table("merge-heads")["rows"]])
    assert_same(shown.T, [effects.max(-1), effects.min(-1)])


@shows("stream")
def check_stream(viewer: Viewer, run: NumpyRun, place: Place) -> None:
    t, states = place.token, run.stream[:, place.token]
    probabilities = softmax(run.logits_of(run.stream))  # (2L + 1, T, V)
    next_probabilities = probabilities[:, t, run.ids[t + 1]]
    assert_same(viewer.matrix("stream"), states.T)
    assert_same(viewer.matrix("stream-norms"), np.linalg.norm(run.stream, axis=-1).T)
    assert_same(viewer.column("lens", "norm"), np.linalg.norm(states, axis=-1))
    added = np.linalg.norm(np.diff(states, axis=0), axis=-1)
    assert_same(viewer.column("lens", "norm added")[1:], added)
    assert_same(viewer.column("lens", "probability of the next token"), next_probabilities)
    ranks = (probabilities[:, t] > next_probabilities[:, None]).sum(-1)
    assert_same(viewer.column("lens", "rank of the next token"), ranks)
    shown = [viewer.column("lens", f"probability {j + 1}") for j in range(5)]
    assert_same(shown, np.sort(probabilities[:, t], axis=-1)[:, ::-1][:, :5].T)
    window = viewer.table("lens-window")["rows"]
    assert t in {row[0] for row in window} and len(window) == 12 * len(states)
    expected = [probabilities[i % len(states), row[0]].max() for i, row in enumerate(window)]
    assert_same([row[4] for row in window], expected)


CHECKED_ELSEWHERE = {
    "web/page/test_page_experiments.py": "all-heads switches checkpoints compare loop cache",
    "web/page/test_page_memorized.py": "memorized",
    "web/page/test_page_playground.py": "playground",
    "web/page/test_page_story.py": "story",
    "checkpoints/test_snapshots.py": "run",
}


def test_every_view_has_a_check(new_viewer, char):
    missing = {*new_viewer(char).open("tokens").views()} - shows.keys()
    for file, views in CHECKED_ELSEWHERE.items():
        assert all(f'"{view}"' in (ROOT / "tests" / file).read_text(encoding="utf-8") for view in views.split())
        missing -= {*views.split()}
    assert not missing, 'add a function with @shows("...") for each'
