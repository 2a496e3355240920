"""Reads the tokenizer files of other programs, checking every rule, and converts Folio's tokenizers to their formats.

Folio supports characters, bytes, and byte-level BPE with GPT-2's pre-tokenizer, whose only special token is the last
one, <|endoftext|>. Anything else in a file is an error.
"""

import json
from pathlib import Path
from typing import Any

from folio.base.files import read_json, read_text, short_repr, shorten
from folio.checkpoints.run_folder import CheckpointError
from folio.data.shards import nanogpt_tokenizer
from folio.data.tokenizer import (
    EOT_TEXT,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    GPT2Tokenizer,
    RankedTokenizer,
    Tokenizer,
    byte_alphabet,
    gpt2_tokenizer,
)

OFF = [False, None]  # values of a setting that is off
SURROUNDINGS = dict.fromkeys(("lstrip", "rstrip", "single_word"), OFF)  # of an added token: what it removes or requires
UNKNOWN = "<unk>"  # not in any exported vocabulary of characters, so that unknown characters are errors there, too

# --- Hugging Face -----------------------------------------------------------------------------------------------------


def read_hugging_face(folder: Path, vocab_size: int) -> Tokenizer:
    """The BPE from merges.txt or tokenizer.json in the folder; without both, GPT-2's if vocab_size is GPT-2's.

    The other tokenizer files must agree with it. Raises CheckpointError.
    """
    if (folder / "tokenizer.json").exists() and (exported := _exported_by_folio(folder / "tokenizer.json")):
        return exported
    readers = {"merges.txt": _read_merges, "tokenizer.json": _read_tokenizer_json}
    tokenizers = [read(folder / name) for name, read in readers.items() if (folder / name).exists()]
    if not tokenizers:
        if not is_gpt2_size(vocab_size):
            raise CheckpointError(
                f"{folder} has no merges.txt and no tokenizer.json, and a vocabulary of {vocab_size:,} tokens is not "
                f"GPT-2's: add the tokenizer's files to the folder"
            )
        tokenizers = [gpt2_tokenizer()]
    ranks = tokenizers[0].ranks
    if ranks != tokenizers[-1].ranks:
        raise CheckpointError(f"{folder}: merges.txt and tokenizer.json have different tokens")
    _check_other_files(folder, ranks)
    return tokenizers[0]


def _check_other_files(folder: Path, ranks: list[bytes]) -> None:
    """Raise CheckpointError if another tokenizer file contradicts the tokens or adds tokens to texts."""
    for name in ("vocab.json", "added_tokens.json"):
        if (folder / name).exists():
            _check_ids(f"{folder / name}", read_json(folder / name), ranks)
    if (folder / "tokenizer_config.json").exists():
        config = read_json(folder / "tokenizer_config.json")
        source = f"{folder}: tokenizer_config.json"
        check_fields(source, config, dict.fromkeys(("add_prefix_space", "add_bos_token", "add_eos_token"), OFF))
        added_tokens = config.get("added_tokens_decoder") or {}
        _check_ids(source, {token["content"]: int(i) for i, token in added_tokens.items()}, ranks)
        for token in added_tokens.values():
            check_fields(f"{source}: {short_repr(token['content'])}", token, SURROUNDINGS)


def _exported_by_folio(path: Path) -> Tokenizer | None:
    """The tokenizer of characters or bytes if tokenizer.json is as `to_hugging_face` writes it, otherwise None."""
    content = read_json(path)
    vocab = content["model"]["vocab"]
    tokenizer: Tokenizer = ByteTokenizer()
    if content["model"].get("type") == "WordLevel":
        characters = sorted(vocab, key=vocab.__getitem__)
        if any(len(character) != 1 for character in characters):
            return None
        tokenizer = CharTokenizer("".join(characters), eot=bool(content["added_tokens"]))
    expected = json.loads(to_hugging_face(tokenizer).to_str())
    compared = ("model", "pre_tokenizer", "normalizer", "added_tokens")
    return tokenizer if all(content[part] == expected[part] for part in compared) else None


def _read_merges(path: Path) -> GPT2Tokenizer:
    """The tokenizer from merges.txt and the vocab.json next to it."""
    lines = read_text(path).splitlines()[1:]  # the first line is a version
    vocab = read_json(path.with_name("vocab.json"))
    source = f"{path.parent}: merges.txt and vocab.json"
    return GPT2Tokenizer(ranks_of_merges(source, [line.split(" ") for line in lines if line], vocab))


