"""Whether a rank that has not answered the question for its stacks may get the signal for them. Pure.

`rank_process.py` asks. The message `StacksAsked` comes first: the rank's watchdog answers it while it holds the GIL,
and nothing can happen to the rank. The watchdog needs the GIL for that, so it does not answer while a thread holds the
GIL in a call of C code that does not return: the very hang of which stacks are wanted.

The signal has faulthandler walk the frames of all threads from a handler, without the GIL. That is safe as long as no
thread of the rank executes Python, since only that changes frames. A walk takes about 1 ms.

**Where it is safe.** The question stands for `FIRST_LOOK_S` without an answer, so the GIL is held: a thread that
executes Python gives it up within 5 ms once another one wants it (`sys.getswitchinterval`). All threads sleep at two
looks, and none has used the CPU between them. So the holder of the GIL sleeps in a call, and all other threads wait for
the GIL, or in calls of their own, which end with a wait for the GIL. Where the main thread is the holder, it is also
the one that runs the handler, as a rule, and stands still for the time of the walk. Two cases are left: another thread
holds the GIL, and its call returns in the very millisecond of the walk, after at least 40 ms in which it did not. Or
the watchdog pauses after an error of its own, so that the GIL may be free, and a thread wakes up in that millisecond.

**Where it is not known to be safe:**

- A thread computes. It may hold the GIL in C code, or wait for the CPU in the midst of Python code: on a busy machine
  the watchdog does not get its turn either, and the process looks the same.
- A thread is in an uninterruptible sleep. It may have been interrupted anywhere, by a page that is read from a disk.
- The rank is not connected. Then nobody wants the GIL, and nothing shows that it is held: a thread that sleeps without
  it may wake up and execute Python at any time.

There the signal is sent only to a rank that is ended in any case: its stacks are worth more than a clean end of its
process. Any other rank goes without stacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FIRST_LOOK_S = 0.02
"""From the question to the first look, in seconds. A rank whose GIL is free answers in 1 to 2 ms, one in which
threads compute in 15 ms for each of these. Two looks and a walk take 50 ms, so the stacks are there 0.1 s after the
question, at the limit."""
BETWEEN_LOOKS_S = 0.02
"""Between two looks, in seconds: two ticks of the slowest kernel clock (100 Hz), in which CPU time is counted."""


@dataclass(frozen=True)
class Unanswered:
    """A question for stacks without an answer so far.

    Attributes:
        waited_s: seconds since the question.
        was_sent: the message was sent. False: the rank is not connected.
        is_at_rest: no thread has run for a while; see the function `is_at_rest`.
        is_ending: the rank is ended right after this, whatever it does.
    """

    waited_s: float
    was_sent: bool
    is_at_rest: bool
    is_ending: bool


def may_signal(question: Unanswered) -> bool:
    """Returns whether the rank may get the signal for its stacks now."""
    if question.is_ending:
        # Without a message nobody will answer; with one an answer may be on its way.
        return not question.was_sent or question.waited_s >= FIRST_LOOK_S
    return question.was_sent and question.is_at_rest and question.waited_s >= FIRST_LOOK_S + BETWEEN_LOOKS_S


def is_at_rest(before: Mapping[int, tuple[str, int]], now: Mapping[int, tuple[str, int]]) -> bool:
    """Returns whether no thread of a process has run between two looks, as far as /proc shows.

    Args:
        before: tid -> state and CPU time, as `proc.threads` returns it, at the first look; empty: there was none.
        now: the same `BETWEEN_LOOKS_S` later, or more.
    """
    sleeps = all(state == "S" for looked in (before, now) for state, _ in looked.values())
    return bool(now) and sleeps and before == now
