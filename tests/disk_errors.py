"""Disks that refuse: every effect of a job fails, once and permanently."""

import errno
import os

from datatrove_ckpt.checkpoint.checksummed_lines import explained
from datatrove_ckpt.errors import CkptError
from datatrove_ckpt.testing import outputs
from tests.crashes import WatchedDisk, assert_equal, copy_tree, disk_in_place, path_of


class FailingDisk(WatchedDisk):
    """A disk that refuses one effect, or all effects from one on.

    Args:
        fail_at: number of the effect to refuse, from 0.
        code: an ``errno``: ENOSPC, EIO, EROFS, ...
        permanent: refuse every later effect, too.
    """

    def __init__(self, fail_at, code=errno.ENOSPC, permanent=False):
        super().__init__()
        self.failed_at = None
        self.refused = []
        self._fail_at = fail_at
        self._code = code
        self._permanent = permanent
        self._count = 0

    def before(self, name, args, label):
        due = self._count >= self._fail_at if self._permanent else self._count == self._fail_at
        self._count += 1
        if due and name != "remove_dir":  # only cleans up, and may fail
            self.failed_at = self.failed_at or label
            self.refused.append(path_of(args))
            with explained(name, path_of(args)):
                raise OSError(self._code, os.strerror(self._code))


def assert_same_output_after_disk_errors(
    run,
    folder,
    *,
    code,
    after_error=lambda folder: None,
    step=1,
):
    """Makes every effect of a job fail, once and permanently, and runs the job again without the
    fault.

    Args:
        run: one attempt of the job.
        folder: a folder for the job. Every attempt finds in it what it holds before the first (the
            input).
        code: the value of ``errno`` to try.
        step: try each effect of so many.
        after_error: called with the folder as each failure leaves it, for further assertions.

    Returns:
        What failed: effect, error, and whether permanently.

    Raises:
        AssertionError: the job ignored a failure, its error does not name the file and what to do,
            or the output differs.
    """
    fresh = folder.with_name(folder.name + ".fresh")
    copy_tree(folder, fresh)
    run(folder)
    expected = outputs(folder / "output")
    tried = []
    for permanent in (False, True):
        number = 0
        while (
            refused := _refuse(run, fresh, folder, FailingDisk(number, code, permanent))
        ) is not None:
            label = f"{refused}: {errno.errorcode[code]}{' (permanent)' if permanent else ''}"
            after_error(folder)
            run(folder)
            assert_equal(folder / "output", expected, [label])
            tried.append(label)
            number += step
    return tried


def _refuse(run, fresh, folder, disk):
    copy_tree(fresh, folder)
    failure = None
    try:
        with disk_in_place(disk):
            run(folder)
    except CkptError as error:
        failure = error
    if failure is None:
        assert disk.failed_at is None, f"the job ignored an error of the disk: {disk.failed_at}"
    else:
        assert disk.failed_at is not None, f"the job failed without an error of the disk: {failure}"
        message = str(failure)
        assert any(str(path) in message for path in disk.refused), (
            f"it names none of {disk.refused}: {message}"
        )
        assert "run again" in message.lower(), f"the message does not say what to do: {message}"
    return disk.failed_at


class Answered(Exception):
    """Has the attributes of botocore's, aiohttp's, requests' and gcsfs' errors."""

    def __init__(self, **attributes):
        super().__init__()
        self.__dict__.update(attributes)
