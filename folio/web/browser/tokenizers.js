// The tokenizers of folio/data/tokenizer.py: characters, bytes, byte-level BPE, and events of music. Also prompts and
// streamed text.

const EOT_TEXT = "<|endoftext|>"; // GPT-2's end-of-text token; encode never produces it
const LONE_SURROGATE = /\p{Cs}/gu; // half of a UTF-16 pair; can occur in JSON
const toUTF8 = new TextEncoder();

// Build a tokenizer from the JSON of Tokenizer.to_json. eot is null if there is no end-of-text token.
function makeTokenizer(json) {
  return Object.assign(makeFromDefinition(json), {keepLineEnds: json.keep_line_ends ?? false});
}

function makeFromDefinition(json) {
  if (json.kind === "char") return new CharTokenizer(json.characters, json.eot);
  if (json.kind === "byte") return new ByteTokenizer();
  if (json.kind === "gpt2") return new BytePairTokenizer("gpt2", json.ranks.map(atob));
  if (json.kind === "midi") return new MidiTokenizer(json.events);
  const alphabet = byteAlphabet(), {vocab} = json.model; // tokenizer.json of the tokenizers library
  const tokens = Object.keys(vocab).sort((a, b) => vocab[a] - vocab[b]);
  return new BytePairTokenizer("bpe", tokens.map(token => Array.from(token, c => alphabet.get(c)).join("")));
}

class Tokenizer {
  constructor(kind, vocabSize, eot) {
    Object.assign(this, {kind, vocabSize, eot, keepLineEnds: false});
  }

  // A text with the line ends of the training data.
  clean(text) {
    return this.keepLineEnds ? text : text.replace(/\r\n?/g, "\n");
  }

  // The number of characters that are not in the vocabulary. encode skips them.
  countUnknown(text) {
    return 0;
  }

  // A token as text. Bytes of incomplete characters are written as \xe2. Padding ids have no text.
  piece(id) {
    if (id === this.eot) return EOT_TEXT;
    return id < this.vocabSize ? textWithBackslashes(this.tokenBytes(id)) : "";
  }

  // The text of ids. Invalid UTF-8 becomes U+FFFD.
  decode(ids) {
    return textOfBytes(Uint8Array.from(ids.flatMap(id => Array.from(this.tokenBytes(id)))));
  }
}

// One id per character (code point): its index in `characters`. The end-of-text id, if any, is the last.
class CharTokenizer extends Tokenizer {
  constructor(characters, hasEot) {
    const list = Array.from(characters); // code points
    super("char", list.length + (hasEot ? 1 : 0), hasEot ? list.length : null);
    this.characters = list;
    this.ids = new Map(list.map((c, id) => [c, id]));
  }

  encode(text) {
    return Array.from(text, c => this.ids.get(c)).filter(id => id !== undefined);
  }

  countUnknown(text) {
    return Array.from(text).filter(c => !this.ids.has(c)).length;
  }

  tokenBytes(id) {
    return id === this.eot ? new Uint8Array() : bytesOf(this.characters[id]);
  }
}

// One id per byte of UTF-8, and the end-of-text id 256.
class ByteTokenizer extends Tokenizer {
  constructor() {
    super("byte", 257, 256);
  }

  encode(text) {
    return Array.from(bytesOf(text));
  }

  tokenBytes(id) {
    return id === this.eot ? new Uint8Array() : Uint8Array.of(id);
  }
}

// GPT-2's split of text before merges: see WORDS in folio/data/tokenizer.py. White space is Unicode's, as in tiktoken;
// at the end of a text, \s+(?!\S) matches the same as \s++$. Letters depend on the browser's version of Unicode:
// tiktoken 0.14 does not know the 4,657 letters and digits added in Unicode 17.
const WORDS = new RegExp(String.raw`'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^S\p{L}\p{N}]+|[S]+(?![^S])|[S]`
  .replaceAll("S", String.raw`\p{White_Space}`), "gu");

// A byte-level BPE. Like tiktoken, it merges the neighboring pair with the lowest rank first, and the leftmost of equal
// pairs. A byte is represented by a character with code 0 to 255, so that strings can be keys.
class BytePairTokenizer extends Tokenizer {
  // tokens: bytes of each token, by id. Ids are ranks.
  constructor(kind, tokens) {
    super(kind, tokens.length + 1, tokens.length);
    this.tokens = tokens;
    this.ranks = new Map(tokens.map((token, rank) => [token, rank]));
    this.longest = tokens.reduce((longest, {length}) => Math.max(longest, length), 0);
  }

