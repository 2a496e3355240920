// Views of experiments: all heads, ablations, and comparisons.

// --- all heads ---

const HEAD_SCORES = { // see head_scores in folio/decoding/trace.py
  previous: "mean weight of the previous token: 1 for a previous-token head",
  first: "mean weight of the first token, to which inactive heads often attend",
  itself: "mean weight of the token itself",
  prefix: "prefix matching: weight of tokens that followed the same token before, on repeated random tokens; high for "
    + "induction heads",
  entropy: "mean entropy of the weights in nats: 0 for one token, ln n for n tokens with equal weights",
  distance: "mean distance of the keys, in tokens",
  offset: "the distance with the most weight, in tokens: 1 for the previous token, 2 for the one before it",
};
const MAX_HEAD_ROWS = 200; // in the table; the CSV has all

defineView({
  id: "all-heads", title: "All heads",
  about: "Rows are queries, columns are keys; cells with a stronger color have more weight. Heads specialize: sort "
    + "them by a score, and click one to open it.",
  draw(box, {overview: {tensors}, config: {n_head}, layer, head}) {
    const names = Object.keys(HEAD_SCORES), columns = ["layer", "head", ...names], key = columns.indexOf(state.sort);
    const rows = Array.from(tensors.score_previous.data, (_, i) =>
      [Math.floor(i / n_head), i % n_head, ...names.map(name => tensors[`score_${name}`].data[i])]);
    if (key >= 2) rows.sort((a, b) => b[key] - a[key]);
    const open = ([layer, head]) => change({layer, head, view: "looking-back"});
    const isSelected = row => row[0] === layer && row[1] === head;
    box.append(
      controls("sort by", ...["layer", ...names].map(name => element("button", {
        class: name === state.sort && "chosen", "aria-pressed": String(name === state.sort), title: HEAD_SCORES[name],
        click: () => change({sort: name}),
      }, name))),
      picture("all-heads", counted(rows.length, "head"), () => ({columns, rows}),
        headGrid(rows, tensors.thumbnails, key, isSelected, open),
        key >= 2 && `${state.sort}: ${HEAD_SCORES[state.sort]}.`),
      tablePicture("head-scores", "Scores", columns, rows,
        {max: MAX_HEAD_ROWS, selected: i => isSelected(rows[i]), click: i => open(rows[i])}));
  },
}, {sort: "layer"});

// Thumbnails with buttons, drawn on one canvas, because a thousand canvases are slow. Sorted by layer, each row is a
// layer.
function headGrid(rows, thumbnails, key, isSelected, open) {
  const perLayer = thumbnails.shape[1], room = fitWidth(2000), caption = key < 2 ? 14 : 27;
  const width = rows.length > 300 ? 44 : rows.length > 40 ? 70 : clamp(Math.floor(room / perLayer), 102, 200);
  const columns = key < 2 ? perLayer : Math.floor(room / width);
  const size = width - 6, height = width + caption;
  const canvas = element("canvas", {width: columns * width, height: Math.ceil(rows.length / columns) * height});
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  return scrolling(div("head-grid", canvas, reachByKeys(rows.map((row, i) => {
    const [layer, head] = row, x = i % columns * width, y = Math.floor(i / columns) * height;
    const score = row[key], decimals = Number.isInteger(score) || score >= 10 ? 0 : 2;
    context.drawImage(thumbnail(thumbnails, layer, head), x, y, size, size);
    return element("button", {
      testid: `head-${layer}-${head}`, name: "head", class: isSelected(row) && "selected",
      "aria-label": `layer ${layer}, head ${head}`,
      style: {
        left: `${x}px`, top: `${y}px`, width: `${size}px`, height: `${size + caption}px`, paddingTop: `${size}px`,
      },
      click: () => open(row),
    }, `${layer}.${head}`, key >= 2 && [element("br"), score.toFixed(decimals)]);
  }), rows.findIndex(isSelected), columns)));
}

// --- switches ---

const MASKS = [["before", "before the softmax: −∞ (as trained)"],
  ["after", "after the softmax: 0 (rows sum to less than 1)"],
  ["off", "off: attend to the future"]];
const MAX_LIST_TOKENS = 300; // larger vocabularies have a text field instead of a list

