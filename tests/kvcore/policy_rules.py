"""Rules that a policy keeps in every case, each with a policy that breaks it and a case in which that shows."""

import pytest
from hypothesis import Phase, find, settings


def find_broken(rule, policy, cases):
    """A case of the strategy in which the policy breaks the rule; fails when there is none."""

    def breaks(case):
        try:
            rule(policy, case)
        except (AssertionError, pytest.fail.Exception):
            return True
        return False

    return find(cases, breaks, settings=settings(max_examples=2_000, phases=[Phase.generate], derandomize=True))