  encode(text) {
    const ids = [];
    for (const [word] of text.replace(LONE_SURROGATE, "?").matchAll(WORDS)) {
      for (const id of this.encodeWord(asCharacters(toUTF8.encode(word)))) ids.push(id);
    }
    return ids;
  }

  encodeWord(word) {
    const id = this.ranks.get(word);
    if (id !== undefined) return [id];
    const n = word.length, rankAt = new Int32Array(n); // rank of the part that begins here merged with the next, or -1
    const endAt = Int32Array.from(rankAt, (_, i) => i + 1), partBefore = Int32Array.from(rankAt, (_, i) => i - 1);
    const pairs = []; // heap of rank * 2 ** 32 + position; includes obsolete pairs
    const rankPair = at => {
      const next = endAt[at], end = next < n ? endAt[next] : Infinity;
      rankAt[at] = end - at <= this.longest ? this.ranks.get(word.slice(at, end)) ?? -1 : -1;
      if (rankAt[at] >= 0) pushOnHeap(pairs, rankAt[at] * 2 ** 32 + at);
    };
    for (let at = 0; at < n; at++) rankPair(at);
    while (pairs.length) {
      const pair = popFromHeap(pairs), at = pair % 2 ** 32, next = endAt[at];
      if (rankAt[at] !== Math.floor(pair / 2 ** 32)) continue;
      rankAt[next] = -1;
      endAt[at] = endAt[next];
      if (endAt[at] < n) partBefore[endAt[at]] = at;
      rankPair(at);
      if (at > 0) rankPair(partBefore[at]);
    }
    const ids = [];
    for (let at = 0; at < n; at = endAt[at]) ids.push(this.ranks.get(word.slice(at, endAt[at])));
    return ids;
  }

  tokenBytes(id) {
    return id === this.eot ? new Uint8Array() : Uint8Array.from(this.tokens[id], c => c.charCodeAt(0));
  }
}

