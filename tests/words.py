"""A tokenizer whose tokens are words, for tests."""


def write_tokenizer(folder, more=()):
    """Writes ``tokenizer.json`` into the folder, and returns the folder.

    ``more``: further words of its vocabulary.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    names = ["[UNK]", *more]
    tokenizer = Tokenizer(
        WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


LOOP = "a word " * 90


REFUSAL = "I'm sorry, but I can't assist with that."
