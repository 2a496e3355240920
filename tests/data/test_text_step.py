"""Ends of words, against GPT-2's pre-tokenizer, and case folding, against Python's.

The loops are tested through the modules that run them: test_word_cache.py and test_leakage.py.
"""

import itertools
import random

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from folio.data.text_step import FOLDED, KINDS, WORD_ENDS

KIND_SEQUENCES = [*"a0 \n'.", *"é中🎉\u00a0\u2003"]  # a character for each sequence of kinds that a character may have
CHARACTERS = [*"aZ09", *"'''", *"   ", *"\n\t\r", *".-&", *"éßñ中。🎉", *"\u0085\u00a0\u2003\u2028\u3000"]


def test_words_end_where_the_table_says_so(seed):
    """The table depends on four bytes, and must be correct for any bytes before and after them. Four characters have
    all four bytes that occur in a text.
    """
    rng, words = random.Random(seed), pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = map("".join, itertools.product(KIND_SEQUENCES, repeat=4))
    longer = (rng.choices(rng.sample(CHARACTERS, rng.randint(2, 12)), k=rng.randint(1, 50)) for _ in range(2000))
    for text in [*texts, *map("".join, longer)]:
        ends = {len(text[:end].encode()) for _, (_, end) in words.pre_tokenize_str(text)}
        kinds = KINDS[np.frombuffer(text.encode(), np.uint8)].tolist()
        for k in range(3, len(kinds)):
            entry = WORD_ENDS.reshape(8, 8, 8, 8)[tuple(kinds[k - 3 : k + 1])]
            assert k in ends or not entry & 1, (text, k)
            assert k - 1 in ends or not entry & 2, (text, k)


@pytest.mark.parametrize("pair", ["Aa", "Zz", "Éé", "Жж", "Σσ", "ςσ", "aa", "ßß"])
def test_letters_are_folded_to_lower_case_with_the_same_number_of_bytes(pair):
    assert FOLDED[ord(pair[0])] == ord(pair[1])
    assert len(pair[0].encode()) == len(pair[1].encode())
