"""Loops over the bytes of a text, compiled by numba: lookup of words in a cache, hashes of words, near duplicates.

All arguments are addresses of arrays, or counts (folio/machine/simd.py).
"""

import itertools

import numpy as np

from folio.machine.simd import compiled, integers, integers_32, make_array_at, octets

unsigned = make_array_at(np.uint64)

# --- the word cache ---------------------------------------------------------------------------------------------------

MAX_KEY_BYTES = 15  # longest word in the cache; the key is two uint64
SLOTS = 1 << 20  # in the cache: a key of two uint64, and MAX_IDS ids as int32, padded with -1
MAX_IDS = 4

# Kinds of bytes. Bytes of characters that are not ASCII are OTHER, or LEAD if white space may begin with them.
BLANK, WHITE, LETTER, DIGIT, SIGN, APOSTROPHE, OTHER, LEAD = range(8)
KINDS = np.array(
    [
        LEAD if b in (0xC2, 0xE1, 0xE2, 0xE3) else OTHER if b >= 128 else BLANK if chr(b) == " "
        else WHITE if chr(b) in "\t\n\v\f\r" else LETTER if chr(b).isalpha() else DIGIT if chr(b).isdigit()
        else APOSTROPHE if chr(b) == "'" else SIGN
        for b in range(256)
    ],
    np.uint8,
)  # fmt: skip


def word_ends(kinds: tuple[int, int, int, int]) -> int:
    """Return a bit mask of the positions in four bytes where GPT-2's pattern always ends a word.

    1: before the last byte. 2: before the third byte.
    """
    a, b, c, d = kinds
    white, signs, not_ascii = (BLANK, WHITE), (SIGN, APOSTROPHE), (OTHER, LEAD)
    if c in not_ascii:
        return int(d in white and LEAD not in (a, b, c))
    if d in not_ascii or c == d or (c in signs and d in signs) or (c in white and d in white):
        return 0
    if c in white and b in not_ascii:  # b may belong to white space, and then a word ends between b and c
        return 0
    if c in white:  # a blank begins the next word
        return int(c != BLANK) + 2 * int(b in white)
    if c == APOSTROPHE and d == LETTER:
        return int(b == BLANK or b in signs)  # otherwise, the word may be a contraction such as 's
    return 1


WORD_ENDS = np.array([word_ends(kinds) for kinds in itertools.product(range(8), repeat=4)], np.uint8)


@compiled
def cut_words(data, begin, end, cuts):
    """Write cuts of the text data[begin:end] where words end, and return their number. A piece may be several words."""
    n, last_kinds = 0, (OTHER << 6) | (OTHER << 3) | KINDS[data[begin]]
    for k in range(begin + 1, end):
        last_kinds = ((last_kinds << 3) | KINDS[data[k]]) & 4095
        ends = WORD_ENDS[last_kinds]
        cuts[n] = k - 1
        n += ends >> 1
        cuts[n] = k
        n += ends & 1
    cuts[n] = end
    return n + 1


# Bit masks of a word of each size in the first and in the second number of its key.
MASKS = [[(1 << 8 * min(n, 8)) - 1, (1 << 8 * max(n - 8, 0)) - 1] for n in range(MAX_KEY_BYTES + 1)]
MASKS = np.array(MASKS, np.uint64)


@compiled
def make_key(data_at, begin, size):
    """Return a word of at most MAX_KEY_BYTES bytes as two numbers: its bytes, and its size in the last byte."""
    words = unsigned(data_at + begin, 2)
    return words[0] & MASKS[size, 0], (words[1] & MASKS[size, 1]) | (np.uint64(size) << np.uint64(56))


@compiled
def find_slot(table, low, high):
    """Return the slot of a key in the table, or the empty slot for it."""
    mixed = (low ^ (high * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xD6E8FEB86659FD93)
    slot = np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(SLOTS - 1))
    while table[4 * slot + 1] and (table[4 * slot] != low or table[4 * slot + 1] != high):
        slot = (slot + 1) & (SLOTS - 1)
    return slot


