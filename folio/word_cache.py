"""A cache of the words that a BPE has encoded, because most words of a text occur again."""

import itertools
from collections.abc import Sequence

import numpy as np
import tiktoken

from folio import compiled
from folio.compiled import addresses

SLOTS = 1 << 20  # as in folio/text_step.py
PADDING = bytes(16)  # because words are read as two numbers


class WordCache:
    """Encodes texts by looking their words up. tiktoken encodes each word that is new, and those that are long.

    The ids are those of the whole text: it is only cut where GPT-2's pattern ends a word, whatever comes before and
    after. Memory: at most 32 MB.

    separator: the encoding's special token, which no word contains.
    """

    def __init__(self, encoding: tiktoken.Encoding, separator: str):
        self.encoding, self.separator, self.separator_id = encoding, separator, encoding.encode_single_token(separator)
        self.table = np.zeros((SLOTS, 4), np.uint64)
        self.n_words = 0  # in the table
        self.encode_words = compiled.function("encode_words", "text_step", 8)
        self.add_words = compiled.function("add_words", "text_step", 7)

    def encode(self, contents: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each of the texts, which are UTF-8."""
        content = b"".join([*contents, PADDING])
        data = np.frombuffer(content, np.uint8)[: len(content) - len(PADDING)]
        ends = np.cumsum([len(c) for c in contents], dtype=np.int64)
        ids, missing = np.empty(len(data), np.int32), np.empty((len(data), 3), np.int64)
        id_ends, missing_ends = np.empty_like(ends), np.empty_like(ends)
        n_ids = self.encode_words(
            *addresses(data, ends), len(ends), *addresses(self.table, ids, id_ends, missing, missing_ends)
        )
        ids, missing = ids[:n_ids], missing[: missing_ends[-1] if len(ends) else 0]
        if len(missing):
            new, new_ends = self._encode_missing(content, missing)
            ids = np.insert(ids, np.repeat(missing[:, 2], np.diff(new_ends, prepend=0)), new)
            id_ends += np.append(0, new_ends)[missing_ends]
            self.n_words = self.add_words(
                *addresses(data, missing), len(missing), *addresses(new, new_ends, self.table), self.n_words
            )
        bounds = [0, *id_ends.tolist()]
        return [ids[begin:end] for begin, end in itertools.pairwise(bounds)]

    def _encode_missing(self, content: bytes, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the words content[begin:end], and where those of each word end."""
        words = [content[begin:end] for begin, end, _ in missing.tolist()]
        text = self.separator.encode().join(words).decode()
        ids = self.encoding.encode_to_numpy(text, allowed_special={self.separator}).astype(np.int32)
        separators = np.append(np.flatnonzero(ids == self.separator_id), len(ids))
        return ids[ids != self.separator_id], separators - np.arange(len(separators))
