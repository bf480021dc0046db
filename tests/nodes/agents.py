"""The launchers of one job on several nodes: started, lost, paused, parted, and looked at together.

Losing a node takes its cable first, so that nobody hears its connections close. Judges only what must hold for all of
them; the rest is the tests' affair.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.faults import invariants
from tests.faults.job import Job, kill, lives
from tests.faults.training import Plan, after
from tests.nodes.job_site import Site, node_name
from tests.patience import patient

LOST = 128 + signal.SIGKILL
LAUNCHER_ERROR = 80
_LIMIT_S = 60.0
_POLL_S = 0.01
_WATCH_S = 0.1
_T = TypeVar("_T")


class Agent(Job):
    """The launcher of one node. `lost`: it was killed with all that was its, so that nobody could clear up."""

    def __init__(self, folder: Path, plan: Plan, nproc: int, flags: Sequence[str], number: int, **more: Any) -> None:
        super().__init__(folder, plan, nproc, flags, **more)
        self.number = number
        self.lost = False

    def event(self, event: str, **facts: Any) -> dict[str, Any] | None:
        """The first event of this kind in the journal with these facts."""
        return next((line for line in self.journal(event) if facts.items() <= line.items()), None)

    def until_event(self, event: str, limit_s: float = _LIMIT_S, **facts: Any) -> dict[str, Any]:
        """Waits for it."""
        found = self.until(lambda: self.event(event, **facts), f"{event} {facts}", limit_s)
        assert found is not None
        return found

    def pause(self) -> None:
        """SIGSTOP to the agent and all that is its."""
        for pid in self.processes():
            kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT to them."""
        for pid in self.processes():
            kill(pid, signal.SIGCONT)

    def global_ranks(self, cycle: int) -> set[int]:
        """The ranks this node has in a cycle."""
        started = (line for line in self.journal("cycle_start") if line["cycle"] == cycle)
        return {rank["rank"] for line in started for rank in line["ranks"]}

    def ranks_alive(self, cycle: int) -> set[int]:
        """The pids of this node's ranks of a cycle that live."""
        started = (
            rank["pid"] for line in self.journal("cycle_start") for rank in line["ranks"] if line["cycle"] == cycle
        )
        return {pid for pid in started if lives(pid)}

    @property
    def cycles(self) -> list[int]:
        """The numbers of the cycles it took part in."""
        return [line["cycle"] for line in self.journal("cycle_start")]


