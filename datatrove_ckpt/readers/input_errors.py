"""Explains errors of the hub and of S3 about an input."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from datatrove.io import DataFolder

from datatrove_ckpt.common.retrying import http_status, hub_refusal, library_line
from datatrove_ckpt.errors import CkptError, InputError

_MISSING = (FileNotFoundError, PermissionError)


def explain_hub_error(dataset: str, error: BaseException, commit: str | None = None) -> str:
    """Explains why a dataset cannot be opened or looked up.

    Args:
        commit: the commit that the run reads; None: not known yet.
    """
    if commit and type(error).__name__ == "RevisionNotFoundError":
        return (
            f"The dataset {dataset!r} has no commit {commit} any more, with which this run began: "
            "its history was squashed or rewritten. A run keeps to the commit that it began with. "
            "Restore the commit (a branch or tag that holds it), or start from the beginning: "
            "in other folders."
        )
    refused = hub_refusal(error)
    if refused:
        return f"The dataset {dataset!r} cannot be opened: {refused}."
    return (
        f"The dataset {dataset!r} cannot be opened: {one_line(error)}. Correct dataset and "
        "dataset_options, or check the network and HF_ENDPOINT; for a private or gated dataset, "
        "set HF_TOKEN to a token of an account that may read it."
    )


def one_line(error: BaseException) -> str:
    """Describes an error; a ``DatasetGenerationError`` by its cause."""
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        return library_line(error.__cause__)
    return library_line(error)


def is_on_hub(folder: DataFolder) -> bool:
    return "hf" in getattr(folder.fs, "protocol", ())


@contextmanager
def naming_hub_input(folder: DataFolder, name: str = "", missing: bool = True) -> Iterator[None]:
    """Turns errors of the hub or S3 about files of an input into an ``InputError`` with advice.

    Args:
        name: the file that is read; "": the folder is listed.
        missing: whether ``FileNotFoundError`` and ``PermissionError`` count, which the client
            raises for a folder.
    """
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        is_denied = (
            missing
            and isinstance(error, PermissionError)
            and "s3" in getattr(folder.fs, "protocol", ())
        )
        if is_denied or (
            type(error).__module__.startswith(("botocore", "aiobotocore"))
            and not isinstance(error, OSError)
        ):
            raise InputError(
                f"{_described(folder, name)} cannot be read: {library_line(error)}. Check the "
                "credentials (AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), the "
                "endpoint and the network."
            ) from error
        of_the_client = type(error).__module__.startswith(("huggingface_hub", "httpx"))
        if not is_on_hub(folder) or not (
            of_the_client or (missing and isinstance(error, _MISSING))
        ):
            raise
        raise InputError(_explain_folder(_described(folder, name), error)) from error


def refuse_equal_names(names: Sequence[str], file: str) -> None:
    """Raises InputError if two columns have the same name."""
    if len({*names}) == len(names):
        return
    name = next(other for other in names if names.count(other) > 1)
    numbers = ", ".join(str(number) for number, other in enumerate(names, 1) if other == name)
    raise InputError(
        f"The input file {file!r} has several columns named {name!r}: numbers {numbers}. "
        "Rename or remove all but one, and run the same command again."
    )


def _described(folder: DataFolder, name: str) -> str:
    folder_url = folder.resolve_paths("")
    if name:
        return f"The input file {name!r} in {folder_url}"
    return f"The input {folder_url!r}"


def _explain_folder(subject: str, error: BaseException) -> str:
    refused = hub_refusal(error)
    if refused:
        return f"{subject} cannot be read: {refused}."
    subject += f" cannot be read: {one_line(error)}."
    kind = type(error).__name__
    if "Revision" in kind or "(revision not found)" in str(error):
        return f"{subject} Correct the branch, tag or commit after the @ in the input's URL."
    if "EntryNotFound" in kind or isinstance(error, _MISSING) or http_status(error) == 404:
        return (
            f"{subject} Correct the input's URL, or restore what is gone; for a private or "
            "gated repository, set HF_TOKEN to a token of an account that may read it."
        )
    return (
        f"{subject} Check the network, HF_ENDPOINT and https://status.huggingface.co, and run the "
        "same command again."
    )
