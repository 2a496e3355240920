"""Folk tunes in ABC notation as plain characters, one document per tune.

    python prepare/tunes.py
    python prepare/tunes.py my-tunes.abc more/ --name=mine

Without inputs, the data set has the 12,978 tunes in music21's wheel on PyPI, which is downloaded once (20 MB) and
verified by its hash. Their terms are in docs/use/music.md: do not distribute them or the data set.
"""

import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from folio.base import settings  # noqa: E402
from folio.checkpoints.find_runs import find_run  # noqa: E402
from folio.data.account import IN, Account  # noqa: E402
from folio.data.corpus import Documents  # noqa: E402
from folio.data.inputs import CorpusError, Inputs, Source, find_sources  # noqa: E402
from folio.data.prepare import Fraction, PrepareConfig, default_name, prepare  # noqa: E402
from folio.data.sources import tunes  # noqa: E402
from folio.data.sources.music_corpus import MUSIC21, count_files, describe_problems, music21_wheel, split_pieces  # noqa: E402

FOLDER = "music21/corpus/"


@dataclass(frozen=True)
class TunesConfig(PrepareConfig):
    config_file = "config/tunes.py"

    # --- the tunes ---
    inputs: tuple[str, ...] = ()  # .abc files, folders of them, or patterns; none: the tunes in music21's wheel
    val_fraction: Fraction = 0.1  # share of the tunes for validation


def read_files(sources: list[Source], broken: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each ABC file. Add unreadable files to `broken`, with the reason."""
    for source in sources:
        if source.name == MUSIC21:
            with zipfile.ZipFile(source.path) as wheel:
                for name in sorted(n for n in wheel.namelist() if n.startswith(FOLDER) and n.endswith(".abc")):
                    yield name.removeprefix(FOLDER), wheel.read(name)
            continue
        try:
            content = b"".join(chunk for chunk, _ in source.read(Account()))
        except CorpusError as error:
            broken.append(str(error))
        else:
            yield source.name, content


def read_tunes(inputs: Inputs) -> tuple[list[str], dict[str, list[str]], Account]:
    """Return the usable tunes, other tunes and files by problem, with the reason, and the account of both."""
    usable: list[str] = []
    problems: dict[str, list[str]] = {"broken": [], "no tune": [], "not usable": []}
    files, counts = 0, Account()  # files with tunes
    for name, content in read_files(inputs.sources, problems["broken"]):
        text = tunes.decode(content)
        counts["characters"][IN] += len(text)
        texts = list(tunes.split_tunes(text, counts["characters"]))
        if not texts:
            problems["no tune"].append(f"{name} (it has no line X:)")
        files += bool(texts)
        counts["tunes"][IN] += len(texts)
        for number, text in texts:
            try:
                usable.append(tunes.reduce_tune(text, counts["characters"]))
            except tunes.TuneError as error:
                problems["not usable"].append(f"{name} {number} ({error})")
                counts["tunes"]["not usable"] += 1
                counts["characters"]["tunes that are not usable"] += len(text)
    unusable = count_files({problem: problems[problem] for problem in ("broken", "no tune")})
    account = inputs.account({"read as abc": files, **unusable} if inputs.sources[0].format == "abc" else None)
    account.add(counts)
    return usable, problems, account


def main(cfg: TunesConfig) -> None:
    settings.check(cfg)
    cfg = cfg.replace(tokenizer=find_run(cfg.tokenizer))
    if cfg.inputs:
        inputs = find_sources(cfg.inputs, suffixes=tunes.SUFFIXES, kind="abc")
        name = cfg.name or default_name(cfg.inputs)
    else:
        inputs, name = Inputs([Source(music21_wheel(), "wheel", MUSIC21)]), cfg.name or "tunes"
    usable, problems, account = read_tunes(inputs)
    for line in describe_problems(problems, len(usable) + sum(map(len, problems.values())), "tunes and files"):
        print(line)
    unique = tunes.remove_duplicates(usable)
    val, train = split_pieces(unique, cfg.val_fraction, tunes.without_spaces)
    print(
        f"{len(unique):,} tunes: {len(train):,} for training and {len(val):,} for validation; "
        f"repetitions left out: {len(usable) - len(unique):,}"
    )
    report = {"left_out": problems, "repetitions": len(usable) - len(unique)}
    account["tunes"].update({"used": len(unique), "repeated": len(usable) - len(unique)})
    corpus = Documents(inputs, [*val, *train], range(len(val)), report, account=account)
    prepare(cfg, corpus, name)


if __name__ == "__main__":
    settings.run_script(main, TunesConfig, needs_output=False)
