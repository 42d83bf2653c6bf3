"""One place knows which names mean a secret, and how its value is hidden."""

import dataclasses
import pickle

import dill
import pytest

from datatrove_ckpt.checkpoint.compare import same_value
from datatrove_ckpt.checkpoint.identity import fields_without_secrets
from datatrove_ckpt.common import redaction
from datatrove_ckpt.common.redaction import (
    Secret,
    excerpt,
    is_secret,
    is_surely_secret,
    may_hold_secret,
    redact,
    remember,
    remember_sent,
    without_secrets,
)
from datatrove_ckpt.errors import ConfigError
from tests import golden


@pytest.fixture(autouse=True)
def _nothing_revealed():
    before = {**redaction._revealed}
    redaction._revealed.clear()
    yield
    redaction._revealed |= before


def test_no_text_and_no_pickle_shows_a_secret():
    secret = Secret("s3cret-in-memory")
    named = Secret.in_environment("s3cret-in-a-variable")
    shown = f"{secret} {secret!r} {named} {[named]} {vars(Settings(secret))}"
    pickled = b"".join(dumps([secret, named]) for dumps in (pickle.dumps, dill.dumps))
    assert "s3cret" not in shown
    assert b"s3cret" not in pickled
    assert pickle.loads(pickle.dumps(named)).reveal() == "s3cret-in-a-variable"
    with pytest.raises(ConfigError, match="keys are never pickled"):
        pickle.loads(pickle.dumps(secret)).reveal()


@dataclasses.dataclass
class Settings:
    key: Secret


def test_a_secret_is_hidden_in_every_text_from_the_moment_it_is_revealed():
    secret = Secret("quite-ordinary-text")
    pickled = pickle.dumps(Secret.in_environment("an-ordinary-text"))
    assert redact("quite-ordinary-text") == "quite-ordinary-text"
    secret.headers()
    pickle.loads(pickled).reveal()
    assert redact("quite-ordinary-text an-ordinary-text") == "*** ***"
    Secret("dummy").reveal()  # what servers without keys are given
    Secret("abc").reveal()
    assert redact("a dummy server, abc") == "a dummy server, abc"


def test_a_value_of_an_address_is_hidden_and_no_reason_to_refuse_a_module():
    remember("my-deployment")
    assert redact("model of my-deployment") == "model of ***"
    assert not may_hold_secret("model of my-deployment")


def opened_by(name):
    """What opens a URL is hidden wherever it is shown: ids of documents are often signed URLs."""
    return redact(f"document https://host/a.pdf?page=7&{name}=s3cret%2Bs3cret&more=1, the oldest")


def verdict(name, value):
    """What is refused is hidden, too."""
    return {"hidden": is_secret(name, value), "refused": is_surely_secret(name, value)}


test_one_classifier_with_two_thresholds = golden.shows("secrets", globals())


def test_the_hash_of_a_secret_is_slow_and_keyed_like_the_mirror(
    monkeypatch,
):
    hidden = without_secrets("shared_context", {"password": "hunter2", "api_key": "hunter2"})
    assert len({*hidden.values()}) == 2  # no list of words fits both fields
    assert hidden["password"].startswith("hash scrypt-")
    keyed = []
    for key in ("k" * 32, "l" * 32):
        monkeypatch.setenv("DATATROVE_CKPT_MIRROR_KEY", key)
        keyed.append(
            without_secrets("shared_context", {"password": "hunter2", "api_key": "hunter2"})
        )
        # What ranks wrote before there was a key is compared, too.
        assert (
            without_secrets("shared_context", hidden)
            == without_secrets("shared_context", keyed[-1])
            == keyed[-1]
        )
    assert (
        len({text for each in keyed for text in each.values() if text.startswith("hash keyed-")})
        == 4
    )
    # With another key, or without, nobody can tell.
    assert same_value("shared_context", keyed[0], keyed[1])
    assert same_value("shared_context", keyed[0], hidden)
    monkeypatch.setenv("DATATROVE_CKPT_MIRROR_KEY", "l" * 32)
    other = without_secrets("shared_context", {"password": "hunter3", "api_key": "hunter2"})
    assert not same_value("shared_context", keyed[1], other)
    assert not same_value("shared_context", keyed[0], other | {"user": "a"})


def test_a_text_loses_the_secrets_of_the_environment_and_of_payloads(
    monkeypatch,
):
    monkeypatch.setenv("SOME_SERVICE_PASSPHRASE", "quite-ordinary")
    monkeypatch.setenv("SORT_KEY", "/quite/ordinary")
    remember_sent(
        {
            "extra_headers": {"Authorization": "Bearer s3cret-s3cret"},
            "tools": [{"api_key": "t00l-t00l"}],
        }
    )
    said = "quite-ordinary /quite/ordinary s3cret-s3cret t00l-t00l"
    assert redact(said) == "*** /quite/ordinary *** ***"


def test_of_the_secrets_that_were_sent_the_latest_are_hidden():
    """One of all requests is noted again with each, beside a header of one request."""
    for number in range(500):
        headers = {"Authorization": "of-all-requests", "X-Request-Id": f"{number:010}"}
        remember_sent({"extra_headers": headers})
    assert redact("of-all-requests 0000000007 0000000499") == "*** 0000000007 ***"


@pytest.mark.parametrize(
    "quoted",
    golden.values("quoted_keys", globals()),
)
def test_a_key_is_hidden_however_a_server_writes_it(quoted):
    Secret("Ab3/d+G7=").reveal()
    assert redact(f"no such key: {quoted}.") == "no such key: ***."


@pytest.mark.parametrize("most", [200, 2000])
def test_an_error_that_repeats_a_key_hundreds_of_times_shows_no_part_of_it(most):
    """Wherever the searched part of it ends."""
    Secret("Ab3/d+G7=Kx9-canary-of-a-key").reveal()
    for quoted in ("Ab3/d+G7=Kx9-canary-of-a-key", "%41b3%2Fd%2BG7%3DKx9-canary-of-a-key"):
        for shift in range(len(quoted) + 1):
            shown = excerpt("." * shift + quoted * 9000, most)
            assert set(shown) <= {".", "*"}, shift
            assert shown


MAYBE = golden.values("possible_secrets", globals())


@pytest.mark.parametrize("name, old, new", MAYBE)
def test_what_may_be_a_secret_is_hidden_and_an_edit_of_it_is_seen(name, old, new):
    kept, edited = (without_secrets(f"shared_context.{name}", value) for value in (old, new))
    assert "hash scrypt-" in str(kept)
    assert not same_value(name, kept, edited)


def test_a_setting_that_holds_a_secret_of_the_environment_is_hashed(
    monkeypatch,
):
    monkeypatch.setenv("SERVICE_PASSWORD", "a-long-canary")
    clean = fields_without_secrets({"shared_context": ["as a-long-canary says", "a text"]})
    assert "canary" not in str(clean)
    assert "a text" in str(clean)
