"""Commands in this process, as tests give them: see the fixtures ``command`` and ``said``."""

import json

from datatrove_ckpt.cli.main import main


class Printed(str):
    """What a command has printed on its standard output and then on its standard error."""

    @property
    def error(self):
        """The last error, to its end."""
        return self.err[self.err.rindex("error: ") :].strip()


class Command:
    """``datatrove-ckpt WORDS``, which must end with this exit code (None: with any)."""

    def __init__(self, capture):
        self._capture = capture

    def __call__(self, *words, code=0):
        self._capture.readouterr()
        found = main([str(word) for word in words])
        out, err = self._capture.readouterr()
        printed = Printed(out + err)
        printed.code, printed.out, printed.err = found, out, err
        assert code in (found, None), f"{words} ended with {found}: {printed}"
        return printed

    def json(self, *words):
        """What it says with ``--json``."""
        return json.loads(self(*words, "--json").out)