defineView({
  id: "switches", title: "Switch parts off",
  about: "Remove a part to see what it contributes. Switches apply to all views until they are reset.",
  async draw(box, context) {
    const {ids, token, config, model} = context, original = originalIds(ids), originalId = original[token];
    const baseline = await ask(question("overview", original, {...NO_SWITCHES, scale: true}));
    const isUnchanged = Object.entries(NO_SWITCHES).every(([name, value]) => state[name] === value)
      && original.every((id, t) => id === ids[t]);
    const title = `replace token ${token}, ${visible(pieces[originalId])}, by`, testid = {testid: "switch-token"};
    const tokens = pieces.slice(0, model.vocab_size).map((piece, id) => [id, `${visible(piece)} (${id})`]);
    const rows = range(config.n_layer).map(l => element("tr", {}, element("th", {}, `layer ${l}`),
      range(config.n_head).map(h => part("heads_off", `${l}.${h}`, h, `switch-head-${l}-${h}`)),
      part("mlps_off", `${l}`, "MLP", `switch-mlp-${l}`)));
    box.append(
      controls(select("mask", MASKS, state.mask, mask => change({mask}), {testid: "switch-mask"}),
        checkbox("scale", "divide scores by √D", {testid: "switch-scale"})),
      controls(tokens.length <= MAX_LIST_TOKENS ? select(title, tokens, ids[token], replace, testid)
        : tokenField(title, model.vocab_size, replace)),
      isUnchanged ? element("p", {testid: "nothing-changed"},
        "Nothing is changed yet. Press a head or an MLP to see the loss of each token without it.")
        : element("p", {}, "Press a head or an MLP to remove or restore its output."),
      scrolling(element("table", {class: "parts", role: "grid", "aria-label": "Parts of the model"}, rows)));
    reachByKeys([...box.querySelectorAll(".parts button")], 0, config.n_head + 1);
    if (ids.length > 1 && !isUnchanged) {
      box.append(differencePicture("switch-differences", context, "as trained", baseline, "changed", context.overview));
    }
    box.append(...await entropyPictures(context));

    function part(list, name, text, id) {
      const off = state[list].split(",").filter(Boolean), isOff = off.includes(name);
      return element("td", {}, element("button", {
        class: isOff && "off", "aria-pressed": String(isOff), testid: id,
        click: () => change({[list]: (isOff ? off.filter(other => other !== name) : [...off, name]).join(",")}),
      }, text));
    }

    function replace(id) {
      if (pieces[parseInt(id)] === undefined) return;
      const others = replacements(ids).filter(([t]) => t !== token).map(([t, from]) => [t, from, ids[t]]);
      const entries = Number(id) === originalId ? others : [...others, [token, originalId, id]];
      change({ids: ids.with(token, id).join(","), token, replaced: entries.map(entry => entry.join(":")).join(",")});
    }
  },
});

const MAX_SUGGESTIONS = 30;

// A text field for a token, with suggestions: tokens whose text begins with the typed text, the shortest first. A space
// is shown as ␣. Also accepts the text of a token, or an id.
function tokenField(title, count, choose) {
  const spaced = text => text.replaceAll(" ", "␣"), name = id => `${spaced(visible(pieces[id]))} (${id})`;
  const suggestions = element("datalist", {id: "suggestions"});
  const find = value => range(count).find(id => name(id) === value || spaced(pieces[id]) === value)
    ?? (/^\d+$/.test(value) && Number(value) < count ? Number(value) : undefined);

  function suggest({target}) {
    const text = target.value.replace(/^ +/, spaced), starts = [text, `␣${text}`];
    if (text !== target.value) target.value = text;
    target.setCustomValidity("");
    const ids = text ? range(count).filter(id => starts.some(start => spaced(pieces[id]).startsWith(start))) : [];
    suggestions.replaceChildren(...ids.sort((a, b) => pieces[a].length - pieces[b].length).slice(0, MAX_SUGGESTIONS)
      .map(id => element("option", {value: name(id)})));
  }

  function select({target}) {
    const id = find(target.value);
    if (id !== undefined) return choose(id);
    target.setCustomValidity(target.value && "No token has this text: choose one from the list, or type its id.");
    target.reportValidity();
  }

  return element("label", {}, `${title} `, element("input", {testid: "switch-token", type: "text", size: 24,
    list: suggestions.id, placeholder: "type its text, or its id", input: suggest, change: select}), suggestions);
}