@compiled
def encode_words(data_at, ends_at, n_texts, table_at, n_words_at, cuts_at, ids_at, id_ends_at, missing_at):
    """Write the ids of the words in the table, and -1 - m for missing word m. Returns the number of missing words.

    missing: the begin, end, and slot of each missing word. They are added to the table until half of it is full; then
    their slot is -1. The table has -2 - m in place of their ids, so that repetitions are the same missing word, or -1
    if the ids do not fit. ends: the end of each text in the data. id_ends: the end of each text in the ids.
    """
    ends, id_ends, n_words = integers(ends_at, n_texts), integers(id_ends_at, n_texts), integers(n_words_at, 1)
    size = ends[n_texts - 1] if n_texts else 0
    data, cuts, missing = octets(data_at, size), integers(cuts_at, size + 1), integers(missing_at, 3 * size)
    ids = integers_32(ids_at, size + MAX_IDS)
    table, known = unsigned(table_at, 4 * SLOTS), integers_32(table_at, 8 * SLOTS)
    begin = n_ids = n_missing = 0
    for text in range(n_texts):
        n_cuts = cut_words(data, begin, ends[text], cuts) if begin < ends[text] else 0
        for cut in range(n_cuts):
            end = cuts[cut]
            slot = np.int64(-1)
            if end - begin <= MAX_KEY_BYTES:
                low, high = make_key(data_at, begin, end - begin)
                slot = find_slot(table, low, high)
                if not table[4 * slot + 1]:
                    if n_words[0] < SLOTS // 2:
                        table[4 * slot], table[4 * slot + 1], known[8 * slot + 4] = low, high, -1
                        n_words[0] += 1
                    else:
                        slot = np.int64(-1)
            first = 8 * slot + 4
            if slot >= 0 and known[first] >= 0:
                for k in range(MAX_IDS):
                    ids[n_ids + k] = known[first + k]
                n_ids += 1 + (known[first + 1] >= 0) + (known[first + 2] >= 0) + (known[first + 3] >= 0)
            else:
                word = -2 - known[first] if slot >= 0 else -1
                if word < 0 or word >= n_missing or missing[3 * word + 2] != slot:
                    word = n_missing
                    missing[3 * word], missing[3 * word + 1], missing[3 * word + 2] = begin, end, slot
                    if slot >= 0:
                        known[first] = -2 - word
                    n_missing += 1
                ids[n_ids] = -1 - word
                n_ids += 1
            begin = end
        id_ends[text] = n_ids
    return n_missing


@compiled
def insert_missing(ids_at, id_ends_at, n_texts, missing_at, n_missing, new_at, new_ends_at, table_at, all_at):
    """Write all ids, with the new ids of missing words, add the new ids to the table, and update id_ends."""
    id_ends, missing, new_ends = (
        integers(id_ends_at, n_texts),
        integers(missing_at, 3 * n_missing),
        integers(new_ends_at, n_missing),
    )
    new, ids, known = integers_32(new_at, 1), integers_32(ids_at, 1), integers_32(table_at, 8 * SLOTS)
    all_ids = integers_32(all_at, 1)
    first = 0
    for word in range(n_missing):
        last, slot = new_ends[word], missing[3 * word + 2]
        if slot >= 0 and last - first > MAX_IDS:
            known[8 * slot + 4] = -1
        elif slot >= 0:
            for k in range(MAX_IDS):
                known[8 * slot + 4 + k] = new[first + k] if first + k < last else -1
        first = last
    n = i = 0
    for text in range(n_texts):
        while i < id_ends[text]:
            word = -1 - ids[i]
            if word < 0:
                all_ids[n] = ids[i]
                n += 1
            else:
                for k in range(new_ends[word - 1] if word else 0, new_ends[word]):
                    all_ids[n] = new[k]
                    n += 1
            i += 1
        id_ends[text] = n
    return n


# --- hashes of words --------------------------------------------------------------------------------------------------

COPY_BYTES = 16  # copied at once
MULTIPLIER, MIXER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
# The value of a byte in the hash of a word, which ignores case; 0 for bytes that are not in words.
VALUES = np.array(
    [ord(chr(b).lower() if b < 128 else chr(b)) + 1 if b >= 128 or chr(b).isalnum() else 0 for b in range(256)],
    np.uint64,
)


