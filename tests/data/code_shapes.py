"""Functions of many shapes, to hash on every Python version. They need only the standard library and the syntax of Python 3.11.

Quotes, layout and annotations vary on purpose, so no formatter may touch this file. A change of code changes golden hashes in ``test_identity.py``.
"""

import asyncio
import contextlib
import dataclasses
import functools
import re
import textwrap
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import PurePosixPath
from typing import Any, Optional

PROMPT = "Rewrite: "
WORDS = {"one", "two", "three"}
calls: int = 0


async def f_strings(document: Any, generate: Any, width: int = 8) -> str:
    """Everything that f-strings can do on 3.11."""
    name = document.metadata["name"]
    parts = [
        f"{document.metadata['title']!r:>{width}} of {{{name}}}",
        f"{name=} { name = } {name=!s:^10} {width:} {width:{'0'}{'>'}{width + 2}.{2}f}",
        f"""{", ".join(f"{key}: '{value}'" for key, value in document.metadata.items())}""",
        f'{document.metadata["a"]["b"]}' "and " f"{(lambda x: {'x': x})(1)}" rf"\d{{3}} {width!a}",
        f"nothing to fill in {{}}" "\N{GREEK SMALL LETTER ALPHA}" f"{'nested ' + f'{1 + 1}'}",
        f"""first line
        {name
         .strip()} last line""",
    ]
    return "".join(parts)


def repeated(times: int) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> list[Any]:
            return [await function(*args, **kwargs) for _ in range(times)]

        return wrapper

    return decorate


@repeated(3)
@contextlib.contextmanager
def decorated(document: Any, generate: Any) -> Any:
    yield PROMPT


async def comprehensions(document: Any, generate: Any) -> Any:
    lines = [line for line in document.text.splitlines() if line not in {"-", "--", "---"}]
    counts = {word: sum(word in line for line in lines) for word in sorted(WORDS)}
    nested = {(x, y) for x in lines for y in (c for c in x if c) if x != y}
    return [answer async for answer in generate(lines[1:-1:2], *nested, **counts)]


async def matching(document: Any, generate: Any) -> Any:
    match document.metadata:
        case {"kind": "a" | "b" as kind, "size": int(size), **rest} if size > -1:
            return kind, size, rest
        case [1, -2.5, 3 + 4j, None, True, "x", *others]:
            return others
        case PurePosixPath(name=name):
            return name
        case _:
            return None


async def trying(document: Any, generate: Any) -> Any:
    global calls
    try:
        calls += 1
        answer = await generate({"prompt": document.text})
    except (ValueError, KeyError) as error:
        raise RuntimeError(f"no answer: {error}") from error
    else:
        return answer
    finally:
        while True:
            break
        del document


async def trying_groups(document: Any, generate: Any) -> Any:
    try:
        async with asyncio.timeout(10) as limit, asyncio.TaskGroup() as group:
            task = group.create_task(generate({"prompt": document.text}))
    except* TimeoutError:
        assert limit.expired(), "no limit"
    return task.result()


async def walrus(document: Any, generate: Any) -> Any:
    while (answer := await generate({"n": (n := len(document.text) // 2 or 1)})) and n > 1:
        yield answer
    print(f"{(n := 3)}", end="", flush=not answer)


def hinting(unused: str, used: int) -> Any:
    async def rollout(document: "Document", generate: Callable[..., Awaitable[Any]], /, *, k: Optional[int] = None) -> int:
        count: unused = used
        document.metadata["k"]: unused = k

        class Answer:
            """A class with annotations."""

            text: str
            tokens: int | None = None

            def cost(self) -> "float | None":
                return self.tokens and self.tokens * 0.1

        return Answer().cost() or count

    return rollout


def closing(times: int, suffix: str, never_used: str) -> Any:
    async def rollout(document: Any, generate: Any) -> Any:
        def inner() -> str:
            return document.text * times

        return [inner() + suffix for _ in range(2)]

    return rollout


async def defaults(
    document: Any,
    generate: Any,
    prompt: str = "Say: ",
    clean: Any = textwrap.dedent,
    folder: PurePosixPath = PurePosixPath("prompts"),
    *,
    limit: "int | None" = None,
    kinds: tuple[str, ...] = ("a", "b"),
    **shared: Any,
) -> Any:
    return await generate({"prompt": prompt + clean(document.text)[:limit]}, *kinds, **shared)


def reading_all(style: str, tone: str) -> Any:
    async def rollout(document: Any, generate: Any) -> Any:
        """Rewrite this:

            {style}
        - as a list
          - and a second level

        """
        if False:
            print(style, tone)
        return await generate(rollout.__doc__.format(**locals()), __annotations__)

    return rollout


__annotations__ = {"tokens": "int"}


class Asker:
    """A rollout with settings."""

    def __init__(self, words: int) -> None:
        self.words = words

    async def __call__(self, document: Any, generate: Any) -> Any:
        """The first words.

        Indentation of a docstring does not count.
        """
        return await generate(document.text[: self.words])


one = lambda document, generate: generate({"prompt": document.text})
first, second = lambda d, g: g(d.text), lambda d, g: g(d.id)
in_a_call = functools.partial(
    lambda document, generate, style: generate(f"{style}: {document.text}"),
    style="plain",
)


def constants() -> Any:
    yield "\U0001fae8 is newer than the Unicode of 3.11, \U0001cc00 than that of 3.13; ä, \ud800, \x00"
    yield "🫨 é ß", b"\x00\xff", "it's", 'say "yes"', "both ' and \"", "back\\slash\ttab"
    yield 0x_FF, 1_000_000, 10**30, 123456789012345678901234567890, 1e100, 1e-7, 0.1 + 0.2, 1e999, 2.5j, -0.0
    yield ..., None, True, ("a", ("b",)), u"unicode"
    größe, ﬁeld = 1, 2
    yield größe, ﬁeld


def unreachable(document: Any) -> Any:
    if False:
        return PROMPT
    while 0:
        print(WORDS)
    return re if __debug__ else calls


@dataclasses.dataclass
class Item:
    name: str
    count: "int" = 3


async def making(document: Any, generate: Any) -> Any:
    return await generate({"prompt": Item(document.text).name})


SHAPES = {
    "f_strings": f_strings,
    "decorated": decorated,
    "comprehensions": comprehensions,
    "matching": matching,
    "trying": trying,
    "trying_groups": trying_groups,
    "walrus": walrus,
    "hinting": hinting("a", 1),
    "closing": closing(2, "!", "?"),
    "reading_all": reading_all("plain", "formal"),
    "defaults": defaults,
    "callable object": Asker.__call__,
    "partial": in_a_call.func,
    "lambda": one,
    "first of two lambdas": first,
    "second of two lambdas": second,
    "constants": constants,
    "unreachable": unreachable,
    "making": making,
}

TYPES = {
    "path": type(PurePosixPath(".")),
    "zip": zipfile.Path,
    "set": type(WORDS),
    "pattern": type(re.compile("a")),
    "partial": type(in_a_call),
}
