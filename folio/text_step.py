"""Loops over the bytes of a text, compiled by numba: cutting it into words that a cache has, and hashing its words.

All arguments are addresses of arrays, or counts (folio/simd.py).
"""

import numpy as np
from numba import njit

from folio.near_duplicates import BANDS, LONGEST_CHAIN, PERMUTATIONS, SIMILARITY
from folio.simd import integers, integers_32, make_array_at, octets

compiled = njit(nogil=True, error_model="numpy")
unsigned = make_array_at(np.uint64)

# --- words of a BPE ---------------------------------------------------------------------------------------------------

LONGEST_KEY = 15  # bytes of a word in the cache; its key is two uint64
SLOTS = 1 << 20  # of the cache: two uint64 of a key, and four int32 of its ids, -1 if there are fewer
MOST_IDS = 4

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
    if before == after or before == SPACE or after == OTHER:  # noqa: SIM109, numba has no `in`
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
def find_slot(table, low, high):
    """Where the slot of a key begins in the table, or the empty one where it belongs."""
    mixed = (low ^ (high * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xD6E8FEB86659FD93)
    slot = np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(SLOTS - 1))
    while table[4 * slot + 1] and (table[4 * slot] != low or table[4 * slot + 1] != high):
        slot = (slot + 1) & (SLOTS - 1)
    return 4 * slot


@compiled
def encode_words(data_at, ends_at, n_texts, table_at, ids_at, id_ends_at, missing_at, missing_ends_at):
    """Write the ids of all words in the cache, and where the others are: (begin, end, number of ids before) of each.

    ends: where each text ends in the data. id_ends, missing_ends: how many ids and missing words there are up to there.
    Returns the number of ids.
    """
    ends, id_ends, missing_ends = (
        integers(ends_at, n_texts),
        integers(id_ends_at, n_texts),
        integers(missing_ends_at, n_texts),
    )
    size = ends[n_texts - 1] if n_texts else 0
    data, ids, missing = octets(data_at, size), integers_32(ids_at, size), integers(missing_at, 3 * size)
    table, known = unsigned(table_at, 4 * SLOTS), integers_32(table_at, 8 * SLOTS)
    begin = n_ids = n_missing = 0
    for text in range(n_texts):
        while begin < ends[text]:
            end = next_cut(data, begin, ends[text])
            slot = np.int64(-1)
            if end - begin <= LONGEST_KEY:
                low, high = key_of(data_at, begin, end)
                slot = find_slot(table, low, high)
            if slot >= 0 and table[slot + 1]:
                for k in range(2 * slot + 4, 2 * slot + 4 + MOST_IDS):
                    if known[k] < 0:
                        break
                    ids[n_ids] = known[k]
                    n_ids += 1
            else:
                missing[3 * n_missing], missing[3 * n_missing + 1], missing[3 * n_missing + 2] = begin, end, n_ids
                n_missing += 1
            begin = end
        id_ends[text], missing_ends[text] = n_ids, n_missing
    return n_ids


@compiled
def add_words(data_at, missing_at, n_missing, new_at, new_ends_at, table_at, n_words):
    """Add the words that were missing, with their new ids, until half of the table is full.

    Returns the number of words in the table; there were n_words.
    """
    missing, new_ends = integers(missing_at, 3 * n_missing), integers(new_ends_at, n_missing)
    new = integers_32(new_at, new_ends[n_missing - 1])
    table, known = unsigned(table_at, 4 * SLOTS), integers_32(table_at, 8 * SLOTS)
    first = 0
    for word in range(n_missing):
        begin, end, last = missing[3 * word], missing[3 * word + 1], new_ends[word]
        if end - begin <= LONGEST_KEY and last - first <= MOST_IDS and n_words < SLOTS // 2:
            low, high = key_of(data_at, begin, end)
            slot = find_slot(table, low, high)
            if not table[slot + 1]:
                table[slot], table[slot + 1] = low, high
                for k in range(MOST_IDS):
                    known[2 * slot + 4 + k] = new[first + k] if first + k < last else -1
                n_words += 1
        first = last
    return n_words


# --- hashes of words --------------------------------------------------------------------------------------------------

MULTIPLIER, MIXER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
LOWER = np.array([byte + 32 if ord("A") <= byte <= ord("Z") else byte for byte in range(256)], np.uint8)
IN_WORD = np.array([byte >= 128 or chr(byte).isalnum() for byte in range(256)])


@compiled
def mix(hashed):
    """As in folio/ngrams.py."""
    hashed = (hashed ^ (hashed >> np.uint64(32))) * MIXER
    return hashed ^ (hashed >> np.uint64(32))


@compiled
def hash_words(data_at, size, hashes_at):
    """Write the hash of each word of a text, as folio/ngrams.py defines them. Returns how many there are."""
    data, hashes = octets(data_at, size), unsigned(hashes_at, size)
    count = signs_end = 0  # the end of the last character that is not in a word, though its bytes look so
    in_word = False
    hashed, power = np.uint64(0), np.uint64(1)
    for k in range(size):
        byte = data[k]
        if byte == 0xC2:  # U+0080 to U+00BF, such as the non-breaking space
            signs_end = max(signs_end, k + 2)
        elif byte == 0xE2 and k + 1 < size and data[k + 1] == 0x80:  # U+2000 to U+203F: quotes and dashes
            signs_end = max(signs_end, k + 3)
        continues = IN_WORD[byte] and k >= signs_end
        if in_word and (not continues or 0xE3 <= byte < 0xF0):
            hashes[count] = mix(hashed)
            count += 1
            in_word = False
        if continues:
            if not in_word:
                in_word, hashed, power = True, np.uint64(0), np.uint64(1)
            hashed += (np.uint64(LOWER[byte]) + np.uint64(1)) * power
            power *= MULTIPLIER
    if in_word:
        hashes[count] = mix(hashed)
        count += 1
    return count


@compiled
def join_tokens(ids_at, n, starts_at, content_at, text_at):
    """Write the bytes of tokens, of which token i is content[starts[i]:starts[i + 1]]. Returns how many."""
    ids, starts = integers_32(ids_at, n), integers(starts_at, 1)
    content, text = octets(content_at, 1), octets(text_at, 1)
    size = 0
    for i in range(n):
        for k in range(starts[ids[i]], starts[ids[i] + 1]):
            text[size] = content[k]
            size += 1
    return size


# --- near duplicates --------------------------------------------------------------------------------------------------


@compiled
def find_similar(signature_at, slots_at, signatures_at, older_at, newest_at, capacity):
    """SimilarDocuments.find, given the slot of each band. -1: none."""
    signature, slots = integers_32(signature_at, PERMUTATIONS), integers(slots_at, BANDS)
    signatures, older = integers_32(signatures_at, 1), integers_32(older_at, 1)
    newest = integers_32(newest_at, 1)
    first = -1
    for band in range(BANDS):
        document = np.int64(newest[band * 2 * capacity + slots[band]])
        for _ in range(LONGEST_CHAIN):
            if document < 0:
                break
            if first < 0 or document < first:
                equal = 0
                for k in range(PERMUTATIONS):
                    equal += signatures[document * PERMUTATIONS + k] == signature[k]
                if equal >= SIMILARITY * PERMUTATIONS:
                    first = document
            document = np.int64(older[document * BANDS + band])
    return first