def _read_tokenizer_json(path: Path) -> RankedTokenizer:
    """The tokenizer from tokenizer.json: a BPETokenizer if the file is as Folio writes it, and a GPT2Tokenizer if the
    end-of-text token is in the model's vocabulary, as in GPT-2's file.
    """
    content = read_json(path)
    if (kind := content["model"].get("type", "BPE")) != "BPE":
        raise CheckpointError(
            f"{path}: {short_repr(kind)} is not supported, only byte-level BPE with GPT-2's pre-tokenizer"
        )
    model, pre_tokenizer, post = content["model"], content["pre_tokenizer"], content.get("post_processor") or {}
    if post.get("special_tokens") or post.get("type") not in (None, "ByteLevel", "TemplateProcessing"):
        raise CheckpointError(f"{path} has a post_processor that adds tokens to texts, which Folio does not support")
    vocab = dict(model["vocab"])
    merges = [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in model["merges"]]
    ranks = ranks_of_merges(f"{path}", merges, vocab)
    for token in content["added_tokens"]:
        check_fields(f"{path}: {short_repr(token['content'])}", token, SURROUNDINGS)
    is_gpt2 = vocab.pop(EOT_TEXT, None) is not None
    try:  # BPETokenizer checks all other fields
        model = {"type": "BPE", **model, "vocab": vocab, "merges": merges}
        tokenizer = BPETokenizer({**content, "model": model, "pre_tokenizer": {"use_regex": True, **pre_tokenizer}})
    except ValueError as error:
        raise CheckpointError(f"{path} is not a supported tokenizer: {error}") from None
    return GPT2Tokenizer(ranks) if is_gpt2 else tokenizer


# --- nanoGPT and GGUF -------------------------------------------------------------------------------------------------


def read_nanogpt(checkpoint: Path, dataset: str, vocab_size: int) -> Tokenizer:
    """The characters from data/DATASET/meta.pkl, searched for from the checkpoint's folder upward. Without this file,
    GPT-2's tokenizer if vocab_size is GPT-2's. Raises CheckpointError, or DatasetError for a damaged meta.pkl.
    """
    if dataset:
        for parent in checkpoint.resolve().parents:
            meta = parent / "data" / dataset / "meta.pkl"
            if meta.exists():
                # GPT-2 finetuned on characters keeps its vocabulary size
                return nanogpt_tokenizer(meta, None if is_gpt2_size(vocab_size) else vocab_size)
    if is_gpt2_size(vocab_size):
        return gpt2_tokenizer()
    name = shorten(" ".join(dataset.split()), 100) or "NAME"
    raise CheckpointError(
        f"{checkpoint}: a vocabulary of {vocab_size:,} tokens is not GPT-2's, and no meta.pkl lists its characters: "
        f"put this file into data/{name} next to {checkpoint.name}"
    )


def read_gguf(path: Path, fields: dict[str, Any]) -> GPT2Tokenizer:
    """The tokenizer from a GGUF file. Its list of tokens must be in the order of the merges, followed by the
    end-of-text token and unused tokens. Raises CheckpointError.
    """
    from gguf import TokenType

    typed_tokens = list(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True))
    normal = {token: i for i, (token, kind) in enumerate(typed_tokens) if kind == TokenType.NORMAL}
    special = [i for i, (_, kind) in enumerate(typed_tokens) if kind not in (TokenType.NORMAL, TokenType.UNUSED)]
    ranks = ranks_of_merges(f"{path}", [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]], normal)
    for i in [fields["tokenizer.ggml.eos_token_id"], *special]:
        if i != len(ranks):
            raise CheckpointError(
                f"{path}: the token {short_repr(i)} is special; Folio supports only one special token, after the last "
                f"merge: {len(ranks)}"
            )
    return GPT2Tokenizer(ranks)


# --- checks -----------------------------------------------------------------------------------------------------------


def ranks_of_merges(source: str, merges: list[list[str]], vocab: dict[str, int]) -> list[bytes]:
    """The tokens by id: the 256 bytes in the order of the vocabulary, then the result of each merge. Merges and
    vocabulary are in the byte alphabet.

    Raises CheckpointError if a merge does not produce a new token or never applies, or if the tokens and ids of the
    vocabulary differ.
    """
    alphabet = byte_alphabet()
    rank = {token: i for i, token in enumerate(sorted(alphabet, key=lambda letter: vocab.get(letter, 256)))}
    parts: dict[str, list[str]] = {}  # the two parts of each merged token
    for pair in merges:
        token, problem = "".join(pair), None
        if len(pair) != 2 or not rank.keys() >= set(pair) or token in rank:
            problem = "does not produce a new token from two earlier tokens"
        elif not merge_applies(*pair, rank, parts):
            problem = "never applies, because earlier merges take precedence"
        if problem:
            raise CheckpointError(f"{source}: the merge {short_repr(' '.join(pair))} {problem}")
        rank[token], parts[token] = len(rank), pair
    ranks = [bytes(map(alphabet.__getitem__, token)) for token in rank]
    _check_ids(source, vocab, ranks)
    if missing := rank.keys() - vocab.keys():
        raise CheckpointError(f"{source}: the vocabulary lacks the token {short_repr(min(missing))}")
    return ranks


