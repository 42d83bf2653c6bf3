"""Which steps before the runner may keep something from one document to the next, so that a resume must count.

After a resume that seeks, a step sees only the remaining documents: one that counts, samples, removes duplicates or
writes what it excludes would then give another result. Of a user's function or class nobody can know, so only the
steps listed here are trusted. They were read: each looks at one document at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from datatrove.data import Document
from datatrove.pipeline.readers.base import BaseReader

from datatrove_ckpt.readers import HuggingFaceDatasetReader, IpcReader, JsonlReader, ParquetReader, SeekingReader
from datatrove_ckpt.readers.pipeline import steps_before

_READERS = (HuggingFaceDatasetReader, IpcReader, JsonlReader, ParquetReader)
# Not LambdaFilter: a user's function. Not SamplerFilter and C4BadWordsFilter: they draw random numbers. Not
# PIIFormatter: it uses its replacements in turn.
_STATELESS = frozenset(
    f"datatrove.pipeline.{name}"
    for name in (
        "extractors.modular.ReadabilityInscriptis",
        "extractors.trafilatura.Trafilatura",
        "filters.c4_filters.C4ParagraphFilter",
        "filters.c4_filters.C4QualityFilter",
        "filters.fasttext_filter.FastTextClassifierFilter",
        "filters.fineweb_quality_filter.FineWebQualityFilter",
        "filters.gopher_quality_filter.GopherQualityFilter",
        "filters.gopher_repetition_filter.GopherRepetitionFilter",
        "filters.language_filter.LanguageFilter",
        "filters.regex_filter.RegexFilter",
        "filters.unigram_log_probs.UnigramLogProbFilter",
        "filters.url_filter.URLFilter",
        "formatters.ftfy.FTFYFormatter",
        "formatters.symbol_lines_remover.SymbolLinesFormatter",
    )
)


def stateful_steps(documents: Iterable[Document]) -> list[str]:
    """The steps that may keep state, for a log line; the last one of the pipeline first.

    Empty if none may, or if no reader here can seek anyway.
    """
    steps: list[str] = []
    readers: list[BaseReader] = []
    last = type(documents).__name__
    for step, last, _ in steps_before(documents):
        if isinstance(step, BaseReader):
            readers.append(step)
        if isinstance(step, SeekingReader):
            steps += _state_of_reader(step)
        elif not _is_stateless(step):
            steps.append(last)
    if not readers:  # a step hides those before it
        return steps or [last]
    return steps if any(isinstance(reader, SeekingReader) for reader in readers) else []


def _state_of_reader(reader: SeekingReader) -> list[str]:
    kind = type(reader)
    if kind not in _READERS:
        return [kind.__name__]
    # datatrove binds an adapter to its reader.
    adapter = getattr(reader.adapter, "__func__", reader.adapter)
    if adapter is BaseReader._default_adapter:
        return []
    return [f"the adapter {getattr(adapter, '__qualname__', type(adapter).__name__)} of {kind.__name__}"]


def _is_stateless(step: object) -> bool:
    kind = type(step)
    return f"{kind.__module__}.{kind.__qualname__}" in _STATELESS and getattr(step, "exclusion_writer", None) is None