class Agents:
    """All launchers of one job, in the order in which they were started; `flags` are for each of them."""

    def __init__(self, folder: Path, plan: Plan, flags: Sequence[str], site: Site, **more: Any) -> None:
        self.folder, self.plan, self.site, self.network = folder, plan, site, site.network
        self._flags, self._more = flags, more
        self._all: list[Agent] = []

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._all)

    def __getitem__(self, index: int) -> Agent:
        return self._all[index]

    # What happens to them.

    def join(self, *flags: str, node: int | None = None, nproc: int = 2) -> Agent:
        """One more agent, on a new node, or on one that there is; `flags` are more words for this one."""
        number = len({agent.number for agent in self._all}) if node is None else node
        place = self.site.place(number)
        words = ("--rdzv-backend=c10d", "--rdzv-id=job", *self.site.rendezvous(number), *self._flags, *flags)
        name = f"agent{len(self._all)}"
        agent = Agent(self.folder, self.plan, nproc, words, number, name=name, place=place, **self._more)
        agent.port = self.site.port
        self._all.append(agent)
        return agent

    def lose(self, agent: Agent) -> None:
        """The node dies: nothing more comes from it, not even the end of a connection."""
        agent.lost = True
        if self.network is not None:
            self.network.cut(node_name(agent.number))
            self.network.kill(node_name(agent.number))
            agent.process.wait()
        else:
            agent.kill_all()

    def back(self, agent: Agent, *flags: str) -> Agent:
        """A lost node is there again, with a new agent."""
        if self.network is not None:
            self.network.heal(node_name(agent.number))
        return self.join(*flags, node=agent.number, nproc=agent.nproc)

    def cut(self, agent: Agent) -> None:
        """The node's cable is pulled."""
        assert self.network is not None
        self.network.cut(node_name(agent.number))

    def heal(self, agent: Agent) -> None:
        """And plugged in again."""
        assert self.network is not None
        self.network.heal(node_name(agent.number))

    def go(self) -> None:
        """Lets ranks go on that the plan holds."""
        (self.folder / "go").touch()

    # Waiting, and what they came to.

    def until(self, condition: Callable[[], _T], what: str, limit_s: float = _LIMIT_S) -> _T:
        """Waits until `condition()` is true; returns its value. Fails at once when no agent runs, or one has a bug."""
        deadline = time.monotonic() + patient(limit_s)
        while True:
            codes = [agent.process.poll() for agent in self]
            if value := condition():
                return value
            assert None in codes and LAUNCHER_ERROR not in codes, f"ended with {codes} before {what}\n{self.tail()}"
            assert time.monotonic() < deadline, f"waited {limit_s} s for {what}\n{self.tail()}"
            time.sleep(_POLL_S)

    def until_cycle_of(self, nodes: int, limit_s: float = _LIMIT_S) -> int:
        """Waits until a cycle of so many nodes has begun on each of them; returns its number."""
        what = f"a cycle of {nodes} nodes"
        self.until(lambda: all(agent.event("cycle_start", nodes=nodes) for agent in self), what, limit_s)
        return self[0].cycles[-1]

    def until_train(self, iteration: int, world: int, cycle: int = 0, limit_s: float = _LIMIT_S) -> None:
        """Waits until the ranks of a cycle, `world` of them, have come to an iteration."""
        what = f"{world} ranks at iteration {iteration} of cycle {cycle}"
        self.until(lambda: self[0].trained(iteration, cycle, world), what, limit_s)

    def end(self, *codes: int, limit_s: float = _LIMIT_S) -> None:
        """Waits for all to end, and compares their exit codes, in the order of their start."""
        deadline = time.monotonic() + patient(limit_s)
        self.until(lambda: all(agent.process.poll() is not None for agent in self), "the end of all", limit_s)
        found = tuple(agent.finish(max(0.0, deadline - time.monotonic())) for agent in self)
        assert found == codes, f"ended with {found}, not {codes}\n{self.tail()}"

    def end_well(self, limit_s: float = _LIMIT_S) -> None:
        """Waits for all to end: with 0, but for those that were lost."""
        self.end(*(LOST if agent.lost else 0 for agent in self), limit_s=limit_s)

    def stay(self, seconds: float) -> None:
        """Watches for so long that no agent ends and no cycle begins."""
        before, deadline = self._standing(), time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self._standing() == before, f"{self._standing()} was {before}\n{self.tail()}"
            time.sleep(_WATCH_S)

    def _standing(self) -> list[tuple[int | None, list[int]]]:
        return [(agent.process.poll(), agent.cycles) for agent in self]

    def node_of(self, rank: int, cycle: int = 0) -> Agent:
        """The agent that has this rank in a cycle."""
        (found,) = (agent for agent in self if rank in agent.global_ranks(cycle))
        return found

    def trained(self, *parts: tuple[int, int], ranks: Iterable[int] | None = None) -> None:
        """I3: ranks came to what so many iterations each in worlds of so many ranks come to; all of the last world."""
        checked = range(parts[-1][1]) if ranks is None else list(ranks)
        found = [self[0].state(rank) for rank in checked]
        expected = [after(rank, *parts) for rank in checked]
        assert found == expected, f"I3: {found} is not {expected}\n{self.tail()}"

    def faults(self) -> list[tuple[str, int, int]]:
        """What all journals tell: kind, rank and cycle of each fault."""
        return [(line["kind"], line["rank"], line["cycle"]) for agent in self for line in agent.journal("fault")]

    def tail(self) -> str:
        """What helps to understand a failure."""
        return "\n".join(f"=== {agent.output_file.stem}, node {agent.number}\n{agent.tail()}" for agent in self)

    # The end.

    def nothing_left(self) -> None:
        """I1, for all of them; all must have ended, and each by itself unless it was lost."""
        running = [agent.output_file.stem for agent in self if agent.process.poll() is None]
        assert not running, f"the test ended before {running} did\n{self.tail()}"
        self.site.close()
        for agent in self:
            if not agent.lost:
                invariants.nothing_left(agent)
            assert not agent.processes(), agent.tail()
        invariants.decided_again(*(agent.journal_folder for agent in self))
        if self.network is not None:
            left = {node: pids for node in self.network.nodes if (pids := self.network.processes(node))}
            assert not left, f"I1: left over: {left}\n{self.tail()}"

    def kill_all(self) -> None:
        """Ends whatever there is, by pid."""
        for agent in self:
            agent.kill_all()
        self.site.close()