// The words found by Python's split(), whose white space differs from JavaScript's \s.
const EVENTS = /[^\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/g;

// One id per event of music. A text consists of event names separated by white space.
class MidiTokenizer extends Tokenizer {
  constructor(events) {
    super("midi", events.length + 1, events.length);
    this.events = events;
    this.ids = new Map(events.map((event, id) => [event, id]));
  }

  // Throws an Error for a word that is not an event.
  encode(text) {
    return Array.from(text.matchAll(EVENTS), ({0: event, index}) => {
      if (this.ids.has(event)) return this.ids.get(event);
      const characters = Array.from(event), rest = characters.splice(40);
      const at = bytesOf(text.slice(0, index)).length, shown = characters.join("") + (rest.length ? "..." : "");
      throw new Error(`at byte ${grouped(at)} of the text: ${quoted(shown)} is not an event of this model, which `
        + `writes music and not text: use events such as ${this.events[0]}, or a MIDI file`);
    });
  }

  tokenBytes(id) {
    return id === this.eot ? new Uint8Array() : bytesOf(` ${this.events[id]}`);
  }
}

// --- bytes and text --------------------------------------------------------------------------------------------------

// The UTF-8 bytes of a text. A lone surrogate becomes a ?, as in Python.
function bytesOf(text) {
  return toUTF8.encode(text.replace(LONE_SURROGATE, "?"));
}

// The text of UTF-8 bytes. Invalid UTF-8 becomes U+FFFD, as in Python.
function textOfBytes(bytes) {
  return new TextDecoder("utf-8", {ignoreBOM: true}).decode(bytes);
}

// The text of UTF-8 bytes. Invalid bytes are written as \xe2.
function textWithBackslashes(bytes) {
  const text = textOfBytes(bytes);
  if (!text.includes("\ufffd")) return text;
  let shown = "";
  for (let at = 0; at < bytes.length;) {
    const character = [1, 2, 3, 4].map(n => bytes.subarray(at, at + n)).find(isUTF8);
    shown += character ? textOfBytes(character) : `\\x${bytes[at].toString(16).padStart(2, "0")}`;
    at += character?.length ?? 1;
  }
  return shown;
}

function isUTF8(bytes) {
  try {
    new TextDecoder("utf-8", {fatal: true}).decode(bytes);
    return true;
  } catch {
    return false;
  }
}

// A string with one character of code 0 to 255 per byte.
function asCharacters(bytes) {
  let characters = "";
  for (const byte of bytes) characters += String.fromCharCode(byte);
  return characters;
}

// Map the visible characters that represent bytes in files of the tokenizers library to the bytes, as characters.
function byteAlphabet() {
  const bytes = Array.from({length: 256}, (_, byte) => byte);
  const isVisible = byte => byte >= 0x21 && byte < 0x7f || byte >= 0xa1 && byte !== 0xad;
  const hidden = bytes.filter(byte => !isVisible(byte));
  return new Map(bytes.map(byte =>
    [String.fromCharCode(isVisible(byte) ? byte : 256 + hidden.indexOf(byte)), String.fromCharCode(byte)]));
}

// A binary min-heap of numbers.
function pushOnHeap(heap, number) {
  let at = heap.push(number) - 1;
  for (let parent; at > 0 && heap[parent = at - 1 >> 1] > number; at = parent) heap[at] = heap[parent];
  heap[at] = number;
}

function popFromHeap(heap) {
  const smallest = heap[0], last = heap.pop(), n = heap.length;
  for (let at = 0; at < n;) {
    let child = 2 * at + 1;
    if (child + 1 < n && heap[child + 1] < heap[child]) child++;
    const isPlace = child >= n || heap[child] >= last;
    heap[at] = isPlace ? last : heap[child];
    at = isPlace ? n : child;
  }
  return smallest;
}

// --- prompts and generated text --------------------------------------------------------------------------------------

// Encode a prompt with the line ends of the training data, in which <|endoftext|> is the special token. unknown: number
// of skipped characters. See encode_prompt in folio/decoding/prompts.py.
function encodePrompt(tokenizer, text) {
  const {eot} = tokenizer, cleaned = tokenizer.clean(text), parts = eot === null ? [cleaned] : cleaned.split(EOT_TEXT);
  const encoded = parts.map(part => tokenizer.encode(part));
  const ids = encoded.flatMap((part, i) => i ? [eot, ...part] : part);
  const unknown = parts.reduce((sum, part) => sum + tokenizer.countUnknown(part), 0);
  return {ids: ids.length ? ids : [defaultPrompt(tokenizer)], unknown};
}

// The prompt for an empty text: the end-of-text token, otherwise a line break, otherwise the first token.
function defaultPrompt({eot, characters}) {
  return eot ?? Math.max(0, characters.indexOf("\n")); // only character vocabularies can lack an end-of-text token
}

// Text of streamed tokens: complete characters, up to the first `stop` string. Text that may be the beginning of `stop`
// is held back. See TextStream in folio/decoding/text_stream.py.
class TextStream {
  constructor(tokenizer, stop = null) {
    this.tokenizer = tokenizer;
    this.stop = tokenizer.clean(stop ?? "");
    if (tokenizer.eot !== null && this.stop.includes(EOT_TEXT) && this.stop !== EOT_TEXT) {
      throw new Error(`stop=${quoted(stop)}: ${EOT_TEXT} ends every text, so no text contains it; leave it out of stop`);
    }
    this.undecoded = []; // bytes
    this.heldBack = "";
    this.ended = false;
  }

  // Return the text that can be shown after this token. null is the end of the text.
  push(id) {
    if (this.ended) return "";
    this.ended = id === null;
    this.heldBack += this.decode(id === null ? [] : this.tokenizer.tokenBytes(id));
    const {stop, heldBack} = this, lone = stop.search(LONE_SURROGATE); // the decoded text contains none
    if (stop && lone < 0 && heldBack.includes(stop)) {
      this.ended = true;
      return heldBack.slice(0, heldBack.indexOf(stop));
    }
    let heldCount = this.ended ? 0 : Math.min(lone < 0 ? Math.max(stop.length - 1, 0) : lone, heldBack.length);
    while (!heldBack.endsWith(stop.slice(0, heldCount))) heldCount--;
    this.heldBack = heldBack.slice(heldBack.length - heldCount);
    return heldBack.slice(0, heldBack.length - heldCount);
  }

  // Decode bytes. An incomplete character at the end waits for the rest.
  decode(bytes) {
    const all = [...this.undecoded, ...bytes], part = asCharacters(all.slice(-3)).match(INCOMPLETE)?.[0];
    this.undecoded = part && !this.ended ? all.splice(-part.length) : [];
    return textOfBytes(Uint8Array.from(all));
  }
}

// An incomplete character at the end of UTF-8 bytes. Like Python, it includes the beginning of a surrogate (\xed\xa0).
const INCOMPLETE = new RegExp(
  String.raw`([\xc2-\xdf]|\xe0[\xa0-\xbf]?|[\xe1-\xef][\x80-\xbf]?|\xf0([\x90-\xbf][\x80-\xbf]?)?`
  + String.raw`|[\xf1-\xf3][\x80-\xbf]{0,2}|\xf4([\x80-\x8f][\x80-\xbf]?)?)$`);
