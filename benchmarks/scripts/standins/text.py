"""Texts that stand in for wikitext, the Penn Treebank and Shakespeare: Python's own standard library as text.

Always the same for one Python version, on every machine that has Python, and with the long tail of rare words that
makes a language model's vocabulary what it is.
"""

import pickle
import sysconfig
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

UNKNOWN_WORD = "<unk>"


def source_lines() -> Iterator[str]:
    """Every line of the standard library's modules (its tests and site-packages left out), in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    for path in sorted(library.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(library).parts):
            yield from path.read_text(encoding="utf-8", errors="ignore").splitlines()


def lines_of_words(words: int) -> list[str]:
    """As many non-empty lines as it takes to reach so many words, from the beginning again where one pass is short."""
    lines: list[str] = []
    count = 0
    available = [line for line in source_lines() if line.strip()]
    while count < words:
        for line in available:
            lines.append(line)
            count += len(line.split()) + 1  # the scripts add an end-of-line word
            if count >= words:
                break
    return lines


def with_vocabulary(lines: Iterable[str], vocabulary: int) -> list[str]:
    """The same lines with every word beyond the most frequent ones replaced, as those corpora do it."""
    kept_lines = list(lines)
    counts = Counter(word for line in kept_lines for word in line.split())
    kept = {word for word, _ in counts.most_common(vocabulary - 2)}  # one is the unknown word, one the end of line
    return [" ".join(word if word in kept else UNKNOWN_WORD for word in line.split()) for line in kept_lines]


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_corpus(folder: Path, *, words: int, vocabulary: int) -> None:
    """train.txt, valid.txt and test.txt in the proportions 20 : 1 : 1."""
    lines = with_vocabulary(lines_of_words(words * 22 // 20), vocabulary)
    part = max(1, len(lines) // 22)
    write_lines(folder / "train.txt", lines[: -2 * part])
    write_lines(folder / "valid.txt", lines[-2 * part : -part])
    write_lines(folder / "test.txt", lines[-part:])


def write_treebank(path: Path, *, words: int, vocabulary: int = 10_000) -> None:
    """One file of so many words, its vocabulary that of the Penn Treebank as language models use it."""
    write_lines(path, with_vocabulary(lines_of_words(words), vocabulary))


def write_characters(folder: Path, *, characters: int) -> None:
    """train.bin, val.bin (token numbers, 16 bits each) and meta.pkl, as nanoGPT's character data sets have them."""
    text = "\n".join(lines_of_words(characters // 2))[:characters].encode("ascii", "ignore").decode()
    alphabet = sorted(set(text))
    number_of = {character: number for number, character in enumerate(alphabet)}
    numbers = array("H", (number_of[character] for character in text))
    split = len(numbers) * 9 // 10
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.bin").write_bytes(numbers[:split].tobytes())
    (folder / "val.bin").write_bytes(numbers[split:].tobytes())
    meta = {"vocab_size": len(alphabet), "itos": dict(enumerate(alphabet)), "stoi": number_of}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
