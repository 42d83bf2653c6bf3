"""The pages that are typed in: their files and their lines."""

import os
import re
import sys
from functools import partial
from pathlib import Path

from tests import processes
from tests.pages import ON_ONE_CORE, blocks, section

TUTORIAL, RECIPES, TASKS = "docs/tutorial.md", "docs/recipes.md", "docs/tasks.md"


def write_files(page, server=None):
    """The files that a page shows: examples that begin with the file's name, as a comment.

    Args:
        server: takes the place of the addresses in them.
    """
    for block in blocks(page=page):
        if name := re.match(r"# (\S+)\n", block.text):
            text = here_instead(block.text, server) if server else block.text
            Path(name[1]).write_text(text)


def type_in(line, code=0):
    """What a shell prints for it. It must end with this exit code."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    shell = ["bash", "-c", f"{line}\nexit $?"]
    return printed(shell, code, env=environment, preexec_fn=partial(exec, ON_ONE_CORE, {}))


def printed(line, code, **options):
    ended = processes.run(line, **options)
    assert ended.returncode == code, f"{line} ended with {ended.returncode}: {ended.stderr}"
    return ended.stdout + ended.stderr


def of(heading):
    text = section(RECIPES, f"## {heading}")
    return [block for block in blocks("bash", RECIPES) if block.text in text]


def here_instead(text, server):
    text = re.sub("http://127.0.0.1:8(000|888)", server.url, text)
    return re.sub("(my|other)-model", "fake", text)
