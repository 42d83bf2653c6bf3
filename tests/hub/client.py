"""What makes the real huggingface_hub talk to a fake hub: variables for new processes, patches for
this one.
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hub.xet import XetSession


def environment(url, token, home):
    """Variables of a process that talks to the hub at ``url``; its caches lie below ``home``.

    No token: empty.
    """
    return {
        "HF_ENDPOINT": url,
        "HF_TOKEN": token or "",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_DATASETS_CACHE": str(home / "datasets"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        # No certificates: reading them takes 50 ms for each client.
        "SSL_CERT_FILE": "",
        "SSL_CERT_DIR": str(home),
    }


@contextmanager
def pointed_at(hub, home):
    """This process, where huggingface_hub and datasets may be imported already, talks to ``hub``;
    and its children.
    """
    import huggingface_hub
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import _http

    had_datasets = "datasets" in sys.modules
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(hub.url, hub.token, home).items():
            patch.setenv(name, value)
        for name, new in _constants(hub.url, home).items():
            patch.setattr(constants, name, new, raising=False)
        origins = (
            {*_http._HUB_ORIGINS, _http._url_origin(hub.url)}
            if hasattr(_http, "_HUB_ORIGINS")
            else set()
        )
        patch.setattr(_http, "_HUB_ORIGINS", frozenset(origins), raising=False)
        patch.setattr(hf_api.api, "endpoint", hub.url)
        session = XetSession()
        patch.setattr("huggingface_hub.utils._xet.get_xet_session", lambda: session)
        if had_datasets:
            for name, new in _datasets_config(hub.url, home).items():
                patch.setattr(f"datasets.config.{name}", new)
        _forget_connections(huggingface_hub)
        try:
            yield
        finally:
            _forget_connections(huggingface_hub)
    # Imported meanwhile: its config has this hub's URL.
    if not had_datasets and "datasets" in sys.modules:
        for name, new in _datasets_config(
            "https://huggingface.co", Path("~/.cache/huggingface").expanduser()
        ).items():
            setattr(sys.modules["datasets"].config, name, new)


def _constants(url, home):
    named = environment(url, None, home)
    paths = ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN_PATH")
    off = ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS")
    return {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_URL_HOSTS": frozenset({"hf.co", "huggingface.co", "127.0.0.1"}),
        **{name: named[name] for name in paths},
        **dict.fromkeys(off, True),
        "HF_HUB_OFFLINE": False,
    }


def _datasets_config(url, home):
    return {
        "HF_ENDPOINT": url,
        "HUB_DATASETS_URL": url + "/datasets/{repo_id}/resolve/{revision}/{path}",
        "HF_DATASETS_CACHE": home / "datasets",
        "DOWNLOADED_DATASETS_PATH": home / "datasets" / "downloads",
        "EXTRACTED_DATASETS_PATH": home / "datasets" / "downloads" / "extracted",
        "HF_MODULES_CACHE": home / "modules",
        "HF_UPDATE_DOWNLOAD_COUNTS": False,
        "HF_HUB_OFFLINE": False,
    }


def _forget_connections(huggingface_hub):
    """File systems and connections that know another hub's URL, token and files."""
    huggingface_hub.HfFileSystem.clear_instance_cache()
    huggingface_hub.close_session()
