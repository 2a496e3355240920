// Which spans of a text occur in the training data, and where: folio/evaluation/memorization.py in a file that holds its index.
//
// The index has a code for each training token (1, 2, ... for the tokens that occur; 0 for the end of a document or of
// a shard), and the suffix array of the codes: all positions, in the order of what begins there. A binary search in it
// finds the longest match of any text.
//
// Dimensions: T time, N indexed tokens.

const CODES = {uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array};

class TrainingSearch {
  // The search whose index is among the bytes of a file; see pack_index in folio/web/html_file.py.
  static read(index, bytes, tokenizer) {
    const {codes: {dtype, offset, size}, suffixes, end} = index, kind = CODES[dtype];
    const codes = new kind(bytes.slice(offset, offset + size * kind.BYTES_PER_ELEMENT).buffer);
    return new TrainingSearch(index, codes, new Int32Array(bytes.slice(suffixes, end).buffer), tokenizer);
  }

  // index: as of TrainingSearch.to_json in folio/evaluation/memorization.py; codes, suffixes: typed arrays (N,).
  constructor(index, codes, suffixes, tokenizer) {
    Object.assign(this, {index, codes, suffixes, tokenizer});
    this.codeOf = new Map(index.id_of.map((id, code) => [id, code]));
  }

  // The facts about the spans of a text that are longer than chance gives, and the longest span from each token (T,).
  *search(ids) {
    const text = ids.map(id => this.codeOf.get(id) ?? 0), longest = new Int32Array(ids.length);
    for (let start = 0; start < ids.length; start++) {
      const end = text.indexOf(0, start); // no span contains it
      longest[start] = this.longestPrefix(text.slice(start, end < 0 ? ids.length : end));
      if (start % 64 === 63) yield;
    }
    const {datasets, searched, complete, held_out} = this.index, chance = this.chance(ids.length);
    const spans = maximalSpans(longest).filter(([start, end]) => end - start > chance)
      .map(([start, end]) => this.place(ids, text, start, end));
    return {facts: {spans, chance, datasets, searched, complete, held_out}, longest};
  }

  // How many codes of a text, from its beginning, occur one after another.
  longestPrefix(text) {
    const at = this.bisect(text, false), neighbors = this.suffixes.subarray(Math.max(at - 1, 0), at + 1);
    return Math.max(0, ...Array.from(neighbors, suffix => this.commonPrefix(text, suffix)));
  }

  commonPrefix(text, suffix) {
    let n = 0;
    while (n < text.length && text[n] === this.codes[suffix + n]) n++;
    return n;
  }

  // The first place in the suffix array whose suffix is not before the text; with `after`, the first one that neither
  // is before it nor begins with it.
  bisect(text, after) {
    let low = 0, high = this.suffixes.length;
    while (low < high) {
      const middle = (low + high) >> 1, suffix = this.suffixes[middle], n = this.commonPrefix(text, suffix);
      const isBefore = n === text.length ? after : !(this.codes[suffix + n] > text[n]);
      if (isBefore) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // The facts about a span that occurs: how often, and its first place with the text around it.
  place(ids, text, start, end) {
    const {starts, parts, datasets, shards} = this.index, span = text.slice(start, end);
    const places = this.suffixes.subarray(this.bisect(span, false), this.bisect(span, true));
    const position = places.reduce((least, place) => Math.min(least, place));
    const part = starts.findLastIndex(first => first <= position), [dataset, shard] = parts[part];
    const after = position + end - start, limits = [starts[part], starts[part + 1] - 1];
    return {
      start, end, count: places.length, dataset: datasets[dataset], shard, shards: shards[dataset],
      offset: position - starts[part],
      before: this.text(this.idsBetween(Math.max(position - CONTEXT_TOKENS, limits[0]), position)),
      text: this.text(ids.slice(start, end)),
      after: this.text(this.idsBetween(after, Math.min(after + CONTEXT_TOKENS, limits[1]))),
    };
  }

  // The token ids at these positions. Within a shard, only the end-of-text token has the code 0.
  idsBetween(from, to) {
    return Array.from(this.codes.subarray(from, to), code => code ? this.index.id_of[code] : this.tokenizer.eot);
  }

  // The text of tokens, with the name of the end-of-text token.
  text(ids) {
    const parts = [[]];
    for (const id of ids) id === this.tokenizer.eot ? parts.push([]) : parts.at(-1).push(id);
    return parts.map(part => this.tokenizer.decode(part)).join(EOT_TEXT);
  }

  // The length that no span of a random text of T tokens exceeds, with a probability of 1 - CHANCE.
  // TrainingIndex.chance derives it.
  chance(T) {
    const {expected, largest_frequency: p} = this.index;
    const within = expected.findIndex(matches => T * matches <= CHANCE);
    if (within >= 0) return Math.min(within, T);
    if (p === 1) return T;
    return Math.min(expected.length + Math.ceil(Math.log(T * expected.at(-1) / CHANCE) / -Math.log(p)) - 1, T);
  }
}

// The spans [start, end] that are not a part of a longer one, in order.
function maximalSpans(longest) {
  const spans = [];
  let covered = 0; // the end of the newest span
  longest.forEach((length, start) => {
    if (length > 0 && start + length > covered) spans.push([start, covered = start + length]);
  });
  return spans;
}

// The length of the longest span that covers each token (T,).
function coveringLengths(longest) {
  const covering = new Int32Array(longest.length);
  for (const [start, end] of maximalSpans(longest).sort(([a, b], [c, d]) => b - a - (d - c))) {
    covering.fill(end - start, start, end);
  }
  return covering;
}
