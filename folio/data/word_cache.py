"""A cache of the words that a BPE has encoded, because most words of a text are repeated."""

import itertools
from collections.abc import Sequence

import numpy as np
import tiktoken

from folio.machine import compiled
from folio.machine.compiled import CompiledModule, addresses

TEXT_STEP = CompiledModule("folio.data.text_step", imports=("folio.machine.simd",))  # also hashes words
SLOTS, MAX_IDS = 1 << 20, 4  # as in folio/data/text_step.py
PADDING = bytes(16)  # words are read and copied as two 8-byte numbers


class WordCache:
    """Encodes texts by looking up their words. tiktoken encodes new words and long words.

    The ids are equal to those of the complete text, because it is cut only where GPT-2's pattern always ends a word.
    Memory: at most 32 MB.

    separator: the encoding's special token, which no word contains.
    """

    def __init__(self, encoding: tiktoken.Encoding, separator: str):
        self.encoding, self.separator, self.separator_id = encoding, separator, encoding.encode_single_token(separator)
        self.table = np.zeros((SLOTS, 4), np.uint64)
        self.n_words = np.zeros(1, np.int64)  # the number of words in the table
        self.encode_words = compiled.function(TEXT_STEP, "encode_words", 9)
        self.join_tokens = compiled.function(TEXT_STEP, "join_tokens", 5)
        self.insert_missing = compiled.function(TEXT_STEP, "insert_missing", 9)

    def encode(self, contents: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each text, given as UTF-8."""
        content = b"".join([*contents, self.separator.encode(), PADDING])
        ends = np.cumsum([len(c) for c in contents], dtype=np.int64)
        data = np.frombuffer(content, np.uint8)[: ends[-1] if len(ends) else 0]
        id_ends, cuts = np.empty_like(ends), np.empty(len(data) + 1, np.int64)
        ids, missing = np.empty(len(data) + MAX_IDS, np.int32), np.empty((len(data), 3), np.int64)
        n_missing = self.encode_words(
            *addresses(data, ends), len(ends), *addresses(self.table, self.n_words, cuts, ids, id_ends, missing)
        )
        if n_missing:
            new, new_ends = self._encode_missing(content, missing[:n_missing])
            encoded, ids = ids, np.empty(len(data), np.int32)
            texts = *addresses(encoded, id_ends), len(ends)
            self.insert_missing(*texts, *addresses(missing), n_missing, *addresses(new, new_ends, self.table, ids))
        return [ids[begin:end] for begin, end in itertools.pairwise([0, *id_ends.tolist()])]

    def _encode_missing(self, content: bytes, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encode the words content[begin:end]. Returns all ids, and the end of each word in the ids.

        The content ends with the separator and PADDING.
        """
        n, end = len(missing), len(content) - len(PADDING)
        bounds = np.append(missing[:, :2], [end - len(self.separator.encode()), end])
        pieces = np.full(2 * n - 1, 2 * n, np.int32)  # the separator has the index 2 n
        pieces[::2] = 2 * np.arange(n)  # word k has the index 2 k
        data = np.frombuffer(content, np.uint8)
        arguments = *addresses(pieces), len(pieces), *addresses(bounds, data)
        buffer = np.empty(self.join_tokens(*arguments, 0) + len(PADDING), np.uint8)
        text = str(buffer[: self.join_tokens(*arguments, *addresses(buffer))], "utf-8")
        ids = self.encoding.encode_to_numpy(text, allowed_special={self.separator}).astype(np.int32)
        separators = np.append(np.flatnonzero(ids == self.separator_id), len(ids))
        return ids[ids != self.separator_id], separators - np.arange(len(separators))
