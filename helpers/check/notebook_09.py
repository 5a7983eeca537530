"""Checks of notebook 09, many processes."""

import math

import numpy as np
from torch.utils.data import DistributedSampler

from helpers.check.replies import says


@says
def shard(answer):
    """`answer(length, rank, world)` are the indices that DistributedSampler deals to a process, unshuffled."""
    for length, world in [(6, 2), (10, 3), (7, 1), (2, 5), (12, 5)]:
        for rank in range(world):
            right = list(DistributedSampler(range(length), world, rank, shuffle=False))
            given = [int(index) for index in answer(length, rank, world)]
            if given == right:
                continue
            deal = f"of {length} indices process {rank} of {world} gets {right}, in your deal {given}"
            if sorted(given) == sorted(right):
                return f"{deal}: the same ones in another order"
            if length % world and given == list(range(length))[rank::world]:
                return f"{deal}: all processes must get the same number; deal the first indices once more"
            return deal
    return None


@says
def bytes_sent(answer):
    """`answer(weights, bytes_each, world)` is what a process sends in one ring all-reduce, in bytes."""
    for weights, size, world in [(1000, 4, 1), (10**6, 4, 2), (10**6, 2, 2), (10**6, 4, 3), (4_008_829, 2, 8)]:
        given, right = float(answer(weights, size, world)), 2 * (world - 1) / world * weights * size
        if math.isclose(given, right, rel_tol=1e-6, abs_tol=1e-6):
            continue
        case = f"{weights:,} weights of {size} bytes, {world} processes: {right:,.0f} bytes, and you say {given:,.0f}"
        if math.isclose(2 * given, right, rel_tol=1e-6):
            return f"{case}. The sums go round the ring once, and the finished averages once more"
        return case
    return None


@says
def mean_over_processes(answer):
    """`answer(means, counts)` is the mean over all images, from each process's mean and number of images."""
    for means, counts in [([0.5, 1.0], [10, 10]), ([0.5, 1.0], [30, 10]), ([0.25, math.nan, 0.75], [4, 0, 12])]:
        right = sum(mean * count for mean, count in zip(means, counts) if count) / sum(counts)
        given = float(answer(list(means), list(counts)))
        if math.isclose(given, right, rel_tol=1e-6):
            continue
        case = f"means {means} over {counts} images: {right:g} over all, and you say {given:g}"
        if math.isnan(given):
            return f"{case}. NaN times 0 is NaN; leave out who saw nothing"
        if math.isclose(given, float(np.nanmean(means)), rel_tol=1e-6):
            return f"{case}. A process with more images weighs more"
        return case
    return None
