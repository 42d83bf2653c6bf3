"""What a run needs and lacks is named by one line, with its setting, before any task starts."""

import json
import sys
from pathlib import Path

import fsspec.compression
import pytest
from datatrove.utils import _import_utils
from fsspec.registry import _registry

from tests.yaml_jobs import job_yaml

JOB = job_yaml("server_type: dummy, model_name_or_path: m", tasks=2, data="documents")
S3 = "the Python package 's3fs' is not installed. Run: pip install 'datatrove-ckpt[s3]'."
ZSTD = "the Python package 'zstandard' is not installed. Run: pip install 'datatrove-ckpt[zstd]'."
PARQUET = (
    "the Python package 'pyarrow' is not installed. Run: pip install 'datatrove-ckpt[parquet]'."
)


@pytest.fixture
def without_extras(monkeypatch):
    """As after ``pip install datatrove-ckpt``: none of the extras is there."""
    for name in ("s3fs", "zstandard", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    monkeypatch.delitem(fsspec.compression.compr, "zstd", raising=False)
    _import_utils._is_package_available.cache_clear()
    yield
    _import_utils._is_package_available.cache_clear()


@pytest.fixture
def refused(here, command):
    """Runs JOB with pieces of its text replaced; it must be refused before anything starts.

    Gives the message.
    """
    Path("documents").mkdir()
    Path("documents/a.jsonl").write_text(json.dumps({"text": "Rain falls.", "id": "0"}))

    def run(*replacements):
        text = JOB
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        Path("job.yaml").write_text(text)
        said = command("run", "job.yaml", code=2).err
        assert not Path("checkpoints").exists()
        assert not list(Path().glob("logs/*"))
        return said.removeprefix("error: ").rstrip("\n")

    return run


@pytest.mark.usefixtures("without_extras")
@pytest.mark.matrix(
    "replacements, says",
    [
        ([(": documents", ": s3://bucket/in")], f"pipeline[0] JsonlReader: {S3}"),
        ([(": output,", ": s3://bucket/out,")], f"pipeline[1] InferenceRunner.output_writer: {S3}"),
        ([("checkpoints_local_dir: checkpoints",
           "checkpoints_local_dir: checkpoints\n          checkpoints_remote_dir: s3://bucket/c")],
         f"pipeline[1] InferenceRunner: checkpoints_remote_dir: 's3://bucket/c' cannot be used: {S3}"),
        ([("JsonlWriter", "ParquetWriter"), (", compression: null", "")],
         f"pipeline[1] InferenceRunner.output_writer: {PARQUET}"),
        ([('.jsonl", compression: null', '.jsonl.zst", compression: infer')],
         f"pipeline[1] InferenceRunner: output_writer: compression: {ZSTD}"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named_with_its_extra_and_its_setting(refused, replacements, says):
    assert refused(*replacements) == says


@pytest.mark.usefixtures("without_extras")
def test_input_that_cannot_be_decompressed_is_named(refused):
    Path("documents/b.jsonl.zst").write_bytes(b"(")
    place = f'pipeline[0] JsonlReader: data_folder: "{Path.cwd()}/documents"'
    assert refused() == f'{place}: "b.jsonl.zst" cannot be read: {ZSTD}'


@pytest.mark.parametrize(
    "config, says",
    [
        ("{server_type: llamacpp, model_name_or_path: no.gguf}", "model_name_or_path: there is no file no.gguf"),
        ("{server_type: endpoint, endpoint_url: 'http://e', model_name_or_path: m, api_key_env: NO_SUCH_KEY}",
         "api_key_env: the environment variable NO_SUCH_KEY is not set."),
        ("{server_type: endpoint, endpoint_url: 'http://e?k=${NO_SUCH_KEY}', model_name_or_path: m}",
         "endpoint_url: http://e?k=${NO_SUCH_KEY} names the environment variable NO_SUCH_KEY, which is not set."),
        ("{server_type: custom, model_name_or_path: m, model_kwargs: {server_script: no.py}}",
         "model_kwargs: server_script 'no.py' is not a file"),
    ],
)  # fmt: skip
def test_servers_that_cannot_start_are_refused_before_any_task(refused, config, says):
    said = refused(("{server_type: dummy, model_name_or_path: m}", config))
    assert said.startswith(says)


@pytest.mark.parametrize("key", ["sk-12345abcdef", "KEY=sk-12345abcdef"])
def test_a_key_in_the_place_of_its_variable_is_refused_and_not_shown(refused, key):
    config = f"{{server_type: endpoint, endpoint_url: 'http://e', model_name_or_path: m, api_key_env: '{key}'}}"
    said = refused(("{server_type: dummy, model_name_or_path: m}", config))
    assert "api_key_env: takes the name of an environment variable" in said
    assert "12345" not in said
