// Sampling of a token from logits, as in folio/decoding/sampling.py: filters, random numbers, and the draw. Used by the
// engine, and by the page for its charts of sampling and of attention.
//
// Dimensions: V vocabulary of the tokenizer; a model's logits may have padding, which is never sampled.

// Compute the softmax of an array in place. Returns the array.
function softmax(array) {
  let max = -Infinity, sum = 0;
  for (let i = 0; i < array.length; i++) if (array[i] > max) max = array[i];
  for (let i = 0; i < array.length; i++) sum += array[i] = Math.exp(array[i] - max);
  for (let i = 0; i < array.length; i++) array[i] /= sum;
  return array;
}

// The indices of the k largest values, in descending order. Ties are broken by the lowest index.
function topIndices(values, k) {
  const indices = [];
  for (let i = 0; i < values.length; i++) {
    if (indices.length === k && !(values[i] > values[indices[k - 1]])) continue;
    let place = indices.length;
    while (place && values[i] > values[indices[place - 1]]) place--;
    indices.splice(place, 0, i);
    if (indices.length > k) indices.pop();
  }
  return indices;
}

// The index of the first token of each token's document, to which attention is confined if the model has a document
// token (GPTConfig.document_token). The token belongs to the document that it ends.
function documentStarts(ids, documentToken) {
  const starts = [0];
  ids.forEach((id, t) => starts.push(id === documentToken ? t + 1 : starts[t]));
  return starts.slice(0, ids.length);
}

// --- filters ---------------------------------------------------------------------------------------------------------
//
// Each filter changes logits (V,) in place, in the precision of their array, as torch does.

// Round a number to the precision of an array.
const roundedAs = (array, x) => array.constructor.of(x)[0];

// Temperature 0 keeps only the most likely token.
function divideByTemperature(logits, temperature) {
  if (temperature === 0) return keepAtLeast(logits, logits[topIndices(logits, 1)[0]], 1);
  const divisor = roundedAs(logits, temperature);
  for (let id = 0; id < logits.length; id++) logits[id] /= divisor;
}

// Set all but the k largest logits to -Infinity. Ties with the k-th largest remain.
function keepTopK(logits, k) {
  if (k < logits.length) keepAtLeast(logits, logits[topIndices(logits, k)[k - 1]]);
}

// Keep the smallest set of most likely tokens whose probabilities sum to at least p, and at least one token (Holtzman
// et al. 2020). Ties are broken by the lowest id.
function keepTopP(logits, p) {
  const ordered = logits.filter(x => x > -Infinity).sort().reverse(), before = softmax(ordered.slice());
  const limit = roundedAs(logits, p);
  let count = 0; // tokens to keep
  for (let sum = 0; count < before.length; count++) {
    const x = before[count];
    before[count] = sum += x; // rounded to the precision of the array, as in torch
    before[count] -= x;
    if (count && before[count] >= limit) break;
  }
  const threshold = ordered[count - 1];
  keepAtLeast(logits, threshold, count - ordered.indexOf(threshold));
}

// Keep the tokens whose probability is at least p times the largest (Nguyen et al. 2024).
function keepMinP(logits, p) {
  const probabilities = softmax(logits.slice()), max = probabilities[topIndices(probabilities, 1)[0]];
  const threshold = roundedAs(logits, roundedAs(logits, p) * max);
  for (let id = 0; id < logits.length; id++) if (probabilities[id] < threshold) logits[id] = -Infinity;
}

// Keep the logits above a threshold and the first `ties` logits equal to it.
function keepAtLeast(logits, threshold, ties = Infinity) {
  for (let id = 0; id < logits.length; id++) {
    if (logits[id] < threshold || logits[id] === threshold && ties-- <= 0) logits[id] = -Infinity;
  }
}

// Filters by their settings (null: off), in order of application. The repetition penalty is applied before them
// (playground.js); the page's charts do not show it.
const FILTERS = {temperature: divideByTemperature, top_k: keepTopK, top_p: keepTopP, min_p: keepMinP};

// --- the draw --------------------------------------------------------------------------------------------------------

const UINT64 = number => BigInt.asUintN(64, number);

// Extend the hash h by one more number, as hash64 in folio/base/randomness.py: splitmix64's finalizer.
function hashNext(h, number) {
  h = UINT64((h ^ UINT64(BigInt(number))) + 0x9E3779B97F4A7C15n);
  h = UINT64((h ^ h >> 30n) * 0xBF58476D1CE4E5B9n);
  h = UINT64((h ^ h >> 27n) * 0x94D049BB133111EBn);
  return h ^ h >> 31n;
}

// A uniform number in [0, 1), as a function of (seed, sample, position), independent of the number of samples.
function uniform(seed, sample, position) {
  return Number([seed, sample, position].reduce(hashNext, 0n) >> 11n) * 2 ** -53;
}

// The cumulative sums of probabilities in float64 (V,).
function cumulativeSums(probabilities) {
  const sums = new Float64Array(probabilities);
  for (let id = 1; id < sums.length; id++) sums[id] += sums[id - 1];
  return sums;
}

// The first token whose cumulative probability exceeds `uniform` times the total.
function sampleToken(probabilities, uniform) {
  const sums = cumulativeSums(probabilities), target = uniform * sums.at(-1);
  return sums.findIndex(sum => sum > target);
}