def merge_applies(left: str, right: str, rank: dict[str, int], parts: dict[str, list[str]]) -> bool:
    """Whether byte-pair encoding of left + right produces the tokens `left` and `right`. Only then are merging by the
    rank of the result (tiktoken) and by the rank of the pair (Hugging Face's tokenizers) equivalent.

    Undoes the merges of the two tokens, latest merge first. The two tokens next to the boundary must not merge with
    each other earlier than within `left` or `right`.
    """
    while left in parts or right in parts:
        if left in parts and (right not in parts or rank[left] > rank[right]):
            limit, left = rank[left], parts[left][1]
        else:  # for equal ranks, the left merge is first
            limit, right = rank[right] + 1, parts[right][0]
        if rank.get(left + right, limit) < limit:
            return False
    return True


def _check_ids(source: str, ids: dict[str, int], ranks: list[bytes]) -> None:
    """Raise CheckpointError unless each token has the same id in Folio."""
    expected = {token: i for i, token in enumerate([*spell_tokens(ranks), EOT_TEXT])}
    for token, i in ids.items():
        if token not in expected:
            raise CheckpointError(
                f"{source}: no merge produces the token {short_repr(token)} (id {short_repr(i)}); Folio supports only "
                f"the added token {EOT_TEXT}"
            )
        if i != expected[token]:
            raise CheckpointError(
                f"{source}: {short_repr(token)} has the id {short_repr(i)}, but the order of the merges gives it "
                f"{expected[token]}"
            )


def is_gpt2_size(vocab_size: int) -> bool:
    """Whether a vocabulary size is GPT-2's: 50,257, possibly padded to a multiple of 64, such as nanoGPT's 50,304."""
    return vocab_size == 50257 or (vocab_size % 64 == 0 and 50257 < vocab_size <= 51200)


def check_fields(source: str, fields: dict[str, Any], supported: dict[str, list[Any]]) -> None:
    """Raise CheckpointError for a field with an unsupported value. A field may be missing."""
    for name, values in supported.items():
        if name in fields and fields[name] not in values:
            allowed = " or ".join(map(repr, values))
            raise CheckpointError(f"{source} has {name}={short_repr(fields[name])}; Folio supports only {allowed}")


# --- writing ----------------------------------------------------------------------------------------------------------


def to_hugging_face(tokenizer: Tokenizer) -> Any:
    """Convert a tokenizer to tokenizers.Tokenizer of Hugging Face's library."""
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

    if isinstance(tokenizer, BPETokenizer):
        return tokenizers.Tokenizer.from_str(json.dumps(tokenizer.definition()))
    if isinstance(tokenizer, CharTokenizer):
        ids = {character: i for i, character in enumerate(tokenizer.characters)}
        converted = tokenizers.Tokenizer(models.WordLevel(ids, UNKNOWN))
        converted.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        converted.decoder = decoders.Fuse()
    else:
        is_byte = isinstance(tokenizer, ByteTokenizer)
        ranks = [bytes([b]) for b in range(256)] if is_byte else tokenizer.ranks
        spelled = spell_tokens(ranks)
        merges = [(spelled[left], spelled[right]) for left, right in merge_pairs(ranks)]
        converted = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(spelled)}, merges))
        converted.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_byte)
        converted.decoder = decoders.ByteLevel()
    if tokenizer.eot is not None:
        converted.add_special_tokens([AddedToken(EOT_TEXT, special=True)])
    return converted


def spell_tokens(ranks: list[bytes]) -> list[str]:
    """Tokens in the byte alphabet, the visible characters that represent bytes in tokenizer files."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    return ["".join(letters[byte] for byte in token) for token in ranks]


def merge_pairs(ranks: list[bytes]) -> list[tuple[int, int]]:
    """The merge of each token after the 256 bytes, as the ids of two tokens."""
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    pairs = []
    for rank, token in enumerate(ranks):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            best = min(range(len(parts) - 1), key=lambda i: rank_of.get(parts[i] + parts[i + 1], rank))
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            pairs.append((rank_of[parts[0]], rank_of[parts[1]]))
    return pairs
