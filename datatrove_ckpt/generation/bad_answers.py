"""Retries answers that loop, refuse or are cut off, by the policies ``on_loop``, ``on_refusal`` and
``on_cut_off``.
"""

from collections import Counter
from copy import deepcopy

from datatrove.pipeline.inference.types import InferenceError

from datatrove_ckpt.common.warnings import warn_once
from datatrove_ckpt.config.generation_params import TOKEN_LIMITS
from datatrove_ckpt.errors import BadAnswer, ConfigError, RequestRejected, named
from datatrove_ckpt.generation.requests import RolloutRequests, failed
from datatrove_ckpt.inference.client.responses import Api
from datatrove_ckpt.output.document_codec import Result
from datatrove_ckpt.process.shutdown import wait_until_cancelled
from datatrove_ckpt.rollouts import Payload

_BAD = {"on_loop": "is looping", "on_refusal": "is a refusal", "on_cut_off": "is cut off"}


async def acceptable(requests: RolloutRequests, payload: Payload, api: Api, whole: bool) -> Result:
    """Returns the answer, or the answer of a retry, by the policies for bad answers.

    Raises:
        InferenceError: ``error`` is a BadAnswer, or an error of ``RolloutRequests.answered``.
    """
    answers = requests.answers
    if answers.have_ended:
        await wait_until_cancelled()
    payload = deepcopy(payload)  # the rollout may change it before a retry
    policies = requests.model.policies
    retries = Counter[str]()
    try:
        digest = requests.digest(payload, api)
    except ConfigError as error:
        raise failed(error, payload) from error
    # Not the order of the retries, which depends on the order of parallel answers.
    first = answers.next_key(requests.rollout_idx, f"first {digest}")
    result = await requests.answered(payload, api, whole)
    defaults = requests.config.default_generation_params
    changed = dict(payload.get("extra_body", defaults.get("extra_body")) or {})
    while setting := requests.rank.quality.first_case(policies, result):
        policy = policies[setting]
        if retries[setting] == policy.retries:
            break
        retries[setting] += 1
        if not policy.params.keys().isdisjoint(TOKEN_LIMITS):
            # A limit under the other name would win, or be refused beside the new one.
            names = {*defaults, *payload, *changed}
            changed |= dict.fromkeys(names.intersection(TOKEN_LIMITS))
        changed |= policy.params
        payload = {**payload, "extra_body": changed}
        try:
            retried = await requests.answered(payload, api, whole, (*first,))
        except InferenceError as error:
            if not isinstance(error.error, RequestRejected):
                raise
            warn_once(
                f"{setting}: a retry was rejected, so the answer before it counts: {error.error}"
            )
            break
        answers.results = [answer for answer in answers.results if answer is not result]
        result = retried
    if not setting or policies[setting].fallback == "keep":
        return result
    bad = BadAnswer(f"the answer {_BAD[setting]}.", setting=setting)
    bad.is_dropped = policies[setting].fallback == "drop"
    raise failed(named(bad, requests.config.name), payload)