// The tokens, colored by the differences of their losses in two overviews.
function differencePicture(id, {labels, names, token}, name, overview, otherName, otherOverview) {
  const [losses, others] = [overview, otherOverview].map(({tensors}) => Array.from(tensors.loss.data));
  const n = Math.min(losses.length, others.length), rows = range(n).map(i =>
    [i + 1, labels[i + 1], losses[i], others[i], others[i] - losses[i]]);
  const differences = rows.map(row => row[4]), difference = mean(differences);
  const error = Math.sqrt(mean(differences.map(x => (x - difference) ** 2)) / (n - 1));
  const max = Math.max(maxAbs(differences), 0.01), readout = readoutLine();
  const text = tokenStrip(labels, token, t => {
    const x = differences[t - 1];
    return {
      style: onColor("signed", x / max),
      pointerenter: () => readout.textContent = `${names[t]}: ${x === undefined ? "–" : signed(x)}`,
    };
  });
  const [before, after] = [2, 3].map(column => short(mean(rows.map(row => row[column]))));
  const interval = signed(difference) + (n > 1 ? ` ± ${short(error)}` : "");
  return picture(id, `Loss, ${otherName} − ${name}: ${interval} nats per token`,
    () => ({columns: ["position", "token", name, otherName, "difference"], rows}),
    div("", text, colorBar("signed", max), readout),
    `Mean loss ${otherName}: ${after}, ${name}: ${before}; ±: standard error. Tokens are colored by their `
      + "differences.");
}

// The entropy of each row of the selected head, with and without 1/sqrt(D), and the row sums.
async function entropyPictures(context) {
  const {labels, layer, head, config, token} = context, D = config.n_embd / config.n_head;
  const answers = await Promise.all([true, false].map(scale => context.ask("head", {layer, head, scale})));
  const [divided, plain] = answers.map(({tensors: {weights}}) => labels.map((_, t) => rowOf(weights, t)));
  const entropy = row => entropyOf(Array.from(row, w => w / sumOf(row)));
  const chart = {
    x: "query", panels: [{title: "", height: 190, from_zero: true}],
    current: token, pick: {values: range(labels.length), choose: selectToken},
  };
  return [
    headPicker(context), chartPicture("row-entropies", {
      ...chart, title: `Entropy (nats) of the rows of head ${layer}.${head}`,
      groups: [oneLine("divided by √D", divided.map(entropy)), oneLine("not divided", plain.map(entropy))],
    }, `Without the division, scores are √${D} times as large: few tokens have most of the weight (low entropy), and `
      + "the gradient, w (1 − w), is nearly 0. This is why Vaswani et al. divide by √D."),
    ...state.mask === "after" ? [chartPicture("row-sums", {
      ...chart, title: "Sum of the weights of each row",
      groups: [oneLine("sum", (state.scale ? divided : plain).map(sumOf))],
    }, "The weight of the future is lost. With −∞ before the softmax, each row sums to 1.")] : []];
}

// --- compare ---

defineView({
  id: "compare", title: "Compare", available: isComparable,
  about: "Two models, or two checkpoints of a run, on the same text.",
  async draw(box, context) {
    const {names, token, layer, head, model, overview, other} = context, {checkpoints, step} = other.model;
    const first = info.models.length === 2 ? model.name : `step ${short(shownStep())}`;
    if (checkpoints.length > 1) {
      box.append(controls(slider("second:", {
        min: 0, max: checkpoints.length - 1, value: checkpoints.indexOf(other.step < 0 ? step : other.step),
        read: i => `step ${short(checkpoints[i])}`,
        change: event => change({other_step: checkpoints[event.target.value]}),
      })));
    }
    box.append(element("p", {}, `First: ${first}. Second: ${other.name}.`));
    if (other.ids.length > 1) {
      box.append(differencePicture("compare-strip", context, "second", other.overview, "first", overview));
    }
    if (token < other.ids.length) box.append(await distributionPicture());
    box.append(headPicker(context), await headPicture());

    async function distributionPicture() {
      const answers = await Promise.all([context, other].map(side => side.ask("logits", {token})));
      const [p, q] = answers.map(({tensors: {logits}}) => softmax(logits.data.slice(0, model.vocab_size)));
      const rows = Array.from(p, (x, id) => [id, pieces[id], x, q[id], x - q[id]]);
      rows.sort((a, b) => Math.max(b[2], b[3]) - Math.max(a[2], a[3]));
      return tablePicture("compare-distribution", `The next token after ${tokenAt(context, token)}`,
        ["id", "token", "first", "second", "difference"], rows,
        {max: SHOWN_TOKENS, selected: i => rows[i][0] === context.ids[token + 1]});
    }

    async function headPicture() {
      const answers = await Promise.all([context, other].map(({ask, model: {config}}) =>
        ask("head", {layer: Math.min(layer, config.n_layer - 1), head: Math.min(head, config.n_head - 1)})));
      const [{data: a}, {data: b}] = answers.map(({tensors: {weights}}) => weights), T = other.ids.length;
      const data = b.map((w, k) => a[Math.floor(k / T) * names.length + k % T] - w), labels = names.slice(0, T);
      const shape = [T, T], max = maxAbs(data);
      return matrixPicture("compare-head", `Head ${layer}.${head}: first − second`, {shape, data},
        ["query", labels], ["key", labels], {scale: "signed", max, click: selectToken});
    }
  },
});
