// How a token is sampled from logits, as in folio/decoding/sampling.py: the filters, the random numbers, and the draw.
// The engine samples with it, and the page's pictures of sampling are computed by it.
//
// Dimensions: V vocabulary of the tokenizer; a model's logits may have more, its padding, which is never sampled.

// In place: the numbers of an array become their softmax. Returns the array.
function softmax(array) {
  let largest = -Infinity, sum = 0;
  for (let i = 0; i < array.length; i++) if (array[i] > largest) largest = array[i];
  for (let i = 0; i < array.length; i++) sum += array[i] = Math.exp(array[i] - largest);
  for (let i = 0; i < array.length; i++) array[i] /= sum;
  return array;
}

// The indices of the k largest values, the largest first; of equal ones the first.
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

// --- filters ---------------------------------------------------------------------------------------------------------
//
// Each changes logits (V,) in place, in the precision of their array, as torch does.

// A number in the precision of an array.
const roundedAs = (array, x) => array.constructor.of(x)[0];

// Temperature 0 keeps only the most likely token.
function divideByTemperature(logits, temperature) {
  if (temperature === 0) return keepAtLeast(logits, logits[topIndices(logits, 1)[0]], 1);
  const divisor = roundedAs(logits, temperature);
  for (let id = 0; id < logits.length; id++) logits[id] /= divisor;
}

// Set all but the k largest logits to -Infinity. Ties with the k-th largest are kept.
function keepTopK(logits, k) {
  if (k < logits.length) keepAtLeast(logits, logits[topIndices(logits, k)[k - 1]]);
}

// Keep the smallest set of most likely tokens whose probabilities sum to p or more (Holtzman et al. 2020). The most
// likely token is always kept; of equally likely ones, those with the lowest ids are.
function keepTopP(logits, p) {
  const ordered = logits.filter(x => x > -Infinity).sort().reverse(), before = softmax(ordered.slice());
  const most = roundedAs(logits, p);
  let kept = 0;
  for (let sum = 0; kept < before.length; kept++) {
    const x = before[kept];
    before[kept] = sum += x; // rounded as an element of the array, as in torch
    before[kept] -= x;
    if (kept && before[kept] >= most) break;
  }
  const least = ordered[kept - 1];
  keepAtLeast(logits, least, kept - ordered.indexOf(least));
}

// Keep the tokens whose probability is at least p times the largest (Nguyen et al. 2024).
function keepMinP(logits, p) {
  const probabilities = softmax(logits.slice()), most = probabilities[topIndices(probabilities, 1)[0]];
  const least = roundedAs(logits, roundedAs(logits, p) * most);
  for (let id = 0; id < logits.length; id++) if (probabilities[id] < least) logits[id] = -Infinity;
}

// Keep the logits that are larger than `least`, and so many that are equal to it, the first ones.
function keepAtLeast(logits, least, ties = Infinity) {
  for (let id = 0; id < logits.length; id++) {
    if (logits[id] < least || logits[id] === least && ties-- <= 0) logits[id] = -Infinity;
  }
}

// By the settings that turn them on (null: off), in the order in which they apply. The repetition penalty, which the
// page does not show, comes before them (playground.js).
const FILTERS = {temperature: divideByTemperature, top_k: keepTopK, top_p: keepTopP, min_p: keepMinP};

// --- the draw --------------------------------------------------------------------------------------------------------

const UINT64 = number => BigInt.asUintN(64, number);

// hash64 of folio/base/randomness.py, of one more number after those with the hash h: splitmix64's finalizer.
function hashNext(h, number) {
  h = UINT64((h ^ UINT64(BigInt(number))) + 0x9E3779B97F4A7C15n);
  h = UINT64((h ^ h >> 30n) * 0xBF58476D1CE4E5B9n);
  h = UINT64((h ^ h >> 27n) * 0x94D049BB133111EBn);
  return h ^ h >> 31n;
}

// A uniform number in [0, 1), a function of (seed, sample, position): sample k is the same however many there are.
function uniform(seed, sample, position) {
  return Number([seed, sample, position].reduce(hashNext, 0n) >> 11n) * 2 ** -53;
}

// The line that a uniform number falls on: where the part of each token ends, in float64 (V,).
function cumulativeSums(probabilities) {
  const sums = new Float64Array(probabilities);
  for (let id = 1; id < sums.length; id++) sums[id] += sums[id - 1];
  return sums;
}

// The first token at which the cumulative probability exceeds `uniform` times the sum of all.
function sampleToken(probabilities, uniform) {
  const sums = cumulativeSums(probabilities), target = uniform * sums.at(-1);
  return sums.findIndex(sum => sum > target);
}