def folded(code: int) -> int:
    """Return the case-folded character, or the character itself if the result has another number of bytes."""
    lower = chr(code).casefold()
    has_same_size = len(lower) == 1 and len(lower.encode()) == len(chr(code).encode())
    return ord(lower) if has_same_size else code


# Latin, Greek, Cyrillic, Armenian, Georgian: all characters of two bytes, and up to U+1FFF of three.
FOLDED = np.array([folded(code) for code in range(0x2000)], np.uint16)


@compiled
def mix(hashed):
    """Mix the bits of a hash, as in leakage.py."""
    hashed = (hashed ^ (hashed >> np.uint64(32))) * MIXER
    return hashed ^ (hashed >> np.uint64(32))


@compiled
def hash_words(data_at, size, hashes_at):
    """Write the hash of each word of a text, as defined in leakage.py. Returns the number of words."""
    data, hashes = octets(data_at, size), unsigned(hashes_at, size + 1)
    count = signs_end = 0  # end of the last punctuation character that is not ASCII
    in_word = character = character_end = 0  # the last folded character and where its bytes end
    hashed, power = np.uint64(0), np.uint64(1)
    for k in range(size):
        byte = data[k]
        value = VALUES[byte]
        if byte >= 0x80:
            if byte == 0xC2:  # U+0080 to U+00BF, such as the non-breaking space
                signs_end = max(signs_end, k + 2)
            elif byte == 0xE2 and k + 1 < size and data[k + 1] == 0x80:  # U+2000 to U+203F: quotes and dashes
                signs_end = max(signs_end, k + 3)
            elif 0xE3 <= byte < 0xF0 and in_word:
                hashes[count] = hashed
                count += 1
                hashed, power = np.uint64(0), np.uint64(1)
            if k < character_end and byte < 0xC0:
                value = np.uint64(0x81 + ((character >> 6 * (character_end - 1 - k)) & 0x3F))
            elif 0xC3 <= byte < 0xE0 and k + 1 < size:
                character = np.int64(FOLDED[((byte & 0x1F) << 6) | (data[k + 1] & 0x3F)])
                character_end, value = k + 2, np.uint64(0xC1 + (character >> 6))
            elif byte == 0xE1 and k + 2 < size:
                character = np.int64(FOLDED[0x1000 | ((data[k + 1] & 0x3F) << 6) | (data[k + 2] & 0x3F)])
                character_end, value = k + 3, np.uint64(0xE1 + (character >> 12))
            if k < signs_end:
                value = np.uint64(0)
        hashes[count] = hashed  # without a branch, because the ends of words are unpredictable
        continues = np.int64(value != 0)
        count += in_word & ~continues
        mask = np.uint64(-continues)
        hashed = (hashed + value * power) & mask
        power = (power * MULTIPLIER & mask) | (np.uint64(1) & ~mask)
        in_word = continues
    hashes[count] = hashed
    count += in_word
    for word in range(count):
        hashes[word] = mix(hashes[word])
    return count


@compiled
def hash_ngrams(words_at, n_words, n, short, hashes_at, starts_at):
    """Write the hash and the first word of each n-gram of words between two boundaries, as defined in leakage.py.

    short: fewer words between two boundaries are an n-gram, too. Returns the number of n-grams.
    """
    words, hashes, starts = unsigned(words_at, n_words), unsigned(hashes_at, n_words), integers(starts_at, n_words)
    boundary, first_power = mix(np.uint64(0x100)), np.uint64(1)
    for _ in range(n):
        first_power *= MULTIPLIER
    count = begin = 0  # begin: the first word after the last boundary
    hashed = np.uint64(0)  # hash of the last n words after the boundary, or of fewer
    for k in range(n_words + 1):
        if k == n_words or words[k] == boundary:
            if short and begin < k < begin + n:
                hashes[count], starts[count] = mix(hashed), begin
                count += 1
            begin, hashed = k + 1, np.uint64(0)
            continue
        hashed = hashed * MULTIPLIER + words[k]
        if k >= begin + n:
            hashed -= words[k - n] * first_power
        if k >= begin + n - 1:
            hashes[count], starts[count] = mix(hashed), k - n + 1
            count += 1
    return count


@compiled
def filter_bits(hashed, shift):
    """Return the two bits of a hash in a filter of 2 ** (64 - shift) bits."""
    return hashed >> np.uint64(shift), (hashed * MULTIPLIER) >> np.uint64(shift)


