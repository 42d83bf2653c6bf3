"""Shell completion: what bash offers, asked as bash asks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from datatrove_ckpt.cli.main import main

ASK = """
source datatrove-ckpt.bash
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
COMP_TYPE=9
eval "$(complete -p datatrove-ckpt | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with the script, a YAML file and a folder of checkpoints; it is the working directory."""
    monkeypatch.chdir(tmp_path)
    assert main(["completion", "bash"]) == 0
    Path("datatrove-ckpt.bash").write_text(capsys.readouterr().out)
    Path("job.yaml").touch()
    Path("checkpoints").mkdir()
    return tmp_path


def offered(words: str) -> set[str]:
    asked = subprocess.run(["bash", "-c", ASK.format(words=words)], capture_output=True, text=True, check=True)
    return {line.strip() for line in asked.stdout.splitlines()}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("words", "offers"),
    [
        ("datatrove-ckpt ''", {"run", "doctor", "verify", "schema", "completion"}),
        ("datatrove-ckpt ver", {"verify"}),
        ("datatrove-ckpt run --d", {"--dry-run"}),
        ("datatrove-ckpt run j", {"job.yaml"}),
        ("datatrove-ckpt status ch", {"checkpoints"}),
        ("datatrove-ckpt repair checkpoints --logging-dir ch", {"checkpoints"}),
        ("datatrove-ckpt completion z", {"zsh"}),
    ],
)
def test_bash_completes_commands_options_and_paths(words: str, offers: set[str]) -> None:
    assert offers <= offered(words)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_with_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("run", "doctor", "retry-dead-letters", "logging-dir"))
