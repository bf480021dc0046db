"""A rank assignment that terminates groups with too few healthy ranks. Learns the groups by a gather."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable

from ft_client.inprocess.assignment.base import RankAssignment, RankAssignmentCtx
from ft_client.inprocess.assignment.group_key import KeyOrFn, check_key, group_key

_KEPT, _GIVEN_UP = "1", "0"


class FilterCountGroupedByKey(RankAssignment):
    """Terminates the ranks of every group whose number of healthy ranks does not meet a condition.

    `ShiftRanks` or `FillGaps` comes after it (in a `Compose`: stands before it) and closes the gaps.

    Args:
        key_or_fn: the group of a rank: any hashable value, or a function of `(state)` or `(rank, world_size)`.
        condition: of the number of healthy ranks in the group; asked on each of them.
        timeout: for the others, in each of two gathers.
    """

    def __init__(
        self,
        key_or_fn: KeyOrFn,
        condition: Callable[[int], bool],
        timeout: datetime.timedelta = datetime.timedelta(seconds=60),
    ) -> None:
        check_key(key_or_fn)
        if not callable(condition):
            raise TypeError(f"condition={condition!r} is not a function")
        if not isinstance(timeout, datetime.timedelta):
            raise TypeError(f"timeout={timeout!r} is not a timedelta")
        self.key_or_fn, self.condition, self.timeout = key_or_fn, condition, timeout

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the context, with the ranks of such groups among the terminated ones.

        Two gathers, since a condition may differ from rank to rank (`count == torch.cuda.device_count()`), and only
        what all know alike may enter the numbers.

        Raises:
            RuntimeError: the other ranks did not come in time, or the store is lost.
        """
        if ctx.state.rank in ctx.terminated_ranks:
            return ctx
        healthy = [rank for rank in range(ctx.state.world_size) if rank not in ctx.terminated_ranks]
        mine = group_key(self.key_or_fn, ctx.state)
        count = Counter(self._gather(ctx, healthy, mine))[mine]
        votes = self._gather(ctx, healthy, _KEPT if self.condition(count) else _GIVEN_UP)
        given_up = {rank for rank, vote in zip(healthy, votes, strict=True) if vote == _GIVEN_UP}
        ctx.terminated_ranks = ctx.terminated_ranks | given_up
        return ctx

    def _gather(self, ctx: RankAssignmentCtx, ranks: list[int], value: str) -> list[str]:
        assert ctx.state.rank is not None
        return ctx.gathers.make(ranks, ctx.state.rank, value, self.timeout)


FilterGroupedByKey = FilterCountGroupedByKey
"""Its name in the older documentation."""
