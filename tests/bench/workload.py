"""Inputs: numbered documents of a given size, made once per folder.

A document's text begins with ``#<number>#``, by which the mock server tells documents apart.
"""

import gzip
import json
import random

_LETTERS = "e" * 12 + "t" * 9 + "aoinshr" * 7 + "dlu" * 4 + "cmfwypvbgk" * 2 + "jxqz"


def rows(count, size):
    """Rows whose text has ``size`` characters, of words no compressor finds too easy.

    The letters are as frequent as in English: what searches a text costs less in digits.
    """
    chance = random.Random(0)
    words = ["".join(chance.choices(_LETTERS, k=chance.randint(2, 9))) for _ in range(5000)]
    stock = " ".join(chance.choices(words, k=200_000 + size // 4))
    for number in range(count):
        start = chance.randrange(len(stock) - size)
        text = f"#{number}# {stock[start : start + size]}"[:size]
        yield {"text": text, "id": f"document {number}", "url": f"https://example.org/{number}"}


def make_input(folder, kind, count, size):
    """A folder with one file of ``count`` documents, jsonl or jsonl.gz; one that is there already
    is taken as it is.
    """
    place = folder / "inputs" / f"{kind.replace('.', '-')}-{count}-{size}"
    if (place / "done").exists():
        return place / "data"
    (place / "data").mkdir(parents=True, exist_ok=True)
    path = str(place / "data" / f"input.{kind}")
    with gzip.open(path, "wb", compresslevel=3) if kind == "jsonl.gz" else open(path, "wb") as file:  # noqa: PTH123
        file.writelines(json.dumps(row).encode() + b"\n" for row in rows(count, size))
    (place / "done").touch()
    return place / "data"
