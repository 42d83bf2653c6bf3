"""Estimates of a sum over a whole input, from a part of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import mul
from statistics import fmean

# In simulated samples of 50 of skewed amounts, the truth was in this range 95 times in 100; up to a
# deviation of the amounts as large as their mean, its ends were a factor of 2 apart or less.
_ERRORS_DOWN = 1.9
_ERRORS_UP = 2.9


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> "Estimate":
        return cls(value, value, value)

    def text(self, of: Callable[[float], str], factor: float = 1.0) -> str:
        """Returns "12,400 (11,000 to 14,100)"."""
        value, low, high = (of(each * factor) for each in (self.value, self.low, self.high))
        if low == high:
            return value
        if math.isinf(self.high):
            return f"about {value}"
        return f"{value} ({low} to {high})"

    def scaled(self, value: float, low: float, high: float) -> "Estimate":
        return Estimate(self.value * float(value), self.low * float(low), self.high * float(high))


@dataclass(frozen=True)
class Population:
    """The documents of a whole input: their number, and the mean of their sizes."""

    number: Estimate
    mean_size: float

    def times(self, factor: float) -> "Population":
        return replace(self, number=self.number.scaled(factor, factor, factor))

    def total(
        self, amounts: Sequence[float], sizes: Sequence[float], by_ratio: bool = False
    ) -> Estimate:
        """Estimates the sum of an amount over the input, from some of its documents.

        The mean is corrected by linear regression on the size, because the mean size of the input
        is known; ``by_ratio``, and of less than 3 documents, by the ratio to the size (Cochran,
        Sampling Techniques, chapters 5A, 6 and 7). The error comes from the residuals, each divided
        by 1 - its leverage (HC3: MacKinnon and White, Journal of Econometrics 29, 1985). The range
        is a factor down and a larger factor up, because amounts are skewed. An amount that no
        document of the sample has cannot be seen.
        """
        count = len(amounts)
        mean = fmean(amounts)
        if not mean:
            return Estimate.exact(0.0)
        mean_size = fmean(sizes)
        correction = self.mean_size - mean_size
        distances = [size - mean_size for size in sizes]
        squares = sum(map(mul, distances, distances))
        slope = mean / mean_size
        weights = leverages = [1 / count] * count
        if count > 2 and squares and not by_ratio:
            # Amounts of the smallest documents are not below 0.
            slope = min(max(0.0, sum(map(mul, distances, amounts)) / squares), slope)
            weights = [1 / count + correction * distance / squares for distance in distances]
            leverages = [1 / count + distance**2 / squares for distance in distances]
        value = mean + slope * correction
        unseen = max(0.0, 1 - sum(sizes) / (self.number.value * self.mean_size))
        if count == 1 and unseen:
            return self.number.scaled(value, 0.0, math.inf)
        errors = []
        for amount, distance, weight, leverage in zip(
            amounts, distances, weights, leverages, strict=True
        ):
            residual = amount - mean - slope * distance
            errors.append(weight * residual / max(0.1, 1 - leverage))
        error = math.hypot(*errors) / value
        error *= math.sqrt(unseen)
        error *= 1 + 1 / max(1, count - 2)
        return self.number.scaled(
            value, value / (1 + _ERRORS_DOWN * error), value * (1 + _ERRORS_UP * error)
        )


def estimate(amounts: Sequence[float], sizes: Sequence[float], total: float) -> Estimate:
    """Estimates the sum of an amount over an input of this size, by its ratio to the size."""
    return Population(Estimate.exact(1.0), total).total(amounts, sizes, by_ratio=True)


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
