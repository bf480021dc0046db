"""What a process gets that the launcher starts after it has raised its own limit of descriptors."""

from __future__ import annotations

import pytest

from tests.program import python

STARTS = """
import os, resource, subprocess, sys
from ft_launcher.node.processes import descriptor_limit
OPEN = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
descriptor_limit.raise_soft()
held = [os.open("/", os.O_PATH) for _ in range(OPEN)]
shows = "import resource, sys; sys.stdin.read() if sys.argv[1] == 'waits' else 0; "
shows += "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
with descriptor_limit.of_user() as give_back:
    # Given back only after the program has shown its limit, unless it is to wait.
    way = "waits" if OPEN > 200 else "at once"
    words, pipe = [sys.executable, "-c", shows, way], subprocess.PIPE
    child = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    if way == "at once":
        print("began with", child.communicate()[0].strip())
    give_back(child.pid)
if way == "waits":
    print("was given", child.communicate()[0].strip())
print("keeps", *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("held", "has"), [(0, "began with"), (300, "was given")])
def test_it_begins_with_the_users_limit(held: int, has: str) -> None:
    """Where so many descriptors are open that this is impossible, it gets it later."""
    assert python(STARTS, str(held)).stdout.splitlines() == [f"{has} 256 512", "keeps 512 512"]


LOWERED = """
import resource, subprocess, sys
from ft_launcher.node.processes import descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
descriptor_limit.raise_soft()
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
with descriptor_limit.of_user() as give_back:
    child = subprocess.Popen(["true"])
    give_back(child.pid)
print(child.wait(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_what_somebody_lowered_meanwhile_stays_so() -> None:
    assert python(LOWERED).stdout.split() == ["0", "128", "128"]
