"""Loops over the bytes of a text, compiled by numba: cutting it into words that a cache has, and hashing its words.

All arguments are addresses of arrays, or counts (folio/simd.py).
"""

import numpy as np
from numba import njit

from folio.simd import integers, integers_32, make_array_at, octets

compiled = njit(nogil=True, error_model="numpy")
unsigned = make_array_at(np.uint64)

# --- words of a BPE ---------------------------------------------------------------------------------------------------

LONGEST_KEY = 15  # bytes of a word in the cache; its key is two uint64
SLOTS = 1 << 20  # of the cache, at most half of them used
COUNT_BITS = 4  # of a slot's value: how many ids a word has; the other bits are where they begin in `ids`

SPACE, LETTER, DIGIT, SIGN, OTHER = range(5)  # kinds of bytes; OTHER are those that are not ASCII
KINDS = np.array(
    [
        OTHER if b >= 128 else SPACE if chr(b) in "\t\n\v\f\r " else LETTER if chr(b).isalpha()
        else DIGIT if chr(b).isdigit() else SIGN
        for b in range(256)
    ],
    np.uint8,
)  # fmt: skip


@compiled
def is_space_possible(data, k):
    """Whether the character that ends at byte k, which is not ASCII, may be white space."""
    first = k
    while first > 0 and first > k - 3 and data[first] < 0xC0:
        first -= 1
    lead = data[first]
    return lead < 0xC3 or lead == 0xE1 or lead == 0xE2 or (lead == 0xE3 and data[first + 1] == 0x80)


@compiled
def is_cut(data, k):
    """Whether GPT-2's pattern ends a word after byte k, given that a byte follows, and byte k is not white space."""
    before, after = KINDS[data[k]], KINDS[data[k + 1]]
    if before == OTHER:
        return after == SPACE and not is_space_possible(data, k)
    if before == after or after == OTHER or before == SPACE:
        return False
    return not (data[k] == ord("'") and after == LETTER)  # the word may be 's or 't


@compiled
def next_cut(data, begin, end):
    """The end of the word, or of several words, at the beginning of data[begin:end], a text or its rest."""
    k = begin
    while k < end and KINDS[data[k]] == SPACE:
        k += 1
    if k == end:
        return end
    if k > begin and KINDS[data[k]] != OTHER:  # white space before a character that is not
        if k - begin > 1:
            return k - 1
        if data[begin] != ord(" "):
            return k
    kind = KINDS[data[k]]
    while k + 1 < end:
        after = KINDS[data[k + 1]]
        if (after != kind or kind == OTHER) and is_cut(data, k):
            break
        kind = after
        k += 1
    return k + 1


@compiled
def key_of(data_at, begin, end):
    """A word of at most LONGEST_KEY bytes as two numbers: the bytes, and in the last byte their count."""
    words, size = unsigned(data_at + begin, 2), end - begin
    low, count = words[0], np.uint64(size) << np.uint64(56)
    if size < 8:
        return low & ((np.uint64(1) << np.uint64(8 * size)) - np.uint64(1)), count
    return low, count | (words[1] & ((np.uint64(1) << np.uint64(8 * (size - 8))) - np.uint64(1)))


@compiled
def find_slot(keys, values, low, high):
    """The slot of a key, or the empty one where it belongs."""
    mixed = (low ^ (high * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xD6E8FEB86659FD93)
    slot = np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(SLOTS - 1))
    while values[slot] and (keys[2 * slot] != low or keys[2 * slot + 1] != high):
        slot = (slot + 1) & (SLOTS - 1)
    return slot


@compiled
def encode_words(data_at, ends_at, n_texts, keys_at, values_at, known_at, ids_at, id_ends_at, missing_at, missing_ends_at):
    """Write the ids of all words in the cache, and where the others are: (begin, end, number of ids before) of each.

    ends: where each text ends in the data. id_ends, missing_ends: how many ids and missing words there are up to there.
    """
    ends, id_ends, missing_ends = integers(ends_at, n_texts), integers(id_ends_at, n_texts), integers(missing_ends_at, n_texts)
    size = ends[n_texts - 1] if n_texts else 0
    data, ids, missing = octets(data_at, size), integers_32(ids_at, size), integers(missing_at, 3 * size)
    keys, values, known = unsigned(keys_at, 2 * SLOTS), integers(values_at, SLOTS), integers_32(known_at, SLOTS)
    begin = n_ids = n_missing = 0
    for text in range(n_texts):
        while begin < ends[text]:
            end = next_cut(data, begin, ends[text])
            value = np.int64(0)
            if end - begin <= LONGEST_KEY:
                low, high = key_of(data_at, begin, end)
                value = values[find_slot(keys, values, low, high)]
            if value:
                first = value >> COUNT_BITS
                for k in range(first, first + (value & ((1 << COUNT_BITS) - 1))):
                    ids[n_ids] = known[k]
                    n_ids += 1
            else:
                missing[3 * n_missing], missing[3 * n_missing + 1], missing[3 * n_missing + 2] = begin, end, n_ids
                n_missing += 1
            begin = end
        id_ends[text], missing_ends[text] = n_ids, n_missing
    return n_ids


@compiled
def add_words(data_at, missing_at, n_missing, new_at, new_ends_at, keys_at, values_at, known_at, n_known, n_words):
    """Add words that were missing to the cache, unless it is full. Returns n_known * SLOTS + n_words."""
    missing, new_ends = integers(missing_at, 3 * n_missing), integers(new_ends_at, n_missing)
    data, new = octets(data_at, missing[3 * n_missing - 2]), integers_32(new_at, new_ends[n_missing - 1])
    keys, values, known = unsigned(keys_at, 2 * SLOTS), integers(values_at, SLOTS), integers_32(known_at, 4 * SLOTS)
    first = 0
    for word in range(n_missing):
        begin, end, last = missing[3 * word], missing[3 * word + 1], new_ends[word]
        if end - begin <= LONGEST_KEY and n_words < SLOTS // 2 and n_known + LONGEST_KEY < 4 * SLOTS:
            low, high = key_of(data_at, begin, end)
            slot = find_slot(keys, values, low, high)
            if not values[slot]:
                keys[2 * slot], keys[2 * slot + 1] = low, high
                values[slot] = (n_known << COUNT_BITS) | (last - first)
                n_words += 1
                for k in range(first, last):
                    known[n_known] = new[k]
                    n_known += 1
        first = last
    return n_known * SLOTS + n_words


# --- hashes of words --------------------------------------------------------------------------------------------------


@compiled
def join_tokens(ids_at, n, content_at, starts_at, text_at):
    """Write the bytes of the tokens `ids`. Token i is content[starts[i]:starts[i + 1]]. Returns how many bytes."""
    ids, starts = integers_32(ids_at, n), integers(starts_at, 1)
    content, text = octets(content_at, 1), octets(text_at, 1)
    size = 0
    for i in range(n):
        for k in range(starts[ids[i]], starts[ids[i] + 1]):
            text[size] = content[k]
            size += 1
    return size
