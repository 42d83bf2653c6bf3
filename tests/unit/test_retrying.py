"""One formula for every wait between attempts."""

from datatrove_ckpt.common.retrying import RetryPolicy


def test_the_wait_doubles_up_to_the_longest():
    policy = RetryPolicy(first=0.5, longest=3)
    assert [policy.wait(failures) for failures in (1, 2, 3, 4, 5, 10**6)] == [0.5, 1, 2, 3, 3, 3]


def test_an_advised_wait_counts_up_to_a_bound():
    policy = RetryPolicy(longest_advice=600, spread=0)
    assert [policy.wait(1, advice) for advice in (0, 7, 9999)] == [1, 7, 600]
