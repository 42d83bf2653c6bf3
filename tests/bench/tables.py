"""Tables in Markdown, and what all commands' parsers have in common."""

import argparse


def markdown(header, rows):
    """Each row a line. Of floats three digits are shown; None is empty."""
    names = list(header)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(map(_shown, row)) + " |" for row in rows]
    return "\n".join(lines)


def _shown(value):
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return (
        f"{value:.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.3f}"
    )


def parser(documentation):
    """``--help`` shows the module's docstring as it is."""
    return argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
