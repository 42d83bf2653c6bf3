"""Signs the versions of a mirror with a key, if there is a key in the environment.

A signature is an HMAC-SHA256 of the manifest, the name of the version and the rank's address on the
mirror. So without the key no manifest can be made, changed, renumbered, or moved to another rank.

A writer can still remove versions, so that an older signed version is the newest; only a node that
still has its folder notices. A writer can also stop a run by claiming the mirror.
"""

import hmac
import os
import re

from datatrove_ckpt.checkpoint import layout
from datatrove_ckpt.common.redaction import MIRROR_KEY_VARIABLE, Secret
from datatrove_ckpt.errors import CheckpointCorrupt, ConfigError

_LEAST_CHARACTERS = 16
_SIGNED = re.compile(rb'(?s)(\{.*),"hmac":"([0-9a-f]{64})"\}')


class ManifestSigner:
    """Adds and checks the signatures of one rank's versions. Without a key, it adds no signature.

    Args:
        url: URL of the rank's folder on the remote.

    Raises:
        ConfigError: the key is too short.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        # Not the whole URL: a mirror may be moved, and another node may mount it elsewhere.
        self._address = layout.RankAddress.of(url)
        self._key = Secret(os.environ.get(MIRROR_KEY_VARIABLE, ""))
        self.is_on = MIRROR_KEY_VARIABLE in os.environ
        """Whether there is a key."""
        if self.is_on and len(self._key.reveal()) < _LEAST_CHARACTERS:
            raise ConfigError(
                f"{MIRROR_KEY_VARIABLE}: a key has at least {_LEAST_CHARACTERS} characters "
                "(`openssl rand -hex 32` makes one). Unset the variable to mirror without a key."
            )

    def add(self, name: str, body: bytes) -> bytes:
        """Returns the manifest's JSON, with a signature if there is a key.

        Args:
            name: name of the version's object.
        """
        if not self.is_on:
            return body
        return b'%s,"hmac":"%s"}' % (body[:-1], self._digest(name, body).encode())

    def check(self, name: str, body: bytes) -> None:
        """Checks a manifest that is about to be trusted.

        Raises:
            CheckpointCorrupt: there is a key, and the signature is missing or of another key.
            ConfigError: there is a signature, and no key.
        """
        signed = _SIGNED.fullmatch(body)
        url = f"{self._url}/{name}"
        if not self.is_on:
            if signed is not None:
                raise ConfigError(
                    f"{MIRROR_KEY_VARIABLE} is not set, but {url} is signed with a key. Export "
                    "the key where the tasks run. To run without a key, remove the mirror, and "
                    "continue from the local folder."
                )
        elif signed is None:
            raise CheckpointCorrupt(
                f"{url} is not signed, although {MIRROR_KEY_VARIABLE} is set: any user who can "
                "write to the mirror may have made it. If it was made before you had a key, and "
                "you trust it, start once without the key, and then with it: later uploads are "
                "signed. Otherwise remove this version."
            )
        elif not hmac.compare_digest(self._digest(name, signed[1] + b"}").encode(), signed[2]):
            raise CheckpointCorrupt(
                f"{url} is not signed with the key in {MIRROR_KEY_VARIABLE}, or not for this "
                "task and version: it was made with another key, changed, or moved there. Set the "
                "key that made it, or remove this version."
            )

    def _digest(self, name: str, body: bytes) -> str:
        message = f"datatrove-ckpt mirror 1\n{self._address}\n{name}\n".encode() + body
        return hmac.digest(self._key.reveal().encode(), message, "sha256").hex()
