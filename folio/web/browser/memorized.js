// Finds spans of a text in the training data with an index stored in the file: see folio/evaluation/memorization.py.
//
// The index has a code per training token (1, 2, ... for the tokens that occur; 0 for the end of a document or shard)
// and the suffix array of the codes. A binary search finds the longest match of any text.
//
// Dimensions: T time, N indexed tokens.

const CODES = {uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array};

class TrainingSearch {
  // Read an index from the bytes of a file. See pack_index in folio/web/html_file.py.
  static read(index, bytes, tokenizer) {
    const {codes: {dtype, offset, size}, suffixes, end} = index, kind = CODES[dtype];
    const codes = new kind(bytes.slice(offset, offset + size * kind.BYTES_PER_ELEMENT).buffer);
    return new TrainingSearch(index, codes, new Int32Array(bytes.slice(suffixes, end).buffer), tokenizer);
  }

  // index: see TrainingSearch.to_json in folio/evaluation/memorization.py. codes, suffixes: typed arrays (N,).
  constructor(index, codes, suffixes, tokenizer) {
    Object.assign(this, {index, codes, suffixes, tokenizer});
    this.codeOf = new Map(index.id_of.map((id, code) => [id, code]));
  }

  // The spans of a text that are longer than expected by chance, and the longest span length from each token (T,).
  *search(ids) {
    const text = ids.map(id => this.codeOf.get(id) ?? 0), longest = new Int32Array(ids.length);
    for (let start = 0; start < ids.length; start++) {
      const end = text.indexOf(0, start); // no span contains unknown tokens
      longest[start] = this.longestPrefix(text.slice(start, end < 0 ? ids.length : end));
      if (start % 64 === 63) yield;
    }
    const {datasets, searched, complete, held_out} = this.index, chance = this.chance(ids.length);
    const spans = maximalSpans(longest).filter(([start, end]) => end - start > chance)
      .map(([start, end]) => this.locate(ids, text, start, end));
    return {facts: {spans, chance, datasets, searched, complete, held_out}, longest};
  }

  // How much of a text occurs in the training data: see find_overlap in folio/evaluation/memorization.py.
  *overlap(ids) {
    const {facts: {spans, searched, complete}} = yield* this.search(ids);
    const sizes = ids.map(id => this.characters(id)), isQuoted = ids.map(() => false);
    for (const {start, end} of spans) {
      if (total(sizes.slice(start, end)) >= MIN_QUOTE) isQuoted.fill(true, start, end);
    }
    const characters = total(sizes), inTraining = total(sizes.filter((size, t) => isQuoted[t]));
    return {characters, in_training: inTraining, searched, complete};
  }

  // The number of characters that begin in a token. An event of music is one character.
  characters(id) {
    const {tokenizer} = this;
    if (tokenizer.kind === "midi") return Number(id !== tokenizer.eot);
    return tokenizer.tokenBytes(id).filter(byte => (byte & 0xc0) !== 0x80).length;
  }

  // The length of the longest prefix of a text that occurs.
  longestPrefix(text) {
    const i = this.bisect(text, false), neighbors = this.suffixes.subarray(Math.max(i - 1, 0), i + 1);
    return Math.max(0, ...Array.from(neighbors, suffix => this.commonPrefix(text, suffix)));
  }

  commonPrefix(text, suffix) {
    let n = 0;
    while (n < text.length && text[n] === this.codes[suffix + n]) n++;
    return n;
  }

  // The index of the first suffix that is not less than the text; with `skipMatches`, of the first greater one that
  // does not begin with it.
  bisect(text, skipMatches) {
    let low = 0, high = this.suffixes.length;
    while (low < high) {
      const middle = (low + high) >> 1, suffix = this.suffixes[middle], n = this.commonPrefix(text, suffix);
      const isBefore = n === text.length ? skipMatches : !(this.codes[suffix + n] > text[n]);
      if (isBefore) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // The number of occurrences of a span, and the first one with its context.
  locate(ids, text, start, end) {
    const {starts, parts, datasets, shards} = this.index, span = text.slice(start, end);
    const matches = this.suffixes.subarray(this.bisect(span, false), this.bisect(span, true));
    const position = matches.reduce((first, match) => Math.min(first, match));
    const part = starts.findLastIndex(first => first <= position), [dataset, shard] = parts[part];
    const after = position + end - start, limits = [starts[part], starts[part + 1] - 1];
    return {
      start, end, count: matches.length, dataset: datasets[dataset], shard, shards: shards[dataset],
      offset: position - starts[part],
      before: this.text(this.idsBetween(Math.max(position - CONTEXT_TOKENS, limits[0]), position)),
      text: this.text(ids.slice(start, end)),
      after: this.text(this.idsBetween(after, Math.min(after + CONTEXT_TOKENS, limits[1]))),
    };
  }

  // The token ids at these positions. Within a shard, only the end-of-text token has code 0.
  idsBetween(from, to) {
    return Array.from(this.codes.subarray(from, to), code => code ? this.index.id_of[code] : this.tokenizer.eot);
  }

  // The text of tokens, including end-of-text tokens.
  text(ids) {
    const parts = [[]];
    for (const id of ids) id === this.tokenizer.eot ? parts.push([]) : parts.at(-1).push(id);
    return parts.map(part => this.tokenizer.decode(part)).join(EOT_TEXT);
  }

  // The length that no span of a random text of T tokens exceeds with probability 1 - CHANCE. See TrainingIndex.chance.
  chance(T) {
    const {expected, largest_frequency: p} = this.index;
    const length = expected.findIndex(matches => T * matches <= CHANCE);
    if (length >= 0) return Math.min(length, T);
    if (p === 1) return T;
    return Math.min(expected.length + Math.ceil(Math.log(T * expected.at(-1) / CHANCE) / -Math.log(p)) - 1, T);
  }
}

function total(sizes) {
  return sizes.reduce((sum, size) => sum + size, 0);
}

// The spans [start, end] that are not part of a longer span, in order.
function maximalSpans(longest) {
  const spans = [];
  let covered = 0; // end of the last span
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