@compiled
def is_set(bits, bit):
    return (bits[np.int64(bit >> np.uint64(6))] >> (bit & np.uint64(63))) & np.uint64(1)


@compiled
def add_to_filter(hashes_at, n, filter_at, shift):
    """Set the bits of hashes in a filter."""
    hashes, bits = unsigned(hashes_at, n), unsigned(filter_at, 1)
    for k in range(n):
        for bit in filter_bits(hashes[k], shift):
            bits[np.int64(bit >> np.uint64(6))] |= np.uint64(1) << (bit & np.uint64(63))
    return 0


@compiled
def find_in_filter(hashes_at, n, filter_at, shift, indices_at):
    """Write the indices of the hashes whose bits are set in a filter. Returns the number of indices."""
    hashes, bits, indices = unsigned(hashes_at, n), unsigned(filter_at, 1), integers(indices_at, n)
    count = 0
    for k in range(n):
        first, second = filter_bits(hashes[k], shift)
        if is_set(bits, first) and is_set(bits, second):
            indices[count] = k
            count += 1
    return count


@compiled
def join_tokens(ids_at, n, starts_at, content_at, text_at):
    """Write the bytes of tokens, where token i is content[starts[i]:starts[i + 1]]. Returns the number of bytes.

    Up to COPY_BYTES bytes after the content are read, and after the text are written. text_at: 0: only count the bytes.
    """
    ids, starts = integers_32(ids_at, n), integers(starts_at, 1)
    size = 0
    for i in range(n):
        begin, end = starts[ids[i]], starts[ids[i] + 1]
        if text_at:
            for k in range(begin, end, COPY_BYTES):
                target, source = unsigned(text_at + size + k - begin, 2), unsigned(content_at + k, 2)
                target[0], target[1] = source[0], source[1]
        size += end - begin
    return size


# --- near duplicates --------------------------------------------------------------------------------------------------


@compiled
def find_slots(signature, size, bands, bits, slots):
    """Write the slot of each band of a signature in its hash table of 2 ** bits slots."""
    for band in range(bands):
        hashed = np.uint64(0)
        for k in range(band * size // bands, (band + 1) * size // bands):
            hashed = hashed * MULTIPLIER + np.uint64(np.uint32(signature[k])) + MIXER
        slots[band] = (band << bits) + np.int64(mix(hashed) >> np.uint64(64 - bits))


@compiled
def find_first(signature, slots, signatures, size, bands, older, newest, max_chain, min_equal):
    """Return the first document in the hash tables that is similar to one with this signature, or -1."""
    first = -1
    for band in range(bands):
        document = np.int64(newest[slots[band]])
        for _ in range(max_chain):
            if document < 0:
                break
            if first < 0 or document < first:
                equal = 0
                for k in range(size):
                    equal += signatures[document * size + k] == signature[k]
                if equal >= min_equal:
                    first = document
            document = np.int64(older[document * bands + band])
    return first


@compiled
def find_similar(
    signatures_at, older_at, newest_at, slots_at, results_at, n, size, bands, max_chain, min_equal, bits, known, add
):
    """Write the index of the first document that is similar to each of n documents, or -1.

    size: values per signature, at least min_equal of which are equal for similar documents. max_chain: documents per
    band to compare with. known: the first `known` documents are added to the hash tables; add: so are others for which
    the result is -1. slots: for the slots of one document.
    """
    signatures, older = integers_32(signatures_at, n * size), integers_32(older_at, n * bands)
    newest, slots, results = integers_32(newest_at, bands << bits), integers(slots_at, bands), integers(results_at, n)
    for document in range(n):
        signature = integers_32(signatures_at + 4 * size * document, size)
        find_slots(signature, size, bands, bits, slots)
        has_words = False
        for k in range(size):
            has_words |= signature[k] != -1
        first = -1
        if document >= known and has_words:
            first = find_first(signature, slots, signatures, size, bands, older, newest, max_chain, min_equal)
        results[document] = first
        if document < known or (add and first < 0):
            for band in range(bands):
                older[document * bands + band] = newest[slots[band]]
                newest[slots[band]] = document
    return n
